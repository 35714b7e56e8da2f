-- failure_decision: what is to become of a hold whose attempt failed.
create type pgreaper.failure_decision as (
  outcome text,
  attempts integer,
  not_before timestamptz
);

comment on type pgreaper.failure_decision is 'retry or dead-letter, after how many attempts, and when it is tried again.';

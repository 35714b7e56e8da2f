-- failures: holds that failed at least once and wait for a retry, or are dead.
--
-- Dead means not_before = 'infinity', so that "may this be tried now?" is one
-- comparison.  A row whose deadline differs from the hold's speaks of an
-- earlier incarnation: it is ignored, then replaced.
create table pgreaper.failures (
  policy_id integer not null,
  key text not null,
  deadline timestamptz not null,
  attempts integer not null,
  first_seen_at timestamptz not null,
  failed_at timestamptz not null,
  not_before timestamptz not null,
  error_class text not null,
  sqlstate text,
  constraint_name text,
  discarded_at timestamptz,
  primary key (policy_id, key)
);

create index failures_not_before on pgreaper.failures (policy_id, not_before);
-- With the key: a million of them may have one deadline, and a planner without statistics looks up a single one here.
create index failures_deadline on pgreaper.failures (policy_id, deadline, key);

comment on table pgreaper.failures is 'Holds that wait for a retry, and dead letters.';
comment on column pgreaper.failures.policy_id is 'The policy.';
comment on column pgreaper.failures.key is 'The hold.';
comment on column pgreaper.failures.deadline is 'Its deadline when it failed: the incarnation that this row speaks of.';
comment on column pgreaper.failures.attempts is 'How often it was tried.';
comment on column pgreaper.failures.first_seen_at is 'When it failed first.';
comment on column pgreaper.failures.failed_at is 'When it failed last.';
comment on column pgreaper.failures.not_before is 'When it may be tried again; infinity: a dead letter.';
comment on column pgreaper.failures.error_class is 'Kind of the last failure, never its message.';
comment on column pgreaper.failures.sqlstate is 'SQLSTATE of the last failure.';
comment on column pgreaper.failures.discarded_at is 'When somebody decided to leave this dead letter be; it stays excluded and is no longer listed.';
comment on column pgreaper.failures.constraint_name is 'Constraint that refused the transition, if one did.';

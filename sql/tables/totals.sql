-- totals: counters carried over from rows that were pruned, so that what is
-- exported never goes back.
create table pgreaper.totals (
  policy_id integer primary key,
  expired bigint not null default 0,
  already_done bigint not null default 0,
  not_eligible bigint not null default 0,
  retry bigint not null default 0,
  dead_letter bigint not null default 0,
  taken_back bigint not null default 0
);

comment on table pgreaper.totals is 'Counters of rows that retention has removed.';
comment on column pgreaper.totals.policy_id is 'The policy.';
comment on column pgreaper.totals.expired is 'Transitions.';
comment on column pgreaper.totals.already_done is 'Holds found expired already.';
comment on column pgreaper.totals.not_eligible is 'Holds found consumed, extended or gone.';
comment on column pgreaper.totals.retry is 'Failures that led to a retry.';
comment on column pgreaper.totals.dead_letter is 'Failures that led to a dead letter.';
comment on column pgreaper.totals.taken_back is 'Leases taken back.';

-- totals: what ever happened, counted as it happens, so that looking is cheap and what is
-- exported never goes back, whatever reaper_prune removes.
--
-- A policy's counters are the sums over its rows.  Each transaction adds to a row that nobody
-- else has locked, so counting makes nobody wait; there are as many rows as there ever were
-- transactions at once.  The page is kept nearly empty: a new version touches no index.
create table pgreaper.totals (
  total_id bigint generated always as identity primary key,
  policy_id integer not null,
  expired bigint not null default 0,
  already_done bigint not null default 0,
  not_eligible bigint not null default 0,
  retry bigint not null default 0,
  dead_letter bigint not null default 0,
  taken_back bigint not null default 0,
  lateness bigint[] not null default '{}',
  last_success timestamptz
) with (fillfactor = 10);

create index totals_policy on pgreaper.totals (policy_id);

comment on table pgreaper.totals is 'Counters since a policy was registered: the sums over its rows.';
comment on column pgreaper.totals.total_id is 'Tells the rows of a policy apart.';
comment on column pgreaper.totals.policy_id is 'The policy.';
comment on column pgreaper.totals.expired is 'Transitions.';
comment on column pgreaper.totals.already_done is 'Holds found expired already.';
comment on column pgreaper.totals.not_eligible is 'Holds found consumed, extended or gone.';
comment on column pgreaper.totals.retry is 'Failures that led to a retry.';
comment on column pgreaper.totals.dead_letter is 'Failures that led to a dead letter.';
comment on column pgreaper.totals.taken_back is 'Leases taken back.';
comment on column pgreaper.totals.lateness is 'Transitions per lateness bucket; bounds: pgreaper._lateness_bounds().';
comment on column pgreaper.totals.last_success is 'The last transition counted here.';

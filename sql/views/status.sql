-- status: what an operator asks first, a row per policy.
create view pgreaper.status as
select p.name as policy,
       format('%I.%I', p.target_schema, p.target_table) as target,
       p.owner,
       s.state,
       s.reason,
       s.due,
       s.due_capped,
       s.oldest_deadline,
       s.oldest_due,
       s.oldest_retry,
       s.leased,
       s.retrying,
       s.dead,
       s.expired,
       s.already_done,
       s.not_eligible,
       s.retries,
       s.dead_letters,
       s.taken_back,
       s.duplicate_rate,
       p.objective,
       s.lateness_p50,
       s.lateness_p99,
       s.lateness_max,
       s.start_p50,
       s.start_p99,
       s.finish_p50,
       s.finish_p99,
       s.clock_skew,
       s.last_success
  from pgreaper.policies as p
 cross join lateral pgreaper._status(p) as s
 where p.unregistered_at is null;

comment on view pgreaper.status is 'One row per policy: what is due, leased, failing and dead, and how late.';
comment on column pgreaper.status.policy is 'Name of the policy.';
comment on column pgreaper.status.target is 'Its table or view.';
comment on column pgreaper.status.owner is 'Whose dead letters these are.';
comment on column pgreaper.status.state is 'active, paused, passive: a copy that a logical subscription brings, suspended: every hold fails alike, or broken: the target cannot be read.';
comment on column pgreaper.status.reason is 'Why it is not active.';
comment on column pgreaper.status.due is 'Holds that are due, under no living lease and have not failed; at most 10000.';
comment on column pgreaper.status.due_capped is 'Whether there are more than that.';
comment on column pgreaper.status.oldest_deadline is 'Deadline of the oldest of them.';
comment on column pgreaper.status.oldest_due is 'How long the oldest has been due; at most 100 years.';
comment on column pgreaper.status.oldest_retry is 'For how long the retry that waits longest could have been tried; NULL: the time of none has come.';
comment on column pgreaper.status.leased is 'Holds under a lease.';
comment on column pgreaper.status.retrying is 'Holds that failed and wait for their retry; at most 10000.';
comment on column pgreaper.status.dead is 'Dead letters; at most 10000.';
comment on column pgreaper.status.expired is 'Transitions since the policy was registered.';
comment on column pgreaper.status.already_done is 'Holds that were found expired already, since the policy was registered.';
comment on column pgreaper.status.not_eligible is 'Holds that were found consumed, extended or gone, since the policy was registered.';
comment on column pgreaper.status.retries is 'Failures that led to a retry, since the policy was registered.';
comment on column pgreaper.status.dead_letters is 'Failures that led to a dead letter, since the policy was registered.';
comment on column pgreaper.status.taken_back is 'Leases that were taken back, since the policy was registered.';
comment on column pgreaper.status.duplicate_rate is 'Of all outcomes, the share that found the hold expired already; NULL before the first.';
comment on column pgreaper.status.objective is 'The lateness that is promised.';
comment on column pgreaper.status.lateness_p50 is 'Median lateness of the last 5 minutes.';
comment on column pgreaper.status.lateness_p99 is '99th percentile of lateness of the last 5 minutes.';
comment on column pgreaper.status.lateness_max is 'Greatest lateness of the last 5 minutes.';
comment on column pgreaper.status.start_p50 is 'Median time from claim to the first settled hold, of the last 5 minutes.';
comment on column pgreaper.status.start_p99 is '99th percentile of the time from claim to the first settled hold, of the last 5 minutes.';
comment on column pgreaper.status.finish_p50 is 'Median time from claim to finish of the last 5 minutes.';
comment on column pgreaper.status.finish_p99 is '99th percentile of the time from claim to finish of the last 5 minutes.';
comment on column pgreaper.status.clock_skew is 'By how much the clock of a worker of the last 5 minutes was ahead of the database''s; the worst one.';
comment on column pgreaper.status.last_success is 'The last transition.';

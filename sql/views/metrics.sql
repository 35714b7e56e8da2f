-- metrics: what an exporter needs, a row per policy, in seconds and plain numbers.
--
-- Columns that end in `total` only grow, also across reaper_prune() and restarts.
create view pgreaper.metrics as
select p.name as policy,
       p.owner,
       s.state,
       s.due,
       case when s.due is not null
            then greatest(0, extract(epoch from greatest(s.oldest_due, s.oldest_retry))) end::double precision as oldest_due_seconds,
       s.leased,
       s.retrying,
       s.dead,
       coalesce(extract(epoch from pgreaper._clock() - d.failed_at), 0)::double precision as oldest_dead_letter_seconds,
       extract(epoch from p.objective)::double precision as objective_seconds,
       coalesce(extract(epoch from pgreaper._clock() - p.paused_at), 0)::double precision as paused_seconds,
       extract(epoch from s.last_success)::double precision as last_success_timestamp_seconds,
       extract(epoch from s.clock_skew)::double precision as clock_skew_seconds,
       s.expired as expired_total,
       s.already_done as already_done_total,
       s.not_eligible as not_eligible_total,
       s.retries as retry_total,
       s.dead_letters as dead_letter_total,
       s.taken_back as taken_back_total,
       l.bounds as lateness_bounds,
       l.counts as lateness_counts
  from pgreaper.policies as p
 cross join lateral pgreaper._status(p) as s
  left join lateral (
    select min(f.failed_at) as failed_at
      from (select f.failed_at from pgreaper.failures as f
             where f.policy_id = p.policy_id and f.not_before = 'infinity' and f.discarded_at is null
             limit 10000) as f
  ) as d on true
 cross join lateral (
    select array_agg(b.bound order by b.bucket) as bounds,
           array_agg(b.counted order by b.bucket) as counts
      from (
        select e.bucket, e.bound, (sum(coalesce(c.holds, 0)) over (order by e.bucket))::bigint as counted
          from unnest(pgreaper._lateness_bounds() || 'infinity'::double precision) with ordinality as e (bound, bucket)
          left join (
            select u.bucket, sum(u.holds) as holds
              from pgreaper.totals as t
             cross join lateral unnest(t.lateness) with ordinality as u (holds, bucket)
             where t.policy_id = p.policy_id
             group by u.bucket
          ) as c on c.bucket = e.bucket
      ) as b
  ) as l
 where p.unregistered_at is null;

comment on view pgreaper.metrics is 'What an exporter needs, a row per policy: seconds and plain numbers.';
comment on column pgreaper.metrics.policy is 'Name of the policy.';
comment on column pgreaper.metrics.owner is 'Whose dead letters these are.';
comment on column pgreaper.metrics.state is 'As in the view status.';
comment on column pgreaper.metrics.due is 'Holds that are due, under no living lease and have not failed; at most 10000, NULL: the target cannot be read.';
comment on column pgreaper.metrics.oldest_due_seconds is 'How long the hold that has waited longest has been due: free, left behind by a worker, or a retry since its time; 0: none waits, NULL: the target cannot be read.';
comment on column pgreaper.metrics.leased is 'Holds under a lease.';
comment on column pgreaper.metrics.retrying is 'Holds that failed and wait for their retry; at most 10000.';
comment on column pgreaper.metrics.dead is 'Dead letters; at most 10000.';
comment on column pgreaper.metrics.oldest_dead_letter_seconds is 'Age of the oldest dead letter of at most 10000; 0: there is none.';
comment on column pgreaper.metrics.objective_seconds is 'The lateness that is promised.';
comment on column pgreaper.metrics.paused_seconds is 'Since when it is paused; 0: it is not.';
comment on column pgreaper.metrics.last_success_timestamp_seconds is 'Unix time of the last transition; NULL before the first.';
comment on column pgreaper.metrics.clock_skew_seconds is 'By how much a worker''s clock was ahead of the database''s in the last 5 minutes; the worst one.';
comment on column pgreaper.metrics.expired_total is 'Transitions.';
comment on column pgreaper.metrics.already_done_total is 'Holds found expired already.';
comment on column pgreaper.metrics.not_eligible_total is 'Holds found consumed, extended or gone.';
comment on column pgreaper.metrics.retry_total is 'Failures that led to a retry.';
comment on column pgreaper.metrics.dead_letter_total is 'Failures that led to a dead letter.';
comment on column pgreaper.metrics.taken_back_total is 'Leases taken back.';
comment on column pgreaper.metrics.lateness_bounds is 'Upper bounds of the lateness buckets, in seconds; the last is infinity.';
comment on column pgreaper.metrics.lateness_counts is 'Transitions no later than each of these bounds.';

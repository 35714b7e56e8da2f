-- activity: what was expired, minute by minute, in the last quarter of an hour.
create view pgreaper.activity as
select p.name as policy,
       m.minute,
       coalesce(t.expired, 0) as expired
  from pgreaper.policies as p
 cross join lateral (
    select pgreaper._clock() as now
  ) as c
 cross join lateral generate_series(date_trunc('minute', c.now) - interval '14 minutes', c.now, interval '1 minute') as m (minute)
  left join lateral (
    select date_trunc('minute', w.at) as minute, sum(w.holds)::bigint as expired
      from (
        select t.at, t.holds
          from pgreaper.transitions as t
         where t.policy_id = p.policy_id
           and t.at >= date_trunc('minute', c.now) - interval '14 minutes'
      ) as w
     group by 1
  ) as t on t.minute = m.minute
 where p.unregistered_at is null;

comment on view pgreaper.activity is 'Transitions per policy and minute of the last quarter of an hour.';
comment on column pgreaper.activity.policy is 'Name of the policy.';
comment on column pgreaper.activity.minute is 'When the minute began; the last one is not over.';
comment on column pgreaper.activity.expired is 'Transitions in it.';

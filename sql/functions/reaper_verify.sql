-- reaper_verify: check from the books and the target that the invariants hold.
--
-- Reads the whole trail and compares it with the target as it is now; meant for after an
-- incident or a restore, and for tests, not for a monitor.
--
--   once          no incarnation (key and deadline) is in the trail twice: not in one statement,
--                 and not from a claim or sweep that began before the other time
--   held anew     (only when there are any, and no violation) expired again from a claim or sweep
--                 that began later: it reads held rows only, so the application had set the
--                 hold back to held with the same deadline
--   not early     nothing made the transition before its deadline
--   kept          what the trail says has expired, and still has that deadline, is not held;
--                 what the application set back is told here until it has expired again
--   accounted     nothing is due beyond the objective that is neither leased, failed nor locked,
--                 by one transaction or by several that share the row's lock
--   closed        no failure speaks of a hold that the trail has expired
--   readable      (only when it is not) the target can be read
--   consistent    what the claims counted as expired is what the trail holds for them
--
-- `accounted` speaks of now: a backlog that is being worked on violates it until it is gone.
--
-- Promises
--   * Writes nothing; one row per policy and invariant.
--
-- Raises
--   RP002  no such policy.
create function pgreaper.reaper_verify(
  policy text default null,
  search_path text default pg_catalog.current_setting('search_path')
)
returns setof pgreaper.verification
language plpgsql
volatile
security invoker
set lock_timeout = '2s'
set jit = off
set search_path = pg_catalog, pg_temp
as $function$
declare
  v_now constant timestamptz := pgreaper._clock();
  v_policy pgreaper.policies;
  v_target pgreaper._target;
  v_cutoff timestamptz;
  v_statement text;
  v_anew bigint;
  v_anew_example text;
  v_row pgreaper.verification;
begin
  if reaper_verify.policy is not null then
    perform pgreaper._policy(reaper_verify.policy);
  end if;

  for v_policy in
    select p.* from pgreaper.policies as p
     where p.unregistered_at is null
       and (reaper_verify.policy is null or p.name = reaper_verify.policy)
     order by p.name
  loop
    begin
      v_row.policy := v_policy.name;
      v_target := pgreaper._target(v_policy, reaper_verify.search_path);

      -- A claim takes rows that are held, so one that began after the other transition met the hold held again.
      v_row.invariant := 'once';
      select count(*) filter (where d.twice), min(d.key) filter (where d.twice), count(*), min(d.key) filter (where not d.twice)
        into v_row.found, v_row.example, v_anew, v_anew_example
        from (
          select e.key, bool_or(e.began <= e.before) as twice
            from (
              select h.key, h.deadline, coalesce(c.claimed_at, t.at) as began,
                     lag(t.at) over (partition by h.key, h.deadline order by t.at, t.transition_id) as before
                from pgreaper.transitions as t
               cross join lateral unnest(t.keys, t.deadlines) as h (key, deadline)
                left join pgreaper.claims as c on c.token = t.token
               where t.policy_id = v_policy.policy_id
            ) as e
           group by e.key, e.deadline
          having count(*) > 1
        ) as d;
      v_row.holds := v_row.found = 0;
      return next v_row;
      if v_anew > v_row.found then
        v_row := row(v_row.policy, 'held anew', true, v_anew - v_row.found, v_anew_example)::pgreaper.verification;
        return next v_row;
      end if;

      v_row.invariant := 'not early';
      select count(*), min(h.key) into v_row.found, v_row.example
        from pgreaper.transitions as t
       cross join lateral unnest(t.keys, t.deadlines) as h (key, deadline)
       where t.policy_id = v_policy.policy_id
         and h.deadline > t.at;
      v_row.holds := v_row.found = 0;
      return next v_row;

      v_row.invariant := 'kept';
      v_cutoff := v_now - v_policy.grace;
      v_statement := format(
        'select pg_catalog.count(*), pg_catalog.min(f.key)'
        '  from (select %1$s as key, %2$s as deadline from %3$s as h where %4$s and %5$s) as f'
        '  join (select k.key, k.deadline from pgreaper.transitions as t cross join lateral unnest(t.keys, t.deadlines) as k (key, deadline)'
        '         where t.policy_id operator(pg_catalog.=) $4) as t'
        '    on t.key operator(pg_catalog.=) f.key and t.deadline operator(pg_catalog.=) f.deadline',
        v_target.key, v_target.deadline, v_target.relation, v_target.held, v_target.due);
      perform set_config('search_path', v_target.search_path, true);
      execute v_statement
         into v_row.found, v_row.example
        using v_cutoff, null, null, v_policy.policy_id;
      perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
      v_row.holds := v_row.found = 0;
      return next v_row;

      v_row.invariant := 'accounted';
      v_cutoff := v_now - v_policy.grace - v_policy.objective;
      v_statement := format(
        'select pg_catalog.count(*), pg_catalog.min(f.key)'
        '  from (select %1$s as key, %2$s as deadline from %3$s as h where %4$s and %5$s and %6$s) as f'
        ' where not exists (select from pgreaper.failures as x where x.policy_id operator(pg_catalog.=) $4'
        '                      and x.key operator(pg_catalog.=) f.key and x.deadline operator(pg_catalog.=) f.deadline)'
        '   and not exists (select from pgreaper.claims as c where c.policy_id operator(pg_catalog.=) $4'
        '                      and c.finished_at is null and f.key operator(pg_catalog.=) any (c.keys))',
        v_target.key, v_target.deadline, v_target.relation, v_target.held, v_target.due,
        case when v_target.plain then pgreaper._unlocked() else 'true' end);
      perform set_config('search_path', v_target.search_path, true);
      execute v_statement
         into v_row.found, v_row.example
        using v_cutoff, null, null, v_policy.policy_id;
      perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
      v_row.holds := v_row.found = 0;
      return next v_row;

      v_row.invariant := 'closed';
      select count(*), min(f.key) into v_row.found, v_row.example
        from pgreaper.failures as f
       where f.policy_id = v_policy.policy_id
         and exists (
           select from pgreaper.transitions as t
            where t.policy_id = f.policy_id
              and tstzrange(t.first_deadline, t.last_deadline, '[]') @> f.deadline
              and exists (select from unnest(t.keys, t.deadlines) as k (key, deadline)
                           where k.key = f.key and k.deadline = f.deadline));
      v_row.holds := v_row.found = 0;
      return next v_row;

      v_row.invariant := 'consistent';
      select count(*), min(c.token::text) into v_row.found, v_row.example
        from pgreaper.claims as c
       where c.policy_id = v_policy.policy_id
         and c.ending = 'expired'
         and c.expired <> (select coalesce(sum(t.holds), 0) from pgreaper.transitions as t where t.token = c.token);
      v_row.holds := v_row.found = 0;
      return next v_row;
    exception
      -- One broken policy must not hide the others; the example is the SQLSTATE.
      when others then
        v_row.invariant := 'readable';
        v_row.holds := false;
        v_row.found := 1;
        v_row.example := sqlstate;
        return next v_row;
    end;
  end loop;
end;
$function$;

comment on function pgreaper.reaper_verify(text, text) is 'Check from the books and the target that the invariants hold; a row per policy and invariant.';

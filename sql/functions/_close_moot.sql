-- _close_moot: close dead letters whose hold has nothing left to do.
--
-- Called by what has found nothing else to do, a claim or a sweep, and by a claim that rescans.
-- Neither may be kept waiting by this, so it comes last in a transaction.
--
-- Promises
--   * Each is recorded as `moot`, with the state that was found; nobody is charged.
--   * Waits for no row: a dead letter that somebody has locked is left to the next call.
--   * Nothing to close: writes nothing and takes no transaction id.  No dead letter: one index probe.
create function pgreaper._close_moot(
  policy pgreaper.policies,
  worker text,
  search_path text
)
returns void
language plpgsql
volatile
security invoker
set lock_timeout = '200ms'
set jit = off
set search_path = pg_catalog, pg_temp
as $function$
declare
  v_now constant timestamptz := pgreaper._clock();
  v_moot record;
begin
  -- The greatest one by its index: with EXISTS the planner hopes to meet one early, and reads them all.
  if (select max(f.not_before) from pgreaper.failures as f where f.policy_id = policy.policy_id) is distinct from 'infinity' then
    return;
  end if;
  v_moot := pgreaper._moot(policy, pgreaper._target(policy, _close_moot.search_path), v_now);
  if cardinality(v_moot.keys) = 0 then
    return;
  end if;

  with closed as (
    delete from pgreaper.failures as f
     using (
       select m.key, k.state
         from pgreaper.failures as m
         join unnest(v_moot.keys, v_moot.deadlines, v_moot.states) as k (key, deadline, state)
           on m.key = k.key and m.deadline = k.deadline
        where m.policy_id = policy.policy_id and m.not_before = 'infinity'
        order by m.key
          for update of m skip locked
     ) as l
     where f.policy_id = policy.policy_id
       and f.key = l.key
    returning f.key, f.deadline, f.attempts, f.discarded_at, l.state
  )
  insert into pgreaper.events (policy_id, key, deadline, kind, state, worker, at, attempts)
  select policy.policy_id, c.key, c.deadline, 'moot', c.state, _close_moot.worker, v_now, c.attempts
    from closed as c
   order by c.key;
end;
$function$;

comment on function pgreaper._close_moot(pgreaper.policies, text, text) is
'Close dead letters whose hold has nothing left to do; waits for nobody.';

-- _close_moot: close dead letters whose hold has nothing left to do.
--
-- Called by what has found nothing else to do, a claim or a sweep, and by a claim that rescans.
-- Neither may be kept waiting by this, so it comes last in a transaction.
--
-- Who has the time says how often it may look: where half of what a look saw was moot, as after an event was called off,
-- there is more of it.
--
-- Promises
--   * Each is recorded as `moot`, with the state that was found; nobody is charged.
--   * Waits for no row: a dead letter that somebody has locked is left to the next call.
--   * Nothing to close: writes nothing and takes no transaction id.  No dead letter: one index probe.
--   * Closes at most 1000 for each look.
create function pgreaper._close_moot(
  policy pgreaper.policies,
  worker text,
  search_path text,
  looks integer default 1
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
  c_many constant integer := 500;
  v_now constant timestamptz := pgreaper._clock();
  v_target pgreaper._target;
  v_moot record;
begin
  -- The greatest one by its index: with EXISTS the planner hopes to meet one early, and reads them all.
  if (select max(f.not_before) from pgreaper.failures as f where f.policy_id = policy.policy_id) is distinct from 'infinity' then
    return;
  end if;
  v_target := pgreaper._target(policy, _close_moot.search_path);

  for v_look in 1 .. _close_moot.looks loop
    v_moot := pgreaper._moot(policy, v_target, v_now);
    exit when cardinality(v_moot.keys) = 0;

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
      returning f.key, f.deadline, f.attempts, l.state
    )
    insert into pgreaper.events (policy_id, key, deadline, kind, state, worker, at, attempts)
    select policy.policy_id, c.key, c.deadline, 'moot', c.state, _close_moot.worker, v_now, c.attempts
      from closed as c
     order by c.key;
    exit when cardinality(v_moot.keys) < c_many;
  end loop;
end;
$function$;

comment on function pgreaper._close_moot(pgreaper.policies, text, text, integer) is
'Close dead letters whose hold has nothing left to do; waits for nobody.';

-- reaper_expire_keys: expire the holds that somebody names, those that are due.
--
-- For commands from outside, such as a delayed message of a queue or a scheduler of the
-- application's: "expire reservation 42".  Whoever commands decides nothing: the guard is that of a
-- sweep, and a command may come early, late, twice or in any order.  Two more outcomes than
-- reaper_expire has say that it must come again, and one that it never should:
--
--   not-due    held, and its deadline + grace is `due_at`
--   resting    due, but not now: the policy is paused, passive or suspended, or over its rate limit;
--              ask again at `due_at`, NULL: nobody knows
--   wrong-key  no hold of this policy could have such a key
--
-- `retry` comes with the time of the next try as `due_at`.  A hold that failed before is not tried
-- sooner because of a command, and a dead letter not at all.
--
-- A lease keeps nobody from it: of this and the worker's transition one wins.  No handler is called
-- here, so holds that need one belong to `pgreaper work` alone.
--
-- Promises
--   * The target's update and the trail commit together.
--   * Each key that was given comes back once, spelled as it was given, in any order.
--   * Waits for no row that somebody else has locked, which is `locked`; for one that is locked in the instant of the update, 10 ms.
--   * A hold that nothing was found to do for is recorded like any conflict; a key that no hold
--     has, an early command and a resting policy write nothing.
--   * A call for more keys than one that the statement timeout cancels charges nobody: ask again with fewer.
--     One for a single key charges its hold, if it had the time to itself.
--
-- Raises
--   RP002  no such policy.     RP004  not READ COMMITTED, or a read-only node.
--   22023  keys is NULL or has a NULL in it, or more than 10000.
--   55P03  the target stayed locked as a whole; nothing happened, try again.
create function pgreaper.reaper_expire_keys(
  policy text,
  keys text[],
  worker text default null,
  search_path text default pg_catalog.current_setting('search_path')
)
returns setof pgreaper.command_outcome
language plpgsql
volatile
security invoker
set lock_timeout = '200ms'
set jit = off
set search_path = pg_catalog, pg_temp
as $function$
declare
  c_probe constant integer := 8;
  c_most constant integer := 10000;
  v_policy constant pgreaper.policies := pgreaper._policy(reaper_expire_keys.policy);
  v_worker constant text := coalesce(reaper_expire_keys.worker, nullif(current_setting('application_name'), ''));
  v_now constant timestamptz := pgreaper._clock();
  v_began constant timestamptz := clock_timestamp();
  v_own_transaction constant boolean := pg_current_xact_id_if_assigned() is null;
  v_target pgreaper._target;
  v_cursor pgreaper.cursors;
  v_suspicion record;
  v_resting boolean;
  v_until timestamptz;
  v_wanted integer := c_most;
  v_named pgreaper._named_hold[];
  v_moved pgreaper._named_hold[];
  v_batch pgreaper._batch;
  v_result record;
  v_expired text[] := '{}';
  v_others pgreaper.hold_outcome[] := '{}';
begin
  perform pgreaper._require_writable();

  if reaper_expire_keys.keys is null or array_position(reaper_expire_keys.keys, null) is not null then
    raise invalid_parameter_value using message = 'keys must not be NULL, and have no NULL in it';
  elsif cardinality(reaper_expire_keys.keys) > c_most then
    raise invalid_parameter_value
      using message = format('at most %s keys go into a call, not %s', c_most, cardinality(reaper_expire_keys.keys)),
            hint = 'Give them in several calls: one transaction would hold too many row locks for too long.';
  elsif cardinality(reaper_expire_keys.keys) = 0 then
    return;
  end if;

  v_target := pgreaper._target(v_policy, reaper_expire_keys.search_path);
  v_target.instant := (pgreaper._target(v_policy, reaper_expire_keys.search_path, application => true)).instant;
  v_target.settle := coalesce(v_target.settle, true) and v_own_transaction;
  v_named := array(
    select n from pgreaper._named_holds(v_policy, v_target, v_now, array(select distinct k.key from unnest(reaper_expire_keys.keys) as k (key))) as n);

  -- Whether the policy lets any go now, and how many.
  select c.* into v_cursor from pgreaper.cursors as c where c.policy_id = v_policy.policy_id;
  v_suspicion := pgreaper._suspicion(v_policy, v_cursor);
  v_resting := v_policy.paused_at is not null or pgreaper._subscription(v_policy) is not null;
  if not v_resting and v_suspicion.suspect then
    v_resting := v_suspicion.until > v_now;
    v_until := greatest(v_suspicion.until, v_now + interval '1 second');
    v_wanted := c_probe;
  end if;
  if v_policy.rate_limit is not null then
    v_wanted := least(v_wanted, floor(pgreaper._allowance(v_policy, v_now, v_cursor.rate_tokens, v_cursor.rate_at))::integer);
  end if;
  if v_resting then
    v_wanted := 0;
  end if;

  -- The longest overdue first.
  select coalesce(array_agg(c.key order by c.deadline, c.key), '{}'), coalesce(array_agg(c.deadline order by c.deadline, c.key), '{}'),
         array_agg(c.hint order by c.deadline, c.key), 1, 'command'
    into v_batch
    from (
      select distinct n.key, n.deadline, n.hint
        from unnest(v_named) as n
       where n.held and n.due
         and not exists (select from pgreaper.failures as f
                          where f.policy_id = v_policy.policy_id and f.key = n.key and f.deadline = n.deadline and f.not_before > v_now)
       order by n.deadline, n.key
       limit greatest(v_wanted, 0)
    ) as c;

  if cardinality(v_batch.keys) > 0 then
    perform pgreaper._may_write(v_policy);
    begin
      v_result := pgreaper._transition(v_policy, v_target, v_now, null, v_worker, v_batch);
      v_expired := v_result.expired;
      v_others := v_result.others;
    exception
      when query_canceled then
        if cardinality(v_batch.keys) > 1 or not pgreaper._outlasted(v_began) then
          raise;
        end if;
        v_others := array(
          select f from pgreaper._fail(v_policy, v_now, v_batch.keys, v_batch.deadlines, null, v_worker,
            transient => true, error_class => 'StatementTimeout', sqlstate => '57014') as f);
    end;
    perform pgreaper._spend(v_policy, v_now, cardinality(v_batch.keys));
  end if;

  -- Extended in this very moment: as if the command had come a little later.
  if exists (select from unnest(v_others) as o where o.outcome = 'not-eligible') then
    v_moved := array(
      select n
        from pgreaper._named_holds(v_policy, v_target, v_now,
               array(select o.key from unnest(v_others) as o where o.outcome = 'not-eligible')) as n
       where n.held and not n.due);
  end if;

  -- A command for what is over is a conflict like that of a claim.
  insert into pgreaper.events (policy_id, key, deadline, kind, state, worker, at)
  select distinct v_policy.policy_id, n.key, n.deadline, case when n.ended then 'already-done' else 'not-eligible' end, n.state, v_worker, v_now
    from unnest(v_named) as n
   where n.key is not null
     and not n.held;

  select c.* into v_cursor from pgreaper.cursors as c where c.policy_id = v_policy.policy_id;
  return query
    select a.name,
           a.outcome,
           a.state,
           case a.outcome
             when 'not-due' then a.deadline + v_policy.grace
             when 'retry' then coalesce(a.not_before, v_cursor.suspended_until)
             -- Each at the time when the rate limit lets it go, so that they do not come back together.
             when 'resting' then case when not v_resting and v_policy.rate_limit is not null
                                      then greatest(v_until, v_now + make_interval(secs => a.place / v_policy.rate_limit))
                                      else v_until end
           end
      from (
        select n.name, case when o.outcome in ('expired', 'not-eligible') then o.state else n.state end as state, coalesce(m.deadline, n.deadline) as deadline, f.not_before,
               row_number() over (partition by o.outcome is null and n.due and n.held order by n.deadline) as place,
               case
                 when n.wrong then 'wrong-key'
                 when n.ended then 'already-done'
                 when (n.held and not n.due) or m.key is not null then
                   -- There is no year 200000 in a calendar: never.
                   case when coalesce(m.deadline, n.deadline) < '200000-01-01' then 'not-due' else 'not-eligible' end
                 when n.held is not true then 'not-eligible'
                 when o.outcome is not null then o.outcome
                 when f.not_before = 'infinity' then 'dead-letter'
                 when f.not_before > v_now then 'retry'
                 else 'resting'
               end as outcome
          from unnest(v_named) as n
          left join (
            select e.key, 'expired' as outcome, coalesce(v_policy.expired, 'expired') as state from unnest(v_expired) as e (key)
            union all
            select u.key, u.outcome, u.state from unnest(v_others) as u
          ) as o on o.key = n.key
          left join unnest(v_moved) as m on m.key = n.key
          left join pgreaper.failures as f on f.policy_id = v_policy.policy_id and f.key = n.key and f.deadline = n.deadline
      ) as a;

  -- Should a trigger have set the path for the whole session, ours would stay until the caller's commit.
  perform set_config('search_path', reaper_expire_keys.search_path, true);
end;
$function$;

comment on function pgreaper.reaper_expire_keys(text, text[], text, text) is
'Expire the holds with these keys, those that are due: key, outcome, state, and when to ask again.';

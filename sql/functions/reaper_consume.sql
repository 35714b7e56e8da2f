-- reaper_consume: the application takes a hold for good, if it is still alive.
--
-- The other side of the race, under the same guard: a hold is due when deadline + grace <= clock
-- and alive when it is later, so of this and the reaper's transition exactly one wins.  Part of the
-- application's own transaction: what belongs to it (the payment, the order) commits with it or
-- not at all.
--
-- Promises
--   * `consumed`: the row was held and alive by the clock after its lock was granted, and has
--     the consumed state now (and the stamp).  One UPDATE; nothing else is written.
--   * `already-done`: it was consumed before.  A call that is repeated harms nothing.
--   * `not-eligible`: with the state found: expired, cancelled, held but due; NULL: no such hold.
--   * Waits for whoever has the row, as any UPDATE does: the caller's lock_timeout decides.
--   * The row stays locked until the caller's transaction ends; the reaper passes it by.
--
-- Raises
--   RP002  no such policy.     RP004  a read-only node or transaction.
--   22023  the policy does not know the consumed state.     22P02  no key of this target.
--   40001  the row changed since the caller's REPEATABLE READ or SERIALIZABLE began: begin anew.
create function pgreaper.reaper_consume(
  policy text,
  key text,
  search_path text default pg_catalog.current_setting('search_path')
)
returns pgreaper.hold_answer
language plpgsql
volatile
security invoker
set search_path = pg_catalog, pg_temp
as $function$
declare
  v_policy constant pgreaper.policies := pgreaper._application(reaper_consume.policy, reaper_consume.key);
  v_target constant pgreaper._target := pgreaper._target(v_policy, reaper_consume.search_path, application => true);
  v_now timestamptz;
  v_hold pgreaper._hold;
  v_outcome text := 'not-eligible';
begin
  if v_target.consumed is null then
    raise invalid_parameter_value
      using message = format('policy %I does not say what a consumed hold looks like', v_policy.name),
            hint = 'Register it again with consumed => ''…'', the state, or with a consumed_stamp_column where there is no status.';
  end if;

  if pgreaper._lock_hold(v_policy, v_target, reaper_consume.key, array[v_policy.status_column, v_policy.consumed_stamp_column]) then
    v_now := pgreaper._clock();
    v_hold := pgreaper._change_hold(v_policy, v_target, reaper_consume.key, v_now, null, v_target.consuming, v_target.held);
    if v_hold.consumed then
      v_outcome := 'consumed';
    elsif v_hold.key is null then
      v_hold := pgreaper._see_hold(v_policy, v_target, reaper_consume.key, v_now);
      if v_hold.consumed then
        v_outcome := 'already-done';
      end if;
    end if;
  end if;

  return row(coalesce(v_hold.key, reaper_consume.key), v_outcome, v_hold.state, v_hold.deadline, null)::pgreaper.hold_answer;
end;
$function$;

comment on function pgreaper.reaper_consume(text, text, text) is
'The application takes a hold for good, if it is still alive: consumed, already-done or not-eligible with the state found.';

-- reaper_extend: the application keeps a hold for longer, if it is still alive.
--
-- Never for shorter: calls that are repeated or overtake one another leave the latest of their
-- deadlines.  Whoever wants an earlier one says so with an UPDATE of his own.
--
-- `until` is an instant.  A deadline column without a zone gets it in the declared zone; one of
-- type date gets the first day that ends no sooner.  The answer has the deadline as it was stored.
--
-- Promises
--   * `extended`: the row was held and alive by the clock after its lock was granted, and lasts
--     until then now.  One UPDATE; nothing else is written.
--   * `already-done`: it is alive and lasts as long or longer; nothing is written.
--   * `not-eligible`: with the state found: expired, consumed, held but due; NULL: no such hold.
--   * Waits for whoever has the row, as any UPDATE does: the caller's lock_timeout decides.
--
-- Raises
--   RP002  no such policy.     RP004  a read-only node or transaction.
--   22023  until is not later than now.     22P02  no key of this target.
--   40001  the row changed since the caller's REPEATABLE READ or SERIALIZABLE began: begin anew.
create function pgreaper.reaper_extend(
  policy text,
  key text,
  until timestamptz,
  search_path text default pg_catalog.current_setting('search_path')
)
returns pgreaper.hold_answer
language plpgsql
volatile
security invoker
set search_path = pg_catalog, pg_temp
as $function$
declare
  v_policy constant pgreaper.policies := pgreaper._application(reaper_extend.policy, reaper_extend.key, reaper_extend.until);
  v_target constant pgreaper._target := pgreaper._target(v_policy, reaper_extend.search_path, application => true);
  v_now timestamptz;
  v_hold pgreaper._hold;
  v_outcome text := 'not-eligible';
begin
  if pgreaper._lock_hold(v_policy, v_target, reaper_extend.key, array[v_policy.deadline_column]) then
    -- The wait may have been long.
    perform pgreaper._application(reaper_extend.policy, reaper_extend.key, reaper_extend.until);
    v_now := pgreaper._clock();
    v_hold := pgreaper._change_hold(v_policy, v_target, reaper_extend.key, v_now, reaper_extend.until,
      v_target.extending, format('%s and %s', v_target.held, v_target.shorter));
    if v_hold.key is not null then
      if v_hold.due then
        raise invalid_parameter_value
          using message = format('until is too near for column %I, which makes it %s', v_policy.deadline_column, v_hold.deadline),
                hint = 'Nothing was written.';
      elsif v_hold.held then
        v_outcome := 'extended';
      end if;
    else
      v_hold := pgreaper._see_hold(v_policy, v_target, reaper_extend.key, v_now);
      if v_hold.held and not v_hold.due and (v_hold.deadline >= reaper_extend.until) is not false then
        v_outcome := 'already-done';
      end if;
    end if;
  end if;

  return row(coalesce(v_hold.key, reaper_extend.key), v_outcome, v_hold.state, v_hold.deadline, null)::pgreaper.hold_answer;
end;
$function$;

comment on function pgreaper.reaper_extend(text, text, timestamptz, text) is
'The application keeps a hold for longer, if it is still alive: extended, already-done or not-eligible with the state found.';

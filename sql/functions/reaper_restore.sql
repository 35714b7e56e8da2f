-- reaper_restore: an expired hold is held again, inside the time that the policy allows for it.
--
-- For the payment that came too late when nobody else has the seat yet.  Whether somebody has
-- is for a constraint of the table to say, such as a unique index on (seat) where status is
-- held or consumed: pgreaper cannot know.  Without one, two customers get the seat.
--
-- A hold that is due but not expired yet is restored too, so that the answer does not depend
-- on how quick the reaper was.
--
-- Promises
--   * `restored`: the row is held until then, as a new incarnation, its stamp is NULL again, and
--     who, why and the deadline that had passed are in `events`.  What `set` wrote stays.
--   * `already-done`: it is held and alive until then or longer: the call was repeated.
--   * `not-eligible`: never expired, or longer ago than restore_within (counted from
--     deadline + grace); with `constraint_name`: a unique or exclusion constraint says that what
--     it held is somebody else's now.  Nothing is written; the caller's transaction goes on.
--   * Waits for whoever has the row, as any UPDATE does: the caller's lock_timeout decides.
--
-- Raises
--   RP002  no such policy.     RP004  a read-only node or transaction.     22P02  no key of this target.
--   22023  until is not later than now, there is no reason, or the policy allows no restoring.
--   40001  the row changed since the caller's REPEATABLE READ or SERIALIZABLE began: begin anew.
create function pgreaper.reaper_restore(
  policy text,
  key text,
  until timestamptz,
  reason text,
  search_path text default pg_catalog.current_setting('search_path')
)
returns pgreaper.hold_answer
language plpgsql
volatile
security invoker
set search_path = pg_catalog, pg_temp
as $function$
declare
  v_policy constant pgreaper.policies := pgreaper._application(reaper_restore.policy, reaper_restore.key, reaper_restore.until);
  v_target constant pgreaper._target := pgreaper._target(v_policy, reaper_restore.search_path, application => true);
  v_now timestamptz;
  v_found pgreaper._hold;
  v_before pgreaper._hold;
  v_hold pgreaper._hold;
  v_constraint text;
  v_outcome text := 'not-eligible';
begin
  if coalesce(reaper_restore.reason, '') !~ '\S' then
    raise invalid_parameter_value
      using message = 'restoring a hold needs a reason', hint = 'Somebody will ask why it is held again.';
  elsif v_policy.restore_within is null then
    raise invalid_parameter_value
      using message = format('policy %I does not allow restoring', v_policy.name),
            hint = 'Register it again with restore_within => ''…'': how long after a hold became due it may be restored.';
  end if;

  if pgreaper._lock_hold(v_policy, v_target, reaper_restore.key,
       array[v_policy.deadline_column, v_policy.status_column, v_policy.stamp_column]) then
    -- The wait may have been long.
    perform pgreaper._application(reaper_restore.policy, reaper_restore.key, reaper_restore.until);
    v_now := pgreaper._clock();
    v_found := pgreaper._see_hold(v_policy, v_target, reaper_restore.key, v_now);
    if v_found.deadline < 'infinity' and (v_found.ended or (v_found.held and v_found.due)) then
      v_before := v_found;
      begin
        -- Not due at an earlier clock: became due no longer ago than that.
        v_hold := pgreaper._change_hold(v_policy, v_target, reaper_restore.key, v_now - v_policy.restore_within,
          reaper_restore.until, v_target.restoring, format('(%s) or (%s)', v_target.ended, v_target.held));
      exception
        when unique_violation or exclusion_violation then
          get stacked diagnostics v_constraint = constraint_name;
      end;
      if v_hold.key is not null then
        -- By the key that it has now: the state may be part of it.
        v_found := pgreaper._see_hold(v_policy, v_target, v_hold.key, v_now);
        if v_found.due then
          raise invalid_parameter_value
            using message = format('until is too near for column %I, which makes it %s', v_policy.deadline_column, v_found.deadline),
                  hint = 'Nothing was written.';
        elsif v_found.held then
          v_outcome := 'restored';
          insert into pgreaper.events (policy_id, key, deadline, kind, state, at, actor, reason)
          values (v_policy.policy_id, v_before.key, v_before.deadline, 'restore', v_before.state, v_now, session_user, reaper_restore.reason);
        end if;
      end if;
    elsif v_found.held and (v_found.deadline >= reaper_restore.until) is not false then
      v_outcome := 'already-done';
    end if;
  end if;

  return row(coalesce(v_found.key, reaper_restore.key), v_outcome, v_found.state, v_found.deadline, v_constraint)::pgreaper.hold_answer;
end;
$function$;

comment on function pgreaper.reaper_restore(text, text, timestamptz, text, text) is
'An expired hold is held again, inside the time that the policy allows: restored, already-done or not-eligible; who and why go to events.';

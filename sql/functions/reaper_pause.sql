-- reaper_pause: stop claiming and sweeping a policy; leases that run may be finished.
--
-- Promises
--   * Returns whether anything changed; the reason goes to `events`.
--
-- Raises
--   RP002  no such policy.
create function pgreaper.reaper_pause(policy text, reason text default null)
returns boolean
language plpgsql
volatile
security invoker
set search_path = pg_catalog, pg_temp
as $function$
declare
  v_policy constant pgreaper.policies := pgreaper._policy(reaper_pause.policy);
  v_now constant timestamptz := pgreaper._clock();
begin
  update pgreaper.policies as p
     set paused_at = v_now, pause_reason = reaper_pause.reason
   where p.policy_id = v_policy.policy_id
     and p.paused_at is null;
  if not found then
    return false;
  end if;

  insert into pgreaper.events (policy_id, kind, at, actor, reason)
  values (v_policy.policy_id, 'pause', v_now, session_user, reaper_pause.reason);
  return true;
end;
$function$;

comment on function pgreaper.reaper_pause(text, text) is 'Stop claiming and sweeping a policy; true when that changed something.';

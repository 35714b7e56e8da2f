-- reaper_resume: go on with a paused policy.
--
-- Promises
--   * Returns whether anything changed.
--
-- Raises
--   RP002  no such policy.
create function pgreaper.reaper_resume(policy text)
returns boolean
language plpgsql
volatile
security invoker
set search_path = pg_catalog, pg_temp
as $function$
declare
  v_policy constant pgreaper.policies := pgreaper._policy(reaper_resume.policy);
begin
  update pgreaper.policies as p
     set paused_at = null, pause_reason = null
   where p.policy_id = v_policy.policy_id
     and p.paused_at is not null;
  if not found then
    return false;
  end if;

  insert into pgreaper.events (policy_id, kind, at, actor)
  values (v_policy.policy_id, 'resume', pgreaper._clock(), session_user);
  return true;
end;
$function$;

comment on function pgreaper.reaper_resume(text) is 'Go on with a paused policy; true when that changed something.';

-- reaper_discard: leave dead letters be: one, those of a kind or an age, or all.
--
-- The hold stays as it is and stays excluded from claims until its deadline changes; it
-- is no longer listed as a dead letter.
--
-- Promises
--   * Returns the keys that were discarded; no rows: nothing was dead.
--   * Who and why go to `events`.
--
-- Raises
--   RP002  no such policy.     22023  no reason.
create function pgreaper.reaper_discard(
  policy text,
  key text,
  reason text,
  error_class text default null,
  older_than interval default null
)
returns setof text
language plpgsql
volatile
security invoker
set lock_timeout = '2s'
set search_path = pg_catalog, pg_temp
as $function$
declare
  v_policy constant pgreaper.policies := pgreaper._policy(reaper_discard.policy);
  v_now constant timestamptz := pgreaper._clock();
begin
  perform pgreaper._require_writable();
  if coalesce(reaper_discard.reason, '') !~ '\S' then
    raise invalid_parameter_value
      using message = 'discarding a dead letter needs a reason', hint = 'Somebody will ask why the hold never expired.';
  end if;

  return query
    with discarded as (
      update pgreaper.failures as f
         set discarded_at = v_now
       where f.policy_id = v_policy.policy_id
         and f.not_before = 'infinity'
         and f.discarded_at is null
         and (reaper_discard.key is null or f.key = reaper_discard.key)
         and (reaper_discard.error_class is null or f.error_class = reaper_discard.error_class)
         and (reaper_discard.older_than is null or f.failed_at <= v_now - reaper_discard.older_than)
      returning f.key, f.deadline, f.attempts
    ), recorded as (
      insert into pgreaper.events (policy_id, key, deadline, kind, at, attempts, actor, reason)
      select v_policy.policy_id, d.key, d.deadline, 'discard', v_now, d.attempts, session_user, reaper_discard.reason
        from discarded as d
    )
    select d.key from discarded as d;
end;
$function$;

comment on function pgreaper.reaper_discard(text, text, text, text, interval) is 'Leave dead letters be, by key, kind, age or all; who and why go to events.';

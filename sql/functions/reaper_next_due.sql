-- reaper_next_due: how long until there may be work.
--
-- For whoever wants to sleep until then.  Looks ahead of the cursor only; what
-- becomes claimable behind it is the business of a rescan.
--
-- Promises
--   * Never negative; zero when something may be claimed now.
--   * NULL when nothing lies ahead, and for a paused policy or the copy of a logical subscriber.
--   * Writes nothing; a few index probes per policy.
--
-- Raises
--   RP002  no such policy.
create function pgreaper.reaper_next_due(
  policy text default null,
  search_path text default pg_catalog.current_setting('search_path')
)
returns interval
language plpgsql
volatile
security invoker
set lock_timeout = '200ms'
set jit = off
set search_path = pg_catalog, pg_temp
as $function$
declare
  v_now constant timestamptz := pgreaper._clock();
  v_policy pgreaper.policies;
  v_next timestamptz;
begin
  if reaper_next_due.policy is not null then
    perform pgreaper._policy(reaper_next_due.policy);
  end if;

  for v_policy in
    select p.* from pgreaper.policies as p
     where p.unregistered_at is null
       and (reaper_next_due.policy is null or p.name = reaper_next_due.policy)
  loop
    v_next := least(v_next, (pgreaper._look(v_policy, v_now, false, reaper_next_due.search_path)).next);
    exit when v_next <= v_now;
  end loop;

  return case when v_next is not null then greatest(interval '0', v_next - v_now) end;
end;
$function$;

comment on function pgreaper.reaper_next_due(text, text) is 'Interval until there may be work; NULL: nothing ahead.';

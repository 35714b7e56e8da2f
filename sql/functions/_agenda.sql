-- _agenda: for each policy, how long until there may be work; a daemon's one question.
--
-- `policies`: those to tell about, NULL: all that are registered.  Those in `without` are
-- told about and not looked at; `rescan` names those to be searched from the oldest deadline.
-- A policy that cannot be looked at, because its table is gone or locked, has work at
-- once: the claim says what is wrong with it, and the others are not kept waiting.
--
-- Promises
--   * One row for each policy that is registered, in the order of their names.
--   * `wait` in seconds, never negative: 0 something may be claimed now; NULL nothing lies ahead, or not looked at.
--   * `limited`: something is due, and waits for the policy's rate limit, in holds per second.
--   * `cost` in seconds: what looking at this policy took.
--   * Writes nothing; a few index probes per policy.
create function pgreaper._agenda(
  policies text[] default null,
  without text[] default '{}',
  rescan text[] default '{}',
  search_path text default pg_catalog.current_setting('search_path')
)
returns table (
  policy text,
  batch integer,
  rate_limit double precision,
  wait double precision,
  limited boolean,
  cost double precision
)
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
  v_look record;
  v_began timestamptz;
begin
  for v_policy in
    select p.* from pgreaper.policies as p
     where p.unregistered_at is null
       and (_agenda.policies is null or p.name = any (_agenda.policies))
     order by p.name
  loop
    policy := v_policy.name;
    batch := v_policy.batch;
    rate_limit := v_policy.rate_limit;
    wait := null;
    limited := false;
    v_began := clock_timestamp();
    if v_policy.name <> all (_agenda.without) then
      begin
        v_look := pgreaper._look(v_policy, v_now, v_policy.name = any (_agenda.rescan), _agenda.search_path);
        wait := case when v_look.next is not null then greatest(0, extract(epoch from v_look.next - v_now)) end;
        limited := v_look.limited;
      exception
        when others then
          wait := 0;
      end;
    end if;
    cost := extract(epoch from clock_timestamp() - v_began);
    return next;
  end loop;
end;
$function$;

comment on function pgreaper._agenda(text[], text[], text[], text) is
'For each policy, seconds until there may be work: a daemon''s one question.';

-- reaper_expire: perform the transition of a claim's holds, and say of each what became of it.
--
-- What it promises and what it raises: `_expire`.
create function pgreaper.reaper_expire(
  token uuid,
  keys text[] default null,
  search_path text default pg_catalog.current_setting('search_path')
)
returns setof pgreaper.hold_outcome
language plpgsql
volatile
security invoker
set lock_timeout = '200ms'
set jit = off
set search_path = pg_catalog, pg_temp
as $function$
declare
  v_settled constant pgreaper._settled :=
    pgreaper._expire(reaper_expire.token, reaper_expire.keys, reaper_expire.search_path);
begin
  return query
    select e.key, 'expired'::text, coalesce((v_settled.policy).expired, 'expired') from unnest(v_settled.expired) as e (key)
    union all
    select o.* from unnest(v_settled.others) as o;

  -- Should a trigger have set the path for the whole session, ours would stay until the caller's commit.
  perform set_config('search_path', reaper_expire.search_path, true);
end;
$function$;

comment on function pgreaper.reaper_expire(uuid, text[], text) is
'Perform the transition of a claim''s holds: key, outcome, state; RP001 when the lease is lost.';

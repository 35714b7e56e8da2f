-- reaper_claim: lease the next due holds to one worker, a row for each.
--
-- With the columns that the policy hands to a handler (`payload`).  Parameters, what it promises and what it
-- raises: `_claim`.
create function pgreaper.reaper_claim(
  policy text,
  batch integer default null,
  worker text default null,
  rescan boolean default false,
  session boolean default false,
  skew interval default null,
  search_path text default pg_catalog.current_setting('search_path')
)
returns setof pgreaper.leased_hold
language plpgsql
volatile
security invoker
set lock_timeout = '200ms'
set jit = off
set search_path = pg_catalog, pg_temp
as $function$
declare
  v_batch constant pgreaper._leased := pgreaper._claim(reaper_claim.policy, reaper_claim.batch, reaper_claim.worker,
    reaper_claim.rescan, reaper_claim.session, reaper_claim.skew, reaper_claim.search_path);
  v_policy pgreaper.policies;
  v_target pgreaper._target;
  v_statement text;
begin
  if v_batch.token is null then
    return;
  end if;

  v_policy := pgreaper._policy(reaper_claim.policy);
  if cardinality(v_policy.payload_columns) = 0 then
    return query
      select v_batch.token, b.key, b.deadline, v_batch.attempt, v_batch.claim_until, null::jsonb
        from unnest(v_batch.keys, v_batch.deadlines) as b (key, deadline);
  else
    v_target := pgreaper._target(v_policy, reaper_claim.search_path);
    v_statement := format(
      'select $4, b.key, b.deadline, $5, $1, f.payload'
      '  from unnest($3, $2) with ordinality as b (key, deadline, position)'
      '  left join (select %s as key, pg_catalog.jsonb_build_object(%s) as payload from %s as h where %s) as f'
      '    on f.key operator(pg_catalog.=) b.key'
      ' order by b.position',
      v_target.key,
      (select string_agg(format('%L, h.%I', c.name, c.name), ', ') from unnest(v_policy.payload_columns) as c (name)),
      v_target.relation, v_target.matches);
    perform set_config('search_path', v_target.search_path, true);
    return query execute v_statement
      using v_batch.claim_until, v_batch.deadlines, v_batch.keys, v_batch.token, v_batch.attempt;
    perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
  end if;
end;
$function$;

comment on function pgreaper.reaper_claim(text, integer, text, boolean, boolean, interval, text) is
'Lease the next due holds of a policy to one worker; no rows: nothing to do.';

-- _backlog: how many due holds of a policy are how old; each count bounded.
create function pgreaper._backlog(
  policy pgreaper.policies,
  search_path text default pg_catalog.current_setting('search_path')
)
returns table (age text, "position" integer, due bigint, capped boolean)
language plpgsql
volatile
security invoker
set lock_timeout = '200ms'
set jit = off
set search_path = pg_catalog, pg_temp
as $function$
declare
  c_cap constant integer := 10000;
  v_cutoff constant timestamptz := pgreaper._clock() - policy.grace;
  v_target pgreaper._target;
  v_bucket record;
  v_statement text;
  v_from timestamptz;
  v_to timestamptz;
  v_limit constant integer := c_cap + 1;
begin
  v_target := pgreaper._target(policy, _backlog.search_path);

  for v_bucket in
    select b.*
      from (values
        (1, 'under 1 minute', interval '0', interval '1 minute'),
        (2, '1 to 5 minutes', '1 minute', '5 minutes'),
        (3, '5 to 60 minutes', '5 minutes', '1 hour'),
        (4, '1 to 24 hours', '1 hour', '1 day'),
        (5, 'over 1 day', '1 day', null)
      ) as b (ordinal, name, younger, older)
  loop
    age := v_bucket.name;
    "position" := v_bucket.ordinal;
    v_to := v_cutoff - v_bucket.younger;
    v_from := v_cutoff - v_bucket.older + interval '1 microsecond';
    v_statement := format('select pg_catalog.count(*) from (select from %s as h where %s and %s%s limit $3) as h',
      v_target.relation, v_target.held, v_target.due,
      case when v_bucket.older is not null then ' and ' || v_target.beyond end);
    perform set_config('search_path', v_target.search_path, true);
    execute v_statement
       into due
      using v_to, v_from, v_limit;
    perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    capped := due > c_cap;
    due := least(due, c_cap);
    return next;
  end loop;
exception
  -- Costs the lines of this policy only; the view `status` says why.
  when others then
    return;
end;
$function$;

comment on function pgreaper._backlog(pgreaper.policies, text) is 'How many due holds of a policy are how old; each count bounded.';

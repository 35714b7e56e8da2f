-- _see_hold: one hold as it is now; for a row that the caller has locked, as it will stay.
create function pgreaper._see_hold(
  policy pgreaper.policies,
  target pgreaper._target,
  key text,
  clock timestamptz
)
returns pgreaper._hold
language plpgsql
volatile
security invoker
as $function$
declare
  v_cutoff constant timestamptz := _see_hold.clock - policy.grace;
  v_keys constant text[] := array[_see_hold.key];
  v_statement text;
  v_hold pgreaper._hold;
begin
  v_statement := format(
    'select %s, %s, %s, (%s) is true, (%s) is true, (%s) is true, (%s) is true from %s as h where %s',
    target.key, target.state, target.instant, target.held, target.due, target.ended, coalesce(target.consumed, 'false'),
    target.relation, target.matches);
  perform set_config('search_path', target.search_path, true);
  execute v_statement
     into v_hold
    using v_cutoff, null, v_keys;
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);

  v_hold.key := coalesce(v_hold.key, _see_hold.key);
  return v_hold;
end;
$function$;

comment on function pgreaper._see_hold(pgreaper.policies, pgreaper._target, text, timestamptz) is 'One hold as it is now.';

-- _named_holds: the holds that somebody else's names lead to, as they are now.
--
-- A key that comes from outside may be spelled otherwise than pgreaper does it: `007`, a UUID in
-- capitals, a JSON array without blanks.  All are looked for at once; what is not found under its very
-- name is looked for once more by itself, because then a row that is found can only be the one.
--
-- Reads the target, locks none of it.
--
-- Promises
--   * One row a name.
--   * A name that the key's type does not take is `wrong`, and the others are found all the same.
--   * What a view raises is raised: no name is wrong because of a row.
create function pgreaper._named_holds(
  policy pgreaper.policies,
  target pgreaper._target,
  clock timestamptz,
  names text[]
)
returns setof pgreaper._named_hold
language plpgsql
volatile
security invoker
as $function$
declare
  v_cutoff constant timestamptz := _named_holds.clock - policy.grace;
  v_statement text;
  v_all pgreaper._named_hold[];
  v_found pgreaper._named_hold[];
  v_keys text[];
  v_name text;
  v_hold pgreaper._named_hold;
begin
  v_statement := format(
    'select pg_catalog.array_agg(row(null, %s, %s, %s, %s, (%s) is true, (%s) is true, (%s) is true, false)::pgreaper._named_hold)'
    '  from %s as h where %s',
    target.key, target.state, target.instant, case when target.plain then 'h.ctid' else 'null' end,
    target.held, target.due, target.ended, target.relation, target.matches);

  begin
    perform set_config('search_path', target.search_path, true);
    execute v_statement into v_all using v_cutoff, null, _named_holds.names;
    perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
  exception
    -- What the type says of one of them, perhaps; of which, is not told.
    when data_exception or integrity_constraint_violation then
      v_all := null;
  end;

  return query
    select n.name, f.key, f.state, f.deadline, f.hint, f.held, f.due, f.ended, false
      from unnest(_named_holds.names) as n (name)
      join unnest(v_all) as f on f.key = n.name;

  for v_name in
    select n.name
      from unnest(_named_holds.names) as n (name)
      left join unnest(v_all) as f on f.key = n.name
     where f.key is null
  loop
    v_keys := array[v_name];
    v_found := null;
    v_hold := null;
    begin
      perform set_config('search_path', target.search_path, true);
      execute v_statement into v_found using v_cutoff, null, v_keys;
      perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
      v_hold := v_found[1];
      v_hold.wrong := v_found is null and cardinality(policy.key_columns) > 1 and not pgreaper._is_key(policy, target, v_name);
    exception
      when data_exception or integrity_constraint_violation then
        if pgreaper._is_key(policy, target, v_name) then
          raise;
        end if;
        v_hold.wrong := true;
    end;
    v_hold.name := v_name;
    return next v_hold;
  end loop;
end;
$function$;

comment on function pgreaper._named_holds(pgreaper.policies, pgreaper._target, timestamptz, text[]) is
'The holds that these names lead to, as they are now; a row a name.';

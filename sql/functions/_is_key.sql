-- _is_key: whether a hold of this policy could have such a key.
--
-- Asked without the rows, when a look for the key has failed or found nothing: what a view or a function
-- in it raises is not the key's fault.
create function pgreaper._is_key(policy pgreaper.policies, target pgreaper._target, name text)
returns boolean
language plpgsql
volatile
security invoker
as $function$
declare
  v_statement text;
  v_missing integer;
begin
  select 'select pg_catalog.num_nulls(' || string_agg(format(p.decode,
           case when cardinality(policy.key_columns) = 1 then '$1'
                else format('$1::pg_catalog.json operator(pg_catalog.->>) %s', c.position - 1) end), ', ') || ')'
    into v_statement
    from unnest(policy.key_columns) with ordinality as c (name, position)
    join pg_catalog.pg_attribute as a
      on a.attrelid = to_regclass(format('%I.%I', policy.target_schema, policy.target_table)) and a.attname = c.name
   cross join lateral pgreaper._key_part(a.atttypid) as p;

  perform set_config('search_path', target.search_path, true);
  execute v_statement into v_missing using _is_key.name;
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
  return v_missing = 0;
exception
  -- What a type, or the check of a domain, says of a text.
  when data_exception or integrity_constraint_violation then
    return false;
end;
$function$;

comment on function pgreaper._is_key(pgreaper.policies, pgreaper._target, text) is 'Whether a hold of this policy could have such a key.';

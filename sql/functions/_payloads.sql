-- _payloads: columns of the target's rows with these keys, as they are now.
--
-- The trail may tell keys that are none of the target's any more, because its key has another type by now: whichever cannot
-- be read as one is looked for by halves, so that it costs no other event its payload.
--
-- Promises
--   * `payloads` has one element per key, in the same order; NULL: there is no such row.
create function pgreaper._payloads(target pgreaper._target, columns text[], keys text[])
returns jsonb[]
language plpgsql
volatile
security invoker
as $function$
declare
  v_half constant integer := cardinality(_payloads.keys) / 2;
  v_statement text;
  v_payloads jsonb[];
begin
  v_statement := format(
    'select pg_catalog.array_agg(p.payload order by p.position)'
    '  from (select distinct on (k.position) k.position, f.payload'
    '          from pg_catalog.unnest($3) with ordinality as k (key, position)'
    '          left join (select %s as key, pg_catalog.jsonb_build_object(%s) as payload from %s as h where %s) as f'
    '            on f.key operator(pg_catalog.=) k.key'
    '         order by k.position) as p',
    target.key,
    (select string_agg(format('%L, h.%I', c.name, c.name), ', ') from unnest(_payloads.columns) as c (name)),
    target.relation, target.matches);
  begin
    perform set_config('search_path', target.search_path, true);
    execute v_statement into v_payloads using null::timestamptz, null::timestamptz, _payloads.keys;
    perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    return v_payloads;
  exception
    -- What was set is undone with it.
    when data_exception or check_violation then
      if v_half = 0 then
        return array[null::jsonb];
      end if;
  end;
  return pgreaper._payloads(target, _payloads.columns, _payloads.keys[:v_half])
      || pgreaper._payloads(target, _payloads.columns, _payloads.keys[v_half + 1:]);
end;
$function$;

comment on function pgreaper._payloads(pgreaper._target, text[], text[]) is 'Columns of the target''s rows with these keys, as they are now.';

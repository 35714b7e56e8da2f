-- _payloads: columns of the target's rows with these keys, as they are now.
--
-- Whichever row cannot be read is looked for by halves, so that it costs no other event its payload.  The trail may tell keys
-- that are none of the target's any more, because its key has another type by now: then there is no such row.  A row that is
-- there and whose columns raise, as those of a view may, has an error instead of a payload.
--
-- What is wrong with all rows, as a right that is missing, or with the server, as a lock or a conflict, is raised.
--
-- Promises
--   * `payloads` and `error_classes` have one element per key, in the same order; both NULL: there is no such row.
create function pgreaper._payloads(
  target pgreaper._target,
  columns text[],
  keys text[],
  out payloads jsonb[],
  out error_classes text[]
)
language plpgsql
volatile
security invoker
as $function$
declare
  v_half constant integer := cardinality(_payloads.keys) / 2;
  v_statement text;
  v_class text;
  v_left record;
  v_right record;
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
    execute v_statement into payloads using null::timestamptz, null::timestamptz, _payloads.keys;
    perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    error_classes := array_fill(null::text, array[cardinality(_payloads.keys)]);
    return;
  exception
    -- What was set is undone with it.
    when others then
      -- Without a key it is nobody's fault.
      if cardinality(_payloads.keys) = 0 or sqlstate ~ '^(40|53|57|58)' or sqlstate = '55P03' then
        raise;
      end if;
      v_class := 'Payload ' || sqlstate;
  end;

  if v_half > 0 then
    v_left := pgreaper._payloads(target, _payloads.columns, _payloads.keys[:v_half]);
    v_right := pgreaper._payloads(target, _payloads.columns, _payloads.keys[v_half + 1:]);
    payloads := v_left.payloads || v_right.payloads;
    error_classes := v_left.error_classes || v_right.error_classes;
    return;
  end if;

  payloads := array[null::jsonb];
  error_classes := array[v_class];
  if cardinality(_payloads.columns) > 0 then
    perform pgreaper._payloads(target, _payloads.columns, '{}');
    -- Without the columns it tells whether there is a row.
    v_left := pgreaper._payloads(target, '{}', _payloads.keys);
    if v_left.payloads[1] is null then
      error_classes := v_left.error_classes;
    end if;
  elsif v_class !~ '^Payload (22|23514)' then
    return;
  elsif target.plain then
    error_classes := array[null::text];
  else
    -- A view may compute columns that nobody asked for: is it the key, beside a row that has nothing?
    begin
      perform set_config('search_path', target.search_path, true);
      execute format('select from (select (null::%s).* offset 0) as h where %s', target.relation, target.matches)
        using null::timestamptz, null::timestamptz, _payloads.keys;
      perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    exception
      when data_exception or check_violation then
        error_classes := array[null::text];
    end;
  end if;
end;
$function$;

comment on function pgreaper._payloads(pgreaper._target, text[], text[]) is
'Columns of the target''s rows with these keys, as they are now, or the error of reading them.';

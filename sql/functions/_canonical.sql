-- _canonical: a state as its column's type spells it.
--
-- The value is put into a row the way an UPDATE would put it, so a label that the enum
-- lacks, a text that is too long or a number that is none is refused here, at
-- registration, and not in every run.  What a domain checks runs with the caller's
-- search_path, as it does in an UPDATE.
--
-- Raises
--   RP003  the type does not take the value.
create function pgreaper._canonical(
  relation regclass,
  column_name text,
  value text,
  search_path text
)
returns text
language plpgsql
stable
security invoker
as $function$
declare
  v_type oid;
  v_modifier integer;
  v_base oid;
  v_row constant jsonb := jsonb_build_object(_canonical.column_name, _canonical.value);
  v_statement text;
  v_spelled text;
  v_labels text;
begin
  select a.atttypid, a.atttypmod, coalesce(nullif(t.typbasetype, 0), t.oid) into v_type, v_modifier, v_base
    from pg_catalog.pg_attribute as a
    join pg_catalog.pg_type as t on t.oid = a.atttypid
   where a.attrelid = _canonical.relation and a.attname = _canonical.column_name and not a.attisdropped;

  v_statement := case
    -- From JSON a document would come as the string it is written as; its types have no modifier.
    when v_base in ('json'::regtype, 'jsonb'::regtype) then
      format('select %L::%s::pg_catalog.text', _canonical.value, pgreaper._type_name(v_type))
    else format('select r.%I::pg_catalog.text from pg_catalog.jsonb_populate_record(null::%s, $1) as r',
           _canonical.column_name, _canonical.relation)
  end;

  begin
    perform set_config('search_path', _canonical.search_path, true);
    execute v_statement into v_spelled using v_row;
    perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
  exception
    when data_exception or integrity_constraint_violation or syntax_error_or_access_rule_violation then
      v_spelled := null;
  end;

  if v_spelled is null then
    select string_agg(quote_literal(e.enumlabel), ', ' order by e.enumsortorder) into v_labels
      from pg_catalog.pg_enum as e where e.enumtypid = v_type;
    raise exception 'column %.% of type % does not take the value %', _canonical.relation, quote_ident(_canonical.column_name),
      format_type(v_type, v_modifier), left(quote_literal(_canonical.value), 100)
      using errcode = 'RP003',
            hint = coalesce('Allowed are ' || v_labels || '.', 'Give the value as the column would store it.');
  end if;

  return v_spelled;
end;
$function$;

comment on function pgreaper._canonical(regclass, text, text, text) is
'A state as its column''s type spells it; RP003 when the type does not take it.';

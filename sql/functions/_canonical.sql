-- _canonical: a state as its column's type spells it.
--
-- The value is put into a row the way an UPDATE would put it, so a label that the enum
-- lacks, a text that is too long or a number that is none is refused here, at
-- registration, and not in every run.
--
-- Raises
--   RP003  the type does not take the value.
create function pgreaper._canonical(relation regclass, column_name text, value text)
returns text
language plpgsql
stable
security invoker
as $function$
declare
  v_type oid;
  v_modifier integer;
  v_spelled text;
  v_labels text;
begin
  select a.atttypid, a.atttypmod into v_type, v_modifier
    from pg_catalog.pg_attribute as a
   where a.attrelid = _canonical.relation and a.attname = _canonical.column_name and not a.attisdropped;

  begin
    execute format('select %L::%s::text', _canonical.value, format_type(v_type, v_modifier)) into v_spelled;
  exception
    when data_exception or integrity_constraint_violation or syntax_error_or_access_rule_violation then
      v_spelled := null;
  end;

  -- An explicit cast cuts a text that is too long; an UPDATE would refuse it.
  if v_spelled is null
    or (v_spelled <> _canonical.value and length(v_spelled) < length(rtrim(_canonical.value))
        and (select t.typcategory from pg_catalog.pg_type as t where t.oid = v_type) = 'S') then
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

comment on function pgreaper._canonical(regclass, text, text) is 'A state as its column''s type spells it; RP003 when the type does not take it.';

-- _key_part: how one key column becomes text, and how the text becomes the column's type.
--
-- The text may not depend on TimeZone, DateStyle or any other setting, because
-- one session writes it and another reads it.
--
-- Returns NULL for a type whose text has no such form.
create function pgreaper._key_part(
  type_id oid,
  out encode text,
  out decode text
)
language plpgsql
stable
security invoker
as $function$
declare
  v_base oid := _key_part.type_id;
  v_kind "char";
  v_category "char";
  v_name text;
begin
  -- The usual ones are known by heart: this is asked in every call.
  v_name := case _key_part.type_id
    when 'bigint'::regtype then 'int8' when 'integer'::regtype then 'int4' when 'text'::regtype then 'text'
    when 'uuid'::regtype then 'uuid' when 'varchar'::regtype then 'varchar' end;
  if v_name is not null then
    encode := '%1$s::pg_catalog.text';
    decode := '(%1$s)::pg_catalog.' || v_name;
    return;
  end if;

  -- A domain is spelled like its base type.
  loop
    select t.typtype, t.typcategory, case when t.typtype = 'd' then t.typbasetype else v_base end
      into v_kind, v_category, v_base
      from pg_catalog.pg_type as t
     where t.oid = v_base;
    exit when v_kind <> 'd';
  end loop;

  -- %1$s is the column or the text.
  case
    when v_base = 'timestamptz'::regtype then
      encode := $$(pg_catalog.to_jsonb(%1$s at time zone 'UTC') operator(pg_catalog.#>>) '{}')$$;
      decode := $$((%1$s)::timestamp at time zone 'UTC')$$;
    when v_base in ('timestamp'::regtype, 'date'::regtype) then
      encode := $$(pg_catalog.to_jsonb(%1$s) operator(pg_catalog.#>>) '{}')$$;
      decode := '(%1$s)::' || pgreaper._type_name(v_base);
    when v_base = 'numeric'::regtype then
      encode := 'pg_catalog.trim_scale(%1$s)::pg_catalog.text';
      decode := '(%1$s)::numeric';
    when v_base = 'bytea'::regtype then
      -- E: a session may have standard_conforming_strings off.
      encode := $$(E'\\x' operator(pg_catalog.||) pg_catalog.encode(%1$s, 'hex'))$$;
      decode := '(%1$s)::pg_catalog.bytea';
    when v_base in ('real'::regtype, 'double precision'::regtype, 'money'::regtype, 'time'::regtype, 'timetz'::regtype,
                    'interval'::regtype, 'json'::regtype, 'jsonb'::regtype, 'xml'::regtype,
                    'regclass'::regtype, 'regcollation'::regtype, 'regconfig'::regtype, 'regdictionary'::regtype,
                    'regnamespace'::regtype, 'regoper'::regtype, 'regoperator'::regtype, 'regproc'::regtype,
                    'regprocedure'::regtype, 'regrole'::regtype, 'regtype'::regtype)
      or v_kind not in ('b', 'e') or v_category in ('A', 'G') then
      encode := null;
      decode := null;
    else
      encode := '%1$s::pg_catalog.text';
      decode := '(%1$s)::' || pgreaper._type_name(_key_part.type_id);
  end case;
end;
$function$;

comment on function pgreaper._key_part(oid) is
'How a key column becomes text and back, free of any setting; NULL for a type that has no such form.';

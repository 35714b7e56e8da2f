-- _type_name: a type as SQL can name it under any search_path.
--
-- Without its modifier, so a cast to it cuts and rounds nothing.
create function pgreaper._type_name(type_id oid)
returns text
language sql
stable
security invoker
as $function$
  -- A namespace as text is quoted where that is needed.
  select format('%s.%I', t.typnamespace::regnamespace, t.typname)
    from pg_catalog.pg_type as t
   where t.oid = _type_name.type_id;
$function$;

comment on function pgreaper._type_name(oid) is 'A type with its schema.';

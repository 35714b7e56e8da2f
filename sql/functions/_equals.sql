-- _equals: the operator that says whether two values of a type are the same, as SQL can name it.
--
-- Statements on a target run with the caller's search_path, where anybody who may create
-- something in one of its schemas can put a better-matching `=`.  So they name the schema:
-- the server's own for its own types and for enums, that of the type's default operator class
-- for others (citext), whether that schema is in the path or not.
create function pgreaper._equals(type_id oid)
returns text
language plpgsql
stable
security invoker
set search_path = pg_catalog, pg_temp
as $function$
declare
  v_base oid := _equals.type_id;
  v_type pg_catalog.pg_type;
begin
  -- A domain is compared like its base type.
  loop
    select t.* into v_type from pg_catalog.pg_type as t where t.oid = v_base;
    exit when v_type.typtype is distinct from 'd';
    v_base := v_type.typbasetype;
  end loop;

  if v_type.typtype <> 'e' and v_type.typnamespace <> 'pg_catalog'::regnamespace then
    return coalesce(
      (select format('operator(%I.%s)', n.nspname, o.oprname)
         from pg_catalog.pg_opclass as c
         join pg_catalog.pg_am as m on m.oid = c.opcmethod and m.amname = 'btree'
         -- Strategy 3 of a btree is equality.
         join pg_catalog.pg_amop as a
           on a.amopfamily = c.opcfamily and a.amoplefttype = v_base and a.amoprighttype = v_base and a.amopstrategy = 3
         join pg_catalog.pg_operator as o on o.oid = a.amopopr
         join pg_catalog.pg_namespace as n on n.oid = o.oprnamespace
        where c.opcintype = v_base
          and c.opcdefault),
      'operator(pg_catalog.=)');
  end if;

  return 'operator(pg_catalog.=)';
end;
$function$;

comment on function pgreaper._equals(oid) is 'The equality operator of a type, with its schema.';

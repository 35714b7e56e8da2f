-- A schema whose objects stand in for nearly everything of the server's, each a trap.
create schema hostile;
create sequence hostile.sprung;

create function hostile.spring(what text) returns boolean language plpgsql as $trap$
begin
  perform pg_catalog.nextval('hostile.sprung');
  raise exception 'hijacked: %', what using errcode = 'HJ001';
end
$trap$;

do $shadow$
declare
  c_types constant oid[] := array(
    select t.oid from pg_type as t
     where t.typnamespace = 'pg_catalog'::regnamespace
       and t.typname = any (string_to_array(
         'text varchar bpchar name char bool int2 int4 int8 float4 float8 numeric oid tid xid xid8 date time timestamptz timestamp'
         ' interval uuid json jsonb bytea regclass regtype regnamespace regrole tstzrange int2vector'
         ' _text _name _timestamptz _tid _int2 _int4 _int8 _float8 _bool _uuid _jsonb'
         ' anyarray anyelement anynonarray anyenum anycompatible anycompatiblearray anycompatiblenonarray anyrange', ' ')));
  v record;
begin
  -- Functions; an aggregate is shadowed by a function.  Of two exact matches the first in the path is taken.
  for v in
    select p.oid, p.proname, p.proretset, format_type(p.prorettype, null) as result,
           (select string_agg(case when p.provariadic <> 0 and a.n = p.pronargs then 'variadic ' else '' end
                              || format_type(a.type, null), ', ' order by a.n)
              from unnest(p.proargtypes) with ordinality as a (type, n)) as arguments
      from pg_proc as p
     where p.pronamespace = 'pg_catalog'::regnamespace
       and p.proargtypes::oid[] <@ c_types
       and p.prokind in ('f', 'a', 'w')
       and exists (select from pg_type as t where t.oid = p.prorettype and (t.typtype <> 'p' or t.typname ~ '^any|^void$'))
  loop
    begin
      execute format('create function hostile.%I(%s) returns %s%s language plpgsql as %L', v.proname, v.arguments,
        case when v.proretset then 'setof ' else '' end, v.result, format('begin perform hostile.spring(%L); end', v.proname));
    exception
      -- The same arguments as of another kind of function.
      when duplicate_function or invalid_function_definition then null;
    end;
  end loop;

  -- Variadic "any" is for functions in C only, so as many arguments as anybody passes.
  for v in
    select n.name, array_to_string(array_fill('text'::text, array[s.size]), ', ') as arguments
      from unnest('{format,concat,concat_ws,json_build_array,jsonb_build_object,jsonb_build_array}'::text[]) as n (name)
     cross join generate_series(1, 16) as s (size)
  loop
    execute format('create or replace function hostile.%I(%s) returns text language plpgsql as %L', v.name, v.arguments,
      format('begin perform hostile.spring(%L); end', v.name));
  end loop;

  for v in
    select o.oid, o.oprname, concat_ws(', ', case when o.oprleft <> 0 then format_type(o.oprleft, null) end,
                                       format_type(o.oprright, null)) as arguments,
           concat_ws(', ', case when o.oprleft <> 0 then 'leftarg = ' || format_type(o.oprleft, null) end,
                     'rightarg = ' || format_type(o.oprright, null)) as sides,
           format_type(o.oprresult, null) as result
      from pg_operator as o
     where o.oprnamespace = 'pg_catalog'::regnamespace
       and (o.oprleft = 0 or o.oprleft = any (c_types)) and o.oprright = any (c_types) and o.oprcode <> 0
  loop
    execute format('create function hostile.op_%s(%s) returns %s language plpgsql as %L', v.oid, v.arguments, v.result,
      format('begin perform hostile.spring(%L); end', v.oprname || ' of ' || v.arguments));
    execute format('create operator hostile.%s (%s, function = hostile.op_%s)', v.oprname, v.sides, v.oid);
  end loop;

  -- Types of the server whose names are no words of the grammar, and its catalogs.
  for v in
    select t.typname from pg_type as t
     where t.typnamespace = 'pg_catalog'::regnamespace and t.typtype = 'b' and t.typcategory <> 'A' and t.typname <> 'char'
       and t.oid = any (c_types)
  loop
    execute format('create domain hostile.%I as pg_catalog.text check (hostile.spring(%L))', v.typname, 'type ' || v.typname);
  end loop;
  for v in
    select c.relname from pg_class as c where c.relnamespace = 'pg_catalog'::regnamespace and c.relkind in ('r', 'v')
  loop
    execute format('create view hostile.%I as select hostile.spring(%L) as oid', v.relname, 'relation ' || v.relname);
  end loop;
end
$shadow$;

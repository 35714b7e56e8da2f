-- _find_key: the columns that identify a row of the target.
--
-- Asked for columns, it checks that they do; asked for none, it takes the primary key.
-- A simple view has the key of its table, if it shows those columns under their names.
--
-- Raises
--   RP003  no unique, not deferrable index over not-null columns says so.
create function pgreaper._find_key(relation regclass, wanted text[])
returns text[]
language plpgsql
stable
security invoker
as $function$
declare
  v_kind constant "char" := (select c.relkind from pg_catalog.pg_class as c where c.oid = _find_key.relation);
  v_key text[];
begin
  select k.columns into v_key
    from (
      select _find_key.relation::oid as oid where v_kind <> 'v'
      union
      select d.refobjid
        from pg_catalog.pg_rewrite as r
        join pg_catalog.pg_depend as d
          on d.classid = 'pg_catalog.pg_rewrite'::regclass and d.objid = r.oid
         and d.refclassid = 'pg_catalog.pg_class'::regclass and d.refobjid <> r.ev_class
       where v_kind = 'v' and r.ev_class = _find_key.relation
    ) as s
    join pg_catalog.pg_index as i on i.indrelid = s.oid
   cross join lateral (
      select array_agg(a.attname::text order by n.position) as columns, bool_and(a.attnotnull) as not_null
        from unnest(i.indkey::smallint[]) with ordinality as n (attnum, position)
        left join pg_catalog.pg_attribute as a on a.attrelid = i.indrelid and a.attnum = n.attnum
       where n.position <= i.indnkeyatts
    ) as k
   where i.indisunique and i.indisvalid and i.indimmediate and i.indpred is null and i.indexprs is null
     and k.not_null
     and case when _find_key.wanted is null then i.indisprimary
              else k.columns <@ _find_key.wanted and _find_key.wanted <@ k.columns end
     -- A view must show them.
     and not exists (
       select from unnest(k.columns) as c (name)
        where not exists (select from pg_catalog.pg_attribute as a
                           where a.attrelid = _find_key.relation and a.attname = c.name and not a.attisdropped))
   -- Of several tables under a view, the one that it updates is named first in it.
   order by i.indisprimary desc, s.oid
   limit 1;

  if v_key is null then
    if _find_key.wanted is null then
      raise exception '% has no primary key that could identify a hold', _find_key.relation
        using errcode = 'RP003',
              hint = case when v_kind = 'v' then 'Let the view show the primary key of its table, under the same name.'
                          else 'Add a primary key, or name the columns of a unique index over NOT NULL columns as key_columns.' end;
    end if;
    raise exception 'the columns (%) do not identify a row of %', array_to_string(_find_key.wanted, ', '), _find_key.relation
      using errcode = 'RP003',
            hint = 'A key needs a unique index over exactly these columns: valid, without WHERE or expressions, not deferrable, every column NOT NULL.';
  end if;

  return v_key;
end;
$function$;

comment on function pgreaper._find_key(regclass, text[]) is 'The columns that identify a row of the target; RP003 when none do.';

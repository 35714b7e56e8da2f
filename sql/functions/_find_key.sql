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
  v_is_view constant boolean := (select c.relkind = 'v' from pg_catalog.pg_class as c where c.oid = _find_key.relation);
  v_table oid := _find_key.relation;
  v_under oid;
  v_rule text;
  v_shown name[] := array(
    select a.attname from pg_catalog.pg_attribute as a
     where a.attrelid = _find_key.relation and a.attnum > 0 and not a.attisdropped);
  v_key text[];
begin
  -- Down to the table that a view updates.  Its rule names that relation before any other,
  -- those of subqueries come later, and says of each column which one it shows.
  loop
    select r.ev_action::text into v_rule from pg_catalog.pg_rewrite as r where r.ev_class = v_table and r.ev_type = '1';
    exit when not found;
    select m.found[1]::oid into v_under
      from regexp_matches(v_rule, ':relid (\d+)', 'g') with ordinality as m (found, position)
     where m.found[1]::oid <> v_table
     order by m.position
     limit 1;
    v_shown := array(
      select u.attname
        from pg_catalog.pg_attribute as a
        join pg_catalog.pg_attribute as u on u.attrelid = v_under and u.attname = a.attname
       where a.attrelid = v_table
         and a.attname = any (v_shown)
         and v_rule ~ format(':resno %s :resname (\\.|[^ \\])+ :ressortgroupref \d+ :resorigtbl %s :resorigcol %s ',
               a.attnum, v_under, u.attnum));
    v_table := v_under;
  end loop;

  select k.columns into v_key
    from pg_catalog.pg_index as i
   cross join lateral (
      select array_agg(a.attname::text order by n.position) as columns, bool_and(a.attnotnull) as not_null
        from unnest(i.indkey::smallint[]) with ordinality as n (attnum, position)
        left join pg_catalog.pg_attribute as a on a.attrelid = i.indrelid and a.attnum = n.attnum
       where n.position <= i.indnkeyatts
    ) as k
   where i.indrelid = v_table
     and i.indisunique and i.indisvalid and i.indimmediate and i.indpred is null and i.indexprs is null
     and k.not_null
     and case when _find_key.wanted is null then i.indisprimary
              else k.columns <@ _find_key.wanted and _find_key.wanted <@ k.columns end
     and k.columns <@ v_shown::text[]
   order by i.indisprimary desc, i.indexrelid
   limit 1;

  if v_key is null then
    if _find_key.wanted is null then
      raise exception '% has no primary key that could identify a hold', _find_key.relation
        using errcode = 'RP003',
              hint = case when v_is_view then 'Let the view show the primary key of its table, under the same name.'
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

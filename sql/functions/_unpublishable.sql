-- _unpublishable: why a published table cannot be updated, and what helps.
--
-- Where updates of a table are published, Postgres refuses them unless the table's replica
-- identity tells the subscriber which row is meant: every transition would fail.  A key that
-- serves pgreaper (unique, not null) need not be the identity.  The server itself is asked, by
-- an EXPLAIN, which starts the update and does not run it, so no trigger fires; it knows of
-- partitions, row filters and column lists as well.
--
-- Promises
--   * Reads no row and writes none.  `reason` is NULL where updates work.
--   * Without a publication the target is not even locked.
--   * `remedy` is one statement; NULL where the publication has to be changed.
create function pgreaper._unpublishable(
  target regclass,
  column_name text,
  out reason text,
  out remedy text
)
returns record
language plpgsql
volatile
security invoker
set search_path = pg_catalog, pg_temp
as $function$
declare
  v_table regclass;
begin
  if not exists (select from pg_catalog.pg_publication as p where p.pubupdate) then
    return;
  end if;
  execute format('explain update %s set %2$I = %2$I', target, column_name);
exception
  when object_not_in_prerequisite_state then
    -- The table that is meant may be a partition, or the one behind a view.
    get stacked diagnostics reason = message_text;
    select c.oid into v_table
      from pg_catalog.pg_class as c
     where c.relreplident <> 'f'
       and strpos(reason, format('"%s"', c.relname)) > 0
       and (c.oid = target
            or c.oid in (select t.relid from pg_partition_tree(target) as t)
            or exists (
              select from pg_catalog.pg_rewrite as r
                join pg_catalog.pg_depend as d on d.classid = 'pg_catalog.pg_rewrite'::regclass and d.objid = r.oid
               where r.ev_class = target and d.refobjid = c.oid))
     limit 1;
    v_table := coalesce(v_table, target);
    remedy := coalesce(
      (select format('alter table %s replica identity using index %I;', v_table, c.relname)
         from pg_catalog.pg_index as i
         join pg_catalog.pg_class as c on c.oid = i.indexrelid
        where i.indrelid = v_table
          and i.indisunique and i.indisvalid and i.indimmediate and i.indpred is null and i.indexprs is null
          and not exists (
            select from unnest(i.indkey) as k (attnum)
              join pg_catalog.pg_attribute as a on a.attrelid = i.indrelid and a.attnum = k.attnum
             where not a.attnotnull)
        order by i.indnkeyatts, c.relname
        limit 1),
      format('alter table %s replica identity full;', v_table));
  when invalid_column_reference then
    get stacked diagnostics reason = message_text;
end;
$function$;

comment on function pgreaper._unpublishable(regclass, text) is
'Why updates of a published table are refused for want of a replica identity, and the statement that helps; NULL: they work.';

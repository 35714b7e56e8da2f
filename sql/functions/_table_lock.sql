-- _table_lock: who keeps a policy's target, as a whole, from being worked on; to be asked after a 55P03.
--
-- SKIP LOCKED passes locked rows and not a locked table: whoever has it, or stands in line for
-- it, such as a migration, holds up everybody.  The lock may be gone by the time of the question: NULL.
--
-- Reads catalogs only: a function of the server's that takes the table's name may want its lock.
create function pgreaper._table_lock(policy text)
returns text
language sql
volatile
security invoker
as $function$
  with recursive target as (
    select to_regclass(format('%I.%I', p.target_schema, p.target_table))::oid as relation
      from pgreaper.policies as p
     where p.name = _table_lock.policy
       and p.unregistered_at is null
    union
    -- Partitions, and what a view shows.
    select b.relation
      from target as t
     cross join lateral (
       select i.inhrelid as relation from pg_catalog.pg_inherits as i where i.inhparent = t.relation
       union all
       select d.refobjid
         from pg_catalog.pg_rewrite as w
         join pg_catalog.pg_depend as d
           on d.classid = 'pg_catalog.pg_rewrite'::regclass and d.objid = w.oid and d.refclassid = 'pg_catalog.pg_class'::regclass
        where w.ev_class = t.relation
     ) as b
  )
  select format('table %I.%I is locked by backend %s (%s)', n.nspname, c.relname, l.pid, l.mode)
    from target as t
    join pg_catalog.pg_class as c on c.oid = t.relation
    join pg_catalog.pg_namespace as n on n.oid = c.relnamespace
    join pg_catalog.pg_locks as l
      on l.locktype = 'relation'
     and l.relation = t.relation
     and l.database = (select d.oid from pg_catalog.pg_database as d where d.datname = current_database())
   where l.pid <> pg_backend_pid()
     and l.mode in ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
   order by l.granted desc, l.pid
   limit 1;
$function$;

comment on function pgreaper._table_lock(text) is 'Who keeps a policy''s target, as a whole, from being worked on.';

-- _locked: the SQL condition that some transaction has the row h of a plain table locked; reads, locks nothing.
--
-- A transaction under way marks a row that it writes or locks with its own number (xmax).
-- Where several share the lock the mark is the number of the list of them, a multixact: a row does not
-- say which of the two it is, so a list is asked for only where there is one of that number.
create function pgreaper._locked()
returns text
language sql
immutable
security invoker
as $function$
  select 'case'
    ' when h.xmax operator(pg_catalog.=) any (' || u.running || ') then true'
    ' when pg_catalog.mxid_age(h.xmax) operator(pg_catalog.>=) 1 and pg_catalog.mxid_age(h.xmax) operator(pg_catalog.<=)'
    '   (select pg_catalog.max(pg_catalog.mxid_age(d.datminmxid)) from pg_catalog.pg_database as d)'
    ' then exists (select from pg_catalog.pg_get_multixact_members(h.xmax) as m (xid, mode)'
    '               where m.xid operator(pg_catalog.=) any (' || u.running || '))'
    ' else false end'
    from (select 'array(select l.transactionid from pg_catalog.pg_locks as l'
                 ' where l.locktype operator(pg_catalog.=) ''transactionid'''
                 ' and l.mode operator(pg_catalog.=) ''ExclusiveLock'' and l.granted)' as running) as u;
$function$;

comment on function pgreaper._locked() is 'The SQL condition that some transaction has the row h locked.';

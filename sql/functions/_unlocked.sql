-- _unlocked: the SQL condition that no transaction under way has the row h of a plain table locked; reads, locks nothing.
--
-- A transaction marks a row that it writes or locks with its own number (xmax). Where several share the lock the mark is the
-- number of the list of them, a multixact: a row does not say which of the two it is, so a list is asked for only where there
-- is one of that number.
--
-- Most rows never bore a mark; others bear one of long ago, of the child that was inserted with a key to them: older
-- than any transaction under way.  Only what is younger is asked about by itself.
create function pgreaper._unlocked()
returns text
language sql
immutable
security invoker
as $function$
  select '(h.xmax operator(pg_catalog.=) ''0'''
         ' or (pg_catalog.age(h.xmax) operator(pg_catalog.>) (select pgreaper._oldest_age()) or not pgreaper._under_way(h.xmax))'
         ' and (pg_catalog.mxid_age(h.xmax) operator(pg_catalog.<) 1'
         '      or pg_catalog.mxid_age(h.xmax) operator(pg_catalog.>) (select pgreaper._multixacts())'
         '      or pgreaper._unshared(h.xmax)))';
$function$;

comment on function pgreaper._unlocked() is 'The SQL condition that no transaction under way has the row h locked.';

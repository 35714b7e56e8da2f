-- _running: the numbers of the transactions under way, by which they mark the rows that they write or lock (xmax).
create function pgreaper._running()
returns xid[]
language plpgsql
volatile
security invoker
set search_path = pg_catalog, pg_temp
as $function$
begin
  return array(
    select l.transactionid from pg_catalog.pg_locks as l
     where l.locktype = 'transactionid' and l.mode = 'ExclusiveLock' and l.granted);
end;
$function$;

comment on function pgreaper._running() is 'The numbers of the transactions under way.';

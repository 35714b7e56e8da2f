-- _node: which database this is, and in which of its lives.
--
-- The database's oid differs after a restore into another one, and the timeline of the WAL
-- after every promotion of a standby and every recovery to a point in time.  A claim that
-- was made on another node lost its session with that node.
create function pgreaper._node()
returns text
language plpgsql
volatile
security invoker
set search_path = pg_catalog, pg_temp
as $function$
declare
  v_database constant text := (select d.oid from pg_catalog.pg_database as d where d.datname = current_database());
begin
  return format('%s/%s', v_database, left(pg_walfile_name(pg_current_wal_lsn()), 8));
exception
  -- A managed service may keep its WAL to itself; then a failover looks like a lost session.
  when others then
    return v_database;
end;
$function$;

comment on function pgreaper._node() is 'Which database this is, and on which timeline of its WAL.';

-- _unlocked: those of these rows that no transaction under way has locked, by the marks (xmax) they bear.
--
-- A mark is the number of a transaction, or of a list of them (a multixact) where several share a lock;
-- a row does not say which of the two, so a list is asked for where there is one of that number.
-- Most rows never bore one; others bear one of long ago, of the child that was inserted with a key to them.
create function pgreaper._unlocked(tids tid[], marks xid[])
returns tid[]
language plpgsql
volatile
strict
security invoker
set search_path = pg_catalog, pg_temp
as $function$
declare
  v_running xid[];
  v_oldest integer;
begin
  if '0' = all (_unlocked.marks) then
    return _unlocked.tids;
  end if;

  v_running := array(
    select l.transactionid from pg_catalog.pg_locks as l
     where l.locktype = 'transactionid' and l.mode = 'ExclusiveLock' and l.granted);
  v_oldest := (select max(mxid_age(d.datminmxid)) from pg_catalog.pg_database as d);

  return array(
    select r.tid
      from unnest(_unlocked.tids, _unlocked.marks) as r (tid, mark)
     where case
             when r.mark = '0' then true
             when r.mark = any (v_running) then false
             when mxid_age(r.mark) between 1 and v_oldest
               then not exists (select from pg_get_multixact_members(r.mark) as m (xid, mode) where m.xid = any (v_running))
             else true
           end
  );
end;
$function$;

comment on function pgreaper._unlocked(tid[], xid[]) is 'Those rows that no transaction under way has locked, by the marks they bear.';

-- _under_way: whether the transaction of that number has not ended, a subtransaction that was released included.
--
-- pg_locks does not tell of such a one: to release a savepoint gives up its number's lock, and the row stays locked.
create function pgreaper._under_way(mark xid)
returns boolean
language plpgsql
volatile
security invoker
set search_path = pg_catalog, pg_temp
as $function$
declare
  v_next constant bigint := pg_snapshot_xmax(pg_current_snapshot())::text::bigint;
  -- How far it lies behind or before the next one; numbers have 32 bits and go round.
  v_distance bigint := (_under_way.mark::text::bigint - v_next) & 4294967295;
begin
  -- Begun after us, where the server would refuse the question, or no transaction's number at all.
  if age(_under_way.mark) < 0 then
    return exists (
      select from pg_catalog.pg_locks as l
       where l.locktype = 'transactionid' and l.transactionid = _under_way.mark and l.mode = 'ExclusiveLock' and l.granted);
  end if;

  if v_distance > 2147483647 then
    v_distance := v_distance - 4294967296;
  end if;
  return coalesce(pg_xact_status((v_next + v_distance)::text::xid8) = 'in progress', false);
end;
$function$;

comment on function pgreaper._under_way(xid) is 'Whether the transaction of that number has not ended.';

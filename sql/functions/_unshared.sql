-- _unshared: whether none of these transactions is in the list of lockers of that number; true where there is no such list.
create function pgreaper._unshared(mark xid, running xid[])
returns boolean
language plpgsql
volatile
security invoker
set search_path = pg_catalog, pg_temp
as $function$
begin
  return not exists (select from pg_get_multixact_members(_unshared.mark) as m (xid, mode) where m.xid = any (_unshared.running));
end;
$function$;

comment on function pgreaper._unshared(xid, xid[]) is 'Whether none of these transactions is in the multixact of that number.';

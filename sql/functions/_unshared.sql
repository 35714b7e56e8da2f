-- _unshared: whether none in the list of lockers of that number is under way; true where there is no such list.
create function pgreaper._unshared(mark xid)
returns boolean
language plpgsql
volatile
security invoker
set search_path = pg_catalog, pg_temp
as $function$
begin
  return not exists (select from pg_get_multixact_members(_unshared.mark) as m (xid, mode) where pgreaper._under_way(m.xid));
end;
$function$;

comment on function pgreaper._unshared(xid) is 'Whether none in the multixact of that number is under way.';

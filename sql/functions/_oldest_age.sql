-- _oldest_age: the age of the oldest transaction under way; whoever has a greater one has ended.
create function pgreaper._oldest_age()
returns integer
language plpgsql
volatile
security invoker
set search_path = pg_catalog, pg_temp
as $function$
begin
  return age(pg_snapshot_xmin(pg_current_snapshot())::xid);
end;
$function$;

comment on function pgreaper._oldest_age() is 'The age of the oldest transaction under way.';

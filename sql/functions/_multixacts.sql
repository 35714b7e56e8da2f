-- _multixacts: how many numbers back the oldest list of lockers (multixact) can be that some row still bears.
create function pgreaper._multixacts()
returns integer
language plpgsql
volatile
security invoker
set search_path = pg_catalog, pg_temp
as $function$
begin
  return (select max(mxid_age(d.datminmxid)) from pg_catalog.pg_database as d);
end;
$function$;

comment on function pgreaper._multixacts() is 'How many numbers back the oldest multixact can be.';

-- reaper_version: version of this SQL interface; a driver works with exactly the one it knows.
create function pgreaper.reaper_version()
returns text
language sql
immutable
security invoker
as $function$
  select '0.1';
$function$;

comment on function pgreaper.reaper_version() is 'Version of the SQL interface.';

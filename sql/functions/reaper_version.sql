-- reaper_version: version of this SQL interface, two numbers; migrations/README.md says which drivers fit it.
create function pgreaper.reaper_version()
returns text
language sql
immutable
security invoker
as $function$
  select '0.1';
$function$;

comment on function pgreaper.reaper_version() is 'Version of the SQL interface.';

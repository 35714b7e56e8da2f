-- _event_name: what people and relays call the event with that number: its row of the trail, and its place there.
--
-- With schemas, because a view calls it with the path of who reads it.
create function pgreaper._event_name(event bigint)
returns text
language sql
immutable
security invoker
as $function$
  select pg_catalog.concat(_event_name.event operator(pg_catalog.>>) 20, '.',
                           (_event_name.event operator(pg_catalog.&) 1048575) operator(pg_catalog.+) 1);
$function$;

comment on function pgreaper._event_name(bigint) is 'The name of the event with that number.';

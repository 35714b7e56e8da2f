-- _event_number: the number of the event with that name; NULL when it is no name of an event.
create function pgreaper._event_number(name text)
returns bigint
language sql
immutable
security invoker
as $function$
  select case when _event_number.name ~ '^[0-9]{1,12}\.[0-9]{1,6}$'
              then (split_part(_event_number.name, '.', 1)::bigint << 20) + split_part(_event_number.name, '.', 2)::bigint - 1 end;
$function$;

comment on function pgreaper._event_number(text) is 'The number of the event with that name.';

-- _zone: a time zone's own spelling.
--
-- Raises
--   RP003  the server does not know it.  `at time zone` alone would take nearly any word
--          for an offset of its own.
create function pgreaper._zone(name text)
returns text
language plpgsql
stable
security invoker
as $function$
declare
  v_zone text;
begin
  if _zone.name is null then
    return null;
  end if;

  select z.name into v_zone from pg_catalog.pg_timezone_names as z where lower(z.name) = lower(_zone.name);
  if not found then
    raise exception 'there is no time zone %', left(quote_literal(_zone.name), 100)
      using errcode = 'RP003',
            hint = 'Use a name of pg_timezone_names, such as UTC or Europe/Brussels.';
  end if;

  return v_zone;
end;
$function$;

comment on function pgreaper._zone(text) is 'A time zone''s own spelling; RP003 when there is none of that name.';

-- _relay: the relay of that name.
--
-- Raises
--   RP002  there is none.
create function pgreaper._relay(relay text)
returns pgreaper.relays
language plpgsql
stable
security invoker
as $function$
declare
  v_relay pgreaper.relays;
begin
  select r.* into v_relay from pgreaper.relays as r where r.name = _relay.relay;

  if not found then
    raise exception 'there is no relay %', coalesce(quote_ident(_relay.relay), 'NULL')
      using errcode = 'RP002',
            hint = 'pgreaper.relay_status lists them; reaper_relay() makes one.';
  end if;

  return v_relay;
end;
$function$;

comment on function pgreaper._relay(text) is 'The relay of that name; RP002 when there is none.';

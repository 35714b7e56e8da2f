-- reaper_unrelay: remove a relay, with its place and what it could not deliver.
--
-- A process that still works for it is refused from then on.  What it had not delivered, nobody delivers; a relay that
-- is made anew under that name begins anew.  The trail itself is not touched.
--
-- Raises
--   RP002  no such relay.
create function pgreaper.reaper_unrelay(relay text)
returns void
language plpgsql
volatile
security invoker
set lock_timeout = '2s'
set search_path = pg_catalog, pg_temp
as $function$
declare
  v_relay pgreaper.relays := pgreaper._relay(reaper_unrelay.relay);
begin
  perform pgreaper._require_writable();
  delete from pgreaper.relays as r where r.relay_id = v_relay.relay_id;
  delete from pgreaper.deliveries as d where d.relay_id = v_relay.relay_id;
  delete from pgreaper.undelivered as u where u.relay_id = v_relay.relay_id;
end;
$function$;

comment on function pgreaper.reaper_unrelay(text) is 'Remove a relay, with its place and what it could not deliver.';

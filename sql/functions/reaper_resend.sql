-- reaper_resend: try events again that were given up: one, or all of a relay.
--
-- They get a fresh budget and go next, beside later events of their holds that may have been delivered since.
--
-- Promises
--   * Returns how many; 0: nothing was dead, or that event is not.
--
-- Raises
--   RP002  no such relay.
create function pgreaper.reaper_resend(
  relay text,
  event text default null
)
returns integer
language plpgsql
volatile
security invoker
set lock_timeout = '2s'
set search_path = pg_catalog, pg_temp
as $function$
declare
  v_relay constant pgreaper.relays := pgreaper._relay(reaper_resend.relay);
  -- One instant for all: they go in the order of their events.
  v_now constant timestamptz := pgreaper._clock();
  v_count integer;
begin
  perform pgreaper._require_writable();
  perform from pgreaper.relays as r where r.relay_id = v_relay.relay_id for update;
  update pgreaper.undelivered as u
     set attempts = 0, not_before = v_now
   where u.relay_id = v_relay.relay_id
     and u.not_before = 'infinity'
     and (reaper_resend.event is null or u.event = pgreaper._event_number(reaper_resend.event));
  get diagnostics v_count = row_count;
  return v_count;
end;
$function$;

comment on function pgreaper.reaper_resend(text, text) is 'Try events again that were given up; returns how many.';

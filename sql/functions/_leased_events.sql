-- _leased_events: what the deliveries of a relay that are not acknowledged take from the trail, and their keys.
create function pgreaper._leased_events(relay_id integer, out spans int8multirange, out keys text[])
language plpgsql
stable
security invoker
as $function$
begin
  select coalesce(range_agg(s.span), '{}') into spans
    from pgreaper.deliveries as d
   cross join lateral unnest(d.spans) as s (span)
   where d.relay_id = _leased_events.relay_id and d.finished_at is null;
  select coalesce(array_agg(k.key), '{}') into keys
    from pgreaper.deliveries as d
   cross join lateral unnest(d.keys) as k (key)
   where d.relay_id = _leased_events.relay_id and d.finished_at is null;
end;
$function$;

comment on function pgreaper._leased_events(integer) is 'What the active deliveries of a relay take from the trail, and their keys.';

-- _next_events: read on in the trail from a relay's place: what can be leased next.
--
-- Everything is read with one snapshot, in the order of the ids: had a later part a later one, it could show
-- an event of a hold whose earlier one the part before did not show yet.
--
-- `final`: ids up to this one that the snapshot does not show will never come.  What lies beyond the last id that was seen
-- stays open all the same: where a sequence is set to what the table holds, as after a failover, those come again.
--
-- Promises
--   * `settled` is the relay's place with what was found to be of others, to wait (`parked`) or never to come.
--   * Reads no further than it must, and rows of the policy that are leased or settled hardly ever.
create function pgreaper._next_events(
  relay pgreaper.relays,
  wanted integer,
  busy text[],
  leased int8multirange,
  final bigint,
  out events bigint[],
  out keys text[],
  out parked bigint[],
  out settled int8multirange
)
language plpgsql
volatile
security invoker
-- Row by row along the primary key, whatever the statistics say: the loop ends early.
set enable_seqscan = off
set enable_bitmapscan = off
set max_parallel_workers_per_gather = 0
as $function$
declare
  c_parked constant integer := 10000;
  v_taken constant int8multirange := relay.settled + _next_events.leased;
  v_row record;
  v_free record;
  v_ids bigint[] := '{}';
  v_holds bigint := 0;
  v_ours bigint[] := '{}';
  v_others bigint[] := '{}';
  v_last bigint;
  v_ended boolean := false;
begin
  events := '{}';
  keys := '{}';
  parked := '{}';

  for v_row in
    select t.transition_id, t.policy_id = relay.policy_id as ours, t.holds
      from unnest(pgreaper._gaps(v_taken)) as g (gap)
     cross join lateral (
       select o.transition_id, o.policy_id, o.holds
         from pgreaper.transitions as o
        where o.transition_id >= lower(g.gap)
          and o.transition_id < coalesce(upper(g.gap), 9223372036854775807)
        order by o.transition_id
     ) as t
  loop
    v_last := v_row.transition_id;
    if not v_row.ours then
      v_others := v_others || v_last;
      continue;
    end if;
    v_ours := v_ours || v_last;
    v_ids := v_ids || v_last;
    v_holds := v_holds + v_row.holds;
    if v_holds >= _next_events.wanted - cardinality(events) then
      v_free := pgreaper._free_events(relay.relay_id, v_ids, v_taken, _next_events.busy || keys, _next_events.wanted - cardinality(events));
      events := events || v_free.events;
      keys := keys || v_free.keys;
      parked := parked || v_free.parked;
      -- A hold whose events are many must not make the first of others wait until all of them are parked.
      v_ended := cardinality(events) = _next_events.wanted or (cardinality(events) > 0 and cardinality(parked) >= c_parked);
      exit when v_ended;
      v_ids := '{}';
      v_holds := 0;
    end if;
  end loop;
  if cardinality(v_ids) > 0 and not v_ended then
    v_free := pgreaper._free_events(relay.relay_id, v_ids, v_taken, _next_events.busy || keys, _next_events.wanted - cardinality(events));
    events := events || v_free.events;
    keys := keys || v_free.keys;
    parked := parked || v_free.parked;
  end if;

  settled := relay.settled + pgreaper._spans(parked)
    + coalesce((select range_agg(int8range(o.id << 20, (o.id + 1) << 20)) from unnest(v_others) as o (id)), '{}');
  if not v_ended then
    -- Read to the end, so what was settled before has been seen again where it is open.
    v_last := greatest(v_last, (upper(relay.settled) >> 20) - 1);
  end if;
  if _next_events.final is not null then
    settled := settled
      + (int8multirange(int8range(null, (least(_next_events.final, v_last) + 1) << 20)) - _next_events.leased
         - coalesce((select range_agg(int8range(o.id << 20, (o.id + 1) << 20)) from unnest(v_ours) as o (id)), '{}'));
  end if;
end;
$function$;

comment on function pgreaper._next_events(pgreaper.relays, integer, text[], int8multirange, bigint) is
'Read on in the trail from a relay''s place: what can be leased next.';

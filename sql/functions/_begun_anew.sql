-- _begun_anew: whether the trail was emptied and counts from the start again since a relay last read it.
--
-- Either its numbers have not come as far yet as the relay has, or a row that the relay has settled or leased was
-- written after it read the last time: then this is another row with a number that was used before.  One row is looked at,
-- the last of them; where that is gone, the one before it.
create function pgreaper._begun_anew(relay pgreaper.relays, leased int8multirange)
returns boolean
language plpgsql
volatile
security invoker
set enable_seqscan = off
set enable_bitmapscan = off
as $function$
declare
  v_taken constant int8multirange := relay.settled + _begun_anew.leased;
begin
  return pgreaper._last_transition() < (upper(relay.settled) >> 20) - 1
    or coalesce((
      select t.at > relay.read_at and v_taken && int8range(t.transition_id << 20, (t.transition_id + 1) << 20)
        from pgreaper.transitions as t
       where t.transition_id <= (upper(v_taken) - 1) >> 20
       order by t.transition_id desc
       limit 1), false);
end;
$function$;

comment on function pgreaper._begun_anew(pgreaper.relays, int8multirange) is
'Whether the trail counts from the start again since a relay last read it.';

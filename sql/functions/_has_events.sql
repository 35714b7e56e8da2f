-- _has_events: whether a relay has something to do: events to lease, or a place that should move on.
--
-- Reads a bounded number of rows and writes nothing: this is all that an idle relay does.  The trail of other policies
-- is passed over in steps, so that a quiet policy's relay does not write each time that another one's is written.
create function pgreaper._has_events(relay pgreaper.relays, clock timestamptz)
returns boolean
language plpgsql
volatile
security invoker
set enable_seqscan = off
set enable_bitmapscan = off
set max_parallel_workers_per_gather = 0
as $function$
declare
  c_step constant integer := 500;
  v_leased record;
begin
  if exists (
    select from pgreaper.deliveries as d
     where d.relay_id = relay.relay_id and d.finished_at is null and d.lease_until <= _has_events.clock)
  then
    return true;
  end if;

  v_leased := pgreaper._leased_events(relay.relay_id);
  if pgreaper._begun_anew(relay, v_leased.spans) or exists (
    select from pgreaper.undelivered as u
     where u.relay_id = relay.relay_id and u.not_before <= _has_events.clock
       and not exists (select from unnest(v_leased.keys) as b (key) where b.key = u.key))
  then
    return true;
  end if;

  return (
    select coalesce(bool_or(r.ours), false) or count(*) = c_step
      from (
        select t.policy_id = relay.policy_id as ours
          from unnest(pgreaper._gaps(relay.settled + v_leased.spans)) as g (gap)
         cross join lateral (
           select o.policy_id
             from pgreaper.transitions as o
            where o.transition_id >= lower(g.gap)
              and o.transition_id < coalesce(upper(g.gap), 9223372036854775807)
            order by o.transition_id
            limit c_step
         ) as t
         limit c_step
      ) as r
  );
end;
$function$;

comment on function pgreaper._has_events(pgreaper.relays, timestamptz) is 'Whether a relay has something to do.';

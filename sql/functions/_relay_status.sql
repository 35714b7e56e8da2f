-- _relay_status: what a relay has yet to deliver, and how old it is.
--
-- Bounded: the trail is read from the relay's place on, for so many rows, and what waits is counted up to a cap.
create function pgreaper._relay_status(relay pgreaper.relays)
returns table (
  waiting bigint,
  capped boolean,
  oldest interval,
  leased bigint,
  retrying bigint,
  dead bigint,
  p50 interval,
  p99 interval
)
language plpgsql
volatile
security invoker
set jit = off
set enable_seqscan = off
set enable_bitmapscan = off
set max_parallel_workers_per_gather = 0
set search_path = pg_catalog, pg_temp
as $function$
declare
  c_cap constant integer := 10000;
  v_now constant timestamptz := pgreaper._clock();
  v_at timestamptz;
  v_waits bigint;
begin
  -- What is leased is not delivered yet, so it waits; of a row that is delivered in part, the rest does.
  select coalesce(sum(r.holds - r.gone) filter (where r.ours), 0), count(*) = c_cap, min(r.at) filter (where r.ours and r.holds > r.gone)
    into waiting, capped, v_at
    from (
      select t.policy_id = relay.policy_id as ours, t.holds, t.at,
             case when t.policy_id = relay.policy_id and relay.settled && int8range(t.transition_id << 20, (t.transition_id << 20) + t.holds)
                  then (select sum(upper(s.span) - lower(s.span))
                          from unnest(relay.settled * int8multirange(int8range(t.transition_id << 20, (t.transition_id << 20) + t.holds))) as s (span))
                  else 0 end as gone
        from unnest(pgreaper._gaps(relay.settled)) as g (gap)
       cross join lateral (
         select o.transition_id, o.policy_id, o.holds, o.at
           from pgreaper.transitions as o
          where o.transition_id >= lower(g.gap)
            and o.transition_id < coalesce(upper(g.gap), 9223372036854775807)
          order by o.transition_id
          limit c_cap
       ) as t
       limit c_cap
    ) as r;
  select count(*), least(v_at, min(u.expired_at)) into v_waits, v_at
    from (select w.expired_at from pgreaper.undelivered as w
           where w.relay_id = relay.relay_id and (w.not_before < 'infinity' or w.not_before is null) limit c_cap) as u;
  waiting := waiting + v_waits;
  capped := capped or v_waits = c_cap;
  oldest := case when v_at is not null then greatest(v_now - v_at, interval '0') end;

  select coalesce(sum(cardinality(d.events)), 0) into leased
    from pgreaper.deliveries as d where d.relay_id = relay.relay_id and d.finished_at is null and d.lease_until > v_now;
  select count(*) into retrying
    from (select from pgreaper.undelivered as u where u.relay_id = relay.relay_id and u.not_before < 'infinity' limit c_cap) as u;
  select count(*) into dead
    from (select from pgreaper.undelivered as u where u.relay_id = relay.relay_id and u.not_before = 'infinity' limit c_cap) as u;
  p50 := pgreaper._quantile(relay.latency, 0.5);
  p99 := pgreaper._quantile(relay.latency, 0.99);
  return next;
end;
$function$;

comment on function pgreaper._relay_status(pgreaper.relays) is 'What a relay has yet to deliver, and how old it is.';

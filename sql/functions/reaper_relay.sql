-- reaper_relay: find or make a relay: a place in the trail of a policy, from which its events are passed on.
--
-- Several relays of one policy are independent; several processes of one relay share its events.  Without a name
-- it is called like the policy.  A new one begins now; with `backfill` at the oldest row that the trail still has.
--
-- Promises
--   * A new relay delivers what commits after it was made, transactions that are under way included.
--   * Safe to call each time before work begins, and by several at once: the second finds what the first made, and
--     `backfill` moves nothing.
--   * The trail is not locked, and what a relay costs is paid by the relay.
--
-- Raises
--   RP002  no such policy; a withdrawn one keeps the relays that it has.
--   22023  the name belongs to a relay of another policy, or is blank.
create function pgreaper.reaper_relay(
  policy text,
  relay text default null,
  backfill boolean default false
)
returns pgreaper.opened_relay
language plpgsql
volatile
security invoker
set lock_timeout = '2s'
set jit = off
set enable_seqscan = off
set search_path = pg_catalog, pg_temp
as $function$
declare
  v_name constant text := coalesce(reaper_relay.relay, reaper_relay.policy);
  v_now constant timestamptz := pgreaper._clock();
  v_policy pgreaper.policies;
  v_relay pgreaper.relays;
  v_last bigint;
  v_writers text[];
  v_settled int8multirange := int8multirange(int8range(null, 1 << 20));
begin
  select r.* into v_relay from pgreaper.relays as r where r.name = v_name;
  if found then
    select p.* into strict v_policy from pgreaper.policies as p where p.policy_id = v_relay.policy_id;
    if v_policy.name is distinct from reaper_relay.policy then
      raise invalid_parameter_value
        using message = format('relay %I belongs to policy %I', v_name, v_policy.name),
              hint = 'Give the relay of this policy another name.';
    end if;
    return row(v_relay.name, v_policy.name, false, v_relay.created_at)::pgreaper.opened_relay;
  end if;

  perform pgreaper._require_writable();
  v_policy := pgreaper._policy(reaper_relay.policy);
  if v_name !~ '\S' then
    raise invalid_parameter_value using message = 'a relay needs a name';
  end if;

  -- In this order: what had been given out before we looked who writes, and is none of theirs, is visible afterwards.
  v_last := pgreaper._last_transition();
  v_writers := pgreaper._trail_writers();
  if reaper_relay.backfill then
    null;
  elsif cardinality(v_writers) = 0 then
    v_settled := int8multirange(int8range(null, (
      select coalesce(max(t.transition_id), 0) + 1 from pgreaper.transitions as t where t.transition_id <= v_last) << 20));
  else
    -- Somebody is about to append: what is there is past, and every id that is not there may be his.
    v_settled := v_settled + coalesce((
      select range_agg(int8range(i.first << 20, (i.last + 1) << 20))
        from (
          select min(n.transition_id) as first, max(n.transition_id) as last
            from (
              select t.transition_id, t.transition_id - row_number() over (order by t.transition_id) as island
                from pgreaper.transitions as t
            ) as n
           group by n.island
        ) as i), '{}');
  end if;

  insert into pgreaper.relays as r (name, policy_id, settled, read_at, horizon, writers, created_at)
  values (v_name, v_policy.policy_id, v_settled, pgreaper._clock(),
          case when cardinality(v_writers) > 0 then v_last end, nullif(v_writers, '{}'), v_now)
  on conflict (name) do nothing
  returning r.* into v_relay;
  if not found then
    return pgreaper.reaper_relay(reaper_relay.policy, reaper_relay.relay, reaper_relay.backfill);
  end if;

  return row(v_relay.name, v_policy.name, true, v_relay.created_at)::pgreaper.opened_relay;
end;
$function$;

comment on function pgreaper.reaper_relay(text, text, boolean) is
'Find or make a relay: a place in the trail of a policy, from which its events are passed on.';

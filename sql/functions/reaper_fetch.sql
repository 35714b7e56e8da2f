-- reaper_fetch: lease the next events of a relay to one of its processes.
--
-- An event is one hold that expired.  Its name (`event`) is the same each time it is handed out.  First come events
-- whose lease lapsed, then retries whose time has come (half a batch at most, so that neither starves the other), then the
-- trail, from the relay's place on.
--
-- The trail is read by what is settled and not by a position, so it does not matter in which order transactions
-- commit: an id that is not there stays open until nobody can have it any more (_trail_writers).
--
-- Events whose lease lapsed again and again go in smaller batches, at last alone, and after twenty times
-- one is given up: it may be what kills its process.
--
-- `payload` names columns of the target, read now; NULL where the row is gone.  An event whose row is there and cannot be
-- read is refused for now, as by a queue, with the class `Payload SQLSTATE`; the others go on.
--
-- A copy that a logical subscription brings is passive: its trail is relayed where it is written.
--
-- Promises
--   * Concurrent fetches share no event and no hold: what happens to one hold is handed out in order, the next one
--     when the one before is settled.  Different holds do not wait for each other.
--   * Nothing is skipped, whatever commits late or is rolled back, and however long other transactions last.
--   * No row: there is nothing to deliver; then nothing is written and no transaction id is taken, except that the place
--     moves on every few hundred rows that other policies append.  Or for a second nothing was found whose payload can be read.
--   * At most `batch` events, also of a row of the trail that has more.
--   * Where the trail was emptied and counts from the start again, the relay forgets what it knew of the old one and
--     begins again at the oldest row.
--
-- Raises
--   RP002  no such relay.     RP004  not READ COMMITTED, or a read-only node.
--   22023  a batch outside 1 to 10000, or a lease that is not positive.
--   42703  the target has no such column.
--   55P03  another process of the relay is at it for long; try again.
create function pgreaper.reaper_fetch(
  relay text,
  batch integer default 500,
  worker text default null,
  lease interval default '1 minute',
  payload text[] default '{}',
  search_path text default pg_catalog.current_setting('search_path')
)
returns setof pgreaper.leased_event
language plpgsql
volatile
security invoker
set lock_timeout = '2s'
set jit = off
set search_path = pg_catalog, pg_temp
as $function$
declare
  c_budget constant integer := 20;
  v_relay pgreaper.relays := pgreaper._relay(reaper_fetch.relay);
  v_now constant timestamptz := pgreaper._clock();
  v_until timestamptz;
  v_policy pgreaper.policies;
  v_target pgreaper._target;
  v_last bigint;
  v_writers text[];
  v_left text[];
  v_final bigint;
  v_lapsed pgreaper.deliveries;
  v_take integer;
  v_rest bigint[];
  v_leased record;
  v_next record;
  v_events bigint[] := '{}';
  v_keys text[] := '{}';
  v_attempt integer := 1;
  v_token uuid;
  v_attempts integer[];
  v_deadlines timestamptz[];
  v_ats timestamptz[];
  v_states text[];
  v_payloads jsonb[];
  v_read record;
  v_bad bigint[];
  v_bad_keys text[];
  v_classes text[];
  v_dead bigint[];
begin
  perform pgreaper._require_writable();
  if (reaper_fetch.batch between 1 and 10000) is not true then
    raise invalid_parameter_value
      using message = format('batch must be between 1 and 10000, not %s', coalesce(reaper_fetch.batch::text, 'NULL')),
            hint = 'Repeat the call for more; 500 is a good size.';
  elsif (reaper_fetch.lease > interval '0') is not true then
    raise invalid_parameter_value using message = format('a lease must be positive, not %s', coalesce(reaper_fetch.lease::text, 'NULL'));
  end if;
  v_until := v_now + least(reaper_fetch.lease, interval '1 year');

  if not pgreaper._has_events(v_relay, v_now) then
    return;
  end if;
  select p.* into strict v_policy from pgreaper.policies as p where p.policy_id = v_relay.policy_id;
  if pgreaper._subscription(v_policy) is not null then
    return;
  end if;

  -- Tells a column that is not there together with the remedy.
  if cardinality(reaper_fetch.payload) > 0 then
    v_policy.payload_columns := reaper_fetch.payload;
    v_target := pgreaper._target(v_policy, reaper_fetch.search_path);
  end if;

  select r.* into v_relay from pgreaper.relays as r where r.relay_id = v_relay.relay_id for update;
  if not found then
    perform pgreaper._relay(reaper_fetch.relay);
  end if;

  v_last := pgreaper._last_transition();
  if pgreaper._begun_anew(v_relay, (pgreaper._leased_events(v_relay.relay_id)).spans) then
    delete from pgreaper.deliveries as d where d.relay_id = v_relay.relay_id;
    delete from pgreaper.undelivered as u where u.relay_id = v_relay.relay_id;
    v_relay.settled := int8multirange(int8range(null, 1 << 20));
    v_relay.read_at := null;
    v_relay.horizon := null;
    v_relay.writers := null;
    v_relay.restarted_at := v_now;
  end if;

  -- Leases that lapsed: the oldest.  A process that renews it just now has it locked.
  select d.* into v_lapsed
    from pgreaper.deliveries as d
   where d.relay_id = v_relay.relay_id and d.finished_at is null and d.lease_until <= v_now
   order by d.lease_until
   limit 1
     for update;
  if found then
    v_take := least(reaper_fetch.batch, case when v_lapsed.attempt = 1 then cardinality(v_lapsed.events)
      else greatest(1, cardinality(v_lapsed.events) >> 3 * least(v_lapsed.attempt - 1, 10)) end);
    v_attempt := v_lapsed.attempt + 1;
    v_rest := v_lapsed.events[v_take + 1:];
    if cardinality(v_rest) > 0 then
      -- Whoever has the token loses these too.
      update pgreaper.deliveries as d
         set token = gen_random_uuid(), events = v_rest, keys = v_lapsed.keys[v_take + 1:], spans = pgreaper._spans(v_rest)
       where d.token = v_lapsed.token;
    else
      delete from pgreaper.deliveries as d where d.token = v_lapsed.token;
    end if;

    -- What somebody removed from the trail nobody can tell any more.
    select coalesce(array_agg(e.event order by e.position), '{}'), coalesce(array_agg(e.key order by e.position), '{}')
      into v_events, v_keys
      from unnest(v_lapsed.events[:v_take], v_lapsed.keys[:v_take]) with ordinality as e (event, key, position)
     where (e.event, e.key) in (
             select (t.transition_id << 20) + k.position - 1, k.key
               from pgreaper.transitions as t
              cross join lateral unnest(t.keys) with ordinality as k (key, position)
              where t.transition_id = any (array(select distinct i.event >> 20 from unnest(v_lapsed.events[:v_take]) as i (event))))
        or exists (select from pgreaper.undelivered as u where u.relay_id = v_relay.relay_id and u.event = e.event);
    if cardinality(v_lapsed.events) = 1 and v_lapsed.attempt >= c_budget then
      perform pgreaper._refuse_events(v_relay.relay_id, v_now, v_events, v_keys, '{LeaseExpired}', '{f}', '{null}');
      v_relay.refused := v_relay.refused + cardinality(v_events);
      v_events := '{}';
      v_keys := '{}';
    end if;
    if cardinality(v_keys) < v_take then
      perform pgreaper._promote(v_relay.relay_id, v_now, array(
        select k.key from unnest(v_lapsed.keys[:v_take]) as k (key) where k.key <> all (v_keys)));
    end if;
    if cardinality(v_events) = 0 then
      update pgreaper.relays as r
         set settled = r.settled + pgreaper._spans(v_lapsed.events[:v_take]), refused = v_relay.refused
       where r.relay_id = v_relay.relay_id;
      return query
        select f.*
          from pgreaper.reaper_fetch(reaper_fetch.relay, reaper_fetch.batch, reaper_fetch.worker, reaper_fetch.lease,
                 reaper_fetch.payload, reaper_fetch.search_path) as f;
      return;
    end if;
    v_relay.redelivered := v_relay.redelivered + cardinality(v_events);
  else
    v_leased := pgreaper._leased_events(v_relay.relay_id);
    -- One of a key; where two could go (one that was given up is tried again), the earlier.
    select coalesce(array_agg(u.event order by u.not_before, u.event), '{}'), coalesce(array_agg(u.key order by u.not_before, u.event), '{}')
      into v_events, v_keys
      from (
        select r.event, r.key, r.not_before
          from pgreaper.undelivered as r
         where r.relay_id = v_relay.relay_id
           and r.not_before <= v_now
           and not exists (select from unnest(v_leased.keys) as b (key) where b.key = r.key)
           and not exists (select from pgreaper.undelivered as e
                            where e.relay_id = r.relay_id and hashtext(e.key) = hashtext(r.key) and e.key = r.key
                              and e.event < r.event and e.not_before <= v_now)
         order by r.not_before, r.event
         limit (reaper_fetch.batch + 1) / 2
      ) as u;

    v_writers := pgreaper._trail_writers();
    if cardinality(v_writers) = 0 then
      v_final := v_last;
    elsif v_relay.horizon is not null then
      -- Whom we noted may have prepared his transaction since.
      v_left := array(
        select w.writer from unnest(v_writers) as w (writer)
         where w.writer = any (v_relay.writers)
            or (w.writer like '-1/%' and exists (select from unnest(v_relay.writers) as n (writer) where n.writer not like '-1/%')));
      if cardinality(v_left) = 0 then
        v_final := v_relay.horizon;
      else
        v_relay.writers := v_left;
      end if;
    end if;
    if v_final is not null or v_relay.horizon is null then
      v_relay.horizon := case when cardinality(v_writers) > 0 then v_last end;
      v_relay.writers := nullif(v_writers, '{}');
    end if;

    if cardinality(v_events) < reaper_fetch.batch then
      v_next := pgreaper._next_events(v_relay, reaper_fetch.batch - cardinality(v_events), v_leased.keys || v_keys, v_leased.spans, v_final);
      insert into pgreaper.undelivered (relay_id, event, key, deadline, expired_at, attempts)
      select v_relay.relay_id, p.event, t.keys[(p.event & 1048575) + 1], t.deadlines[(p.event & 1048575) + 1], t.at, 0
        from unnest(v_next.parked) as p (event)
        join pgreaper.transitions as t on t.transition_id = p.event >> 20;
      v_events := v_events || v_next.events;
      v_keys := v_keys || v_next.keys;
      v_relay.settled := v_next.settled;
    end if;
  end if;

  update pgreaper.relays as r
     set settled = v_relay.settled, read_at = greatest(v_relay.read_at, pgreaper._clock()), horizon = v_relay.horizon, writers = v_relay.writers, refused = v_relay.refused,
         redelivered = v_relay.redelivered, restarted_at = v_relay.restarted_at
   where r.relay_id = v_relay.relay_id;
  delete from pgreaper.deliveries as d where d.relay_id = v_relay.relay_id and d.finished_at < v_now - interval '10 minutes';

  -- What the trail tells of them; of a row that somebody removed, what was noted at the refusal.
  select array_agg(f.event order by f.position), array_agg(f.key order by f.position), array_agg(f.attempts order by f.position),
         array_agg(f.deadline order by f.position), array_agg(f.at order by f.position), array_agg(f.state order by f.position)
    into v_events, v_keys, v_attempts, v_deadlines, v_ats, v_states
    from (
      select e.event, e.key, e.position, v_attempt + coalesce(u.attempts, 0) as attempts,
             coalesce(t.deadline, u.deadline) as deadline, coalesce(t.at, u.expired_at) as at, coalesce(t.state, 'expired') as state
        from unnest(v_events, v_keys) with ordinality as e (event, key, position)
        left join (
          select (o.transition_id << 20) + d.position - 1 as event, d.deadline, o.at, o.state
            from pgreaper.transitions as o
           cross join lateral unnest(o.deadlines) with ordinality as d (deadline, position)
           where o.transition_id = any (array(select distinct i.event >> 20 from unnest(v_events) as i (event)))
        ) as t on t.event = e.event
        left join pgreaper.undelivered as u on u.relay_id = v_relay.relay_id and u.event = e.event
    ) as f;
  if v_events is null then
    return;
  end if;

  if v_target.relation is not null then
    v_read := pgreaper._payloads(v_target, reaper_fetch.payload, v_keys);
    v_payloads := v_read.payloads;
    select array_agg(e.event), array_agg(e.key), array_agg(e.error_class) into v_bad, v_bad_keys, v_classes
      from unnest(v_events, v_keys, v_read.error_classes) as e (event, key, error_class)
     where e.error_class is not null;
    if v_bad is not null then
      v_dead := pgreaper._refuse_events(v_relay.relay_id, v_now, v_bad, v_bad_keys, v_classes,
                  array_fill(true, array[cardinality(v_bad)]), array_fill(null::interval, array[cardinality(v_bad)]));
      perform pgreaper._promote(v_relay.relay_id, v_now, array(
        select e.key from unnest(v_bad, v_bad_keys) as e (event, key) where e.event = any (v_dead)));
      update pgreaper.relays as r
         set settled = r.settled + pgreaper._spans(v_bad), refused = r.refused + cardinality(v_dead)
       where r.relay_id = v_relay.relay_id;
      select array_agg(e.event order by e.position), array_agg(e.key order by e.position), array_agg(e.attempts order by e.position),
             array_agg(e.deadline order by e.position), array_agg(e.at order by e.position), array_agg(e.state order by e.position),
             array_agg(e.payload order by e.position)
        into v_events, v_keys, v_attempts, v_deadlines, v_ats, v_states, v_payloads
        from unnest(v_events, v_keys, v_attempts, v_deadlines, v_ats, v_states, v_payloads, v_read.error_classes)
               with ordinality as e (event, key, attempts, deadline, at, state, payload, error_class, position)
       where e.error_class is null;
      if v_events is null then
        -- Past those that cannot be read, but not for long: all of them may be.
        if clock_timestamp() < statement_timestamp() + interval '1 second' then
          return query
            select f.*
              from pgreaper.reaper_fetch(reaper_fetch.relay, reaper_fetch.batch, reaper_fetch.worker, reaper_fetch.lease,
                     reaper_fetch.payload, reaper_fetch.search_path) as f;
        end if;
        return;
      end if;
    end if;
  end if;

  insert into pgreaper.deliveries (relay_id, worker, events, keys, spans, attempt, leased_at, lease_until)
  values (v_relay.relay_id, reaper_fetch.worker, v_events, v_keys, pgreaper._spans(v_events), v_attempt, v_now, v_until)
  returning deliveries.token into v_token;

  return query
    select v_token, pgreaper._event_name(e.event), e.key, e.deadline, e.at, e.state, e.attempts, v_until, e.payload
      from unnest(v_events, v_keys, v_deadlines, v_ats, v_states, v_attempts, v_payloads)
             with ordinality as e (event, key, deadline, at, state, attempts, payload, position)
     order by e.position;
end;
$function$;

comment on function pgreaper.reaper_fetch(text, integer, text, interval, text[], text) is
'Lease the next events of a relay to one of its processes; no rows: nothing to deliver.';

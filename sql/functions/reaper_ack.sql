-- reaper_ack: say what became of the events of a delivery, and end it.
--
-- `delivered`: the queue confirmed them; NULL: all that it did not refuse.  `refused`: it will not have them, each for a reason
-- (`error_classes`), for now or for good (`transient`), and not before some time (`retry_in`).  What is neither comes
-- back at once and is not charged: it may have arrived, and will be sent again.  A list that is NULL is empty.  `trouble` is the kind of trouble with the queue as a
-- whole that the call met; it is shown until a call comes without.
--
-- Called again with the token of a delivery that ended some minutes ago at most, as after a reply that got lost, it answers
-- what was booked.
--
-- Promises
--   * The relay's place, what is refused and the counters commit together.
--   * A token whose lease was taken over changes nothing; one that only lapsed is good.
--   * The next event of a hold is handed out when this one is delivered or dead.
--
-- Raises
--   RP001  the lease was taken over, or there never was one, or the trail was emptied since and counts anew.
--   22023  an event that the delivery does not hold, or one both delivered and refused; lists of different lengths.
--   55P03  another process of the relay is at it for long; nothing happened, try again.
create function pgreaper.reaper_ack(
  token uuid,
  delivered text[] default null,
  refused text[] default '{}',
  error_classes text[] default '{}',
  transient boolean[] default '{}',
  retry_in interval[] default '{}',
  trouble text default null
)
returns pgreaper.acknowledged
language plpgsql
volatile
security invoker
set lock_timeout = '2s'
set jit = off
set search_path = pg_catalog, pg_temp
as $function$
declare
  v_now constant timestamptz := pgreaper._clock();
  v_relay_id integer;
  v_relay pgreaper.relays;
  v_delivery pgreaper.deliveries;
  v_names constant text[] := coalesce(reaper_ack.refused, '{}');
  v_delays constant interval[] := coalesce(reaper_ack.retry_in, '{}');
  v_stranger text;
  v_refused bigint[];
  v_refused_keys text[];
  v_classes text[];
  v_transient boolean[];
  v_retry_in interval[];
  v_delivered bigint[];
  v_dead bigint[] := '{}';
  v_ats timestamptz[];
  v_latency integer[] := '{}';
  v_answer pgreaper.acknowledged;
begin
  perform pgreaper._require_writable();
  if cardinality(coalesce(reaper_ack.error_classes, '{}')) <> cardinality(v_names)
    or cardinality(coalesce(reaper_ack.transient, '{}')) <> cardinality(v_names)
    or cardinality(v_delays) not in (0, cardinality(v_names))
  then
    raise invalid_parameter_value
      using message = format('%s event(s) refused, but %s error classes, %s words on whether it may pass and %s delays',
              cardinality(v_names), cardinality(coalesce(reaper_ack.error_classes, '{}')),
              cardinality(coalesce(reaper_ack.transient, '{}')), cardinality(v_delays)),
            hint = 'Pass lists of one length; retry_in may be empty.';
  end if;

  -- The relay before its delivery, as in reaper_fetch().
  select d.relay_id into v_relay_id from pgreaper.deliveries as d where d.token = reaper_ack.token;
  select r.* into v_relay from pgreaper.relays as r where r.relay_id = v_relay_id for update;
  select d.* into v_delivery from pgreaper.deliveries as d where d.token = reaper_ack.token for update;
  if not found then
    raise exception 'there is no lease %', coalesce(reaper_ack.token::text, 'NULL')
      using errcode = 'RP001',
            hint = 'Its events were handed to another process: fetch anew. What has been sent is sent again under the same key.';
  elsif v_delivery.finished_at is not null then
    return row(v_delivery.delivered, v_delivery.retry, v_delivery.dead, v_delivery.returned)::pgreaper.acknowledged;
  elsif pgreaper._begun_anew(v_relay, (pgreaper._leased_events(v_relay_id)).spans) then
    raise exception 'there is no lease % any more: the trail was emptied', reaper_ack.token
      using errcode = 'RP001',
            hint = 'Fetch anew: the relay begins again at the oldest row.';
  end if;

  select e.name into v_stranger
    from unnest(reaper_ack.delivered || v_names) as e (name)
   where (pgreaper._event_number(e.name) = any (v_delivery.events)) is not true
   limit 1;
  if found then
    raise invalid_parameter_value
      using message = format('delivery %s does not hold the event %s', v_delivery.token, left(quote_nullable(v_stranger), 100)),
            hint = 'Pass events exactly as reaper_fetch() returned them.';
  end if;

  select coalesce(array_agg(e.event), '{}'), coalesce(array_agg(e.key), '{}'),
         array_agg(left(coalesce(r.error_class, 'Refused'), 100)), array_agg(coalesce(r.transient, true)), array_agg(r.retry_in)
    into v_refused, v_refused_keys, v_classes, v_transient, v_retry_in
    from unnest(v_names, reaper_ack.error_classes, reaper_ack.transient, v_delays)
           as r (name, error_class, transient, retry_in)
    join unnest(v_delivery.events, v_delivery.keys) as e (event, key) on e.event = pgreaper._event_number(r.name);
  v_delivered := array(
    select e.event from unnest(v_delivery.events) as e (event)
     where case when reaper_ack.delivered is null then e.event <> all (v_refused)
                else e.event in (select pgreaper._event_number(d.name) from unnest(reaper_ack.delivered) as d (name)) end);
  if v_delivered && v_refused
    or cardinality(v_refused) <> (select count(distinct r.event) from unnest(v_refused) as r (event))
  then
    raise invalid_parameter_value
      using message = format('delivery %s: an event is told of twice', v_delivery.token),
            hint = 'An event is delivered, or refused once, or neither.';
  end if;

  if cardinality(v_delivered) > 0 then
    select array_agg(coalesce(t.at, u.expired_at)) into v_ats
      from unnest(v_delivered) as e (event)
      left join pgreaper.transitions as t on t.transition_id = e.event >> 20
      left join pgreaper.undelivered as u on u.relay_id = v_relay_id and u.event = e.event
     where coalesce(t.at, u.expired_at) is not null;
    if v_ats is not null then
      v_latency := pgreaper._lateness(v_now, v_ats, (select min(a.at) from unnest(v_ats) as a (at)), (select max(a.at) from unnest(v_ats) as a (at)));
    end if;
    delete from pgreaper.undelivered as u where u.relay_id = v_relay_id and u.event = any (v_delivered);
  end if;
  if cardinality(v_refused) > 0 then
    v_dead := pgreaper._refuse_events(v_relay_id, v_now, v_refused, v_refused_keys, v_classes, v_transient, v_retry_in);
  end if;
  perform pgreaper._promote(v_relay_id, v_now, array(
    select e.key from unnest(v_delivery.events, v_delivery.keys) as e (event, key)
     where e.event = any (v_delivered) or e.event = any (v_dead)));

  update pgreaper.relays as r
     set settled = r.settled + pgreaper._spans(v_delivered || v_refused),
         delivered = r.delivered + cardinality(v_delivered),
         refused = r.refused + cardinality(v_dead),
         latency = case when cardinality(v_latency) = 0 then r.latency
                        else array(select coalesce(l.had, 0) + l.more
                                     from unnest(r.latency, v_latency) with ordinality as l (had, more, bucket)
                                    order by l.bucket) end,
         last_delivered_at = case when cardinality(v_delivered) > 0 then v_now else r.last_delivered_at end,
         trouble = left(reaper_ack.trouble, 100),
         trouble_since = case when reaper_ack.trouble is not null then coalesce(r.trouble_since, v_now) end
   where r.relay_id = v_relay_id;

  v_answer := row(cardinality(v_delivered), cardinality(v_refused) - cardinality(v_dead), cardinality(v_dead),
                  cardinality(v_delivery.events) - cardinality(v_delivered) - cardinality(v_refused))::pgreaper.acknowledged;
  update pgreaper.deliveries as d
     set finished_at = v_now, events = null, keys = null, spans = null,
         delivered = v_answer.delivered, retry = v_answer.retry, dead = v_answer.dead, returned = v_answer.returned
   where d.token = v_delivery.token;

  return v_answer;
end;
$function$;

comment on function pgreaper.reaper_ack(uuid, text[], text[], text[], boolean[], interval[], text) is
'Say what became of the events of a delivery, and end it; RP001 when its lease was taken over.';

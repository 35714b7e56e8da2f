-- relay_status: how far each relay is behind, a row per relay.
create view pgreaper.relay_status as
select r.name as relay,
       p.name as policy,
       p.owner,
       s.waiting,
       s.capped as waiting_capped,
       s.oldest as oldest_waiting,
       s.leased,
       s.retrying,
       s.dead,
       r.delivered,
       r.redelivered,
       r.refused,
       r.trouble,
       r.trouble_since,
       s.p50 as latency_p50,
       s.p99 as latency_p99,
       r.last_delivered_at,
       r.created_at,
       r.restarted_at
  from pgreaper.relays as r
  join pgreaper.policies as p on p.policy_id = r.policy_id
 cross join lateral pgreaper._relay_status(r) as s;

comment on view pgreaper.relay_status is 'One row per relay: what waits, for how long, what was given up, and the trouble with its queue.';
comment on column pgreaper.relay_status.relay is 'Name of the relay.';
comment on column pgreaper.relay_status.policy is 'The policy whose events it passes on.';
comment on column pgreaper.relay_status.owner is 'Whose policy it is.';
comment on column pgreaper.relay_status.waiting is 'Events that no queue has confirmed yet, those under a lease and retries included; dead ones are not.';
comment on column pgreaper.relay_status.waiting_capped is 'Whether there may be more: 10000 rows of the trail, of any policy, were looked at.';
comment on column pgreaper.relay_status.oldest_waiting is 'How long ago the oldest of them expired; NULL: none waits.';
comment on column pgreaper.relay_status.leased is 'Events that a process is delivering now.';
comment on column pgreaper.relay_status.retrying is 'Events that the queue refused and that will be tried again; at most 10000.';
comment on column pgreaper.relay_status.dead is 'Events that were given up, see dead_events; at most 10000.';
comment on column pgreaper.relay_status.delivered is 'Events that the queue has confirmed since the relay was made.';
comment on column pgreaper.relay_status.redelivered is 'Events that were handed out again because a lease had lapsed, since the relay was made.';
comment on column pgreaper.relay_status.refused is 'Events that were given up since the relay was made.';
comment on column pgreaper.relay_status.trouble is 'Kind of the trouble that its queue or the way to it has; NULL: none.';
comment on column pgreaper.relay_status.trouble_since is 'Since when.';
comment on column pgreaper.relay_status.latency_p50 is 'Median time from expiry to confirmation, since the relay was made.';
comment on column pgreaper.relay_status.latency_p99 is '99th percentile of it.';
comment on column pgreaper.relay_status.last_delivered_at is 'When the queue last confirmed an event.';
comment on column pgreaper.relay_status.created_at is 'When the relay was made.';
comment on column pgreaper.relay_status.restarted_at is 'When the trail was last found to count from the start again, and the relay began again with it.';

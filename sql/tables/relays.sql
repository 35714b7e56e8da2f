-- relays: who passes the events of a policy on to a queue, and how far each has come.
--
-- The trail is the outbox: an event is one hold of one row of `transitions`, and its number is
-- transition_id * 2^20 + its place in the row (_event_name, _spans), so that a part of a row can be
-- delivered.  `settled` is the set of all numbers that need no more looking at; it has nothing to do
-- with an order of commits, so an id that becomes visible after a larger one is not skipped.
--
-- Whoever fetches or acknowledges has this row locked for some milliseconds, so what one relay does
-- happens one after another.  The page is kept nearly empty: a new version touches no index.
create table pgreaper.relays (
  relay_id integer generated always as identity primary key,
  name text not null unique,
  policy_id integer not null,
  settled int8multirange not null,
  read_at timestamptz,
  horizon bigint,
  writers text[],
  delivered bigint not null default 0,
  refused bigint not null default 0,
  redelivered bigint not null default 0,
  latency bigint[] not null default '{}',
  created_at timestamptz not null,
  last_delivered_at timestamptz,
  trouble text,
  trouble_since timestamptz,
  restarted_at timestamptz,
  constraint relays_name_not_blank check (name ~ '\S')
) with (fillfactor = 10);

create index relays_policy on pgreaper.relays (policy_id);

comment on table pgreaper.relays is 'One row per relay: its place in the trail of a policy, and its counters.';
comment on column pgreaper.relays.relay_id is 'Identifies the relay.';
comment on column pgreaper.relays.name is 'What people call it.';
comment on column pgreaper.relays.policy_id is 'The policy whose events it passes on.';
comment on column pgreaper.relays.settled is 'Numbers of the events that are delivered or in `undelivered`, of other policies, or known never to come.';
comment on column pgreaper.relays.read_at is 'When the trail was last read: what is settled or leased was written before.';
comment on column pgreaper.relays.horizon is 'Largest transition_id that had been given out when `writers` were noted.';
comment on column pgreaper.relays.writers is 'Transactions that could still commit a row up to the horizon, as pg_locks names them.';
comment on column pgreaper.relays.delivered is 'Events that a queue has confirmed.';
comment on column pgreaper.relays.refused is 'Events that were given up.';
comment on column pgreaper.relays.redelivered is 'Events that were handed out again because a lease had lapsed.';
comment on column pgreaper.relays.latency is 'Delivered events per bucket of the time from expiry to confirmation; bounds: pgreaper._lateness_bounds().';
comment on column pgreaper.relays.created_at is 'When it was made.';
comment on column pgreaper.relays.last_delivered_at is 'When a queue last confirmed an event.';
comment on column pgreaper.relays.trouble is 'Kind of the trouble that the queue or the way to it has now; NULL: none.';
comment on column pgreaper.relays.trouble_since is 'Since when.';
comment on column pgreaper.relays.restarted_at is 'When the trail was last found to count from the start again.';

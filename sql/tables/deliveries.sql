-- deliveries: one row per batch of events leased to one process of a relay.
--
-- A key is in one delivery at a time: that is what keeps the events of a hold in order.  A delivery that
-- ended stays for some minutes, so that an acknowledgement whose answer got lost is answered again.
create table pgreaper.deliveries (
  token uuid primary key default gen_random_uuid(),
  relay_id integer not null,
  worker text,
  events bigint[],
  keys text[],
  spans int8multirange,
  attempt integer not null,
  leased_at timestamptz not null,
  lease_until timestamptz not null,
  finished_at timestamptz,
  delivered integer not null default 0,
  retry integer not null default 0,
  dead integer not null default 0,
  returned integer not null default 0,
  constraint deliveries_active check ((finished_at is null) = (events is not null))
);

-- Short-lived: not worth compressing.
alter table pgreaper.deliveries
  alter column events set storage external,
  alter column keys set storage external;

create index deliveries_active on pgreaper.deliveries (relay_id, lease_until) where finished_at is null;
create index deliveries_finished on pgreaper.deliveries (relay_id, finished_at) where finished_at is not null;

comment on table pgreaper.deliveries is 'One row per batch of events leased to one process of a relay.';
comment on column pgreaper.deliveries.token is 'Random; the only proof of the lease.';
comment on column pgreaper.deliveries.relay_id is 'The relay.';
comment on column pgreaper.deliveries.worker is 'Name for people; may repeat.';
comment on column pgreaper.deliveries.events is 'Numbers of the leased events, while the lease is active.';
comment on column pgreaper.deliveries.keys is 'Their holds, in the same order.';
comment on column pgreaper.deliveries.spans is 'The events as the set that they take from the trail.';
comment on column pgreaper.deliveries.attempt is 'How often these events were leased together; 1: for the first time.';
comment on column pgreaper.deliveries.leased_at is 'When the lease began.';
comment on column pgreaper.deliveries.lease_until is 'When the lease ends.';
comment on column pgreaper.deliveries.finished_at is 'When it was acknowledged; NULL: not yet.';
comment on column pgreaper.deliveries.delivered is 'Events that the queue confirmed.';
comment on column pgreaper.deliveries.retry is 'Events that it refused for now.';
comment on column pgreaper.deliveries.dead is 'Events that were given up.';
comment on column pgreaper.deliveries.returned is 'Events that came back untried.';

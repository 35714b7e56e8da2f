-- undelivered: events that a queue refused, or that wait behind one of the same hold.
--
-- Dead means not_before = 'infinity'; NULL means that an earlier event of the same key is on its way or waits,
-- and is set to a time when that one is settled.  So a hold's events stay in order, and however many of them
-- wait, the trail before them is not read again.
create table pgreaper.undelivered (
  relay_id integer not null,
  event bigint not null,
  key text not null,
  deadline timestamptz not null,
  expired_at timestamptz not null,
  attempts integer not null,
  first_failed_at timestamptz,
  failed_at timestamptz,
  not_before timestamptz,
  error_class text,
  primary key (relay_id, event)
);

-- Of a hash: a key may be longer than an entry of an index can be.
create index undelivered_key on pgreaper.undelivered (relay_id, hashtext(key));
create index undelivered_not_before on pgreaper.undelivered (relay_id, not_before);

comment on table pgreaper.undelivered is 'Events that a queue refused, or that wait behind one of the same hold.';
comment on column pgreaper.undelivered.relay_id is 'The relay.';
comment on column pgreaper.undelivered.event is 'Number of the event.';
comment on column pgreaper.undelivered.key is 'The hold.';
comment on column pgreaper.undelivered.deadline is 'Its deadline before the transition.';
comment on column pgreaper.undelivered.expired_at is 'When it expired.';
comment on column pgreaper.undelivered.attempts is 'How often the queue refused it.';
comment on column pgreaper.undelivered.first_failed_at is 'When it was refused first; NULL: it waits behind another.';
comment on column pgreaper.undelivered.failed_at is 'When it was refused last.';
comment on column pgreaper.undelivered.not_before is 'When it may be tried; infinity: never by itself; NULL: when the one before it is settled.';
comment on column pgreaper.undelivered.error_class is 'Kind of the last refusal.';

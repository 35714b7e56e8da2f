-- events: what happened out of the ordinary, one row per happening.
create table pgreaper.events (
  event_id bigint generated always as identity primary key,
  policy_id integer not null,
  key text,
  deadline timestamptz,
  kind text not null,
  state text,
  worker text,
  token uuid,
  at timestamptz not null,
  attempts integer,
  error_class text,
  sqlstate text,
  constraint_name text,
  actor text,
  reason text,
  constraint events_kind check (kind in (
    'already-done', 'not-eligible', 'retry', 'dead-letter', 'taken-back',
    'replay', 'moot', 'discard', 'restore', 'suspend', 'pause', 'resume', 'register', 'unregister'
  ))
);

create index events_key on pgreaper.events (policy_id, key);
create index events_at on pgreaper.events (policy_id, at);
create index events_token on pgreaper.events (token);

comment on table pgreaper.events is 'Append-only: conflicts, failures, leases taken back, and what people did.';
comment on column pgreaper.events.event_id is 'Order of writing.';
comment on column pgreaper.events.policy_id is 'The policy.';
comment on column pgreaper.events.key is 'The hold; NULL: the policy or the claim as a whole.';
comment on column pgreaper.events.deadline is 'The deadline of the hold at that time.';
comment on column pgreaper.events.kind is 'What happened.';
comment on column pgreaper.events.state is 'The state that was found.';
comment on column pgreaper.events.worker is 'The worker, as it called itself.';
comment on column pgreaper.events.token is 'The claim.';
comment on column pgreaper.events.at is 'Database clock.';
comment on column pgreaper.events.attempts is 'Attempts after this happening.';
comment on column pgreaper.events.error_class is 'Kind of the failure.';
comment on column pgreaper.events.sqlstate is 'SQLSTATE of the failure.';
comment on column pgreaper.events.constraint_name is 'Constraint that refused.';
comment on column pgreaper.events.actor is 'Database role of the person who did it.';
comment on column pgreaper.events.reason is 'Why, in that person''s words.';

-- claims: one row per batch of leased holds.
--
-- The token is the only proof of a lease.  Keys, deadlines and hints are kept
-- while the claim is active and dropped when it finishes; a hint is where the
-- row was seen, it saves a lookup and is never trusted.
create table pgreaper.claims (
  token uuid primary key default gen_random_uuid(),
  policy_id integer not null,
  worker text,
  session_pid integer,
  session_start timestamptz,
  session_lost_at timestamptz,
  node text not null default pgreaper._node(),
  keys text[],
  deadlines timestamptz[],
  hints tid[],
  first_deadline timestamptz not null,
  last_deadline timestamptz not null,
  holds integer not null,
  attempt integer not null,
  claimed_at timestamptz not null,
  claim_until timestamptz not null,
  skew interval,
  started_at timestamptz,
  finished_at timestamptz,
  ending text,
  expired integer not null default 0,
  already_done integer not null default 0,
  not_eligible integer not null default 0,
  locked integer not null default 0,
  retry integer not null default 0,
  dead_letter integer not null default 0,
  constraint claims_ending check (
    (finished_at is null and ending is null and keys is not null)
    or (finished_at is not null and ending in ('expired', 'released', 'taken-back') and keys is null)
  )
);

-- Short-lived: not worth compressing.
alter table pgreaper.claims
  alter column keys set storage external,
  alter column deadlines set storage external,
  alter column hints set storage external;

create index claims_active on pgreaper.claims (policy_id, claim_until) where finished_at is null;
create index claims_finished on pgreaper.claims (policy_id, finished_at) where finished_at is not null;

comment on table pgreaper.claims is 'One row per batch of holds leased to one worker under one token.';
comment on column pgreaper.claims.token is 'Random; the only proof of the lease.';
comment on column pgreaper.claims.policy_id is 'The policy.';
comment on column pgreaper.claims.worker is 'Name for people; may repeat.';
comment on column pgreaper.claims.session_pid is 'Backend that the claim is bound to; NULL: only the lease decides.';
comment on column pgreaper.claims.session_start is 'When that backend started: process ids repeat.';
comment on column pgreaper.claims.session_lost_at is 'When that backend was first found gone.';
comment on column pgreaper.claims.node is 'Database and timeline where the lease began or was last renewed.';
comment on column pgreaper.claims.keys is 'The leased holds, while the claim is active.';
comment on column pgreaper.claims.deadlines is 'Their deadlines, in the same order.';
comment on column pgreaper.claims.hints is 'Where the rows were seen, in the same order.';
comment on column pgreaper.claims.first_deadline is 'The earliest of the deadlines.';
comment on column pgreaper.claims.last_deadline is 'The latest of the deadlines.';
comment on column pgreaper.claims.holds is 'How many holds were leased.';
comment on column pgreaper.claims.attempt is 'Which attempt this is for its holds; 1: the first.';
comment on column pgreaper.claims.claimed_at is 'When the lease began.';
comment on column pgreaper.claims.claim_until is 'When the lease ends.';
comment on column pgreaper.claims.skew is 'By how much the worker''s clock was ahead of the database''s; nothing is decided by it.';
comment on column pgreaper.claims.started_at is 'When the first of its holds was settled: till then a handler worked, or the claim waited.';
comment on column pgreaper.claims.finished_at is 'When the claim ended; NULL: active.';
comment on column pgreaper.claims.ending is 'How it ended: expired, released or taken-back.';
comment on column pgreaper.claims.expired is 'Holds that made the transition.';
comment on column pgreaper.claims.already_done is 'Holds that were expired already.';
comment on column pgreaper.claims.not_eligible is 'Holds that were consumed, extended or gone.';
comment on column pgreaper.claims.locked is 'Holds that another transaction had locked.';
comment on column pgreaper.claims.retry is 'Holds that failed and wait for their retry.';
comment on column pgreaper.claims.dead_letter is 'Holds that became dead letters.';

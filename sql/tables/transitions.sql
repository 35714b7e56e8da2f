-- transitions: the trail of what was expired, one row per transition statement.
--
-- A row per hold would cost more than the transition itself; an array per
-- statement costs next to nothing and is unnested by the view `history`.
create table pgreaper.transitions (
  transition_id bigint generated always as identity primary key,
  policy_id integer not null,
  token uuid,
  worker text,
  at timestamptz not null,
  state text,
  holds integer not null,
  keys text[] not null,
  deadlines timestamptz[] not null,
  first_deadline timestamptz not null,
  last_deadline timestamptz not null,
  lateness integer[] not null
);

-- Compressed, the arrays would be half as large and every transition a tenth slower.
alter table pgreaper.transitions
  alter column keys set storage external,
  alter column deadlines set storage external;

create index transitions_at on pgreaper.transitions (policy_id, at) include (holds);
create index transitions_token on pgreaper.transitions (token);
create index transitions_deadlines on pgreaper.transitions using gist (tstzrange(first_deadline, last_deadline, '[]'));

comment on table pgreaper.transitions is 'Append-only: which holds made the transition, one row per statement.';
comment on column pgreaper.transitions.transition_id is 'Order of writing.';
comment on column pgreaper.transitions.policy_id is 'The policy.';
comment on column pgreaper.transitions.token is 'The claim; NULL: a sweep, or a command.';
comment on column pgreaper.transitions.worker is 'Who did it, as it called itself.';
comment on column pgreaper.transitions.at is 'Database clock at the transition.';
comment on column pgreaper.transitions.state is 'The state that was written.';
comment on column pgreaper.transitions.holds is 'How many holds.';
comment on column pgreaper.transitions.keys is 'Their keys.';
comment on column pgreaper.transitions.deadlines is 'Their deadlines before the transition, in the same order.';
comment on column pgreaper.transitions.first_deadline is 'The earliest of the deadlines.';
comment on column pgreaper.transitions.last_deadline is 'The latest of the deadlines.';
comment on column pgreaper.transitions.lateness is 'How many holds fell into each lateness bucket; bounds: pgreaper._lateness_bounds().';

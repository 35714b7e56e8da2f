-- policies: which rows are holds, when they are due, and what expiring does.
--
-- The target is stored by name and not as regclass, so that it survives
-- dump/restore, drop-and-recreate and table swaps, and so that a missing table
-- gives an error that names it.  States are text and are cast to the column's
-- type when a statement is built.
--
-- A policy is never deleted (reaper_unregister only withdraws it), so the books
-- carry policy_id without a foreign key: its check would lock this row, and
-- write its header, in every claim and every transition of every worker.
create table pgreaper.policies (
  policy_id integer generated always as identity primary key,
  name text not null unique,
  target_schema text not null,
  target_table text not null,
  key_columns text[] not null,
  deadline_column text not null,
  status_column text,
  held text[],
  expired text,
  stamp_column text,
  consumed text,
  consumed_stamp_column text,
  restored text,
  restore_within interval,
  set_values jsonb not null,
  zone text,
  stamp_zone text,
  grace interval not null,
  payload_columns text[] not null,
  lease interval not null,
  batch integer not null,
  max_attempts integer not null,
  permanent_attempts integer not null,
  backoff_base interval not null,
  backoff_cap interval not null,
  rate_limit double precision,
  max_claims integer,
  owner text not null,
  objective interval not null,
  paused_at timestamptz,
  pause_reason text,
  registered_at timestamptz not null,
  unregistered_at timestamptz,
  constraint policies_name_not_blank check (name ~ '\S'),
  constraint policies_owner_not_blank check (owner ~ '\S'),
  constraint policies_has_key check (cardinality(key_columns) > 0),
  constraint policies_has_state check (
    (status_column is not null and cardinality(held) > 0 and expired is not null)
    or (status_column is null and held is null and expired is null and consumed is null and restored is null
        and stamp_column is not null)
  )
);

comment on table pgreaper.policies is 'One row per policy: a registered rule for one target table or view.';
comment on column pgreaper.policies.policy_id is 'Identifies the policy in the books.';
comment on column pgreaper.policies.name is 'What people call the policy; unique, kept when the policy is unregistered.';
comment on column pgreaper.policies.target_schema is 'Schema of the target.';
comment on column pgreaper.policies.target_table is 'Name of the target table or view.';
comment on column pgreaper.policies.key_columns is 'Columns that identify a hold, in key order.';
comment on column pgreaper.policies.deadline_column is 'Column with the deadline; NULL and infinity mean never.';
comment on column pgreaper.policies.status_column is 'Column with the state; NULL: the stamp column alone tells held from expired.';
comment on column pgreaper.policies.held is 'States that count as held, as text.';
comment on column pgreaper.policies.expired is 'State after the transition, as text.';
comment on column pgreaper.policies.stamp_column is 'Column that receives the time of the transition.';
comment on column pgreaper.policies.consumed is 'State that the application gives a hold it consumes, as text; NULL: none is known.';
comment on column pgreaper.policies.consumed_stamp_column is 'Column that receives the time at which the application consumed the hold.';
comment on column pgreaper.policies.restored is 'The one of the held states that a restored hold gets, as text.';
comment on column pgreaper.policies.restore_within is 'How long after a hold became due it may still be restored; NULL: not at all.';
comment on column pgreaper.policies.set_values is 'Further columns and the constant that each receives with the transition.';
comment on column pgreaper.policies.zone is 'Time zone in which a deadline without a zone is meant.';
comment on column pgreaper.policies.stamp_zone is 'Time zone in which a stamp without a zone is written.';
comment on column pgreaper.policies.grace is 'A hold is due when deadline + grace has passed.';
comment on column pgreaper.policies.payload_columns is 'Columns that a claim hands to its worker.';
comment on column pgreaper.policies.lease is 'How long a claim is leased.';
comment on column pgreaper.policies.batch is 'How many holds a claim or a step of a sweep takes when the call does not say.';
comment on column pgreaper.policies.max_attempts is 'Attempts before a transient failure becomes a dead letter.';
comment on column pgreaper.policies.permanent_attempts is 'Attempts before any other failure becomes a dead letter.';
comment on column pgreaper.policies.backoff_base is 'Unit of the delay before a retry: base * 2^attempts, plus up to half of it.';
comment on column pgreaper.policies.backoff_cap is 'The longest delay before a retry.';
comment on column pgreaper.policies.rate_limit is 'Holds per second that the whole fleet may take; NULL: no limit.';
comment on column pgreaper.policies.max_claims is 'Leases that may be active at once; NULL: no limit.';
comment on column pgreaper.policies.owner is 'Whose dead letters these are.';
comment on column pgreaper.policies.objective is 'The lateness that is promised.';
comment on column pgreaper.policies.paused_at is 'Since when nothing is claimed; NULL: active.';
comment on column pgreaper.policies.pause_reason is 'Why it was paused.';
comment on column pgreaper.policies.registered_at is 'When the policy was first registered.';
comment on column pgreaper.policies.unregistered_at is 'When the policy was withdrawn; its books stay.';

-- policy_preview: what a run would meet now.
--
-- `looked_at`: no_deadline and no_state were counted among so many rows only; NULL: among all.
create type pgreaper.policy_preview as (
  policy text,
  due bigint,
  due_capped boolean,
  oldest_deadline timestamptz,
  locked bigint,
  leased bigint,
  retrying bigint,
  dead bigint,
  no_deadline bigint,
  no_state bigint,
  looked_at bigint
);

comment on type pgreaper.policy_preview is 'What a run of a policy would meet now; written by reaper_preview.';

-- policy_preview: what a run would meet now.
create type pgreaper.policy_preview as (
  policy text,
  due bigint,
  oldest_deadline timestamptz,
  locked bigint,
  leased bigint,
  retrying bigint,
  dead bigint,
  no_deadline bigint,
  no_state bigint
);

comment on type pgreaper.policy_preview is 'What a run of a policy would meet now; written by reaper_preview.';

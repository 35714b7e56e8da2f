-- command_outcome: what a command to expire a hold came to, by reaper_expire_keys.
create type pgreaper.command_outcome as (
  key text,
  outcome text,
  state text,
  due_at timestamptz
);

comment on type pgreaper.command_outcome is
'What a command to expire a hold came to: an outcome as reaper_expire has, or not-due, resting or wrong-key; due_at: when to ask again.';

-- policy_change: one setting that a registration changed.
create type pgreaper.policy_change as (
  setting text,
  old_value text,
  new_value text
);

comment on type pgreaper.policy_change is 'A setting that reaper_register changed, with its old and new value.';

-- opened_relay: a relay that was found or made.
create type pgreaper.opened_relay as (
  relay text,
  policy text,
  created boolean,
  created_at timestamptz
);

comment on type pgreaper.opened_relay is 'A relay, and whether reaper_relay has just made it.';

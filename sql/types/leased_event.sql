-- leased_event: one event of a delivery, as its relay receives it.
create type pgreaper.leased_event as (
  token uuid,
  event text,
  key text,
  deadline timestamptz,
  expired_at timestamptz,
  state text,
  attempt integer,
  lease_until timestamptz,
  payload jsonb
);

comment on type pgreaper.leased_event is 'An event that was leased by reaper_fetch.';

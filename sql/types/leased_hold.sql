-- leased_hold: one hold of a claim, as its worker receives it.
create type pgreaper.leased_hold as (
  token uuid,
  key text,
  deadline timestamptz,
  attempt integer,
  claim_until timestamptz,
  payload jsonb
);

comment on type pgreaper.leased_hold is 'A hold that was leased by reaper_claim.';

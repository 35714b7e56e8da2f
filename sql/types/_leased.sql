-- _leased: the holds of a claim, as parallel arrays; token NULL: there were none.
create type pgreaper._leased as (
  token uuid,
  keys text[],
  deadlines timestamptz[],
  attempt integer,
  claim_until timestamptz
);

comment on type pgreaper._leased is 'The holds of a claim, as parallel arrays; internal.';

-- settled_batch: what a claim came to, and the next one where it was asked for.
create type pgreaper.settled_batch as (
  outcomes text[],
  counts bigint[],
  token uuid,
  holds integer,
  attempt integer,
  claim_until timestamptz
);

comment on type pgreaper.settled_batch is
'How many holds of a claim had which outcome (parallel arrays), and the next claim: as leased_batch.';

-- leased_batch: a claim as a whole.
create type pgreaper.leased_batch as (
  token uuid,
  holds integer,
  attempt integer,
  claim_until timestamptz
);

comment on type pgreaper.leased_batch is 'A claim as a whole: its token, how many holds, which attempt, until when; token NULL: none.';

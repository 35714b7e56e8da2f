-- _settled: what became of the holds of a claim, and of which policy they are.
--
-- Where the books are asked for an earlier answer, all of it is in `others`, and the rest is NULL.
create type pgreaper._settled as (
  policy pgreaper.policies,
  target pgreaper._target,
  worker text,
  expired text[],
  others pgreaper.hold_outcome[]
);

comment on type pgreaper._settled is 'What became of the holds of a claim; internal.';

-- verification: one invariant, and whether the books and the target keep it.
create type pgreaper.verification as (
  policy text,
  invariant text,
  holds boolean,
  found bigint,
  example text
);

comment on type pgreaper.verification is 'An invariant, whether it holds, how many violations were found, and the key of one.';

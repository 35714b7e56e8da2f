-- _batch: holds that were picked and nothing more; parallel arrays.
--
-- origin: `fresh` from the cursor on, `retry` from failures, `probe` from anywhere
-- in the backlog of a policy under suspicion.
create type pgreaper._batch as (
  keys text[],
  deadlines timestamptz[],
  hints tid[],
  attempt integer,
  origin text
);

comment on type pgreaper._batch is 'Holds picked for a claim or a sweep: keys, deadlines, where the rows were seen, which attempt, where from.';

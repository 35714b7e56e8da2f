-- _batch: holds that were picked and nothing more; parallel arrays.
create type pgreaper._batch as (
  keys text[],
  deadlines timestamptz[],
  hints tid[],
  attempt integer
);

comment on type pgreaper._batch is 'Holds picked for a claim or a sweep: keys, deadlines, where the rows were seen, which attempt.';

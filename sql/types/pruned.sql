-- pruned: what a call of reaper_prune removed of one kind of books of one policy.
create type pgreaper.pruned as (
  policy text,
  kind text,
  removed bigint,
  more boolean
);

comment on type pgreaper.pruned is 'How many rows of which books were removed, and whether there is more to remove.';

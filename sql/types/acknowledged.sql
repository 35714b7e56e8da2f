-- acknowledged: what became of the events of a delivery.
create type pgreaper.acknowledged as (
  delivered integer,
  retry integer,
  dead integer,
  returned integer
);

comment on type pgreaper.acknowledged is 'How many events were delivered, wait for a retry, were given up, and came back untried.';

-- _step: what one step of a sweep did.
create type pgreaper._step as (
  taken integer,
  expired integer,
  failed integer,
  locked integer,
  last_deadline timestamptz,
  more boolean,
  suspended boolean,
  timed_out boolean,
  target pgreaper._target
);

comment on type pgreaper._step is 'What one step of a sweep did; internal.';

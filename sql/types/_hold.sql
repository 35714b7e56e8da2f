-- _hold: one hold as it was seen or written, for the application's side of the race.
create type pgreaper._hold as (
  key text,
  state text,
  deadline timestamptz,
  held boolean,
  due boolean,
  ended boolean,
  consumed boolean
);

comment on type pgreaper._hold is 'One hold as it was seen or written; internal.';

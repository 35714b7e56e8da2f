-- _named_hold: a hold that somebody asked for by a name, as it was seen.
--
-- `key` is how pgreaper spells it; NULL: no hold has that name.  `wrong`: no hold could have it.
create type pgreaper._named_hold as (
  name text,
  key text,
  state text,
  deadline timestamptz,
  hint tid,
  held boolean,
  due boolean,
  ended boolean,
  wrong boolean
);

comment on type pgreaper._named_hold is 'A hold that somebody asked for by a name, as it was seen; internal.';

-- _target: a policy's target as fragments of SQL, built by _target().
--
-- In every statement made of them, the row is called h and the parameters are
--   $1 cutoff (clock - grace)   $2 cursor position   $3 keys   $4 clock   $5 new deadline
--
-- The last six are there for the application's side of the race only.
--
-- The statements run with the caller's search_path (`search_path`), because triggers, views
-- and domains of the user's must find what they always find.  So whatever stands in them
-- names its schema, operators and types too.
create type pgreaper._target as (
  relation text,
  plain boolean,
  bare boolean,
  settle boolean,
  search_path text,
  version text,
  key text,
  key_columns text,
  same_key text,
  matches text,
  deadline text,
  deadline_order text,
  held text,
  due text,
  beyond text,
  ahead text,
  ended text,
  state text,
  assignments text,
  instant text,
  consumed text,
  consuming text,
  extending text,
  restoring text,
  shorter text
);

comment on type pgreaper._target is 'A policy''s target as SQL fragments; internal.';

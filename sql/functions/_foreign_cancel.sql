-- _foreign_cancel: whether a 57014 was raised by code of the user's, and nobody has canceled us.
--
-- A trigger may say RAISE with it, and dblink and postgres_fdw hand on what happened to a
-- statement on another server.  What they add to the error's context is translated by none
-- of them.  A cancel of ours, by a person or the timer, comes in the middle of a statement.
create function pgreaper._foreign_cancel(context text)
returns boolean
language sql
immutable
security invoker
as $function$
  select coalesce(
    split_part(_foreign_cancel.context, E'\n', 1) like '%RAISE'
    or _foreign_cancel.context ~ '(^|\n)while [^\n]* on (unnamed dblink connection|dblink connection named ")'
    or _foreign_cancel.context ~ '(^|\n)remote SQL command: ', false);
$function$;

comment on function pgreaper._foreign_cancel(text) is
'Whether a 57014 was raised by code of the user''s, and nobody has canceled us.';

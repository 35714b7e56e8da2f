-- _error_class: the kind of failure behind a SQLSTATE, in words for the books; NULL: a trigger cancelled the update.
create function pgreaper._error_class(sqlstate text)
returns text
language sql
immutable
security invoker
as $function$
  select case
    when _error_class.sqlstate is null then 'UpdateVetoed'
    when _error_class.sqlstate = 'P0001' then 'TriggerException'
    when _error_class.sqlstate like '22%' then 'DataError'
    when _error_class.sqlstate like '23%' or _error_class.sqlstate = '44000' then 'ConstraintViolation'
    when _error_class.sqlstate like '42%' then 'ProgrammingError'
    else 'DatabaseError'
  end;
$function$;

comment on function pgreaper._error_class(text) is 'The kind of failure behind a SQLSTATE.';

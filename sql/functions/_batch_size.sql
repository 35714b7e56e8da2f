-- _batch_size: how many holds a call may take: what it asks for, else what the policy says.
--
-- Raises
--   22023  not between 1 and 10000: one transaction would hold too many row locks for too long.
create function pgreaper._batch_size(policy pgreaper.policies, batch integer)
returns integer
language plpgsql
immutable
security invoker
as $function$
begin
  if _batch_size.batch not between 1 and 10000 then
    raise invalid_parameter_value
      using message = format('batch must be between 1 and 10000, not %s', _batch_size.batch),
            hint = 'Repeat the call for more; 500 to 1000 is a good size.';
  end if;

  return coalesce(_batch_size.batch, policy.batch);
end;
$function$;

comment on function pgreaper._batch_size(pgreaper.policies, integer) is 'The batch that a call asked for, or the policy''s own.';

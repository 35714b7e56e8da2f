-- _application: the policy for a call from the application, its arguments checked.
--
-- Promises
--   * Any isolation level will do: the row is locked before it is judged, and what changed
--     since a repeatable read began is the caller's 40001.
--
-- Raises
--   RP002  no such policy.     RP004  a read-only node or transaction.
--   22023  no key, or a deadline that is none or has passed.
create function pgreaper._application(
  policy text,
  key text,
  until timestamptz default 'infinity'
)
returns pgreaper.policies
language plpgsql
stable
security invoker
as $function$
declare
  v_policy constant pgreaper.policies := pgreaper._policy(_application.policy);
begin
  perform pgreaper._require_writable(any_level => true);

  if _application.key is null then
    raise invalid_parameter_value using message = 'key must not be NULL';
  elsif (_application.until > pgreaper._clock()) is not true then
    raise invalid_parameter_value
      using message = format('until must be later than now, not %s', coalesce(_application.until::text, 'NULL')),
            hint = 'The clock is the database''s. To end a hold, let your own UPDATE say how it ends.';
  end if;

  return v_policy;
end;
$function$;

comment on function pgreaper._application(text, text, timestamptz) is 'The policy for a call from the application, its arguments checked.';

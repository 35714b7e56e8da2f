-- _policy: the registered policy of that name.
--
-- Raises
--   RP002  there is none, or it was withdrawn.
create function pgreaper._policy(policy text)
returns pgreaper.policies
language plpgsql
stable
security invoker
as $function$
declare
  v_policy pgreaper.policies;
begin
  select p.* into v_policy
    from pgreaper.policies as p
   where p.name = _policy.policy
     and p.unregistered_at is null;

  if not found then
    raise exception 'there is no policy %', coalesce(quote_ident(_policy.policy), 'NULL')
      using errcode = 'RP002',
            hint = 'pgreaper.policies lists the registered ones; reaper_register() adds one.';
  end if;

  return v_policy;
end;
$function$;

comment on function pgreaper._policy(text) is 'The registered policy of that name; RP002 when there is none.';

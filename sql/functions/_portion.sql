-- _portion: how many holds go together under the policy's rate limit; NULL: no limit.
--
-- A batch, or what comes in within half a second, and never less than one hold.  Smaller ones cost a transaction each, and
-- it is how often somebody else has the processor that the application notices.
create function pgreaper._portion(policy pgreaper.policies)
returns integer
language plpgsql
immutable
security invoker
as $function$
begin
  if policy.rate_limit is null then
    return null;
  end if;

  return least(policy.batch, greatest(floor(policy.rate_limit / 2), 1))::integer;
end;
$function$;

comment on function pgreaper._portion(pgreaper.policies) is
'Holds that go together under the policy''s rate limit; NULL: no limit.';

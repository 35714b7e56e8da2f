-- _allowance: how many holds the policy's rate limit lets go now; NULL: no limit.
--
-- A token bucket that holds one second's worth, and never less than one hold.  It is full when it was last counted in the
-- future: the clock was put back.
create function pgreaper._allowance(
  policy pgreaper.policies,
  clock timestamptz,
  rate_tokens double precision,
  rate_at timestamptz
)
returns double precision
language plpgsql
immutable
security invoker
as $function$
begin
  if policy.rate_limit is null then
    return null;
  end if;

  if _allowance.rate_at > _allowance.clock + interval '1 minute' then
    return greatest(policy.rate_limit, 1);
  end if;

  return least(greatest(policy.rate_limit, 1), coalesce(
    _allowance.rate_tokens
      + policy.rate_limit * greatest(0, extract(epoch from _allowance.clock - _allowance.rate_at)::double precision),
    greatest(policy.rate_limit, 1)));
end;
$function$;

comment on function pgreaper._allowance(pgreaper.policies, timestamptz, double precision, timestamptz) is
'Holds that the rate limit lets go now; NULL without a limit.';

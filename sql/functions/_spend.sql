-- _spend: take holds out of the policy's rate limit.
create function pgreaper._spend(policy pgreaper.policies, clock timestamptz, holds integer)
returns void
language plpgsql
volatile
security invoker
as $function$
begin
  if policy.rate_limit is not null then
    update pgreaper.cursors as c
       set rate_tokens = pgreaper._allowance(policy, _spend.clock, c.rate_tokens, c.rate_at) - _spend.holds,
           rate_at = pgreaper._counted_at(_spend.clock, c.rate_at)
     where c.policy_id = policy.policy_id;
  end if;
end;
$function$;

comment on function pgreaper._spend(pgreaper.policies, timestamptz, integer) is 'Take holds out of the policy''s rate limit.';

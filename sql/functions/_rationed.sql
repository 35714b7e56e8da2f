-- _rationed: how many of the wanted holds the policy's rate limit lets go now.
--
-- Promises
--   * All of them without a limit.
--   * None before all, or a whole portion, may go: else those who ask would share out what comes in, a few holds each.
create function pgreaper._rationed(
  policy pgreaper.policies,
  clock timestamptz,
  cursor pgreaper.cursors,
  wanted integer
)
returns integer
language plpgsql
immutable
security invoker
as $function$
declare
  v_allowance constant double precision := pgreaper._allowance(policy, _rationed.clock, cursor.rate_tokens, cursor.rate_at);
begin
  if v_allowance < least(_rationed.wanted, pgreaper._portion(policy)) then
    return 0;
  end if;

  return least(_rationed.wanted, floor(v_allowance)::integer);
end;
$function$;

comment on function pgreaper._rationed(pgreaper.policies, timestamptz, pgreaper.cursors, integer) is
'How many of the wanted holds the policy''s rate limit lets go now.';

-- _lease: the claim behind a token, locked.
--
-- The token is the only proof.  Taking back, expiring, renewing and releasing all lock
-- the claim's row, so they happen one after another and each sees what the last one did.
-- A lease that lapsed but was not yet taken back is still good: nobody else was given its holds.
--
-- Raises
--   RP001  there is no such lease any more.  With `finished`, a claim that ended by
--          reaper_expire() is returned, for its answer to be repeated.
create function pgreaper._lease(token uuid, finished boolean default false)
returns pgreaper.claims
language plpgsql
volatile
security invoker
as $function$
declare
  v_claim pgreaper.claims;
begin
  select c.* into v_claim from pgreaper.claims as c where c.token = _lease.token for update;

  if not found then
    raise exception 'there is no lease %', coalesce(_lease.token::text, 'NULL')
      using errcode = 'RP001',
            hint = 'Claim anew: reaper_claim() gives the token.';
  elsif v_claim.ending = 'expired' and _lease.finished then
    null;
  elsif v_claim.finished_at is not null then
    raise exception 'lease % is lost', _lease.token
      using errcode = 'RP001',
            detail = format('It was %s at %s.',
              case v_claim.ending when 'taken-back' then 'taken back' when 'released' then 'released' else 'settled' end,
              v_claim.finished_at),
            hint = 'Stop working on its holds: another worker may have them.';
  end if;

  return v_claim;
end;
$function$;

comment on function pgreaper._lease(uuid, boolean) is 'The claim behind a token, locked; RP001 when the lease is lost.';

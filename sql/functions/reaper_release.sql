-- reaper_release: give a claim back.
--
-- For a worker that stops.  What is still due becomes claimable at once, and no attempt
-- is charged.  A claim that is over already is no error: there is nothing to give back.
--
-- Promises
--   * Returns how many holds were given back; 0 when the claim was over.
--
-- Raises
--   RP001  there never was such a lease.
create function pgreaper.reaper_release(token uuid)
returns integer
language plpgsql
volatile
security invoker
set lock_timeout = '200ms'
set search_path = pg_catalog, pg_temp
as $function$
declare
  v_claim pgreaper.claims;
begin
  perform pgreaper._require_writable();

  -- The claim before the cursor, as in reaper_expire().
  select c.* into v_claim from pgreaper.claims as c where c.token = reaper_release.token for update;
  if not found then
    raise exception 'there is no lease %', coalesce(reaper_release.token::text, 'NULL')
      using errcode = 'RP001',
            hint = 'Claim anew: reaper_claim() gives the token.';
  elsif v_claim.finished_at is not null then
    return 0;
  end if;

  update pgreaper.claims as c
     set finished_at = pgreaper._clock(), ending = 'released', keys = null, deadlines = null, hints = null
   where c.token = v_claim.token;
  perform pgreaper._put_back(v_claim.policy_id, v_claim.first_deadline);

  -- What an earlier reaper_expire() with some of the keys has settled is not given back.
  return v_claim.holds - (select count(*) from pgreaper._recorded(v_claim));
end;
$function$;

comment on function pgreaper.reaper_release(uuid) is
'Give a claim back; its holds are claimable at once and no attempt is charged.';

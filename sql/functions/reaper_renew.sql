-- reaper_renew: keep a lease for longer.
--
-- Work that needs more time than the lease gives asks for it here.  A lease that lapsed
-- but was not yet taken back may still be renewed, because nobody else was given its
-- holds.
--
-- Promises
--   * The lease ends `lease` (default: the policy's) from now by the database clock, and
--     never sooner than before.
--   * A claim bound to a session is from now on bound to the session that renews it.
--
-- Raises
--   RP001  the lease was taken back or finished; stop working on its holds.
--   22023  a lease that is not positive.
create function pgreaper.reaper_renew(
  token uuid,
  lease interval default null
)
returns timestamptz
language plpgsql
volatile
security invoker
set lock_timeout = '200ms'
set search_path = pg_catalog, pg_temp
as $function$
declare
  v_claim pgreaper.claims;
  v_until timestamptz;
begin
  if reaper_renew.lease <= interval '0' then
    raise invalid_parameter_value using message = format('a lease must be positive, not %s', reaper_renew.lease);
  end if;

  perform pgreaper._require_writable();
  v_claim := pgreaper._lease(reaper_renew.token);

  update pgreaper.claims as c
     set claim_until = greatest(c.claim_until, pgreaper._clock() + coalesce(reaper_renew.lease, p.lease)),
         session_pid = case when c.session_pid is not null then pg_backend_pid() end,
         session_start = case when c.session_pid is not null then
           (select a.backend_start from pg_catalog.pg_stat_activity as a where a.pid = pg_backend_pid()) end,
         session_lost_at = null,
         node = pgreaper._node()
    from pgreaper.policies as p
   where c.token = v_claim.token
     and p.policy_id = c.policy_id
  returning c.claim_until into v_until;

  return v_until;
end;
$function$;

comment on function pgreaper.reaper_renew(uuid, interval) is
'Keep a lease for longer; returns its new end; RP001 when it is lost.';

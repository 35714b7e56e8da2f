-- reaper_keep: keep the lease of a delivery for longer.
--
-- Promises
--   * The lease ends `lease` from now by the database clock, and never sooner than before.
--   * A lease that lapsed is kept too, as long as nobody has taken it over.
--
-- Raises
--   RP001  the lease was taken over, or the delivery was acknowledged.
--   22023  a lease that is not positive.
create function pgreaper.reaper_keep(
  token uuid,
  lease interval default '1 minute'
)
returns timestamptz
language plpgsql
volatile
security invoker
set lock_timeout = '2s'
set search_path = pg_catalog, pg_temp
as $function$
declare
  v_until timestamptz;
begin
  if (reaper_keep.lease > interval '0') is not true then
    raise invalid_parameter_value using message = format('a lease must be positive, not %s', coalesce(reaper_keep.lease::text, 'NULL'));
  end if;
  perform pgreaper._require_writable();

  update pgreaper.deliveries as d
     set lease_until = greatest(d.lease_until, pgreaper._clock() + least(reaper_keep.lease, interval '1 year'))
   where d.token = reaper_keep.token
     and d.finished_at is null
  returning d.lease_until into v_until;

  if not found then
    raise exception 'lease % is lost', coalesce(reaper_keep.token::text, 'NULL')
      using errcode = 'RP001',
            hint = 'Its events were handed to another process, or are acknowledged: fetch anew.';
  end if;

  return v_until;
end;
$function$;

comment on function pgreaper.reaper_keep(uuid, interval) is
'Keep the lease of a delivery for longer; returns its new end; RP001 when it is lost.';

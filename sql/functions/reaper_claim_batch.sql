-- reaper_claim_batch: lease the next due holds to one worker that needs none of their keys.
--
-- reaper_claim() without the rows, which cost as much as a tenth of the transition.  Parameters, what it promises
-- and what it raises: `_claim`.
create function pgreaper.reaper_claim_batch(
  policy text,
  batch integer default null,
  worker text default null,
  rescan boolean default false,
  session boolean default false,
  skew interval default null,
  search_path text default pg_catalog.current_setting('search_path')
)
returns pgreaper.leased_batch
language plpgsql
volatile
security invoker
set lock_timeout = '200ms'
set jit = off
set search_path = pg_catalog, pg_temp
as $function$
declare
  v_leased constant pgreaper._leased := pgreaper._claim(reaper_claim_batch.policy, reaper_claim_batch.batch, reaper_claim_batch.worker,
    reaper_claim_batch.rescan, reaper_claim_batch.session, reaper_claim_batch.skew, reaper_claim_batch.search_path);
begin
  return row(v_leased.token, cardinality(v_leased.keys), v_leased.attempt, v_leased.claim_until)::pgreaper.leased_batch;
end;
$function$;

comment on function pgreaper.reaper_claim_batch(text, integer, text, boolean, boolean, interval, text) is
'Lease the next due holds of a policy to one worker: token and how many; token NULL: nothing to do.';

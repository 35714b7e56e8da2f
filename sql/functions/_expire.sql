-- _expire: perform the transition of a claim's holds; for reaper_expire() and reaper_expire_batch().
--
-- With `keys` NULL the whole claim is settled and ends; with keys only those are, and
-- the claim goes on.  Called again with the token of a claim that ended so, as after a
-- reply that got lost, it answers what is in the books.
--
-- Promises
--   * The target's update, the trail and the end of the claim commit together.
--   * A hold that was consumed, extended or deleted is left alone and reported.
--   * Waits for no row that somebody else has locked; for one that is locked in the instant of the update, 10 ms.
--   * A token whose lease was taken back changes nothing.
--
-- Raises
--   RP001  the lease was taken back or released, or there never was one.
--   RP004  not READ COMMITTED, or a read-only node.
--   22023  a key that the claim does not hold.
create function pgreaper._expire(
  token uuid,
  keys text[],
  search_path text
)
returns pgreaper._settled
language plpgsql
volatile
security invoker
set lock_timeout = '200ms'
set jit = off
set search_path = pg_catalog, pg_temp
as $function$
declare
  v_claim pgreaper.claims;
  v_policy pgreaper.policies;
  v_now timestamptz;
  v_started timestamptz;
  v_stranger text;
  v_before pgreaper.hold_outcome[];
  v_result record;
  v_batch pgreaper._batch;
  v_target pgreaper._target;
  v_answer pgreaper._settled := row(null, null, null, '{}', '{}')::pgreaper._settled;
  -- Nothing was written before us: what is deferred to this commit is our holds' own.
  v_own_transaction constant boolean := pg_current_xact_id_if_assigned() is null;
begin
  perform pgreaper._require_writable();

  v_claim := pgreaper._lease(_expire.token, finished => true);
  if v_claim.finished_at is not null then
    v_answer.others := array(
      select r from pgreaper._recorded(v_claim) as r
       where _expire.keys is null or r.key = any (_expire.keys));
    return v_answer;
  end if;

  select k.key into v_stranger from unnest(_expire.keys) as k (key) where (k.key = any (v_claim.keys)) is not true limit 1;
  if found then
    raise invalid_parameter_value
      using message = format('claim %s does not hold the key %s', v_claim.token, left(quote_nullable(v_stranger), 200)),
            hint = 'Pass keys exactly as reaper_claim() returned them.';
  end if;

  select p.* into strict v_policy from pgreaper.policies as p where p.policy_id = v_claim.policy_id;
  v_now := pgreaper._clock();

  -- What an earlier call with some of the keys has settled is not done twice.
  v_before := array(select r from pgreaper._recorded(v_claim) as r);
  v_started := v_now;
  if cardinality(v_before) > 0 then
    v_started := least(v_now,
      (select min(t.at) from pgreaper.transitions as t where t.token = v_claim.token),
      (select min(e.at) from pgreaper.events as e where e.token = v_claim.token));
  end if;
  if cardinality(v_before) = 0 and _expire.keys is null then
    v_batch := row(v_claim.keys, v_claim.deadlines, v_claim.hints, v_claim.attempt, null)::pgreaper._batch;
  else
    select coalesce(array_agg(k.key), '{}'), coalesce(array_agg(k.deadline), '{}'), array_agg(k.hint), v_claim.attempt, null
      into v_batch
      from unnest(v_claim.keys, v_claim.deadlines, v_claim.hints) as k (key, deadline, hint)
     where (_expire.keys is null or k.key = any (_expire.keys))
       and not exists (select from unnest(v_before) as r where r.key = k.key);
  end if;

  v_target := pgreaper._target(v_policy, _expire.search_path);
  v_target.settle := v_target.settle and v_own_transaction;
  v_result := pgreaper._transition(v_policy, v_target, v_now, v_claim.token, v_claim.worker, v_batch);
  v_before := v_before || v_result.others;

  if _expire.keys is null then
    update pgreaper.claims as c
       set started_at = v_started,
           finished_at = pgreaper._clock(), ending = 'expired', keys = null, deadlines = null, hints = null,
           expired = o.expired + cardinality(v_result.expired), already_done = o.already_done,
           not_eligible = o.not_eligible, locked = o.locked, retry = o.retry, dead_letter = o.dead_letter
      from (
        select count(*) filter (where u.outcome = 'expired') as expired,
               count(*) filter (where u.outcome = 'already-done') as already_done,
               count(*) filter (where u.outcome = 'not-eligible') as not_eligible,
               count(*) filter (where u.outcome = 'locked') as locked,
               count(*) filter (where u.outcome = 'retry') as retry,
               count(*) filter (where u.outcome = 'dead-letter') as dead_letter
          from unnest(v_before) as u
      ) as o
     where c.token = v_claim.token;
  end if;

  v_answer.policy := v_policy;
  v_answer.target := v_target;
  v_answer.worker := v_claim.worker;
  v_answer.expired := v_result.expired;
  v_answer.others := case when _expire.keys is null then v_before
                          else array(select o from unnest(v_before) as o where o.key = any (_expire.keys)) end;

  return v_answer;
end;
$function$;

comment on function pgreaper._expire(uuid, text[], text) is
'Perform the transition of a claim''s holds: which expired, and the outcome of the others; RP001 when the lease is lost.';

-- reaper_expire_batch: perform the transition of a whole claim for a worker that needs none of its keys.
--
-- reaper_expire() without the rows, which cost as much as a tenth of the transition: how many holds had which outcome.  What
-- it promises and what it raises: `_expire`.
--
-- With `next` so many holds are leased to the same worker in the same transaction: one commit and one answer less.
-- That is done only when every hold was expired and nobody else has a claim of the policy: claims take turns, and one
-- that waits for its turn at the end of a transition keeps the others waiting longer than one by itself.  Whatever either of the
-- two raises undoes both.  `session` and `skew` belong to that claim.
create function pgreaper.reaper_expire_batch(
  token uuid,
  next integer default null,
  session boolean default false,
  skew interval default null,
  search_path text default pg_catalog.current_setting('search_path')
)
returns pgreaper.settled_batch
language plpgsql
volatile
security invoker
set lock_timeout = '200ms'
set jit = off
set search_path = pg_catalog, pg_temp
as $function$
declare
  v_settled constant pgreaper._settled := pgreaper._expire(reaper_expire_batch.token, null, reaper_expire_batch.search_path);
  v_next pgreaper._leased;
  v_answer pgreaper.settled_batch;
begin
  if cardinality(v_settled.others) = 0 and cardinality(v_settled.expired) > 0 then
    v_answer.outcomes := array['expired'];
    v_answer.counts := array[cardinality(v_settled.expired)];
  else
    select coalesce(array_agg(o.outcome), '{}'), coalesce(array_agg(o.holds), '{}') into v_answer.outcomes, v_answer.counts
      from (
        select u.outcome, sum(u.holds) as holds
          from (
            select 'expired' as outcome, cardinality(v_settled.expired)::bigint as holds
            union all
            select o.outcome, count(*) from unnest(v_settled.others) as o group by o.outcome
          ) as u
         where u.holds > 0
         group by u.outcome
      ) as o;
  end if;

  if reaper_expire_batch.next is not null and cardinality(v_settled.others) = 0 and cardinality(v_settled.expired) > 0
    and not exists (select from pgreaper.claims as c where c.policy_id = (v_settled.policy).policy_id and c.finished_at is null) then
    v_next := pgreaper._claim((v_settled.policy).name, reaper_expire_batch.next, v_settled.worker, false, reaper_expire_batch.session,
      reaper_expire_batch.skew, reaper_expire_batch.search_path, v_settled);
    v_answer.token := v_next.token;
    v_answer.holds := cardinality(v_next.keys);
    v_answer.attempt := v_next.attempt;
    v_answer.claim_until := v_next.claim_until;
  end if;

  -- Should a trigger have set the path for the whole session, ours would stay until the caller's commit.
  perform set_config('search_path', reaper_expire_batch.search_path, true);
  return v_answer;
end;
$function$;

comment on function pgreaper.reaper_expire_batch(uuid, integer, boolean, interval, text) is
'Perform the transition of a whole claim: how many holds had which outcome; RP001 when the lease is lost.';

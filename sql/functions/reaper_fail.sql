-- reaper_fail: the work outside the database failed for one hold of a claim.
--
-- Decides by the policy's budget between a retry and a dead letter; the claim goes on
-- with its other holds.  Told twice, as after a reply that got lost, it charges once.
--
-- Promises
--   * Charges one attempt to this hold and none to the others.
--   * A hold that was expired, consumed, extended or deleted meanwhile did not fail: that is a
--     conflict, recorded and answered as such, and no dead letter is left of it.
--   * `transient` failures have max_attempts, others permanent_attempts; `final` has none.
--   * `retry_in` replaces the computed delay, within the budget; what is not `charged` is
--     put off without costing an attempt.
--   * Stores the error's class only: a name, cut at 200 characters.
--
-- Raises
--   RP001  the lease is lost: somebody else is responsible for the hold.
--   22023  a key that the claim does not hold, or no class.
--   55P03  the claim or the target stayed locked; nothing happened, try again.
create function pgreaper.reaper_fail(
  token uuid,
  key text,
  error_class text,
  transient boolean default false,
  retry_in interval default null,
  final boolean default false,
  charged boolean default true,
  search_path text default pg_catalog.current_setting('search_path')
)
returns pgreaper.failure_decision
language plpgsql
volatile
security invoker
set lock_timeout = '200ms'
set search_path = pg_catalog, pg_temp
as $function$
declare
  v_claim pgreaper.claims;
  v_policy pgreaper.policies;
  v_position integer;
  v_deadline timestamptz;
  v_now timestamptz;
  v_target pgreaper._target;
  v_cutoff timestamptz;
  v_key constant text[] := array[reaper_fail.key];
  v_statement text;
  v_due boolean;
  v_ended boolean;
  v_state text;
  v_decision pgreaper.failure_decision;
begin
  perform pgreaper._require_writable();
  v_claim := pgreaper._lease(reaper_fail.token);
  v_position := array_position(v_claim.keys, reaper_fail.key);
  if v_position is null then
    raise invalid_parameter_value
      using message = format('claim %s does not hold the key %s', v_claim.token, left(quote_nullable(reaper_fail.key), 200)),
            hint = 'Pass the key exactly as reaper_claim() returned it.';
  elsif coalesce(reaper_fail.error_class, '') !~ '\S' then
    raise invalid_parameter_value using message = 'a failure needs an error class', hint = 'Such as TimeoutError; no message.';
  end if;

  if not exists (select from pgreaper._recorded(v_claim) as r where r.key = reaper_fail.key) then
    select p.* into strict v_policy from pgreaper.policies as p where p.policy_id = v_claim.policy_id;
    v_deadline := v_claim.deadlines[v_position];
    v_now := pgreaper._clock();

    -- A sweep may have had the hold in hand already when it was claimed.
    insert into pgreaper.events (policy_id, key, deadline, kind, state, worker, token, at)
    select t.policy_id, reaper_fail.key, v_deadline, 'already-done', coalesce(t.state, 'expired'), v_claim.worker,
           v_claim.token, v_now
      from pgreaper.transitions as t
     where t.policy_id = v_claim.policy_id
       and tstzrange(t.first_deadline, t.last_deadline, '[]') @> v_deadline
       and exists (select from unnest(t.keys, t.deadlines) as k (key, deadline)
                    where k.key = reaper_fail.key and k.deadline = v_deadline)
     limit 1;

    if not found then
      begin
        v_target := pgreaper._target(v_policy, reaper_fail.search_path);
        v_statement := format(
          'select f.due, f.ended, f.state'
          '  from (values (1)) as one (n)'
          '  left join (select %1$s and %2$s and %3$s operator(pg_catalog.=) $2 as due, %4$s as ended, %5$s as state from %6$s as h where %7$s) as f on true',
          v_target.held, v_target.due, v_target.deadline, v_target.ended, v_target.state, v_target.relation, v_target.matches);
        v_cutoff := v_now - v_policy.grace;
        perform set_config('search_path', v_target.search_path, true);
        execute v_statement into v_due, v_ended, v_state using v_cutoff, v_deadline, v_key;
        perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
      exception
        -- Whatever has become of the table, a failure is recorded.
        when syntax_error_or_access_rule_violation or data_exception then
          v_due := true;
      end;

      if v_due then
        perform pgreaper._fail(v_policy, v_now, array[reaper_fail.key], array[v_deadline],
          v_claim.token, v_claim.worker, transient => coalesce(reaper_fail.transient, false),
          error_class => left(reaper_fail.error_class, 200), retry_in => reaper_fail.retry_in,
          final => coalesce(reaper_fail.final, false), charged => coalesce(reaper_fail.charged, true));
      else
        insert into pgreaper.events (policy_id, key, deadline, kind, state, worker, token, at)
        values (v_claim.policy_id, reaper_fail.key, v_deadline, case when v_ended then 'already-done' else 'not-eligible' end,
                v_state, v_claim.worker, v_claim.token, v_now);
      end if;
    end if;
  end if;

  select r.outcome, f.attempts, f.not_before into v_decision
    from pgreaper._recorded(v_claim) as r
    left join pgreaper.failures as f
      on f.policy_id = v_claim.policy_id and f.key = r.key and f.deadline = v_claim.deadlines[v_position]
   where r.key = reaper_fail.key;
  return v_decision;
end;
$function$;

comment on function pgreaper.reaper_fail(uuid, text, text, boolean, interval, boolean, boolean, text) is
'The work outside the database failed for one hold of a claim: retry or dead letter.';

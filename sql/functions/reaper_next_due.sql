-- reaper_next_due: how long until there may be work.
--
-- For a daemon that wants to sleep until then.  Looks ahead of the cursor only; what
-- becomes claimable behind it is the business of a rescan.
--
-- Promises
--   * Never negative; zero when something may be claimed now.
--   * NULL when nothing lies ahead, and for a paused policy or the copy of a logical subscriber.
--   * Writes nothing; a few index probes per policy.
--
-- Raises
--   RP002  no such policy.
create function pgreaper.reaper_next_due(policy text default null)
returns interval
language plpgsql
volatile
security invoker
set lock_timeout = '200ms'
set jit = off
as $function$
declare
  v_now constant timestamptz := pgreaper._clock();
  v_policy pgreaper.policies;
  v_target pgreaper._target;
  v_cursor pgreaper.cursors;
  v_suspicion record;
  v_allowance double precision;
  v_deadline timestamptz;
  v_next timestamptz;
begin
  if reaper_next_due.policy is not null then
    perform pgreaper._policy(reaper_next_due.policy);
  end if;

  for v_policy in
    select p.* from pgreaper.policies as p
     where p.unregistered_at is null
       and p.paused_at is null
       and (reaper_next_due.policy is null or p.name = reaper_next_due.policy)
  loop
    continue when pgreaper._subscription(v_policy) is not null;
    v_target := pgreaper._target(v_policy);
    select c.* into v_cursor from pgreaper.cursors as c where c.policy_id = v_policy.policy_id;

    v_suspicion := pgreaper._suspicion(v_policy, v_cursor);
    if v_suspicion.suspect and v_suspicion.until > v_now then
      v_next := least(v_next, v_suspicion.until);
      continue;
    end if;

    if cardinality((pgreaper._due(v_policy, v_target, v_now, v_cursor.position, 1)).keys) > 0 then
      v_allowance := pgreaper._allowance(v_policy, v_now, v_cursor.rate_tokens, v_cursor.rate_at);
      if v_allowance is null or v_allowance >= 1 then
        return interval '0';
      end if;
      v_next := least(v_next, v_now + make_interval(secs => (1 - v_allowance) / v_policy.rate_limit));
    end if;

    execute format(
      'select %1$s from %2$s as h where %3$s and %4$s order by %5$s limit 1',
      v_target.deadline, v_target.relation, v_target.held, v_target.ahead, v_target.deadline_order)
       into v_deadline
      using v_now - v_policy.grace;

    v_next := least(v_next, v_deadline + v_policy.grace, pgreaper._retry_at(v_policy.policy_id),
      -- A claim bound to a session is watched more closely than its lease.
      (select min(case when c.session_pid is null then c.claim_until
                       else least(c.claim_until, coalesce(c.session_lost_at + interval '5 seconds', v_now + interval '1 second')) end)
         from pgreaper.claims as c
        where c.policy_id = v_policy.policy_id and c.finished_at is null));
  end loop;

  return case when v_next is not null then greatest(interval '0', v_next - v_now) end;
end;
$function$;

comment on function pgreaper.reaper_next_due(text) is 'Interval until there may be work; NULL: nothing ahead.';

-- _take_back: end the claims whose lease lapsed, and charge an attempt to what is still due.
--
-- A worker that died is not told from one that is slow: both lose the lease, and
-- whoever comes late with the token is refused.  A claim bound to a session lapses
-- already when that session has been gone for a while (_lost_sessions).  A server that
-- restarted since the claim, or another one in its place, explains the silence: then nobody is charged.
--
-- Locks claims in the order in which they lapsed and never waits for one.
create function pgreaper._take_back(
  policy pgreaper.policies,
  target pgreaper._target,
  clock timestamptz
)
returns void
language plpgsql
volatile
security invoker
as $function$
declare
  v_cutoff constant timestamptz := _take_back.clock - policy.grace;
  v_statement text;
  v_claim pgreaper.claims;
  v_settled text[];
  v_keys text[];
  v_deadlines timestamptz[];
  v_lenient pgreaper.policies := policy;
begin
  -- Which of several killed the worker nobody knows: retries shrink until the guilty hold is alone, and dies alone.
  v_lenient.max_attempts := 2147483647;

  update pgreaper.claims as c
     set session_lost_at = _take_back.clock
    from (
      select l.token
        from pgreaper.claims as l
       where l.token in (select s.token from pgreaper._lost_sessions(policy.policy_id, _take_back.clock) as s where s.lost_at is null)
         for update skip locked
    ) as lost
   where c.token = lost.token;

  for v_claim in
    select c.*
      from pgreaper.claims as c
     where c.policy_id = policy.policy_id
       and c.finished_at is null
       and (c.claim_until <= _take_back.clock
            or c.token in (select s.token from pgreaper._lost_sessions(policy.policy_id, _take_back.clock) as s
                            where s.lost_at is not null))
     order by c.claim_until
     limit 20
       for update skip locked
  loop
    -- What the worker reported as failed before it died is charged already.
    v_settled := array(select r.key from pgreaper._recorded(v_claim) as r);
    v_statement := format(
      'select pg_catalog.array_agg(f.key), pg_catalog.array_agg(f.deadline)'
      '  from (select %1$s as key, %2$s as deadline from %3$s as h where %4$s and case when %5$s and %6$s then true end) as f'
      '  join unnest($3, $2) as k (key, deadline) on k.key operator(pg_catalog.=) f.key and k.deadline operator(pg_catalog.=) f.deadline'
      ' where f.key operator(pg_catalog.<>) all ($4)',
      target.key, target.deadline, target.relation, target.matches, target.held, target.due);
    perform set_config('search_path', target.search_path, true);
    execute v_statement
       into v_keys, v_deadlines
      using v_cutoff, v_claim.deadlines, v_claim.keys, v_settled;
    perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);

    update pgreaper.claims as c
       set finished_at = _take_back.clock, ending = 'taken-back', keys = null, deadlines = null, hints = null
     where c.token = v_claim.token;

    insert into pgreaper.events (policy_id, kind, worker, token, at, attempts)
    values (policy.policy_id, 'taken-back', v_claim.worker, v_claim.token, _take_back.clock, v_claim.attempt);

    if v_keys is not null and v_claim.node = pgreaper._node() and pg_postmaster_start_time() <= v_claim.claimed_at then
      perform pgreaper._fail(case when cardinality(v_keys) > 1 then v_lenient else policy end, _take_back.clock, v_keys, v_deadlines, v_claim.token, v_claim.worker,
        transient => true, error_class => 'LeaseExpired');
    elsif v_keys is not null then
      perform pgreaper._put_back(policy.policy_id, v_claim.first_deadline);
    end if;
  end loop;
end;
$function$;

comment on function pgreaper._take_back(pgreaper.policies, pgreaper._target, timestamptz) is
'End lapsed claims and charge an attempt to their holds that are still due.';

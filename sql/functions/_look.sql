-- _look: when there may be work for one policy.
--
-- Looks ahead of the cursor; what becomes claimable behind it is found with `rescan`,
-- which begins at the oldest deadline, as a claim with `rescan` does.  With it a dead letter
-- whose hold has moved on is work too: a claim closes it.
--
-- The only hold with the cursor's deadline counts as leased while a claim that ends with that deadline is active.  Where it is
-- another one after all, a rescan tells.
--
-- `limited`: something is due, and waits for the policy's rate limit.
--
-- Promises
--   * `next` NULL when nothing lies ahead, and for a policy that is paused or passive; `clock` itself when something may be claimed now.
--   * Writes nothing; a few index probes, with `rescan` one more for each dead letter, up to 1000.
--
-- Raises
--   42P01, 42703, 42501, 55P03  the target cannot be looked at.
create function pgreaper._look(
  policy pgreaper.policies,
  clock timestamptz,
  rescan boolean,
  search_path text,
  out next timestamptz,
  out limited boolean
)
language plpgsql
volatile
security invoker
as $function$
declare
  c_first constant text := 'select %1$s from %2$s as h where %3$s and %4$s order by %5$s limit 1';
  c_next constant text := 'select pg_catalog.array_agg(f.deadline) from (select %1$s as deadline from %2$s as h where %3$s and %4$s order by %5$s limit 2) as f';
  v_cutoff constant timestamptz := _look.clock - policy.grace;
  v_target pgreaper._target;
  v_statement text;
  v_cursor pgreaper.cursors;
  v_suspicion record;
  v_start timestamptz;
  v_claims record;
  v_simple boolean;
  v_next timestamptz[];
  v_due integer;
  v_retry_at timestamptz;
  v_lacking double precision;
  v_deadline timestamptz;
begin
  limited := false;
  if policy.paused_at is not null or pgreaper._subscription(policy) is not null then
    return;
  end if;

  v_target := pgreaper._target(policy, _look.search_path);
  select c.* into v_cursor from pgreaper.cursors as c where c.policy_id = policy.policy_id;

  v_suspicion := pgreaper._suspicion(policy, v_cursor);
  if v_suspicion.suspect and v_suspicion.until > _look.clock then
    next := v_suspicion.until;
    return;
  end if;

  v_start := case when not _look.rescan then v_cursor.position end;
  select bool_or(c.last_deadline = v_start) as at_cursor,
         -- One bound to a session is watched more closely than its lease.
         min(case when c.session_pid is null then c.claim_until
                  else least(c.claim_until, coalesce(c.session_lost_at + interval '5 seconds', _look.clock + interval '1 second')) end) as watch
    into v_claims
    from pgreaper.claims as c
   where c.policy_id = policy.policy_id and c.finished_at is null;

  -- Where the order of the column is that of instants, the first one held tells nearly always: it is not due yet.
  v_simple := v_target.deadline = v_target.deadline_order;
  if v_simple then
    v_statement := format(
      c_next, v_target.deadline, v_target.relation, v_target.held,
      case when v_start is null then 'true' else v_target.beyond end, v_target.deadline_order);
    perform set_config('search_path', v_target.search_path, true);
    execute v_statement into v_next using v_cutoff, v_start;
    perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    v_deadline := v_next[1];
    -- Where the cursor stands is the last hold that was claimed: so much is known without a look at the keys of its claim.
    if v_claims.at_cursor and v_deadline = v_start and v_deadline <= v_cutoff then
      v_deadline := v_next[2];
    end if;
  end if;
  if not v_simple or v_deadline <= v_cutoff then
    v_due := cardinality((pgreaper._due(policy, v_target, _look.clock, v_start, coalesce(pgreaper._portion(policy), 1))).keys);
  end if;
  v_retry_at := pgreaper._retry_at(policy.policy_id);
  if v_due > 0 or v_retry_at <= _look.clock then
    v_lacking := case when v_retry_at <= _look.clock then pgreaper._portion(policy) else v_due end
      - pgreaper._allowance(policy, _look.clock, v_cursor.rate_tokens, v_cursor.rate_at);
    limited := coalesce(v_lacking > 0, false);
    if not limited then
      next := _look.clock;
      return;
    end if;
    next := _look.clock + make_interval(secs => v_lacking / policy.rate_limit);
  end if;

  if not v_simple or v_deadline <= v_cutoff then
    v_statement := format(c_first, v_target.deadline, v_target.relation, v_target.held, v_target.ahead, v_target.deadline_order);
    perform set_config('search_path', v_target.search_path, true);
    execute v_statement into v_deadline using v_cutoff;
    perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
  elsif v_deadline > v_cutoff + interval '1 year' then
    v_deadline := null;
  end if;

  next := least(next, v_deadline + policy.grace, case when v_retry_at > _look.clock then v_retry_at end, v_claims.watch);

  -- A claim that finds nothing else closes them.
  if _look.rescan and (next > _look.clock) is not false
    and cardinality((pgreaper._moot(policy, v_target, _look.clock)).keys) > 0 then
    next := _look.clock;
  end if;
end;
$function$;

comment on function pgreaper._look(pgreaper.policies, timestamptz, boolean, text) is
'When there may be work for one policy; NULL: nothing ahead.';

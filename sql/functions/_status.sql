-- _status: one policy's line of the view `status`.
--
-- Every figure is an index probe or a bounded count; finding what is due reads as many rows more as there
-- are failures and leases, since so many may lie before it.  A target that is missing or
-- locked costs its own line only.
create function pgreaper._status(
  policy pgreaper.policies,
  search_path text default pg_catalog.current_setting('search_path')
)
returns table (
  state text,
  reason text,
  due bigint,
  due_capped boolean,
  oldest_deadline timestamptz,
  oldest_due interval,
  oldest_retry interval,
  leased bigint,
  retrying bigint,
  dead bigint,
  expired bigint,
  already_done bigint,
  not_eligible bigint,
  retries bigint,
  dead_letters bigint,
  taken_back bigint,
  duplicate_rate double precision,
  lateness_p50 interval,
  lateness_p99 interval,
  lateness_max interval,
  start_p50 interval,
  start_p99 interval,
  finish_p50 interval,
  finish_p99 interval,
  clock_skew interval,
  last_success timestamptz
)
language plpgsql
volatile
security invoker
set lock_timeout = '200ms'
set jit = off
set search_path = pg_catalog, pg_temp
as $function$
declare
  c_cap constant integer := 10000;
  c_span constant interval := '5 minutes';
  c_sample constant integer := 2000;
  v_now constant timestamptz := pgreaper._clock();
  v_cutoff constant timestamptz := v_now - policy.grace;
  v_target pgreaper._target;
  v_taken text[];
  v_limit bigint;
  v_none constant timestamptz := null;
  v_retry timestamptz;
  v_statement text;
  v_counts bigint[];
  v_cursor pgreaper.cursors;
  v_suspicion record;
  v_context text;
begin
  state := case when policy.paused_at is not null then 'paused' else 'active' end;
  reason := policy.pause_reason;
  select c.* into v_cursor from pgreaper.cursors as c where c.policy_id = policy.policy_id;
  v_suspicion := pgreaper._suspicion(policy, v_cursor);
  if v_suspicion.suspect and state = 'active' then
    state := 'suspended';
    reason := format('every hold fails alike: %s%s',
      pgreaper._error_class(v_cursor.failing_sqlstate), ' (SQLSTATE ' || v_cursor.failing_sqlstate || ')');
  end if;
  if state <> 'paused' and pgreaper._subscription(policy) is not null then
    state := 'passive';
    reason := format('the rows come through subscription %I, whose publisher expires them', pgreaper._subscription(policy));
  end if;

  begin
    v_target := pgreaper._target(policy, _status.search_path);
    -- A lease that has lapsed holds nobody's place: what a dead worker left behind is due.
    v_taken := array(
      select k.key from pgreaper.claims as c cross join lateral unnest(c.keys) as k (key)
       where c.policy_id = policy.policy_id and c.finished_at is null and c.claim_until > v_now);
    -- So many may lie before what is free; with that many more read, none of it stays unseen.
    select c_cap + 1 + count(*) + cardinality(v_taken) into v_limit
      from pgreaper.failures as f where f.policy_id = policy.policy_id;
    v_statement := format(
      'select pg_catalog.count(*) filter (where h.free), pg_catalog.min(h.deadline) filter (where h.free),'
      '       pg_catalog.min(h.not_before) filter (where h.not_before operator(pg_catalog.<=) $6)'
      '  from (%s) as h', pgreaper._unleased(v_target));
    perform set_config('search_path', v_target.search_path, true);
    execute v_statement into due, oldest_deadline, v_retry
      using v_cutoff, v_none, v_taken, v_limit, policy.policy_id, v_now;
    perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    due_capped := due > c_cap;
    due := least(c_cap, due);
    oldest_retry := v_now - v_retry;
    if oldest_deadline is not null then
      oldest_due := v_now - policy.grace - greatest(oldest_deadline, v_now - interval '100 years');
    end if;
  exception
    when undefined_table or undefined_column or datatype_mismatch or insufficient_privilege then
      state := 'broken';
      -- Our own words name objects; the server's may carry values of rows, for example of one that is cast to regclass.
      get stacked diagnostics v_context = pg_exception_context;
      reason := case when v_context ~ '^PL/pgSQL function pgreaper\._' then sqlerrm
                     when sqlstate = '42501' then format('%I may not read all of %I.%I', current_user, policy.target_schema, policy.target_table)
                     else format('%I.%I cannot be read: %s (SQLSTATE %s)', policy.target_schema, policy.target_table,
                                 pgreaper._error_class(sqlstate), sqlstate) end;
    when lock_not_available then
      state := 'broken';
      reason := coalesce(pgreaper._table_lock(policy.name),
        format('table %I.%I is locked by another session', policy.target_schema, policy.target_table));
    -- One broken policy must not hide the others.  The server's words may carry values of rows.
    when others then
      state := 'broken';
      reason := format('%I.%I cannot be read: %s (SQLSTATE %s)', policy.target_schema, policy.target_table,
        pgreaper._error_class(sqlstate), sqlstate);
  end;

  select coalesce(sum(c.holds), 0) into leased
    from pgreaper.claims as c
   where c.policy_id = policy.policy_id and c.finished_at is null and c.claim_until > v_now;

  select count(*) into retrying
    from (select from pgreaper.failures as f
           where f.policy_id = policy.policy_id and f.not_before < 'infinity' limit c_cap) as f;
  select count(*) into dead
    from (select from pgreaper.failures as f
           where f.policy_id = policy.policy_id and f.not_before = 'infinity' and f.discarded_at is null limit c_cap) as f;

  select coalesce(sum(t.expired), 0), coalesce(sum(t.already_done), 0), coalesce(sum(t.not_eligible), 0),
         coalesce(sum(t.retry), 0), coalesce(sum(t.dead_letter), 0), coalesce(sum(t.taken_back), 0), max(t.last_success)
    into expired, already_done, not_eligible, retries, dead_letters, taken_back, last_success
    from pgreaper.totals as t
   where t.policy_id = policy.policy_id;
  duplicate_rate := already_done / nullif(expired + already_done + not_eligible + retries + dead_letters, 0)::double precision;

  select array_agg(s.holds order by s.bucket) into v_counts
    from (
      select l.bucket, sum(l.holds)::bigint as holds
        from (
          select t.lateness
            from pgreaper.transitions as t
           where t.policy_id = policy.policy_id and t.at >= v_now - c_span
           order by t.at desc
           limit c_sample
        ) as t
       cross join lateral unnest(t.lateness) with ordinality as l (holds, bucket)
       group by l.bucket
    ) as s;
  select max(t.at - policy.grace - greatest(t.first_deadline, v_now - interval '100 years')) into lateness_max
    from (
      select t.at, t.first_deadline
        from pgreaper.transitions as t
       where t.policy_id = policy.policy_id and t.at >= v_now - c_span
       order by t.at desc
       limit c_sample
    ) as t;

  -- A bucket is coarser than the one greatest value.
  lateness_p50 := least(pgreaper._quantile(v_counts, 0.5), lateness_max);
  lateness_p99 := least(pgreaper._quantile(v_counts, 0.99), lateness_max);

  select percentile_cont(0.5) within group (order by c.waited), percentile_cont(0.99) within group (order by c.waited),
         percentile_cont(0.5) within group (order by c.took), percentile_cont(0.99) within group (order by c.took),
         (array_agg(c.skew order by greatest(c.skew, - c.skew) desc nulls last))[1]
    into start_p50, start_p99, finish_p50, finish_p99, clock_skew
    from (
      select c.started_at - c.claimed_at as waited, c.finished_at - c.claimed_at as took, c.skew
        from pgreaper.claims as c
       where c.policy_id = policy.policy_id and c.finished_at >= v_now - c_span and c.ending = 'expired'
       order by c.finished_at desc
       limit c_sample
    ) as c;

  return next;
end;
$function$;

comment on function pgreaper._status(pgreaper.policies, text) is 'One policy''s line of the view status.';

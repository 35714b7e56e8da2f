-- _probe: a few due holds from elsewhere in the backlog, to try a policy under suspicion with.
--
-- The oldest are the ones that failed; what succeeds or fails with others tells whether
-- the fault is theirs.  The first probe takes the youngest, the second the oldest, each
-- further one looks from a random deadline between these two upwards or downwards and picks at
-- random there: bad holds at both ends, or however they lie, are not met each time.
--
-- Reads a bounded number of rows in the order of the deadlines.
create function pgreaper._probe(
  policy pgreaper.policies,
  target pgreaper._target,
  clock timestamptz
)
returns pgreaper._batch
language plpgsql
volatile
security invoker
as $function$
declare
  c_holds constant integer := 8;
  v_cutoff timestamptz := _probe.clock - policy.grace;
  v_probes constant integer := (select c.suspensions from pgreaper.cursors as c where c.policy_id = policy.policy_id);
  v_up boolean := v_probes = 2;
  v_random constant boolean := v_probes > 2;
  v_statement text;
  v_taken text[];
  v_limit integer;
  v_first timestamptz;
  v_last timestamptz;
  v_start timestamptz;
  v_batch pgreaper._batch;
begin
  v_taken := array(
    select k.key
      from pgreaper.claims as c
     cross join lateral unnest(c.keys) as k (key)
     where c.policy_id = policy.policy_id and c.finished_at is null
  );

  if v_random then
    v_statement := format(
      'select (select %1$s from %2$s as h where %3$s and %4$s order by %5$s limit 1),'
      '       (select %1$s from %2$s as h where %3$s and %4$s order by %5$s desc limit 1)',
      target.deadline, target.relation, target.held, target.due, target.deadline_order);
    perform set_config('search_path', target.search_path, true);
    execute v_statement
       into v_first, v_last
      using v_cutoff, null;
    perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);

    v_up := random() < 0.5;
    if isfinite(v_last) then
      -- A deadline of -infinity has no distance to the others.
      v_first := greatest(v_first, v_last - interval '100 years');
      v_start := v_first + random() * (v_last - v_first);
      if not v_up then
        v_cutoff := v_start;
      end if;
    end if;
  end if;

  v_limit := c_holds + cardinality(v_taken) + 1000;
  v_statement := format(
    'with scanned as materialized ('
    '  select %1$s as key, %2$s as deadline, %3$s as hint from %4$s as h where %5$s and %6$s and %7$s order by %8$s %9$s limit $4'
    ')'
    ' select coalesce(pg_catalog.array_agg(f.key), ''{}''), coalesce(pg_catalog.array_agg(f.deadline), ''{}''), coalesce(pg_catalog.array_agg(f.hint), ''{}''), 1, ''probe'''
    '   from (select s.* from scanned as s'
    '          where not exists (select from pg_catalog.unnest($3) as t (key) where t.key operator(pg_catalog.=) s.key)'
    '            and not exists (select from pgreaper.failures as x'
    '                             where x.policy_id operator(pg_catalog.=) $5'
    '                               and x.key operator(pg_catalog.=) s.key and x.deadline operator(pg_catalog.=) s.deadline)'
    '          order by %10$s limit $6) as f',
    target.key, target.deadline, case when target.plain then 'h.ctid' else 'null::pg_catalog.tid' end,
    target.relation, target.held, target.due,
    case when v_up and v_start is not null then target.beyond else 'true' end,
    target.deadline_order, case when v_up then '' else 'desc' end,
    case when v_random then 'pg_catalog.random()' when v_up then 's.deadline' else 's.deadline desc' end);
  perform set_config('search_path', target.search_path, true);
  execute v_statement
     into v_batch
    using v_cutoff, v_start, v_taken, v_limit, policy.policy_id, c_holds;
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);

  if cardinality(v_batch.keys) = 0 then
    v_batch := pgreaper._due(policy, target, _probe.clock, null, c_holds);
    v_batch.origin := 'probe';
  end if;

  return v_batch;
end;
$function$;

comment on function pgreaper._probe(pgreaper.policies, pgreaper._target, timestamptz) is
'A few due holds from elsewhere in the backlog, to try a policy under suspicion with.';

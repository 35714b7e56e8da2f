-- _youngest: a few due holds from the young end of the backlog, to try a policy with.
--
-- The oldest are the ones that failed; what succeeds or fails with these tells whether
-- the fault is theirs.
create function pgreaper._youngest(
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
  v_cutoff constant timestamptz := _youngest.clock - policy.grace;
  v_statement text;
  v_taken text[];
  v_limit integer;
  v_batch pgreaper._batch;
begin
  v_taken := array(
    select k.key
      from pgreaper.claims as c
     cross join lateral unnest(c.keys) as k (key)
     where c.policy_id = policy.policy_id and c.finished_at is null
  );

  v_limit := c_holds + cardinality(v_taken) + 1000;
  v_statement := format(
    'with scanned as materialized ('
    '  select %1$s as key, %2$s as deadline, %3$s as hint from %4$s as h where %5$s and %6$s order by %7$s desc limit $4'
    ')'
    ' select coalesce(pg_catalog.array_agg(f.key), ''{}''), coalesce(pg_catalog.array_agg(f.deadline), ''{}''), coalesce(pg_catalog.array_agg(f.hint), ''{}''), 1, ''probe'''
    '   from (select s.* from scanned as s'
    '          where not exists (select from pg_catalog.unnest($3) as t (key) where t.key operator(pg_catalog.=) s.key)'
    '            and not exists (select from pgreaper.failures as x'
    '                             where x.policy_id operator(pg_catalog.=) $5'
    '                               and x.key operator(pg_catalog.=) s.key and x.deadline operator(pg_catalog.=) s.deadline)'
    '          order by s.deadline desc limit $6) as f',
    target.key, target.deadline, case when target.plain then 'h.ctid' else 'null::pg_catalog.tid' end,
    target.relation, target.held, target.due, target.deadline_order);
  perform set_config('search_path', target.search_path, true);
  execute v_statement
     into v_batch
    using v_cutoff, null, v_taken, v_limit, policy.policy_id, c_holds;
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);

  if cardinality(v_batch.keys) = 0 then
    v_batch := pgreaper._due(policy, target, _youngest.clock, null, c_holds);
    v_batch.origin := 'probe';
  end if;

  return v_batch;
end;
$function$;

comment on function pgreaper._youngest(pgreaper.policies, pgreaper._target, timestamptz) is
'A few due holds from the young end of the backlog.';

-- _moot: dead letters whose hold has nothing left to do: it was consumed, deleted, extended or expired otherwise.
--
-- Looks at so many dead letters, discarded ones too, and at their holds by key.  Where there are
-- more of them it looks at those in a random stretch of the table: who asks again and again sees all in
-- the end, and nobody has to write down how far he came.
--
-- Promises
--   * Reads at most that many dead letters and as many rows of the target; locks and writes nothing.
create function pgreaper._moot(
  policy pgreaper.policies,
  target pgreaper._target,
  clock timestamptz,
  out keys text[],
  out deadlines timestamptz[],
  out states text[]
)
language plpgsql
volatile
security invoker
as $function$
declare
  c_looked_at constant integer := 1000;
  c_pages constant integer := 16;
  v_cutoff constant timestamptz := _moot.clock - policy.grace;
  v_pages integer;
  v_first integer;
  v_keys text[];
  v_deadlines timestamptz[];
  v_statement text;
begin
  keys := '{}';
  deadlines := '{}';
  states := '{}';

  select array_agg(d.key), array_agg(d.deadline) into v_keys, v_deadlines
    from (select f.key, f.deadline from pgreaper.failures as f
           -- Ordered, so that it is read by the index: a scan of the table would meet those of all policies.
           where f.policy_id = policy.policy_id and f.not_before >= 'infinity'
           order by f.not_before limit c_looked_at + 1) as d;
  if v_keys is null then
    return;
  end if;
  if cardinality(v_keys) > c_looked_at then
    v_pages := pg_relation_size('pgreaper.failures') / current_setting('block_size')::integer;
    v_first := floor(random() * greatest(1, v_pages - c_pages + 1));
    with stretch as materialized (
      select f.policy_id, f.key, f.deadline, f.not_before
        from pgreaper.failures as f
       where f.ctid >= format('(%s,0)', v_first)::tid and f.ctid < format('(%s,0)', v_first + c_pages)::tid
    )
    select array_agg(d.key), array_agg(d.deadline) into v_keys, v_deadlines
      from (select s.key, s.deadline from stretch as s
             where s.policy_id = policy.policy_id and s.not_before = 'infinity' limit c_looked_at) as d;
    if v_keys is null then
      return;
    end if;
  end if;

  v_statement := format(
    'select coalesce(pg_catalog.array_agg(k.key), ''{}''), coalesce(pg_catalog.array_agg(k.deadline), ''{}''),'
    '       coalesce(pg_catalog.array_agg(f.state), ''{}'')'
    '  from unnest($3, $2) as k (key, deadline)'
    '  left join (select %1$s as key, case when %2$s and %3$s then %4$s end as deadline, %5$s as state'
    '               from %6$s as h where %7$s) as f on f.key operator(pg_catalog.=) k.key'
    ' where (f.deadline operator(pg_catalog.=) k.deadline) is not true',
    target.key, target.held, target.due, target.deadline, target.state, target.relation, target.matches);
  perform set_config('search_path', target.search_path, true);
  execute v_statement
     into keys, deadlines, states
    using v_cutoff, v_deadlines, v_keys;
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
end;
$function$;

comment on function pgreaper._moot(pgreaper.policies, pgreaper._target, timestamptz) is
'Dead letters whose hold has nothing left to do, of a bounded number that is looked at.';

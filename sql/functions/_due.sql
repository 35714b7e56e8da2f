-- _due: the next due holds that nobody has and that have not failed.
--
-- Reads in the order of the deadlines from `start` on (NULL: from the first), without
-- locking or writing a row.  The ordered scan knows only state and deadline and has a
-- limit; what is taken is filtered out of its result.  With the leased keys in its own
-- WHERE the planner's estimate collapses and it sorts the whole backlog instead.
--
-- `untouched`: there was neither a lease nor a failure a moment ago, and whoever asks learns of a claim since then.
--
-- Promises
--   * Oldest deadline first; at most `wanted` holds.
--   * Fewer than `wanted` only when no further hold is due from `start` on.
create function pgreaper._due(
  policy pgreaper.policies,
  target pgreaper._target,
  clock timestamptz,
  start timestamptz,
  wanted integer,
  untouched boolean default false
)
returns pgreaper._batch
language plpgsql
volatile
security invoker
as $function$
declare
  c_large constant integer := 10000;
  v_cutoff constant timestamptz := _due.clock - policy.grace;
  v_statement text;
  v_from timestamptz := _due.start;
  v_taken text[] := '{}';
  v_scan text;
  v_unleased text;
  v_failure text;
  v_failed boolean := false;
  v_whole boolean;
  v_ahead bigint;
  v_limit integer;
  v_scanned integer;
  v_last timestamptz;
  v_page pgreaper._batch;
  v_batch pgreaper._batch := row('{}'::text[], '{}'::timestamptz[], '{}'::tid[], 1, 'fresh')::pgreaper._batch;
begin
  -- A lease that lapsed counts until it is taken back, when its attempt is in the books.
  if not _due.untouched then
    v_taken := array(
      select k.key
        from pgreaper.claims as c
       cross join lateral unnest(c.keys, c.deadlines) as k (key, deadline)
       where c.policy_id = policy.policy_id
         and c.finished_at is null
         -- Apart, so that claims that lie behind are not unpacked.
         and (v_from is null or c.last_deadline >= v_from)
         and (v_from is null or k.deadline >= v_from)
    );
    -- The greatest one by its index: with EXISTS the planner hopes to meet one early, and reads them all.
    v_failed := coalesce(
      (select max(f.deadline) from pgreaper.failures as f where f.policy_id = policy.policy_id) >= coalesce(v_from, '-infinity'), false);
  end if;
  v_limit := _due.wanted + cardinality(v_taken);

  loop
    v_scan := format(
      'select %1$s as key, %2$s as deadline, %3$s as hint from %4$s as h where %5$s and %6$s and %7$s order by %8$s limit $4',
      target.key, target.deadline, case when target.plain then 'h.ctid' else 'null::pg_catalog.tid' end,
      target.relation, target.held, target.due,
      case when v_from is null then 'true' else target.beyond end
        -- What is locked would use a rate limit up and leave none for what lies behind.
        || case when policy.rate_limit is not null and target.plain then ' and ' || pgreaper._unlocked() else '' end,
      target.deadline_order);
    -- IS NOT TRUE and not NOT: the negated form is not hashed everywhere.
    v_unleased := case when cardinality(v_taken) = 0 then 'true' else '(s.key operator(pg_catalog.=) any ($3)) is not true' end;
    v_whole := v_failed and v_limit >= c_large;
    v_failure := format(
      'exists (select from pgreaper.failures as x'
      ' where x.policy_id operator(pg_catalog.=) $5 and x.key operator(pg_catalog.=) s.key and %s)',
      -- IS TRUE, so that they are not merged by the deadline: thousands may have the same.
      case when v_whole then '(x.deadline operator(pg_catalog.=) s.deadline) is true' else 'x.deadline operator(pg_catalog.=) s.deadline' end);
    if v_whole then
      -- So many failures lie before what is free that they are read as a whole, and only what is free is sorted.
      -- CASE and interval: else the planner hopes to leave hardly anything, or to end early, and looks each failure up.
      v_statement := format(
        'with s as materialized (%1$s)'
        ' select f.*, c.*'
        '   from (select pg_catalog.array_agg(f.key), pg_catalog.array_agg(f.deadline), pg_catalog.array_agg(f.hint)'
        '           from (select s.* from s where case when %2$s then true end and not %3$s'
        '                  order by s.deadline operator(pg_catalog.+) interval ''0'' limit $6) as f) as f'
        '  cross join (select pg_catalog.count(*), pg_catalog.max(s.deadline) from s) as c',
        v_scan, v_unleased, v_failure);
    else
      v_statement := format(
        'select pg_catalog.array_agg(s.key) filter (where s.free), pg_catalog.array_agg(s.deadline) filter (where s.free),'
        '       pg_catalog.array_agg(s.hint) filter (where s.free), pg_catalog.count(*), pg_catalog.max(s.deadline)'
        '  from (select s.*, %2$s and %3$s as free from (%1$s) as s) as s',
        v_scan, v_unleased, case when v_failed then 'not ' || v_failure else 'true' end);
    end if;
    perform set_config('search_path', target.search_path, true);
    execute v_statement
       into v_page.keys, v_page.deadlines, v_page.hints, v_scanned, v_last
      using v_cutoff, v_from, v_taken, v_limit, policy.policy_id, _due.wanted;
    perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);

    v_batch.keys := v_batch.keys || v_page.keys;
    v_batch.deadlines := v_batch.deadlines || v_page.deadlines;
    v_batch.hints := v_batch.hints || v_page.hints;

    exit when cardinality(v_batch.keys) >= _due.wanted or v_scanned < v_limit;

    -- A full page, but too much of it was taken: read on.  What shares the last
    -- deadline is read again; when a whole page shares it, only a larger page helps.
    v_limit := v_limit * case when v_last = v_from then 4 else 2 end;
    v_from := v_last;
    v_taken := v_taken || v_page.keys;
    -- Hardly anything but failures: likely so many more lie before the first that is free.
    if v_failed and v_ahead is null and coalesce(cardinality(v_page.keys), 0) < v_scanned / 8 then
      select count(*) into v_ahead from pgreaper.failures as f where f.policy_id = policy.policy_id and f.deadline >= v_last;
      v_limit := greatest(v_limit, _due.wanted + cardinality(v_taken) + v_ahead);
    end if;
  end loop;

  if cardinality(v_batch.keys) > _due.wanted then
    v_batch.keys := v_batch.keys[:_due.wanted];
    v_batch.deadlines := v_batch.deadlines[:_due.wanted];
    v_batch.hints := v_batch.hints[:_due.wanted];
  end if;
  return v_batch;
end;
$function$;

comment on function pgreaper._due(pgreaper.policies, pgreaper._target, timestamptz, timestamptz, integer, boolean) is
'The next due holds that nobody has and that have not failed; locks and writes nothing.';

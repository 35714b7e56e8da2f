-- _write: the statement that writes the target, and its trail.
--
-- Locks the holds with the full guard and skips what another transaction has
-- locked; updates what it locked; appends one row of trail.  Whoever changed a row
-- since it was read has changed what the guard sees, because a row is judged as it
-- is when its lock is granted.
--
-- On a plain table the locked rows are addressed by ctid, which holds for as long as
-- this transaction has them locked; partitions and views are addressed by the key.
-- A hint (ctid seen earlier) may by now lead to another row, so the key is checked too.
--
-- Without keys it picks the holds itself: the first `wanted` that are due from `start` on.
--
-- Promises
--   * `done` made the transition, is in the trail, and nothing else is.
--   * `locked` were locked by this call: what is locked and not done was refused by a
--     trigger, or was changed in the same instant; a second call tells which.
create function pgreaper._write(
  policy pgreaper.policies,
  target pgreaper._target,
  clock timestamptz,
  token uuid,
  worker text,
  keys text[],
  hints tid[],
  start timestamptz default null,
  wanted integer default null,
  out locked text[],
  out done text[],
  out last_deadline timestamptz
)
language plpgsql
volatile
security invoker
as $function$
declare
  v_cutoff constant timestamptz := _write.clock - policy.grace;
  v_statement text;
  v_deadlines timestamptz[];
  v_first timestamptz;
begin
  -- Here the user's triggers run, and views and domains are looked into.
  v_statement := format(
    'with locked as materialized ('
    '  select %1$s as key, %2$s as deadline, %3$s'
    '    from %4$s as h'
    '   where %5$s and %6$s and %7$s'
    '     %13$s %8$s'
    '), done as ('
    '  update %4$s as h set %9$s %10$s'
    '  returning %11$s as key, %12$s as ended'
    ')'
    ' select pg_catalog.array_agg(l.key), pg_catalog.array_agg(l.deadline),'
    '       (select pg_catalog.array_agg(d.key) from done as d where d.ended)'
    '  from locked as l',
    target.key, target.deadline,
    case when target.plain then 'h.ctid as tid' else target.key_columns end,
    target.relation,
    case when _write.keys is null then case when _write.start is null then 'true' else target.beyond end
         when _write.hints is null then target.matches
         else format('h.ctid operator(pg_catalog.=) any ($5) and %s operator(pg_catalog.=) any ($3)', target.key) end,
    target.held, target.due, pgreaper._row_lock(policy),
    target.assignments,
    case when target.plain then 'where h.ctid operator(pg_catalog.=) any (array(select l.tid from locked as l order by l.tid))'
         else format('from locked as l where %s', target.same_key) end,
    case when target.plain then target.key else 'l.key' end,
    target.ended,
    case when _write.keys is null then format('order by %s limit $6', target.deadline_order) end);
  perform set_config('search_path', target.search_path, true);
  execute v_statement
     into locked, v_deadlines, done
    using v_cutoff, _write.start, _write.keys, _write.clock, _write.hints, _write.wanted;
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);

  if done is null then
    return;
  end if;

  if cardinality(done) < cardinality(locked) then
    v_deadlines := array(
      select l.deadline
        from unnest(done) with ordinality as d (key, position)
        join unnest(locked, v_deadlines) as l (key, deadline) on l.key = d.key
       order by d.position
    );
  else
    done := locked;
  end if;

  select min(d.deadline), max(d.deadline) into v_first, last_deadline from unnest(v_deadlines) as d (deadline);

  insert into pgreaper.transitions
    (policy_id, token, worker, at, state, holds, keys, deadlines, first_deadline, last_deadline, lateness)
  values
    (policy.policy_id, _write.token, _write.worker, _write.clock, policy.expired, cardinality(done), done, v_deadlines,
     v_first, last_deadline, pgreaper._lateness(_write.clock - policy.grace, v_deadlines, v_first, last_deadline));

  -- Failures of earlier incarnations too: nobody has to look at what has expired since.
  if exists (select from pgreaper.failures as f where f.policy_id = policy.policy_id) then
    delete from pgreaper.failures as f where f.policy_id = policy.policy_id and f.key = any (done);
  end if;
end;
$function$;

comment on function pgreaper._write(pgreaper.policies, pgreaper._target, timestamptz, uuid, text, text[], tid[], timestamptz, integer) is
'Lock the holds that are still held and due, update them, append the trail.';

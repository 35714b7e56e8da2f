-- _write: the statement that writes the target, and its trail.
--
-- Where nothing of the user's runs in an update of the target (`target.bare`), it updates the rows straight
-- away, with the full guard, and leaves out those that another transaction has locked; whoever locks one
-- in the instant between look and update is waited for at most 10 ms, then the statement fails (55P03) and its
-- caller goes the careful way.  That one is taken everywhere else: lock the holds with the full guard, skip
-- what another transaction has locked, update what was locked.  Either way one row of trail is appended, and
-- whoever changed a row since it was read has changed what the guard sees, because a row is judged as it
-- is when its lock is granted.
--
-- On a plain table the locked rows are addressed by ctid, which holds for as long as
-- this transaction has them locked; partitions and views are addressed by the key.
-- A hint (ctid seen earlier) may by now lead to another row, so the key is checked too.
--
-- Where the rows are given the guard stands in a CASE: with statistics from before a burst the planner expects
-- no held row, and would read the whole backlog by its index to find the given ones in it.
--
-- Without keys it picks the holds itself: the first `wanted` that are due from `start` on.
--
-- Promises
--   * `done` made the transition, is in the trail, and nothing else is.
--   * `locked` were locked by this call: what is locked and not done was refused by a
--     trigger, or was changed in the same instant; a second call tells which.
--   * A plain table with no trigger of the user's costs one row version and no lock record per hold.
--
-- Raises
--   55P03  (bare) a row was locked in that instant and stayed so.     09000  (bare) a trigger was made in it.
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
  v_patience constant text := current_setting('lock_timeout');
  v_which text;
  v_order text;
  v_guard text;
  v_statement text;
  v_ended boolean;
  v_more integer;
  v_locked text[];
  v_done text[];
  v_deadlines timestamptz[];
  v_locked_deadlines timestamptz[];
  v_first timestamptz;
begin
  v_which := case when _write.keys is null and _write.start is null then 'true'
                  when _write.keys is null then target.beyond
                  when _write.hints is null then target.matches
                  -- A sub-select and a CASE: into plain arrays the planner looks, element by element, for its estimate.
                  else format('h.ctid operator(pg_catalog.=) any ((select $5)::pg_catalog.tid[])'
                              ' and case when %s operator(pg_catalog.=) any ($3) then true end', target.key) end;
  v_order := case when _write.keys is null then format('order by %s limit $6', target.deadline_order) end;

  if target.bare then
    -- Straight to the update, which costs a fifth less than to lock first.  Rows that bear the mark of a
    -- transaction under way are left out; one that is marked in the instant between that look and its update is
    -- waited for, for a moment, and then whoever called takes the careful way.
    v_statement := format(
      'with done as ('
      '  update %1$s as h set %2$s where case when %3$s and %4$s then true end and %5$s and %6$s'
      '  returning %7$s as key, %8$s as deadline, %9$s as ended'
      ')'
      ' select pg_catalog.array_agg(d.key), pg_catalog.array_agg(d.deadline),'
      '        pg_catalog.min(d.deadline), pg_catalog.max(d.deadline), pg_catalog.bool_and(d.ended)'
      '   from done as d',
      target.relation, target.assignments, target.held, target.due,
      case when v_order is null then v_which
           else format('h.ctid operator(pg_catalog.=) any (array(select h.ctid from %s as h where %s and %s and %s %s))',
                  target.relation, v_which, target.held, target.due, v_order) end,
      pgreaper._unlocked(), target.key, target.deadline, target.ended);
    perform set_config('lock_timeout', '10ms', true), set_config('search_path', target.search_path, true);
    execute v_statement
       into done, v_deadlines, v_first, last_deadline, v_ended
      using v_cutoff, _write.start, _write.keys, _write.clock, _write.hints, _write.wanted;
    perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true),
            pg_catalog.set_config('lock_timeout', v_patience, true);
    -- By a trigger that was made in this instant.
    if not v_ended then
      raise triggered_action_exception;
    end if;
    locked := done;
  end if;

  -- What is left of a batch of its own choosing; what is left of given keys is the caller's to try again.
  v_more := _write.wanted - coalesce(cardinality(done), 0);
  if not target.bare or v_more > 0 then
    -- Here the user's triggers run, and views and domains are looked into.
    v_guard := case when _write.keys is null then '%6$s and %7$s' else 'case when %6$s and %7$s then true end' end;
    v_statement := format(
      'with locked as materialized ('
      '  select %1$s as key, %2$s as deadline, %3$s'
      '    from %4$s as h'
      '   where %5$s and ' || v_guard ||
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
      v_which,
      target.held, target.due, pgreaper._row_lock(policy),
      target.assignments,
      case when target.plain then 'where h.ctid operator(pg_catalog.=) any (array(select l.tid from locked as l))'
           else format('from locked as l where %s', target.same_key) end,
      case when target.plain then target.key else 'l.key' end,
      target.ended, v_order);
    perform set_config('search_path', target.search_path, true);
    execute v_statement
       into v_locked, v_locked_deadlines, v_done
      using v_cutoff, _write.start, _write.keys, _write.clock, _write.hints, v_more;
    perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);

    if cardinality(v_done) < cardinality(v_locked) then
      v_locked_deadlines := array(
        select l.deadline
          from unnest(v_done) with ordinality as d (key, position)
          join unnest(v_locked, v_locked_deadlines) as l (key, deadline) on l.key = d.key
         order by d.position
      );
      done := done || v_done;
    elsif v_done is not null then
      -- In the order of the deadlines.
      done := done || v_locked;
    end if;
    locked := locked || v_locked;
    if v_done is not null then
      v_deadlines := v_deadlines || v_locked_deadlines;
      select min(d.deadline), max(d.deadline) into v_first, last_deadline from unnest(v_deadlines) as d (deadline);
    end if;
  end if;

  if done is null then
    return;
  end if;

  insert into pgreaper.transitions
    (policy_id, token, worker, at, state, holds, keys, deadlines, first_deadline, last_deadline, lateness)
  values
    (policy.policy_id, _write.token, _write.worker, _write.clock, policy.expired, cardinality(done), done, v_deadlines,
     v_first, last_deadline, pgreaper._lateness(v_cutoff, v_deadlines, v_first, last_deadline));

  -- Failures of earlier incarnations too: nobody has to look at what has expired since.
  if exists (select from pgreaper.failures as f where f.policy_id = policy.policy_id) then
    delete from pgreaper.failures as f where f.policy_id = policy.policy_id and f.key = any (done);
  end if;
end;
$function$;

comment on function pgreaper._write(pgreaper.policies, pgreaper._target, timestamptz, uuid, text, text[], tid[], timestamptz, integer) is
'Lock the holds that are still held and due, update them, append the trail.';

-- _classify: why these holds were not expired, by a fresh look at their rows.
--
-- Conflicts (already-done, not-eligible) are successful ends and go to `events`;
-- `locked` says that the hold is still due and somebody has it: nothing is recorded,
-- the next round takes it.
create function pgreaper._classify(
  policy pgreaper.policies,
  target pgreaper._target,
  clock timestamptz,
  token uuid,
  worker text,
  keys text[],
  deadlines timestamptz[]
)
returns setof pgreaper.hold_outcome
language plpgsql
volatile
security invoker
as $function$
declare
  v_cutoff constant timestamptz := _classify.clock - policy.grace;
  v_statement text;
  v_outcomes pgreaper.hold_outcome[];
begin
  v_statement := format(
    'select pg_catalog.array_agg(row(k.key, case when f.ended then ''already-done'''
    '                                 when f.due then ''locked'''
    '                                 else ''not-eligible'' end, f.state)::pgreaper.hold_outcome)'
    '  from pg_catalog.unnest($3) as k (key)'
    '  left join (select %1$s as key, %2$s as state, %3$s as ended, %4$s and %5$s as due'
    '               from %6$s as h where %7$s) as f on f.key operator(pg_catalog.=) k.key',
    target.key, target.state, target.ended, target.held, target.due, target.relation, target.matches);
  perform set_config('search_path', target.search_path, true);
  execute v_statement
     into v_outcomes
    using v_cutoff, null, _classify.keys;
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);

  insert into pgreaper.events (policy_id, key, deadline, kind, state, worker, token, at)
  select policy.policy_id, o.key, d.deadline, o.outcome, o.state, _classify.worker, _classify.token, _classify.clock
    from unnest(v_outcomes) as o
    join unnest(_classify.keys, _classify.deadlines) as d (key, deadline) on d.key = o.key
   where o.outcome <> 'locked';

  return query select o.* from unnest(v_outcomes) as o;
end;
$function$;

comment on function pgreaper._classify(pgreaper.policies, pgreaper._target, timestamptz, uuid, text, text[], timestamptz[]) is
'Why these holds were not expired; records the conflicts.';

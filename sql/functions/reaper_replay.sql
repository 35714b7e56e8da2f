-- reaper_replay: give dead letters a fresh budget: one, those of a kind or an age, or all.
--
-- Promises
--   * However many people press it at once, a dead letter is replayed once.
--   * A hold that is no longer held and due is not touched: its dead letter is closed as moot.
--   * Returns each key with `replay` or `moot`, and the state found; no rows: nothing was dead.
--   * Who did it goes to `events`; what happened before stays there.
--
-- Raises
--   RP002  no such policy.
create function pgreaper.reaper_replay(
  policy text,
  key text default null,
  reason text default null,
  error_class text default null,
  older_than interval default null,
  search_path text default pg_catalog.current_setting('search_path')
)
returns setof pgreaper.hold_outcome
language plpgsql
volatile
security invoker
set lock_timeout = '2s'
set search_path = pg_catalog, pg_temp
as $function$
declare
  v_policy constant pgreaper.policies := pgreaper._policy(reaper_replay.policy);
  v_target constant pgreaper._target := pgreaper._target(v_policy, reaper_replay.search_path);
  v_now constant timestamptz := pgreaper._clock();
  v_cutoff constant timestamptz := v_now - v_policy.grace;
  v_statement text;
  v_keys text[];
  v_deadlines timestamptz[];
  v_live text[];
  v_states text[];
begin
  perform pgreaper._require_writable();

  select array_agg(d.key), array_agg(d.deadline) into v_keys, v_deadlines
    from (
      select f.key, f.deadline
        from pgreaper.failures as f
       where f.policy_id = v_policy.policy_id
         and f.not_before = 'infinity'
         and f.discarded_at is null
         and (reaper_replay.key is null or f.key = reaper_replay.key)
         and (reaper_replay.error_class is null or f.error_class = reaper_replay.error_class)
         and (reaper_replay.older_than is null or f.failed_at <= v_now - reaper_replay.older_than)
       order by f.key
         for update
    ) as d;
  if v_keys is null then
    return;
  end if;

  v_statement := format(
    'select pg_catalog.array_agg(k.key) filter (where f.due and f.deadline operator(pg_catalog.=) k.deadline),'
    '       pg_catalog.array_agg(f.state order by k.position)'
    '  from unnest($3, $2) with ordinality as k (key, deadline, position)'
    '  left join (select %1$s as key, case when %2$s and %3$s then %4$s end as deadline, %2$s and %3$s as due, %5$s as state'
    '               from %6$s as h where %7$s) as f on f.key operator(pg_catalog.=) k.key',
    v_target.key, v_target.held, v_target.due, v_target.deadline, v_target.state, v_target.relation, v_target.matches);
  perform set_config('search_path', v_target.search_path, true);
  execute v_statement
     into v_live, v_states
    using v_cutoff, v_deadlines, v_keys;
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
  v_live := coalesce(v_live, '{}');

  update pgreaper.failures as f
     set attempts = 0, not_before = v_now
   where f.policy_id = v_policy.policy_id and f.key = any (v_live);
  delete from pgreaper.failures as f
   where f.policy_id = v_policy.policy_id and f.key = any (v_keys) and f.key <> all (v_live);

  insert into pgreaper.events (policy_id, key, deadline, kind, state, at, attempts, actor, reason)
  select v_policy.policy_id, k.key, k.deadline, case when k.key = any (v_live) then 'replay' else 'moot' end, k.state,
         v_now, 0, session_user, reaper_replay.reason
    from unnest(v_keys, v_deadlines, v_states) as k (key, deadline, state);

  return query
    select k.key, case when k.key = any (v_live) then 'replay' else 'moot' end, k.state
      from unnest(v_keys, v_states) as k (key, state);
end;
$function$;

comment on function pgreaper.reaper_replay(text, text, text, text, interval, text) is
'Give dead letters a fresh budget, by key, kind, age or all; a hold that moved on closes its dead letter as moot.';

-- reaper_history: everything that happened to one hold, oldest first.
--
-- The trail has no index by key; a hold is found through its deadline, in the few
-- batches whose range covers it: the deadline in the row now, and those that failures
-- and events remember.  While the trail is small, and when nothing was found that way,
-- all of it is searched; the view `history` always does.
--
-- Promises
--   * Works for a withdrawn policy, and when the target or the row is gone.
--   * Writes nothing.
--
-- Raises
--   RP002  there never was such a policy.
create function pgreaper.reaper_history(
  policy text,
  key text,
  search_path text default pg_catalog.current_setting('search_path')
)
returns setof pgreaper.history
language plpgsql
volatile
security invoker
set lock_timeout = '200ms'
set search_path = pg_catalog, pg_temp
as $function$
declare
  c_small constant bigint := 32 * 1024 * 1024;
  v_policy pgreaper.policies;
  v_target pgreaper._target;
  v_statement text;
  v_keys constant text[] := array[reaper_history.key];
  v_deadline timestamptz;
  v_deadlines timestamptz[];
  v_ids bigint[];
begin
  select p.* into v_policy from pgreaper.policies as p where p.name = reaper_history.policy;
  if not found then
    perform pgreaper._policy(reaper_history.policy);
  end if;

  if pg_total_relation_size('pgreaper.transitions') > c_small then
    begin
      v_target := pgreaper._target(v_policy, reaper_history.search_path);
      v_statement := format('select %s from %s as h where %s and %s operator(pg_catalog.<) ''infinity'' limit 1',
        v_target.deadline, v_target.relation, v_target.matches, v_target.deadline_order);
      perform set_config('search_path', v_target.search_path, true);
      execute v_statement
         into v_deadline
        using null, null, v_keys;
      perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    exception
      -- The target is not there, or this is no key of it: the books still are.
      when undefined_table or undefined_column or datatype_mismatch or data_exception or insufficient_privilege then
        v_deadline := null;
    end;

    v_deadlines := array(
      select v_deadline where v_deadline is not null
      union
      select e.deadline from pgreaper.events as e
       where e.policy_id = v_policy.policy_id and e.key = reaper_history.key and e.deadline is not null
      union
      select f.deadline from pgreaper.failures as f
       where f.policy_id = v_policy.policy_id and f.key = reaper_history.key);
    v_ids := array(
      select distinct t.transition_id
        from unnest(v_deadlines) as d (deadline)
        join pgreaper.transitions as t
          on tstzrange(t.first_deadline, t.last_deadline, '[]') @> d.deadline
       where t.policy_id = v_policy.policy_id
         and reaper_history.key = any (t.keys));
  end if;

  if v_ids is null or cardinality(v_ids) = 0 then
    v_ids := array(
      select t.transition_id
        from pgreaper.transitions as t
       where t.policy_id = v_policy.policy_id
         and reaper_history.key = any (t.keys));
  end if;

  return query
    select h.*
      from (
        select v_policy.name as policy, reaper_history.key, k.deadline, 'expired'::text as outcome,
               coalesce(t.state, 'expired') as state, t.worker, t.token, t.at,
               null::integer as attempts, null::text as error_class, null::text as sqlstate,
               null::text as constraint_name, null::text as actor, null::text as reason
          from pgreaper.transitions as t
         cross join lateral unnest(t.keys, t.deadlines) as k (key, deadline)
         where t.transition_id = any (v_ids)
           and k.key = reaper_history.key
        union all
        select v_policy.name, e.key, e.deadline, e.kind, e.state, e.worker, e.token, e.at,
               e.attempts, e.error_class, e.sqlstate, e.constraint_name, e.actor, e.reason
          from pgreaper.events as e
         where e.policy_id = v_policy.policy_id
           and e.key = reaper_history.key
      ) as h
     order by h.at;
end;
$function$;

comment on function pgreaper.reaper_history(text, text, text) is 'Everything that happened to one hold, oldest first.';

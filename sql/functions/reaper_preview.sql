-- reaper_preview: what a run would meet now.
--
-- Counts exactly, so it reads every due entry of the index: a question for people, not
-- for a monitor.  A row counts as locked when a transaction that still runs has put its
-- mark on it; that is read from pg_locks, so that nothing has to be locked to find out.
--
-- Promises
--   * Writes nothing; works on a standby and in a read-only transaction.
--
-- Raises
--   RP002  no such policy.
create function pgreaper.reaper_preview(
  policy text,
  search_path text default pg_catalog.current_setting('search_path')
)
returns pgreaper.policy_preview
language plpgsql
volatile
security invoker
set lock_timeout = '2s'
set search_path = pg_catalog, pg_temp
as $function$
declare
  v_policy constant pgreaper.policies := pgreaper._policy(reaper_preview.policy);
  v_now constant timestamptz := pgreaper._clock();
  v_target constant pgreaper._target := pgreaper._target(v_policy, reaper_preview.search_path);
  v_cutoff constant timestamptz := v_now - v_policy.grace;
  v_statement text;
  v_preview pgreaper.policy_preview;
begin
  v_preview.policy := v_policy.name;

  v_statement := format(
    'select pg_catalog.count(*), pg_catalog.min(%1$s), %2$s from %3$s as h where %4$s and %5$s',
    v_target.deadline,
    case when v_target.plain then format('pg_catalog.count(*) filter (where %s)', pgreaper._locked()) else 'null::bigint' end,
    v_target.relation, v_target.held, v_target.due);
  perform set_config('search_path', v_target.search_path, true);
  execute v_statement
     into v_preview.due, v_preview.oldest_deadline, v_preview.locked
    using v_cutoff;
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);

  select coalesce(sum(c.holds), 0) into v_preview.leased
    from pgreaper.claims as c
   where c.policy_id = v_policy.policy_id and c.finished_at is null and c.claim_until > v_now;

  select count(*) filter (where f.not_before < 'infinity'), count(*) filter (where f.not_before = 'infinity' and f.discarded_at is null)
    into v_preview.retrying, v_preview.dead
    from pgreaper.failures as f
   where f.policy_id = v_policy.policy_id;

  v_statement := format(
    'select pg_catalog.count(*) filter (where %1$s and %2$s is null), %3$s from %4$s as h',
    v_target.held, v_target.deadline_order,
    case when v_policy.status_column is null then '0' else format('pg_catalog.count(*) filter (where h.%I is null)', v_policy.status_column) end,
    v_target.relation);
  perform set_config('search_path', v_target.search_path, true);
  execute v_statement
     into v_preview.no_deadline, v_preview.no_state;
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);

  return v_preview;
end;
$function$;

comment on function pgreaper.reaper_preview(text, text) is 'What a run of the policy would meet now; writes nothing.';

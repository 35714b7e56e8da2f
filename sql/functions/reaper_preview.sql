-- reaper_preview: what a run would meet now.
--
-- Due is what a claim could take: under no living lease, and not failed.  Those are told apart, as in the
-- view `status`.  A row counts as locked when a transaction that still runs has put its
-- mark on it; that is read from pg_locks, so that nothing has to be locked to find out.
--
-- Rows without a deadline or a state have no index, so in a table of more than 32 MB they are counted among
-- pages here and there, in a view or a partitioned table among its first 100,000 rows.
--
-- Promises
--   * Writes nothing; works on a standby and in a read-only transaction.
--   * Counts stop at 10,000; what is read is bounded, whatever the size of target and backlog.
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
  c_cap constant integer := 10000;
  c_rows constant integer := 100000;
  c_pages constant integer := 4096;
  v_policy constant pgreaper.policies := pgreaper._policy(reaper_preview.policy);
  v_now constant timestamptz := pgreaper._clock();
  v_target constant pgreaper._target := pgreaper._target(v_policy, reaper_preview.search_path);
  v_cutoff constant timestamptz := v_now - v_policy.grace;
  v_none constant timestamptz := null;
  v_taken constant text[] := array(
    select k.key from pgreaper.claims as c cross join lateral unnest(c.keys) as k (key)
     where c.policy_id = v_policy.policy_id and c.finished_at is null and c.claim_until > v_now);
  v_wanted constant integer := c_cap + 1;
  v_limit bigint;
  v_pages bigint;
  v_statement text;
  v_preview pgreaper.policy_preview;
begin
  v_preview.policy := v_policy.name;

  select v_wanted + count(*) + cardinality(v_taken) into v_limit
    from pgreaper.failures as f where f.policy_id = v_policy.policy_id;
  v_statement := format(
    'select pg_catalog.count(*), pg_catalog.min(h.deadline), %s'
    '  from (select h.* from (%s) as h where h.free limit $6) as h',
    case when v_target.plain then 'pg_catalog.count(*) filter (where h.locked)' else 'null::pg_catalog.int8' end,
    pgreaper._unleased(v_target, locked => true));
  perform set_config('search_path', v_target.search_path, true);
  execute v_statement
     into v_preview.due, v_preview.oldest_deadline, v_preview.locked
    using v_cutoff, v_none, v_taken, v_limit, v_policy.policy_id, v_wanted;
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
  v_preview.due_capped := v_preview.due > c_cap;
  v_preview.due := least(v_preview.due, c_cap);

  select coalesce(sum(c.holds), 0) into v_preview.leased
    from pgreaper.claims as c
   where c.policy_id = v_policy.policy_id and c.finished_at is null and c.claim_until > v_now;

  select count(*) into v_preview.retrying
    from (select from pgreaper.failures as f
           where f.policy_id = v_policy.policy_id and f.not_before < 'infinity' limit c_cap) as f;
  select count(*) into v_preview.dead
    from (select from pgreaper.failures as f
           where f.policy_id = v_policy.policy_id and f.not_before = 'infinity' and f.discarded_at is null limit c_cap) as f;

  v_pages := case when v_target.plain
    then pg_relation_size(format('%I.%I', v_policy.target_schema, v_policy.target_table)::regclass) / current_setting('block_size')::integer end;
  v_statement := format(
    'select pg_catalog.count(*) filter (where h.held and h.deadline is null), pg_catalog.count(*) filter (where h.state is null), pg_catalog.count(*)'
    '  from (select %1$s as held, %2$s as deadline, %3$s as state from %4$s as h %5$s) as h',
    v_target.held, v_target.deadline_order, v_target.state, v_target.relation,
    case when v_pages > c_pages then format('tablesample system (%s)', 100.0 * c_pages / v_pages)
         when not v_target.plain then format('limit %s', c_rows) end);
  perform set_config('search_path', v_target.search_path, true);
  execute v_statement
     into v_preview.no_deadline, v_preview.no_state, v_preview.looked_at;
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
  if coalesce(v_pages <= c_pages, v_preview.looked_at < c_rows) then
    v_preview.looked_at := null;
  end if;

  return v_preview;
end;
$function$;

comment on function pgreaper.reaper_preview(text, text) is 'What a run of the policy would meet now; writes nothing.';

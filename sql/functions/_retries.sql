-- _retries: failed holds whose time has come, of one attempt number.
--
-- The more often a hold was tried, the fewer go together: an eighth of the batch
-- after the first attempt, an eighth of that after the second, down to one.  A batch
-- that killed its worker is so split until the guilty hold is alone.
--
-- A failure whose hold was consumed, extended or deleted meanwhile is closed here.
create function pgreaper._retries(
  policy pgreaper.policies,
  target pgreaper._target,
  clock timestamptz,
  wanted integer
)
returns pgreaper._batch
language plpgsql
volatile
security invoker
as $function$
declare
  v_cutoff constant timestamptz := _retries.clock - policy.grace;
  v_statement text;
  v_attempts integer;
  v_keys text[];
  v_deadlines timestamptz[];
  v_batch pgreaper._batch;
begin
  -- Ends: each turn returns or closes at least one failure.
  loop
    select f.attempts into v_attempts
      from pgreaper.failures as f
     where f.policy_id = policy.policy_id
       and f.not_before <= _retries.clock
       and not exists (select from pgreaper.claims as c
                        where c.policy_id = f.policy_id and c.finished_at is null and f.key = any (c.keys))
     order by f.not_before
     limit 1;

    if not found then
      return row('{}'::text[], '{}'::timestamptz[], '{}'::tid[], 1, 'retry')::pgreaper._batch;
    end if;

    select array_agg(r.key), array_agg(r.deadline) into v_keys, v_deadlines
      from (
        select f.key, f.deadline
          from pgreaper.failures as f
         where f.policy_id = policy.policy_id
           and f.not_before <= _retries.clock
           and f.attempts = v_attempts
           and not exists (select from pgreaper.claims as c
                            where c.policy_id = f.policy_id and c.finished_at is null and f.key = any (c.keys))
         order by f.not_before
         limit greatest(1, _retries.wanted >> 3 * least(v_attempts, 10))
      ) as r;

    v_statement := format(
      'select coalesce(pg_catalog.array_agg(f.key order by f.deadline), ''{}''),'
      '       coalesce(pg_catalog.array_agg(f.deadline order by f.deadline), ''{}''),'
      '       coalesce(pg_catalog.array_agg(f.hint order by f.deadline), ''{}'')'
      '  from (select %1$s as key, %2$s as deadline, %3$s as hint'
      '          from %4$s as h where %5$s and case when %6$s and %7$s then true end) as f'
      '  join unnest($3, $2) as k (key, deadline) on k.key operator(pg_catalog.=) f.key and k.deadline operator(pg_catalog.=) f.deadline',
      target.key, target.deadline, case when target.plain then 'h.ctid' else 'null::pg_catalog.tid' end,
      target.relation, target.matches, target.held, target.due);
    perform set_config('search_path', target.search_path, true);
    execute v_statement
       into v_batch.keys, v_batch.deadlines, v_batch.hints
      using v_cutoff, v_deadlines, v_keys;
    perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);

    -- Never waits: who has such a row (a sweep that closes it too, a transition) may be
    -- about to wait for the cursor, which a claim holds here.
    delete from pgreaper.failures as f
     using (
       select m.key
         from pgreaper.failures as m
         join unnest(v_keys, v_deadlines) as k (key, deadline) on m.key = k.key and m.deadline = k.deadline
        where m.policy_id = policy.policy_id
          and m.key <> all (v_batch.keys)
          for update of m skip locked
     ) as moot
     where f.policy_id = policy.policy_id
       and f.key = moot.key;

    if cardinality(v_batch.keys) > 0 then
      v_batch.attempt := least(v_attempts, 2147483646) + 1;
      v_batch.origin := 'retry';
      return v_batch;
    elsif not found then
      return row('{}'::text[], '{}'::timestamptz[], '{}'::tid[], 1, 'retry')::pgreaper._batch;
    end if;
  end loop;
end;
$function$;

comment on function pgreaper._retries(pgreaper.policies, pgreaper._target, timestamptz, integer) is
'Failed holds of one attempt number whose time has come; closes failures whose hold moved on.';

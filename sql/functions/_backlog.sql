-- _backlog: how many due holds of a policy are how old; each count bounded.
--
-- Due as in the view `status`: under no living lease, and not failed.
create function pgreaper._backlog(
  policy pgreaper.policies,
  search_path text default pg_catalog.current_setting('search_path')
)
returns table (age text, "position" integer, due bigint, capped boolean)
language plpgsql
volatile
security invoker
set lock_timeout = '200ms'
set jit = off
set search_path = pg_catalog, pg_temp
as $function$
declare
  c_cap constant integer := 10000;
  v_now constant timestamptz := pgreaper._clock();
  v_cutoff constant timestamptz := v_now - policy.grace;
  v_target pgreaper._target;
  v_taken text[];
  v_bucket record;
  v_statement text;
  v_from timestamptz;
  v_to timestamptz;
  v_wanted constant integer := c_cap + 1;
  v_limit bigint;
begin
  v_target := pgreaper._target(policy, _backlog.search_path);
  v_taken := array(
    select k.key from pgreaper.claims as c cross join lateral unnest(c.keys) as k (key)
     where c.policy_id = policy.policy_id and c.finished_at is null and c.claim_until > v_now);

  for v_bucket in
    select b.*
      from (values
        (1, 'under 1 minute', interval '0', interval '1 minute'),
        (2, '1 to 5 minutes', '1 minute', '5 minutes'),
        (3, '5 to 60 minutes', '5 minutes', '1 hour'),
        (4, '1 to 24 hours', '1 hour', '1 day'),
        (5, 'over 1 day', '1 day', null)
      ) as b (ordinal, name, younger, older)
  loop
    age := v_bucket.name;
    "position" := v_bucket.ordinal;
    v_to := v_cutoff - v_bucket.younger;
    v_from := v_cutoff - v_bucket.older + interval '1 microsecond';
    -- So many may lie between the free ones.
    select v_wanted + count(*) + cardinality(v_taken) into v_limit
      from pgreaper.failures as f
     where f.policy_id = policy.policy_id and f.deadline <= v_to and f.deadline >= coalesce(v_from, '-infinity');
    v_statement := format('select pg_catalog.count(*) from (select from (%s) as h where h.free limit $6) as h',
      pgreaper._unleased(v_target, beyond => v_bucket.older is not null));
    perform set_config('search_path', v_target.search_path, true);
    execute v_statement
       into due
      using v_to, v_from, v_taken, v_limit, policy.policy_id, v_wanted;
    perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    capped := due > c_cap;
    due := least(due, c_cap);
    return next;
  end loop;
exception
  -- Costs the lines of this policy only; the view `status` says why.
  when others then
    return;
end;
$function$;

comment on function pgreaper._backlog(pgreaper.policies, text) is 'How many due holds of a policy are how old; each count bounded.';

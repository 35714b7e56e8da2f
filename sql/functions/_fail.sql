-- _fail: charge a failed attempt to each of these holds, and decide.
--
-- Transient failures are retried at least(cap, base * 2^attempts) plus up to half of
-- it, until max_attempts; anything else is a dead letter after permanent_attempts.
-- With `final` it is a dead letter at once; `retry_in` replaces the computed delay; what is
-- not `charged` is put off and costs no attempt.
-- A failure of an earlier incarnation (another deadline) is replaced.  One that came since
-- the claim began is of a later incarnation: it stays, and this failure is an event only.
--
-- Promises
--   * While the failure of an incarnation is on record its attempts never go down; a failure with
--     another deadline replaces it, and going back to the first deadline begins anew.
--   * Stores keys, deadlines, class, SQLSTATE and constraint name; no message, no value.
create function pgreaper._fail(
  policy pgreaper.policies,
  clock timestamptz,
  keys text[],
  deadlines timestamptz[],
  token uuid,
  worker text,
  transient boolean,
  error_class text,
  sqlstate text default null,
  constraint_name text default null,
  retry_in interval default null,
  final boolean default false,
  charged boolean default true
)
returns setof pgreaper.hold_outcome
language plpgsql
volatile
security invoker
as $function$
declare
  v_attempt constant integer := case when _fail.charged then 1 else 0 end;
  v_budget constant integer := case
    when not _fail.charged then null
    when _fail.final then 0
    when _fail.transient then policy.max_attempts
    else policy.permanent_attempts
  end;
  v_since constant timestamptz := (select c.claimed_at from pgreaper.claims as c where c.token = _fail.token);
begin
  return query
    with failed as (
      insert into pgreaper.failures as f
        (policy_id, key, deadline, attempts, first_seen_at, failed_at, not_before, error_class, sqlstate, constraint_name)
      select policy.policy_id, k.key, k.deadline, v_attempt, _fail.clock, _fail.clock,
             pgreaper._not_before(policy, _fail.clock, v_attempt, v_budget, _fail.retry_in),
             _fail.error_class, _fail.sqlstate, _fail.constraint_name
        from unnest(_fail.keys, _fail.deadlines) as k (key, deadline)
       order by k.key
      on conflict (policy_id, key) do update
         set deadline = excluded.deadline,
             attempts = case when f.deadline = excluded.deadline then least(f.attempts, 2147483647 - v_attempt) + v_attempt
                             else v_attempt end,
             first_seen_at = case when f.deadline = excluded.deadline then f.first_seen_at else excluded.first_seen_at end,
             failed_at = excluded.failed_at,
             not_before = pgreaper._not_before(policy, _fail.clock,
               case when f.deadline = excluded.deadline then least(f.attempts, 2147483647 - v_attempt) + v_attempt
                    else v_attempt end, v_budget, _fail.retry_in),
             discarded_at = null,
             error_class = excluded.error_class,
             sqlstate = excluded.sqlstate,
             constraint_name = excluded.constraint_name
       -- Somebody charged it after this call began: two sweeps met, and one attempt was it.
       where case when f.deadline = excluded.deadline then f.failed_at <= excluded.failed_at
                  else v_since is null or f.failed_at < v_since end
      returning f.key, f.deadline, f.attempts, case when f.not_before = 'infinity' then 'dead-letter' else 'retry' end as kind
    ), recorded as (
      insert into pgreaper.events
        (policy_id, key, deadline, kind, worker, token, at, attempts, error_class, sqlstate, constraint_name)
      select policy.policy_id, k.key, k.deadline, coalesce(f.kind, 'retry'), _fail.worker, _fail.token, _fail.clock,
             coalesce(f.attempts, v_attempt), _fail.error_class, _fail.sqlstate, _fail.constraint_name
        from unnest(_fail.keys, _fail.deadlines) as k (key, deadline)
        left join failed as f on f.key = k.key
       where f.key is not null or _fail.token is not null
    )
    select k.key, coalesce(f.kind, 'retry'), null::text
      from unnest(_fail.keys) as k (key)
      left join failed as f on f.key = k.key;
end;
$function$;

comment on function pgreaper._fail(pgreaper.policies, timestamptz, text[], timestamptz[], uuid, text, boolean, text, text, text, interval, boolean, boolean) is
'Charge one failed attempt to each hold: retry or dead letter.';

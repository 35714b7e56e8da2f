-- reaper_prune: remove what the books have kept long enough.
--
-- Separate from expiry on purpose: expiring must not wait for housekeeping.  A call removes at
-- most `max_rows` rows of each kind, the oldest first, so it is a short transaction; call it
-- again while `more` says so.  Counters are not touched: they were counted when it happened.
-- Retries and dead letters are work, not history: they stay until they are settled.  So does a row of
-- the trail that a relay has not delivered, or that tells of an event that was given up.
--
-- Promises
--   * A claim goes before what happened under it: what is in the books adds up at any time.
--   * Safe beside workers, sweeps and itself: rows that somebody has locked are left for the next call.
--   * A call that finds nothing writes nothing.
--
-- Raises
--   22023  a `keep` below an hour: a repeated reaper_expire() is answered from the books.
create function pgreaper.reaper_prune(
  keep interval default '90 days',
  keep_events interval default null,
  keep_claims interval default '7 days',
  max_rows integer default 10000
)
returns setof pgreaper.pruned
language plpgsql
volatile
security invoker
set lock_timeout = '200ms'
set search_path = pg_catalog, pg_temp
as $function$
declare
  c_least constant interval := '1 hour';
  v_now constant timestamptz := pgreaper._clock();
  v_keep_events constant interval := coalesce(reaper_prune.keep_events, reaper_prune.keep);
  v_policy pgreaper.policies;
  v_row pgreaper.pruned;
begin
  perform pgreaper._require_writable();
  if (reaper_prune.keep >= c_least and v_keep_events >= c_least and reaper_prune.keep_claims >= c_least) is not true then
    raise invalid_parameter_value
      using message = 'the books must be kept for an hour at least',
            hint = 'A repeated reaper_expire() is answered from them. Pass for example keep => ''30 days''.';
  end if;
  if (reaper_prune.max_rows between 1 and 1000000) is not true then
    raise invalid_parameter_value using message = 'max_rows must be between 1 and 1000000';
  end if;

  -- ARRAY and not IN: a plan may run a subquery again for each row, and its limit with it.
  for v_policy in select p.* from pgreaper.policies as p order by p.name loop
    v_row.policy := v_policy.name;
    v_row.kind := 'claims';
    delete from pgreaper.claims as c
     where c.token = any (array(
       select o.token from pgreaper.claims as o
        where o.policy_id = v_policy.policy_id and o.finished_at < v_now - least(reaper_prune.keep_claims, reaper_prune.keep, v_keep_events)
        order by o.finished_at limit reaper_prune.max_rows for update skip locked));
    get diagnostics v_row.removed = row_count;
    v_row.more := v_row.removed = reaper_prune.max_rows;
    return next v_row;

    v_row.kind := 'transitions';
    delete from pgreaper.transitions as t
     where t.transition_id = any (array(
       select o.transition_id from pgreaper.transitions as o
        where o.policy_id = v_policy.policy_id and o.at < v_now - reaper_prune.keep
          and not exists (select from pgreaper.claims as c where c.token = o.token)
          and not exists (
            select from pgreaper.relays as r
             where r.policy_id = o.policy_id
               and (not r.settled @> int8range(o.transition_id << 20, (o.transition_id + 1) << 20)
                    or exists (select from pgreaper.undelivered as u
                                where u.relay_id = r.relay_id
                                  and u.event >= o.transition_id << 20 and u.event < (o.transition_id + 1) << 20)))
        order by o.at limit reaper_prune.max_rows for update of o skip locked));
    get diagnostics v_row.removed = row_count;
    v_row.more := v_row.removed = reaper_prune.max_rows;
    return next v_row;

    v_row.kind := 'events';
    delete from pgreaper.events as e
     where e.event_id = any (array(
       select o.event_id from pgreaper.events as o
        where o.policy_id = v_policy.policy_id and o.at < v_now - v_keep_events
          and not exists (select from pgreaper.claims as c where c.token = o.token)
        order by o.at limit reaper_prune.max_rows for update skip locked));
    get diagnostics v_row.removed = row_count;
    v_row.more := v_row.removed = reaper_prune.max_rows;
    return next v_row;
  end loop;
end;
$function$;

comment on function pgreaper.reaper_prune(interval, interval, interval, integer) is
'Remove what the books have kept long enough; call again while `more`.';

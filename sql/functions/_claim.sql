-- _claim: lease the next due holds to one worker; for reaper_claim() and reaper_claim_batch().
--
-- Takes, in this order: retries whose time has come (unless the last claim took
-- some), else fresh holds from the policy's cursor on.  With `rescan` the search for
-- fresh holds starts at the oldest deadline: that finds what became claimable behind
-- the cursor, such as a hold that was locked or inserted late.  Leases that lapsed are
-- taken back on the way, so recovery needs no job of its own.  So are dead letters closed
-- whose hold has moved on, by a claim that finds nothing and by one with `rescan`.
--
-- `known` is what the same transaction has settled just now: it keeps the target from being altered, so what is known
-- of it is still so.
--
-- `skew` is by how much the worker's clock is ahead of the database's; it is only shown.
--
-- A policy whose holds all fail alike rests, and is then tried with a few from elsewhere.
--
-- Promises
--   * Concurrent claims share no hold.
--   * Nothing of the target is locked or written.
--   * A pass that finds nothing, no dead letter to close either, writes nothing and takes no transaction id.
--   * Whoever has the cursor's row, as a claim has, waits for no claim and no target row.
--
-- Raises
--   RP002  no such policy.     RP004  not READ COMMITTED, or a read-only node.
--   22023  a batch outside 1 to 10000.
--   55P03  the cursor or the target stayed locked; nothing happened, try again.
create function pgreaper._claim(
  policy text,
  batch integer,
  worker text,
  rescan boolean,
  session boolean,
  skew interval,
  search_path text,
  known pgreaper._settled default null
)
returns pgreaper._leased
language plpgsql
volatile
security invoker
set lock_timeout = '200ms'
set jit = off
set search_path = pg_catalog, pg_temp
as $function$
declare
  c_crowd constant integer := 3;
  v_policy constant pgreaper.policies := pgreaper._policy(_claim.policy);
  v_wanted integer := pgreaper._batch_size(v_policy, _claim.batch);
  v_now constant timestamptz := pgreaper._clock();
  v_target pgreaper._target;
  v_books record;
  v_cursor pgreaper.cursors;
  v_locked pgreaper.cursors;
  v_suspicion record;
  v_lapsed boolean;
  v_retry boolean;
  v_crowded boolean;
  v_fresh pgreaper._batch;
  v_batch pgreaper._batch;
  v_first timestamptz;
  v_last timestamptz;
  v_token uuid;
  v_until constant timestamptz := v_now + v_policy.lease;
begin
  perform pgreaper._require_writable();
  if v_policy.paused_at is not null or pgreaper._subscription(v_policy) is not null then
    return null;
  end if;

  -- The probe: reads only.
  v_target := case when (_claim.known).policy = v_policy then (_claim.known).target
                   else pgreaper._target(v_policy, _claim.search_path) end;
  select c as cursor,
         (select count(*) from pgreaper.claims as l where l.policy_id = c.policy_id and l.finished_at is null) as leases,
         exists (select from pgreaper.failures as f where f.policy_id = c.policy_id) as failed
    into v_books
    from pgreaper.cursors as c where c.policy_id = v_policy.policy_id;
  v_cursor := v_books.cursor;
  v_suspicion := pgreaper._suspicion(v_policy, v_cursor);
  if v_suspicion.suspect and v_suspicion.until > v_now then
    return null;
  end if;
  v_lapsed := v_books.leases > 0 and pgreaper._lapsed(v_policy.policy_id, v_now);
  v_retry := v_books.failed and coalesce(pgreaper._retry_at(v_policy.policy_id) <= v_now, false);
  -- Among many, somebody will have claimed these holds before it is our turn: then it is enough to see that there are some.
  v_crowded := not _claim.rescan and v_policy.rate_limit is null and v_books.leases >= c_crowd;
  v_fresh := pgreaper._due(v_policy, v_target, v_now, case when not _claim.rescan then v_cursor.position end,
    case when v_crowded then 1 else v_wanted end, untouched => v_books.leases = 0 and not v_books.failed);
  if cardinality(v_fresh.keys) = 0 and not v_lapsed and not v_retry then
    if v_books.failed then
      perform pgreaper._close_moot(v_policy, _claim.worker, _claim.search_path, looks => 10);
    end if;
    return null;
  end if;

  perform pgreaper._may_write(v_policy);
  select c.* into v_locked from pgreaper.cursors as c where c.policy_id = v_policy.policy_id for update;

  -- Paused, withdrawn or registered anew while we waited for our turn: begin again.
  if pgreaper._policy(_claim.policy) is distinct from v_policy then
    return pgreaper._claim(_claim.policy, _claim.batch, _claim.worker, _claim.rescan,
      _claim.session, _claim.skew, _claim.search_path);
  end if;

  if v_lapsed then
    perform pgreaper._take_back(v_policy, v_target, v_now);
    select c.* into v_locked from pgreaper.cursors as c where c.policy_id = v_policy.policy_id;
  end if;

  v_suspicion := pgreaper._suspicion(v_policy, v_locked);
  if v_suspicion.suspect and v_suspicion.until > v_now then
    return null;
  end if;
  if v_policy.max_claims <= (
    select count(*) from pgreaper.claims as c where c.policy_id = v_policy.policy_id and c.finished_at is null
  ) then
    return null;
  end if;
  v_wanted := pgreaper._rationed(v_policy, v_now, v_locked,
    case when v_crowded or v_retry or v_lapsed then v_wanted else cardinality(v_fresh.keys) end);
  if v_wanted = 0 then
    return null;
  end if;

  -- Somebody claimed, or gave holds back, between the probe and the lock: read again, now that it is our turn.
  if v_lapsed or v_crowded or v_locked.moves <> v_cursor.moves or cardinality(v_fresh.keys) > v_wanted then
    v_fresh := pgreaper._due(v_policy, v_target, v_now, case when not _claim.rescan then v_locked.position end, v_wanted);
  end if;

  v_batch := v_fresh;
  if v_suspicion.suspect then
    v_batch := pgreaper._probe(v_policy, v_target, v_now);
  elsif (v_retry or v_lapsed) and (not v_locked.retried or cardinality(v_fresh.keys) = 0) then
    v_batch := pgreaper._retries(v_policy, v_target, v_now, v_wanted);
    if cardinality(v_batch.keys) = 0 then
      v_batch := v_fresh;
    end if;
  end if;
  if cardinality(v_batch.keys) = 0 then
    return null;
  end if;

  -- Fresh ones come in the order of the column: that of instants, unless the clocks were put forward meanwhile.
  if v_batch.origin = 'fresh' and v_target.deadline = v_target.deadline_order then
    v_first := v_batch.deadlines[1];
    v_last := v_batch.deadlines[cardinality(v_batch.deadlines)];
  else
    select min(d.deadline), max(d.deadline) into v_first, v_last from unnest(v_batch.deadlines) as d (deadline);
  end if;

  insert into pgreaper.claims
    (policy_id, worker, session_pid, session_start, keys, deadlines, hints, first_deadline, last_deadline,
     holds, attempt, claimed_at, claim_until, skew)
  values
    (v_policy.policy_id, _claim.worker,
     case when _claim.session then pg_backend_pid() end,
     case when _claim.session then
       (select a.backend_start from pg_catalog.pg_stat_activity as a where a.pid = pg_backend_pid()) end,
     v_batch.keys, v_batch.deadlines, v_batch.hints, v_first, v_last,
     cardinality(v_batch.keys), v_batch.attempt, v_now, v_until, _claim.skew)
  returning claims.token into v_token;

  update pgreaper.cursors as c
     set position = case when v_batch.origin = 'fresh' then v_last else c.position end,
         moves = c.moves + 1,
         retried = v_batch.origin = 'retry',
         -- One probe at a time: the others wait for its answer.
         suspended_until = case when v_batch.origin = 'probe' then v_now + interval '5 seconds' else c.suspended_until end,
         rate_tokens = pgreaper._allowance(v_policy, v_now, c.rate_tokens, c.rate_at) - cardinality(v_batch.keys),
         rate_at = case when v_policy.rate_limit is not null then pgreaper._counted_at(v_now, c.rate_at) end
   where c.policy_id = v_policy.policy_id;

  -- A policy that always has something to do never comes to the end.
  if _claim.rescan then
    perform pgreaper._close_moot(v_policy, _claim.worker, _claim.search_path);
  end if;

  return row(v_token, v_batch.keys, v_batch.deadlines, v_batch.attempt, v_until)::pgreaper._leased;
end;
$function$;

comment on function pgreaper._claim(text, integer, text, boolean, boolean, interval, text, pgreaper._settled) is
'Lease the next due holds of a policy to one worker, as arrays; token NULL: nothing to do.';

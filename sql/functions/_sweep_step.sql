-- _sweep_step: pick one batch of a policy and expire it, in one transaction.
--
-- Claim and transition fused: no lease is written, because the holds are locked from
-- here to the commit.  Holds that a worker has leased are left to it.
--
-- A step that the statement timeout cancels is undone, and its holds are put on record as
-- `StatementTimeout`: retries go in ever smaller batches, until the guilty hold is alone.  Only
-- then can it become a dead letter.
--
-- A function of its own, because the procedure around it commits and may carry no SET.
create function pgreaper._sweep_step(
  policy text,
  batch integer,
  remaining bigint,
  worker text,
  run_start timestamptz,
  start timestamptz,
  target pgreaper._target default null,
  search_path text default pg_catalog.current_setting('search_path')
)
returns pgreaper._step
language plpgsql
volatile
security invoker
set lock_timeout = '200ms'
set jit = off
set search_path = pg_catalog, pg_temp
as $function$
declare
  c_sweep constant integer := 1919377517;
  v_policy constant pgreaper.policies := pgreaper._policy(_sweep_step.policy);
  v_wanted integer := least(pgreaper._batch_size(v_policy, _sweep_step.batch), _sweep_step.remaining);
  v_now constant timestamptz := pgreaper._clock();
  v_target pgreaper._target;
  v_version text;
  v_alone boolean;
  v_cursor pgreaper.cursors;
  v_books record;
  v_suspicion record;
  v_batch pgreaper._batch;
  v_try record;
  v_result record;
  v_blamed pgreaper.policies := v_policy;
  v_began constant timestamptz := clock_timestamp();
  v_context text;
  v_step pgreaper._step := row(0, 0, 0, 0, _sweep_step.start, false, false, false, null)::pgreaper._step;
begin
  perform pgreaper._require_writable();
  if v_policy.paused_at is not null or pgreaper._subscription(v_policy) is not null then
    return v_step;
  end if;

  -- Many sweeps at once would do little but skip what another has: there are two places, the others wait until one is through.
  -- They look again and again, so this comes first.  And two side by side meet the same holds.  So each locks first, and skips;
  -- only one that is alone goes straight to the update.  Who comes to it waits for the end of its step, so that it notices.
  if not (pg_try_advisory_xact_lock(c_sweep + 1, v_policy.policy_id) or pg_try_advisory_xact_lock(c_sweep + 2, v_policy.policy_id)) then
    v_step.target := _sweep_step.target;
    v_step.more := true;
    return v_step;
  end if;
  v_alone := pg_try_advisory_xact_lock(c_sweep, v_policy.policy_id);

  -- What the last step had, unless something has changed since.
  v_version := pgreaper._target_version(v_policy);
  v_target := case when v_version = (_sweep_step.target).version then _sweep_step.target
                   else pgreaper._target(v_policy, _sweep_step.search_path, version => v_version) end;
  v_step.target := v_target;
  if not v_alone then
    v_target.bare := false;
    begin
      perform pg_advisory_xact_lock_shared(c_sweep, v_policy.policy_id);
    exception
      when lock_not_available then
        null;
    end;
  end if;
  select c as cursor,
         exists (select from pgreaper.claims as l where l.policy_id = c.policy_id and l.finished_at is null) as leased,
         exists (select from pgreaper.failures as f where f.policy_id = c.policy_id) as failed
    into v_books
    from pgreaper.cursors as c where c.policy_id = v_policy.policy_id;
  v_cursor := v_books.cursor;
  v_suspicion := pgreaper._suspicion(v_policy, v_cursor);
  if v_suspicion.suspect then
    select c.* into v_cursor from pgreaper.cursors as c where c.policy_id = v_policy.policy_id for update;
    v_suspicion := pgreaper._suspicion(v_policy, v_cursor);
    if v_suspicion.suspect and v_suspicion.until > v_now then
      v_step.suspended := true;
      return v_step;
    end if;
  end if;

  -- Taking back is the first step of a run, and a step of its own: the cursor's row, locked
  -- for it, must not stay locked while triggers of the user's run.  Whoever has the cursor
  -- now is a claim, and takes back itself.
  if v_books.leased and _sweep_step.start is null and pgreaper._lapsed(v_policy.policy_id, v_now) then
    perform from pgreaper.cursors as c where c.policy_id = v_policy.policy_id for update skip locked;
    if found then
      perform pgreaper._take_back(v_policy, v_target, v_now);
      v_step.last_deadline := '-infinity';
      v_step.more := true;
      return v_step;
    end if;
  end if;

  if v_policy.rate_limit is not null then
    v_wanted := pgreaper._rationed(v_policy, v_now, v_cursor, least(v_wanted, pgreaper._portion(v_policy)));
    if v_wanted = 0 then
      v_step.more := cardinality((pgreaper._due(v_policy, v_target, v_now, _sweep_step.start, 1)).keys) > 0
        or v_books.failed and coalesce(pgreaper._retry_at(v_policy.policy_id) <= _sweep_step.run_start, false);
      return v_step;
    end if;
  end if;

  -- Only failures whose time had come when the run began: none is tried twice in a run.
  if v_suspicion.suspect then
    v_batch := pgreaper._probe(v_policy, v_target, v_now);
  elsif v_books.failed then
    v_batch := pgreaper._retries(v_policy, v_target, _sweep_step.run_start, v_wanted);
  end if;
  -- Where nobody else has or had a hand in what comes, one statement picks, locks and
  -- writes.  Whatever goes wrong in it is left to the careful way below.  The probe before
  -- it: an UPDATE of no row still fires the user's statement triggers.
  if coalesce(cardinality(v_batch.keys), 0) = 0
    and not ((v_books.leased or v_books.failed) and pgreaper._taken(v_policy.policy_id, _sweep_step.start)) then
    if (_sweep_step.start is null or not v_target.bare)
      and cardinality((pgreaper._due(v_policy, v_target, v_now, _sweep_step.start, 1)).keys) = 0 then
      return v_step;
    end if;
    begin
      v_try := pgreaper._write(v_policy, v_target, v_now, null, _sweep_step.worker, null, null, _sweep_step.start, v_wanted);
      if v_target.settle then
        perform set_config('search_path', v_target.search_path, true);
        set constraints all immediate;
        perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
      end if;
      if cardinality(v_try.locked) > coalesce(cardinality(v_try.done), 0)
        or not v_target.bare and pgreaper._held_again(v_policy, v_target, v_now, v_try.done) then
        raise triggered_action_exception;
      end if;
      v_step.taken := coalesce(cardinality(v_try.done), 0);
    exception
      when query_canceled then
        get stacked diagnostics v_context = pg_exception_context;
        if not pgreaper._foreign_cancel(v_context) then
          if not pgreaper._outlasted(v_began) then
            raise;
          end if;
          v_step.timed_out := true;
        end if;
        v_step.taken := 0;
      when assert_failure or others then
        v_step.taken := 0;
    end;
    if v_step.taken > 0 and not v_step.timed_out then
      v_step.expired := v_step.taken;
      v_step.last_deadline := v_try.last_deadline;
      v_step.more := true;
      perform pgreaper._spend(v_policy, v_now, v_step.taken);
      return v_step;
    end if;
  end if;

  if coalesce(cardinality(v_batch.keys), 0) = 0 then
    v_batch := pgreaper._due(v_policy, v_target, v_now, _sweep_step.start, v_wanted);
  end if;
  v_step.taken := cardinality(v_batch.keys);
  if v_step.taken = 0 then
    return v_step;
  end if;
  perform pgreaper._may_write(v_policy);

  if not v_step.timed_out then
    begin
      v_result := pgreaper._transition(v_policy, v_target, v_now, null, _sweep_step.worker, v_batch);
    exception
      when query_canceled then
        if not pgreaper._outlasted(v_began) then
          raise;
        end if;
        v_step.timed_out := true;
    end;
  end if;
  if v_step.timed_out then
    -- The timer will not ring again in this call, so nothing more is tried in it.
    if v_step.taken > 1 then
      v_blamed.max_attempts := 2147483647;
    end if;
    perform pgreaper._fail(v_blamed, v_now, v_batch.keys, v_batch.deadlines, null, _sweep_step.worker,
      transient => true, error_class => 'StatementTimeout', sqlstate => '57014');
    return v_step;
  end if;

  v_step.expired := cardinality(v_result.expired);
  select count(*) filter (where o.outcome in ('retry', 'dead-letter')), count(*) filter (where o.outcome = 'locked')
    into v_step.failed, v_step.locked
    from unnest(v_result.others) as o;

  perform pgreaper._spend(v_policy, v_now, v_step.taken);
  if v_batch.origin = 'fresh' then
    select max(d.deadline) into v_step.last_deadline from unnest(v_batch.deadlines) as d (deadline);
    -- A step that found nothing but locked holds, and got no further: what is due later must not
    -- wait for a whole batch that has one deadline.  The next instant is the next deadline there can be.
    if v_step.locked = v_step.taken and v_step.last_deadline = _sweep_step.start then
      v_step.last_deadline := v_step.last_deadline + interval '1 microsecond';
    end if;
    v_step.more := v_step.locked < v_step.taken or _sweep_step.start is null or v_step.last_deadline > _sweep_step.start;
  else
    v_step.more := v_batch.origin = 'retry' or v_step.locked < v_step.taken;
  end if;

  -- Failures may have put the policy under suspicion; then this run is over for it.
  if v_step.failed > 0 then
    select c.* into v_cursor from pgreaper.cursors as c where c.policy_id = v_policy.policy_id;
    v_step.suspended := (pgreaper._suspicion(v_policy, v_cursor)).suspect;
    v_step.more := v_step.more and not v_step.suspended;
  end if;

  return v_step;
end;
$function$;

comment on function pgreaper._sweep_step(text, integer, bigint, text, timestamptz, timestamptz, pgreaper._target, text) is
'Pick one batch of a policy and expire it, in one transaction.';

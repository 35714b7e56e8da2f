-- reaper_sweep: expire what is due, batch by batch, with a commit after each.
--
-- Claim and transition fused, for pg_cron and for whoever wants the last bit of speed.
-- All policies when `policy` is NULL, a batch of each in turn, so that a huge backlog of
-- one does not delay the others; in another order each time.  Call it outside a transaction:
--   call pgreaper.reaper_sweep();
--
-- A hold that ends its own session, a crash of the server's code or a trigger with
-- pg_terminate_backend, ends the call: nothing was written before it, so nobody is there who
-- could charge it, and the next call meets it again.  Other policies come first in every other call and get
-- on.  One run of `pgreaper work`, or of claim and expire, which writes a lease before the
-- risk, finds and charges it; then sweeps go on.
--
-- Promises
--   * The same guard, outcomes and books as claim + expire; freely mixed with it.
--   * A policy that fails stops alone; the others go on, then its error is raised.
--   * A run that finds nothing writes nothing.
--   * No hold is tried twice in a run.
--   * At most two sweeps of a policy work at once, under advisory locks of their transactions; others wait until one is through.
--   * It waits for a rate limit, and every five seconds looks again at policies that it had drained meanwhile; max_seconds ends that.
--   * Dead letters whose hold has moved on are closed when nothing else of their policy is left to do.
--   * A statement timeout bounds the whole call, because the server starts its timer with the CALL
--     and a procedure cannot start it again: what is committed by then stays, and the call ends.
--     A step that had at least half of that time to itself is blamed: its holds are tried again by
--     later calls, in batches that shrink until the guilty one is alone, and only alone does
--     it become a dead letter (`StatementTimeout`).  A cancel by a person charges nobody.
--   * A table that somebody has locked as a whole is not waited for; no attempt is charged.
--
-- Raises
--   RP002  no such policy.     22023  a batch, max_rows or max_seconds that makes no sense.
--   2D000  it is not the only statement, or inside a transaction: there it cannot commit.
--   55P03  a target stayed locked.     57014  canceled.     RP005  a piece of pgreaper is missing.
create procedure pgreaper.reaper_sweep(
  policy text default null,
  batch integer default null,
  max_rows bigint default null,
  max_seconds double precision default null,
  inout expired bigint default 0
)
language plpgsql
security invoker
as $procedure$
declare
  v_path constant pg_catalog.text := pg_catalog.current_setting('search_path');
  v_start pg_catalog.timestamptz;
  v_worker pg_catalog.text;
  v_names pg_catalog.text[];
  v_starts pg_catalog.timestamptz[];
  v_index integer := 1;
  v_step pgreaper._step;
  v_targets pgreaper._target[];
  v_more boolean;
  v_waiting boolean := true;
  v_looked pg_catalog.timestamptz;
  v_drained pg_catalog.text[] := '{}';
  v_sleep double precision := 0.05;
  v_failed pg_catalog.text[] := '{}';
  v_sqlstate pg_catalog.text;
  v_message pg_catalog.text;
  v_timed_out boolean := false;
  v_first_sqlstate pg_catalog.text;
  v_reason pg_catalog.text;
begin
  -- Only COMMIT knows whether it may.  In this block it never may, and its words tell the two reasons
  -- apart; a server that speaks another language says its own at the COMMIT below.
  begin
    commit;
  exception
    when invalid_transaction_termination then
      get stacked diagnostics v_reason = message_text;
      if v_reason operator(pg_catalog.=) 'invalid transaction termination' then
        raise exception 'reaper_sweep commits after each batch, so it must be the only statement and outside a transaction'
          using errcode = '2D000',
                hint = 'Send exactly one statement: call pgreaper.reaper_sweep() - no BEGIN, nothing before or after it, '
                       'autocommit on, called from no function, and neither SET nor SECURITY DEFINER on a procedure around it.';
      end if;
  end;
  -- The guard needs READ COMMITTED, whatever the role's default is.
  commit;
  set transaction isolation level read committed;
  -- From here on names mean the server's own; a SET clause would forbid the COMMIT.
  set local search_path = pg_catalog, pg_temp;

  if reaper_sweep.max_rows < 1 or reaper_sweep.max_seconds <= 0 then
    raise invalid_parameter_value using message = 'max_rows and max_seconds must be positive';
  end if;

  v_start := pgreaper._clock();
  v_looked := v_start;
  v_worker := coalesce(nullif(current_setting('application_name'), ''), 'sweep');
  expired := 0;
  if reaper_sweep.policy is not null then
    v_names := array[(pgreaper._policy(reaper_sweep.policy)).name];
  else
    v_names := array(select p.name from pgreaper.policies as p
                      where p.unregistered_at is null and p.paused_at is null order by random());
  end if;
  v_starts := array_fill(null::timestamptz, array[cardinality(v_names)]);
  v_targets := array_fill(null::pgreaper._target, array[cardinality(v_names)]);

  while cardinality(v_names) > 0 loop
    begin
      v_step := pgreaper._sweep_step(v_names[v_index], reaper_sweep.batch, reaper_sweep.max_rows - expired,
        v_worker, v_start, v_starts[v_index],
        v_targets[v_index], v_path);
      if not v_step.more then
        perform pgreaper._close_moot(pgreaper._policy(v_names[v_index]), v_worker, v_path, looks => 10);
      end if;
      v_more := v_step.more;
      expired := expired + v_step.expired;
      v_waiting := v_waiting and v_step.more and v_step.taken = 0;
      v_starts[v_index] := v_step.last_deadline;
      v_targets[v_index] := v_step.target;
      v_timed_out := v_step.timed_out;
      if v_timed_out then
        v_first_sqlstate := coalesce(v_first_sqlstate, '57014');
        v_failed := v_failed || format('%I (57014: %s holds took longer than statement_timeout, they are tried again in smaller batches)',
          v_names[v_index], v_step.taken);
      elsif v_step.suspended then
        v_failed := v_failed || format('%I (suspended: all its holds fail alike)', v_names[v_index]);
      elsif not v_more then
        v_drained := v_drained || v_names[v_index];
      end if;
    exception
      when assert_failure or others then
        get stacked diagnostics v_sqlstate = returned_sqlstate, v_message = message_text;
        v_first_sqlstate := coalesce(v_first_sqlstate, v_sqlstate);
        v_failed := v_failed || format('%I (%s: %s)', v_names[v_index], v_sqlstate, case
          when v_sqlstate = '55P03' then coalesce(pgreaper._table_lock(v_names[v_index]), 'something stayed locked')
          -- Words about objects; what triggers say does not come as far as this.
          when substr(v_sqlstate, 1, 2) in ('RP', '42') then v_message
          else pgreaper._error_class(v_sqlstate)
        end);
        v_more := false;
    end;
    -- What the user deferred to the commit finds what the caller's path finds.
    perform set_config('search_path', v_path, true);
    commit;
    set transaction isolation level read committed;
    set local search_path = pg_catalog, pg_temp;

    exit when v_timed_out
      or expired >= reaper_sweep.max_rows
      or extract(epoch from pgreaper._clock() - v_start) >= reaper_sweep.max_seconds;

    if v_more then
      v_index := v_index + 1;
    else
      v_names := v_names[: v_index - 1] || v_names[v_index + 1 :];
      v_starts := v_starts[: v_index - 1] || v_starts[v_index + 1 :];
      v_targets := v_targets[: v_index - 1] || v_targets[v_index + 1 :];
    end if;
    if v_index > cardinality(v_names) then
      v_index := 1;
      -- All that is left waits for its rate limit, or for other sweeps.
      if v_waiting then
        perform pg_sleep(v_sleep);
        -- What was drained before must not wait for them.
        if pgreaper._clock() > v_looked + interval '5 seconds' then
          v_looked := pgreaper._clock();
          v_names := v_names || v_drained;
          v_starts := v_starts || array_fill(null::timestamptz, array[cardinality(v_drained)]);
          v_targets := v_targets || array_fill(null::pgreaper._target, array[cardinality(v_drained)]);
          v_drained := '{}';
        end if;
        -- Less and less often: each look costs as much as a hundred holds.
        v_sleep := least(v_sleep * 2, 0.2);
      else
        v_sleep := 0.05;
      end if;
      v_waiting := true;
    end if;
  end loop;

  if cardinality(v_failed) > 0 then
    raise exception 'policies that could not be swept: %', array_to_string(v_failed, ', ')
      using errcode = coalesce(v_first_sqlstate, 'P0001'),
            hint = 'The other policies were swept and committed.';
  end if;
end;
$procedure$;

comment on procedure pgreaper.reaper_sweep(text, integer, bigint, double precision, bigint) is
'Expire what is due, batch by batch with a commit after each; all policies when NULL.';

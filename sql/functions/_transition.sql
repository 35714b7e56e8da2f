-- _transition: expire these holds and say of each what became of it.
--
-- The way of claim + expire, and of a sweep for whatever its one fused statement cannot
-- settle.  What a trigger or constraint of the user raises is caught around the whole
-- batch; the batch is then
-- halved until the guilty holds stand alone, so that the others are expired in the
-- same call.  A subtransaction per hold would overflow the server's cache of them and
-- slow every other session; halving needs a handful.
--
-- When hold after hold fails in the same way and none succeeds, the holds are innocent:
-- the policy is suspended and nobody is charged (see _suspend).
--
-- Promises
--   * Each key comes back once: in `expired`, or with its outcome in `others`.
--   * A retry that turns out to be locked comes back after a second, not at once and for ever.
--   * A hold whose trigger or key waits for somebody's lock is `locked`, not charged, and the
--     others expire.  Each wait may take half as long as the one before it, down to a
--     millisecond, so all of them together cost about two of the first.  A trigger that only
--     says RAISE with such a code waits for nobody: a transient failure of its hold.
--   * A table that is locked as a whole is not waited for: 55P03, and nobody is charged.
--   * Trouble of the environment is charged to nobody: it is raised, and so is a missing
--     right, unless other holds of the batch are settled.  Then the hold that met it is
--     `locked`, and a right that was missing beside holds that expired is its own failure.
--     After five holds alone that met it, and no success, only a few of the others are tried.
--   * A canceled statement is nobody's failure here: that goes up to whoever knows who canceled.
--     A trigger that raises that code, or hands it on from another server, fails by itself: transient.
--
-- Raises
--   RP005  a piece of pgreaper is missing, as after half an upgrade; nobody is charged.
create function pgreaper._transition(
  policy pgreaper.policies,
  target pgreaper._target,
  clock timestamptz,
  token uuid,
  worker text,
  batch pgreaper._batch,
  out expired text[],
  out others pgreaper.hold_outcome[]
)
language plpgsql
volatile
security invoker
as $function$
declare
  c_same constant integer := 8;
  c_alone constant integer := 5;
  v_size constant integer := cardinality(batch.keys);
  v_from integer := 1;
  v_to integer := v_size;
  v_width integer;
  v_done text[];
  v_code text;
  v_raised boolean;
  v_wait boolean;
  v_sqlstate text;
  v_constraint text;
  v_message text;
  v_detail text;
  v_hint text;
  v_context text;
  v_environment boolean;
  v_trouble text[];
  v_who text;
  v_alone integer := 0;
  v_skip integer := 0;
  v_same integer := 0;
  v_suspended boolean := false;
  v_locked text[] := '{}';
  v_forbidden text[] := '{}';
  v_failed text[] := '{}';
  v_sqlstates text[] := '{}';
  v_constraints text[] := '{}';
  v_settled text[];
begin
  expired := '{}';
  others := '{}';

  while v_from <= v_size loop
    begin
      v_done := pgreaper._attempt(policy, target, _transition.clock, _transition.token, _transition.worker,
        batch.keys[v_from:v_to], case when target.plain then batch.hints[v_from:v_to] end);
      v_sqlstate := null;
    exception
      -- OTHERS leaves out a failed ASSERT and a cancel.
      when assert_failure or query_canceled or others then
        get stacked diagnostics v_sqlstate = returned_sqlstate, v_constraint = constraint_name,
          v_message = message_text, v_detail = pg_exception_detail, v_hint = pg_exception_hint,
          v_context = pg_exception_context;
        if v_sqlstate = '57014' and not pgreaper._foreign_cancel(v_context) then
          raise;
        end if;
    end;

    if v_sqlstate is null then
      expired := expired || v_done;
      v_alone := 0;
      v_skip := 0;
      -- Widen again: the guilty are few.
      v_width := 2 * (v_to - v_from + 1);
      v_from := v_to + 1;
      v_to := least(v_size, v_to + v_width);
      continue;
    end if;

    -- Something is missing, and no code of the user's was running: that would be inside one of
    -- these two statements.  What EXECUTE cannot parse is a matter of the target, unless it names us.
    if v_sqlstate in ('42883', '42704', '42703', '42P01', '3F000')
      and strpos(v_context, 'with locked as materialized') = 0
      and strpos(v_context, 'set constraints all immediate') = 0
      and (v_message ~ '\mpgreaper\.' or split_part(v_context, E'\n', 1) !~ 'EXECUTE$') then
      raise exception 'pgreaper is not complete in this database: %', v_message
        using errcode = 'RP005',
              hint = 'Run `pgreaper install`; nobody was charged.';
    end if;

    -- A row that was locked in the very moment of the update, for one: now the careful way.
    if target.bare then
      target.bare := false;
      continue;
    end if;

    -- Perhaps a matter of this hold, perhaps of all: a few more tries tell.
    v_environment := (substr(v_sqlstate, 1, 2) in ('08', '25', '53', '57', '58', 'XX') and v_sqlstate <> '57014')
      or (v_sqlstate = '42501' and cardinality(expired) = 0);
    if v_environment then
      -- The server's own words about a statement name objects; a trigger's may say anything.
      v_trouble := case
        when starts_with(v_context, 'SQL statement') or starts_with(v_context, 'PL/pgSQL function pgreaper.')
          then array[v_sqlstate, v_message, v_detail, v_hint]
        else array[v_sqlstate, format('a trigger of %I.%I raised SQLSTATE %s', policy.target_schema, policy.target_table, v_sqlstate),
                   '', 'Nobody was charged; the next round tries again.']
      end;
    end if;
    -- A trigger that says RAISE with one of these codes waits for nobody: that is its failure.
    v_raised := split_part(v_context, E'\n', 1) like '%RAISE';
    v_wait := v_environment or (v_sqlstate in ('40001', '40P01', '55P03') and not v_raised);
    if v_wait then
      -- Where the table as a whole is locked, no other hold fares better.
      v_who := case when v_sqlstate = '55P03' then pgreaper._table_lock(policy.name) end;
      if v_who is not null and cardinality(expired || v_failed) = 0 then
        raise lock_not_available using message = v_who, hint = 'Nothing happened; try again.';
      end if;
      if v_who is not null then
        v_locked := v_locked || batch.keys[v_from:v_size];
        exit;
      end if;
      -- Whoever has it has it for long: the next ones need not be waited for as patiently.
      if not v_environment then
        perform set_config('lock_timeout', greatest(1, extract(epoch from current_setting('lock_timeout')::interval) * 1000 / 2)::integer::text, true);
      end if;
    end if;
    if v_from < v_to then
      v_to := (v_from + v_to) / 2;
      continue;
    end if;

    if v_environment and v_sqlstate = '42501' then
      v_forbidden := v_forbidden || batch.keys[v_from];
    elsif v_wait then
      v_locked := v_locked || batch.keys[v_from];
    else
      -- 09000 is our own word for a veto: no error of the server's.
      v_code := nullif(v_sqlstate, '09000');
      v_same := case when v_same > 0 and v_code is not distinct from v_sqlstates[cardinality(v_sqlstates)]
                     then v_same + 1 else 1 end;
      v_failed := v_failed || batch.keys[v_from];
      v_sqlstates := v_sqlstates || v_code;
      -- A trigger may pass anything off as the name of a constraint, a value of the row too.
      v_constraints := v_constraints || case
        when exists (select from pg_catalog.pg_constraint as c where c.conname = v_constraint)
          or exists (select from pg_catalog.pg_class as i where i.relname = v_constraint and i.relkind in ('i', 'I')) then v_constraint
      end;
      if v_same = c_same and cardinality(expired) = 0 then
        v_suspended := pgreaper._suspend(policy, _transition.clock, v_code, v_same);
        if v_suspended then
          v_failed := v_failed || batch.keys[v_from + 1:v_size];
          exit;
        end if;
      end if;
    end if;
    -- Hold after hold met trouble of the environment, or a missing right, alone: it may be a tenant's
    -- at the head.  The others are tried at ever greater distances, so that a node that
    -- is in trouble is not asked hundreds of times.
    if v_environment then
      v_alone := v_alone + 1;
      if v_alone >= c_alone then
        v_skip := greatest(1, 2 * v_skip);
        v_locked := v_locked || batch.keys[v_from + 1:least(v_size - 1, v_from + v_skip)];
        v_from := case when v_from < v_size then least(v_size - 1, v_from + v_skip) else v_from end;
      end if;
    end if;
    v_from := v_from + 1;
    v_to := v_from;
  end loop;

  if v_trouble is not null and cardinality(expired || v_failed) = 0 then
    raise exception using errcode = v_trouble[1], message = v_trouble[2], detail = v_trouble[3], hint = v_trouble[4];
  end if;

  -- Fewer than that in one batch, but the same all the time since the last success.
  if cardinality(v_failed) = v_same and v_same between 1 and c_same - 1 and cardinality(expired) = 0 then
    v_suspended := pgreaper._suspend(policy, _transition.clock, v_sqlstates[1], v_same);
  end if;

  if cardinality(expired) = 0 then
    v_locked := v_locked || v_forbidden;
  elsif cardinality(v_forbidden) > 0 then
    v_failed := v_failed || v_forbidden;
    v_sqlstates := v_sqlstates || array_fill('42501'::text, array[cardinality(v_forbidden)]);
  elsif cardinality(expired) = v_size then
    return;
  end if;

  others := array(select row(l.key, 'locked', null)::pgreaper.hold_outcome from unnest(v_locked) as l (key));

  if v_suspended then
    others := others || array(select row(f.key, 'retry', null)::pgreaper.hold_outcome from unnest(v_failed) as f (key));
  elsif cardinality(v_failed) > 0 then
    others := others || array(
      select c
        from (
          select array_agg(f.key order by f.key) as keys, array_agg(b.deadline order by f.key) as deadlines, f.sqlstate, f.name
            from unnest(v_failed, v_sqlstates, v_constraints) as f (key, sqlstate, name)
            join unnest(batch.keys, batch.deadlines) as b (key, deadline) on b.key = f.key
           group by f.sqlstate, f.name
        ) as f
       cross join lateral pgreaper._fail(policy, _transition.clock, f.keys, f.deadlines, _transition.token, _transition.worker,
              transient => coalesce(f.sqlstate in ('40001', '40P01', '55P03', '57014'), false), error_class => pgreaper._error_class(f.sqlstate), sqlstate => f.sqlstate,
              constraint_name => f.name) as c);
  end if;

  v_settled := expired || v_locked || v_failed;
  others := others || array(
    select c
      from (
        select array_agg(b.key) as keys, array_agg(b.deadline) as deadlines
          from unnest(batch.keys, batch.deadlines) as b (key, deadline)
         where not exists (select from unnest(v_settled) as s (key) where s.key = b.key)
      ) as left_over
     cross join lateral pgreaper._classify(policy, target, _transition.clock, _transition.token, _transition.worker,
            left_over.keys, left_over.deadlines) as c
     where left_over.keys is not null);

  -- In key order and without waiting: two sweeps may have met the same retries.
  update pgreaper.failures as f
     set not_before = _transition.clock + interval '1 second'
    from (
      select m.key
        from pgreaper.failures as m
        join unnest(others) as o on o.key = m.key and o.outcome = 'locked'
        join unnest(batch.keys, batch.deadlines) as b (key, deadline) on b.key = m.key and b.deadline = m.deadline
       where m.policy_id = policy.policy_id
         and m.not_before <= _transition.clock
       order by m.key
         for update of m skip locked
    ) as locked
   where f.policy_id = policy.policy_id
     and f.key = locked.key;
end;
$function$;

comment on function pgreaper._transition(pgreaper.policies, pgreaper._target, timestamptz, uuid, text, pgreaper._batch) is
'Expire these holds and say of each what became of it.';

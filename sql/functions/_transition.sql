-- _transition: expire these holds and say of each what became of it.
--
-- The way of claim + expire and of the sweep; there is no other.  Whatever a trigger
-- or constraint of the user raises is caught around the whole batch; the batch is then
-- halved until the guilty holds stand alone, so that the others are expired in the
-- same call.  A subtransaction per hold would overflow the server's cache of them and
-- slow every other session; halving needs a handful.
--
-- Promises
--   * Each key comes back once, with its outcome.
--   * Trouble of the environment, a missing right, and the same failure of many holds
--     with no success between are raised and charged to nobody.
create function pgreaper._transition(
  policy pgreaper.policies,
  target pgreaper._target,
  clock timestamptz,
  token uuid,
  worker text,
  batch pgreaper._batch
)
returns setof pgreaper.hold_outcome
language plpgsql
volatile
security invoker
as $function$
declare
  c_identical_failures constant integer := 8;
  v_size constant integer := cardinality(batch.keys);
  v_from integer := 1;
  v_to integer := v_size;
  v_width integer;
  v_try record;
  v_sqlstate text;
  v_constraint text;
  v_same_sqlstate text;
  v_same integer := 0;
  v_expired text[] := '{}';
  v_vetoed text[] := '{}';
  v_locked text[] := '{}';
  v_failed text[] := '{}';
  v_rest text[];
begin
  while v_from <= v_size loop
    begin
      v_try := pgreaper._attempt(policy, target, _transition.clock, _transition.token, _transition.worker,
        batch.keys[v_from:v_to], case when target.plain then batch.hints[v_from:v_to] end);
      v_sqlstate := null;
    exception
      when others then
        get stacked diagnostics v_sqlstate = returned_sqlstate, v_constraint = constraint_name;
        if v_sqlstate = '42501' or substr(v_sqlstate, 1, 2) in ('08', '25', '53', '57', '58', 'XX') then
          raise;
        end if;
        if v_from = v_to then
          v_same := case when v_sqlstate = v_same_sqlstate then v_same + 1 else 1 end;
          v_same_sqlstate := v_sqlstate;
          if v_same >= c_identical_failures then
            raise;
          end if;
        end if;
    end;

    if v_sqlstate is null then
      v_expired := v_expired || v_try.expired;
      v_vetoed := v_vetoed || v_try.vetoed;
      if cardinality(v_try.expired) > 0 then
        v_same := 0;
      end if;
      -- Widen again: the guilty are few.
      v_width := 2 * (v_to - v_from + 1);
      v_from := v_to + 1;
      v_to := least(v_size, v_to + v_width);
    elsif v_from < v_to then
      v_to := (v_from + v_to) / 2;
    else
      if v_sqlstate in ('40001', '40P01', '55P03') then
        v_locked := v_locked || batch.keys[v_from];
        return next row(batch.keys[v_from], 'locked', null)::pgreaper.hold_outcome;
      else
        v_failed := v_failed || batch.keys[v_from];
        return query
          select f.*
            from pgreaper._fail(policy, _transition.clock, batch.keys[v_from:v_from], batch.deadlines[v_from:v_from],
              _transition.token, _transition.worker, transient => false, error_class => pgreaper._error_class(v_sqlstate),
              sqlstate => v_sqlstate, constraint_name => nullif(v_constraint, '')) as f;
      end if;
      v_from := v_from + 1;
      v_to := v_from;
    end if;
  end loop;

  return query
    select e.key, 'expired'::text, coalesce(policy.expired, 'expired') from unnest(v_expired) as e (key);

  if cardinality(v_expired) = v_size then
    return;
  end if;

  if cardinality(v_vetoed) > 0 then
    return query
      select f.*
        from (select array_agg(k.key) as keys, array_agg(k.deadline) as deadlines
                from unnest(batch.keys, batch.deadlines) as k (key, deadline) where k.key = any (v_vetoed)) as v
       cross join lateral pgreaper._fail(policy, _transition.clock, v.keys, v.deadlines, _transition.token, _transition.worker,
              transient => false, error_class => 'UpdateVetoed') as f;
  end if;

  v_rest := v_expired || v_vetoed || v_locked || v_failed;
  return query
    select c.*
      from (select array_agg(k.key) as keys, array_agg(k.deadline) as deadlines
              from unnest(batch.keys, batch.deadlines) as k (key, deadline)
             where not exists (select from unnest(v_rest) as r (key) where r.key = k.key)) as left_over
     cross join lateral pgreaper._classify(policy, target, _transition.clock, _transition.token, _transition.worker,
            left_over.keys, left_over.deadlines) as c
     where left_over.keys is not null;
end;
$function$;

comment on function pgreaper._transition(pgreaper.policies, pgreaper._target, timestamptz, uuid, text, pgreaper._batch) is
'Expire these holds and say of each what became of it.';

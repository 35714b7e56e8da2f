-- _attempt: one try at a set of holds, whole or not at all.
--
-- The first pass follows the hints.  What it left is tried once more by key with a
-- fresh snapshot: a hint may lead nowhere, and a row that changed in the same instant
-- is locked but cannot be written yet.  Only what was locked before a pass began and
-- could still not be brought to the expired state was refused by a trigger; a row that
-- changed in the instant of this pass is tried in another one, and nobody can change it
-- again before that.
--
-- A trigger that refuses, keeps the hold held or brings it back undoes its batch (09000),
-- so that nothing of what it did stays; halving finds the hold.
--
-- Where the transaction is our own (target.settle), what the user deferred to the commit
-- is checked here, while it can still be told which hold it is that fails.  The check is
-- rolled back and made again at the commit: SET CONSTRAINTS lasts, and what the caller does
-- after us in the transaction must find its constraints as deferred as they were.
create function pgreaper._attempt(
  policy pgreaper.policies,
  target pgreaper._target,
  clock timestamptz,
  token uuid,
  worker text,
  keys text[],
  hints tid[],
  out expired text[]
)
language plpgsql
volatile
security invoker
as $function$
declare
  v_pass record;
  v_left text[];
  v_ours text[];
  v_vetoed text[] := '{}';
  v_checked boolean := false;
  v_again boolean;
begin
  v_pass := pgreaper._write(policy, target, _attempt.clock, _attempt.token, _attempt.worker, _attempt.keys, _attempt.hints);
  expired := coalesce(v_pass.done, '{}');

  if cardinality(expired) < cardinality(_attempt.keys) and (_attempt.hints is not null or v_pass.locked is not null) then
    target.bare := false;
    -- Ends: each further turn has locked at least one more row.
    loop
      v_ours := v_pass.locked;
      v_left := array(select k.key from unnest(_attempt.keys) as k (key) where k.key <> all (expired));
      v_pass := pgreaper._write(policy, target, _attempt.clock, _attempt.token, _attempt.worker, v_left, null);
      v_vetoed := array(select l.key from unnest(v_pass.locked) as l (key) where l.key <> all (coalesce(v_pass.done, '{}')));
      expired := expired || v_pass.done;
      exit when not exists (
        select v.key from unnest(v_vetoed) as v (key) except select o.key from unnest(v_ours) as o (key));
    end loop;
  end if;

  if target.settle then
    begin
      perform set_config('search_path', target.search_path, true);
      set constraints all immediate;
      perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
      v_again := pgreaper._held_again(policy, target, _attempt.clock, expired);
      v_checked := true;
      raise triggered_action_exception;
    exception
      when triggered_action_exception then
        if not v_checked then
          raise;
        end if;
    end;
  else
    v_again := pgreaper._held_again(policy, target, _attempt.clock, expired);
  end if;

  if cardinality(v_vetoed) > 0 or v_again then
    raise triggered_action_exception using message = 'a trigger of the target keeps a hold from expiring';
  end if;
end;
$function$;

comment on function pgreaper._attempt(pgreaper.policies, pgreaper._target, timestamptz, uuid, text, text[], tid[]) is
'One try at a set of holds: by hint, then by key.';

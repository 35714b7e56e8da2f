-- _attempt: one try at a set of holds, whole or not at all.
--
-- The first pass follows the hints.  What it left is tried once more by key with a
-- fresh snapshot: a hint may lead nowhere, and a row that changed in the same instant
-- is locked but cannot be written yet.  Only what was locked before a pass began and
-- could still not be brought to the expired state was refused by a trigger; a row that
-- changed in the instant of this pass is tried in another one, and nobody can change it
-- again before that.
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
  out expired text[],
  out vetoed text[]
)
language plpgsql
volatile
security invoker
as $function$
declare
  v_pass record;
  v_left text[];
  v_ours text[];
  v_checked boolean := false;
begin
  v_pass := pgreaper._write(policy, target, _attempt.clock, _attempt.token, _attempt.worker, _attempt.keys, _attempt.hints);
  expired := coalesce(v_pass.done, '{}');
  vetoed := '{}';

  if cardinality(expired) < cardinality(_attempt.keys) and (_attempt.hints is not null or v_pass.locked is not null) then
    -- Ends: each further turn has locked at least one more row.
    loop
      v_ours := v_pass.locked;
      v_left := array(select k.key from unnest(_attempt.keys) as k (key) where k.key <> all (expired));
      v_pass := pgreaper._write(policy, target, _attempt.clock, _attempt.token, _attempt.worker, v_left, null);
      vetoed := array(select l.key from unnest(v_pass.locked) as l (key) where l.key <> all (coalesce(v_pass.done, '{}')));
      expired := expired || v_pass.done;
      exit when not exists (
        select v.key from unnest(vetoed) as v (key) except select o.key from unnest(v_ours) as o (key));
    end loop;
  end if;

  if target.settle then
    begin
      set constraints all immediate;
      v_checked := true;
      raise triggered_action_exception;
    exception
      when triggered_action_exception then
        if not v_checked then
          raise;
        end if;
    end;
  end if;
end;
$function$;

comment on function pgreaper._attempt(pgreaper.policies, pgreaper._target, timestamptz, uuid, text, text[], tid[]) is
'One try at a set of holds: by hint, then by key.';

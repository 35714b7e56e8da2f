-- _attempt: one try at a set of holds, whole or not at all.
--
-- The first pass follows the hints.  What it left is tried once more by key with a
-- fresh snapshot: a hint may lead nowhere, and a row that changed in the same instant
-- is locked but cannot be written yet.  What the second pass locked and could still
-- not bring to the expired state was refused by a trigger.
--
-- Where the transaction is our own (target.settle), what the user deferred to the commit
-- is checked here, while it can still be told which hold it is that fails.
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
begin
  v_pass := pgreaper._write(policy, target, _attempt.clock, _attempt.token, _attempt.worker, _attempt.keys, _attempt.hints);
  expired := coalesce(v_pass.done, '{}');
  vetoed := '{}';

  if cardinality(expired) < cardinality(_attempt.keys) and (_attempt.hints is not null or v_pass.locked is not null) then
    v_left := array(select k.key from unnest(_attempt.keys) as k (key) where k.key <> all (expired));
    v_pass := pgreaper._write(policy, target, _attempt.clock, _attempt.token, _attempt.worker, v_left, null);
    vetoed := array(select l.key from unnest(v_pass.locked) as l (key) where l.key <> all (coalesce(v_pass.done, '{}')));
    expired := expired || v_pass.done;
  end if;

  if target.settle then
    set constraints all immediate;
  end if;
end;
$function$;

comment on function pgreaper._attempt(pgreaper.policies, pgreaper._target, timestamptz, uuid, text, text[], tid[]) is
'One try at a set of holds: by hint, then by key.';

-- _suspicion: whether a policy's failures look like the policy's own, and until when it rests.
--
-- `suspect` from the moment when many holds failed alike with no success between, until
-- one succeeds after all.  A suspect policy rests until `until`, then it is tried with a
-- few holds from another place of the backlog each time (`_probe`): if the oldest are guilty, others are not.
create function pgreaper._suspicion(
  policy pgreaper.policies,
  cursor pgreaper.cursors,
  out suspect boolean,
  out until timestamptz
)
language plpgsql
stable
security invoker
as $function$
begin
  suspect := cursor.failing_at is not null
    and not exists (
      select from pgreaper.transitions as t
       where t.policy_id = policy.policy_id and t.at > cursor.failing_at);
  until := cursor.suspended_until;
end;
$function$;

comment on function pgreaper._suspicion(pgreaper.policies, pgreaper.cursors) is
'Whether a policy''s failures look like the policy''s own, and until when it rests.';

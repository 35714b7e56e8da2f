-- _lapsed: whether a policy has claims to take back, or to watch.
create function pgreaper._lapsed(policy_id integer, clock timestamptz)
returns boolean
language plpgsql
stable
security invoker
as $function$
begin
  return exists (
      select from pgreaper.claims as c
       where c.policy_id = _lapsed.policy_id and c.finished_at is null and c.claim_until <= _lapsed.clock)
    or exists (select from pgreaper._lost_sessions(_lapsed.policy_id, _lapsed.clock));
end;
$function$;

comment on function pgreaper._lapsed(integer, timestamptz) is 'Whether a policy has claims to take back, or to watch.';

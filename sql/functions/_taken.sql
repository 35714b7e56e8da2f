-- _taken: whether leases or failures may cover holds from a deadline on; NULL: from the first.
create function pgreaper._taken(policy_id integer, start timestamptz)
returns boolean
language plpgsql
stable
security invoker
as $function$
begin
  return exists (
      select from pgreaper.claims as c
       where c.policy_id = _taken.policy_id and c.finished_at is null
         and (_taken.start is null or c.last_deadline >= _taken.start))
    -- The greatest one by its index: with EXISTS the planner hopes to meet one early, and reads them all.
    or coalesce((select max(f.deadline) from pgreaper.failures as f where f.policy_id = _taken.policy_id)
                >= coalesce(_taken.start, '-infinity'), false);
end;
$function$;

comment on function pgreaper._taken(integer, timestamptz) is 'Whether leases or failures may cover holds from a deadline on.';

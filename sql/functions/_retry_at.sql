-- _retry_at: when the next retry is due that nobody has leased; NULL: none waits.
--
-- PL/pgSQL, because it keeps its plan and this is asked in every pass.
create function pgreaper._retry_at(policy_id integer)
returns timestamptz
language plpgsql
stable
security invoker
as $function$
begin
  return (
    select f.not_before
      from pgreaper.failures as f
     where f.policy_id = _retry_at.policy_id
       and f.not_before < 'infinity'
       and not exists (
         select from pgreaper.claims as c
          where c.policy_id = f.policy_id and c.finished_at is null and f.key = any (c.keys))
     order by f.not_before
     limit 1
  );
end;
$function$;

comment on function pgreaper._retry_at(integer) is 'When the next retry that nobody has leased is due; NULL: none.';

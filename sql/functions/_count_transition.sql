-- _count_transition: trigger of `transitions`, so that no way of writing the trail forgets to count.
create function pgreaper._count_transition()
returns trigger
language plpgsql
volatile
security invoker
as $function$
begin
  perform pgreaper._count(new.policy_id, expired => new.holds, lateness => new.lateness, at => new.at);
  return null;
end;
$function$;

comment on function pgreaper._count_transition() is 'Counts a row of the trail.';

create trigger counted after insert on pgreaper.transitions
  for each row execute function pgreaper._count_transition();

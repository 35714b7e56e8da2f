-- _count_events: trigger of `events`, so that no way of writing them forgets to count.
create function pgreaper._count_events()
returns trigger
language plpgsql
volatile
security invoker
set search_path = pg_catalog, pg_temp
as $function$
begin
  perform pgreaper._count(c.policy_id, already_done => c.already_done, not_eligible => c.not_eligible,
            retry => c.retry, dead_letter => c.dead_letter, taken_back => c.taken_back)
     from (
       select e.policy_id,
              count(*) filter (where e.kind = 'already-done') as already_done,
              count(*) filter (where e.kind = 'not-eligible') as not_eligible,
              count(*) filter (where e.kind = 'retry') as retry,
              count(*) filter (where e.kind = 'dead-letter') as dead_letter,
              count(*) filter (where e.kind = 'taken-back') as taken_back
         from happened as e
        where e.kind in ('already-done', 'not-eligible', 'retry', 'dead-letter', 'taken-back')
        group by e.policy_id
     ) as c;
  return null;
end;
$function$;

comment on function pgreaper._count_events() is 'Counts what was appended to the events.';

create trigger counted after insert on pgreaper.events
  referencing new table as happened
  for each statement execute function pgreaper._count_events();

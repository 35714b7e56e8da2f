-- _refuse_events: book events that a queue refused: to be tried again, or dead.
--
-- A refusal that may pass is tried again after a delay that doubles, from two seconds up to an hour, with up to half of it at
-- random on top, and not before the queue asked for; after twenty it is given up as well.
--
-- Promises
--   * Returns those that are dead now.
create function pgreaper._refuse_events(
  relay_id integer,
  clock timestamptz,
  events bigint[],
  keys text[],
  error_classes text[],
  transient boolean[],
  retry_in interval[]
)
returns bigint[]
language plpgsql
volatile
security invoker
as $function$
declare
  c_budget constant integer := 20;
  c_longest constant double precision := 3600;
  v_dead bigint[];
begin
  insert into pgreaper.undelivered as u
    (relay_id, event, key, deadline, expired_at, attempts, first_failed_at, failed_at, not_before, error_class)
  select _refuse_events.relay_id, r.event, r.key, t.deadlines[(r.event & 1048575) + 1], t.at, 0, _refuse_events.clock,
         _refuse_events.clock, _refuse_events.clock, r.error_class
    from unnest(_refuse_events.events, _refuse_events.keys, _refuse_events.error_classes) as r (event, key, error_class)
    join pgreaper.transitions as t on t.transition_id = r.event >> 20
  on conflict do nothing;

  with refused as (
    update pgreaper.undelivered as u
       set attempts = u.attempts + 1,
           first_failed_at = coalesce(u.first_failed_at, _refuse_events.clock),
           failed_at = _refuse_events.clock,
           error_class = r.error_class,
           not_before = case
             when not r.transient or u.attempts + 1 >= c_budget then 'infinity'
             else _refuse_events.clock + greatest(
               make_interval(secs => (1 + random() / 2) * least(c_longest, 2::double precision ^ (u.attempts + 1))),
               case when r.retry_in is not null then least(r.retry_in, interval '1 year') end)
           end
      from unnest(_refuse_events.events, _refuse_events.error_classes, _refuse_events.transient, _refuse_events.retry_in)
             as r (event, error_class, transient, retry_in)
     where u.relay_id = _refuse_events.relay_id and u.event = r.event
    returning u.event, u.not_before
  )
  select coalesce(array_agg(f.event) filter (where f.not_before = 'infinity'), '{}') into v_dead from refused as f;

  return v_dead;
end;
$function$;

comment on function pgreaper._refuse_events(integer, timestamptz, bigint[], text[], text[], boolean[], interval[]) is
'Book events that a queue refused; returns those that are dead.';

-- _spans: what events take from the trail: their numbers, and with the last one of a row those that the row leaves free.
--
-- So rows that are settled touch one another, and a place in the trail is mostly one range.  A row that is gone counts
-- as one whose last event this is.
create function pgreaper._spans(events bigint[])
returns int8multirange
language sql
stable
security invoker
as $function$
  select coalesce(range_agg(int8range(
           e.event, case when (e.event & 1048575) < t.holds - 1 then e.event + 1 else ((e.event >> 20) + 1) << 20 end)), '{}')
    from unnest(_spans.events) as e (event)
    left join pgreaper.transitions as t on t.transition_id = e.event >> 20;
$function$;

comment on function pgreaper._spans(bigint[]) is 'The set of numbers that events take from the trail.';

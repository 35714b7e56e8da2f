-- _free_events: of some rows of the trail, the first events that can be leased, and those that must wait behind others.
--
-- An event waits when one of its key is leased (`busy`), comes earlier in these rows, or waits itself and is earlier.
-- One that waits only counts when it stands before the last one that is taken.
create function pgreaper._free_events(
  relay_id integer,
  ids bigint[],
  taken int8multirange,
  busy text[],
  wanted integer,
  out events bigint[],
  out keys text[],
  out parked bigint[]
)
language plpgsql
stable
security invoker
as $function$
declare
  v_waits constant boolean := exists (
    select from pgreaper.undelivered as u
     where u.relay_id = _free_events.relay_id and (u.not_before < 'infinity' or u.not_before is null));
begin
  with event as (
    select (t.transition_id << 20) + k.position - 1 as number, k.key
      from pgreaper.transitions as t
     cross join lateral unnest(t.keys) with ordinality as k (key, position)
     where t.transition_id = any (_free_events.ids)
  ), judged as (
    select e.number, e.key,
           row_number() over (partition by e.key order by e.number) > 1
           or exists (select from unnest(_free_events.busy) as b (key) where b.key = e.key)
           or (v_waits and exists (
                 select from pgreaper.undelivered as u
                  where u.relay_id = _free_events.relay_id and hashtext(u.key) = hashtext(e.key) and u.key = e.key and u.event < e.number
                    and u.not_before is distinct from 'infinity')) as waits
      from event as e
     where not _free_events.taken @> e.number
  ), counted as (
    select j.*, count(*) filter (where not j.waits) over (order by j.number) as place from judged as j
  )
  select coalesce(array_agg(c.number order by c.number) filter (where not c.waits), '{}'),
         coalesce(array_agg(c.key order by c.number) filter (where not c.waits), '{}'),
         coalesce(array_agg(c.number order by c.number) filter (where c.waits), '{}')
    into events, keys, parked
    from counted as c
   where case when c.waits then c.place < _free_events.wanted else c.place <= _free_events.wanted end;
end;
$function$;

comment on function pgreaper._free_events(integer, bigint[], int8multirange, text[], integer) is
'Of some rows of the trail, the first events that can be leased, and those that must wait behind others.';

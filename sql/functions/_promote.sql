-- _promote: let the next event of each of these holds go, if one waits.
create function pgreaper._promote(relay_id integer, clock timestamptz, keys text[])
returns void
language plpgsql
volatile
security invoker
as $function$
begin
  update pgreaper.undelivered as u
     set not_before = _promote.clock
   where u.relay_id = _promote.relay_id
     and u.event = any (array(
       select distinct on (w.key) w.event
         from pgreaper.undelivered as w
        where w.relay_id = _promote.relay_id
          and hashtext(w.key) = any (array(select hashtext(k.key) from unnest(_promote.keys) as k (key)))
          and w.key = any (_promote.keys)
          and w.not_before is null
        order by w.key, w.event));
end;
$function$;

comment on function pgreaper._promote(integer, timestamptz, text[]) is 'Let the next waiting event of each of these holds go.';

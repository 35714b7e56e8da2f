-- _last_transition: the largest id of the trail that was ever given out; 0: none.
create function pgreaper._last_transition()
returns bigint
language sql
volatile
security invoker
as $function$
  select case when s.is_called then s.last_value else s.last_value - 1 end
    from pgreaper.transitions_transition_id_seq as s;
$function$;

comment on function pgreaper._last_transition() is 'The largest id of the trail that was ever given out.';

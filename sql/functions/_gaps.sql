-- _gaps: the ids of the trail that a set of numbers leaves open, in order; the last gap has no end.
create function pgreaper._gaps(taken int8multirange)
returns int8multirange
language sql
immutable
security invoker
as $function$
  select range_agg(int8range(lower(g.span) >> 20, ((upper(g.span) - 1) >> 20) + 1))
    from unnest('{(,)}'::int8multirange - _gaps.taken) as g (span);
$function$;

comment on function pgreaper._gaps(int8multirange) is 'The ids of the trail that a set of event numbers leaves open.';

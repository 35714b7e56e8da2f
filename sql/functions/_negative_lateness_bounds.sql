-- _negative_lateness_bounds: the bounds of the lateness buckets below zero, rising.
create function pgreaper._negative_lateness_bounds()
returns double precision[]
language sql
immutable
security invoker
set search_path = pg_catalog, pg_temp
as $function$
  select array(
    select - b.bound from unnest(pgreaper._lateness_bounds()) with ordinality as b (bound, position) order by b.position desc);
$function$;

comment on function pgreaper._negative_lateness_bounds() is 'Upper bounds of the lateness buckets, below zero and rising.';

-- _lateness_bounds: upper bounds of the lateness buckets, in seconds.
--
-- 1, 2.5, 5 in each decade from a millisecond to about 29 days; the bucket
-- after the last bound is open.  The trail stores counts in this order, so the
-- bounds may never change.
create function pgreaper._lateness_bounds()
returns double precision[]
language sql
immutable
security invoker
as $function$
  select array[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
    1, 2.5, 5, 10, 25, 50, 100, 250, 500,
    1e3, 2.5e3, 5e3, 1e4, 2.5e4, 5e4, 1e5, 2.5e5, 5e5, 1e6, 2.5e6
  ]::double precision[];
$function$;

comment on function pgreaper._lateness_bounds() is 'Upper bounds of the lateness buckets, in seconds.';

-- _quantile: a quantile of lateness from bucket counts.
--
-- Interpolates within the bucket; the open last bucket answers with its lower bound.
create function pgreaper._quantile(counts bigint[], fraction double precision)
returns interval
language sql
immutable
security invoker
as $function$
  select make_interval(secs => b.lower + (coalesce(b.upper, b.lower) - b.lower)
                                         * (_quantile.fraction * b.total - b.before) / nullif(b.holds, 0))
    from (
      select coalesce((pgreaper._lateness_bounds())[c.bucket - 1], 0) as lower,
             (pgreaper._lateness_bounds())[c.bucket] as upper,
             c.holds,
             c.bucket,
             sum(c.holds) over () as total,
             sum(c.holds) over (order by c.bucket) - c.holds as before
        from unnest(_quantile.counts) with ordinality as c (holds, bucket)
    ) as b
   where b.holds > 0
     and b.before + b.holds >= _quantile.fraction * b.total
   order by b.bucket
   limit 1;
$function$;

comment on function pgreaper._quantile(bigint[], double precision) is 'A quantile of lateness from bucket counts; NULL without any.';

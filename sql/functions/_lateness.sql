-- _lateness: count deadlines per lateness bucket.
--
-- A batch is usually so narrow that all of it falls into one bucket, which two differences tell.  Otherwise it
-- works on timestamps only, because a deadline may be -infinity.
create function pgreaper._lateness(
  cutoff timestamptz,
  deadlines timestamptz[],
  first_deadline timestamptz,
  last_deadline timestamptz
)
returns integer[]
language plpgsql
stable
security invoker
as $function$
declare
  v_size constant integer := cardinality(pgreaper._lateness_bounds()) + 1;
  v_thresholds timestamptz[];
  v_first integer;
  v_last integer;
  v_counts integer[];
begin
  if isfinite(_lateness.first_deadline) then
    -- Negative, because a lateness belongs to the bucket whose bound it just reaches.
    v_first := width_bucket(-extract(epoch from _lateness.cutoff - _lateness.first_deadline)::double precision,
                            pgreaper._negative_lateness_bounds());
    v_last := width_bucket(-extract(epoch from _lateness.cutoff - _lateness.last_deadline)::double precision,
                           pgreaper._negative_lateness_bounds());
    if v_first = v_last then
      v_counts := array_fill(0, array[v_size]);
      v_counts[v_size - v_first] := cardinality(_lateness.deadlines);
      return v_counts;
    end if;
  end if;

  -- Latest first: width_bucket wants rising thresholds, later is less late.
  v_thresholds := array(
    select _lateness.cutoff + make_interval(secs => b.bound)
      from unnest(pgreaper._negative_lateness_bounds()) with ordinality as b (bound, position)
     order by b.position
  );
  return array(
    select coalesce(c.holds, 0)
      from generate_series(1, v_size) as s (bucket)
      left join (
        select v_size - width_bucket(d.deadline, v_thresholds) as bucket, count(*)::integer as holds
          from unnest(_lateness.deadlines) as d (deadline)
         group by 1
      ) as c on c.bucket = s.bucket
     order by s.bucket
  );
end;
$function$;

comment on function pgreaper._lateness(timestamptz, timestamptz[], timestamptz, timestamptz) is
'How many deadlines fall into each lateness bucket.';

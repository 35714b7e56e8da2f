-- _lateness: count deadlines per lateness bucket.
--
-- Works on timestamps only, never on their difference, because a deadline may be
-- -infinity.  A batch is usually so narrow that all of it falls into one bucket.
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
  v_bounds constant double precision[] := pgreaper._lateness_bounds();
  v_size constant integer := cardinality(v_bounds) + 1;
  -- Latest first: width_bucket wants rising thresholds, later is less late.
  v_thresholds constant timestamptz[] := array(
    select _lateness.cutoff - make_interval(secs => b.bound)
      from unnest(v_bounds) with ordinality as b (bound, position)
     order by b.position desc
  );
  v_first constant integer := width_bucket(_lateness.first_deadline, v_thresholds);
  v_last constant integer := width_bucket(_lateness.last_deadline, v_thresholds);
  v_counts integer[];
begin
  if v_first = v_last then
    v_counts := array_fill(0, array[v_size]);
    v_counts[v_size - v_first] := cardinality(_lateness.deadlines);
    return v_counts;
  end if;

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

-- _counted_at: when a rate limit that was last counted at `rate_at` is counted next, by whoever took its time at `clock`.
--
-- Never back, because what has come in between would be counted twice: others may have been quicker than a long step.
-- Unless the clock was put back.
create function pgreaper._counted_at(clock timestamptz, rate_at timestamptz)
returns timestamptz
language plpgsql
immutable
security invoker
as $function$
begin
  return case when _counted_at.rate_at between _counted_at.clock and _counted_at.clock + interval '1 minute'
              then _counted_at.rate_at else _counted_at.clock end;
end;
$function$;

comment on function pgreaper._counted_at(timestamptz, timestamptz) is 'When a rate limit is counted next.';

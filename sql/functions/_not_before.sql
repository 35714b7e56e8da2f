-- _not_before: when a hold may be tried again after that many attempts; infinity: never by itself.
--
-- The exponent is capped before it is used: 2^attempts overflows long before an
-- attempt counter does, and a delay that somebody asks for ends before time does.  Jitter keeps holds that failed together from coming back together.
create function pgreaper._not_before(
  policy pgreaper.policies,
  clock timestamptz,
  attempts integer,
  budget integer,
  retry_in interval default null
)
returns timestamptz
language sql
volatile
security invoker
as $function$
  select case
    when _not_before.attempts >= _not_before.budget then 'infinity'::timestamptz
    when _not_before.retry_in is not null then _not_before.clock + least(greatest(_not_before.retry_in, interval '0'), interval '100 years')
    else _not_before.clock + make_interval(secs => (1 + random() / 2) * least(
      extract(epoch from policy.backoff_cap)::double precision,
      extract(epoch from policy.backoff_base)::double precision * 2::double precision ^ least(_not_before.attempts, 60)))
  end;
$function$;

comment on function pgreaper._not_before(pgreaper.policies, timestamptz, integer, integer, interval) is
'When a hold may be tried again after that many attempts; infinity when its budget is spent.';

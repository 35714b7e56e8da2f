-- _clock: the clock that decides, read once per call into a constant.
--
-- clock_timestamp() and not now(): in a long transaction now() stands still.
-- With its schema, because views call it with the path of who reads them.
-- Tests replace this function inside a transaction that they roll back.
create function pgreaper._clock()
returns timestamptz
language sql
volatile
security invoker
as $function$
  select pg_catalog.clock_timestamp();
$function$;

comment on function pgreaper._clock() is 'The database clock; the only source of time.';

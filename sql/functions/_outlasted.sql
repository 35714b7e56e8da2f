-- _outlasted: whether it was the statement timeout that canceled what has run since then, and not a person.
--
-- Both say 57014.  The timer starts with the statement that the client sent and rings once, so
-- a cancel that comes sooner is somebody's.  And what had less than half of that time to itself
-- may only have been in hand when the time of others was over.
create function pgreaper._outlasted(since timestamptz)
returns boolean
language plpgsql
volatile
security invoker
as $function$
declare
  v_timeout constant interval := current_setting('statement_timeout')::interval;
  v_now constant timestamptz := clock_timestamp();
begin
  -- A little less: the server begins to count when it parses the statement, which is before that moment.
  return v_timeout > interval '0'
    and v_now - statement_timestamp() >= v_timeout * 0.95
    and v_now - _outlasted.since >= v_timeout * 0.5;
end;
$function$;

comment on function pgreaper._outlasted(timestamptz) is
'Whether the statement timeout canceled what has run since then, and that had half of the time to itself.';

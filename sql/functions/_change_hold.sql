-- _change_hold: the one UPDATE of the application's side of the race.
--
-- The mirror of _write's guard: what is due at the clock (`<=`) is the reaper's, what is not
-- (`>`) the application's, and never both.  The row is locked already, so nobody changes it
-- between the clock and the comparison.
--
-- Promises
--   * A NULL: the row is not one that `condition` speaks of, or is due, or a trigger refused.
create function pgreaper._change_hold(
  policy pgreaper.policies,
  target pgreaper._target,
  key text,
  clock timestamptz,
  until timestamptz,
  assignments text,
  condition text
)
returns pgreaper._hold
language plpgsql
volatile
security invoker
as $function$
declare
  v_cutoff constant timestamptz := _change_hold.clock - policy.grace;
  v_keys constant text[] := array[_change_hold.key];
  v_statement text;
  v_hold pgreaper._hold;
begin
  v_statement := format(
    'update %1$s as h set %2$s where %3$s and (%4$s) and (%5$s) is not true'
    ' returning %6$s, %7$s, %8$s, (%9$s) is true, (%5$s) is true, (%10$s) is true, (%11$s) is true',
    target.relation, _change_hold.assignments, target.matches, _change_hold.condition, target.due,
    target.key, target.state, target.instant, target.held, target.ended, coalesce(target.consumed, 'false'));
  perform set_config('search_path', target.search_path, true);
  execute v_statement
     into v_hold
    using v_cutoff, null, v_keys, _change_hold.clock, _change_hold.until;
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);

  return v_hold;
end;
$function$;

comment on function pgreaper._change_hold(pgreaper.policies, pgreaper._target, text, timestamptz, timestamptz, text, text) is
'Write one hold that is not due and that the condition speaks of; NULL: it is not.';

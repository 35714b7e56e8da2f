-- _lock_hold: lock one hold of the application's, waiting for whoever has it.
--
-- A statement of its own, before the clock is read: an UPDATE compares the deadline with the
-- clock first and waits then, and does not compare again when the other transaction has only
-- locked the row or was rolled back.  How long to wait is the caller's lock_timeout.
--
-- A row that was deleted and inserted anew meanwhile, or moved to another partition, is
-- looked for again; under stricter levels than READ COMMITTED that is the caller's 40001.
--
-- Promises
--   * False: there is no such hold, or none that the caller may see.
create function pgreaper._lock_hold(
  policy pgreaper.policies,
  target pgreaper._target,
  key text,
  columns text[]
)
returns boolean
language plpgsql
volatile
security invoker
as $function$
declare
  c_turns constant integer := 5;
  v_again constant boolean := not target.plain and current_setting('transaction_isolation') = 'read committed';
  v_keys constant text[] := array[_lock_hold.key];
  v_statement text;
  v_found boolean;
begin
  v_statement := format('select true from %s as h where %s %s',
    target.relation, target.matches, pgreaper._lock_strength(policy, _lock_hold.columns));

  for v_turn in 1..c_turns loop
    if v_again then
      begin
        perform set_config('search_path', target.search_path, true);
        execute v_statement into v_found using null, null, v_keys;
        perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
      exception
        when serialization_failure then
          if v_turn = c_turns then
            raise;
          end if;
          continue;
      end;
    else
      perform set_config('search_path', target.search_path, true);
      execute v_statement into v_found using null, null, v_keys;
      perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    end if;
    exit when v_found or v_turn > 1;
  end loop;

  return coalesce(v_found, false);
end;
$function$;

comment on function pgreaper._lock_hold(pgreaper.policies, pgreaper._target, text, text[]) is
'Lock one hold, waiting for whoever has it; false: there is none.';

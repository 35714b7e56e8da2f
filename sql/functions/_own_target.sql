-- _own_target: trigger of `policies`: nobody makes other roles write to a table that is not his.
--
-- reaper_register() asks the same and says it better; this holds for whoever writes the table
-- himself.  Pausing and resuming is not asked about.
--
-- Raises
--   42501  the current role owns neither the target nor pgreaper.
create function pgreaper._own_target()
returns trigger
language plpgsql
volatile
security invoker
set search_path = pg_catalog, pg_temp
as $function$
declare
  c_free constant text[] := '{paused_at,pause_reason}';
  v_policy pgreaper.policies;
begin
  if tg_op = 'UPDATE' and to_jsonb(new) - c_free = to_jsonb(old) - c_free then
    return null;
  elsif pg_has_role((select c.relowner from pg_catalog.pg_class as c where c.oid = tg_relid), 'usage') then
    return null;
  end if;

  -- Where it pointed before, too: the policies of others are not taken over.
  for v_policy in select (new).* union all select (old).* where tg_op = 'UPDATE' loop
    if not exists (
      select from pg_catalog.pg_class as c
       where c.oid = to_regclass(format('%I.%I', v_policy.target_schema, v_policy.target_table))
         and pg_has_role(c.relowner, 'usage')
    ) then
      raise insufficient_privilege
        using message = format('role %I does not own %I.%I, the target of policy %I', current_user,
                v_policy.target_schema, v_policy.target_table, v_policy.name),
              hint = 'A policy makes other roles write to the table: let its owner register it.';
    end if;
  end loop;
  return null;
end;
$function$;

comment on function pgreaper._own_target() is 'Nobody makes other roles write to a table that is not his.';

create trigger own_target after insert or update on pgreaper.policies
  for each row execute function pgreaper._own_target();

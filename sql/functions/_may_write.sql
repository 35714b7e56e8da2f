-- _may_write: refuse to take holds that the current role could never expire.
--
-- Asked when there is something to take and before it is: a lease that is taken for nothing
-- lapses, and that would look like a crash of the worker and cost the holds an attempt.
--
-- Raises
--   42501  the role may not update a column that the transition writes; the message names it.
create function pgreaper._may_write(policy pgreaper.policies)
returns void
language plpgsql
stable
security invoker
as $function$
declare
  v_relation constant oid := to_regclass(format('%I.%I', policy.target_schema, policy.target_table));
  v_columns text[] := array_remove(array[policy.status_column, policy.stamp_column], null);
  v_column text;
begin
  if policy.set_values <> '{}' then
    v_columns := v_columns || array(select jsonb_object_keys(policy.set_values));
  end if;

  foreach v_column in array v_columns loop
    if not has_column_privilege(v_relation, v_column, 'update') then
      raise insufficient_privilege
        using message = format('role %I may not update column %I of %I.%I', current_user, v_column, policy.target_schema, policy.target_table),
              hint = format('Nothing was taken. As the owner of that table: select * from pgreaper.reaper_grant(%L, ''worker'');', current_user);
    end if;
  end loop;
end;
$function$;

comment on function pgreaper._may_write(pgreaper.policies) is '42501 unless the current role may update what the transition writes.';

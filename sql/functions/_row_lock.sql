-- _row_lock: the lock that the transition takes on a hold; no stronger than it needs.
--
-- Children may be inserted meanwhile, unless the transition writes a column of a unique
-- index: that counts as part of the row's identity, so the update would wait for those
-- who hold the weaker lock, where FOR UPDATE skips the row.
create function pgreaper._row_lock(policy pgreaper.policies)
returns text
language plpgsql
stable
security invoker
as $function$
declare
  v_relation constant oid := to_regclass(format('%I.%I', policy.target_schema, policy.target_table));
begin
  if exists (
    select from pg_catalog.pg_index as i
     where i.indrelid = v_relation and i.indisunique and i.indpred is null and i.indexprs is null
       and i.indkey::smallint[] && array(
         select a.attnum from pg_catalog.pg_attribute as a
          where a.attrelid = v_relation
            and (a.attname in (policy.status_column, policy.stamp_column) or policy.set_values ? a.attname))
  ) then
    return 'for update of h skip locked';
  end if;

  return 'for no key update of h skip locked';
end;
$function$;

comment on function pgreaper._row_lock(pgreaper.policies) is 'The lock that the transition takes on a hold.';

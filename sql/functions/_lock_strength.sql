-- _lock_strength: the lock that suffices to write these columns of a hold.
--
-- Children may be inserted meanwhile, unless a column of a unique index is written: that
-- counts as part of the row's identity, so the update would wait for those who hold the
-- weaker lock, where FOR UPDATE is told at once.
create function pgreaper._lock_strength(policy pgreaper.policies, columns text[])
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
          where a.attrelid = v_relation and a.attname = any (_lock_strength.columns))
  ) then
    return 'for update of h';
  end if;

  return 'for no key update of h';
end;
$function$;

comment on function pgreaper._lock_strength(pgreaper.policies, text[]) is 'The lock that suffices to write these columns of a hold.';

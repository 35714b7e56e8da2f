-- _target_version: tells one state of a policy and of the catalog that _target() reads from another.
--
-- A run of many steps builds its target anew only when this changes.  Catalog rows are known by
-- the transaction that wrote them.
--
-- Promises
--   * NULL for what is not a plain table: a view depends on more than can be asked in passing.
create function pgreaper._target_version(policy pgreaper.policies)
returns text
language plpgsql
stable
security invoker
as $function$
begin
  return (
    select concat_ws(' ', p.xmin, c.oid, c.xmin, current_user, row_security_active(c.oid),
             c.relhastriggers and exists (
               select from pg_catalog.pg_trigger as t
                where t.tgrelid = c.oid and not t.tgisinternal and t.tgenabled <> 'D' and t.tgtype & 16 <> 0),
             (select string_agg(a.xmin::text, ' ' order by a.attnum)
                from pg_catalog.pg_attribute as a where a.attrelid = c.oid and a.attnum > 0))
      from pgreaper.policies as p
      join pg_catalog.pg_class as c
        on c.oid = to_regclass(format('%I.%I', policy.target_schema, policy.target_table)) and c.relkind = 'r'
     where p.policy_id = policy.policy_id
  );
end;
$function$;

comment on function pgreaper._target_version(pgreaper.policies) is
'Tells one state of what _target() reads from another; NULL: build it anew each time.';

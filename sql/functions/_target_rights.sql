-- _target_rights: what a kind of role needs on the target of a policy, and on what a view of the
-- caller's own rights (security_invoker) reads.
--
-- A partitioned table answers for its partitions and any other view for its tables.
--
-- Promises
--   * `columns` NULL: the whole relation.  No row for a target that is not there.
create function pgreaper._target_rights(policy pgreaper.policies, kind text)
returns table (relation oid, privilege text, columns text[])
language sql
stable
security invoker
set search_path = pg_catalog, pg_temp
as $function$
  with recursive target as (
    -- Not to_regclass(), which asks for USAGE on the schema.
    select c.oid, true as first
      from pg_catalog.pg_class as c
      join pg_catalog.pg_namespace as n on n.oid = c.relnamespace
     where n.nspname = policy.target_schema and c.relname = policy.target_table
    union
    select d.refobjid, false
      from target as t
      join pg_catalog.pg_class as v on v.oid = t.oid and v.relkind = 'v'
      join lateral pg_options_to_table(v.reloptions) as o on o.option_name = 'security_invoker' and o.option_value::boolean
      join pg_catalog.pg_rewrite as r on r.ev_class = v.oid
      join pg_catalog.pg_depend as d
        on d.classid = 'pg_catalog.pg_rewrite'::regclass and d.objid = r.oid
       and d.refclassid = 'pg_catalog.pg_class'::regclass and d.refobjid <> v.oid
  ), written as (
    select array_remove(array[policy.status_column, policy.stamp_column], null)
           || array(select s.key from jsonb_object_keys(policy.set_values) as s (key)) as columns,
           -- What the application's side writes: always the deadline, the rest where the policy offers it.
           array_remove(array[
             policy.deadline_column,
             policy.consumed_stamp_column,
             case when policy.consumed is not null or policy.restore_within is not null then policy.status_column end,
             case when policy.restore_within is not null then policy.stamp_column end], null) as by_application
  )
  select c.oid, n.privilege, n.columns
    from target as t
    join pg_catalog.pg_class as c on c.oid = t.oid
   cross join written as w
   cross join lateral (
      select 'select' as privilege, null::text[] as columns where _target_rights.kind in ('worker', 'operator')
      union all
      select 'update', array(select a.attname::text from pg_catalog.pg_attribute as a
                              where a.attrelid = c.oid and a.attname = any (w.columns) order by a.attname)
       where _target_rights.kind in ('worker', 'operator')
      union all
      -- What the views count and date; no other value of a row.
      select 'select', array(select a.attname::text from pg_catalog.pg_attribute as a
                              where a.attrelid = c.oid
                                and (a.attname = any (policy.key_columns || policy.deadline_column || policy.status_column || policy.stamp_column
                                                      || policy.consumed_stamp_column)
                                     or (a.attname = 'ctid' and c.relkind = 'r')
                                     or not t.first and a.attnum > 0)
                              order by a.attname)
       where _target_rights.kind = 'reader'
      union all
      select 'select', array(select a.attname::text from pg_catalog.pg_attribute as a
                              where a.attrelid = c.oid
                                and (a.attname = any (policy.key_columns || policy.deadline_column || policy.status_column)
                                     or policy.status_column is null and a.attname in (policy.stamp_column, policy.consumed_stamp_column)
                                     or not t.first and a.attnum > 0)
                              order by a.attname)
       where _target_rights.kind = 'application'
      union all
      select 'update', array(select a.attname::text from pg_catalog.pg_attribute as a
                              where a.attrelid = c.oid and a.attname = any (w.by_application) order by a.attname)
       where _target_rights.kind = 'application'
    ) as n
   where n.columns is null or n.columns <> '{}';
$function$;

comment on function pgreaper._target_rights(pgreaper.policies, text) is 'What a kind of role needs on the target of a policy.';

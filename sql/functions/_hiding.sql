-- _hiding: the tables whose row level security hides rows of a target from a role, and whom it hides them from.
--
-- A view reads its tables with the rights of its owner, or with SECURITY INVOKER of whoever asks;
-- what it reads in a condition counts as well.  For a plain table the server's own
-- row_security_active() says the same of the current role, and costs less.
--
-- Promises
--   * No rows: the role sees every row of the target that there is.
create function pgreaper._hiding(relation oid, reader oid)
returns table (hiding oid, role oid)
language plpgsql
stable
security invoker
as $function$
begin
  return query
    with recursive under as (
      select _hiding.relation as oid, _hiding.reader as role
      union
      select d.refobjid, case when o.option_value::boolean then _hiding.reader else c.relowner end
        from under as u
        join pg_catalog.pg_class as c on c.oid = u.oid and c.relkind = 'v'
        left join lateral pg_options_to_table(c.reloptions) as o on o.option_name = 'security_invoker'
        join pg_catalog.pg_rewrite as r on r.ev_class = c.oid
        join pg_catalog.pg_depend as d
          on d.classid = 'pg_catalog.pg_rewrite'::regclass and d.objid = r.oid
         and d.refclassid = 'pg_catalog.pg_class'::regclass and d.refobjid <> c.oid
    )
    select t.oid, a.oid
      from under as u
      join pg_catalog.pg_class as t on t.oid = u.oid and t.relrowsecurity
      join pg_catalog.pg_roles as a on a.oid = u.role and not a.rolsuper and not a.rolbypassrls
     where t.relforcerowsecurity or not pg_has_role(a.oid, t.relowner, 'USAGE');
end;
$function$;

comment on function pgreaper._hiding(oid, oid) is 'The tables whose row level security hides rows of a target from a role.';

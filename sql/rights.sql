-- Nobody gets anything by default.  A function that is created, also one that a later
-- revision creates anew, is executable by PUBLIC until this has run; so it runs last.
revoke all on schema pgreaper from public;
revoke all on all tables in schema pgreaper from public;
revoke all on all sequences in schema pgreaper from public;
revoke all on all routines in schema pgreaper from public;

-- What ALTER DEFAULT PRIVILEGES of the role that installs gives away, on everything it creates,
-- was not meant for this.  Whom reaper_grant() knows gets his own again, for new functions too.
do $rights$
declare
  v record;
begin
  for v in
    select distinct quote_ident(r.rolname) as role
      from pg_catalog.pg_default_acl as d
     cross join lateral pg_catalog.aclexplode(d.defaclacl) as a
      join pg_catalog.pg_roles as r on r.oid operator(pg_catalog.=) a.grantee
     where d.defaclrole operator(pg_catalog.=) (select n.nspowner from pg_catalog.pg_namespace as n where n.nspname operator(pg_catalog.=) 'pgreaper')
       and d.defaclnamespace operator(pg_catalog.=) any (array[0, 'pgreaper'::pg_catalog.regnamespace::pg_catalog.oid])
       and a.grantee operator(pg_catalog.<>) d.defaclrole
  loop
    execute 'revoke all on all tables in schema pgreaper from ' || v.role;
    execute 'revoke all on all sequences in schema pgreaper from ' || v.role;
    execute 'revoke all on all routines in schema pgreaper from ' || v.role;
    execute 'revoke all on schema pgreaper from ' || v.role;
  end loop;

  perform pgreaper._grant_again();
end
$rights$;

-- _kept_rights: the statements that take from a role what it has of a kind's rights on targets.
--
-- Of what it was given itself only, not of what it has by being a member of another role.  Whether it had
-- that for another reason before, nobody knows: so the statements are told, and a person decides.
--
-- Promises
--   * Targets of withdrawn policies count: their rights stay when a policy goes.
--   * No rows: the role has none, or is not there.
create function pgreaper._kept_rights(role text, kind text)
returns setof text
language sql
stable
security invoker
set search_path = pg_catalog, pg_temp
as $function$
  with subject as (
    select r.oid from pg_catalog.pg_roles as r where r.rolname = _kept_rights.role
  ), wanted as (
    select distinct t.relation, t.privilege, t.columns
      from pgreaper.policies as p
     cross join lateral pgreaper._target_rights(p, _kept_rights.kind) as t
  ), had as (
    select w.relation, w.privilege as wording
      from wanted as w
     cross join subject as s
      join pg_catalog.pg_class as c on c.oid = w.relation
     cross join lateral aclexplode(c.relacl) as a
     where w.columns is null and a.grantee = s.oid and lower(a.privilege_type) = w.privilege
    union
    select w.relation, format('%s (%s)', w.privilege, string_agg(distinct quote_ident(c.attname), ', ' order by quote_ident(c.attname)))
      from wanted as w
     cross join subject as s
      join pg_catalog.pg_attribute as c on c.attrelid = w.relation and c.attname = any (w.columns)
     cross join lateral aclexplode(c.attacl) as a
     where a.grantee = s.oid and lower(a.privilege_type) = w.privilege
     group by w.relation, w.privilege
  )
  select format('revoke %s on %I.%I from %I;', string_agg(h.wording, ', ' order by h.wording), n.nspname, c.relname, _kept_rights.role)
    from had as h
    join pg_catalog.pg_class as c on c.oid = h.relation
    join pg_catalog.pg_namespace as n on n.oid = c.relnamespace
   group by n.nspname, c.relname
  union all
  select distinct format('revoke usage on schema %I from %I;', n.nspname, _kept_rights.role)
    from wanted as w
   cross join subject as s
    join pg_catalog.pg_class as c on c.oid = w.relation
    join pg_catalog.pg_namespace as n on n.oid = c.relnamespace
   cross join lateral aclexplode(n.nspacl) as a
   where a.grantee = s.oid and a.privilege_type = 'USAGE'
   order by 1;
$function$;

comment on function pgreaper._kept_rights(text, text) is 'The statements that take from a role what it has of a kind''s rights on targets.';

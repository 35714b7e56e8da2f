"""
The catalog of a database as comparable text.

:func:`schema` describes every object of one schema by what makes it behave as it
does and who may use it; :func:`counts` counts the rows of every system catalog, so
that not even a forgotten comment or dependency stays unseen.
"""

from typing import Any

import psycopg

# Rows of (what it is, everything about it).
_SCHEMA = """
with s as (select n.* from pg_namespace as n where n.nspname = %(schema)s),
     c as (select c.* from pg_class as c join s on s.oid = c.relnamespace),
     p as (select p.* from pg_proc as p join s on s.oid = p.pronamespace),
     t as (select t.* from pg_type as t join s on s.oid = t.typnamespace)
select 'schema ' || s.nspname,
       jsonb_build_array(s.nspowner::regrole)
  from s
union all
-- Nothing granted and the default granted are the same.
select format('rights on %%s %%s: %%s to %%s', r.kind, r.name, a.privilege_type, a.grantee::regrole),
       jsonb_build_array(a.grantor::regrole, a.is_grantable)
  from (select 'schema', s.nspname::text, coalesce(s.nspacl, acldefault('n', s.nspowner)) from s
        union all
        select 'relation', c.relname::text,
               coalesce(c.relacl, acldefault(case c.relkind when 'S' then 's' else 'r' end::"char", c.relowner))
          from c
        union all
        select 'routine', p.oid::regprocedure::text, coalesce(p.proacl, acldefault('f', p.proowner)) from p
        union all
        select 'type', t.typname::text, coalesce(t.typacl, acldefault('T', t.typowner)) from t
       ) as r (kind, name, acl),
       aclexplode(r.acl) as a
union all
select format('relation %%s', c.relname),
       jsonb_build_array(c.relkind, c.relpersistence, c.reloptions, c.relowner::regrole, c.relrowsecurity,
                         c.relforcerowsecurity, c.relreplident, c.reltablespace, a.amname)
  from c left join pg_am as a on a.oid = c.relam
union all
select format('column %%s.%%s', c.relname, a.attname),
       jsonb_build_array(a.attnum, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attidentity,
                         a.attgenerated, a.attstorage, a.attcompression, a.attcollation::regcollation,
                         a.attacl, a.attoptions, pg_get_expr(d.adbin, d.adrelid))
  from c
  join pg_attribute as a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
  left join pg_attrdef as d on d.adrelid = a.attrelid and d.adnum = a.attnum
union all
select format('constraint %%s on %%s', k.conname,
              coalesce(nullif(k.conrelid, 0)::regclass::text, k.contypid::regtype::text)),
       jsonb_build_array(k.contype, pg_get_constraintdef(k.oid), k.condeferrable, k.convalidated)
  from pg_constraint as k join s on s.oid = k.connamespace
union all
select format('index %%s', c.relname),
       jsonb_build_array(pg_get_indexdef(c.oid), i.indisunique, i.indisprimary, i.indisvalid)
  from c join pg_index as i on i.indexrelid = c.oid
union all
select format('view %%s', c.relname), to_jsonb(pg_get_viewdef(c.oid)) from c where c.relkind in ('v', 'm')
union all
select format('rule %%s on %%s', r.rulename, c.relname), to_jsonb(pg_get_ruledef(r.oid))
  from c join pg_rewrite as r on r.ev_class = c.oid
union all
select format('trigger %%s on %%s', g.tgname, c.relname), to_jsonb(pg_get_triggerdef(g.oid))
  from c join pg_trigger as g on g.tgrelid = c.oid and not g.tgisinternal
union all
select format('sequence %%s', c.relname), to_jsonb(q) - 'seqrelid' - 'seqtypid'
  from c join pg_sequence as q on q.seqrelid = c.oid
union all
select format('function %%s', p.oid::regprocedure),
       jsonb_build_array(p.prosrc, l.lanname, p.prokind, p.provolatile, p.proparallel, p.prosecdef,
                         p.proisstrict, p.proleakproof, p.proretset, p.procost, p.prorows, p.proconfig,
                         p.proowner::regrole, pg_get_function_arguments(p.oid), pg_get_function_result(p.oid))
  from p join pg_language as l on l.oid = p.prolang
union all
select format('type %%s', t.typname),
       jsonb_build_array(t.typtype, t.typcategory, t.typowner::regrole, t.typnotnull,
                         format_type(t.typbasetype, t.typtypmod), t.typdefault,
                         (select jsonb_agg(e.enumlabel order by e.enumsortorder)
                            from pg_enum as e where e.enumtypid = t.oid))
  from t
union all
select format('comment on %%s', pg_describe_object(d.classoid, d.objoid, d.objsubid)), to_jsonb(d.description)
  from pg_description as d
 where (d.classoid, d.objoid) in (
         select 'pg_namespace'::regclass, s.oid from s
         union all select 'pg_class'::regclass, c.oid from c
         union all select 'pg_proc'::regclass, p.oid from p
         union all select 'pg_type'::regclass, t.oid from t
         union all select 'pg_constraint'::regclass, k.oid from pg_constraint as k join s on s.oid = k.connamespace)
union all
select format('default rights of %%s on %%s', a.defaclrole::regrole, a.defaclobjtype), to_jsonb(a.defaclacl)
  from pg_default_acl as a join s on s.oid = a.defaclnamespace
union all
select format('policy %%s on %%s', y.polname, c.relname), to_jsonb(y) - 'oid' - 'polrelid'
  from c join pg_policy as y on y.polrelid = c.oid
"""

VERSION_TABLE = "schema_version"


def schema(dsn: str, name: str = "pgreaper", *, version_table: bool = False) -> dict[str, str]:
    """Everything in the schema; Alembic's own table only when asked for."""
    with psycopg.connect(dsn) as connection:
        connection.execute("set local search_path = ''")
        rows = connection.execute(_SCHEMA, {"schema": name}).fetchall()
    return {what: str(details) for what, details in rows if version_table or VERSION_TABLE not in what}


def counts(dsn: str) -> dict[str, int]:
    """How many rows each system catalog of this database has; statistics come and go by themselves."""
    with psycopg.connect(dsn) as connection:
        names = connection.execute(
            """
            select c.oid::regclass::text from pg_class as c
             where c.relnamespace = 'pg_catalog'::regnamespace and c.relkind = 'r' and not c.relisshared
               and c.relname !~ '^pg_statistic'
            """
        ).fetchall()
        shared = "pg_shdepend as s join pg_database as d on d.oid = s.dbid where d.datname = current_database()"
        return {name: _one(connection, f"select count(*) from {name}") for name in [*(row[0] for row in names), shared]}


def sources(dsn: str) -> dict[str, bytes]:
    """The text of every function, byte for byte."""
    with psycopg.connect(dsn) as connection:
        return dict(
            connection.execute(
                """
                select p.oid::regprocedure::text, convert_to(p.prosrc, 'UTF8')
                  from pg_proc as p where p.pronamespace = to_regnamespace('pgreaper')
                """
            ).fetchall()
        )


def _one(connection: psycopg.Connection[Any], query: str) -> Any:
    row = connection.execute(query).fetchone()
    assert row
    return row[0]

"""
Whose code is in schema ``pgreaper``: asked before any of it is called.

Its functions run with the rights of whoever calls them, so whoever owns the schema can do what each of its callers
can.  A worker has been given its rights by that owner and can do little else.  But whoever may create a schema in the
database could make one of this name, and wait for a superuser to look at it.  So a caller with power over the
server, over roles or over the database takes only what belongs to somebody who has such power too: a superuser,
the owner of the database, or whoever connected.  A role that the caller has only taken with SET ROLE is a stranger
all the same: its code can give it back.  Being a member of the owner's role is no trust: up to PostgreSQL 15
every role may make others its members.

Owns the question and its words; imports nothing of pgreaper.  The texts are for :func:`pgreaper.statement.qualified`.
"""

from typing import Final

_QUESTION: Final = """\
select o.rolname::text as owner, me.rolname::text as caller, w.what
  from ({owned}) as w
  join pg_roles as o on o.oid = w.owner
  join pg_roles as me on me.rolname = any (array[current_user, session_user])
  join pg_database as d on d.datname = current_database()
 where not o.rolsuper
   and o.rolname <> session_user
   and not pg_has_role(o.oid, d.datdba, 'usage')
   and (me.rolsuper or (me.rolcreaterole and not o.rolcreaterole) or pg_has_role(me.oid, d.datdba, 'usage')
        or exists (select from pg_roles as s
                    where s.rolname = any (array['pg_execute_server_program', 'pg_read_server_files',
                                                 'pg_write_server_files'])
                      and pg_has_role(me.oid, s.oid, 'usage') and not pg_has_role(o.oid, s.oid, 'usage')))
 order by w.place, w.what, me.rolname
 limit 1"""
_SCHEMA: Final = """\
select n.nspowner as owner, 1 as place, 'schema pgreaper' as what from pg_namespace as n where n.nspname = 'pgreaper'"""
_OBJECTS: Final = f"""\
{_SCHEMA}
        union all
        select p.proowner, 2, 'pgreaper.' || p.proname
          from pg_proc as p join pg_namespace as n on n.oid = p.pronamespace
         where n.nspname = 'pgreaper'
        union all
        select c.relowner, 3, 'pgreaper.' || c.relname
          from pg_class as c join pg_namespace as n on n.oid = c.relnamespace
         where n.nspname = 'pgreaper'"""  # noqa: S608  our own text

STRANGE: Final = """\
select not o.rolsuper and o.rolname <> session_user
  from pg_namespace as n join pg_roles as o on o.oid = n.nspowner where n.nspname = 'pgreaper'"""
"""Whether there is more to ask: the schema belongs neither to a superuser nor to who connected.  Quick to ask."""
SCHEMA: Final = _QUESTION.format(owned=_SCHEMA)
"""Owner, caller and what it is, when the schema is a stranger's; no row when it is not, or is not there."""
OBJECTS: Final = _QUESTION.format(owned=_OBJECTS)
"""The same for every relation and routine in it as well, which takes a millisecond or more."""

FACT: Final = "{what} belongs to role {owner}, whose code would run with the rights of {caller}"
HINT: Final = (
    "Nothing of it was called. If it is no installation of yours: drop schema pgreaper cascade. If it is, connect as"
    " {owner}, or let that role own the database."
)

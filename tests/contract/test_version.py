"""reaper_version, and what holds for the interface as a whole."""

from __future__ import annotations


def test_the_version_is_that_of_the_interface(core):
    """Promise: the driver wants exactly this one."""
    assert core.value("select pgreaper.reaper_version()") == "0.1"


def test_c106_every_function_has_one_signature(core):
    """A second signature with a defaulted parameter would make every call ambiguous (42725)."""
    signatures = dict(
        core.rows("select proname, count(*) from pg_proc where pronamespace = 'pgreaper'::regnamespace group by 1")
    )
    assert len(signatures) > 40
    assert {name for name, count in signatures.items() if count > 1} == set()


def test_c106_every_function_and_column_has_a_comment(core):
    """Comments are part of the interface: people read it in psql."""
    silent = core.column(
        """
        select p.oid::regprocedure::text from pg_proc as p
         where p.pronamespace = 'pgreaper'::regnamespace and obj_description(p.oid, 'pg_proc') is null
        union all
        select c.relname || '.' || a.attname
          from pg_class as c join pg_attribute as a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
         where c.relnamespace = 'pgreaper'::regnamespace and c.relkind in ('r', 'v')
           and col_description(c.oid, a.attnum) is null
        """
    )
    assert silent == []


def test_public_gets_nothing(core):
    """PUBLIC may neither use the schema nor execute a function of it."""
    core.do("create role pgreaper_nobody")
    allowed = core.column(
        "select p.oid::regprocedure::text from pg_proc as p where p.pronamespace = 'pgreaper'::regnamespace"
        " and has_function_privilege('pgreaper_nobody', p.oid, 'execute')"
    )
    assert allowed == []
    assert core.value("select has_schema_privilege('pgreaper_nobody', 'pgreaper', 'usage')") is False

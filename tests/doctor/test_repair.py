"""``pgreaper install --repair``: functions and views as shipped again, everything else as it was."""

from __future__ import annotations

import psycopg

from pgreaper import schema

DAMAGE = [
    "create or replace function pgreaper._clock() returns timestamptz language sql as 'select now()'",
    "drop view pgreaper.retries",
    "create or replace view pgreaper.leases as select * from pgreaper.leases limit 0",
    """
    drop function pgreaper.reaper_version();
    create function pgreaper.reaper_version() returns integer language sql as 'select 1'
    """,
    "alter function pgreaper.reaper_pause(text, text) security definer",
    "drop function pgreaper.reaper_renew(uuid, interval)",
]


def test_what_was_changed_is_as_shipped_again(run, installed):
    """Found by the check, put back, and PUBLIC has nothing of it; the second time there is nothing to do."""
    with psycopg.connect(installed, autocommit=True) as connection:
        for damage in DAMAGE:
            connection.execute(damage)
            result = run("install", "--repair", "--json", url=installed)
            assert (result.code, len(result.json["repaired"])) == (0, 1)
        assert schema.check(installed).ok
        assert connection.execute(
            "select count(*) from pg_proc as p cross join lateral"
            " aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) as a"
            " where p.pronamespace = 'pgreaper'::regnamespace and a.grantee = 0"
        ).fetchone() == (0,)
        assert connection.execute(
            "select count(*) from pg_proc as p where p.pronamespace = 'pgreaper'::regnamespace"
            " and obj_description(p.oid, 'pg_proc') is null"
        ).fetchone() == (0,)
    assert run("install", "--repair", url=installed).out == "everything is as shipped\n"


def test_rights_and_books_survive(run, installed):
    with psycopg.connect(installed, autocommit=True) as connection:
        role = f"{connection.info.dbname}_worker"
        connection.execute(f"create role {role}")
        try:
            connection.execute(f"grant execute on function pgreaper.reaper_version() to {role}")
            connection.execute("insert into pgreaper.totals (policy_id) values (77)")
            connection.execute(
                "create or replace function pgreaper.reaper_version() returns text language sql as $$select '0.1'$$"
            )
            assert run("install", "--repair", url=installed).code == 0
            assert connection.execute(
                f"select has_function_privilege('{role}', 'pgreaper.reaper_version()', 'execute')"
            ).fetchone() == (True,)
            assert connection.execute("select policy_id from pgreaper.totals").fetchall() == [(77,)]
        finally:
            connection.execute(f"drop owned by {role}; drop role {role}")


def test_what_somebody_added_stays_and_is_told(run, installed):
    with psycopg.connect(installed, autocommit=True) as connection:
        connection.execute("create function pgreaper.extra() returns int language sql as 'select 1'")
        result = run("install", "--repair", url=installed)
        assert result.code == 3
        assert "extra()" in result.out
        assert connection.execute("select pgreaper.extra()").fetchone() == (1,)


def test_it_refuses_another_revision_and_no_installation(run, installed, new_database):
    assert run("install", "--repair", url=new_database()).code == 3
    with psycopg.connect(installed, autocommit=True) as connection:
        connection.execute("update pgreaper.schema_version set version_num = '0000'")
    result = run("install", "--repair", url=installed)
    assert result.code == 3
    assert "pgreaper install" in result.err
    assert run("install", "--repair", "--check", url=installed).code == 2

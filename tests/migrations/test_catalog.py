"""What is in the database, compared by catalog: every way in makes the same, and the way out leaves nothing."""

import re
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from pgreaper import schema
from pgreaper.schema import Source
from tests.migrations import catalog
from tests.migrations.conftest import Run

NewDatabase = Callable[[], str]


def by_psql(dsn: str, files: Source, psql: Run) -> None:
    done = psql(dsn, "--set", "ON_ERROR_STOP=1", "--single-transaction", "--file", str(files.sql / "install.sql"))
    assert (done.returncode, done.stderr) == (0, "")


def test_upgrade_equals_install_sql(new_database: NewDatabase, files: Source, psql: Run):
    """`upgrade head` makes what psql makes of sql/install.sql: functions, columns, constraints, comments, rights."""
    migrated, loaded = new_database(), new_database()

    schema.install(migrated)
    by_psql(loaded, files, psql)

    expected = catalog.schema(loaded)
    assert len(expected) > 300
    assert catalog.schema(migrated) == expected
    assert catalog.sources(migrated) == catalog.sources(loaded)


def test_the_tests_template_equals_install_sql(dsn: str, new_database: NewDatabase, files: Source, psql: Run):
    """The database that all other tests clone is the real one."""
    loaded = new_database()
    by_psql(loaded, files, psql)
    assert catalog.schema(dsn) == catalog.schema(loaded)


@pytest.fixture
def inhabited(empty_dsn: str) -> str:
    """A database that somebody already uses: types, functions, a view, grants, default rights, comments."""
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        connection.execute("""
            create schema shop;
            create type shop.state as enum ('held', 'expired');
            create table shop.holds (id bigint primary key, status shop.state, expires_at timestamptz);
            create index on shop.holds (expires_at) where status = 'held';
            create function shop.touch() returns trigger language plpgsql as 'begin return new; end';
            create trigger touch before update on shop.holds for each row execute function shop.touch();
            create view shop.open as select * from shop.holds;
            comment on table shop.holds is 'ours';
            alter default privileges in schema shop grant select on tables to public;
            grant select on shop.holds to public;
        """)
    return empty_dsn


def test_c097_up_down_up_leaves_no_trace(inhabited: str):
    """After uninstall the catalog is what it was, to the row; and everything can be installed again."""
    before = catalog.counts(inhabited), catalog.schema(inhabited, "shop"), catalog.schema(inhabited, "public")

    schema.install(inhabited)
    first = catalog.schema(inhabited, version_table=True)
    assert catalog.counts(inhabited) != before[0]
    schema.uninstall(inhabited)

    after = catalog.counts(inhabited), catalog.schema(inhabited, "shop"), catalog.schema(inhabited, "public")
    assert after == before
    assert catalog.schema(inhabited, version_table=True) == {}

    schema.install(inhabited)
    assert catalog.schema(inhabited, version_table=True) == first


def test_c097_down_leaves_no_trace_after_work(inhabited: str):
    """The same after a policy was registered and has run: the user's rows stay as the run left them."""
    with psycopg.connect(inhabited, autocommit=True) as connection:
        connection.execute(
            "insert into shop.holds select g, 'held', now() - interval '1 hour' from generate_series(1, 5) as g"
        )
        before = catalog.counts(inhabited)
        schema.install(inhabited)
        connection.execute(
            "select pgreaper.reaper_register("
            " 'holds', 'shop.holds', 'expires_at', 'status', '{held}', 'expired', owner => 'shop')"
        )
        connection.execute("call pgreaper.reaper_sweep('holds')")

        schema.uninstall(inhabited)

        assert catalog.counts(inhabited) == before
        assert connection.execute("select count(*) from shop.holds where status = 'expired'").fetchone() == (5,)


def test_c099_offline_equals_online(new_database: NewDatabase, psql: Run, tmp_path: Path):
    """The text for DBAs, through psql and through psycopg, gives every function byte for byte as the upgrade does."""
    online, through_psql, through_psycopg = new_database(), new_database(), new_database()
    text = schema.install_sql()
    script = tmp_path / "install.sql"
    script.write_text(text)

    schema.install(online)
    done = psql(through_psql, "--set", "ON_ERROR_STOP=1", "--file", str(script))
    assert (done.returncode, done.stderr) == (0, "")
    with psycopg.connect(through_psycopg, autocommit=True) as connection:
        connection.execute(text)

    expected = catalog.schema(online, version_table=True)
    assert catalog.schema(through_psql, version_table=True) == expected
    assert catalog.schema(through_psycopg, version_table=True) == expected
    assert catalog.sources(through_psql) == catalog.sources(through_psycopg) == catalog.sources(online)
    assert schema.check(through_psql).ok


def test_c099_sources_are_the_files(empty_dsn: str, files: Source):
    """A function body in the catalog is, byte for byte, the one in its file: nothing is lost."""
    schema.install(empty_dsn)
    bodies = {source.decode() for source in catalog.sources(empty_dsn).values()}

    in_files = {
        body
        for name in files.manifest()
        for kind, _, statement in schema.objects((files.sql / name).read_text())
        if kind in ("function", "procedure")
        for body in [re.split(r"\$\w+\$", statement)[1]]
    }
    assert bodies == in_files
    assert any("%" in body for body in bodies)
    assert any("::" in body or ":=" in body for body in bodies)


def test_uninstall_script_equals_uninstall(inhabited: str, psql: Run):
    """`uninstall --sql` through psql leaves as little as the command does."""
    before = catalog.counts(inhabited)
    schema.install(inhabited)

    done = psql(inhabited, "--set", "ON_ERROR_STOP=1", input=schema.uninstall_sql())

    assert (done.returncode, done.stderr) == (0, "")
    assert catalog.counts(inhabited) == before


def test_c106_one_signature_a_name(dsn: str):
    """No public or private function has an overload: a call is never ambiguous."""
    with psycopg.connect(dsn) as connection:
        twice = connection.execute(
            """
            select p.proname from pg_proc as p
             where p.pronamespace = 'pgreaper'::regnamespace group by 1 having count(*) > 1
            """
        ).fetchall()
        all_of_them = connection.execute(
            "select count(*) from pg_proc as p where p.pronamespace = 'pgreaper'::regnamespace"
        ).fetchone()
    assert twice == []
    assert all_of_them
    assert all_of_them[0] > 30


def test_public_has_no_rights(empty_dsn: str):
    """PUBLIC may not use the schema, call a function, read a table or view, or use a type of ours."""
    schema.install(empty_dsn)
    with psycopg.connect(empty_dsn) as connection:
        rights = connection.execute(
            """
            select 'schema', n.nspname::text, a.privilege_type
              from pg_namespace as n, aclexplode(coalesce(n.nspacl, acldefault('n', n.nspowner))) as a
             where n.nspname = 'pgreaper' and a.grantee = 0
            union all
            select 'function', p.proname, a.privilege_type
              from pg_proc as p, aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) as a
             where p.pronamespace = 'pgreaper'::regnamespace and a.grantee = 0
            union all
            select 'relation', c.relname, a.privilege_type
              from pg_class as c, aclexplode(coalesce(c.relacl, acldefault('r', c.relowner))) as a
             where c.relnamespace = 'pgreaper'::regnamespace and a.grantee = 0
            """
        ).fetchall()
    assert rights == []


def test_types_of_results_have_no_private_oids(dsn: str):
    """C108, C109: no stored column is a regclass or another oid, which a restore would point elsewhere."""
    with psycopg.connect(dsn) as connection:
        oids = connection.execute(
            """
            select c.relname, a.attname from pg_class as c join pg_attribute as a on a.attrelid = c.oid
             where c.relnamespace = 'pgreaper'::regnamespace and c.relkind = 'r' and a.attnum > 0
               and a.atttypid in ('oid'::regtype, 'regclass'::regtype, 'regproc'::regtype, 'regtype'::regtype,
                                  'regnamespace'::regtype, 'regrole'::regtype, 'regprocedure'::regtype)
            """
        ).fetchall()
    assert oids == []


def test_c108_dump_and_restore(
    new_database: NewDatabase, program: Callable[[str], Path], pgreaper: Run, tmp_path: Path
):
    """A dump restores without an error, with claims in flight, and works at once: under no search_path, to the row."""
    from tests.migrations.conftest import run

    source, target = new_database(), new_database()
    schema.install(source)
    with psycopg.connect(source, autocommit=True) as connection:
        connection.execute("""
            create schema "Tenant-B";
            create table "Tenant-B"."Holds" (id bigint primary key, status text, expires_at timestamptz);
            insert into "Tenant-B"."Holds" select g, 'held', now() - interval '1 hour' from generate_series(1, 5) as g;
            set search_path = "Tenant-B", public;
            select pgreaper.reaper_register(
              'holds', '"Holds"', 'expires_at', 'status', '{held}', 'expired', owner => 'b', lease => '1 day');
        """)
        assert len(connection.execute("select * from pgreaper.reaper_claim('holds', 2)").fetchall()) == 2
        in_flight = connection.execute("select * from pgreaper.claims").fetchall()

    dump = tmp_path / "dump"
    assert run(program("pg_dump"), "-Fc", "-f", dump, source).returncode == 0
    restored = run(program("pg_restore"), "--no-owner", "--exit-on-error", "-d", target, dump)
    assert (restored.returncode, restored.stderr) == (0, "")

    assert catalog.schema(target, version_table=True) == catalog.schema(source, version_table=True)
    assert schema.check(target).ok
    with psycopg.connect(target, autocommit=True) as connection:
        assert connection.execute("select * from pgreaper.claims").fetchall() == in_flight
        connection.execute("call pgreaper.reaper_sweep('holds')")
        assert connection.execute(
            """select status, count(*) from "Tenant-B"."Holds" group by 1 order by 1"""
        ).fetchall() == [("expired", 3), ("held", 2)]

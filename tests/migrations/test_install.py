"""Installing and uninstalling: raced, repeated, refused, checked; what a person reads and which code a script gets."""

import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.exc import DBAPIError

from pgreaper import schema
from pgreaper.errors import ReaperError, VersionMismatch
from pgreaper.schema import Change, Difference, Refused
from tests.migrations import catalog
from tests.migrations.conftest import Run

NewDatabase = Callable[[], str]
Connection = psycopg.Connection[Any]


def open_(dsn: str) -> Connection:
    return psycopg.connect(dsn, autocommit=True)


def spawn(*arguments: str, dsn: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pgreaper", *arguments],
        env=os.environ | {"PGREAPER_DATABASE_URL": dsn},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until(connection: Connection, query: str, expected: object) -> None:
    deadline = time.monotonic() + 60
    while (row := connection.execute(query).fetchone()) != (expected,):
        assert time.monotonic() < deadline, f"{query}: {row}"
        time.sleep(0.01)


WAITING = (
    "select count(*) from pg_locks where locktype = 'advisory' and not granted"
    " and database = (select oid from pg_database where datname = current_database())"
)


def test_c107_five_installs_at_once(new_database: NewDatabase):
    """Five processes reach the lock together: one installs, the others change nothing and succeed."""
    raced, alone = new_database(), new_database()
    with open_(raced) as gate, open_(raced) as watcher:
        with gate.transaction():
            gate.execute("select pg_advisory_xact_lock(8099568234601145714)")
            racers = [spawn("install", "--json", dsn=raced) for _ in range(5)]
            wait_until(watcher, WAITING, 5)
        outputs = [racer.communicate(timeout=60) for racer in racers]

    assert [(racer.returncode, err) for racer, (_, err) in zip(racers, outputs, strict=True)] == [(0, "")] * 5
    results = [json.loads(out) for out, _ in outputs]
    assert sorted(result["changed"] for result in results) == [False] * 4 + [True]
    assert {result["revision"] for result in results} == {"0001"}

    schema.install(alone)
    assert catalog.schema(raced, version_table=True) == catalog.schema(alone, version_table=True)


def test_c107_scripts_and_commands_race(empty_dsn: str, program: Callable[[str], Path], tmp_path: Path):
    """The text for psql takes the same lock: it waits for an install under way, then fails before a change."""
    text = tmp_path / "install.sql"
    text.write_text(schema.install_sql())
    with open_(empty_dsn) as gate, open_(empty_dsn) as watcher:
        # A stricter default must not give the script a snapshot from before its turn.
        gate.execute(f"alter database {gate.info.dbname} set default_transaction_isolation = 'serializable'")
        with gate.transaction():
            gate.execute("select pg_advisory_xact_lock(8099568234601145714)")
            command = spawn("install", dsn=empty_dsn)
            wait_until(watcher, WAITING, 1)
            script = subprocess.Popen(
                [program("psql"), "--no-psqlrc", "--quiet", "-v", "ON_ERROR_STOP=1", "-f", text, empty_dsn],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            wait_until(watcher, WAITING, 2)
        (_, complaint), (_, told) = command.communicate(timeout=60), script.communicate(timeout=60)

    assert (command.returncode, complaint) == (0, "")
    assert script.returncode == 3
    assert "pgreaper is installed already (revision 0001)" in told
    assert schema.check(empty_dsn).ok


def test_c107_install_again(empty_dsn: str):
    """A second install changes nothing, takes no transaction id and no lock that the first worker would notice."""
    assert schema.install(empty_dsn) == Change(None, "0001")
    with open_(empty_dsn) as watcher, open_(empty_dsn) as worker, worker.transaction():
        worker.execute("lock table pgreaper.claims, pgreaper.policies in access exclusive mode")
        snapshot = "select pg_snapshot_xmax(pg_current_snapshot())::text"
        before = watcher.execute(snapshot).fetchone()

        assert schema.install(empty_dsn) == Change("0001", "0001")

        assert watcher.execute(snapshot).fetchone() == before


def test_c100_script_over_an_installation_changes_nothing(empty_dsn: str, psql: Run):
    """Over an installation the script fails at its top: with -1, without, and without ON_ERROR_STOP."""
    schema.install(empty_dsn)
    before = catalog.schema(empty_dsn, version_table=True)
    text = schema.install_sql()

    for arguments in (["-v", "ON_ERROR_STOP=1", "-1", "-f", "-"], ["-v", "ON_ERROR_STOP=1"], []):
        done = psql(empty_dsn, *arguments, input=text)
        assert "pgreaper is installed already (revision 0001)" in done.stderr
        assert done.returncode == (3 if arguments else 0)
        assert catalog.schema(empty_dsn, version_table=True) == before


def test_c100_script_on_an_empty_database(empty_dsn: str, psql: Run):
    """With the flags that DBAs use, one transaction around it all, the script installs."""
    done = psql(empty_dsn, "-v", "ON_ERROR_STOP=1", "-1", "-f", "-", input=schema.install_sql())
    assert done.returncode == 0
    assert "ERROR" not in done.stderr
    assert schema.check(empty_dsn).ok


def test_c100_script_without_a_transaction_refuses(empty_dsn: str, psql: Run):
    """Somebody who cuts BEGIN and COMMIT out gets a refusal, not half an installation."""
    text = schema.install_sql().replace("BEGIN;", "").replace("COMMIT;", "")
    done = psql(empty_dsn, "-v", "ON_ERROR_STOP=1", input=text)
    assert done.returncode == 3
    assert "inside one transaction only" in done.stderr
    assert catalog.schema(empty_dsn, version_table=True) == {}


def test_c100_script_needs_no_database(pgreaper: Run):
    """The text is made without a connection, and nothing in it was read from one."""
    nowhere = "postgresql://nobody@127.0.0.1:1/nothing"
    for command in ("install", "uninstall"):
        done = pgreaper(nowhere, command, "--sql")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.endswith("COMMIT;\n\n")


def test_c101_a_failure_leaves_nothing(empty_dsn: str, monkeypatch: pytest.MonkeyPatch):
    """When the last file fails, none of the earlier ones stay, and the next run succeeds."""
    real = schema.Source.read
    monkeypatch.setattr(
        schema.Source,
        "read",
        lambda self, revision, name: real(self, revision, name) + ("select 1/0;" if name == "rights.sql" else ""),
    )
    with pytest.raises(ReaperError, match="division by zero"):
        schema.install(empty_dsn)
    assert catalog.schema(empty_dsn, version_table=True) == {}

    monkeypatch.undo()
    assert schema.install(empty_dsn).changed


def test_c103_no_lock_on_a_users_table(empty_dsn: str):
    """Install, check and uninstall go through while another session has every table of the user's locked away."""
    with open_(empty_dsn) as owner, open_(empty_dsn) as busy:
        owner.execute("create table holds (id bigint primary key, status text, expires_at timestamptz)")
        with busy.transaction():
            busy.execute("lock table holds in access exclusive mode")

            assert schema.install(empty_dsn).changed
            assert schema.check(empty_dsn).ok
            assert schema.uninstall(empty_dsn).changed


def test_c103_uninstall_gives_way_to_a_worker(empty_dsn: str, pgreaper: Run):
    """A worker in mid-transaction makes uninstall give up within seconds (75), and nothing has changed."""
    schema.install(empty_dsn)
    before = catalog.schema(empty_dsn, version_table=True)
    with open_(empty_dsn) as worker, worker.transaction():
        worker.execute("select * from pgreaper.claims for update")
        started = time.monotonic()

        done = pgreaper(empty_dsn, "uninstall")

        assert time.monotonic() - started < 15
    assert done.returncode == 75
    assert done.stderr.startswith("error: the database was busy: lock not available")
    assert catalog.schema(empty_dsn, version_table=True) == before


def test_c104_loggers_survive(empty_dsn: str):
    """An install in the application's own process leaves its loggers as they were."""
    log = logging.getLogger("shop.orders")
    log.setLevel(logging.INFO)
    root = logging.getLogger()
    before = (root.level, list(root.handlers), log.level, list(log.handlers), logging.getLogger("alembic").level)

    schema.install(empty_dsn)
    schema.check(empty_dsn)
    schema.uninstall(empty_dsn)

    assert not log.disabled
    assert before == (
        root.level,
        list(root.handlers),
        log.level,
        list(log.handlers),
        logging.getLogger("alembic").level,
    )


# What stands in the way


def test_somebody_elses_schema_is_refused(empty_dsn: str, pgreaper: Run):
    """A schema pgreaper that no install made is not adopted and not touched."""
    with open_(empty_dsn) as connection:
        connection.execute("create schema pgreaper; create table pgreaper.theirs ()")
    before = catalog.schema(empty_dsn)

    for command in ("install", "uninstall"):
        done = pgreaper(empty_dsn, command)
        if command == "install":
            assert done.returncode == 3
            assert "schema pgreaper exists already, and not from an installation of pgreaper" in done.stderr
        else:
            assert (done.returncode, done.stdout) == (0, "pgreaper is not installed here\n")
        assert catalog.schema(empty_dsn) == before


def test_install_sql_of_the_checkout_is_not_adopted(dsn: str):
    """A database that psql loaded from sql/install.sql has no recorded revision: refused, not overwritten."""
    before = catalog.schema(dsn)
    with pytest.raises(Refused, match="not from an installation"):
        schema.install(dsn)
    assert catalog.schema(dsn) == before


@pytest.mark.parametrize(
    ("make", "named"),
    [
        ("create view mine as select policy from pgreaper.status", "view public.mine depends on view pgreaper.status"),
        ("create table mine (p pgreaper.policies)", "column p of table public.mine depends on type pgreaper.policies"),
        (
            "create table mine (t timestamptz default pgreaper._clock())",
            "default value for column t of table public.mine",
        ),
        ("create table mine (id integer references pgreaper.policies)", "constraint mine_id_fkey on table public.mine"),
        (
            "create function mine() returns setof pgreaper.policies language sql as 'select * from pgreaper.policies'",
            "function public.mine() depends on type pgreaper.policies",
        ),
        ("create view pgreaper.mine as select 1 as one", "view pgreaper.mine depends on schema pgreaper"),
    ],
)
def test_a_users_object_on_ours_is_never_dropped(empty_dsn: str, make: str, named: str):
    """Uninstall refuses, with the name, while something of the user's depends on an object of ours; even with force."""
    schema.install(empty_dsn)
    with open_(empty_dsn) as connection:
        connection.execute(make)
    before = catalog.counts(empty_dsn)

    for force in (False, True):
        with pytest.raises(Refused, match=re.escape(named)) as refused:
            schema.uninstall(empty_dsn, force=force)
        assert refused.value.hint
        assert catalog.counts(empty_dsn) == before


@pytest.fixture
def working(empty_dsn: str) -> Iterator[Connection]:
    """A connection to an installed database with a policy on three due holds."""
    schema.install(empty_dsn)
    with open_(empty_dsn) as connection:
        connection.execute("""
            create table holds (id bigint primary key, status text, expires_at timestamptz);
            insert into holds select g, 'held', now() - interval '1 hour' from generate_series(1, 3) as g;
            select * from pgreaper.reaper_register('holds', 'holds', 'expires_at', 'status', '{held}', 'expired', 'me');
        """)
        yield connection


def test_c097_active_leases_are_not_thrown_away(working: Connection, empty_dsn: str, pgreaper: Run, psql: Run):
    """While holds are leased uninstall refuses (3), in each of its forms; with --force it goes through."""
    working.execute("select * from pgreaper.reaper_claim('holds', 2)")
    before = catalog.schema(empty_dsn, version_table=True)

    done = pgreaper(empty_dsn, "uninstall")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("error: pgreaper has unfinished work: 0 dead letters, 1 active leases\nhint: ")
    script = psql(empty_dsn, "-v", "ON_ERROR_STOP=1", input=schema.uninstall_sql())
    assert script.returncode == 3
    assert "0 dead letters, 1 active leases" in script.stderr
    assert catalog.schema(empty_dsn, version_table=True) == before

    done = pgreaper(empty_dsn, "uninstall", "--force", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) | {"schema_version": 1} == {
        "schema_version": 1,
        "command": "uninstall",
        "changed": True,
        "before": "0001",
        "revision": None,
        "kept": [],
    }
    assert catalog.schema(empty_dsn, version_table=True) == {}


def test_c097_dead_letters_are_not_thrown_away(working: Connection, empty_dsn: str):
    """A dead letter stops uninstall as a lease does; a retry that is only waiting does not."""
    working.execute("""
        insert into pgreaper.failures
          (policy_id, key, deadline, attempts, first_seen_at, failed_at, not_before, error_class)
        select p.policy_id, '7', now(), 1, now(), now(), 'infinity', 'Broken' from pgreaper.policies as p
    """)
    with pytest.raises(Refused, match="1 dead letters, 0 active leases"):
        schema.uninstall(empty_dsn)

    working.execute("update pgreaper.failures set not_before = now()")
    assert schema.uninstall(empty_dsn).changed


def test_uninstall_twice(empty_dsn: str, pgreaper: Run):
    """Nothing to remove is not an error."""
    schema.install(empty_dsn)
    assert pgreaper(empty_dsn, "uninstall").stdout == "pgreaper is uninstalled\n"
    done = pgreaper(empty_dsn, "uninstall")
    assert (done.returncode, done.stdout, done.stderr) == (0, "pgreaper is not installed here\n", "")


def test_uninstall_script_without_an_installation(empty_dsn: str, psql: Run):
    """The script for psql fails before it changes anything where there is nothing to remove."""
    done = psql(empty_dsn, "-v", "ON_ERROR_STOP=1", input=schema.uninstall_sql())
    assert done.returncode == 3
    assert "starts from revision 0001 of pgreaper, the database has none" in done.stderr
    assert catalog.schema(empty_dsn) == {}


# Check


def test_check(empty_dsn: str, pgreaper: Run):
    """Exit 3 while something is missing, 0 when all is as shipped; and looking leaves nothing behind."""
    done = pgreaper(empty_dsn, "install", "--check")
    assert (done.returncode, done.stdout, done.stderr) == (3, "pgreaper is not installed here\n", "")

    assert pgreaper(empty_dsn, "install").stdout == "pgreaper is installed (revision 0001)\n"
    before = catalog.counts(empty_dsn)
    done = pgreaper(empty_dsn, "install", "--check", "--json")

    assert done.returncode == 0
    assert json.loads(done.stdout)["ok"] is True
    assert json.loads(done.stdout)["differences"] == []
    assert catalog.counts(empty_dsn) == before


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (
            "create or replace function pgreaper.reaper_version() returns text language sql immutable as 'select $$$$'",
            Difference("function reaper_version()", "changed"),
        ),
        (
            "alter function pgreaper.reaper_version() set work_mem = '1MB'",
            Difference("function reaper_version()", "changed"),
        ),
        (
            "alter function pgreaper.reaper_version() security definer",
            Difference("function reaper_version()", "changed"),
        ),
        ("alter function pgreaper.reaper_version() volatile", Difference("function reaper_version()", "changed")),
        ("drop function pgreaper.reaper_version()", Difference("function reaper_version()", "missing")),
        ("drop view pgreaper.leases", Difference("view leases", "missing")),
        (
            "create function pgreaper.reaper_version(v int) returns text language sql as $$select ''$$",
            Difference("function reaper_version(v integer)", "unexpected"),
        ),
        ("alter view pgreaper.leases set (security_barrier)", Difference("view leases", "changed")),
        ("alter view pgreaper.leases rename column policy to p", Difference("view leases", "changed")),
        ("create view pgreaper.mine as select 1 as x", Difference("view mine", "unexpected")),
    ],
)
def test_check_finds(empty_dsn: str, change: str, difference: Difference, pgreaper: Run):
    """Whatever was done to a function or view by hand is named."""
    schema.install(empty_dsn)
    with open_(empty_dsn) as connection:
        connection.execute(change)

    result = schema.check(empty_dsn)

    assert result.differences == (difference,)
    assert not result.ok


def test_check_names_what_cannot_be_compared(empty_dsn: str, pgreaper: Run):
    """An object whose file does not fit the database any more (a table was changed) is told, not a crash."""
    schema.install(empty_dsn)
    with open_(empty_dsn) as connection:
        connection.execute("drop view pgreaper.leases; alter table pgreaper.claims rename column claim_until to until")

    done = pgreaper(empty_dsn, "install", "--check")

    assert done.returncode == 3
    assert "  broken      view leases\n" in done.stdout


# Trouble


def test_installed_by_a_newer_version(empty_dsn: str, pgreaper: Run):
    """A revision that this package does not know: one line, nothing changed, check says 3."""
    schema.install(empty_dsn)
    with open_(empty_dsn) as connection:
        connection.execute("update pgreaper.schema_version set version_num = '0999'")

    for command in ("install", "uninstall"):
        done = pgreaper(empty_dsn, command)
        assert done.returncode == 75
        assert done.stderr.startswith("error: revision 0999 of pgreaper is installed, and this version")
    with pytest.raises(VersionMismatch):
        schema.install(empty_dsn)
    done = pgreaper(empty_dsn, "install", "--check")
    assert (done.returncode, done.stdout) == (3, "pgreaper is installed in revision 0999; this version wants 0001\n")


@pytest.mark.parametrize("command", [("install",), ("install", "--check"), ("uninstall",)])
def test_database_down(command: tuple[str, ...], pgreaper: Run):
    """Nobody listens: 75, one line, no password in it."""
    done = pgreaper("postgresql+psycopg://me:s3cret@127.0.0.1:1/shop", *command)
    assert done.returncode == 75
    assert done.stderr.startswith("error: the database cannot be reached")
    assert "s3cret" not in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


def test_database_read_only(empty_dsn: str, pgreaper: Run):
    """A read-only database is tried later: 75."""
    with open_(empty_dsn) as connection:
        connection.execute(f"alter database {connection.info.dbname} set default_transaction_read_only = on")
    done = pgreaper(empty_dsn, "install")
    assert (done.returncode, done.stdout) == (75, "")
    assert "read-only" in done.stderr


def test_no_right_to_create(empty_dsn: str, pgreaper: Run):
    """A role that may not create a schema is told which right it lacks."""
    with open_(empty_dsn) as connection:
        connection.execute("drop role if exists pgreaper_test_nobody; create role pgreaper_test_nobody login")
        name = connection.info.dbname
        try:
            done = pgreaper(empty_dsn.replace("postgres@", "pgreaper_test_nobody@"), "install")
        finally:
            connection.execute("drop role pgreaper_test_nobody")
    assert done.returncode == 1
    assert f"permission denied for database {name}" in done.stderr
    assert "Traceback" not in done.stderr


def test_sql_and_check_exclude_each_other(pgreaper: Run):
    """A usage error is 2."""
    done = pgreaper("", "install", "--sql", "--check")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: --sql, --check and --repair exclude each other")


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg", "postgresql+psycopg2"])
def test_addresses(empty_dsn: str, scheme: str):
    """Every spelling of a URL that applications have in their settings."""
    assert schema.install(empty_dsn.replace("postgresql://", f"{scheme}://")).after == "0001"


def test_a_given_connection_stays_the_callers(empty_dsn: str):
    """Inside a SQLAlchemy transaction of the caller's: rolled back with it, settings as before, its own errors."""
    engine = create_engine(empty_dsn.replace("postgresql://", "postgresql+psycopg://"))
    settings = (
        "select current_setting('lock_timeout'), current_setting('search_path'), current_setting('client_min_messages')"
    )
    with engine.connect() as connection:
        before = connection.exec_driver_sql(settings).one()
        assert schema.install(connection).changed
        assert connection.exec_driver_sql(settings).one() == before
        connection.rollback()
        assert schema.check(connection).revision is None

        connection.exec_driver_sql("create schema pgreaper")
        with pytest.raises(DBAPIError, match="not from an installation"):
            schema.install(connection)
    engine.dispose()


def test_autocommit_is_refused(empty_dsn: str):
    """Outside of a transaction nothing is installed, not even in part."""
    engine = create_engine(empty_dsn.replace("postgresql://", "postgresql+psycopg://"), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection, pytest.raises(DBAPIError, match="inside one transaction only"):
        schema.install(connection)
    engine.dispose()
    assert catalog.schema(empty_dsn) == {}

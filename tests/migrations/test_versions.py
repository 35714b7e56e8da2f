"""
Old workers on new functions, new workers on old functions, and functions that are exchanged while everybody works.

The next release is made up: a second revision that changes every function and says that it is of another version.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pgreaper import api, schema
from pgreaper.connection import resolve
from pgreaper.errors import VersionMismatch
from pgreaper.schema import Change, Source
from pgreaper.worker import Run, Settings, Worker
from tests.concurrency import books
from tests.conftest import Holds
from tests.migrations import catalog

Connection = psycopg.Connection[Any]
Release = Callable[..., Source]
Edits = list[tuple[str, str]]

SECOND = """
from pgreaper import schema

revision = "0002"
down_revision = "0001"

CHANGED = {changed!r}
FILES = (*CHANGED, "rights.sql")


def upgrade(op):
    schema.replace(op, "0001", revision, CHANGED)
    schema.apply(op, revision, ("rights.sql",))


def downgrade(op):
    schema.replace(op, revision, "0001", CHANGED)
    schema.apply(op, "0001", ("rights.sql",))
"""


@pytest.fixture
def release(files: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Release:
    """
    A function that makes the next release the one in use: ``release("0.2", "functions/_due.sql", …)``.

    The old texts of the files that it names are retired.  In the new ones `edits` (a pattern, what replaces it) are
    made, by file; the others differ by a statement at the beginning of their body.
    """

    def release(version: str, *names: str, edits: dict[str, Edits] | None = None) -> Source:
        shutil.copytree(files.migrations, tmp_path / "migrations", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(files.sql, tmp_path / "sql")
        source = Source(tmp_path / "migrations")
        by_file = {
            **{name: [("\nbegin\n", "\nbegin\n  perform 'the next release';\n")] for name in names},
            "functions/reaper_version.sql": [("'0.1'", f"'{version}'")],
            **(edits or {}),
        }
        for name, changes in by_file.items():
            retired = source.migrations / "retired" / "0001" / name
            retired.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(source.sql / name, retired)
            text = retired.read_text()
            for old, new in changes:
                text, made = re.subn(old, new, text, count=1)
                assert made == 1, (name, old)
            (source.sql / name).write_text(text)
        second = source.migrations / "versions" / "0002_second.py"
        second.write_text(SECOND.format(changed=tuple(by_file)))
        monkeypatch.setattr(schema, "source", lambda: source)
        return source

    return release


# One more argument, at the end of those that go in.
MORE = "\n  more boolean default true,"


def downgrade(dsn: str) -> None:
    """Back to revision 0001, as ``alembic downgrade`` does it."""
    scripts = schema.source().scripts
    with schema.transaction(dsn) as connection:
        schema.run(schema._configure(scripts, schema.downgrade_steps(scripts, "0001"), connection))


@pytest.fixture
def world(empty_dsn: str) -> Iterator[tuple[str, Connection, Holds]]:
    """Revision 0001 with a policy on witnessed holds: the database's URL, a connection to it, the holds."""
    schema.install(empty_dsn)
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        holds = Holds(connection)
        connection.execute(books.WITNESS)
        holds.register()
        yield empty_dsn, connection, holds


class Daemon:
    """``pgreaper work --daemon`` in a process of its own."""

    def __init__(self, dsn: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pgreaper", "work", "--daemon", "--poll", "0.2", "--batch", "3"],
            env={**os.environ, "PGREAPER_DATABASE_URL": dsn},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait(self) -> tuple[int, str]:
        """Exit code and log, once it has ended."""
        _, log = self.process.communicate(timeout=60)
        return self.process.returncode, log

    def stop(self) -> tuple[int, str]:
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


@pytest.fixture
def daemon(world: tuple[str, Connection, Holds]) -> Iterator[Callable[[], Daemon]]:
    with ExitStack() as stack:

        def daemon() -> Daemon:
            started = Daemon(world[0])
            stack.callback(started.end)
            return started

        yield daemon


class Crowd:
    """An application that makes holds, and a scheduler that sweeps; both without a pause, until told to stop."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.errors: list[psycopg.Error] = []
        self._over = threading.Event()
        self._feeding = threading.Event()
        self._threads = [threading.Thread(target=target, daemon=True) for target in (self._feed, self._sweep)]

    def __enter__(self) -> "Crowd":
        self._feeding.set()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._feeding.clear()
        self._over.set()
        for thread in self._threads:
            thread.join(30)

    def finish(self) -> None:
        """No more holds; go on until none is due."""
        self._feeding.clear()
        self._threads[0].join(30)
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            wait(connection, "select not exists (select from holds where status = 'held')")

    def _feed(self) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            while self._feeding.is_set():
                connection.execute(
                    "insert into holds (expires_at)"
                    " select clock_timestamp() - g * interval '1 ms' from generate_series(1, 20) as g"
                )
                wait(connection, "select count(*) < 200 from holds where status = 'held'")

    def _sweep(self) -> None:
        with psycopg.connect(self.dsn, autocommit=True, application_name="reaper sweeping") as connection:
            while not self._over.is_set():
                try:
                    connection.execute("call pgreaper.reaper_sweep('holds', batch => 3, max_rows => 30)")
                except psycopg.Error as error:
                    self.errors.append(error)


def wait(connection: Connection, question: str, *parameters: object) -> None:
    """Until the answer is yes; a minute at most."""
    for _ in range(6000):
        ((answer,),) = connection.execute(question, parameters or None).fetchall()
        if answer:
            return
        connection.execute("select pg_sleep(0.01)")
    pytest.fail(f"not within a minute: {question}")


def exchange(dsn: str, connection: Connection, *, times: int) -> None:
    """Upgrade and go back so often; the workers get something done before each."""

    def work_goes_on() -> None:
        for who in ("pgreaper/%", "reaper sweeping"):
            by = "select count(*) from witness where new_status = 'expired' and by like %s"
            ((before,),) = connection.execute(by, (who,)).fetchall()
            wait(connection, f"select ({by}) >= %s", who, before + 10)

    for _ in range(times):
        work_goes_on()
        assert schema.install(dsn) == Change("0001", "0002")
        work_goes_on()
        downgrade(dsn)
    work_goes_on()


def test_c105_functions_are_exchanged_under_everybody(
    world: tuple[str, Connection, Holds],
    daemon: Callable[[], Daemon],
    release: Release,
    files: Source,
):
    """Signatures unchanged: nobody sees any of it.  Two daemons and a sweeper go on, each hold expires once."""
    dsn, connection, _ = world
    bodies = [
        name
        for name in files.manifest()
        if name.startswith("functions/") and "\nbegin\n" in (files.sql / name).read_text()
    ]
    assert {"functions/reaper_claim.sql", "functions/_write.sql", "functions/_sweep_step.sql"} < set(bodies)
    release("0.2", *bodies)
    daemons = [daemon(), daemon()]

    with Crowd(dsn) as crowd:
        exchange(dsn, connection, times=3)
        crowd.finish()

    assert crowd.errors == []
    for ended in daemons:
        code, log = ended.stop()
        assert (code, "trying again" in log) == (0, False), log
    assert connection.execute("select count(*) from pgreaper.failures").fetchone() == (0,)
    kinds = {kind for (kind,) in connection.execute("select kind from pgreaper.events").fetchall()}
    assert kinds <= {"register", "already-done"}
    assert books.violations(connection) == []


def test_c105_functions_with_other_arguments_are_exchanged_under_everybody(
    world: tuple[str, Connection, Holds], daemon: Callable[[], Daemon], release: Release
):
    """
    Signatures on the hot path change: a call may meet half of each and say so, but it charges nobody.

    Whoever was granted the old function may call the new one, and no overload is left behind.
    """
    dsn, connection, _ = world
    connection.execute("create role pgreaper_clerk")
    try:
        connection.execute("grant execute on all routines in schema pgreaper to pgreaper_clerk")
        granted = catalog.schema(dsn)
        release(
            "0.2",
            edits={
                "functions/_attempt.sql": [(r"\n  out ", MORE + r"\n  out "), (r"\) is\n", ", boolean) is\n")],
                "functions/_due.sql": [(r"\n\)\n", "," + MORE[:-1] + "\n)\n"), (r"\) is\n", ", boolean) is\n")],
            },
        )
        worker = daemon()

        with Crowd(dsn) as crowd:
            exchange(dsn, connection, times=3)
            crowd.finish()

        assert {error.sqlstate for error in crowd.errors} <= {"RP005", "42883", "XX000"}
        assert worker.stop()[0] == 0
        assert connection.execute("select count(*) from pgreaper.failures").fetchone() == (0,)
        assert books.violations(connection) == []
        assert catalog.schema(dsn) == granted
    finally:
        connection.execute("drop owned by pgreaper_clerk")
        connection.execute("drop role pgreaper_clerk")


NEXT_MAJOR = {"SQL_VERSION": "1.0", "SQL_OLDEST": "0.1"}


@pytest.fixture
def next_driver(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function after which this process is a worker of the release after a break, which supports one version back."""

    def next_driver() -> None:
        for name, value in NEXT_MAJOR.items():
            monkeypatch.setattr(api, name, value)

    return next_driver


def work(dsn: str) -> Run:
    return Worker(resolve(dsn), Settings(), log=lambda _: None).run()


def test_c105_a_daemon_stops_when_its_version_is_no_longer_served(
    world: tuple[str, Connection, Holds],
    daemon: Callable[[], Daemon],
    release: Release,
    next_driver: Callable[[], None],
):
    """The rolling upgrade over a break: new workers first, on old functions; then the functions; old workers leave."""
    dsn, connection, holds = world
    release("1.0", "functions/reaper_claim.sql")
    old = daemon()
    holds.due(30)
    wait(connection, "select not exists (select from holds where status = 'held')")

    schema.install(dsn)
    code, log = old.wait()

    assert code == 75, log
    assert log.endswith(
        "error: the database has schema version 1.0 of pgreaper, this driver needs 0.1 or newer, below 1.0\n"
        "hint: The database was upgraded: use a pgreaper that fits it.\n"
    )
    assert connection.execute("select count(*) from pgreaper.leases").fetchone() == (0,)

    holds.due(30)
    with pytest.raises(VersionMismatch):
        work(dsn)
    assert connection.execute("select count(*) from holds where status = 'held'").fetchone() == (30,)
    next_driver()
    assert work(dsn).expired == 30
    downgrade(dsn)
    holds.due(30)
    assert work(dsn).expired == 30, "the code is new, the functions were taken back"
    assert books.violations(connection) == []


@pytest.mark.parametrize("meanwhile", ["idle", "away"])
def test_a_daemon_ends_when_pgreaper_is_taken_out(
    world: tuple[str, Connection, Holds], daemon: Callable[[], Daemon], meanwhile: str
):
    """75, so that whoever started it tries again later; also when the connection was lost meanwhile."""
    dsn, connection, holds = world
    old = daemon()
    holds.due(3)
    wait(connection, "select not exists (select from holds where status = 'held')")
    with psycopg.connect(dsn) as other:
        schema.uninstall(dsn, force=True)
        if meanwhile == "away":
            other.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where application_name like 'pgreaper/%' and datname = current_database()"
            )
    code, log = old.wait()
    assert code == 75, log
    name = connection.info.dbname
    assert f"error: pgreaper is no longer installed in database {name}\nhint: Run `pgreaper install`" in log


def test_c105_a_worker_in_the_middle_of_a_batch_gives_it_back(
    world: tuple[str, Connection, Holds], release: Release, next_driver: Callable[[], None]
):
    """The functions change between claim and expire, and what the old worker calls is gone: nobody is charged."""
    dsn, connection, holds = world
    release("1.0", "functions/reaper_expire_batch.sql")
    holds.due(5)
    told: list[Any] = []

    class Slow(Worker):
        """A worker whose claim is followed by the upgrade."""

        def _settle(self, *claim: Any) -> Any:
            schema.install(dsn)
            connection.execute("alter function pgreaper.reaper_expire_batch rename to reaper_finish")
            return super()._settle(*claim)

    run = Slow(resolve(dsn), Settings(), log=told.append).run()

    assert (run.exit_code, run.expired) == (75, 0)
    assert isinstance(run.trouble, VersionMismatch)
    assert "schema version 1.0" in str(run.trouble)
    connection.execute("alter function pgreaper.reaper_finish rename to reaper_expire_batch")
    next_driver()
    assert work(dsn).expired == 5
    assert connection.execute("select count(*) from pgreaper.failures").fetchone() == (0,)
    assert books.violations(connection) == []


def test_a_missing_piece_of_the_right_version_does_not_end_a_run_for_the_others(
    world: tuple[str, Connection, Holds],
):
    """Half an installation: the policy fails and is tried again later, the run says 75, no hold is charged."""
    dsn, connection, holds = world
    holds.due(1)
    connection.execute("alter function pgreaper._write rename to _lost")
    run = work(dsn)
    assert (run.exit_code, run.ended, run.expired) == (75, "drained", 0)
    assert isinstance(run.policies["holds"].error, VersionMismatch)
    connection.execute("alter function pgreaper._lost rename to _write")
    assert work(dsn).expired == 1
    assert connection.execute("select count(*) from pgreaper.failures").fetchone() == (0,)


def test_an_exchange_and_those_who_write_wait_for_each_other_never(
    world: tuple[str, Connection, Holds], release: Release, files: Source
):
    """Functions are made anew beside a transaction that writes to every table of the books; their triggers stay."""
    dsn, connection, _ = world
    release("0.2", *(name for name in files.manifest() if name.startswith("functions/_count_")))
    tables = connection.execute(
        "select oid::regclass::text from pg_class where relnamespace = 'pgreaper'::regnamespace"
        " and relkind = 'r' and relname <> 'schema_version'"
    ).fetchall()
    with connection.transaction():
        for (table,) in tables:
            connection.execute(f"lock table {table} in row exclusive mode")
        assert schema.install(dsn) == Change("0001", "0002")
    assert connection.execute("select count(*) from pg_trigger where tgname = 'counted'").fetchone() == (2,)


def test_an_exchange_gives_what_a_fresh_install_gives(
    world: tuple[str, Connection, Holds], release: Release, new_database: Callable[[], str], psql: Callable[..., Any]
):
    """Replaced in place, by a script, or installed afresh: the same functions; and back, the same as before."""
    dsn, _, _ = world
    scripted, fresh = new_database(), new_database()
    schema.install(scripted)
    before = catalog.sources(dsn)
    source = release("0.2", "functions/reaper_claim.sql", "functions/_transition.sql")
    script = schema._script(source.scripts, schema.upgrade_steps(source.scripts, "head"), start="0001")

    schema.install(dsn)
    schema.install(fresh)
    done = psql(scripted, "-v", "ON_ERROR_STOP=1", input=script)

    assert (done.returncode, done.stderr) == (0, "")
    assert catalog.sources(dsn) == catalog.sources(fresh) == catalog.sources(scripted) != before
    assert schema.check(dsn).ok
    downgrade(dsn)
    assert catalog.sources(dsn) == before

"""
Fixtures that every test may use: a real PostgreSQL, and a database of the test's own.

One server serves the whole run: the one that ``PGREAPER_TEST_DSN`` names (it wants a superuser), else one
that ``pgreaper.embedded`` starts from the binaries that ``PGREAPER_PG_BINDIR`` or the ``demo`` extra gives.
pgreaper is installed once, into a template; every test works on a clone of it, dropped afterwards.

Nothing here sleeps for correctness: :func:`wait_for_lock` waits for a state of the server, and
:func:`set_clock` moves pgreaper's clock.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import psycopg
import pytest
from hypothesis import settings
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict
from pytest_postgresql import factories

from pgreaper.embedded import Cluster, find_bindir

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Connect = Callable[..., psycopg.Connection[Any]]

SQL = Path(__file__).parent.parent / "sql"

# The tests say where they connect to; what the shell says must not reach them.
for name in list(os.environ):
    if re.fullmatch(r"PG(?!REAPER_).*|(PGREAPER_)?DATABASE_URL", name):
        del os.environ[name]

# Whoever runs the tests under nohup, or behind a script's `&`, ignores signals, and every program that the tests
# start would inherit that.  A handler is not inherited, so they begin as usual, and this process still ignores them.
for ignored in (signal.SIGHUP, signal.SIGINT):
    if signal.getsignal(ignored) == signal.SIG_IGN:
        signal.signal(ignored, lambda *_: None)

# Temporary folders, and so the servers, live in memory where it is large enough and programs may run from it
# (containers often have 64 MB): to clone a database takes 0.04 s there and up to 0.5 s on a busy disk.
memory = Path("/dev/shm")
if (
    "TMPDIR" not in os.environ
    and memory.is_dir()
    and shutil.disk_usage(memory).free > 4 * 2**30
    and not os.statvfs(memory).f_flag & os.ST_NOEXEC
):
    os.environ["TMPDIR"] = tempfile.tempdir = str(memory)

# The same examples on every run, and no verdict from a slow machine.
settings.register_profile("pgreaper", derandomize=True, deadline=None)
settings.load_profile("pgreaper")


@dataclass(frozen=True, slots=True)
class Server:
    """Where the tests' server is; the attributes are those that pytest-postgresql reads."""

    host: str
    port: int
    user: str
    password: str | None = None
    options: str = ""
    maintenance_dbname: str = "postgres"
    template_dbname: str | None = None

    def url(self, database: str) -> str:
        secret = f":{quote(self.password, safe='')}" if self.password else ""
        return f"postgresql://{quote(self.user)}{secret}@/{database}?host={quote(self.host)}&port={self.port}"


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The server of this run.  It is shared: a test that stops or crashes one asks for :func:`cluster`."""
    if dsn := os.environ.get("PGREAPER_TEST_DSN"):
        given = conninfo_to_dict(dsn)
        yield Server(
            host=str(given.get("host", "localhost")),
            port=int(given.get("port", 5432) or 5432),
            user=str(given.get("user", "postgres")),
            password=str(given["password"]) if "password" in given else None,
            maintenance_dbname=str(given.get("dbname", "postgres")),
        )
        return
    # Speed only: what these settings give away is lost when the machine crashes, and this data is thrown away.
    settings: dict[str, str | int | bool] = {"fsync": False, "full_page_writes": False, "max_wal_size": "256MB"}
    # Autovacuum is on, as doctor wants it, and never comes: it takes transaction ids that tests count.
    with Cluster(settings=settings | {"autovacuum_naptime": "1d"}) as started:
        yield Server(host=started.host, port=started.port, user=started.superuser)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A server of this test's own with real durability, to be stopped, crashed and restarted; about a second."""
    with Cluster() as started:
        yield started


def install_sql(**connection: Any) -> None:
    """Run the files that ``sql/install.sql`` names, in its order, in one transaction."""
    manifest = (SQL / "install.sql").read_text()
    files = re.findall(r"^\\ir\s+(\S+)\s*$", manifest, flags=re.MULTILINE)
    assert files, "sql/install.sql names no file"
    connection.pop("autocommit", None)
    with psycopg.connect(**connection) as session:
        for file in files:
            session.execute((SQL / file).read_bytes())


@pytest.fixture(scope="session")
def install() -> Callable[[str], None]:
    """A function that installs pgreaper's SQL into the database of a URL, without Alembic."""
    return lambda dsn: install_sql(conninfo=dsn)


postgresql_noproc = factories.postgresql_noproc(depends_on="server", dbname="pgreaper_test", load=[install_sql])
postgresql = factories.postgresql("postgresql_noproc")


@pytest.fixture
def dsn(server: Server, postgresql: psycopg.Connection[Any]) -> str:
    """The URL of this test's own database, pgreaper installed."""
    return server.url(postgresql.info.dbname)


@pytest.fixture
def connect(dsn: str) -> Iterator[Connect]:
    """A function that opens another connection to this test's database (arguments: psycopg.connect's)."""
    with ExitStack() as stack:

        def connect(**arguments: Any) -> psycopg.Connection[Any]:
            connection = psycopg.connect(dsn, **({"autocommit": True} | arguments))
            stack.callback(connection.close)  # unlike `with connection`, never commits
            return connection

        yield connect


@pytest.fixture
def db(connect: Connect) -> psycopg.Connection[Any]:
    """An autocommit connection to this test's database, as superuser."""
    return connect()


@pytest.fixture
def new_database(server: Server, worker_id: str) -> Iterator[Callable[[], str]]:
    """A function that creates an empty database, without pgreaper, and returns its URL; dropped at the end."""
    numbers = count(1)
    with psycopg.connect(server.url(server.maintenance_dbname), autocommit=True) as admin, ExitStack() as stack:

        def drop(name: sql.Identifier) -> None:
            admin.execute(sql.SQL("drop database if exists {} with (force)").format(name))

        def create() -> str:
            name = f"pgreaper_empty_{worker_id}_{next(numbers)}"
            drop(sql.Identifier(name))
            admin.execute(sql.SQL("create database {} template template0").format(sql.Identifier(name)))
            stack.callback(drop, sql.Identifier(name))
            return server.url(name)

        yield create


@pytest.fixture
def empty_dsn(new_database: Callable[[], str]) -> str:
    """The URL of a fresh database without pgreaper."""
    return new_database()


class Holds:
    """The table of holds that the cases are told with; policy ``holds`` once :meth:`register` was called."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self.connection = connection
        connection.execute("""
            create table holds (
              id bigint generated always as identity primary key,
              status text not null default 'held',  -- held | consumed | expired | cancelled
              expires_at timestamptz not null,
              customer_email text);
            create index holds_due on holds (expires_at) where status = 'held';
            """)

    def due(self, n: int, *, overdue: str = "1 hour") -> list[int]:
        """Insert n holds, a second apart, the first one overdue since `overdue`; return their ids."""
        return self._insert(n, f"-{overdue}")

    def ahead(self, n: int, *, within: str = "1 hour") -> list[int]:
        """Insert n holds, a second apart, the first one due after `within`; return their ids."""
        return self._insert(n, within)

    def _insert(self, n: int, start: str) -> list[int]:
        rows = self.connection.execute(
            """
            insert into holds (expires_at, customer_email)
            select clock_timestamp() + %s::interval + g * interval '1 second', 'u' || g || '@example.com'
            from generate_series(1, %s) as g returning id
            """,
            (start, n),
        )
        return [row[0] for row in rows]

    def register(self, policy: str = "holds", **arguments: Any) -> None:
        """Register the table; arguments are reaper_register's and override the plain ones."""
        arguments = {
            "policy": policy,
            "target": "holds",
            "deadline_column": "expires_at",
            "status_column": "status",
            "held": ["held"],
            "expired": "expired",
            "owner": "tests",
        } | arguments
        self.connection.execute(
            sql.SQL("select pgreaper.reaper_register({})").format(
                sql.SQL(", ").join(
                    sql.SQL("{} => {}").format(sql.Identifier(name), sql.Placeholder(name)) for name in arguments
                )
            ),
            arguments,
        )

    def states(self) -> dict[int, str]:
        """Return the status of every hold by id."""
        return dict(self.connection.execute("select id, status from holds order by id").fetchall())


@pytest.fixture
def holds(db: psycopg.Connection[Any]) -> Holds:
    """The base table, empty, with its partial index; a helper to fill, register and read it."""
    return Holds(db)


@pytest.fixture
def set_clock(db: psycopg.Connection[Any]) -> Callable[..., None]:
    """
    A function that sets pgreaper's clock: to a moment (it stands still), or a timedelta from the real one (it runs).

    ``set_clock(moment)`` inside ``with db.transaction(force_rollback=True)`` is undone with it; outside it
    holds for every session of this test's database.  ``on`` is another connection to do it on.
    """

    def set_clock(to: datetime | timedelta | str, *, on: psycopg.Connection[Any] = db) -> None:
        now = "clock_timestamp() + {}::interval" if isinstance(to, timedelta) else "{}::timestamptz"
        on.execute(
            sql.SQL("create or replace function pgreaper._clock() returns timestamptz language sql as {}").format(
                sql.Literal(sql.SQL("select " + now).format(sql.Literal(to)).as_string(on))
            )
        )

    return set_clock


@pytest.fixture
def wait_for_lock(connect: Connect) -> Callable[..., None]:
    """A function that returns as soon as the backend with this pid waits for a lock, and fails after ten seconds."""
    watcher = connect()

    def wait_for_lock(pid: int, seconds: float = 10) -> None:
        deadline = time.monotonic() + seconds
        while True:
            row = watcher.execute(
                "select wait_event_type, state, query from pg_stat_activity where pid = %s", (pid,)
            ).fetchone()
            if row and row[0] == "Lock":
                return
            if time.monotonic() > deadline:
                pytest.fail(f"backend {pid} does not wait for a lock: {row}")
            time.sleep(0.005)

    return wait_for_lock


@pytest.fixture(scope="session")
def needs() -> Callable[..., Path]:
    """
    A function that finds what only Debian packages: ``needs("pgbouncer", package="pgbouncer")`` looks along PATH and
    in the sbin folders; an absolute path is looked at as it is.  Without it the test is skipped and says what to do.
    """

    def needs(program: str, *, package: str) -> Path:
        path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
        found = program if Path(program).is_absolute() and Path(program).exists() else shutil.which(program, path=path)
        if not found:
            pytest.skip(f"{program} is missing: apt-get install {package}")
        return Path(found)

    return needs


def pytest_report_header() -> str:
    if os.environ.get("PGREAPER_TEST_DSN"):
        return "postgres: PGREAPER_TEST_DSN"
    return f"postgres: {find_bindir()}"


def pytest_sessionfinish(session: pytest.Session) -> None:
    """
    With PGREAPER_REQUIRE_ALL (CI sets it) a skipped test fails the run: a skip must not hide.

    What only a later PostgreSQL has is no reason to fail; such a skip names that version.
    """
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter and [
        report
        for report in reporter.stats.get("skipped", [])
        if not re.search(r"\bPostgreSQL \d", str(report.longrepr))
    ]
    if reporter and skipped and os.environ.get("PGREAPER_REQUIRE_ALL"):
        reporter.write_line(f"\nPGREAPER_REQUIRE_ALL: {len(skipped)} skipped", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED

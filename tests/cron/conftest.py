"""
A real pg_cron: Debian's package, on servers of these tests' own, in both of its modes.

pg_cron starts jobs by the minute.  All but one test use its ``@reboot``: the job starts, as any other does, when the
server has started, which takes half a second.  pg_cron lives in database ``postgres``, pgreaper in databases that each
test makes for itself.
"""

from __future__ import annotations

import json
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import sql
from psycopg.rows import tuple_row

from pgreaper.cli import main
from pgreaper.embedded import Cluster
from tests.conftest import Holds, install_sql

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BINDIR = Path("/usr/lib/postgresql/15/bin")
TEMPLATE = "pgreaper_template"
MODES = ["connections", "workers"]


@dataclass(frozen=True, slots=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class CronServer:
    """A server with pg_cron in database ``postgres``, and what the tests ask of it."""

    def __init__(self, cluster: Cluster, mode: str) -> None:
        self.cluster = cluster
        self.mode = mode
        self._numbers = count(1)

    def prepare(self) -> None:
        # A run is a connection to this very socket; its folder has no name before the server has started.
        self.run(sql.SQL("alter system set cron.host = {}").format(self.cluster.host))
        self.cluster.restart()
        self.run("create extension pg_cron")
        self.run(sql.SQL("create database {}").format(sql.Identifier(TEMPLATE)))
        install_sql(conninfo=self.url(TEMPLATE))

    def url(self, database: str = "postgres", role: str = "postgres") -> str:
        return self.cluster.url(database).replace("postgres@", f"{role}@", 1)

    def connect(self, database: str = "postgres", role: str = "postgres") -> psycopg.Connection[Any]:
        return psycopg.connect(self.url(database, role), autocommit=True)

    def run(self, query: Any, *parameters: Any, database: str = "postgres", role: str = "postgres") -> list[Any]:
        """Run a statement on a connection of its own; its rows."""
        with closing(self.connect(database, role)) as connection, connection.cursor(row_factory=tuple_row) as cursor:
            cursor.execute(query, parameters or None)
            return cursor.fetchall() if cursor.description else []

    def script(self, text: str, database: str = "postgres") -> None:
        """Run statements as psql does."""
        self.cluster.run("psql", "-v", "ON_ERROR_STOP=1", "-X", "-q", database=database, stdin=text)

    def new_database(self) -> str:
        name = f"shop_{next(self._numbers)}"
        self.run(sql.SQL("create database {} template {}").format(sql.Identifier(name), sql.Identifier(TEMPLATE)))
        return name

    def clean(self) -> None:
        """No job, no run, no role and no database but those that were there in the beginning."""
        self.run("delete from cron.job")
        self.run("truncate cron.job_run_details")
        for (name,) in self.run(
            "select datname from pg_database where datname not in ('postgres', 'template0', 'template1', %s)", TEMPLATE
        ):
            self.run(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))
        for (name,) in self.run(
            "select rolname from pg_roles where rolname not like 'pg\\_%' and rolname <> 'postgres'"
        ):
            self.run(sql.SQL("drop owned by {0} cascade").format(sql.Identifier(name)))
            self.run(sql.SQL("drop role {0}").format(sql.Identifier(name)))

    def start_jobs(self, expected: int) -> list[Any]:
        """
        Restart the server, which starts each ``@reboot`` job; return what became of that many runs.

        Of each: the job's name or number, status, message.
        """
        (before,) = self.run("select coalesce(max(runid), 0) from cron.job_run_details")[0]
        self.cluster.restart()
        return self.wait_for_runs(expected, before)

    def wait_until(self, query: str, seconds: float = 30) -> None:
        """Return when a query answers true."""
        end = time.monotonic() + seconds
        while not self.run(query)[0][0]:
            if time.monotonic() > end:
                pytest.fail(f"never true: {query}\n{self.cluster.log()}")
            time.sleep(0.02)

    def wait_for_runs(self, expected: int, before: int = 0, seconds: float = 60) -> list[Any]:
        end = time.monotonic() + seconds
        while True:
            found = self.run(
                "select coalesce(j.jobname::text, d.jobid::text), d.status, d.return_message"
                "  from cron.job_run_details as d left join cron.job as j using (jobid)"
                " where d.runid > %s and d.status in ('succeeded', 'failed') order by d.jobid",
                before,
            )
            if len(found) >= expected:
                return found
            if time.monotonic() > end:
                pytest.fail(f"{len(found)} runs of {expected} have ended: {found}\n{self.cluster.log()}")
            time.sleep(0.05)


@pytest.fixture(scope="session")
def servers(needs: Callable[..., Path]) -> Iterator[Callable[[str], CronServer]]:
    """A function that starts the server of a mode, once in a run."""
    needs("/usr/lib/postgresql/15/lib/pg_cron.so", package="postgresql-15-cron")
    with ExitStack() as stack:
        started: dict[str, CronServer] = {}

        def server(mode: str) -> CronServer:
            if mode not in started:
                settings: dict[str, str | int | bool] = {
                    "fsync": False,
                    "full_page_writes": False,
                    "shared_preload_libraries": "pg_cron",
                    "cron.database_name": "postgres",
                    "cron.use_background_workers": mode == "workers",
                    "max_worker_processes": 24,
                }
                cluster = stack.enter_context(Cluster(bindir=BINDIR, settings=settings))
                started[mode] = CronServer(cluster, mode)
                started[mode].prepare()
            return started[mode]

        yield server


@pytest.fixture(params=MODES)
def each_mode(request: pytest.FixtureRequest, servers: Callable[[str], CronServer]) -> CronServer:
    """The server whose runs are connections, and the one whose runs are background workers."""
    server = servers(request.param)
    server.clean()
    return server


@pytest.fixture
def cron(servers: Callable[[str], CronServer]) -> CronServer:
    """The server whose runs are connections, where the mode does not matter."""
    server = servers("connections")
    server.clean()
    return server


@pytest.fixture
def shop() -> Callable[..., Holds]:
    """A function that puts a registered table of holds into a database; some are due."""

    def shop(server: CronServer, database: str, due: int = 10) -> Holds:
        connection = server.connect(database)
        holds = Holds(connection)
        holds.due(due, overdue="2 hours")  # they are a second apart
        holds.register()
        connection.close()
        return holds

    return shop


@pytest.fixture
def pgreaper(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """A function that runs a command on a database of a server to its end, as the role that is named."""

    def pgreaper(server: CronServer, database: str, *arguments: str, role: str = "postgres") -> Result:
        monkeypatch.setenv("DATABASE_URL", server.url(database, role))
        capsys.readouterr()
        code = main(list(arguments))
        out, err = capsys.readouterr()
        return Result(code, out, err)

    return pgreaper

"""Two servers: a primary and its streaming standby, or a publisher and its logical subscriber."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pgreaper import schema
from pgreaper.cli import main
from pgreaper.embedded import Cluster
from tests.cli.conftest import Process, Result, start  # noqa: F401  fixtures

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Speed only.  What is promised across a failover does not rest on the disk: it rests on the other server.
FAST = {"fsync": False, "full_page_writes": False}


class Standby(Cluster):
    """A hot standby of another cluster, made by pg_basebackup and fed by streaming replication."""

    def __init__(self, primary: Cluster) -> None:
        super().__init__(settings=FAST, bindir=primary.bindir)
        self.primary = primary

    def _call(self, program: str, *arguments: str) -> str:
        if program != "initdb":
            return super()._call(program, *arguments)
        # In the place of an empty data directory: the primary's, with a signal to go on receiving from it.
        return super()._call(
            "pg_basebackup",
            f"--pgdata={self.data_dir}",
            f"--dbname=host={self.primary.host} port={self.primary.port} user={self.primary.superuser}",
            "--write-recovery-conf",
            "--checkpoint=fast",
            "--no-sync",
        )


def connect(cluster: Cluster, **arguments: Any) -> psycopg.Connection[Any]:
    return psycopg.connect(cluster.dsn, **({"autocommit": True} | arguments))


def value(connection: psycopg.Connection[Any], query: str, *parameters: Any) -> Any:
    row = connection.execute(query, parameters or None).fetchone()
    return row and row[0]


def until(connection: psycopg.Connection[Any], query: str, *parameters: Any, seconds: float = 30) -> None:
    """Return when a query answers true, and fail after some seconds."""
    end = time.monotonic() + seconds
    while not value(connection, query, *parameters):
        if time.monotonic() > end:
            pytest.fail(f"never true: {query}")
        time.sleep(0.01)


def in_step(primary: psycopg.Connection[Any], standby: psycopg.Connection[Any]) -> None:
    """Wait until the standby has replayed all that the primary has written so far."""
    until(standby, "select pg_last_wal_replay_lsn() >= %s::pg_lsn", value(primary, "select pg_current_wal_lsn()::text"))


def promote(standby: Cluster) -> None:
    """Make a primary of it, and wait until it is one."""
    with connect(standby) as connection:
        assert value(connection, "select pg_promote()")
        until(connection, "select not pg_is_in_recovery()")


def follow(cluster: Cluster, primary: Cluster) -> None:
    """Start a server that was stopped in good order as the standby of the one that was promoted in its place."""
    (cluster.data_dir / "standby.signal").touch()
    with (cluster.data_dir / "postgresql.auto.conf").open("a") as file:
        file.write(
            f"\nprimary_conninfo = 'host={primary.host} port={primary.port} user={primary.superuser}'\n"
            "synchronous_standby_names = ''\n"
            "log_connections = on\n"
        )
    cluster.start()
    with connect(cluster) as connection:
        assert value(connection, "select pg_is_in_recovery()")


def either(first: Cluster, second: Cluster, *, database: str = "postgres") -> str:
    """The URL that names both servers and wants the one that can be written to."""
    return (
        f"postgresql://{first.superuser}@/{database}?host={first.host},{second.host}"
        f"&port={first.port},{second.port}&target_session_attrs=read-write"
    )


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Cluster, Standby]]:
    """A primary with pgreaper and a standby of it, for tests that leave both as they are."""
    with Cluster(settings=FAST) as primary:
        schema.install(primary.dsn)
        with Standby(primary) as standby:
            yield primary, standby


@pytest.fixture
def failover() -> Iterator[tuple[Cluster, Standby]]:
    """The same for one test, replicating synchronously: what is committed is on both."""
    with Cluster(settings=FAST) as primary:
        schema.install(primary.dsn)
        with Standby(primary) as standby:
            with connect(primary) as connection:
                until(connection, "select exists (select from pg_stat_replication where state = 'streaming')")
                connection.execute("alter system set synchronous_standby_names = '*'")
                connection.execute("select pg_reload_conf()")
                until(connection, "select exists (select from pg_stat_replication where sync_state = 'sync')")
            yield primary, standby


@pytest.fixture
def pgreaper(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """A function that runs a command to its end: what the program's entry point returns and prints."""

    def pgreaper(*arguments: str, url: str) -> Result:
        with monkeypatch.context() as patch:
            patch.setenv("DATABASE_URL", url)
            code = main(list(arguments))
        out, err = capsys.readouterr()
        return Result(code, out, err)

    return pgreaper

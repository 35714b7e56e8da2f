"""The server crashes in mid-drain, more than once; afterwards everything adds up."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import psycopg
import pytest

from pgreaper.embedded import Cluster
from tests.concurrency import books
from tests.concurrency.sessions import Connection, rows
from tests.conftest import Holds

HOLDS = 3000


class Worker(threading.Thread):
    """Claims and expires until nothing is left, or sweeps until told; reconnects when the server is gone."""

    def __init__(self, dsn: str, name: str, *, sweeps: bool, forgets: bool) -> None:
        super().__init__(name=name, daemon=True)
        self.dsn, self.sweeps, self.forgets = dsn, sweeps, forgets
        self.unknown: list[psycopg.Error] = []
        self.lost_connections = 0
        self.stopping = threading.Event()

    def run(self) -> None:
        token: str | None = None
        rescan = True
        while not self.stopping.is_set():
            try:
                with psycopg.connect(self.dsn, autocommit=True, application_name=f"reaper-{self.name}") as connection:
                    while not self.stopping.is_set():
                        if self.sweeps:
                            rows(connection, "call pgreaper.reaper_sweep('holds', batch => 20, max_rows => 100)")
                            self.stopping.wait(0.01)
                            continue
                        if token is None:
                            claim = rows(
                                connection,
                                "select token from pgreaper.reaper_claim('holds', batch => 20, rescan => %s)",
                                rescan,
                            )
                            if not claim and rescan:
                                return
                            rescan = not claim
                            token = claim[0]["token"] if claim else None
                        else:
                            rows(connection, "select pgreaper.reaper_expire(%s)", token)
                            token = None
            except psycopg.OperationalError as error:
                if error.sqlstate == "55P03":
                    continue
                self.lost_connections += 1
                # Half of the workers come back with their token, half have died with the server.
                token = None if self.forgets else token
                rescan = True
                self.stopping.wait(0.02)
            except psycopg.Error as error:
                self.unknown.append(error)
                return


@pytest.fixture
def busy(cluster: Cluster, install: Callable[[str], None]) -> Cluster:
    """A durable server with pgreaper, a table of due holds, its witness, and a transition that takes its time."""
    install(cluster.dsn)
    with psycopg.connect(cluster.dsn, autocommit=True) as admin:
        holds = Holds(admin)
        holds.register(lease="5 minutes")
        admin.execute(books.WITNESS)
        holds.due(HOLDS, overdue="2 hours")
        admin.execute(
            "create function slow() returns trigger language plpgsql as"
            " 'begin perform pg_sleep(0.0005); return new; end';"
            "create trigger slow before update on holds for each row execute function slow()"
        )
    return cluster


def expired(dsn: str) -> int:
    with psycopg.connect(dsn, autocommit=True) as connection:
        return int(rows(connection, "select count(*) from holds where status = 'expired'")[0]["count"])


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "the drain does not get on"
        time.sleep(0.02)


def test_a_crash_in_mid_drain(busy: Cluster, set_clock_on: Callable[[Connection, timedelta], None]):
    """Stopped with -m immediate twice: every due hold is expired once, nobody is charged, trail and table agree."""
    workers = [Worker(busy.dsn, f"{n}", sweeps=n == 3, forgets=n % 2 == 0) for n in range(4)]
    for worker in workers:
        worker.start()
    try:
        for share in (HOLDS // 5, HOLDS // 2):
            wait_until(lambda share=share: expired(busy.dsn) >= share)  # type: ignore[misc]
            busy.restart("immediate")
        for worker in workers[:-1]:
            worker.join(timeout=60)
            assert not worker.is_alive()
    finally:
        for worker in workers:
            worker.stopping.set()
    workers[-1].join(timeout=60)

    with psycopg.connect(busy.dsn, autocommit=True) as admin:
        assert [worker.unknown for worker in workers] == [[]] * 4
        assert all(worker.lost_connections for worker in workers)
        # What the forgetful left behind is leased until the lease ends, and the crash is nobody's fault.
        set_clock_on(admin, timedelta(minutes=10))
        for _ in range(2):
            rows(admin, "call pgreaper.reaper_sweep('holds')")

        assert rows(admin, "select status, count(*) from holds group by 1") == [{"status": "expired", "count": HOLDS}]
        assert books.violations(admin) == []
        assert rows(admin, "select * from pgreaper.failures") == []
        assert rows(admin, "select * from pgreaper.events where kind in ('retry', 'dead-letter')") == []
        assert rows(admin, "select * from pgreaper.leases") == []
        taken_back = rows(admin, "select count(*) from pgreaper.events where kind = 'taken-back'")[0]["count"]
        assert taken_back <= 4  # two crashes, two workers that forgot


@pytest.fixture
def set_clock_on() -> Callable[[Connection, timedelta], None]:
    """Move the clock of another server than the tests' own."""

    def set_clock(connection: Connection, ahead: timedelta) -> None:
        connection.execute(
            "create or replace function pgreaper._clock() returns timestamptz language sql as"
            f" 'select clock_timestamp() + interval ''{ahead.total_seconds()} seconds'''"
        )

    return set_clock

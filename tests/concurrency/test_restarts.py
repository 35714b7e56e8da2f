"""C073: the server goes away under a daemon, again and again, and the daemon is there when it is back."""

from __future__ import annotations

import re
import threading
import time
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pgreaper.connection import resolve
from pgreaper.logs import sentences
from pgreaper.worker import Settings, Worker
from tests.concurrency import books
from tests.conftest import Holds

if TYPE_CHECKING:
    from collections.abc import Callable

    from pgreaper.embedded import Cluster

HOLDS = 1000


@pytest.mark.parametrize("kind", ["plain", "handler"])
def test_c073_three_restarts_in_the_middle_of_batches(cluster: Cluster, install: Callable[[str], None], kind: str):
    """Stopped with -m immediate three times, down for a second once: all expire once, nobody is charged."""
    install(cluster.dsn)
    with psycopg.connect(cluster.dsn, autocommit=True) as admin:
        holds = Holds(admin)
        holds.register(lease="5 minutes", batch=50)
        admin.execute(books.WITNESS)
        admin.execute(
            "create function slow() returns trigger language plpgsql as"
            " 'begin perform pg_sleep(0.001); return new; end';"
            "create trigger slow before update on holds for each row execute function slow()"
        )
        holds.due(HOLDS, overdue="2 hours")
    lines: list[str] = []
    trouble: list[BaseException] = []

    def expired() -> int:
        with psycopg.connect(cluster.dsn, autocommit=True) as connection:
            ((n,),) = connection.execute("select count(*) from holds where status = 'expired'").fetchall()
            return int(n)

    def blows() -> None:
        try:
            for n, share in enumerate((HOLDS // 10, HOLDS // 3, HOLDS // 2)):
                end = time.monotonic() + 60
                while expired() < share:
                    assert time.monotonic() < end, f"the rows do not move: {lines}"
                    time.sleep(0.01)
                cluster.stop("immediate")
                if n == 1:
                    time.sleep(1)
                cluster.start()
        except BaseException as error:  # noqa: BLE001  raised again below
            trouble.append(error)

    dealer = threading.Thread(target=blows)
    dealer.start()
    settings: dict[str, Any] = {"handler": lambda call: None} if kind == "handler" else {}
    run = Worker(
        resolve(cluster.dsn),
        Settings(daemon=True, poll=0.5, max_rows=HOLDS, max_seconds=90, **settings),
        log=sentences(lines.append),
    ).run()
    dealer.join(60)
    if trouble:
        raise trouble[0]

    assert (run.ended, run.expired, run.exit_code) == ("max-rows", HOLDS, 0), lines
    assert run.reconnects >= 3
    # While it is down: one line a step, each within a poll, so that it is back within one.
    waits = [re.search(r"trying again in (\d+) ms", line) for line in lines if "trying again" in line]
    assert waits
    assert all(wait is not None and int(wait[1]) <= 500 for wait in waits), lines
    with psycopg.connect(cluster.dsn, autocommit=True) as admin:
        assert books.violations(admin) == []
        assert admin.execute("select status, count(*) from holds group by 1").fetchall() == [("expired", HOLDS)]
        assert admin.execute("select count(*) from pgreaper.failures").fetchone() == (0,)
        assert admin.execute(
            "select count(*) from pgreaper.events where kind in ('retry', 'dead-letter')"
        ).fetchone() == (0,)

"""
Database sessions that a test plays against one another.

A :class:`Session` runs one statement at a time in a thread of its own, so a statement that waits for a lock
does not stop the test.  Nothing here waits for time: a step is over when its answer is there, or when the
server says that the backend waits for a lock that another backend holds.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Barrier
from typing import Any, TypeVar

import psycopg
from psycopg.rows import dict_row

Connection = psycopg.Connection[Any]
Connect = Callable[..., Connection]
Rows = list[dict[str, Any]]
T = TypeVar("T")

# pg_blocking_pids and not only the wait event: a backend whose lock was granted shows the event until it wakes up.
BLOCKED = "select wait_event_type = 'Lock' and pg_blocking_pids(pid) <> '{}' from pg_stat_activity where pid = %s"


def rows(connection: Connection, statement: str, *values: Any) -> Rows:
    """Run a statement and return its rows, if it has any."""
    with connection.cursor(row_factory=dict_row) as cursor:
        cursor.execute(statement, values or None)
        return cursor.fetchall() if cursor.description else []


class Session:
    """One connection and the thread that runs its statements."""

    def __init__(self, connection: Connection, watcher: Connection) -> None:
        self.connection = connection
        self.pid = connection.info.backend_pid
        self._watcher = watcher
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._answer: Future[Any] | None = None

    def close(self) -> None:
        if self._answer is not None and not self._answer.done():
            self._watcher.execute("select pg_terminate_backend(%s)", (self.pid,))
        self._thread.shutdown()

    @property
    def busy(self) -> bool:
        return self._answer is not None and not self._answer.done()

    def start(self, statement: str, *values: Any) -> Future[Rows]:
        """Send a statement; the answer comes through the future."""
        return self.call(lambda connection: rows(connection, statement, *values))

    def call(self, function: Callable[[Connection], T]) -> Future[T]:
        """Run a function on the connection in the session's thread."""
        assert not self.busy, "a session runs one statement at a time"
        answer = self._thread.submit(function, self.connection)
        self._answer = answer
        return answer

    def run(self, statement: str, *values: Any) -> Rows:
        """Send a statement and wait for its answer."""
        return self.start(statement, *values).result(timeout=30)

    def settle(self) -> bool:
        """Wait until the statement is answered (True) or waits for somebody's lock (False)."""
        if self._answer is None:
            return True
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            if wait([self._answer], timeout=0.002).done:
                return True
            blocked = self._watcher.execute(BLOCKED, (self.pid,)).fetchone()
            if blocked and blocked[0]:
                return False
        raise AssertionError(f"backend {self.pid} neither answers nor waits for a lock")

    def blockers(self) -> set[int]:
        """The backends that hold the lock that this one waits for."""
        row = self._watcher.execute("select pg_blocking_pids(%s)", (self.pid,)).fetchone()
        return set(row[0]) if row else set()

    def starts_waiting(self, statement: str, *values: Any) -> Future[Rows]:
        """Send a statement that must block, and return once it does."""
        answer = self.start(statement, *values)
        assert not self.settle(), f"did not wait for a lock: {answer.exception() or answer.result()}"
        return answer


def at_once(functions: list[Callable[[], T]]) -> list[T]:
    """Run the functions in threads that a barrier releases together; return what they returned."""
    barrier = Barrier(len(functions))

    def run(function: Callable[[], T]) -> T:
        barrier.wait(timeout=30)
        return function()

    with ThreadPoolExecutor(max_workers=len(functions)) as threads:
        return [answer.result() for answer in [threads.submit(run, function) for function in functions]]


def drain(connection: Connection, worker: str, batch: int = 50, *, rescans: bool = True) -> list[tuple[str, str]]:
    """Be a worker: claim and expire until a rescan finds nothing but locked holds; return (key, outcome) pairs."""
    outcomes: list[tuple[str, str]] = []
    rescan = rescans
    while True:
        claim = rows(
            connection,
            "select token from pgreaper.reaper_claim('holds', batch => %s, worker => %s, rescan => %s)",
            batch,
            worker,
            rescan,
        )
        if claim:
            answer = rows(connection, "select key, outcome from pgreaper.reaper_expire(%s)", claim[0]["token"])
            outcomes += [(row["key"], row["outcome"]) for row in answer]
            if all(row["outcome"] == "locked" for row in answer):
                return outcomes
            rescan = False
        elif rescan or not rescans:
            return outcomes
        else:
            rescan = True

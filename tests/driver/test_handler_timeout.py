"""``--handler-timeout``: the time of one call, and what becomes of calls that do not keep to it."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

from pgreaper.api import EXPIRED, RETRY
from tests.driver.test_failures import books, one

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pgreaper.handlers import Call
    from tests.driver.conftest import Beside


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What hanging calls wait for; opened at the end of the test."""
    gate = threading.Event()
    yield gate
    gate.set()


@pytest.fixture(params=["sync", "async"])
def hangs(request: pytest.FixtureRequest, gate: threading.Event) -> Callable[[set[str]], Any]:
    """A function that makes a handler which hangs for these keys."""

    def hangs(keys: set[str]) -> Any:
        def sync(call: Call) -> None:
            if call.key in keys:
                gate.wait(60)

        async def coroutine(call: Call) -> None:
            if call.key in keys:
                await asyncio.sleep(60)

        return sync if request.param == "sync" else coroutine

    return hangs


def test_a_call_that_takes_too_long_fails_its_hold_and_nobody_elses(db, holds, work, hangs):
    """Transient, as HandlerTimeout; the others expire meanwhile, with no transaction held and no lease lost."""
    holds.due(10)
    holds.register(backoff_base="1 hour")

    run, lines = work(handler=hangs({"3"}), handler_timeout=0.3, concurrency=4)

    assert (run.outcomes, run.exit_code) == ({EXPIRED: 9, RETRY: 1}, 1)
    assert books(db) == [("3", "HandlerTimeout", 1, False)]
    assert run.seconds < 20
    assert one(db, "select count(*) from pgreaper.leases") == 0
    assert any("1 hold failed, to be tried again: HandlerTimeout" in line for line in lines)


def test_a_call_within_its_time_is_left_alone(db, holds, work, gate):
    """And the time of each call is its own: that of the run and of other calls does not count."""
    holds.due(6)
    holds.register()
    turns = iter(range(100))

    def handler(call: Call) -> None:
        next(turns)
        gate.wait(0.15)

    run, lines = work(handler=handler, handler_timeout=0.6, concurrency=1)

    assert (run.outcomes, run.exit_code, lines) == ({EXPIRED: 6}, 0, [])


def test_a_coroutine_is_cancelled_and_frees_its_place(db, holds, work):
    """One place only, and the calls after it are made."""
    holds.due(3)
    holds.register(backoff_base="1 hour")
    ends: list[str] = []

    async def handler(call: Call) -> None:
        if call.key == "1":
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                ends.append(call.key)
                raise

    run, _ = work(handler=handler, handler_timeout=0.2, concurrency=1)

    assert (run.outcomes, ends) == ({EXPIRED: 2, RETRY: 1}, ["1"])


def test_a_thread_that_hangs_keeps_its_place(db, holds, work, gate):
    """Never more calls at once than were allowed, the given up one included."""
    holds.due(6)
    holds.register(backoff_base="1 hour")
    lock, running, most = threading.Lock(), [0], [0]

    def handler(call: Call) -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        gate.wait(60 if call.key == "1" else 0.2)
        with lock:
            running[0] -= 1

    run, lines = work(handler=handler, handler_timeout=0.5, concurrency=2)

    assert (run.outcomes, most) == ({EXPIRED: 5, RETRY: 1}, [2])
    assert lines[-1] == "left behind: 1 call of the handler that did not end"


def test_a_threads_late_result_is_ignored(db, holds, work, gate):
    """It is told by `lease_lost`, and its success expires nothing."""
    holds.due(4)
    holds.register(backoff_base="1 hour")
    told: list[bool] = []

    def handler(call: Call) -> None:
        if call.key == "1":
            told.append(call.lease_lost.wait(10))  # and returns at once, well, before its failure is in the books
        else:
            gate.wait(0.3)

    run, _ = work(handler=handler, handler_timeout=1, concurrency=2)

    assert (run.outcomes, told) == ({EXPIRED: 3, RETRY: 1}, [True])
    assert holds.states()[1] == "held"
    assert books(db) == [("1", "HandlerTimeout", 1, False)]


def test_a_call_that_still_runs_is_not_made_a_second_time(db, holds, daemon, gate):
    """Its hold comes back while the thread goes on: put off, uncharged."""
    holds.due(2)
    holds.register(backoff_base="0", backoff_cap="0")
    calls: list[str] = []

    def handler(call: Call) -> None:
        calls.append(call.key)
        if call.key == "1":
            gate.wait(60)

    def script(beside: Beside) -> None:
        beside.wait_for(lambda: one(db, "select exists (select from pgreaper.events where error_class = 'Skip')"))

    run, _ = daemon(script, handler=handler, handler_timeout=0.2, concurrency=2, poll=0.1)

    assert calls.count("1") == 1
    assert run.policies["holds"].skipped >= 1
    assert books(db)[0][2] == 1, "one attempt, for the call that was made"


@pytest.mark.parametrize("daemon", [False, True])
def test_when_no_place_is_left_the_process_ends_and_says_why(db, holds, work, gate, daemon):
    """Every thread hangs: no live zombie, exit 1, so that the next process has its places again."""
    holds.due(5)
    holds.register(backoff_base="1 hour")

    run, lines = work(handler=lambda call: gate.wait(60), handler_timeout=0.2, concurrency=2, daemon=daemon)

    assert (run.ended, run.exit_code, run.outcomes) == ("failed", 1, {RETRY: 2})
    assert "all 2 calls that may run at once have outlived their time" in str(run.trouble)
    assert lines[-1] == "left behind: 2 calls of the handler that did not end"
    assert [row[1:] for row in books(db)] == [("HandlerTimeout", 1, False)] * 2, "the others were given back"
    assert one(db, "select count(*) from pgreaper.leases") == 0

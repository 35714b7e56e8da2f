"""Handlers in this process, against a real server: what is called, what is settled, and who is told."""

from __future__ import annotations

import asyncio
import functools
import re
import threading
import time
from collections import Counter
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.error import URLError

import pytest

from pgreaper.api import DEAD_LETTER, EXPIRED, LOCKED, NOT_ELIGIBLE, RETRY
from pgreaper.handlers import Call, DeadLetter, Retry, Skip

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import psycopg

WORKER = "application_name like 'pgreaper/%'"


def one(connection: psycopg.Connection[Any], query: str, *parameters: Any) -> Any:
    """The one value that a query answers."""
    ((value,),) = connection.execute(query, parameters or None).fetchall()
    return value


def transitions(db: psycopg.Connection[Any]) -> Counter[str]:
    """How often each key made the transition, by the trail."""
    return Counter(key for (key,) in db.execute("select unnest(keys) from pgreaper.transitions").fetchall())


def wait_for(condition: Callable[[], Any], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.005)


class Seen:
    """Counts calls: all of them, those that run, and the most that ever ran at once."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.most = 0
        self.limit = 0
        self.too_many = threading.Event()
        self._running = 0
        self._lock = threading.Lock()

    @property
    def keys(self) -> list[str]:
        return sorted((call.key for call in self.calls), key=int)

    @contextmanager
    def call(self, call: Call) -> Iterator[None]:
        with self._lock:
            self.calls.append(call)
            self._running += 1
            self.most = max(self.most, self._running)
            if self._running > self.limit > 0:
                self.too_many.set()
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture(params=["sync", "async"])
def flavour(request: pytest.FixtureRequest) -> Callable[[Callable[[Call], Any]], Any]:
    """A function that makes a handler of a plain function: as it is, or a coroutine that runs it in a thread."""

    def flavour(function: Callable[[Call], Any]) -> Any:
        if request.param == "sync":
            return function

        async def handler(call: Call) -> None:
            await asyncio.to_thread(function, call)

        return handler

    return flavour


# -- calls


def test_each_due_hold_is_called_once_and_then_expires(db, holds, work, seen, flavour):
    """The handler sees policy, key, deadline, attempt, payload and a key of its own; returning expires the hold."""
    due = holds.due(100)
    holds.ahead(3)
    holds.register(payload_columns=["customer_email", "status"])

    def handler(call: Call) -> None:
        with seen.call(call):
            assert call.payload["status"] == "held"

    run, lines = work(handler=flavour(handler))

    assert (run.expired, run.ended, run.exit_code, lines) == (100, "drained", 0, [])
    assert seen.keys == [str(i) for i in due]
    assert transitions(db) == Counter(seen.keys)
    assert len({call.idempotency_key for call in seen.calls}) == 100
    first = next(call for call in seen.calls if call.key == str(due[0]))
    deadline = one(db, "select expires_at from holds where id = %s", due[0])
    assert (first.policy, first.attempt, first.deadline) == ("holds", 1, deadline)
    assert first.payload == {"customer_email": "u1@example.com", "status": "held"}
    # The claims ended with their counts, none is left to lapse.
    assert one(db, "select sum(expired) from pgreaper.claims where ending = 'expired'") == 100
    assert one(db, "select count(*) from pgreaper.leases") == 0


def test_a_run_leaves_no_thread_behind(holds, work, flavour):
    """Those of the handler, of the event loop and of the lease end with the run."""
    holds.due(20)
    holds.register()
    before = set(threading.enumerate())

    work(handler=flavour(lambda call: None))

    for thread in set(threading.enumerate()) - before:
        if not thread.name.startswith("asyncio_"):  # the executor of to_thread, asyncio's own
            thread.join(5)
            assert not thread.is_alive(), thread


def test_a_plain_function_around_a_coroutine_is_awaited(holds, work, seen):
    """A decorator may hide that the handler is async: it must not count as done before it has run."""
    holds.due(3)
    holds.register()

    async def inner(call: Call) -> None:
        await asyncio.sleep(0)
        with seen.call(call):
            pass

    run, _ = work(handler=lambda call: functools.partial(inner, call)())

    assert (run.expired, len(seen.calls)) == (3, 3)


@pytest.mark.parametrize("concurrency", [1, 4])
def test_sync_calls_run_up_to_the_limit_at_once(holds, work, seen, concurrency):
    """As many as were allowed run at the same time, and never one more."""
    holds.due(5 * concurrency)
    holds.register()
    seen.limit = concurrency
    together = threading.Barrier(concurrency)

    def handler(call: Call) -> None:
        with seen.call(call):
            together.wait(timeout=10)  # broken, and so a failure, unless that many run at once
            seen.too_many.wait(0.05)  # time for one more to begin, if it may

    run, _ = work(handler=handler, concurrency=concurrency)

    assert (run.expired, seen.most) == (5 * concurrency, concurrency)


@pytest.mark.parametrize("concurrency", [1, 4])
def test_async_calls_run_up_to_the_limit_at_once(holds, work, seen, concurrency):
    """The same on the event loop."""
    holds.due(5 * concurrency)
    holds.register()
    seen.limit = concurrency
    together = asyncio.Barrier(concurrency)

    async def handler(call: Call) -> None:
        with seen.call(call):
            try:
                await asyncio.wait_for(together.wait(), 5)
            except TimeoutError:
                await together.abort()
                raise
            await asyncio.to_thread(seen.too_many.wait, 0.05)

    run, _ = work(handler=handler, concurrency=concurrency)

    assert (run.expired, seen.most) == (5 * concurrency, concurrency)


@pytest.mark.parametrize(("settings", "expected"), [({"once": True, "batch": 7}, 7), ({"max_rows": 11}, 11)])
def test_limits_of_a_run_limit_the_calls(holds, work, seen, settings, expected):
    """--once and --max-rows: nobody is called who is not expired in this run."""
    holds.due(50)
    holds.register()

    run, _ = work(handler=lambda call: seen.calls.append(call), **settings)

    assert (run.expired, len(seen.calls)) == (expected, expected)


def test_max_seconds_starts_no_more_calls(db, holds, work, seen):
    """What runs is finished and settled, what was not called is given back and costs nothing."""
    holds.due(20)
    holds.register()

    def handler(call: Call) -> None:
        seen.calls.append(call)
        wait_for(lambda: time.monotonic() > ends)

    ends = time.monotonic() + 0.4
    run, _ = work(handler=handler, max_seconds=0.4, concurrency=2)

    assert (run.ended, run.expired, len(seen.calls)) == ("max-seconds", 2, 2)
    assert run.policies["holds"].released == 14  # eight holds a call that may run are claimed
    assert one(db, "select count(*) from pgreaper.failures") == 0


# -- the lease


def test_the_lease_is_renewed_while_a_call_runs(db, connect, holds, work, seen, flavour):
    """A call of several leases' length: its hold is expired once, nobody took it back meanwhile."""
    holds.due(1)
    holds.register(lease="1 second")
    watcher = connect()

    def handler(call: Call) -> None:
        with seen.call(call):
            wait_for(lambda: one(watcher, "select claim_until - claimed_at > '2100 ms' from pgreaper.claims"))
            assert not call.lease_lost.is_set()

    run, _ = work(handler=flavour(handler))

    assert (run.expired, run.exit_code, len(seen.calls)) == (1, 0, 1)
    assert transitions(db) == {"1": 1}
    assert one(db, "select count(*) from pgreaper.events where token is not null") == 0


def test_a_lease_that_was_taken_back_is_told_and_nothing_expires_by_its_token(
    db, connect, holds, work, seen, set_clock, flavour
):
    """The hold is somebody else's: the running call hears of it, its result is dropped, the run goes on."""
    holds.due(1)
    holds.register(lease="1 second", backoff_base="1 hour")
    thief = connect()
    told = []

    def handler(call: Call) -> None:
        with seen.call(call):
            if len(seen.calls) == 1:
                set_clock(timedelta(minutes=5))
                thief.execute("select pgreaper.reaper_claim('holds')")
                told.append(call.lease_lost.wait(10))

    run, lines = work(handler=flavour(handler))

    assert told == [True]
    assert (run.expired, run.policies["holds"].lost, run.exit_code) == (0, 1, 0)
    assert any("lease of 1 hold is lost" in line for line in lines)
    assert holds.states() == {1: "held"}
    assert transitions(db) == {}

    set_clock(timedelta(hours=5))
    run, _ = work(handler=flavour(handler))
    assert (run.expired, transitions(db)) == (1, {"1": 1})
    assert [call.attempt for call in seen.calls] == [1, 2]
    assert len({call.idempotency_key for call in seen.calls}) == 1


def test_a_coroutine_whose_lease_is_lost_is_cancelled(connect, holds, work, set_clock):
    """It need not look: it is cancelled where it awaits."""
    holds.due(1)
    holds.register(lease="1 second", backoff_base="1 hour")
    thief = connect()
    ends = []

    async def handler(call: Call) -> None:
        set_clock(timedelta(minutes=5))
        thief.execute("select pgreaper.reaper_claim('holds')")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    run, _ = work(handler=handler)

    wait_for(lambda: ends == ["cancelled"])
    assert (run.expired, run.seconds < 10) == (0, True)


@pytest.fixture
def blocked(connect) -> Callable[[], psycopg.Connection[Any]]:
    """A function that locks every lease, so that none can be renewed until the connection rolls back."""

    def block() -> psycopg.Connection[Any]:
        blocker: psycopg.Connection[Any] = connect(autocommit=False)
        blocker.execute("select from pgreaper.claims for update")
        return blocker

    return block


def test_c010_without_renewal_there_is_no_final_write(db, holds, work, seen, blocked, set_clock):
    """The renewal is blocked for a whole lease: the call is told, and its success is not written by that token."""
    holds.due(1)
    holds.register(lease="1 second")
    told = []

    def handler(call: Call) -> None:
        with seen.call(call):
            if len(seen.calls) == 1:
                blocker = blocked()
                told.append(call.lease_lost.wait(5))
                blocker.rollback()

    _, lines = work(handler=handler)
    assert told == [True]
    assert any("could not be renewed" in line for line in lines)
    set_clock(timedelta(hours=1))
    work(handler=handler)

    # Given back, uncharged, and expired by another claim.
    endings = db.execute("select ending, t.token is not null from pgreaper.claims left join pgreaper.transitions t"
                         " using (token) order by claimed_at").fetchall()  # fmt: skip
    assert endings[0] == ("released", False)
    assert endings[-1] == ("expired", True)
    assert transitions(db) == {"1": 1}
    assert [call.attempt for call in seen.calls] == [1, 1]
    assert len({call.idempotency_key for call in seen.calls}) == 1


def test_c010_a_renewal_comes_with_two_thirds_of_the_lease_to_spare(db, connect, holds, work, flavour):
    """At a third of the lease, so that one that fails can be made again: more than half of it is left each time."""
    db.execute("""
        create table renewals (at int generated always as identity, spare interval);
        create function note() returns trigger language plpgsql as $$ begin
          insert into public.renewals (spare) values (old.claim_until - clock_timestamp()); return null; end $$;
        create trigger note after update of claim_until on pgreaper.claims
          for each row when (new.claim_until > old.claim_until) execute function note();
    """)
    holds.due(1)
    holds.register(lease="1500 ms")
    watcher = connect()

    def handler(call: Call) -> None:
        wait_for(lambda: one(watcher, "select count(*) >= 3 from renewals"))

    run, _ = work(handler=flavour(handler))

    assert run.expired == 1
    assert one(db, "select min(spare) > '750 ms' from renewals")


def test_c010_a_lease_whose_connection_is_cut_is_renewed_before_anything_is_written(db, connect, holds, work, seen):
    """Cut while the lease runs out and somebody takes it back: the late success is not written by the old token."""
    holds.due(1)
    holds.register(lease="1 second", backoff_base="1 hour")
    other = connect()

    def handler(call: Call) -> None:
        seen.calls.append(call)
        other.execute("update pgreaper.claims set claim_until = now() - interval '1 s', session_pid = null")
        other.execute("select pgreaper.reaper_claim('holds')")
        cut(other)

    run, lines = work(handler=handler)

    assert (run.expired, run.policies["holds"].lost, len(seen.calls)) == (0, 1, 1)
    assert transitions(db) == {}
    assert any("is lost" in line for line in lines)


def test_a_call_that_does_not_listen_is_not_doubled(db, holds, work, seen, blocked):
    """It lost its lease and runs on: the hold is put off, and no second call runs beside it."""
    holds.due(1)
    holds.register(lease="1 second")

    def handler(call: Call) -> None:
        with seen.call(call):
            if len(seen.calls) == 1:
                blocker = blocked()
                call.lease_lost.wait(5)
                blocker.rollback()
                wait_for(lambda: one(blocker, "select count(*) from pgreaper.failures"))

    run, _ = work(handler=handler, concurrency=2)

    assert (seen.most, len(seen.calls), run.policies["holds"].skipped) == (1, 1, 1)
    assert one(db, "select attempts from pgreaper.failures") == 0
    assert holds.states() == {1: "held"}


def test_no_transaction_is_open_while_a_handler_runs(connect, holds, work, flavour):
    """Seen from outside: the worker's session is idle, and not in a transaction."""
    holds.due(5)
    holds.register()
    watcher, lock, states = connect(), threading.Lock(), []

    def handler(call: Call) -> None:
        with lock:
            wait_for(lambda: one(watcher, f"select state <> 'active' from pg_stat_activity where {WORKER}"))
            states.extend(watcher.execute(f"select state, xact_start from pg_stat_activity where {WORKER}").fetchall())

    run, _ = work(handler=flavour(handler), concurrency=1)

    assert (run.expired, set(states), len(states)) == (5, {("idle", None)}, 5)


def test_c070_a_short_idle_in_transaction_timeout_does_no_harm(db, connect, holds, work):
    """500 ms for the session, a call that takes longer: the connection is still the same."""
    db.execute(f'alter database "{db.info.dbname}" set idle_in_transaction_session_timeout = 500')
    holds.due(1)
    holds.register()
    watcher = connect()

    def handler(call: Call) -> None:
        pid = one(watcher, f"select pid from pg_stat_activity where {WORKER}")
        quiet = "select clock_timestamp() - state_change > '700 ms' from pg_stat_activity where pid = %s"
        wait_for(lambda: one(watcher, quiet, pid))

    run, lines = work(handler=handler)

    assert (run.expired, run.reconnects, lines) == (1, 0, [])


# -- verdicts


def refused() -> Exception:
    return URLError(ConnectionRefusedError(111, "secret"))


@pytest.mark.parametrize(
    ("error", "kind", "error_class", "attempts", "delay"),
    [
        (TimeoutError("secret"), "retry", "TimeoutError", 1, None),
        (ConnectionResetError("secret"), "retry", "ConnectionResetError", 1, None),
        (refused(), "retry", "URLError", 1, None),
        (Retry(), "retry", "Retry", 1, None),
        (Retry(after=3600), "retry", "Retry", 1, 3600),
        (Retry(after=timedelta(hours=2)), "retry", "Retry", 1, 7200),
        (Retry(after=1e300), "retry", "Retry", 1, 315360000),
        (ValueError("secret"), "retry", "ValueError", 1, None),
        (DeadLetter("secret"), "dead-letter", "DeadLetter", 1, None),
        (Skip(), "retry", "Skip", 0, None),
        (Skip(after=600), "retry", "Skip", 0, 600),
        (type("Ошибка", (Exception,), {})("secret"), "retry", r"\u041e\u0448\u0438\u0431\u043a\u0430", 1, None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_what_a_handler_raises_is_in_the_books(db, holds, work, flavour, error, kind, error_class, attempts, delay):
    """Row by row: retry or dead letter, the class and never the message, the attempt, the delay."""
    holds.due(1)
    holds.register(permanent_attempts=2, backoff_base="10 minutes")

    def handler(call: Call) -> None:
        raise error

    run, lines = work(handler=flavour(handler))

    row = db.execute(
        "select kind, error_class, attempts, key, sqlstate from pgreaper.events where token is not null"
    ).fetchall()
    assert row == [(kind, error_class, attempts, "1", None)]
    failure = db.execute("select not_before = 'infinity', error_class, attempts from pgreaper.failures").fetchall()
    assert failure == [(kind == "dead-letter", error_class, attempts)]
    if delay is not None:
        assert one(db, "select extract(epoch from not_before - failed_at)::float8 from pgreaper.failures") == delay
    elif kind == "retry":
        assert one(db, "select not_before - failed_at >= '10 minutes' from pgreaper.failures")
    assert holds.states() == {1: "held"}
    skipped = isinstance(error, Skip)
    assert run.exit_code == (0 if skipped else 1)
    assert run.outcomes == ({} if skipped else {DEAD_LETTER if kind == "dead-letter" else RETRY: 1})
    assert run.policies["holds"].skipped == skipped
    assert any(error_class in line for line in lines) == (not skipped)
    assert "secret" not in str(lines)
    assert not one(db, "select exists (select from pgreaper.events as e where e::text like '%secret%')")


def test_a_failing_hold_leaves_the_others_alone(db, holds, work):
    """One dead letter and one retry in a batch: the rest of it expires."""
    holds.due(10)
    holds.register(backoff_base="1 hour")

    def handler(call: Call) -> None:
        if call.key == "3":
            raise ValueError
        if call.key == "4":
            raise TimeoutError

    run, _ = work(handler=handler)

    assert run.outcomes == {EXPIRED: 8, RETRY: 1, DEAD_LETTER: 1}
    assert run.exit_code == 1
    assert [i for i, s in holds.states().items() if s == "held"] == [3, 4]
    assert db.execute("select expired, retry, dead_letter from pgreaper.claims").fetchall() == [(8, 1, 1)]


def test_a_transient_failure_uses_up_its_budget(db, holds, work, seen, set_clock):
    """max_attempts calls with the same idempotency key, counted by `attempt`, then a dead letter."""
    holds.due(1)
    holds.register(max_attempts=3, backoff_base="1 second")

    def handler(call: Call) -> None:
        with seen.call(call):
            raise TimeoutError

    for hours in range(5):
        set_clock(timedelta(hours=hours))
        work(handler=handler)

    assert [call.attempt for call in seen.calls] == [1, 2, 3]
    assert len({call.idempotency_key for call in seen.calls}) == 1
    assert one(db, "select count(*) from pgreaper.dead_letters where error_class = 'TimeoutError'") == 1


def test_a_hold_consumed_during_its_call_is_left_alone(db, connect, holds, work):
    """The application wins: the guard is the transition's, not the claim's."""
    holds.due(2)
    holds.register()
    application = connect()

    def handler(call: Call) -> None:
        if call.key == "1":
            application.execute("update holds set status = 'consumed' where id = 1")

    run, _ = work(handler=handler)

    assert run.outcomes == {EXPIRED: 1, NOT_ELIGIBLE: 1}
    assert run.exit_code == 0
    assert holds.states() == {1: "consumed", 2: "expired"}


def test_a_locked_hold_is_not_called_for_again(connect, holds, work, seen):
    """The handler is done with it and only the row is not to be had: the transition is tried again, the call is not."""
    holds.due(1)
    holds.register()
    application, watcher = connect(autocommit=False), connect()

    def let_go() -> None:
        tried = f"select query like '%reaper_expire%' and state = 'idle' from pg_stat_activity where {WORKER}"
        wait_for(lambda: one(watcher, tried))
        application.rollback()

    def handler(call: Call) -> None:
        with seen.call(call):
            application.execute("select from holds where id = 1 for update")
            threading.Thread(target=let_go).start()

    run, _ = work(handler=handler)

    assert (run.outcomes, run.policies["holds"].claims, seen.keys) == ({EXPIRED: 1}, 1, ["1"])


def test_holds_that_stay_locked_end_the_run(connect, holds, work, seen):
    """Called once, found locked for as long as it seemed worth it, left for the next run; nobody waits for the lock."""
    holds.due(1)
    holds.register()
    connect(autocommit=False).execute("select from holds where id = 1 for update")

    run, _ = work(handler=lambda call: seen.calls.append(call))

    assert (run.outcomes, run.exit_code) == ({LOCKED: len(seen.calls)}, 0)
    assert len(seen.calls) <= 2


def test_a_handler_that_always_fails_does_not_kill_every_hold(db, holds, work, seen):
    """Eight times the same and no success: the handler is to blame; the others are given back uncharged, exit 1."""
    holds.due(500)
    holds.register()

    def handler(call: Call) -> None:
        with seen.call(call):
            raise KeyError("no such column")

    run, lines = work(handler=handler)

    assert run.exit_code == 1
    assert one(db, "select count(*) from pgreaper.dead_letters") == 8
    assert one(db, "select count(*) from pgreaper.failures") == 8
    assert len(seen.calls) <= 16
    assert any("times in a row" in line and "KeyError" in line for line in lines)


def test_a_daemon_goes_on_when_the_handler_works_again(db, holds, work, seen):
    """It tries one hold after a pause, and when that succeeds the rest: nobody has to press a button."""
    holds.due(30)
    holds.register()

    def handler(call: Call) -> None:
        with seen.call(call):
            if len(seen.calls) <= 9:
                raise KeyError

    run, _ = work(handler=handler, concurrency=1, daemon=True, max_rows=21)

    assert run.ended == "max-rows"
    assert (run.outcomes, len(seen.calls)) == ({DEAD_LETTER: 9, EXPIRED: 21}, 30)
    sizes = db.execute("select holds from pgreaper.claims order by claimed_at").fetchall()
    assert sizes[:3] == [(8,), (1,), (1,)]


def test_a_transition_that_fails_for_all_stops_the_calls(db, connect, holds, work, seen):
    """The policy is suspended: no more calls for holds that cannot be expired, nobody is charged, exit 1."""
    db.execute("alter table holds add constraint never_expired check (status <> 'expired')")
    holds.due(300)
    holds.register(permanent_attempts=9)
    watcher, lock = connect(), threading.Lock()

    def handler(call: Call) -> None:
        with seen.call(call):
            if len(seen.calls) > 8:
                with lock:
                    wait_for(lambda: one(watcher, "select failing_at is not null from pgreaper.cursors"))

    run, lines = work(handler=handler, batch=200)

    assert run.exit_code == 1
    assert run.policies["holds"].suspended
    assert any("is suspended" in line and "23514" in line for line in lines)
    assert not run.outcomes, "charged to nobody, so no retry"
    assert len(seen.calls) <= 32
    assert one(db, "select count(*) from pgreaper.dead_letters") == 0


# -- trouble


def cut(connection: psycopg.Connection[Any]) -> None:
    """Terminate the worker's backend."""
    assert one(connection, f"select bool_and(pg_terminate_backend(pid, 5000)) from pg_stat_activity where {WORKER}")


def test_a_connection_cut_during_a_call_costs_nothing(db, connect, holds, work, seen, flavour):
    """A new connection, the lease renewed from there, the same token: called once, expired once, charged to nobody."""
    holds.due(3)
    holds.register()
    other = connect()

    def handler(call: Call) -> None:
        with seen.call(call):
            if len(seen.calls) == 1:
                cut(other)

    run, lines = work(handler=flavour(handler), concurrency=1)

    assert (run.expired, run.reconnects, run.exit_code) == (3, 1, 0)
    assert transitions(db) == {"1": 1, "2": 1, "3": 1}
    assert seen.keys == ["1", "2", "3"]
    assert one(db, "select count(*) from pgreaper.events where token is not null") == 0
    assert lines[-1] == "connected again"


def test_a_renewal_binds_the_claim_to_the_new_session(db, connect, holds, work):
    """While the call still runs: otherwise the claim would be taken back seconds later, its session being gone."""
    holds.due(1)
    holds.register(lease="1 second")
    other = connect()

    def handler(call: Call) -> None:
        before = one(other, "select session_pid from pgreaper.claims")
        assert before == one(other, f"select pid from pg_stat_activity where {WORKER}")
        cut(other)
        wait_for(lambda: one(other, "select session_pid from pgreaper.claims") != before)
        assert one(other, f"select session_pid = pid from pgreaper.claims, pg_stat_activity where {WORKER}")

    run, _ = work(handler=handler)

    assert (run.expired, run.reconnects) == (1, 1)


@pytest.mark.parametrize("nth", [0, 1], ids=["the transition", "the end of the claim"])
def test_an_acknowledgement_that_gets_lost_is_asked_for_again(db, holds, work, proxy, seen, nth):
    """Committed, and the reply never came: the same answer on a new connection, no second call, no failure."""
    holds.due(1)
    holds.register()
    proxy.drop_reply("reaper_expire", after=nth)

    run, lines = work(url=proxy.url, handler=lambda call: seen.calls.append(call))

    assert proxy.dropped == 1
    assert (run.outcomes, run.exit_code, len(seen.calls)) == ({EXPIRED: 1}, 0, 1)
    assert transitions(db) == {"1": 1}
    assert not [line for line in lines if "lost:" in line]


def test_a_failure_whose_acknowledgement_gets_lost_is_charged_once(db, holds, work, proxy):
    """reaper_fail is asked again and does not count twice."""
    holds.due(1)
    holds.register(backoff_base="1 hour")
    proxy.drop_reply("reaper_fail")

    def handler(call: Call) -> None:
        raise TimeoutError

    run, _ = work(url=proxy.url, handler=handler)

    assert (proxy.dropped, run.outcomes) == (1, {RETRY: 1})
    assert db.execute("select attempts from pgreaper.events where token is not null").fetchall() == [(1,)]


def test_a_statement_timeout_halves_what_is_settled_at_once(db, holds, work, seen):
    """Too many transitions for one statement: settled in parts, nobody is called twice."""
    db.execute("""
        create function slow() returns trigger language plpgsql as $$ begin perform pg_sleep(0.03); return new; end $$;
        create trigger slow before update on holds for each row execute function slow();
    """)
    db.execute(f'alter database "{db.info.dbname}" set statement_timeout = 400')
    holds.due(30)
    holds.register()

    run, _ = work(handler=lambda call: seen.calls.append(call), concurrency=4)

    assert (run.expired, run.exit_code, len(seen.calls)) == (30, 0, 30)


def test_an_interrupt_ends_the_run(db, holds, work, flavour):
    """Not swallowed as a failed hold: the run ends with it; its hold is charged as a crash, the others are not."""
    holds.due(5)
    holds.register(backoff_base="1 hour")

    def handler(call: Call) -> None:
        if call.key == "2":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work(handler=flavour(handler), concurrency=1)

    assert db.execute("select key, error_class, attempts from pgreaper.failures").fetchall() == [
        ("2", "KeyboardInterrupt", 1)
    ]
    assert list(holds.states().values()) == ["expired", "held", "held", "held", "held"]
    assert one(db, "select count(*) from pgreaper.leases") == 0


@pytest.mark.parametrize(
    "error",
    [SystemExit(0), SystemExit("Mrs Smith"), GeneratorExit(), BaseExceptionGroup("x", [SystemExit(0)])],
    ids=repr,
)
def test_what_would_end_the_process_fails_its_call_and_nothing_else(db, holds, work, flavour, error):
    """The hold is charged as for any exception, the others expire, and one line names the handler."""
    holds.due(5)
    holds.register()

    def handler(call: Call) -> None:
        if call.key == "2":
            raise error

    run, lines = work(handler=flavour(handler), concurrency=1)

    kind = type(error).__name__
    assert (run.ended, run.exit_code, run.expired) == ("drained", 1, 4)
    assert db.execute("select key, error_class from pgreaper.dead_letters").fetchall() == [("2", kind)]
    (line,) = [line for line in lines if "does not end the process" in line]
    assert re.fullmatch(rf"policy holds: the handler \S+:.+ raised {kind}: that fails its call, .*", line)
    assert "Smith" not in "".join(lines)


@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain-around-async"])
def test_a_task_of_a_handlers_own_that_exits_does_not_stop_the_loop(db, holds, work, plain):
    """asyncio lets SystemExit out of the loop; the calls that share the loop, and the later ones, go on."""
    holds.due(6)
    holds.register()

    async def leave() -> None:
        raise SystemExit(0)

    async def handler(call: Call) -> None:
        if call.key == "2":
            await asyncio.create_task(leave())
        await asyncio.sleep(0.01)

    run, _ = work(handler=(lambda call: handler(call)) if plain else handler, concurrency=2)

    assert (run.expired, run.exit_code) == (5, 1)
    assert db.execute("select key, error_class from pgreaper.dead_letters").fetchall() == [("2", "SystemExit")]

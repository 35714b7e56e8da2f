"""
The session of a run: one connection, kept alive through trouble, and the wish to end.

Owns how a run connects and waits for a database that is away, how a call is made again when something was in its
way, how a lost connection is told from a failure of the call, and what signals mean.  Knows nothing about holds:
the worker, the relay and the listener each put their own loop on top.

One connection, in autocommit, one statement a call.  Trouble of the environment (a lost connection, a deadlock,
a read-only node) is waited out and charged to nobody.
"""

import math
import os
import random
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import FrameType
from typing import Any, Final, TypeVar

import psycopg
from psycopg import IsolationLevel

from pgreaper.api import Backend, Reaper, ServerState
from pgreaper.connection import Address, Connection, Unreachable, connect
from pgreaper.errors import (
    DatabaseBusy,
    DatabaseUnavailable,
    NotInstalled,
    QueryCancelled,
    ReaperError,
    StatementTimeout,
    TableLocked,
    VersionMismatch,
    WrongTransaction,
    translate,
)
from pgreaper.lifeline import Lifeline
from pgreaper.logs import ERROR, WARNING, Event, Log
from pgreaper.text import duration

_R = TypeVar("_R")

# A daemon that sleeps says this often that it lives.
_BEAT_EVERY: Final = 5.0
# An environment that does not come back within this many seconds ends a run that may end.
_PATIENCE: Final = 20.0
_BACKOFF_FIRST: Final = 0.1
_BACKOFF_CAP: Final = 30.0
# Deadlocks and the like: this many tries, the pauses growing from a few milliseconds.
BUSY_TRIES: Final = 6
REPORT_EVERY: Final = 60.0
"""Seconds: what goes on for long is told this often."""
# Somebody who waits this long after Ctrl-C is told what for.
_NOTICEABLE: Final = 0.3
# Our clock and the database's are compared this often, in seconds, and told when they are further apart than that.
_COMPARE_EVERY: Final = 60.0
_SKEW_TOLERATED: Final = 1.0
# While connecting nothing is held, so there is nothing to wait for.
_CONNECT_GRACE: Final = 1.5


@dataclass(slots=True, kw_only=True)
class Ending:
    """
    How a run of the worker, the listener or the relay came to its end.

    ``trouble`` is the error that ended it, if one did.  ``left_with`` is the exit code of a run that was left
    behind: its main thread hangs.
    """

    ended: str = "drained"
    seconds: float = 0.0
    reconnects: int = 0
    trouble: ReaperError | None = None
    signal: int | None = None
    forced: bool = False
    left_with: int | None = None

    @property
    def decided(self) -> int | None:
        """The exit code, where the end decides it and not what was done: 128 + n after two signals."""
        if self.left_with is not None:
            return self.left_with
        if self.forced and self.signal is not None:
            return 128 + self.signal
        if self.ended == "signal":
            return 0
        return None if self.trouble is None else self.trouble.exit_code


class Stopped(BaseException):
    """Raised out of a connection attempt, or out of a wait, when a signal says stop."""


class Stop:
    """
    The wish to end, as signals express it.

    The first asks: the worker finishes what it holds and claims nothing more.  The second
    cancels the running query, so that the worker gives its claim back; the third ends the
    process where it stands, and the lease lapses by itself.  A query still running near the
    end of ``timeout`` seconds is cancelled too, and at the end of them the process ends.
    """

    def __init__(self, timeout: float, log: Log, beat: Callable[[], None], leave: Callable[[int], None]) -> None:
        self.timeout = timeout
        self._beat = beat
        self._leave = leave
        self.signal: int | None = None
        self.forced = False
        self._log = log
        self._end = math.inf
        self._received = 0
        self._connecting = False
        self._connection: psycopg.Connection[Any] | None = None
        self._canceller: threading.Thread | None = None
        self._finished = threading.Event()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self._received > 0

    @property
    def patience(self) -> float:
        """Seconds that calls of a handler may still take; what is left then is for telling the database."""
        return self._end - time.monotonic() - 1.25 * self._reserve

    @property
    def _reserve(self) -> float:
        """Seconds before the end at which a running query is cancelled."""
        return max(1.0, self.timeout / 4)

    def fileno(self) -> int:
        """Become readable with the first signal, and stay so."""
        return self._reader

    @contextmanager
    def listening(self) -> Iterator[None]:
        """
        Handle SIGTERM, SIGINT and SIGHUP inside the block; only the main thread may.

        SIGHUP says that the terminal has gone.  What was ignored when we started stays so: ``nohup`` means it.
        """
        wanted = [signal.SIGTERM]
        wanted += [n for n in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._on_signal) for number in wanted}
        try:
            yield
        finally:
            self._finished.set()
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(self._writer)
            os.close(self._reader)

    @contextmanager
    def connecting(self) -> Iterator[None]:
        """Let a signal break off the block: nothing is held while a connection is being made."""
        self._connecting = True
        try:
            if self.requested:
                raise Stopped
            yield
        finally:
            self._connecting = False

    def watch(self, connection: "psycopg.Connection[Any] | None") -> None:
        """Name the connection whose query is to be cancelled."""
        self._connection = connection

    def wait(self, seconds: float) -> None:
        """Sleep, or raise at once when told to stop."""
        end = time.monotonic() + seconds
        while not self.requested and (left := end - time.monotonic()) > 0:
            self._beat()
            select.select([self._reader], [], [], min(left, _BEAT_EVERY))
        if self.requested:
            raise Stopped

    def settle(self) -> None:
        """Wait until a cancel request on its way has arrived, so that it cannot hit the next statement."""
        if self._canceller is not None:
            self._canceller.join(2.0)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._received += 1
        if self._received == 1:
            self.signal = number
            self._end = time.monotonic() + self.timeout
            os.write(self._writer, b"x")
            threading.Thread(target=self._deadline, daemon=True).start()
            if self._connecting:
                raise Stopped
        elif self._received == 2:
            self.forced = True
            self._cancel()
        else:
            os._exit(128 + number)

    def _cancel(self) -> None:
        connection = self._connection
        if (
            connection is not None
            and not connection.closed
            and (self._canceller is None or not self._canceller.is_alive())
        ):
            self._canceller = threading.Thread(target=_cancel_quietly, args=(connection,), daemon=True)
            self._canceller.start()

    def _deadline(self) -> None:
        """Enforce the timeout from a thread of its own: the main one may be inside libpq."""
        end = self._end
        if self._finished.wait(min(_NOTICEABLE, self.timeout)):
            return
        if self._connecting:
            # Name resolution cannot be interrupted, but while connecting there is nothing to lose.
            if not self._finished.wait(min(_CONNECT_GRACE, self.timeout)) and self._connecting:
                self._leave(0)
        else:
            text = "stopping: finishing the batch in hand; a second signal cancels it"
            self._log(Event("worker.stopping", text))
        if self._finished.wait(max(end - time.monotonic() - self._reserve, 0.0)):
            return
        if not self.forced:
            self._log(Event("worker.canceling", "the query still runs: cancelling it", WARNING))
        while time.monotonic() < end:
            self._cancel()
            if self._finished.wait(min(0.5, max(end - time.monotonic(), 0.01))):
                return
        text = "the database does not answer; leaving, the lease lapses by itself"
        self._log(Event("worker.left", text, ERROR))
        self._leave(DatabaseUnavailable.exit_code)


def _cancel_quietly(connection: "psycopg.Connection[Any]") -> None:
    with suppress(psycopg.Error):  # the deadline comes all the same
        connection.cancel_safe(timeout=5.0)


class Session:
    """
    The connection of one run.  :meth:`connect` first, :meth:`close` last, the calls between them.

    ``stays``: the run is a daemon, which waits for its database for ever; one that ends waits twenty seconds.
    ``poll`` bounds a daemon's pauses between attempts, in seconds; ``beat`` is called whenever the run shows life.
    """

    def __init__(
        self,
        address: Address,
        *,
        name: str,
        log: Log,
        stop: Stop,
        stays: bool,
        poll: float,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.connection: Connection | None = None
        self.server: ServerState | None = None
        self.reconnects = 0
        self.skew: timedelta | None = None
        self._address = address
        self._log = log
        self._stop = stop
        self._stays = stays
        self._poll = poll
        self._beat = beat
        self._lifeline = Lifeline(address, name, log)
        self._troubled_since: float | None = None
        self._setbacks = 0
        self._compared_at = -math.inf
        self._told_skew = False
        self._said = ("", 0.0)
        self._connected_at = 0.0

    @property
    def is_direct(self) -> bool:
        """Whether the backend that answers is the one that libpq knows: behind a pooler it is not."""
        return (
            self.server is not None
            and self.connection is not None
            and self.server.backend.pid == self.connection.info.backend_pid
        )

    @property
    def backend(self) -> Backend:
        """The session of the connection, also of one that is lost."""
        assert self.server is not None  # noqa: S101
        return self.server.backend

    @property
    def age(self) -> float:
        """Seconds since the connection was made."""
        return time.monotonic() - self._connected_at

    def works(self) -> None:
        """Something went well on it: the next outage is another one."""
        self._troubled_since, self._setbacks = None, 0

    def close(self) -> None:
        """Close the connection and end the watch over it."""
        self._disconnect()
        self._lifeline.close()

    # -- calls

    def patiently(self, call: Callable[[Reaper], _R]) -> _R:
        """Run one call; a deadlock, a serialization failure or a lock that did not come is tried again."""
        for attempt in range(1, BUSY_TRIES + 1):
            try:
                return self.call(call)
            except DatabaseBusy:
                if attempt == BUSY_TRIES or self._stop.forced:
                    raise
                time.sleep(pause(attempt))
        raise AssertionError  # pragma: no cover

    def call(self, call: Callable[[Reaper], _R]) -> _R:
        """Run one call.  What a timeout cancelled raises StatementTimeout."""
        self._beat()
        connection = self.connection
        if connection is None or self.server is None:
            raise DatabaseUnavailable("the connection to the database is lost")
        began = time.monotonic()
        try:
            with self._lifeline.call():
                if self.server.repeats_reads:
                    # The role's default is another level.  A transaction of our own says what it needs;
                    # changing the session would leak through a pooler.
                    with _translated(), connection.transaction():
                        return call(Reaper(connection))
                return call(Reaper(connection))
        except QueryCancelled as error:
            cancelled = self._timed_out(connection, error, time.monotonic() - began) or error
        except DatabaseUnavailable as error:
            if error.sqlstate != "25P04" or self._stop.requested or not connection.closed:
                raise
            # transaction_timeout bounds a statement too, and takes the session with it.
            self.reconnect(error)
            cancelled = _timeout("transaction_timeout", error)
        raise cancelled

    def _timed_out(
        self, connection: "psycopg.Connection[Any]", error: QueryCancelled, took: float
    ) -> StatementTimeout | None:
        """A person's cancel has the same code as a timeout; but no timeout comes before its time."""
        if self._stop.requested or connection.closed:
            return None
        try:
            limit = Reaper(connection).statement_timeout()
        except ReaperError:
            return None
        if not 0 < limit <= took:
            return None
        return _timeout(f"statement_timeout ({duration(limit)})", error)

    def retrying(self, call: Callable[[Reaper], _R]) -> _R:
        """Run a call that may simply be repeated on a new connection."""
        while True:
            try:
                return self.patiently(call)
            except ReaperError as trouble:
                if not self.is_lost(trouble):
                    raise
                self.reconnect(trouble)

    def is_lost(self, trouble: ReaperError) -> bool:
        """Whether another connection is needed: this one is dead, or leads to a node that cannot work."""
        if not isinstance(trouble, (DatabaseUnavailable, WrongTransaction)):
            return False
        connection = self.connection
        if connection is None or connection.closed:
            return True
        if not (trouble.sqlstate or "").startswith(("25", "57P", "RP004")):
            return False
        # A trigger may say so too.  Whether the node can work is for the node to say.
        try:
            with self._lifeline.call():
                now = Reaper(connection).server()
        except ReaperError:
            return True
        return now.read_only or self.server is None or now.isolation != self.server.isolation

    def whose_lock(self, policy: str, error: ReaperError) -> ReaperError:
        """Something stayed locked (55P03).  If it is the whole target, say so, and who has it."""
        try:
            who = self.call(lambda r: r.table_lock(policy))
        except ReaperError:
            return error
        if who is None:
            return error
        return TableLocked(
            who, hint="Rows that are locked are skipped, a table cannot be.", sqlstate="55P03", original=error.original
        )

    def require_fit(self, error: ReaperError) -> None:
        """
        What a call did not find ends the run (VersionMismatch) when the database has a version for others, or none.

        Otherwise it was the instant in which the functions were exchanged, and trying again helps.
        """
        if isinstance(error, (VersionMismatch, NotInstalled)):
            try:
                self.retrying(lambda r: r.require_version())
            except NotInstalled as gone:
                raise _taken_out(gone) from None

    # -- connections

    def connect(self, *, first: bool = False) -> None:
        """Connect, waiting as long as this kind of run may wait.  Raises the trouble when that is over."""
        while True:
            try:
                self._open()
            except DatabaseUnavailable as trouble:
                if not self._may_wait(trouble, first=first):
                    raise
                self._pause(trouble)
            else:
                return

    def _open(self) -> None:
        with self._stop.connecting():
            connection = connect(self._address, name=self.name)
        self.connection = connection
        self._connected_at = time.monotonic()
        self._stop.watch(connection)
        self._lifeline.attach(connection)
        reaper = Reaper(connection)
        before = time.time()
        with self._lifeline.call():
            self.server = reaper.server()
        self._compared(before, self.server.clock, time.time())
        if self.server.backend.pid != connection.info.backend_pid:
            self._lifeline.pooled()
        reaper.require_version(self.server.version)
        if self.server.read_only:
            self._disconnect()
            raise DatabaseUnavailable(
                "the server is a standby: it is read-only"
                if self.server.standby
                else "the database is read-only for this role",
                hint="Connect to the primary (target_session_attrs=read-write finds it), or try later.",
                sqlstate="25006",
            )
        if self.server.repeats_reads:
            connection.isolation_level = IsolationLevel.READ_COMMITTED

    def compare_clocks(self) -> None:
        """Once a minute.  Nothing is decided by it; whoever reads our log beside the trail wants to know."""
        if time.monotonic() - self._compared_at < _COMPARE_EVERY:
            return
        before = time.time()
        try:
            now = self.call(lambda r: r.clock())
        except ReaperError:
            return  # What comes next meets the same trouble, and knows what to do.
        self._compared(before, now, time.time())

    def _compared(self, before: float, now: datetime, after: float) -> None:
        """The database said ``now`` between these two times of ours; their middle is the best guess."""
        self._compared_at = time.monotonic()
        if not 0 <= after - before <= _SKEW_TOLERATED:
            return  # The answer took too long to tell, or our clock was set meanwhile.
        ahead = (before + after) / 2 - now.timestamp()
        self.skew = timedelta(seconds=ahead)
        apart = abs(ahead) > _SKEW_TOLERATED
        if apart and not self._told_skew:
            which = "ahead of" if ahead > 0 else "behind"
            text = (
                f"this machine's clock is {duration(abs(ahead))} {which} the database's: nothing is decided by it,"
                " but times in its logs do not fit the trail"
            )
            self._log(Event("worker.clock", text, WARNING, seconds=ahead))
        elif self._told_skew and not apart:
            self._log(Event("worker.clock", "this machine's clock agrees with the database's again", seconds=ahead))
        self._told_skew = apart

    def _disconnect(self) -> None:
        connection, self.connection = self.connection, None
        self._stop.watch(None)
        self._lifeline.detach()
        if connection is not None:
            connection.close()

    def _may_wait(self, trouble: ReaperError, *, first: bool) -> bool:
        if self._stop.requested:
            raise Stopped
        if self._stays:
            return True
        if first and not (isinstance(trouble, Unreachable) and trouble.waiting):
            return False  # A cron job says at once what is wrong; it comes back anyway.
        self._troubled_since = self._troubled_since or time.monotonic()
        return time.monotonic() - self._troubled_since < _PATIENCE

    def _pause(self, trouble: ReaperError) -> None:
        """Back off before the next attempt, with one line that says so; in a long outage one a minute."""
        self._setbacks += 1
        # Within a poll of the server's return a daemon is back.
        cap = min(_BACKOFF_CAP, self._poll) if self._stays else _PATIENCE / 10
        seconds = backoff(self._setbacks, first=_BACKOFF_FIRST, cap=cap)
        now = time.monotonic()
        said, at = self._said
        grows = _BACKOFF_FIRST * 2.0 ** min(self._setbacks - 2, 40) < cap
        if grows or trouble.message != said or now - at >= REPORT_EVERY:
            self._log(
                Event(
                    "database.away",
                    f"{trouble.message}; trying again in {duration(seconds)}",
                    WARNING,
                    seconds=seconds,
                    code=trouble.code,
                    sqlstate=trouble.sqlstate,
                )
            )
            self._said = (trouble.message, now)
        self._stop.wait(seconds)

    def reconnect(self, trouble: ReaperError) -> None:
        """After trouble: a new connection.  Raises the trouble when this run has waited long enough for one."""
        self._disconnect()
        if not self._may_wait(trouble, first=False):
            raise trouble
        self._pause(trouble)
        try:
            self.connect()
        except NotInstalled as gone:
            raise _taken_out(gone) from None
        self.reconnects += 1
        self._log(Event("database.back", "connected again", counts={"reconnects": self.reconnects}))


def _taken_out(gone: NotInstalled) -> VersionMismatch:
    """It was there when the run began: taken out for good, or to be put back by a deployment."""
    return VersionMismatch(
        gone.message.replace("is not installed in", "is no longer installed in"),
        hint=gone.hint,
        sqlstate="RP005",
        original=gone.original,
    )


def backoff(attempt: int, *, first: float, cap: float) -> float:
    """Seconds before the attempt after the ``attempt``-th failure: doubling, capped, half of it random."""
    return min(cap, first * 2.0 ** min(attempt - 1, 40)) * random.uniform(0.5, 1.0)  # noqa: S311


def pause(attempt: int) -> float:
    """Seconds before a call that something locked stood in the way of is tried again."""
    return random.uniform(0.5, 1.0) * min(0.01 * 3.0 ** min(attempt, 40), 1.0)  # noqa: S311


@contextmanager
def _translated() -> Iterator[None]:
    """Errors of begin and commit, which no Reaper method sees."""
    failure = None
    try:
        yield
    except psycopg.Error as error:
        failure = translate(error)
    if failure is not None:
        raise failure


def _timeout(setting: str, error: ReaperError) -> StatementTimeout:
    return StatementTimeout(
        f"a statement took longer than {setting} allows",
        hint="Look for a slow trigger or a missing index, or give the role more time.",
        sqlstate=error.sqlstate,
        original=error.original,
    )

"""
Handlers: a function of yours, called for each leased hold before the transition.

Owns how a handler is found, called and judged, and the life of one lease while its
calls run.  Owns neither the connection nor the retry decision: what is asked of the
database goes through :class:`Desk`, which the worker lends, and what becomes of a
hold is decided in SQL.

A call runs in a thread, or on the event loop if the handler is ``async``.  The main
thread has the connection: it starts calls while there is a free place, renews the
lease at a third of its length, and settles what has finished.  No transaction is open
while a call runs.  A handler is called at least once per hold: :attr:`Call.idempotency_key`
stays the same over repetitions.
"""

import asyncio
import errno
import importlib
import inspect
import math
import os
import queue
import select
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar
from urllib.parse import quote

from pgreaper.api import EXPIRED, LOCKED, RETRY, TOO_SLOW, Reaper, TooEarly
from pgreaper.errors import (
    READ_ONLY,
    DatabaseBusy,
    InvalidInput,
    LeaseLost,
    QueryCancelled,
    ReaperError,
    StatementTimeout,
)
from pgreaper.logs import WARNING, Event, Log
from pgreaper.records import Hold
from pgreaper.text import duration, key, plural, visible

if TYPE_CHECKING:
    from uuid import UUID

_R = TypeVar("_R")

Handler = Callable[["Call"], Any]
"""What :func:`load` returns: a function of one :class:`Call`, or a coroutine function of one."""

# A finished call is settled after this many seconds at the latest, together with those that finish meanwhile.
_SETTLE_AFTER: Final = 0.1
# So many holds go into one statement.
_SETTLE_AT_MOST: Final = 500
# The transition of a hold that somebody has locked is tried again so often within the lease; the first pause.
_LOCKED_TRIES: Final = 5
_LOCKED_PAUSE: Final = 0.05
# What could not be settled because something stayed locked is given back after so many times, each of some seconds.
_BUSY_SETTLES: Final = 2
# What has cost the connection so many times is not asked again.
_LOSSES: Final = 2
# A renewal that did not come about is tried again after that many seconds, and nothing is written until then.
_RENEW_AGAIN: Final = 0.05
# A put-off hold comes back after a second at the earliest: a drain must not turn on the spot.
_SHORTEST_SKIP: Final = 1.0
# A hold whose earlier call does not end is looked at again after a lease, and at the latest after so long.
_LONGEST_LOOK_AWAY: Final = 60.0
_LONGEST_DELAY: Final = 10 * 365 * 86400.0
# So many calls in a row that fail alike, with no success between, speak of the handler and not of the holds.
SAME: Final = 8
# Trouble of the network that Python does not count among ConnectionError.
_UNREACHABLE: Final = frozenset({errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN})
_KEY_LENGTH: Final = 200
_WANTED: Final = "A handler is a function, or an async function, of one Call."


# -- what a handler sees


@dataclass(frozen=True, slots=True)
class Call:
    """
    One hold, as a handler gets it.

    ``payload`` has the policy's payload columns, read when the hold was claimed.  ``attempt`` counts from 1.
    ``lease_lost`` is set when the hold may be somebody else's by now, and when the call's own time is over: stop
    then, what the call returns is dropped.  ``idempotency_key`` is the same each time this hold is due by this
    deadline.
    """

    policy: str
    key: str
    deadline: datetime
    attempt: int
    payload: Mapping[str, Any] = field(hash=False)
    idempotency_key: str
    lease_lost: threading.Event = field(default_factory=threading.Event, compare=False, repr=False)


class _Signal(Exception):
    """What a handler raises to say what is to become of its hold.  The name of the class is recorded, nothing else."""

    # For a subclass that does not call our __init__.
    after: timedelta | None = None


class Retry(_Signal):
    """Try this hold again, after so many seconds (a number or a timedelta) or when the policy's backoff says."""

    def __init__(self, after: float | timedelta | None = None) -> None:
        super().__init__(after)
        self.after = _delay(after)


class Skip(_Signal):
    """Put this hold off without charging an attempt, for so many seconds (at least one) or the policy's first delay."""

    def __init__(self, after: float | timedelta | None = None) -> None:
        super().__init__(after)
        self.after = _delay(after, least=_SHORTEST_SKIP)


class DeadLetter(_Signal):
    """
    Give this hold up at once.

    The reason is for the handler's own log: it may tell of a person, so it is not recorded.  A subclass is
    recorded by its name: ``class CardExpired(DeadLetter): ...``.
    """

    def __init__(self, reason: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason


def _delay(after: float | timedelta | None, *, least: float = 0.0) -> timedelta | None:
    if after is None:
        return None
    seconds = after.total_seconds() if isinstance(after, timedelta) else float(after)
    if math.isnan(seconds):
        return None
    return timedelta(seconds=min(max(seconds, least), _LONGEST_DELAY))


def idempotency_key(policy: str, key: str, deadline: datetime) -> str:
    """
    One string for one incarnation of a hold, in ASCII and without spaces, so that it fits into an HTTP header.

    ``policy/key/2026-01-31T12:00:00.000000Z``, percent-encoded; beyond 200 characters the policy and a digest.
    A deadline before the year 1 is told as the database has it: ``-0043-03-15T…``, ``-infinity``.
    """
    if isinstance(deadline, TooEarly) and deadline.told is not None:
        moment = deadline.told
    else:
        moment = deadline.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ").rjust(27, "0")
    whole = f"{quote(policy, safe='')}/{quote(key, safe='')}/{moment}"
    if len(whole) <= _KEY_LENGTH:
        return whole
    return f"{quote(policy, safe='')[:100]}/sha256:{sha256(whole.encode()).hexdigest()}"


# -- finding it


def load(name: str) -> Handler:
    """
    Find ``package.module:function``; the current folder is searched too, last.

    Raises InvalidInput when there is no such module or attribute, or when it cannot be called with one Call.
    """
    module_name, colon, path = name.partition(":")
    shown = visible(name)
    if not colon or not all(part.isidentifier() for part in [*module_name.split("."), *path.split(".")]):
        raise InvalidInput(f"{shown} does not name a handler", hint="Write it as package.module:function.")
    found: Any = _module(module_name)
    for part in path.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise InvalidInput(
                f"module {module_name} has no {visible(path)}",
                hint=_near(part, vars(found) if hasattr(found, "__dict__") else ()),
            ) from None
        except (Exception, SystemExit) as error:
            raise InvalidInput(
                f"{shown} cannot be had, it raises {type(error).__name__}", hint="--debug shows where."
            ) from error
    what = _unfit(found)
    if what is not None:
        raise InvalidInput(f"{shown} {what}", hint=_WANTED)
    return found  # type: ignore[no-any-return]


def _module(name: str) -> Any:
    if not sys.flags.safe_path and not {"", str(os.getcwd())} & set(sys.path):  # noqa: PTH109
        sys.path.append("")
    failure: BaseException
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # noqa: BLE001  whatever a module of the user's does when imported
        failure = error
    missing = failure.name if isinstance(failure, ModuleNotFoundError) else None
    if missing is not None and (name == missing or name.startswith(missing + ".")):
        raise InvalidInput(
            f"there is no module {missing}",
            hint="It is looked for where Python looks (PYTHONPATH), and in the current folder.",
        ) from failure
    why = f": there is no module {visible(missing)}" if missing else ""
    raise InvalidInput(
        f"module {name} cannot be imported, it raises {type(failure).__name__}{why}", hint="--debug shows where."
    ) from failure


def _near(name: str, names: Iterable[str]) -> str:
    from difflib import get_close_matches

    near = get_close_matches(name, [n for n in names if not n.startswith("_")], 1)
    return f"Did you mean {near[0]}?" if near else _WANTED


def _unfit(found: Any) -> str | None:
    """Why this is no handler: what would otherwise only show as one dead letter per hold."""
    if not callable(found):
        return "cannot be called"
    if inspect.isclass(found):
        return "is a class"
    if inspect.isgeneratorfunction(found) or inspect.isasyncgenfunction(found):
        return "is a generator: its body would never run"
    try:
        inspect.signature(found).bind(object())
    except TypeError:
        return "cannot be called with one argument"
    except ValueError:
        pass  # Something written in C that does not tell.
    return None


def _is_async(handler: Handler) -> bool:
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None))  # noqa: B004


# -- judging it


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an exception means; the arguments of ``reaper_fail``."""

    error_class: str
    transient: bool = False
    retry_in: timedelta | None = None
    final: bool = False
    charged: bool = True


def judge(error: BaseException) -> Verdict:
    """
    Tell what an exception of a handler means for its hold.

    Retry, DeadLetter and Skip mean what they say.  TimeoutError, ConnectionError, an unreachable network, and
    whatever was raised from one of these are transient.  So is KeyboardInterrupt, which ends the run: to the hold
    it is a crash.  Anything else is permanent, SystemExit too.  Whatever the exception's own attributes raise,
    there is a verdict.
    """
    name = "Exception"
    try:
        name = type(error).__name__.encode("ascii", "backslashreplace").decode().strip() or name
        if isinstance(error, Retry):
            return Verdict(name, transient=True, retry_in=_delay(error.after))
        if isinstance(error, Skip):
            return Verdict(name, charged=False, retry_in=_delay(error.after, least=_SHORTEST_SKIP))
        if isinstance(error, DeadLetter):
            return Verdict(name, final=True)
        return Verdict(name, transient=is_interrupt(error) or _is_transient(error))
    except BaseException:  # noqa: BLE001  code of the user's; the failure is recorded all the same
        return Verdict(name)


def is_interrupt(error: BaseException) -> bool:
    """Whether an exception asks for the end of the run: a person does, whatever else a handler raises does not."""
    return isinstance(error, KeyboardInterrupt)


def wants_out(error: BaseException) -> bool:
    """Whether an exception would end a process if nobody caught it, SystemExit for one."""
    return not isinstance(error, (Exception, asyncio.CancelledError, KeyboardInterrupt))


def name_of(handler: Handler) -> str:
    """``package.module:function``, as far as it can be told."""
    inner = handler if hasattr(handler, "__qualname__") else type(handler)
    return f"{inner.__module__}:{inner.__qualname__}"


def _is_transient(error: BaseException, depth: int = 8) -> bool:
    if isinstance(error, (TimeoutError, ConnectionError)):
        return True
    if isinstance(error, BaseExceptionGroup):
        return depth > 0 and all(_is_transient(e, depth - 1) for e in error.exceptions)
    if isinstance(error, socket.gaierror):
        return error.errno == socket.EAI_AGAIN
    if isinstance(error, OSError) and error.errno in _UNREACHABLE:
        return True
    # URLError has it as its reason, requests as an argument, httpx and aiohttp as the cause.
    return depth > 0 and any(
        isinstance(inner, BaseException) and inner is not error and _is_transient(inner, depth - 1)
        for inner in (getattr(error, "reason", None), error.__cause__, *error.args[:1])
    )


# -- calling it


class Pool:
    """
    Calls a handler, at most ``concurrency`` times at once.

    Its threads are daemons: a handler that hangs does not keep the process.  A call that was given up keeps its
    place until it returns, so the limit holds for what really runs.
    """

    def __init__(self, handler: Handler, concurrency: int) -> None:
        self.concurrency = concurrency
        self.running: dict[int, Call] = {}
        self.gave_up = False
        self._handler = handler
        self._is_async = _is_async(handler)
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Call, BaseException | None]] = queue.SimpleQueue()
        self._threads = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_lock = threading.Lock()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)

    @property
    def has_room(self) -> bool:
        """Whether another call may be started."""
        return len(self.running) < self.concurrency

    def is_running(self, policy: str, key: str) -> bool:
        """Whether a call for this hold runs, be it one that was given up."""
        return any(call.key == key and call.policy == policy for call in self.running.values())

    def start(self, call: Call) -> None:
        """Begin a call.  There must be room."""
        assert self.has_room  # noqa: S101
        self.running[id(call)] = call
        if self._is_async:
            loop = self._running_loop()
            loop.call_soon_threadsafe(self._create_task, loop, call)
            return
        if self._threads < len(self.running):
            self._threads += 1
            threading.Thread(target=self._serve, name=f"handler-{self._threads}", daemon=True).start()
        self._calls.put(call)

    def give_up(self, calls: Iterable[Call]) -> None:
        """Tell calls that their lease is lost: the event is set, and a coroutine is cancelled.  From any thread."""
        for call in calls:
            self.gave_up = True
            call.lease_lost.set()
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._cancel, call)

    def finished(self) -> list[tuple[Call, BaseException | None]]:
        """Calls that have returned or raised since the last time."""
        try:
            while os.read(self._reader, 4096):
                pass
        except BlockingIOError:
            pass
        found = []
        while not self._results.empty():
            call, error = self._results.get()
            del self.running[id(call)]
            found.append((call, error))
        return found

    def wait(self, seconds: float, *others: int) -> None:
        """Sleep until a call ends, one of the other file descriptors is readable, or so many seconds have passed."""
        select.select([self._reader, *others], [], [], max(seconds, 0.0))

    def close(self) -> None:
        """Let idle threads end; whatever still runs is left to the end of the process."""
        self.finished()
        for _ in range(self._threads):
            self._calls.put(None)
        if self.running:
            return  # They still tell through loop and pipe when they end.
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
        os.close(self._writer)
        os.close(self._reader)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            error: BaseException | None = None
            try:
                result = self._handler(call)
                if inspect.isawaitable(result):
                    # A plain function around a coroutine function.
                    asyncio.run_coroutine_threadsafe(_awaited(result), self._running_loop()).result()
            except BaseException as raised:  # noqa: BLE001  the main thread judges it
                error = raised
            self._deliver(call, error)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._loop_lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._run_loop, args=(self._loop,), name="handlers", daemon=True).start()
            return self._loop

    @staticmethod
    def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            while True:
                try:
                    loop.run_forever()
                except (SystemExit, KeyboardInterrupt):
                    continue  # Of a task: who awaits it gets it too, and the other calls go on.
                return
        finally:
            loop.close()

    def _create_task(self, loop: asyncio.AbstractEventLoop, call: Call) -> None:
        if call.lease_lost.is_set():
            self._deliver(call, asyncio.CancelledError())
            return
        self._tasks[id(call)] = loop.create_task(self._await(call))

    def _cancel(self, call: Call) -> None:
        task = self._tasks.get(id(call))
        if task is not None:
            task.cancel()

    async def _await(self, call: Call) -> None:
        error: BaseException | None = None
        try:
            await self._handler(call)
        except BaseException as raised:  # noqa: BLE001  the main thread judges it
            error = raised
        del self._tasks[id(call)]
        self._deliver(call, error)

    def _deliver(self, call: Call, error: BaseException | None) -> None:
        self._results.put((call, error))
        with suppress(BlockingIOError):  # the pipe is full of wake-up calls already
            os.write(self._writer, b"x")


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


# -- one lease


class Stoppable(Protocol):
    """The wish to end, as the worker knows it."""

    @property
    def requested(self) -> bool:
        """Whether to start nothing more."""

    @property
    def forced(self) -> bool:
        """Whether to wait for nothing more."""

    @property
    def patience(self) -> float:
        """Seconds that are left for what runs; infinite until somebody asks to stop."""

    def fileno(self) -> int:
        """Become readable when somebody asks to stop."""


class _Ask(Protocol):
    def __call__(self, call: Callable[[Reaper], _R]) -> _R: ...


@dataclass(frozen=True, slots=True)
class Desk:
    """
    What the worker lends.

    ``ask`` runs one call on its connection and raises ReaperError; ``is_lost`` tells whether that means another
    connection, and ``reconnect`` makes one, or raises the trouble when it has waited long enough.
    ``beat`` says that the main thread goes round.
    """

    ask: _Ask
    is_lost: Callable[[ReaperError], bool]
    reconnect: Callable[[ReaperError], None]
    stop: Stoppable
    log: Log
    beat: Callable[[], None]


@dataclass(slots=True)
class Report:
    """
    What became of one lease.

    ``lost`` holds are somebody else's by now, ``released`` ones were given back; ``skipped`` ones were put off by
    the handler, counted by the class that it raised.  ``error`` ended the lease early, and ``cut_off`` says that
    it cost the connection again when it was asked again; ``interrupted``: a handler raised KeyboardInterrupt;
    ``exits`` counts what would have ended the process; ``same`` is how often in a row the handler failed, and with
    what; ``too_slow`` how many transitions in a row outlasted the statement timeout, each alone.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    released: int = 0
    lost: int = 0
    error: ReaperError | None = None
    cut_off: bool = False
    interrupted: bool = False
    exits: Counter[str] = field(default_factory=Counter)
    same: tuple[str, int] = ("", 0)
    too_slow: int = 0


class _Lapsed(LeaseLost):
    """The lease could not be renewed before its end: it may be somebody else's, whatever the database would say."""


class _CutOff(ReaperError):
    """The same question has cost the connection twice."""

    def __init__(self, trouble: ReaperError) -> None:
        super().__init__(trouble.message)
        self.trouble = trouble


class _Watch:
    """
    Tells the calls of a lease when it ends, from a thread of its own.

    The main thread may be waiting for a database that does not answer, and cannot.
    """

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell
        self._changed = threading.Condition()
        self._end = math.inf
        self._closed = False
        self.lapsed = False
        threading.Thread(target=self._run, name="lease", daemon=True).start()

    def extend(self, end: float) -> None:
        """The lease ends then, by the monotonic clock."""
        with self._changed:
            self._end = end
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                left = self._end - time.monotonic()
                if left <= 0:
                    self.lapsed = True
                    self._tell()
                    return
                self._changed.wait(min(left, threading.TIMEOUT_MAX))


class Shift:
    """
    The calls of one lease, from its claim to its end.  Create it, call :meth:`run` once.

    Promises: no call is started and nothing is written while it is not known that the lease is ours.  What was
    called and returned is settled, unless the lease is lost.  What was never called is given back.
    """

    def __init__(
        self,
        pool: Pool,
        desk: Desk,
        policy: str,
        holds: Sequence[Hold],
        *,
        until: float = math.inf,
        grace: float = 20.0,
        timeout: float = math.inf,
        same: tuple[str, int] = ("", 0),
        too_slow: int = 0,
    ) -> None:
        self.report = Report(same=same, too_slow=too_slow)
        self._pool = pool
        self._desk = desk
        self._policy = policy
        self._token: UUID = holds[0].token
        self._until = until
        self._size = len(holds)
        has_payload = any(hold.payload is not None for hold in holds)
        self._pending = [_call(policy, hold) for hold in reversed(holds) if hold.payload is not None or not has_payload]
        # Its row was gone when the payload was read: nothing to call for, the transition says what became of it.
        self._returned = [hold.key for hold in holds if has_payload and hold.payload is None]
        self._raised: list[tuple[str, Verdict]] = []
        self._running: dict[str, tuple[Call, float]] = {}
        self._settled = 0
        self._locked: list[str] = []
        self._locked_tries = 0
        self._settle_at = math.inf if not self._returned else 0.0
        self._locked_at = math.inf
        self._renew_at = 0.0
        self._lease = math.inf
        self._unproven = True
        self._closing = False
        self._suspended = False
        self._grace = grace
        self._timeout = timeout
        self._blamed = False
        self._busy = 0
        self._leave_at = math.inf
        self._watch = _Watch(self._tell)
        self._told_slow: set[str] = set()
        self._told_unproven = False
        self._charged_same = False

    def run(self) -> Report:
        """Call, renew and settle until nothing is left.  Raises only what the desk's ``reconnect`` raises."""
        try:
            try:
                self._work()
                self._end()
            except _Lapsed as error:
                self._abandon(error)
                self._give_back()
            except LeaseLost as error:
                self._abandon(error)
                self.report.lost += self._left
            except _CutOff as error:
                # Not given back: whatever kills its backend is charged as a crash when the lease has lapsed.
                self.report.error, self.report.cut_off = error.trouble, True
                self.report.lost += self._left
                self._tell()
            except ReaperError as error:
                self.report.error = error
                self._give_back()
        finally:
            self._watch.close()
            self._pool.give_up(call for call, _ in self._running.values())
        return self.report

    @property
    def _left(self) -> int:
        return self._size - self._settled

    def _work(self) -> None:
        self._renew(claimed=True)
        while self._pending or self._running or self._returned or self._raised or self._locked:
            self._look_at_the_clock()
            self._begin_calls()
            if not (self._running or self._returned or self._raised or self._locked_at < math.inf):
                return  # What is pending or locked stays so.
            self._wait()
            self._desk.beat()
            self._collect()
            if self._watch.lapsed:
                raise _Lapsed("the lease could not be renewed before its end")
            now = time.monotonic()
            if now >= self._renew_at:
                self._renew()
            nothing_follows = not self._running and (self._closing or not self._pending)
            if not self._unproven and (now >= self._settle_at or (nothing_follows and self._settle_at < math.inf)):
                self._settle()
            if not self._unproven and now >= self._locked_at:
                self._try_locked()

    # -- calls

    def _look_at_the_clock(self) -> None:
        stop = self._desk.stop
        self._closing = self._closing or stop.requested or time.monotonic() >= self._until
        if self._closing and self._locked_at < math.inf:
            self._locked_at = math.inf
        if self._running and (stop.forced or stop.patience <= 0 or time.monotonic() >= self._leave_at):
            self._leave_behind()
        elif self._timeout < math.inf:
            self._time_out()

    def _begin_calls(self) -> None:
        while self._pending and self._pool.has_room and not (self._closing or self._unproven or self._watch.lapsed):
            call = self._pending.pop()
            if self._pool.is_running(self._policy, call.key):
                # A call that was given up goes on all the same: no second one beside it.
                self._ended(call.key, Skip(min(self._lease, _LONGEST_LOOK_AWAY)))
                continue
            self._running[call.key] = (call, time.monotonic())
            self._pool.start(call)

    def _wait(self) -> None:
        stop = self._desk.stop
        now = time.monotonic()
        end = min(self._renew_at, self._leave_at, now + 1.0, now + max(stop.patience, 0.0))
        end = min([end, *(began + self._timeout for _, began in self._running.values())])
        if not self._unproven:
            end = min(end, self._settle_at, self._locked_at)
        if not self._closing:
            end = min(end, self._until)
        if stop.requested:
            # Its descriptor stays readable, and a second signal must be seen soon.
            self._pool.wait(min(end - now, 0.05))
        else:
            self._pool.wait(end - now, stop.fileno())

    def _collect(self) -> None:
        for call, error in self._pool.finished():
            mine = self._running.get(call.key)
            if mine is None or mine[0] is not call:
                continue  # Of a lease that was lost.
            del self._running[call.key]
            if error is not None and is_interrupt(error):
                self.report.interrupted = self._closing = True
                self._leave_at = min(self._leave_at, time.monotonic() + self._grace)
            elif error is not None and wants_out(error):
                self.report.exits[judge(error).error_class] += 1
            self._ended(call.key, error)
        if self._lease < math.inf:
            self._tell_of_slow_calls()

    def _ended(self, hold: str, error: BaseException | None) -> None:
        if error is None:
            self.report.same = ("", 0)
            self._returned.append(hold)
        else:
            verdict = judge(error)
            if self._blames_the_handler(verdict):
                return  # Neither told nor charged: given back with the rest.
            self._raised.append((hold, verdict))
        self._settle_at = min(self._settle_at, time.monotonic() + _SETTLE_AFTER)

    def _blames_the_handler(self, verdict: Verdict) -> bool:
        """Whether so many calls in a row failed alike, for good, that this hold is not to be blamed any more."""
        if verdict.transient or verdict.final or not verdict.charged:
            return False
        name, times = self.report.same
        times = times + 1 if name == verdict.error_class else 1
        self.report.same = (verdict.error_class, times)
        if times < SAME:
            return False
        self._closing = True
        # A shift that begins under suspicion charges one hold, so that bad ones come to their end too.
        suspect, self._charged_same = self._charged_same, True
        return suspect

    def _tell_of_slow_calls(self) -> None:
        """One line for a call that outlives a whole lease: a handler without a timeout is found by it."""
        now = time.monotonic()
        for hold, (_, began) in self._running.items():
            if now - began > self._lease and hold not in self._told_slow:
                self._told_slow.add(hold)
                text = f"policy {visible(self._policy)}: the handler runs for {duration(now - began)} already for hold"
                self._desk.log(
                    Event(
                        "handler.slow",
                        f"{text} {key(hold)}",
                        WARNING,
                        policy=self._policy,
                        token=self._token,
                        key=hold,
                        seconds=now - began,
                    )
                )

    def _leave_behind(self) -> None:
        """
        Time is up: the calls that still run are charged as a crash would be, and the others' holds are not.

        Not released with the rest: somebody would call the handler again while this call still runs.
        """
        calls = len(self._running)
        self._say("handler.not-ended", f"{plural(calls, 'call')} did not end in time", counts={"calls": calls})
        self._fail_running([call for call, _ in self._running.values()], ShutdownTimeout)

    def _time_out(self) -> None:
        """Fail the calls whose time is over.  A coroutine is cancelled; a thread cannot be, and keeps its place."""
        now = time.monotonic()
        self._fail_running(
            [call for call, began in self._running.values() if now - began >= self._timeout], HandlerTimeout
        )

    def _fail_running(self, calls: Sequence[Call], why: type[TimeoutError]) -> None:
        """These calls are failed although they still run: what they come to is dropped."""
        for call in calls:
            self._pool.give_up([call])
            del self._running[call.key]
            self._ended(call.key, why())

    def _tell(self) -> None:
        """The lease is over, or nobody knows: stop the calls.  From any thread."""
        self._pool.give_up([call for call, _ in list(self._running.values())])

    # -- the lease

    def _ask(self, call: Callable[[Reaper], _R], *, ending: bool = False) -> _R:
        """
        Run one call under the lease, on a new connection if need be, and there only after a renewal.

        Nothing is sent once the lease has lapsed by our own clock.  What is ``ending`` the lease needs it no more:
        whether the token is still good is the database's to say.  What costs the connection twice is not asked again.
        """
        losses = 0
        while True:
            if self._watch.lapsed and not ending:
                raise _Lapsed("the lease could not be renewed before its end")
            try:
                if self._unproven and not ending:
                    self._desk.ask(self._prolong)
                    continue
                return self._desk.ask(call)
            except ReaperError as trouble:
                if not self._desk.is_lost(trouble):
                    raise
                losses += trouble.sqlstate not in READ_ONLY
                if losses == _LOSSES:
                    raise _CutOff(trouble) from None
                self._unproven = True
                self._desk.reconnect(trouble)

    def _prolong(self, reaper: Reaper) -> None:
        reaper.renew(self._token)
        self._measure(reaper)

    def _measure(self, reaper: Reaper) -> None:
        """Ask how long the lease is good for; both clocks only ever measure lengths."""
        began = time.monotonic()
        left = reaper.time_left(self._token)
        if left is None:
            raise LeaseLost("the lease was taken back")
        self._lease = left
        self._watch.extend(began + left)
        self._renew_at = began + left / 3
        self._unproven = False

    def _renew(self, *, claimed: bool = False) -> None:
        """Renew.  Where the database is busy, soon again: until then nothing is started and nothing written."""
        self._unproven = not claimed
        try:
            self._ask(self._measure)
        except (DatabaseBusy, QueryCancelled) as trouble:
            if self._desk.stop.forced:
                raise
            self._unproven = True
            self._renew_at = time.monotonic() + _RENEW_AGAIN
            if not self._told_unproven:
                self._told_unproven = True
                self._say("lease.not-renewed", f"the lease could not be renewed yet: {trouble.message}", error=trouble)

    # -- settling

    def _settle(self) -> None:
        """Tell the database what the finished calls came to.  What could not be told is kept."""
        self._settle_at = math.inf
        try:
            while self._returned:
                keys = self._returned[:_SETTLE_AT_MOST]
                self._note(self._expire(keys))
                del self._returned[: len(keys)]
            while self._raised:
                self._fail(*self._raised[0])
                del self._raised[0]
        except DatabaseBusy as trouble:
            self._busy += 1
            # A table that stays locked would keep us, and the other policies, for as long as somebody has it.
            given_up = trouble.sqlstate == "55P03" and self._busy >= _BUSY_SETTLES
            if given_up or self._desk.stop.forced or self._desk.stop.patience <= 0:
                raise
            self._settle_at = time.monotonic() + _SETTLE_AFTER
        else:
            self._busy = 0

    def _expire(self, keys: list[str]) -> list[tuple[str, str]]:
        """Make the transition for some keys; in halves when that takes longer than a statement may."""
        if self._blamed and self.report.too_slow >= SAME:
            raise StatementTimeout("one transition after another takes too long", sqlstate="57014")
        try:
            found = self._ask(lambda r: [(o.key, o.outcome) for o in r.expire(self._token, keys=keys)])
        except StatementTimeout:
            if self._desk.stop.forced:
                raise
            if len(keys) == 1:
                return [(keys[0], self._blame(keys[0]))]
        except QueryCancelled:
            if len(keys) == 1 or self._desk.stop.forced:
                raise
        else:
            if any(outcome == EXPIRED for _, outcome in found):
                self.report.too_slow = 0
            return found
        # The lease must outlast the search for the one that takes so long.
        if time.monotonic() >= self._renew_at:
            self._renew()
        half = len(keys) // 2
        return self._expire(keys[:half]) + self._expire(keys[half:])

    def _blame(self, hold: str) -> str:
        """A transition takes longer than a statement may, alone: that is its hold's failure, until too many do."""
        self._blamed = True
        self.report.too_slow += 1
        # Whether the lease has outlasted the statement is the database's to say.
        return self._ask(lambda r: r.fail(self._token, hold, error_class=TOO_SLOW, transient=True), ending=True).outcome

    def _note(self, outcomes: list[tuple[str, str]]) -> None:
        failed = False
        for hold, outcome in outcomes:
            if outcome == LOCKED:
                if hold not in self._locked:
                    self._locked.append(hold)
                continue
            if hold in self._locked:
                self._locked.remove(hold)
            self.report.outcomes[outcome] += 1
            self._settled += 1
            failed = failed or outcome == RETRY
        if failed and self._ask(lambda r: r.suspended([self._policy])):
            # The transition fails for every hold: no use in calling for more of them.
            self._suspended = self._closing = True
        if self._locked and self._locked_at == math.inf and self._locked_tries < _LOCKED_TRIES and not self._closing:
            self._locked_at = time.monotonic() + _LOCKED_PAUSE * 2**self._locked_tries

    def _try_locked(self) -> None:
        """The handler is done with these, only the row was not to be had: try again while the lease is ours."""
        self._locked_at = math.inf
        self._locked_tries += 1
        try:
            self._note(self._expire(list(self._locked)))
        except DatabaseBusy:
            self._locked_at = time.monotonic() + _LOCKED_PAUSE

    def _fail(self, hold: str, verdict: Verdict) -> None:
        decision = self._ask(
            lambda r: r.fail(
                self._token,
                hold,
                error_class=verdict.error_class,
                transient=verdict.transient,
                retry_in=verdict.retry_in,
                final=verdict.final,
                charged=verdict.charged,
            )
        )
        self._settled += 1
        if not verdict.charged and decision.outcome == RETRY:
            self.report.skipped[verdict.error_class] += 1
        else:
            self.report.outcomes[decision.outcome] += 1

    # -- the end

    def _end(self) -> None:
        if self._suspended or self._left > len(self._locked):
            self._give_back()
            return
        # All the others are settled.  This ends the claim, with its counts.
        locked = set(self._locked)
        for outcome in self._ask(lambda r: r.expire(self._token), ending=True):
            if outcome.key in locked:
                self.report.outcomes[outcome.outcome] += 1

    def _abandon(self, error: LeaseLost) -> None:
        self._tell()
        self._say(
            "lease.lost",
            f"the lease of {plural(self._left, 'hold')} is lost: {error.message};"
            f" {plural(len(self._running), 'running call')} told",
            counts={"holds": self._left, "calls": len(self._running)},
            error=error,
        )

    def _say(self, name: str, text: str, *, counts: Mapping[str, int] = {}, error: ReaperError | None = None) -> None:
        self._desk.log(
            Event(
                name,
                f"policy {visible(self._policy)}: {text}",
                WARNING,
                policy=self._policy,
                token=self._token,
                counts=counts,
                code=error.code if error else None,
                sqlstate=error.sqlstate if error else None,
            )
        )

    def _give_back(self) -> None:
        """Release what is left, if that is possible now; otherwise the lease lapses."""
        left = self._left
        try:
            released = self._desk.ask(lambda r: r.release(self._token))
        except ReaperError:
            released = 0
        self.report.released += released
        self.report.lost += max(left - released, 0)


class HandlerTimeout(TimeoutError):
    """A call did not end within the time that the run gives a call."""


class ShutdownTimeout(TimeoutError):
    """A call did not end within the time that is left after a signal."""


def _call(policy: str, hold: Hold) -> Call:
    return Call(
        policy=policy,
        key=hold.key,
        deadline=hold.deadline,
        attempt=hold.attempt,
        payload=hold.payload or {},
        idempotency_key=idempotency_key(policy, hold.key, hold.deadline),
    )

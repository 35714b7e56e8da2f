"""
The listener: commands come out of a queue, and the holds that they name expire.

Owns what a command looks like, the loop between a queue and the database, and what a message is told: done, later
or rejected.  Knows no broker (:mod:`pgreaper.queues`) and nothing about holds: ``reaper_expire_keys`` decides under
the guard of every other way, so that a command may come early, late, twice or in any order.

A message is acknowledged after the commit and never before.  What crashes between the two is delivered again and
finds its hold already done.  What must wait (early, locked, resting, the database in trouble) goes back to the queue,
which keeps it.  Remembered here is only what may be forgotten: how often a message that waits was tried, and which of
its keys are over.
"""

import json
import math
import os
import threading
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NoReturn

from pgreaper.api import (
    ALREADY_DONE,
    DEAD_LETTER,
    EXPIRED,
    NOT_ELIGIBLE,
    RESTING,
    RETRY,
    WRONG_KEY,
    unknown_policy,
)
from pgreaper.connection import Address, worker_name
from pgreaper.errors import (
    AccessDenied,
    DatabaseBusy,
    DatabaseUnavailable,
    InvalidInput,
    QueryCancelled,
    QueueUnavailable,
    ReaperError,
    UnknownPolicy,
)
from pgreaper.logs import ERROR, EXAMPLES, INFO, WARNING, Event, Log
from pgreaper.queues import Received, Source, Trouble
from pgreaper.records import Command
from pgreaper.session import REPORT_EVERY, Ending, Session, Stop, Stopped, backoff
from pgreaper.text import count, duration, plural, visible

VISIBILITY: Final = 60.0
"""Seconds for which a message that was received is nobody else's; a batch that takes longer keeps it for longer."""

# A signal waits for at most so many seconds while nothing comes.
_RECEIVE_WAIT: Final = 2.0
# Deliver again this little after a hold is due, so that the database's clock agrees.
_AFTER_DUE: Final = 0.001
# A batch that takes longer keeps a signal, and who waits for the next one, waiting: fewer messages are taken then.
_LONG_BATCH: Final = 1.0
# What could not be done comes again after so many seconds, then after twice as many, up to the cap.
_LATER_FIRST: Final = 0.2
_LATER_CAP: Final = 30.0
# A policy that rests, or fails, for everybody is asked less often than a hold that somebody has locked.
_REST_FIRST: Final = 1.0
_REST_CAP: Final = 60.0
# In a run that ends, what has no time of its own comes again after its end.
_NEXT_RUN: Final = 30.0
# What the loss of the connection put back: within that the database may be back.
_AFTER_LOSS: Final = 0.5
# A queue that does not come back within so many seconds ends a run that may end.
_PATIENCE: Final = 20.0
_AWAY_FIRST: Final = 0.1
_AWAY_CAP: Final = 5.0
# More keys are not given to one call.
_MOST_KEYS: Final = 10_000
# Of the messages that wait so much is remembered, in keys; a message is one more.
_REMEMBERED: Final = 100_000

SETTLED: Final = frozenset({EXPIRED, ALREADY_DONE, NOT_ELIGIBLE, DEAD_LETTER})
"""Outcomes after which a command has nothing left to do; a dead letter is in the books, with its owner."""


# -- what a command is


class Malformed(Exception):
    """A message that is no command, and never will be."""


@dataclass(frozen=True, slots=True)
class Wish:
    """One command: expire the holds of ``policy`` that have these keys."""

    policy: str
    keys: tuple[str, ...]


def parse(body: bytes) -> Wish:
    """
    Read ``{"policy": "…", "key": …}`` or ``{"policy": "…", "keys": [ … ]}``; further fields are ignored.

    A key is a string, a whole number, or for several key columns an array of these.  There may be any number of keys.
    Raises Malformed.
    """
    try:
        read = json.loads(body)
    except (ValueError, RecursionError):
        raise Malformed from None
    if not isinstance(read, dict) or ("key" in read) == ("keys" in read):
        raise Malformed
    keys = read["keys"] if "keys" in read else [read["key"]]
    if not isinstance(keys, list):
        raise Malformed
    return Wish(_text(read.get("policy")), tuple(dict.fromkeys(_key(key) for key in keys)))


def _key(value: object) -> str:
    if isinstance(value, list):
        return json.dumps([_part(part) for part in value], ensure_ascii=False)
    return _part(value)


def _part(value: object) -> str:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else _text(value)


def _text(value: object) -> str:
    """A text that Postgres can be asked about: no NUL, no half of a character."""
    if not isinstance(value, str) or "\0" in value:
        raise Malformed
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Malformed from None
    return value


# -- what a run is asked, and what it did


@dataclass(frozen=True, slots=True)
class Settings:
    """
    What a run is asked to do; lengths of time in seconds, None: no limit.

    ``policies``: no others are accepted; empty: all.  ``once``: end when the queue has nothing more.  ``batch`` is
    how many messages are taken at once.
    """

    policies: Sequence[str] = ()
    once: bool = False
    batch: int = 500
    max_seconds: float | None = None
    shutdown_timeout: float = 20.0


@dataclass(slots=True)
class PolicyRun:
    """
    What a run did for one policy: the answers to its commands, by outcome.

    ``failures`` are calls that raised as a whole, ``error`` is the last of them.
    """

    policy: str
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: int = 0
    error: ReaperError | None = None

    @property
    def failed(self) -> bool:
        """Whether something needs a person, or a retry."""
        return self.outcomes[RETRY] + self.outcomes[DEAD_LETTER] + self.failures > 0


@dataclass(slots=True)
class Run(Ending):
    """
    What a run did: messages that were received, acknowledged (``done``), put off and ``rejected``, by reason.

    ``ended`` is ``drained``, ``max-seconds``, ``signal``, ``unavailable`` or ``failed``.  ``lost`` are
    messages that were not done and that no queue has.
    """

    listener: str
    source: str
    received: int = 0
    done: int = 0
    put_off: int = 0
    lost: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    policies: dict[str, PolicyRun] = field(default_factory=dict)

    @property
    def outcomes(self) -> Counter[str]:
        """Outcomes of all policies."""
        return sum((p.outcomes for p in self.policies.values()), Counter())

    @property
    def exit_code(self) -> int:
        """0 all went well or nothing came, 1 something failed, 75 the environment did, 128 + n two signals."""
        if self.decided is not None:
            return self.decided
        broken = [p for p in self.policies.values() if p.failed]
        if self.rejected or any(p.outcomes[RETRY] + p.outcomes[DEAD_LETTER] for p in broken):
            return 1
        later = DatabaseUnavailable.exit_code
        if self.lost and not broken:
            return later
        if broken and all(p.error is not None and p.error.exit_code == later for p in broken):
            return later
        return 1 if broken else 0


# -- the messages in hand


class _Hand:
    """
    The messages that were received and not settled yet.  The only one that speaks to the source.

    A batch that takes long keeps its messages: a thread prolongs what is left of them at a third of their time, each
    time for twice as long as the batch has taken by then.  A source is used by one thread at a time.
    """

    def __init__(self, source: Source, visibility: float, on_trouble: Callable[[Trouble], None]) -> None:
        self._source = source
        self._visibility = visibility
        self._on_trouble = on_trouble
        self._lock = threading.Lock()
        self._left: dict[int, Received] = {}
        self._began = 0.0
        self._changed = threading.Condition()
        self._over = False
        self._thread: threading.Thread | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing will ever come."""
        return self._source.ended

    @property
    def lost(self) -> Sequence[Received]:
        """What closing loses."""
        with self._lock:
            return self._source.lost

    def receive(self, limit: int, wait: float) -> Sequence[Received]:
        """Take the next ones.  Raises Trouble."""
        with self._lock:
            found = self._source.receive(limit, wait=wait)
        if found:
            with self._changed:
                self._left = {id(message): message for message in found}
                self._began = time.monotonic()
                self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._keep, name="keeper", daemon=True)
                self._thread.start()
        return found

    def done(self, messages: Sequence[Received]) -> bool:
        """Acknowledge them.  Whether the queue took it; otherwise they come again."""
        return self._settle(messages, lambda: self._source.done(messages))

    def put_off(self, messages: Sequence[tuple[Received, float]]) -> bool:
        """Put these back, each for so many seconds."""
        return self._settle([message for message, _ in messages], lambda: self._source.put_off(messages))

    def reject(self, message: Received, reason: str) -> bool:
        """Leave it to the queue's dead-letter path."""
        return self._settle([message], lambda: self._source.reject(message, reason=reason))

    def put_back(self, seconds: float) -> int:
        """Put back whatever is left.  How many messages that were."""
        left = [(message, seconds) for message in self._left.values()]
        if left:
            self.put_off(left)
        return len(left)

    def close(self) -> None:
        """End the thread and the connection to the queue."""
        with self._changed:
            self._over, self._left = True, {}
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(1.0)
        with self._lock:
            self._source.close()

    def _settle(self, messages: Iterable[Received], tell: Callable[[], None]) -> bool:
        with self._changed:
            for message in messages:
                self._left.pop(id(message), None)
        try:
            with self._lock:
                tell()
        except Trouble as trouble:
            self._on_trouble(trouble)
            return False
        return True

    def _keep(self) -> None:
        """The thread: sleep until a third of the time of a batch is over, prolong, and so on."""
        batch, until = 0.0, math.inf
        while True:
            with self._changed:
                if self._over:
                    return
                if not self._left:
                    batch, until = 0.0, math.inf
                elif batch != self._began:
                    batch, until = self._began, self._began + self._visibility / 3
                now = time.monotonic()
                if until > now:
                    self._changed.wait(None if until == math.inf else until - now)
                    continue
                kept = list(self._left.values())
            seconds = max(self._visibility, 2 * (now - batch))
            try:
                with self._lock:
                    self._source.keep(kept, seconds=seconds)
            except Trouble as trouble:
                self._on_trouble(trouble)
            until = now + seconds / 3


class _Told:
    """What was said lately: a reason that holds for many messages is one line a minute, with their number."""

    def __init__(self) -> None:
        self._at: dict[str, float] = {}
        self._untold: Counter[str] = Counter()

    def news(self, what: str, number: int) -> int:
        """How many there are to tell by now; 0: it was said less than a minute ago."""
        self._untold[what] += number
        now = time.monotonic()
        if now - self._at.get(what, -math.inf) < REPORT_EVERY:
            return 0
        self._at[what] = now
        return self._untold.pop(what)


@dataclass(slots=True)
class _Pending:
    """A message that waits: how often it could not be done, and which of its keys have nothing left to do."""

    tries: int = 0
    over: set[str] = field(default_factory=set)


class _Pendings:
    """The messages that wait, by their identities; of too many the longest unheard of are forgotten."""

    def __init__(self, most: int = _REMEMBERED) -> None:
        self._most = most
        self._size = 0
        self._found: OrderedDict[object, _Pending] = OrderedDict()

    def open(self, message: Received, wish: Wish) -> Sequence[str]:
        """The keys that are still to be asked for."""
        pending = self._found.get(message.identity)
        return [key for key in wish.keys if key not in pending.over] if pending and pending.over else wish.keys

    def waits(self, message: Received, over: Iterable[str], *, tried: bool) -> int:
        """It waits again; these keys are over.  How often it was ``tried`` by now."""
        pending = self._found.pop(message.identity, None)
        if pending is None:
            pending = _Pending()
        else:
            self._size -= 1 + len(pending.over)
        pending.over.update(over)
        pending.tries += tried
        if pending.tries or pending.over:
            self._found[message.identity] = pending
            self._size += 1 + len(pending.over)
        while self._size > self._most and len(self._found) > 1:
            _, oldest = self._found.popitem(last=False)
            self._size -= 1 + len(oldest.over)
        return pending.tries

    def forget(self, messages: Iterable[Received]) -> None:
        """These are settled."""
        for message in messages:
            if pending := self._found.pop(message.identity, None):
                self._size -= 1 + len(pending.over)


@dataclass(slots=True)
class _Rest:
    """Since when, in a row, a policy's calls fail, and until when it is left alone; by the monotonic clock."""

    failures: int = 0
    until: float = 0.0


# -- the listener


class Listener:
    """
    One run.  Create it, call :meth:`run` once.

    ``source`` is closed at the end.  ``log`` receives the events (:mod:`pgreaper.logs`); ``on_leave`` what was done so
    far, from another thread, when the process must be left because the main one hangs.  ``visibility`` is what the
    source was opened with, in seconds.
    """

    def __init__(
        self,
        address: Address,
        source: Source,
        settings: Settings,
        *,
        log: Log,
        on_leave: Callable[[Run], None] | None = None,
        visibility: float = VISIBILITY,
    ) -> None:
        self.settings = settings
        self.name = worker_name()
        self.result = Run(listener=self.name, source=source.name)
        self._log = log
        self._on_leave = on_leave
        self._stop = Stop(settings.shutdown_timeout, log, lambda: None, self._leave)
        self._session = Session(
            address, name=self.name, log=log, stop=self._stop, stays=not settings.once, poll=_AWAY_CAP
        )
        self._hand = _Hand(source, visibility, self._queue_refused)
        self._limit = settings.batch
        self._rests: defaultdict[str, _Rest] = defaultdict(_Rest)
        self._pendings = _Pendings()
        self._told = _Told()
        self._setbacks = 0
        self._away_since = 0.0
        self._started = 0.0
        self._reported_at = 0.0
        self._reported: Counter[str] = Counter()

    def run(self) -> Run:
        """
        Do what the settings say.  Raises only what concerns the run as a whole before it began:
        DatabaseUnavailable, NotInstalled, VersionMismatch, UnknownPolicy, InvalidInput.
        """
        self._started = self._reported_at = time.monotonic()
        with self._stop.listening():
            try:
                self._begin()
                try:
                    self._loop()
                except ReaperError as trouble:
                    self.result.trouble = trouble
                    self.result.ended = (
                        "unavailable" if trouble.exit_code == DatabaseUnavailable.exit_code else "failed"
                    )
            except Stopped:
                self.result.ended = "signal"
            finally:
                self._session.close()
                self._tell_lost(self._hand.lost)
                self._hand.close()
        self.result.signal, self.result.forced = self._stop.signal, self._stop.forced
        self.result.seconds = time.monotonic() - self._started
        self._log(self._stopped())
        return self.result

    def _stopped(self) -> Event:
        """The end of the run, for machines: people read it on stdout."""
        trouble = self.result.trouble
        self.result.reconnects = self._session.reconnects
        return Event(
            "worker.stopped",
            level=ERROR if self.result.exit_code else INFO,
            outcome=self.result.ended,
            counts={
                **self._counts(),
                "exit_code": self.result.exit_code,
                "reconnects": self.result.reconnects,
            },
            seconds=self.result.seconds,
            code=trouble.code if trouble else None,
            sqlstate=trouble.sqlstate if trouble else None,
            hint=trouble.hint if trouble else None,
        )

    def _counts(self) -> Counter[str]:
        """What is counted, by name: messages, and what became of the holds."""
        run = self.result
        return Counter(
            {"messages": run.received, "done": run.done, "put-off": run.put_off, "rejected": run.rejected.total()}
            | run.outcomes
        )

    def _leave(self, code: int) -> NoReturn:
        """Leave the process from a thread that is not the main one, which hangs in a call."""
        self.result.ended, self.result.signal = "signal", self._stop.signal
        self.result.seconds = time.monotonic() - self._started
        self.result.left_with = code
        try:
            self._log(self._stopped())
            if self._on_leave is not None:
                self._on_leave(self.result)
        finally:
            os._exit(code)

    def _begin(self) -> None:
        self._session.connect(first=True)
        registered = self._session.retrying(lambda r: r.registered())
        for name in self.settings.policies:
            if name not in registered:
                raise unknown_policy(name, list(registered))
        text = "" if self.settings.once else f"{self.name} listens to {visible(self.result.source)}"
        policies = self.settings.policies or registered
        self._log(Event("worker.started", text, counts={"policies": len(policies)}))

    def _loop(self) -> None:
        while not self._is_over():
            found = self._receive()
            began = time.monotonic()
            if found:
                self.result.received += len(found)
                self._work(found)
                self._pace(len(found), time.monotonic() - began)
            elif self.settings.once or self._hand.ended:
                return
            self._report()

    def _is_over(self) -> bool:
        """Whether the run ends here, and why."""
        limit = self.settings.max_seconds
        if self._stop.requested:
            self.result.ended = "signal"
        elif limit is not None and time.monotonic() - self._started >= limit:
            self.result.ended = "max-seconds"
        else:
            return False
        return True

    def _pace(self, messages: int, seconds: float) -> None:
        """A batch of so many took so long: aim for batches of a second, and grow back."""
        if seconds > _LONG_BATCH:
            self._limit = max(1, int(messages * _LONG_BATCH / seconds))
        else:
            self._limit = min(self.settings.batch, self._limit * 2)

    def _report(self) -> None:
        now = time.monotonic()
        if now - self._reported_at >= REPORT_EVERY:
            counts = self._counts()
            news = counts - self._reported
            if news:
                seconds = now - self._reported_at
                told = ", ".join(f"{count(n)} {name}" for name, n in news.items())
                self._log(
                    Event(
                        "worker.report", f"{told} in the last {duration(seconds)}", counts=dict(news), seconds=seconds
                    )
                )
            self._reported_at, self._reported = now, counts

    # -- the queue

    def _receive(self) -> Sequence[Received]:
        """The next messages; none when a signal came, or none did.  Raises QueueUnavailable in a run that may end."""
        wait = _RECEIVE_WAIT
        if self.settings.max_seconds is not None:
            wait = min(wait, max(self._started + self.settings.max_seconds - time.monotonic(), 0.0))
        while True:
            try:
                found = self._hand.receive(self._limit, wait)
            except Trouble as trouble:
                if trouble.aside:
                    self._not_moved(trouble)
                else:
                    self._wait_for_queue(trouble)
                continue
            if self._setbacks:
                self._setbacks = 0
                self._log(Event("queue.back", f"{visible(self.result.source)} is there again"))
            return found

    def _wait_for_queue(self, trouble: Trouble) -> None:
        """Back off before the queue is asked again, with a line that says so; in a long outage one a minute."""
        now = time.monotonic()
        if not self._setbacks:
            self._away_since = now
        self._setbacks += 1
        seconds = backoff(self._setbacks, first=_AWAY_FIRST, cap=_AWAY_CAP)
        text = f"nothing comes from {visible(self.result.source)}: {visible(trouble.error_class)}"
        if trouble.queue is not None:
            text += f" {visible(trouble.queue)}"
        limit = self.settings.max_seconds
        if (self.settings.once and now - self._away_since >= _PATIENCE) or (
            limit is not None and now + seconds - self._started >= limit
        ):
            raise QueueUnavailable(text, hint="Nothing is lost: what was not acknowledged comes again.")
        grows = _AWAY_FIRST * 2.0 ** min(self._setbacks - 2, 40) < _AWAY_CAP
        if grows or self._told.news("queue.away", 1):
            self._log(
                Event(
                    "queue.away",
                    f"{text}; trying again in {duration(seconds)}",
                    WARNING,
                    seconds=seconds,
                    error_class=trouble.error_class,
                )
            )
        self._stop.wait(seconds)

    def _queue_refused(self, trouble: Trouble) -> None:
        """What was said of a message did not arrive: it comes again.  The next receive knows what to do."""
        if number := self._told.news(f"queue.refused {trouble.error_class}", 1):
            text = f"{visible(self.result.source)}: {visible(trouble.error_class)}; what it was told comes again"
            counts = {"messages": number}
            self._log(Event("queue.refused", text, WARNING, counts=counts, error_class=trouble.error_class))

    def _not_moved(self, trouble: Trouble) -> None:
        """Commands cannot go to another queue, and wait; everything else goes on."""
        queue = visible(trouble.queue or "")
        if self._told.news(f"queue.refused {trouble.error_class} {queue}", 1):
            text = (
                f"{visible(self.result.source)}: no command can be moved to queue {queue}:"
                f" {visible(trouble.error_class)}; they wait, and it is tried again"
            )
            hint = _NOT_MOVED.get(trouble.error_class)
            self._log(Event("queue.refused", text, WARNING, error_class=trouble.error_class, hint=hint))

    def _tell_lost(self, messages: Sequence[Received]) -> None:
        """These were read, are not done, and nobody else has them: say which."""
        self.result.lost = len(messages)
        if not messages:
            return
        wishes = []
        for message in messages:
            try:
                wishes.append(parse(message.body))
            except Malformed:
                continue
        keys = [(wish, key) for wish in wishes for key in wish.keys]
        named = ", ".join(f"{visible(wish.policy)} {visible(key)}" for wish, key in keys[:EXAMPLES])
        more = f" and {count(len(keys) - EXAMPLES)} more" if len(keys) > EXAMPLES else ""
        self._log(
            Event(
                "queue.lost",
                f"{plural(len(messages), 'command')} not done, and lost with this run: {named}{more}",
                ERROR,
                keys=[key for _, key in keys[:EXAMPLES]],
                counts={"messages": len(messages)},
                hint=f"{visible(self.result.source)} keeps nothing. Give them again later.",
            )
        )

    # -- a batch

    def _work(self, found: Sequence[Received]) -> None:
        """Do what these messages say, a call a policy, and settle each of them."""
        wishes: defaultdict[str, list[tuple[Received, Wish]]] = defaultdict(list)
        for message in found:
            try:
                wish = parse(message.body)
            except Malformed:
                self._reject([message], "Malformed")
                continue
            wishes[wish.policy].append((message, wish))
        try:
            for policy, asked in wishes.items():
                if self._stop.forced:
                    break
                self._obey(policy, asked)
        except ReaperError as trouble:
            self.result.put_off += self._hand.put_back(_AFTER_LOSS)
            if not self._session.is_lost(trouble):
                raise
            self._session.reconnect(trouble)
        finally:
            self.result.put_off += self._hand.put_back(0.0)

    def _obey(self, policy: str, asked: Sequence[tuple[Received, Wish]]) -> None:
        """The commands of one policy.  Raises what ends the run, and the loss of the connection."""
        messages = [message for message, _ in asked]
        if self.settings.policies and policy not in self.settings.policies:
            self._reject(messages, "UnknownPolicy")
            return
        rest = self._rests[policy]
        if (left := rest.until - time.monotonic()) > 0:
            self._put_off([(message, self._next_run(left)) for message in messages])
            return
        try:
            answers = self._ask(
                policy,
                list(dict.fromkeys(key for message, wish in asked for key in self._pendings.open(message, wish))),
            )
        except UnknownPolicy:
            self._rests.pop(policy, None)
            self._reject(messages, "UnknownPolicy")
            return
        except ReaperError as trouble:
            if self._stop.requested and isinstance(trouble, QueryCancelled):
                return  # We cancelled it ourselves; what is left is put back.
            if self._session.is_lost(trouble):
                raise
            self._session.require_fit(trouble)
            seconds = self._next_run(self._failed(policy, trouble, len(messages)))
            self._put_off([(message, seconds) for message in messages])
            return
        if rest.failures:
            text = f"policy {visible(policy)} works again, after {plural(rest.failures, 'failure')} in a row"
            self._log(Event("policy.works-again", text, policy=policy, counts={"failures": rest.failures}))
            rest.failures = 0
        self._session.works()
        self._count(policy, answers.values())
        self._settle(asked, answers)

    def _ask(self, policy: str, keys: list[str]) -> dict[str, Command]:
        """One call, a transaction of its own; what is too much for one, or has a key that cannot be sent, is halved."""
        if not keys:
            return {}
        if len(keys) <= min(max(self.settings.batch, 1), _MOST_KEYS):
            try:
                found = self._session.patiently(lambda r: r.expire_keys(policy, keys, worker=self.name))
            except (QueryCancelled, InvalidInput) as trouble:
                if len(keys) == 1 and isinstance(trouble, InvalidInput):
                    return {keys[0]: Command(keys[0], WRONG_KEY, None, None, None)}
                if len(keys) == 1 or self._stop.requested:
                    raise
            else:
                return {command.key: command for command in found}
        half = len(keys) // 2
        return self._ask(policy, keys[:half]) | self._ask(policy, keys[half:])

    def _settle(self, asked: Sequence[tuple[Received, Wish]], answers: dict[str, Command]) -> None:
        """Tell the queue of each message what its holds came to; one that has to wait for some of them waits."""
        done, wrong, early = [], [], []
        for message, wish in asked:
            its = [answers[key] for key in self._pendings.open(message, wish)]
            open_ = [answer for answer in its if answer.outcome not in SETTLED | {WRONG_KEY}]
            if open_:
                over = [answer.key for answer in its if answer.outcome in SETTLED]
                tried = any(answer.wait is None for answer in open_)
                tries = max(self._pendings.waits(message, over, tried=tried), message.attempt)
                early.append((message, min(self._wait(tries, answer) for answer in open_)))
            elif any(answer.outcome == WRONG_KEY for answer in its):
                wrong.append(message)
            else:
                done.append(message)
        self._pendings.forget(done)
        self._pendings.forget(wrong)
        if done and self._hand.done(done):
            self.result.done += len(done)
        self._put_off(early)
        self._reject(wrong, "WrongKey")

    def _wait(self, tries: int, answer: Command) -> float:
        """In how many seconds a command that could not be done yet, for so many times, is worth to come again."""
        if answer.wait is not None:
            return max(answer.wait, 0.0) + _AFTER_DUE
        rests = answer.outcome == RESTING
        first, cap = (_REST_FIRST, _REST_CAP) if rests else (_LATER_FIRST, _LATER_CAP)
        return self._next_run(backoff(tries, first=first, cap=cap))

    def _next_run(self, seconds: float) -> float:
        """A run that ends leaves to the next what has no time of its own: it would turn on the spot."""
        return max(seconds, _NEXT_RUN) if self.settings.once else seconds

    def _put_off(self, messages: Sequence[tuple[Received, float]]) -> None:
        if messages and self._hand.put_off(messages):
            self.result.put_off += len(messages)

    def _reject(self, messages: Sequence[Received], reason: str) -> None:
        """Messages that nothing can be done for.  What is in them is not told: the queue has them."""
        for message in messages:
            self.result.rejected[reason] += self._hand.reject(message, reason)
        if messages and (number := self._told.news(reason, len(messages))):
            text = f"{plural(number, 'message')} rejected: {_REASONS[reason]}"
            hint = _REJECTED if len(self.result.rejected) == 1 else None
            self._log(
                Event("queue.rejected", text, WARNING, counts={"messages": number}, error_class=reason, hint=hint)
            )

    def _count(self, policy: str, answers: Iterable[Command]) -> None:
        run = self._run_of(policy)
        keys = defaultdict(list)
        for answer in answers:
            run.outcomes[answer.outcome] += 1
            keys[answer.outcome].append(answer.key)
        for outcome, end, level in ((RETRY, "to be tried again", WARNING), (DEAD_LETTER, "dead letters", ERROR)):
            if keys[outcome] and (number := self._told.news(f"{outcome} {policy}", len(keys[outcome]))):
                text = f"policy {visible(policy)}: commands for {plural(number, 'hold')} that failed, {end}"
                self._log(
                    Event(
                        "holds.failed",
                        text,
                        level,
                        policy=policy,
                        keys=keys[outcome][:EXAMPLES],
                        outcome=outcome,
                        counts={"holds": number},
                    )
                )

    def _failed(self, policy: str, error: ReaperError, messages: int) -> float:
        """A call for a policy raised: say so, and leave the policy alone.  For how many seconds."""
        run, rest = self._run_of(policy), self._rests[policy]
        if error.sqlstate == "55P03":
            error = self._session.whose_lock(policy, error)
        run.error = error
        run.failures += 1
        rest.failures += 1
        cap = _LATER_CAP if isinstance(error, DatabaseBusy) else _REST_CAP
        seconds = backoff(rest.failures, first=_REST_FIRST, cap=cap)
        rest.until = time.monotonic() + seconds
        if number := self._told.news(f"{policy} {error.message}", messages):
            self._log(
                Event(
                    "policy.failed",
                    f"policy {visible(policy)}: {error.message}; {plural(number, 'message')} put off for"
                    f" {duration(seconds)}",
                    WARNING if isinstance(error, DatabaseUnavailable) else ERROR,
                    policy=policy,
                    seconds=seconds,
                    code=error.code,
                    sqlstate=error.sqlstate,
                    constraint=error.constraint,
                    hint=error.hint if isinstance(error, AccessDenied) else None,
                )
            )
        return seconds

    def _run_of(self, policy: str) -> PolicyRun:
        return self.result.policies.setdefault(policy, PolicyRun(policy))


_REJECTED: Final = "The queue keeps them apart where it has a dead-letter queue; it may deliver them again before that."
_NOT_MOVED: Final = {
    "NoSuchQueue": "Declare it: a queue that dead= names has to exist.",
    "AccessRefused": "Let the user configure, write and read queues whose names begin with pgreaper.later.",
    "PreconditionFailed": "There is one with other arguments. Delete it when it is empty: it is made again.",
}
_REASONS: Final = {
    "Malformed": 'not of the form {"policy": "…", "key": "…"}',
    "UnknownPolicy": "of a policy that is not registered, or not accepted here",
    "WrongKey": "with a key that no hold of the policy could have",
}

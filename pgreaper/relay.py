"""
The relay: fetch expired holds from the trail, send them to a queue, tell the database which were taken.

Owns the loop, what a message looks like, and the judgement of what a queue answers: whose fault a refusal is, and
when to try again.  Knows no broker (:mod:`pgreaper.queues` does) and decides nothing about an event's place, order
or retries, which are SQL's (``reaper_fetch``, ``reaper_ack``).  The connection is :mod:`pgreaper.session`'s.

No transaction is open while a queue works.  It is sent to in a thread; the main one has the connection and keeps the
lease.  An event is delivered at least once: its idempotency key, which is the one that a handler gets for the same
hold, stays the same over repetitions.
"""

import json
import math
import os
import queue
import random
import select
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final, NoReturn

from pgreaper.api import TOO_SLOW, unknown_policy
from pgreaper.connection import Address, worker_name
from pgreaper.errors import (
    DatabaseBusy,
    DatabaseUnavailable,
    InvalidInput,
    LeaseLost,
    QueryCancelled,
    QueueUnavailable,
    ReaperError,
    StatementTimeout,
    UnknownPolicy,
)
from pgreaper.handlers import idempotency_key
from pgreaper.logs import DEBUG, ERROR, EXAMPLES, INFO, WARNING, Event, Log
from pgreaper.queues import Message, Refusal, Sent, Sink
from pgreaper.session import REPORT_EVERY, Ending, Session, Stop, Stopped, backoff
from pgreaper.text import count, duration, plural, visible

if TYPE_CHECKING:
    from uuid import UUID

    from pgreaper.records import RelayEvent

# A queue has so many seconds for a batch; what it has not answered then is sent again.
_SEND_TIMEOUT: Final = 60.0
# And so many seconds to say whether it would take one.
_PROBE_TIMEOUT: Final = 10.0
# A send that takes longer keeps a signal and the lease waiting: the next ones are smaller.
_LONG_SEND: Final = 5.0
# A renewal that did not come about is tried again after that many seconds.
_KEEP_AGAIN: Final = 0.05
# After an event the next look comes so soon; each that finds nothing doubles it, up to the poll.
_FIRST_LOOK: Final = 0.02
# Trouble of the queue: the first pause, and the longest.
_TROUBLE_FIRST: Final = 0.5
_TROUBLE_CAP: Final = 30.0
# The longest where it answers nothing at all: to ask costs nobody much, and events flow soon after its return.
_AWAY_CAP: Final = 5.0
# While there is trouble a batch is a probe of at most so many events; not of one, which might be the only bad one.
_PROBE: Final = 50
# So many refusals for good in a row, with nothing taken between, speak of the queue and not of the events.
SAME: Final = 8
# So many batches of one event in a row that were refused for now, with nothing taken between, do too.
_LONELY: Final = 3
# So many events in a row whose payload alone takes longer than a statement may speak of the timeout, not of the events.
_SLOW: Final = 3
# A database that refuses a call: the first pause, and the longest.
_FAILED_FIRST: Final = 1.0
_FAILED_CAP: Final = 60.0
# So many different reasons for refusals are told in a minute.
_TOLD_REASONS: Final = 20
_CONTENT_TYPE: Final = "application/json"
# A queue may ask for at most so many seconds of rest.
_LONGEST_REST: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Settings:
    """
    What a relay is asked to do; lengths of time in seconds, None: no limit.

    ``name`` is the relay's, by default the policy's.  ``backfill`` begins a new one at the oldest row of the trail.
    ``poll`` is the longest sleep while there is nothing; ``lease`` is how long a batch is nobody else's.
    """

    policy: str
    name: str | None = None
    backfill: bool = False
    payload: Sequence[str] = ()
    batch: int = 500
    once: bool = False
    poll: float = 0.2
    lease: float = 60.0
    max_seconds: float | None = None
    shutdown_timeout: float = 20.0
    every_batch: bool = False


@dataclass(slots=True)
class RelayRun(Ending):
    """
    What a run did.

    ``begins`` says with what a relay begins that was ``created`` by it.
    Events that were confirmed are ``delivered``, those refused for good ``dead``.  The others are tries, of which an
    event may have several: ``retried`` were refused for now, ``returned`` came back untried because of trouble or a
    signal, ``lost`` are with another process, ``unconfirmed`` were sent and not answered: those are sent again, and a
    consumer may see them twice.  Of a run that drained a relay, ``leased`` events are with other processes that
    deliver them, or have died; their leases end at ``leased_until`` at the latest.

    ``ended`` is ``drained``, ``max-seconds``, ``signal``, ``trouble`` (of the queue), ``unavailable`` or ``failed``.
    """

    worker: str
    policy: str
    to: str
    relay: str = ""
    created: bool = False
    begins: str | None = None
    batches: int = 0
    delivered: int = 0
    retried: int = 0
    dead: int = 0
    returned: int = 0
    unconfirmed: int = 0
    lost: int = 0
    leased: int = 0
    leased_until: datetime | None = None
    reasons: Counter[str] = field(default_factory=Counter)
    troubles: int = 0

    @property
    def exit_code(self) -> int:
        """0 all went well, 1 events were given up, 75 the queue or the database did, 128 + n two signals."""
        if self.decided is not None:
            return self.decided
        return 1 if self.dead else 0


def message(policy: str, event: "RelayEvent", *, payload: bool) -> Message:
    """
    An event as a queue gets it: JSON in UTF-8.

    Timestamps are ISO 8601 in UTC with microseconds.  ``payload`` is there when columns were asked for, and null when
    the row has gone.
    """
    identity = idempotency_key(policy, event.key, event.deadline)
    body = {
        "policy": policy,
        "key": event.key,
        "deadline": _instant(event.deadline),
        "expired_at": _instant(event.expired_at),
        "state": event.state,
        "idempotency_key": identity,
    }
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    if payload:
        # As the server wrote it: no number loses a digit.
        text = f'{text[:-1]},"payload":{event.payload or "null"}}}'
    return Message(text.encode(), event.key, identity, {"content-type": _CONTENT_TYPE, "policy": policy})


def _instant(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


# -- judging what a queue answers


@dataclass(frozen=True, slots=True)
class Verdict:
    """
    What is told to the database about a batch, by positions.

    What is neither ``confirmed`` nor ``refused`` goes back and is charged to nobody.  ``trouble`` is the kind of the
    queue's trouble, ``retry_after`` the seconds for which the queue asked.  A queue that is ``away`` said nothing about
    any event.
    """

    confirmed: frozenset[int]
    refused: Mapping[int, Refusal]
    trouble: str | None = None
    retry_after: float = 0.0
    away: bool = False


class Judge:
    """
    Tells an event that a queue refuses from a queue that refuses everything.

    As soon as a batch has one event that was taken, each refusal is its event's own.  Where nothing was taken: what was
    refused for now is not charged, unless an event was alone and that is new; of what was refused for good the
    first few are charged, and from then on one a batch, so that bad events come to their end and a wrong address
    does not cost thousands.
    """

    def __init__(self) -> None:
        self._lonely = 0
        self._same = 0
        self._suspects = False

    def judge(self, sent: Sent, size: int) -> Verdict:
        """What a batch of ``size`` events came to."""
        answered = len(sent.confirmed) + len(sent.refused)
        trouble = sent.trouble or (None if answered == size else "Unconfirmed")
        after = min(max((r.retry_after or 0.0 for r in sent.refused.values()), default=0.0), _LONGEST_REST)
        if sent.confirmed:
            self._lonely = self._same = 0
            self._suspects = False
            return Verdict(sent.confirmed, sent.refused, trouble, after if trouble else 0.0)
        charged: dict[int, Refusal] = {}
        spared: Refusal | None = None
        for position, refusal in sorted(sent.refused.items()):
            if self._charges(refusal, alone=size == 1):
                charged[position] = refusal
            else:
                spared = spared or refusal
        self._suspects = self._same >= SAME
        if trouble is None and spared is not None:
            trouble = spared.error_class
        return Verdict(frozenset(), charged, trouble, after if trouble else 0.0, away=answered == 0)

    def _charges(self, refusal: Refusal, *, alone: bool) -> bool:
        if refusal.transient:
            self._lonely += alone
            return alone and self._lonely < _LONELY
        self._same += 1
        # A batch that begins under suspicion charges one event.
        suspect, self._suspects = self._suspects, False
        return self._same <= SAME or suspect


# -- sending


class _Sender:
    """
    Sends in a thread of its own, one batch after another.

    The thread is a daemon: a queue that hangs does not keep the process.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._jobs: queue.SimpleQueue[tuple[Sequence[Message], float] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Sent | BaseException] = queue.SimpleQueue()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._thread: threading.Thread | None = None
        self.is_sending = False

    def start(self, messages: Sequence[Message], timeout: float) -> None:
        """Begin to send.  Nothing else may be under way."""
        assert not self.is_sending  # noqa: S101
        self.is_sending = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="relay-sends", daemon=True)
            self._thread.start()
        self._jobs.put((messages, timeout))

    def answer(self) -> Sent | None:
        """The answer, once it is there.  Raises what the sink raised."""
        try:
            answer = self._answers.get_nowait()
        except queue.Empty:
            return None
        self.is_sending = False
        with suppress(BlockingIOError):
            os.read(self._reader, 1)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def wait(self, seconds: float, *others: int) -> None:
        """Sleep until the answer is there, one of the other file descriptors is readable, or so long."""
        select.select([self._reader, *others], [], [], max(seconds, 0.0))

    def close(self) -> None:
        """Let the thread end, and close the sink; not while it sends."""
        if self.is_sending:
            return
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(1.0)
        self._sink.close()
        os.close(self._writer)
        os.close(self._reader)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            answer: Sent | BaseException
            try:
                answer = self._sink.send(job[0], timeout=job[1])
            except BaseException as raised:  # noqa: BLE001  the main thread gets it
                answer = raised
            self._answers.put(answer)
            os.write(self._writer, b"x")


# -- the run


class Relay:
    """
    One run.  Create it, call :meth:`run` once.

    ``log`` receives the events (:mod:`pgreaper.logs`); ``on_leave`` what was done so far, from another thread, when the
    process must be left because the main one hangs.
    """

    def __init__(
        self,
        address: Address,
        sink: Sink,
        settings: Settings,
        *,
        log: Log,
        on_leave: Callable[[RelayRun], None] | None = None,
    ) -> None:
        self.settings = settings
        self.result = RelayRun(worker_name(), settings.policy, sink.name)
        self._log = log
        self._on_leave = on_leave
        self._stop = Stop(settings.shutdown_timeout, log, lambda: None, self._leave)
        self._session = Session(
            address,
            name=self.result.worker,
            log=log,
            stop=self._stop,
            stays=not settings.once,
            # A daemon is back within some seconds of the database's return, however short its own poll is.
            poll=max(settings.poll, 5.0),
        )
        self._sender = _Sender(sink)
        self._judge = Judge()
        self._batch = self._ceiling = settings.batch
        self._slow = 0
        self._asked = False
        self._look_after = min(_FIRST_LOOK, settings.poll)
        self._troubles = 0
        self._trouble_said = ("", 0.0)
        self._failures = 0
        self._failure_said = ("", 0.0)
        self._told: dict[str, float] = {}
        self._untold: Counter[str] = Counter()
        self._started = self._reported_at = 0.0
        self._reported: Counter[str] = Counter()

    def run(self) -> RelayRun:
        """
        Do what the settings say.  Raises what concerns the run as a whole before it began: DatabaseUnavailable,
        NotInstalled, VersionMismatch, UnknownPolicy, InvalidInput; and BrokenPipeError when nobody reads stdout.
        """
        self._started = self._reported_at = time.monotonic()
        with self._stop.listening():
            try:
                self._begin()
                try:
                    self._loop()
                except QueueUnavailable as trouble:
                    self.result.trouble, self.result.ended = trouble, "trouble"
                except ReaperError as trouble:
                    self.result.trouble = trouble
                    self.result.ended = "unavailable" if isinstance(trouble, DatabaseUnavailable) else "failed"
            except Stopped:
                self.result.ended = "signal"
            finally:
                self._session.close()
                self._sender.close()
        self.result.signal, self.result.forced = self._stop.signal, self._stop.forced
        self._log(self._stopped())
        return self.result

    @property
    def left_behind(self) -> bool:
        """Whether a send was given up: its thread may still run."""
        return self._sender.is_sending

    def _stopped(self) -> Event:
        """The end of the run, for machines: people read it on stdout."""
        result = self.result
        result.seconds = time.monotonic() - self._started
        result.reconnects = self._session.reconnects
        trouble = result.trouble
        return Event(
            "relay.stopped",
            level=ERROR if result.exit_code else INFO,
            policy=result.policy,
            outcome=result.ended,
            counts={**self._counts(), "exit_code": result.exit_code, "reconnects": result.reconnects},
            seconds=result.seconds,
            code=trouble.code if trouble else None,
            sqlstate=trouble.sqlstate if trouble else None,
            hint=trouble.hint if trouble else None,
        )

    def _counts(self) -> Counter[str]:
        r = self.result
        return Counter(delivered=r.delivered, retry=r.retried, dead=r.dead, returned=r.returned, lost=r.lost)

    def _leave(self, code: int) -> NoReturn:
        """Leave the process from a thread that is not the main one, which hangs in a call."""
        self.result.ended, self.result.signal = "signal", self._stop.signal
        self.result.left_with = code
        try:
            self._log(self._stopped())
            if self._on_leave is not None:
                self._on_leave(self.result)
        finally:
            os._exit(code)

    def _begin(self) -> None:
        s = self.settings
        self._session.connect(first=True)
        try:
            opened = self._session.retrying(lambda r: r.relay(s.policy, relay=s.name, backfill=s.backfill))
        except UnknownPolicy:
            raise unknown_policy(s.policy, list(self._session.retrying(lambda r: r.registered()))) from None
        if s.payload and (missing := self._session.retrying(lambda r: r.missing_columns(s.policy, s.payload))):
            raise InvalidInput(
                f"the target of policy {visible(s.policy)} has no column {', '.join(map(visible, missing))}",
                hint="--payload names columns of the target, as they are called in the database.",
            )
        self.result.relay, self.result.created = opened.relay, opened.created
        if opened.created:
            self.result.begins = "the oldest of the trail" if s.backfill else "what expires from now on"
        text = ""
        if not s.once:
            text = f"relay {visible(opened.relay)} is up: policy {visible(s.policy)}, to {self._to}"
            text += f"; it is new, and begins with {self.result.begins}" if self.result.begins else ""
        self._log(Event("relay.started", text, policy=s.policy))

    @property
    def _to(self) -> str:
        return visible(self.result.to, 200)

    def _loop(self) -> None:
        while not self._over():
            self._report()
            began = time.monotonic()
            try:
                events = self._fetch()
                if events is None:
                    continue
                if events:
                    self._deliver(events, began)
                self._fine()
            except (QueueUnavailable, UnknownPolicy):
                raise  # The relay was removed meanwhile.
            except ReaperError as error:
                if self._session.is_lost(error):
                    self._session.reconnect(error)
                elif self._stop.requested:
                    raise Stopped from None  # We cancelled it ourselves.
                else:
                    self._failed(error)
                continue
            if events:
                self._look_after = min(_FIRST_LOOK, self.settings.poll)
            elif self.settings.once:
                self._look_around()
                self._probe()
                return
            else:
                self._probe()
                self._rest()

    def _look_around(self) -> None:
        """There is nothing more for this run: note what other processes have, which may have died."""
        ((self.result.leased, self.result.leased_until),) = self._session.retrying(
            lambda r: r.rows(
                "select coalesce(sum(cardinality(d.events)), 0)::bigint, max(d.lease_until)"
                "  from pgreaper.deliveries as d join pgreaper.relays as r on r.relay_id = d.relay_id"
                " where r.name = %s and d.finished_at is null and d.lease_until > pgreaper._clock()",
                self.result.relay,
            )
        )

    def _probe(self) -> None:
        """
        There is nothing to begin with: ask the queue all the same whether it would take events, where it can be asked.

        A wrong password is found by the first run, and not by the first event.  Raises QueueUnavailable in a run
        that ends.
        """
        if self._asked:
            return
        self._asked = True
        self._sender.start([], _PROBE_TIMEOUT)
        sent = self._await(None, time.monotonic())
        if sent is None or sent.trouble is None:
            return
        self.result.troubles += 1
        if self.settings.once:
            raise self._refused(sent.trouble)
        self._log(
            Event(
                "relay.trouble",
                f"relay {visible(self.result.relay)}: {self._to} does not take events: {sent.trouble};"
                " going on, as there is none to send",
                WARNING,
                policy=self.result.policy,
                error_class=sent.trouble,
            )
        )

    def _refused(self, error_class: str) -> QueueUnavailable:
        return QueueUnavailable(
            f"{self._to} does not take events now: {error_class}",
            hint="Nothing is lost: the next run sends what was not confirmed.",
        )

    def _over(self) -> bool:
        """Whether the run ends here, and why."""
        limit = self.settings.max_seconds
        if self._stop.requested:
            self.result.ended = "signal"
        elif limit is not None and time.monotonic() - self._started >= limit:
            self.result.ended = "max-seconds"
        else:
            return False
        return True

    # -- waiting

    def _rest(self) -> None:
        """Nothing is there: sleep, each time longer, up to the poll; a fleet does not go in step."""
        self._sleep(self._look_after * (0.75 + 0.5 * random.random()))  # noqa: S311
        self._look_after = min(2 * self._look_after, self.settings.poll)

    def _sleep(self, seconds: float) -> None:
        limit = self.settings.max_seconds
        if limit is not None:
            seconds = min(seconds, self._started + limit - time.monotonic())
        self._stop.wait(seconds)

    def _fine(self) -> None:
        """The database answered as it should."""
        if self._failures:
            text = f"relay {visible(self.result.relay)} works again, after {plural(self._failures, 'failure')} in a row"
            self._log(Event("relay.works-again", text, policy=self.result.policy, counts={"failures": self._failures}))
            self._failures = 0
        self._session.works()

    def _failed(self, error: ReaperError) -> None:
        """A call failed, and not for the connection: a daemon waits, each time longer, and tries again."""
        self._session.require_fit(error)
        if self.settings.once:
            raise error
        self._failures += 1
        seconds = backoff(self._failures, first=_FAILED_FIRST, cap=_FAILED_CAP)
        said, at = self._failure_said
        now = time.monotonic()
        if error.message != said or now - at >= REPORT_EVERY:
            self._failure_said = (error.message, now)
            self._log(
                Event(
                    "relay.failed",
                    f"relay {visible(self.result.relay)}: {error.message}; trying again in {duration(seconds)}",
                    WARNING if isinstance(error, DatabaseBusy) else ERROR,
                    policy=self.result.policy,
                    seconds=seconds,
                    code=error.code,
                    sqlstate=error.sqlstate,
                    hint=error.hint,
                )
            )
        self._sleep(seconds)

    def _report(self) -> None:
        now = time.monotonic()
        if now - self._reported_at < REPORT_EVERY:
            return
        news = self._counts() - self._reported
        if news:
            seconds = now - self._reported_at
            done = ", ".join(f"{count(n)} {_IN_WORDS[what]}" for what, n in news.items())
            text = f"relay {visible(self.result.relay)}: {done} in the last {duration(seconds)}"
            self._log(Event("relay.report", text, policy=self.result.policy, counts=dict(news), seconds=seconds))
        self._reported_at, self._reported = now, self._counts()

    # -- one batch

    def _fetch(self) -> "list[RelayEvent] | None":
        """
        The next batch.  None: it took longer than a statement may, and the next one is smaller or of another event.

        Raises StatementTimeout when one event alone takes so long, and it is not the event.
        """
        asked = self._batch
        try:
            events = self._ask(asked, self.settings.payload)
        except StatementTimeout as error:
            if asked > 1:
                self._shrink(asked, error)
            else:
                self._blame(error)
            return None
        if events:
            self._slow = 0
            full = self.settings.batch
            self._ceiling = min(full, self._ceiling + max(1, full // 100))
        return events

    def _ask(self, batch: int, payload: Sequence[str]) -> "list[RelayEvent]":
        return self._session.patiently(
            lambda r: r.fetch(
                self.result.relay,
                batch=batch,
                worker=self.result.worker,
                lease=timedelta(seconds=self.settings.lease),
                payload=payload,
            )
        )

    def _shrink(self, asked: int, error: StatementTimeout) -> None:
        """So many were too many for the statement timeout: go well below, and back up only slowly."""
        told = self._ceiling < self.settings.batch
        self._ceiling, self._batch = max(1, asked // 2), max(1, asked // 4)
        if told:
            return
        text = f"relay {visible(self.result.relay)}: fetching up to {plural(asked, 'event')} takes too long"
        self._log(
            Event(
                "relay.batch-too-large",
                f"{text}: {error.message}; going on with smaller batches",
                WARNING,
                policy=self.result.policy,
                counts={"events": asked},
                sqlstate=error.sqlstate,
            )
        )

    def _blame(self, error: StatementTimeout) -> None:
        """
        One event alone takes longer than a statement may: its payload's failure, as often as the payload explains it.

        Without the payload it can be leased, so that it is booked and tried again later, and others go meanwhile.
        Raises StatementTimeout when there is no payload to blame, or one event after another is like that.
        """
        if not self.settings.payload:
            raise _too_slow(error)
        try:
            events = self._ask(1, ())
        except StatementTimeout as again:
            raise _too_slow(again) from None
        if not events:
            return
        self._slow += 1
        verdict = Verdict(frozenset(), {0: Refusal(TOO_SLOW, transient=True)}, TOO_SLOW)
        self.result.batches += 1
        if not self._tell(events[0].token, events, verdict):
            return
        self.result.reasons[TOO_SLOW] += 1
        trouble = _too_slow(error, payload=True)
        if self._slow >= _SLOW:
            raise trouble
        now = time.monotonic()
        if now - self._told.get(TOO_SLOW, -math.inf) < REPORT_EVERY:
            return
        self._told[TOO_SLOW] = now
        self._log(
            Event(
                "relay.event-too-slow",
                f"relay {visible(self.result.relay)}: {trouble.message}; to be tried again",
                WARNING,
                policy=self.result.policy,
                token=events[0].token,
                keys=[events[0].key],
                error_class=TOO_SLOW,
                sqlstate=trouble.sqlstate,
                hint=trouble.hint,
            )
        )

    def _deliver(self, events: "list[RelayEvent]", began: float) -> None:
        """Send a leased batch and tell the database what became of it.  Raises QueueUnavailable in a run that ends."""
        token = events[0].token
        self.result.batches += 1
        self._asked = True
        if self._stop.requested:
            self._tell(token, events, Verdict(frozenset(), {}))
            return
        payload = bool(self.settings.payload)
        self._sender.start([message(self.result.policy, e, payload=payload) for e in events], _SEND_TIMEOUT)
        sending = time.monotonic()
        try:
            sent = self._await(token, began)
        except BrokenPipeError:
            # Nobody reads stdout any more: what was read is not known.  Any other error is a bug of ours that an event
            # may have brought about: the lease lapses, and they come back in ever smaller batches, as after a crash.
            self._tell(token, events, Verdict(frozenset(), {}))
            raise
        took = time.monotonic() - sending
        answered = 0 if sent is None else len(sent.confirmed) + len(sent.refused)
        self.result.unconfirmed += len(events) - answered
        verdict = self._judge.judge(sent, len(events)) if sent is not None else Verdict(frozenset(), {})
        if self._tell(token, events, verdict):
            self._explain(token, events, verdict)
        self._did(token, events, verdict, took)
        self._pace(len(events), took, troubled=verdict.trouble is not None)
        if verdict.trouble is not None:
            self._trouble(verdict)
        elif self._troubles and verdict.confirmed:
            text = f"relay {visible(self.result.relay)}: {self._to} takes events again"
            self._log(Event("relay.takes-again", text, policy=self.result.policy, counts={"troubles": self._troubles}))
            self._troubles = 0

    def _await(self, token: "UUID | None", began: float) -> Sent | None:
        """Wait for the queue's answer, and keep the lease meanwhile.  None: a signal came, and the time is over."""
        keep_at = began + (self.settings.lease / 3 if token is not None else 2 * _SEND_TIMEOUT)
        while (sent := self._sender.answer()) is None:
            now = time.monotonic()
            if now >= keep_at:
                keep_at = self._keep(token) if token is not None else now + _SEND_TIMEOUT
                continue
            stop = self._stop
            if stop.requested:
                if stop.forced or stop.patience <= 0:
                    return None
                # Its descriptor stays readable, and a second signal must be seen soon.
                self._sender.wait(min(keep_at - now, 0.05))
            else:
                self._sender.wait(keep_at - now, stop.fileno())
        return sent

    def _keep(self, token: "UUID") -> float:
        """Prolong the lease.  When to do so again; a lease that is lost, or cannot be told, is found out at the end."""
        began = time.monotonic()
        lease = timedelta(seconds=self.settings.lease)
        try:
            self._session.call(lambda r: r.keep(token, lease=lease))
        except LeaseLost:
            return math.inf
        except (DatabaseBusy, QueryCancelled):
            return time.monotonic() + _KEEP_AGAIN
        except ReaperError as trouble:
            if not self._session.is_lost(trouble):
                return math.inf
            with suppress(Stopped):
                self._session.reconnect(trouble)
            return time.monotonic() + (_KEEP_AGAIN if not self._stop.requested else math.inf)
        return began + self.settings.lease / 3

    def _tell(self, token: "UUID", events: "list[RelayEvent]", verdict: Verdict) -> bool:
        """Acknowledge, through deadlocks and a lost connection: asking again is answered.  False: the lease is lost."""
        refused = sorted(verdict.refused.items())
        delivered = None
        if len(verdict.confirmed) + len(refused) < len(events):
            delivered = [events[position].event for position in sorted(verdict.confirmed)]
        # A cancel that a second signal has sent must not hit this.
        self._stop.settle()
        while True:
            try:
                acknowledged = self._session.patiently(
                    lambda r: r.ack(
                        token,
                        delivered=delivered,
                        refused=[events[position].event for position, _ in refused],
                        error_classes=[refusal.error_class for _, refusal in refused],
                        transient=[refusal.transient for _, refusal in refused],
                        retry_in=[
                            None if refusal.retry_after is None else timedelta(seconds=refusal.retry_after)
                            for _, refusal in refused
                        ],
                        trouble=verdict.trouble,
                    )
                )
            except LeaseLost as error:
                self._lost(token, len(events), error)
                return False
            except ReaperError as trouble:
                if not self._session.is_lost(trouble):
                    raise
                self._session.reconnect(trouble)
            else:
                break
        self.result.delivered += acknowledged.delivered
        self.result.retried += acknowledged.retry
        self.result.dead += acknowledged.dead
        self.result.returned += acknowledged.returned
        return True

    def _lost(self, token: "UUID", events: int, error: LeaseLost) -> None:
        self.result.lost += events
        text = f"relay {visible(self.result.relay)}: the lease of {plural(events, 'event')} was taken over"
        self._log(
            Event(
                "relay.lease-lost",
                f"{text}: another process sends them, some perhaps a second time",
                WARNING,
                policy=self.result.policy,
                token=token,
                counts={"events": events},
                sqlstate=error.sqlstate,
            )
        )

    def _explain(self, token: "UUID", events: "list[RelayEvent]", verdict: Verdict) -> None:
        """Events were refused: say why, each reason once in a while."""
        reasons: dict[tuple[str, bool], list[int]] = {}
        for position, refusal in sorted(verdict.refused.items()):
            reasons.setdefault((refusal.error_class, refusal.transient), []).append(position)
            self.result.reasons[refusal.error_class] += 1
        now = time.monotonic()
        self._told = {what: at for what, at in self._told.items() if now - at < REPORT_EVERY}
        for (error_class, transient), positions in reasons.items():
            end = "to be tried again" if transient else "given up: `pgreaper relays dead` lists them"
            what = f"{error_class}, {end}"
            self._untold[what] += len(positions)
            if what in self._told or len(self._told) >= _TOLD_REASONS:
                continue
            self._told[what] = now
            refused = self._untold.pop(what)
            text = f"relay {visible(self.result.relay)}: {plural(refused, 'event')} refused with {error_class}, {end}"
            self._log(
                Event(
                    "relay.refused",
                    text,
                    WARNING if transient else ERROR,
                    policy=self.result.policy,
                    token=token,
                    keys=[events[position].key for position in positions[:EXAMPLES]],
                    error_class=error_class,
                    counts={"events": refused},
                )
            )

    def _did(self, token: "UUID", events: "list[RelayEvent]", verdict: Verdict, seconds: float) -> None:
        """A batch, for whoever wants to hear of each."""
        if self.settings.every_batch:
            confirmed, refused = len(verdict.confirmed), len(verdict.refused)
            text = f"batch of {plural(len(events), 'event')}: {count(confirmed)} confirmed, {count(refused)} refused"
            counts = {"events": len(events), "confirmed": confirmed, "refused": refused}
            self._log(
                Event(
                    "relay.batch",
                    f"relay {visible(self.result.relay)}: {text}; {duration(seconds)}",
                    DEBUG,
                    policy=self.result.policy,
                    token=token,
                    counts=counts,
                    seconds=seconds,
                )
            )

    def _pace(self, events: int, seconds: float, *, troubled: bool) -> None:
        """Aim for sends of some seconds; probe while there is trouble, then double."""
        if troubled:
            self._batch = min(self._ceiling, _PROBE)
        elif seconds > _LONG_SEND:
            self._batch = max(1, int(events * _LONG_SEND / seconds))
        elif seconds < _LONG_SEND / 2:
            self._batch = min(self._ceiling, 2 * self._batch)

    def _trouble(self, verdict: Verdict) -> None:
        """The queue is away or takes nothing: back off, with one line a step; in a long outage one a minute."""
        error_class = verdict.trouble or ""
        self.result.troubles += 1
        self._troubles += 1
        if self._stop.requested:
            return
        if self.settings.once:
            raise self._refused(error_class)
        cap = _AWAY_CAP if verdict.away else _TROUBLE_CAP
        seconds = max(backoff(self._troubles, first=_TROUBLE_FIRST, cap=cap), verdict.retry_after)
        said, at = self._trouble_said
        now = time.monotonic()
        grows = _TROUBLE_FIRST * 2.0 ** min(self._troubles - 2, 40) < cap
        if grows or error_class != said or now - at >= REPORT_EVERY:
            self._trouble_said = (error_class, now)
            self._log(
                Event(
                    "relay.trouble",
                    f"relay {visible(self.result.relay)}: {self._to} does not take events: {error_class};"
                    f" trying again in {duration(seconds)}",
                    WARNING,
                    policy=self.result.policy,
                    error_class=error_class,
                    seconds=seconds,
                )
            )
        self._sleep(seconds)


def _too_slow(error: ReaperError, *, payload: bool = False) -> StatementTimeout:
    """That the fetch of one event timed out, with what helps against that."""
    what = "the payload of one event alone" if payload else "one event alone"
    more = ", or leave large columns out of --payload" if payload else ""
    return StatementTimeout(
        f"fetching {what} takes too long: {error.message}",
        hint=f"Nothing is lost.  Give the role a longer statement_timeout{more}.",
        sqlstate=error.sqlstate,
        original=error.original,
    )


_IN_WORDS: Final = {
    "delivered": "delivered",
    "retry": "tries refused for now",
    "dead": "given up",
    "returned": "tries came back",
    "lost": "left to another process",
}

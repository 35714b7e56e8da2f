"""
The worker: claim, expire, again, until nothing is due or somebody says stop.

Owns the loop over the policies and nothing about holds: what is due and what becomes
of it is decided in SQL.  The connection, signals and trouble of the environment are
:mod:`pgreaper.session`'s.  A reply that is lost is asked for again: ``reaper_expire``
answers for a token whatever it recorded.
"""

import math
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn

import psycopg

from pgreaper.api import (
    DEAD_LETTER,
    EXPIRED,
    LOCKED,
    RETRY,
    TOO_SLOW,
    Backend,
    Batch,
    Look,
    Pace,
    Reaper,
    unknown_policy,
)
from pgreaper.connection import Address, worker_name
from pgreaper.errors import (
    READ_ONLY,
    AccessDenied,
    DatabaseBusy,
    DatabaseUnavailable,
    InvalidInput,
    LeaseLost,
    QueryCancelled,
    ReaperError,
    StatementTimeout,
    UnknownPolicy,
    WrongTransaction,
)
from pgreaper.logs import DEBUG, ERROR, EXAMPLES, INFO, WARNING, Event, Log
from pgreaper.session import BUSY_TRIES, REPORT_EVERY, Ending, Session, Stop, Stopped, backoff, pause
from pgreaper.text import count, duration, key, plural, visible

if TYPE_CHECKING:
    from uuid import UUID

    from pgreaper.handlers import Desk, Handler, Pool
    from pgreaper.heartbeat import Heartbeat
    from pgreaper.records import Failure, Hold

# A rescan is wanted this many seconds after the last, and after this many times its cost.
# It is a little less than the default poll: an idle daemon rescans whenever it looks.
_RESCAN_AFTER: Final = 4.5
_RESCAN_SHARE: Final = 75.0
# Awake this little after a hold is due, so that the database's clock agrees.
_AFTER_DUE: Final = 0.001
# A batch that takes longer keeps the other policies, the application and a signal waiting: the next ones are smaller.
_LONG_BATCH: Final = 1.0
# Under a rate limit a batch is followed by the time in which as much comes in, of so many seconds at most.
_LONGEST_PACE: Final = 1.0
# A batch that takes less says that the next one may be claimed together with its end.
_QUICK_BATCH: Final = 0.2
# A claim whose transition has cost so many connections is left to lapse: some hold of it may kill its backend.
_LOSSES: Final = 2
# A run that ends leaves a policy after so many of those.
_LEFT_CLAIMS: Final = 4
# A policy of which so many batches in a row found only locked rows is left for the next run.
_STALLED_BATCHES: Final = 8
# So many holds in a row that take too long, each alone, speak of the policy.
_SAME: Final = 8
# A policy that fails is left for at most so many seconds; one that only is locked, for a shorter time.
_FAILED_CAP: Final = 60.0
_BUSY_CAP: Final = 5.0
# The first so many failures in a row of a policy are told one by one, then one a minute.
_TOLD_FAILURES: Final = 4
# So many different things are told of a policy in a minute, whatever its handler calls its errors.
_TOLD_REASONS: Final = 20
# A daemon that finds only locked rows looks again at the latest after so many seconds.
_STALLED_CAP: Final = 2.0
_LARGEST_BATCH: Final = 10_000
# With a handler a claim takes so many holds per call that may run at once: fewer are charged when the worker dies.
_HOLDS_PER_CALL: Final = 8
# Calls that keep every place although their time is over are waited for at most so many seconds.
_LONGEST_CROWD: Final = 60.0
HANDLER_TIMEOUT: Final = 300.0
"""Seconds that a call may take unless somebody says otherwise: one that hangs must not keep the other policies."""


class Settings(NamedTuple):
    """
    What a run is asked to do; lengths of time in seconds, None: no limit, or the policy's own.

    ``every_batch``: log each batch and each hold that failed, at level debug; otherwise what is told is bounded.
    """

    policies: Sequence[str] = ()
    daemon: bool = False
    once: bool = False
    batch: int | None = None
    max_rows: int | None = None
    max_seconds: float | None = None
    poll: float = 5.0
    heartbeat: Path | None = None
    shutdown_timeout: float = 20.0
    handler: "Handler | None" = None
    concurrency: int = 8
    handler_timeout: float | None = HANDLER_TIMEOUT
    fail_on_dead_letter: bool = False
    every_batch: bool = False


@dataclass(slots=True)
class PolicyRun:
    """
    What a run did for one policy.

    ``error`` is the last failure of a batch as a whole; ``reasons`` counts the failed holds by error class,
    SQLSTATE and constraint; ``suspended`` says why the policy is, if it is.  ``resting`` says that it is paused or
    passive, and so that nothing of it was looked for.  ``skipped`` holds were put off by the handler; ``dead`` is
    how many dead letters there are, in a run that was asked to look.
    """

    policy: str
    claims: int = 0
    claimed: int = 0
    released: int = 0
    lost: int = 0
    skipped: int = 0
    dead: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    error: ReaperError | None = None
    failures: int = 0
    reasons: Counter[tuple[str, str | None, str | None]] = field(default_factory=Counter)
    suspended: str | None = None
    resting: str | None = None

    @property
    def failed(self) -> bool:
        """Whether something needs a person, or a retry: a batch that raised, a hold that failed, a suspension."""
        failed = self.outcomes[RETRY] + self.outcomes[DEAD_LETTER] + self.dead + self.failures
        return failed > 0 or self.suspended is not None


@dataclass(slots=True)
class Run(Ending):
    """
    What a run did.

    ``ended`` is ``drained``, ``once``, ``max-rows``, ``max-seconds``, ``signal``, ``unavailable`` or ``failed``.
    """

    worker: str
    policies: dict[str, PolicyRun] = field(default_factory=dict)

    @property
    def outcomes(self) -> Counter[str]:
        """Outcomes of all policies."""
        return sum((p.outcomes for p in self.policies.values()), Counter())

    @property
    def expired(self) -> int:
        """Holds that made the transition in this run."""
        return sum(p.outcomes[EXPIRED] for p in self.policies.values())

    @property
    def exit_code(self) -> int:
        """0 all went well or nothing was due, 1 something failed, 75 the environment did, 128 + n two signals."""
        if self.decided is not None:
            return self.decided
        broken = [p for p in self.policies.values() if p.failed]
        later = DatabaseUnavailable.exit_code
        if broken and all(p.error is not None and p.error.exit_code == later and not p.outcomes[DEAD_LETTER]
                          for p in broken):  # fmt: skip
            return later
        return 1 if broken else 0


class Vitals(NamedTuple):
    """
    How a worker is doing, for its metrics: counts since it began.

    ``busy`` seconds went into batches; ``skew`` is by how many seconds its clock is ahead of the database's,
    None: not known.  ``failures`` are batches that raised as a whole.
    """

    batches: int
    failures: int
    reconnects: int
    busy: float
    skew: float | None


class _Turn:
    """One policy's place in the round: its batch, its rescans, its pauses."""

    def __init__(self, policy: str, batch: int) -> None:
        self.policy = policy
        # Holds per second that the whole fleet may take; None: no limit.
        self.rate_limit: float | None = None
        self.full_batch = batch
        self.batch = batch
        self.ceiling = batch
        self.done = False
        # When there was nothing more of it, in a run that ends.
        self.drained_at: float | None = None
        # How many holds the last claim asked for, and the claim that came with the last transition.
        self.asked = 0
        self.ahead: Batch | None = None
        # Whether the last batch was done so soon that the next may be as large.
        self.quick = False
        self.rescanned_at: float | None = None
        # Whether the last claim, which came to nothing, was one of those.
        self.rescan_refused = False
        self.rescan_cost = 0.0
        self.stalled = 0
        self.resume_at = 0.0
        # For a daemon: when to claim, by the monotonic clock; None: not known, look.
        self.due_at: float | None = None
        self.progressed = False
        self.misses = 0
        self.busy = 0
        self.failures = 0
        # How often in a row this policy's turn has cost the connection, the last time in a claim, and how many claims
        # were left for it.
        self.losses = 0
        self.lost_claiming = False
        self.left = 0
        self.was_suspended = False
        self.same = ("", 0)
        self.too_slow = 0
        # What failed in this run, and whether the last claim was given back for it.
        self.tried: set[str] = set()
        self.tried_again = False
        self._told: dict[str, float] = {}
        # What was not told yet, because the like of it was.
        self.untold: Counter[object] = Counter()

    @property
    def wakes_at(self) -> float:
        """When a daemon has something to do for it: claim, or look."""
        return max(self.resume_at, self.due_at or 0.0)

    def may_tell(self, what: str) -> bool:
        """Whether neither this nor much else was said lately: a reason that holds for many batches is one line."""
        now = time.monotonic()
        self._told = {said: at for said, at in self._told.items() if now - at < REPORT_EVERY}
        if what in self._told or len(self._told) >= _TOLD_REASONS:
            return False
        self._told[what] = now
        return True

    def resize(self, full: int) -> None:
        """The policy's batch may have been registered anew."""
        if full != self.full_batch:
            self.full_batch = self.ceiling = self.batch = full

    def shrink(self, holds: int) -> None:
        """So many were too many for the statement timeout: go well below, and back up only slowly."""
        self.ceiling = max(1, holds // 2)
        self.batch = max(1, holds // 4)

    def pace(self, holds: int, seconds: float) -> None:
        """A batch of so many took so long: aim for batches of a second."""
        if seconds > _LONG_BATCH and holds > 1:
            self.ceiling = self.batch = max(1, int(holds * _LONG_BATCH / seconds))

    def grow(self) -> None:
        """A batch went well: double, up to a ceiling that rises by a hundredth of the full batch each time."""
        self.batch = min(self.ceiling, self.batch * 2)
        self.ceiling = min(self.full_batch, self.ceiling + max(1, self.full_batch // 100))

    def widen(self) -> None:
        """A whole batch was locked.  Holds that share its last deadline may lie behind it: reach past them."""
        self.batch = min(_LARGEST_BATCH, self.batch * 4)

    def wants_rescan(self, now: float) -> bool:
        return self.rescanned_at is None or now - self.rescanned_at > max(
            _RESCAN_AFTER, _RESCAN_SHARE * self.rescan_cost
        )

    def rescanned(self, at: float, cost: float) -> None:
        self.rescanned_at = at
        self.rescan_cost = cost


class Worker:
    """
    One run.  Create it, call :meth:`run` once.

    ``log`` receives the events (:mod:`pgreaper.logs`); ``on_batch`` is called after each batch, with the worker;
    ``on_leave`` with what was done so far, from another thread, when the process must be left because the main one
    hangs.
    """

    def __init__(
        self,
        address: Address,
        settings: Settings,
        *,
        log: Log,
        on_batch: "Callable[[Worker], None] | None" = None,
        on_leave: Callable[[Run], None] | None = None,
    ) -> None:
        self.settings = settings
        self.name = worker_name()
        self.result = Run(worker=self.name)
        self._log = log
        self._on_batch = on_batch
        self._on_leave = on_leave
        self._stop = Stop(settings.shutdown_timeout, log, self._beat, self._leave)
        self._heartbeat: Heartbeat | None = None
        self._session = Session(
            address,
            name=self.name,
            log=log,
            stop=self._stop,
            stays=settings.daemon,
            poll=settings.poll,
            beat=self._beat,
        )
        self._pool: Pool | None = None
        # Sessions in which a claim's answer was lost, and the tokens that were heard of since the first of them.
        self._unheard: set[Backend] = set()
        self._heard: set[UUID] = set()
        self._holds: list[Hold] = []
        self._turns: list[_Turn] = []
        # A random phase, and then one look a poll: however often a fleet wakes together, it polls apart.
        self._poll_at = time.monotonic() + settings.poll * random.random()  # noqa: S311
        self._crowded_since: float | None = None
        self._busy = 0.0
        self._reported_at = 0.0
        self._reported: Counter[str] = Counter()
        self._started = 0.0

    # -- the run

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
                    self._give_back_what_is_ahead()
                    if self.result.ended != "signal":
                        self._look_around()
                except ReaperError as trouble:
                    self.result.trouble = trouble
                    self.result.ended = "unavailable" if isinstance(trouble, DatabaseUnavailable) else "failed"
            except Stopped:
                self.result.ended = "signal"
                self._give_back_what_is_ahead()
            finally:
                self._session.close()
                if self._pool is not None:
                    self._pool.close()
                    if left := len(self._pool.running):
                        text = f"left behind: {plural(left, 'call')} of the handler that did not end"
                        self._log(Event("handler.left-behind", text, WARNING, counts={"calls": left}))
                if self._heartbeat is not None:
                    self._heartbeat.end()
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
            counts={**self.result.outcomes, "exit_code": self.result.exit_code, "reconnects": self.result.reconnects},
            seconds=self.result.seconds,
            code=trouble.code if trouble else None,
            sqlstate=trouble.sqlstate if trouble else None,
            constraint=trouble.constraint if trouble else None,
            hint=trouble.hint if trouble else None,
        )

    @property
    def vitals(self) -> Vitals:
        """How it is doing now; any thread may ask."""
        runs = list(self.result.policies.values())
        return Vitals(
            batches=sum(run.claims for run in runs),
            failures=sum(run.failures for run in runs),
            reconnects=self._session.reconnects,
            busy=self._busy,
            skew=None if self._session.skew is None else self._session.skew.total_seconds(),
        )

    @property
    def left_calls_behind(self) -> bool:
        """Whether a call of the handler was given up: it may still run, or what it began in another thread."""
        return self._pool is not None and self._pool.gave_up

    def _beat(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.beat()

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
        if self.settings.heartbeat is not None:
            from pgreaper.heartbeat import Heartbeat

            try:
                self._heartbeat = Heartbeat(self.settings.heartbeat, self.name)
            except OSError as error:
                raise InvalidInput(
                    f"the heartbeat file {self.settings.heartbeat} cannot be written: {(error.strerror or '').lower()}",
                    hint="Its folder must be there, and writable for this user.",
                ) from None
        if self.settings.handler is not None:
            from pgreaper.handlers import Pool

            self._pool = Pool(self.settings.handler, self.settings.concurrency)
        self._session.connect(first=True)
        self._enlist(self._session.retrying(lambda r: r.registered()))
        text = ""
        if self.settings.daemon:
            what = plural(len(self._turns), "policy").replace("policys", "policies")
            text = f"{self.name} is up, {what}, looks at least every {duration(self.settings.poll)}"
        self._log(Event("worker.started", text, counts={"policies": len(self._turns)}))

    def _loop(self) -> None:
        while not self._over():
            for turn in self._ready():
                if self._over():
                    return
                began = time.monotonic()
                try:
                    progressed = self._step(turn)
                except (DatabaseUnavailable, WrongTransaction) as trouble:
                    self._busy += time.monotonic() - began
                    self._session.reconnect(trouble)
                    self._release_unheard()
                    progressed = self._cut_off(turn, trouble)
                else:
                    self._busy += time.monotonic() - began
                self._after(turn, progressed=progressed)
            if self.settings.daemon:
                self._rest()
            elif all(turn.done for turn in self._turns):
                self.result.ended = "once" if self.settings.once else "drained"
                return
            elif (wait := self._until([t.resume_at for t in self._turns if not t.done])) > 0:
                self._stop.wait(min(wait, self.settings.poll))
                self._reopen()

    def _reopen(self) -> None:
        """While a rate limit keeps a run, what was drained a poll ago is looked at again."""
        for turn in self._turns:
            if turn.drained_at is not None and time.monotonic() - turn.drained_at >= self.settings.poll:
                turn.done = False

    def _ready(self) -> list[_Turn]:
        """The turns that come now: in a daemon those that are due, otherwise all that are not done."""
        now = time.monotonic()
        return [
            t
            for t in self._turns
            if not t.done
            and t.resume_at <= now
            and (not self.settings.daemon or (t.due_at is not None and t.due_at <= now))
        ]

    def _after(self, turn: _Turn, *, progressed: bool) -> None:
        """What a step says about the next one of this policy."""
        turn.done = turn.done or self.settings.once
        now = time.monotonic()
        if progressed:
            turn.misses = 0
            turn.due_at = 0.0  # Where there was something there is often more, and claiming costs no more than asking.
        elif turn.resume_at > now:
            turn.due_at = 0.0  # It failed and rests; to look first would only fail likewise.
        else:
            turn.due_at = None
            if self.settings.daemon and not turn.progressed:
                # Due, and yet not to be had: others have it, or as many leases as may be.  Look less and less often.
                turn.misses += 1
                turn.resume_at = now + backoff(turn.misses, first=0.01, cap=self.settings.poll)
        turn.progressed = progressed

    def _await_rate(self, turn: _Turn) -> None:
        """Nothing was to be had: a run that ends is not done while the rate limit keeps it from what is due."""
        # Behind the cursor too where the claim would have looked there.
        rescan = [turn.policy] if turn.rescan_refused else []
        try:
            looks, began = self._ask([turn.policy], [], rescan)
        except ReaperError as trouble:
            self._session.require_fit(trouble)
            return
        for look in looks:
            turn.rate_limit = look.pace.rate_limit
            if look.wait is None or (look.wait > 0 and not look.limited):
                continue
            # Not for longer than a poll: it may be registered anew.  At once only if a portion came in just now.
            turn.misses += 1
            turn.done = not look.limited and turn.misses >= _STALLED_BATCHES
            wait = look.wait + _AFTER_DUE if look.wait > 0 else backoff(turn.misses, first=0.01, cap=_LONGEST_PACE)
            turn.resume_at = began + min(wait, self.settings.poll)
            if not turn.done and rescan:
                turn.rescanned_at = None

    def _over(self) -> bool:
        """Whether the run ends here, and why."""
        if self._stop.requested:
            self.result.ended = "signal"
        elif (limit := self._limit_reached()) is not None:
            self.result.ended = limit
        else:
            return False
        return True

    def _cut_off(self, turn: _Turn, trouble: ReaperError) -> bool:
        """
        The connection was lost in this policy's turn, and is there again.  Whether to go on as if nothing had been.

        Once is nobody's fault.  Twice in the same work may be a hold that kills its backend: its claim lapses, is
        charged as a crash, and comes back in ever smaller batches; meanwhile the other policies are served.
        """
        turn.losses += 1
        if turn.losses < _LOSSES:
            return True
        turn.losses = 0
        turn.left += 1
        turn.shrink(turn.batch)
        error = DatabaseUnavailable(
            "the connection was lost twice in the same work",
            hint="A trigger that ends its own session does that, and so does a network that cuts long statements.",
            sqlstate=trouble.sqlstate,
            original=trouble.original,
        )
        self._failed(
            turn,
            self._run_of(turn),
            error,
            rest="nothing was changed" if turn.lost_claiming else "what it had claimed is left to lapse",
            final=turn.left >= _LEFT_CLAIMS,
        )
        return not (self.settings.daemon or turn.done)

    def _limit_reached(self) -> str | None:
        s = self.settings
        if s.max_rows is not None and self.result.expired >= s.max_rows:
            return "max-rows"
        if s.max_seconds is not None and time.monotonic() - self._started >= s.max_seconds:
            return "max-seconds"
        return None

    def remaining(self) -> int:
        """About how many holds are still due; bounded counts, and beyond their bound the planner's estimate."""
        names = [turn.policy for turn in self._turns]
        try:
            known = {s.policy: s for s in self._session.call(lambda r: r.status(names))}
            total = 0
            for status in known.values():
                total += status.due or 0
                if status.due_capped:
                    total += max(self._estimate(status.policy) - (status.due or 0), 0)
        except (ReaperError, psycopg.Error):
            return 0  # Progress is a courtesy.
        return total

    def _estimate(self, policy: str) -> int:
        from pgreaper.targets import estimated_due  # only a long drain on a terminal comes here

        assert self._session.connection is not None  # noqa: S101
        found = self._session.call(lambda r: r.policies())
        return next((estimated_due(self._session.connection, p) for p in found if p.policy == policy), 0)

    # -- one batch

    def _step(self, turn: _Turn) -> bool:
        """One batch of one policy.  Whether there was anything; raises only when the connection is of no more use."""
        run = self._run_of(turn)
        began = time.monotonic()
        if self._pool is not None and not self._pool.has_room:
            # Calls whose lease was lost, and that go on all the same, have every place.
            self._wait_for_a_place(self._pool)
            return True
        batch, turn.ahead, turn.drained_at = turn.ahead, None, None
        try:
            batch = batch or self._claim(turn)
        except UnknownPolicy as error:
            self._withdrawn(turn, run, error)
            return False
        except ReaperError as error:
            if self._session.is_lost(error):
                raise
            if not (isinstance(error, DatabaseBusy) and self._makes_way(turn)):
                self._failed(turn, run, _in_spite(error))
            return False
        if batch is None:
            turn.losses = 0
            turn.done = not self.settings.daemon
            turn.drained_at = time.monotonic()
            if turn.done and turn.rate_limit is not None:
                self._await_rate(turn)
            return False

        if turn.rate_limit is not None and batch.holds >= min(turn.asked, turn.rate_limit / 2):
            # There will be more: evenly, whatever has been saved up.
            turn.resume_at = began + min(batch.holds / turn.rate_limit, _LONGEST_PACE)
        run.claims += 1
        run.claimed += batch.holds
        if turn.tried and batch.attempt > 1 and not self.settings.daemon and self._was_tried(turn, batch):
            return self._put_off(turn, run, batch)
        turn.tried_again = False
        if self._pool is not None:
            return self._hand_over(turn, run, batch)
        try:
            outcomes = self._settle(turn, batch)
        except LeaseLost:
            # Another worker has its holds already; what it did not do, it will.
            run.lost += batch.holds
            self._lost(turn, batch)
            return True
        except ReaperError as error:
            if self._session.is_lost(error):
                run.lost += batch.holds  # It lapses: nobody is there to give it back.
                raise
            self._give_back(batch, run)
            if isinstance(error, QueryCancelled) and batch.holds > 1 and not self._stop.requested:
                told = turn.ceiling < turn.full_batch
                turn.shrink(batch.holds)
                if not told:
                    why = (
                        f"{plural(batch.holds, 'hold')} were too many for the statement timeout"
                        if isinstance(error, StatementTimeout)
                        else "somebody cancelled the statement"
                    )
                    self._log(
                        Event(
                            "batch.too-large",
                            f"policy {visible(turn.policy)}: {why}; going on with smaller batches",
                            WARNING,
                            policy=turn.policy,
                            token=batch.token,
                            counts={"holds": batch.holds},
                            code=error.code,
                            sqlstate=error.sqlstate,
                        )
                    )
                return True
            self._failed(turn, run, _in_spite(error))
            return False

        run.outcomes.update(outcomes)
        if outcomes[RETRY] + outcomes[DEAD_LETTER] > 0:
            self._explain(turn, run, batch, outcomes)
        self._did(turn, batch, outcomes, time.monotonic() - began)
        if outcomes[EXPIRED] > 0:
            turn.too_slow = 0
        elif turn.too_slow >= _SAME:
            self._failed(turn, run, _all_too_slow(turn.too_slow), rest="the rest is left for the next run")
            return False
        self._settled(turn, outcomes)
        turn.quick = time.monotonic() - began < _QUICK_BATCH
        if self.settings.batch is None:
            turn.pace(batch.holds, time.monotonic() - began)
        return True

    def _was_tried(self, turn: _Turn, batch: Batch) -> bool:
        """Whether a claim of retries has a hold that failed in this run already."""
        if self._pool is not None:
            return any(hold.key in turn.tried for hold in self._holds)
        try:
            return not turn.tried.isdisjoint(self._session.patiently(lambda r: r.leased_keys(batch.token)))
        except ReaperError:
            return False  # The transition meets the same trouble, and knows what to do.

    def _put_off(self, turn: _Turn, run: PolicyRun, batch: Batch) -> bool:
        """No hold is tried twice in a run that ends.  Claims of retries alternate with fresh ones: two are the end."""
        self._give_back(batch, run)
        turn.done = turn.tried_again
        turn.tried_again = True
        return not turn.done

    def _did(self, turn: _Turn, batch: Batch, outcomes: Counter[str], seconds: float) -> None:
        """A batch, for whoever wants to hear of each."""
        if self.settings.every_batch:
            told = ", ".join(f"{count(n)} {outcome}" for outcome, n in outcomes.items() if n) or "nothing settled"
            text = f"policy {visible(turn.policy)}: batch of {plural(batch.holds, 'hold')}: {told}"
            self._log(
                Event(
                    "batch.done",
                    f"{text}; {duration(seconds)}",
                    DEBUG,
                    policy=turn.policy,
                    token=batch.token,
                    counts={"holds": batch.holds, **outcomes},
                    seconds=seconds,
                )
            )

    def _lost(self, turn: _Turn, batch: Batch) -> None:
        """Another worker has the holds of a batch; told once a minute."""
        turn.untold["lost"] += batch.holds
        if turn.may_tell("lost"):
            holds = turn.untold.pop("lost")
            self._log(
                Event(
                    "lease.lost",
                    f"policy {visible(turn.policy)}: the lease of {plural(holds, 'hold')} was taken back",
                    WARNING,
                    policy=turn.policy,
                    token=batch.token,
                    counts={"holds": holds},
                    sqlstate="RP001",
                )
            )

    def _wait_for_a_place(self, pool: "Pool") -> None:
        """Wait a second for a call to end.  Where calls have a time limit, as long again, or a minute, is the end."""
        now = time.monotonic()
        if not pool.finished():
            self._crowded_since = self._crowded_since or now
            timeout = self.settings.handler_timeout
            limit = math.inf if timeout is None else min(max(timeout, 1.0), _LONGEST_CROWD)
            if now - self._crowded_since >= limit:
                raise _no_place(pool.concurrency)
            pool.wait(min(1.0, limit), self._stop.fileno())
        else:
            self._crowded_since = None

    def _makes_way(self, turn: _Turn) -> bool:
        """Something is locked that a claim needs.  A daemon tries again between the turns of the others, some times."""
        if not self.settings.daemon:
            return False
        turn.busy += 1
        if turn.busy % BUSY_TRIES == 0:
            return False
        turn.resume_at = time.monotonic() + pause(turn.busy)
        return True

    def _hand_over(self, turn: _Turn, run: PolicyRun, batch: Batch) -> bool:
        """Call the handler for each hold of a claim, and settle what it came to."""
        from pgreaper.handlers import SAME, Shift

        assert self._pool is not None  # noqa: S101
        began = time.monotonic()
        limit = self.settings.max_seconds
        report = Shift(
            self._pool,
            self._desk(),
            turn.policy,
            self._holds,
            until=math.inf if limit is None else self._started + limit,
            grace=self.settings.shutdown_timeout,
            timeout=self.settings.handler_timeout or math.inf,
            same=turn.same,
            too_slow=turn.too_slow,
        ).run()
        turn.same, turn.too_slow = report.same, report.too_slow
        run.outcomes.update(report.outcomes)
        run.released += report.released
        run.lost += report.lost
        run.skipped += report.skipped.total()
        if report.outcomes[RETRY] + report.outcomes[DEAD_LETTER] > 0:
            self._explain(turn, run, batch, report.outcomes, apart=report.skipped)
        self._did(turn, batch, report.outcomes, time.monotonic() - began)
        if report.exits and turn.may_tell("exit"):
            self._tell_of_exits(turn, report.exits)
        if report.interrupted:
            raise KeyboardInterrupt
        if turn.too_slow >= _SAME and not self._stop.requested:
            self._failed(turn, run, _all_too_slow(turn.too_slow), rest="the rest is left for the next run")
            return False
        if report.error is not None:
            if report.cut_off:
                turn.losses = _LOSSES - 1  # It was asked again already.
                raise report.error
            if self._session.is_lost(report.error):
                raise report.error
            self._failed(turn, run, _in_spite(report.error))
            return False
        if turn.same[1] >= SAME and not self._stop.requested:
            self._failed(turn, run, _always_fails(*turn.same), rest="the rest is left for the next run")
            return False
        self._settled(turn, report.outcomes)
        return True

    def _desk(self) -> "Desk":
        from pgreaper.handlers import Desk

        session = self._session
        return Desk(session.patiently, session.is_lost, session.reconnect, self._stop, self._log, self._beat)

    def _tell_of_exits(self, turn: _Turn, kinds: Counter[str]) -> None:
        """A handler that wants to end the process ends its call and nothing else."""
        from pgreaper.handlers import name_of

        assert self.settings.handler is not None  # noqa: S101
        name = visible(name_of(self.settings.handler))
        self._log(
            Event(
                "handler.exited",
                f"policy {visible(turn.policy)}: the handler {name} raised {', '.join(sorted(kinds))}:"
                " that fails its call, and does not end the process",
                WARNING,
                policy=turn.policy,
                counts={"calls": kinds.total()},
            )
        )

    def _settled(self, turn: _Turn, outcomes: Counter[str]) -> None:
        """A batch went as it should; what that says about the next."""
        all_locked = 0 < outcomes[LOCKED] == outcomes.total()
        if (turn.failures > 0 and not all_locked) or (turn.was_suspended and outcomes[EXPIRED] > 0):
            self._works_again(turn)
        turn.failures = turn.losses = 0
        if turn.too_slow > 0:
            pass  # One hold after another fails: no time for larger batches.
        elif not outcomes[LOCKED]:
            turn.grow()
        elif all_locked:
            turn.widen()
        self._session.works()
        turn.stalled = turn.stalled + 1 if all_locked else 0
        # With a handler each look at a locked hold is another call for it.
        if turn.stalled >= (_STALLED_BATCHES if self._pool is None else 2) and not self.settings.daemon:
            turn.done = True
            text = f"policy {visible(turn.policy)}: the rest is locked by other transactions; the next run takes it"
            self._log(Event("policy.locked", text, policy=turn.policy))
        elif all_locked and self.settings.daemon:
            # Each look is a claim, and writes: look less and less often while nothing moves.
            cap = min(self.settings.poll, _STALLED_CAP)
            turn.resume_at = time.monotonic() + backoff(turn.stalled, first=0.02, cap=cap)
        if self._on_batch is not None:
            self._on_batch(self)

    def _works_again(self, turn: _Turn) -> None:
        after = f", after {plural(turn.failures, 'failure')} in a row" if turn.failures else ""
        turn.was_suspended = False
        text = f"policy {visible(turn.policy)} works again{after}"
        self._log(Event("policy.works-again", text, policy=turn.policy, counts={"failures": turn.failures}))

    def _claim(self, turn: _Turn) -> Batch | None:
        size = turn.batch
        if self._pool is not None:
            if self.settings.batch is None:
                size = min(size, _HOLDS_PER_CALL * self.settings.concurrency * 4 ** min(turn.stalled, 4))
            if (turn.same[1] > 0 or turn.too_slow > 0) and turn.failures > 0:
                size = 1  # The handler fails for every hold: one is enough to see whether it still does.
        if self.settings.max_rows is not None:
            size = min(size, self.settings.max_rows - self.result.expired)
        turn.asked = size
        began = time.monotonic()
        # A run that ends looks behind the cursor once; what it found locked is left for the next.
        rescan = turn.rescanned_at is None or (self.settings.daemon and turn.wants_rescan(began))
        # Behind a pooler there is no session to bind it to.
        session = self._session.is_direct
        # A daemon has other policies to serve meanwhile.
        ask = self._session.call if self.settings.daemon else self._session.patiently
        self._release_unheard()
        self._session.compare_clocks()
        skew = self._session.skew
        try:
            if self._pool is None:
                batch = ask(
                    lambda r: r.claim_batch(
                        turn.policy, batch=size, worker=self.name, rescan=rescan, session=session, skew=skew
                    )
                )
            else:
                self._holds = ask(
                    lambda r: r.claim(
                        turn.policy, batch=size, worker=self.name, rescan=rescan, session=session, skew=skew
                    )
                )
                first = self._holds[0] if self._holds else None
                batch = (
                    None if first is None else Batch(first.token, len(self._holds), first.claim_until, first.attempt)
                )
        except ReaperError as trouble:
            turn.lost_claiming = self._session.is_lost(trouble)
            if session and turn.lost_claiming:
                self._unheard.add(self._session.backend)
            raise
        turn.lost_claiming = False
        if batch is not None:
            self._hear(batch)
        if rescan:
            turn.rescanned(began, time.monotonic() - began)
        turn.rescan_refused = rescan and batch is None
        turn.busy = 0
        return batch

    def _settle(self, turn: _Turn, batch: Batch) -> Counter[str]:
        """Expire a claim, through deadlocks and a lost connection: asking again is safe, but not for ever."""
        blamed = False
        losses = 0
        ahead = self._claims_ahead(turn, batch)
        while True:
            try:
                if ahead:
                    outcomes, turn.ahead = self._session.call(
                        lambda r: r.expire_batch_and_claim(
                            batch.token, batch=turn.asked, session=True, skew=self._session.skew
                        )
                    )
                    if turn.ahead is not None:
                        self._hear(turn.ahead)
                    return outcomes
                return self._session.patiently(lambda r: r.expire_batch(batch.token))
            except ReaperError as trouble:
                if ahead:
                    ahead = False
                    if not self._session.is_lost(trouble):
                        continue  # Whichever of the two it was: alone, the transition tells.
                    self._unheard.add(self._session.backend)
                if isinstance(trouble, StatementTimeout) and batch.holds == 1 and not (blamed or self._stop.requested):
                    blamed = True
                    self._blame(turn, batch)
                    continue
                if not self._session.is_lost(trouble) or self._stop.requested:
                    raise
                losses += trouble.sqlstate not in READ_ONLY
                if losses == _LOSSES:
                    turn.losses = _LOSSES - 1
                    raise
                self._session.reconnect(trouble)

    def _claims_ahead(self, turn: _Turn, batch: Batch) -> bool:
        """Whether to claim the next batch, as large as this one, in the transaction that settles it."""
        rows = self.settings.max_rows
        return (
            self._pool is None
            and self._session.is_direct
            and turn.quick
            and turn.rate_limit is None
            and not self.settings.once
            and not self._stop.requested
            and batch.attempt == 1
            and batch.holds >= turn.asked == turn.batch
            and (rows is None or rows - self.result.expired - batch.holds >= turn.asked)
            and not (self.settings.daemon and turn.wants_rescan(time.monotonic()))
            and self._ready() in ([], [turn])  # Others would have waited.
        )

    def _blame(self, turn: _Turn, batch: Batch) -> None:
        """A hold takes longer than a statement may, alone: that is its failure.  Its claim then ends without it."""
        for hold in self._session.retrying(lambda r: r.leased_keys(batch.token)):
            self._session.retrying(lambda r, hold=hold: r.fail(batch.token, hold, error_class=TOO_SLOW, transient=True))  # type: ignore[misc]
        turn.too_slow += 1

    def _give_back(self, batch: Batch, run: PolicyRun) -> None:
        """Release a claim if that is possible now; otherwise its lease lapses."""
        self._stop.settle()
        try:
            run.released += self._session.patiently(lambda r: r.release(batch.token))
        except (ReaperError, Stopped):
            run.lost += batch.holds

    def _hear(self, batch: Batch) -> None:
        """A claim's answer has come: whatever becomes of it, :meth:`_release_unheard` leaves it alone."""
        if not self._unheard:
            self._heard = {turn.ahead.token for turn in self._turns if turn.ahead is not None}
        self._heard.add(batch.token)

    def _release_unheard(self) -> None:
        """Give back what was claimed in a call whose answer was lost with its connection; it may still be running."""
        for backend in list(self._unheard):
            with suppress(ReaperError):  # It lapses, or the next claim tries again.
                if self._session.patiently(lambda r, b=backend: r.release_unheard(b, self.name, list(self._heard))):  # type: ignore[misc]
                    self._unheard.discard(backend)

    def _give_back_what_is_ahead(self) -> None:
        """Claims that came with a transition and were not begun: the run ends."""
        if self._unheard:
            self._stop.settle()
            with suppress(Stopped):
                self._release_unheard()
        for turn in self._turns:
            batch, turn.ahead = turn.ahead, None
            if batch is not None:
                self._give_back(batch, self._run_of(turn))

    def _failed(
        self,
        turn: _Turn,
        run: PolicyRun,
        error: ReaperError,
        rest: str = "nothing of that batch was changed",
        *,
        final: bool = True,
    ) -> None:
        """A batch raised: say so and go on with the other policies; a run that ends is done with this one if final."""
        if self._stop.requested:
            raise Stopped  # We cancelled it ourselves.
        if error.sqlstate == "55P03":
            error = self._session.whose_lock(turn.policy, error)
        self._session.require_fit(error)
        run.error = error
        run.failures += 1
        turn.failures += 1
        pause = None
        news = True
        if self.settings.daemon:
            pause = backoff(turn.failures, first=1.0, cap=_BUSY_CAP if isinstance(error, DatabaseBusy) else _FAILED_CAP)
            turn.resume_at = time.monotonic() + pause
            rest = f"trying again in {duration(pause)}"
            news = turn.may_tell(error.message)
        else:
            turn.done = final
        if news or turn.failures <= _TOLD_FAILURES:
            self._log(
                Event(
                    "policy.failed",
                    f"policy {visible(turn.policy)}: {error.message}; {rest}",
                    WARNING if isinstance(error, DatabaseUnavailable) else ERROR,
                    policy=turn.policy,
                    seconds=pause,
                    code=error.code,
                    sqlstate=error.sqlstate,
                    constraint=error.constraint,
                    hint=error.hint if news and isinstance(error, AccessDenied) else None,
                )
            )

    def _explain(
        self, turn: _Turn, run: PolicyRun, batch: Batch, outcomes: Counter[str], apart: Container[str] = ()
    ) -> None:
        """Holds failed: say why, each reason once in a run and, in a daemon, once in a while."""
        try:
            failures = self._session.patiently(lambda r: r.failures(batch.token))
            charged = sum(f.holds for f in failures if f.outcome == RETRY and f.error_class not in apart)
            suspended = {}
            if charged < outcomes[RETRY]:
                suspended = self._session.patiently(lambda r: r.suspended([turn.policy]))
        except ReaperError:
            return  # The books have it; the count is in the outcomes.
        if suspended:
            # Nobody was charged for these: they are as they were.
            spared = Counter({RETRY: outcomes[RETRY] - charged})
            outcomes -= spared
            run.outcomes -= spared
            run.released += spared.total()
        for f in failures:
            if not self.settings.daemon:
                turn.tried.update(f.keys)
            if f.error_class in apart:
                continue  # Not failed: put off.
            run.reasons[f.error_class, f.sqlstate, f.constraint_name] += f.holds
            self._tell_failure(turn, batch, f)
        for reason in suspended.values():
            run.suspended = reason
            turn.was_suspended = True
            if turn.may_tell(reason):
                text = f"policy {visible(turn.policy)} is suspended, no hold is charged: {reason}"
                self._log(Event("policy.suspended", text, ERROR, policy=turn.policy))

    def _tell_failure(self, turn: _Turn, batch: Batch, f: "Failure") -> None:
        where = f" (SQLSTATE {f.sqlstate}{f', constraint {f.constraint_name}' if f.constraint_name else ''})"
        end = "now a dead letter" if f.outcome == DEAD_LETTER else "to be tried again"
        what = f.error_class + (where if f.sqlstate else "")
        told = Event(
            "holds.failed",
            level=ERROR if f.outcome == DEAD_LETTER else WARNING,
            policy=turn.policy,
            token=batch.token,
            keys=f.keys[:EXAMPLES],
            outcome=f.outcome,
            error_class=f.error_class,
            sqlstate=f.sqlstate,
            constraint=f.constraint_name,
        )
        turn.untold[what, end] += f.holds
        if turn.may_tell(what + end):
            holds = turn.untold.pop((what, end))
            text = f"policy {visible(turn.policy)}: {plural(holds, 'hold')} failed, {end}: {what}"
            self._log(told._replace(text=text, counts={"holds": holds}))
        for hold in f.keys if self.settings.every_batch else ():
            text = f"policy {visible(turn.policy)}: hold {key(hold)} failed, {end}: {what}"
            self._log(told._replace(name="hold.failed", level=DEBUG, text=text, keys=(), key=hold))

    def _look_around(self) -> None:
        """A suspended policy claims nothing and looks drained, and so does one whose holds are all dead: tell."""
        if self.settings.fail_on_dead_letter:
            dead = self._session.retrying(lambda r: r.dead([t.policy for t in self._turns]))
            for turn in self._turns:
                if n := dead.get(turn.policy, 0):
                    self._run_of(turn).dead = n
                    text = f"policy {visible(turn.policy)} has {plural(n, 'dead letter')}"
                    self._log(Event("policy.dead-letters", text, ERROR, policy=turn.policy, counts={"dead_letters": n}))
        if idle := [t.policy for t in self._turns if not self._run_of(t).claims]:
            for policy, why in self._session.retrying(lambda r: r.resting(idle)).items():
                self.result.policies[policy].resting = why
                self._log(Event("policy.resting", policy=policy))
        names = [t.policy for t in self._turns if not self._run_of(t).suspended]
        found = self._session.retrying(lambda r: r.suspended(names)) if names else {}
        for turn in self._turns:
            if turn.policy in found:
                self._run_of(turn).suspended = found[turn.policy]
                text = f"policy {visible(turn.policy)} is suspended: {found[turn.policy]}"
                self._log(Event("policy.suspended", text, ERROR, policy=turn.policy))

    def _run_of(self, turn: _Turn) -> PolicyRun:
        return self.result.policies.setdefault(turn.policy, PolicyRun(turn.policy))

    def _withdrawn(self, turn: _Turn, run: PolicyRun, error: ReaperError) -> None:
        """The policy was unregistered while we worked."""
        turn.done = True
        text = f"policy {visible(turn.policy)} is no longer registered"
        self._log(Event("policy.withdrawn", text, WARNING, policy=turn.policy))
        if turn.policy in self.settings.policies:
            run.error, run.failures = error, run.failures + 1

    # -- policies

    def _enlist(self, registered: dict[str, Pace]) -> None:
        """Refresh the round from the registered policies and their paces: keep the turns there are, add new ones."""
        for name in self.settings.policies:
            if name not in registered and not self._turns:
                raise unknown_policy(name, list(registered))
        known = {turn.policy: turn for turn in self._turns}
        # One that is gone stays until its claim has said so.
        wanted = self.settings.policies or [*registered, *(name for name, turn in known.items() if not turn.done)]
        self._turns = []
        for name in dict.fromkeys(wanted):
            pace = registered.get(name, Pace(1, None))
            size = self.settings.batch or pace.batch
            turn = known.get(name) or _Turn(name, size)
            turn.rate_limit = pace.rate_limit
            turn.resize(size)
            if name in registered:
                turn.done = turn.done and not self.settings.daemon
            self._turns.append(turn)

    # -- waiting

    def _rest(self) -> None:
        """Ask for what is not known, then sleep until there may be work: at most until the next poll."""
        self._report()
        now = time.monotonic()
        if now >= self._poll_at:
            poll = self.settings.poll
            self._poll_at += poll * (1 + (now - self._poll_at) // poll)
            self._look_at_all(now)
        elif unknown := [t for t in self._turns if not t.done and t.due_at is None and t.wakes_at <= now]:
            self._look_at(unknown)
        self._stop.wait(self._until([self._poll_at, *(t.wakes_at for t in self._turns if not t.done)]))

    def _until(self, wakes: list[float]) -> float:
        """Seconds until the first of these, or until the time of the run is over."""
        if self.settings.max_seconds is not None:
            wakes.append(self._started + self.settings.max_seconds)
        return min(wakes) - time.monotonic()

    def _look_at_all(self, now: float) -> None:
        """The poll: which policies are there, and when is there work for them?  One statement."""
        resting = {t.policy for t in self._turns if t.resume_at > now or (t.due_at is not None and t.due_at <= now)}
        turns = [t for t in self._turns if t.policy not in resting]
        names = list(self.settings.policies) or None
        self._session.compare_clocks()
        try:
            looks, began = self._ask(names, sorted(resting), [t.policy for t in turns if t.wants_rescan(now)])
        except ReaperError:
            self._look_at(turns)
            return
        self._enlist({look.policy: look.pace for look in looks})
        if self._session.age > self.settings.poll:
            self._session.works()
        self._learn([t for t in self._turns if t.policy not in resting], looks, began)

    def _look_at(self, turns: Sequence[_Turn]) -> None:
        """When is there work for these?  One that is broken must not delay the others."""
        now = time.monotonic()
        try:
            looks, began = self._ask([t.policy for t in turns], [], [t.policy for t in turns if t.wants_rescan(now)])
        except ReaperError as trouble:
            self._session.require_fit(trouble)
            for turn in turns:
                if len(turns) > 1:
                    self._look_at([turn])
                    continue
                turn.due_at = 0.0  # Its claim says what is wrong.
                if turn.may_tell("look"):
                    text = f"policy {visible(turn.policy)}: cannot look ahead: {trouble.message}"
                    self._log(
                        Event(
                            "policy.not-seen",
                            text,
                            WARNING,
                            policy=turn.policy,
                            code=trouble.code,
                            sqlstate=trouble.sqlstate,
                        )
                    )
        else:
            self._learn(turns, looks, began)

    def _ask(self, policies: list[str] | None, without: list[str], rescan: list[str]) -> tuple[dict[Look, bool], float]:
        """What the agenda says, each with whether it was a rescan, and when it was asked."""
        began = 0.0

        def ask(reaper: Reaper) -> list[Look]:
            nonlocal began
            began = time.monotonic()
            return reaper.agenda(policies, without=without, rescan=rescan)

        losses = 0
        while True:
            try:
                looks = self._session.patiently(ask)
            except ReaperError as trouble:
                if self._stop.requested:
                    raise Stopped from None  # We cancelled it ourselves.
                if not self._session.is_lost(trouble):
                    raise
                losses += trouble.sqlstate not in READ_ONLY
                self._session.reconnect(trouble)
                if losses == _LOSSES:
                    raise  # A target may be one that nobody can read and live.
            else:
                return {look: look.policy in rescan for look in looks}, began

    def _learn(self, turns: Sequence[_Turn], looks: "dict[Look, bool]", began: float) -> None:
        """Put down when these turns are due.  The waits count from ``began``: asking took as long as claiming will."""
        found = {look.policy: (look, rescan) for look, rescan in looks.items()}
        for turn in turns:
            if turn.policy not in found:
                turn.due_at = 0.0  # Withdrawn: its claim says so.
                continue
            look, rescan = found[turn.policy]
            if look.wait == 0:
                turn.due_at = 0.0
                continue  # A rescan that found something leaves the rest to the claim.
            turn.misses = 0
            turn.due_at = math.inf if look.wait is None else began + look.wait + _AFTER_DUE
            if rescan:
                turn.rescanned(began, look.cost)

    def _report(self) -> None:
        now = time.monotonic()
        if now - self._reported_at >= REPORT_EVERY:
            outcomes = self.result.outcomes
            news = outcomes - self._reported
            if news:
                seconds = now - self._reported_at
                done = ", ".join(f"{count(n)} {_IN_WORDS.get(outcome, outcome)}" for outcome, n in news.items())
                text = f"{done} in the last {duration(seconds)}"
                self._log(Event("worker.report", text, counts=dict(news), seconds=seconds))
            self._reported_at, self._reported = now, outcomes


_IN_WORDS: Final = {
    "already-done": "already done",
    "not-eligible": "not eligible",
    RETRY: "to be tried again",
    DEAD_LETTER: "dead letters",
}


def _in_spite(error: ReaperError) -> ReaperError:
    """What sounds like a node that cannot work came from one that can: say whose word it is."""
    state = error.sqlstate or ""
    if not isinstance(error, DatabaseUnavailable) or not state.startswith(("25", "57P")):
        return error
    return DatabaseUnavailable(
        f"a trigger, or what it calls, raised SQLSTATE {state}; the server itself is up and takes writes",
        hint="Nobody was charged; mend the trigger, or what it connects to.",
        sqlstate=state,
        original=error.original,
    )


def _always_fails(error_class: str, times: int) -> ReaperError:
    return ReaperError(
        f"the handler failed {times} times in a row, each time with {error_class}",
        hint="The holds are hardly to blame.  `pgreaper dead replay` gives those that it cost a fresh budget.",
    )


def _no_place(places: int) -> ReaperError:
    return ReaperError(
        f"all {places} calls that may run at once have outlived their time and do not end",
        hint="Give what the handler waits for a time limit of its own; a thread cannot be stopped.",
    )


def _all_too_slow(times: int) -> ReaperError:
    return ReaperError(
        f"{times} holds in a row took longer than the statement timeout, each alone",
        hint="Look for a slow trigger or a missing index, or give the role a longer statement_timeout.",
        sqlstate="57014",
    )

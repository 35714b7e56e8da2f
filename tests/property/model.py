"""
The contract as plain Python: what each call may answer and what it leaves behind.

The model knows nothing of cursors, hints or plans.  Where the contract leaves a choice (which of the due holds
a claim takes), it takes over the answer after judging it; everything else it predicts.

Two things keep it small: a deadline is never used twice, so an incarnation that is over stays over; and the
clock moves a little with every step, so that "before" and "after" are never the same instant.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

LEASE = timedelta(minutes=1)
BACKOFF = timedelta(seconds=3)
"""After so long a retry is due: two seconds and up to half of it as jitter."""
MAX_ATTEMPTS = 3
GONE = timedelta(seconds=5)


class LeaseLostError(Exception):
    """What the SQL says with RP001."""


@dataclass
class Hold:
    status: str
    deadline: datetime
    poison: bool = False
    """Its transition raises, each time."""
    locked: bool = False
    """Somebody has an open transaction on it."""


@dataclass
class Claim:
    deadlines: dict[str, datetime]
    claimed_at: datetime
    until: datetime
    session: int | None
    lost_at: datetime | None = None
    settled: dict[str, str] = field(default_factory=dict)
    ending: str | None = None


@dataclass
class Failure:
    deadline: datetime
    attempts: int
    failed_at: datetime
    ready_at: datetime | None
    """When it is tried again at the latest; None: it is dead."""
    discarded: bool = False


class Model:
    def __init__(self) -> None:
        self.now = datetime(2040, 1, 1, tzinfo=UTC)
        self.paused = False
        self.holds: dict[str, Hold] = {}
        self.claims: dict[str, Claim] = {}
        self.failures: dict[str, Failure] = {}
        self.trail: list[tuple[str, datetime]] = []
        self.sessions: set[int] = set()

    # What is so.

    def due(self, key: str) -> bool:
        hold = self.holds.get(key)
        return hold is not None and hold.status == "held" and hold.deadline <= self.now

    def active(self) -> dict[str, Claim]:
        return {token: claim for token, claim in self.claims.items() if claim.ending is None}

    def leased(self, key: str) -> bool:
        return any(key in claim.deadlines for claim in self.active().values())

    def leased_as(self, key: str, deadline: datetime) -> bool:
        return any(claim.deadlines.get(key) == deadline for claim in self.active().values())

    def failure(self, key: str) -> Failure | None:
        """The failure of the hold's present incarnation; those of earlier ones are nobody's business."""
        failure, hold = self.failures.get(key), self.holds.get(key)
        if failure and hold and hold.status == "held" and failure.deadline == hold.deadline:
            return failure
        return None

    def ready(self, key: str) -> bool:
        failure = self.failure(key)
        return failure is not None and failure.ready_at is not None and failure.ready_at <= self.now

    def waits(self, key: str) -> bool:
        failure = self.failure(key)
        return failure is not None and failure.ready_at is not None

    def fresh(self) -> set[str]:
        return {key for key in self.holds if self.due(key) and not self.failure(key)}

    def claimable(self) -> set[str]:
        """What a rescan must not miss."""
        return {
            key
            for key in self.holds
            if self.due(key) and not self.leased(key) and (self.ready(key) or not self.failure(key))
        }

    def current_failures(self) -> dict[str, tuple[int, bool, bool]]:
        return {
            key: (failure.attempts, failure.ready_at is None, failure.discarded)
            for key in self.holds
            if (failure := self.failure(key))
        }

    # What happens.

    def fail(
        self,
        key: str,
        deadline: datetime,
        budget: int,
        since: datetime | None,
        ready_at: datetime | None = None,
    ) -> str:
        before = self.failures.get(key)
        if before and before.deadline == deadline:
            attempts = before.attempts + 1
        elif before is None or since is None or before.failed_at < since:
            attempts = 1
        else:
            return "retry"
        dead = attempts >= budget
        self.failures[key] = Failure(deadline, attempts, self.now, None if dead else ready_at or self.now + BACKOFF)
        return "dead-letter" if dead else "retry"

    def transition(self, key: str, deadline: datetime, since: datetime | None) -> str:
        """Try to expire one hold; its outcome."""
        hold = self.holds.get(key)
        if hold is not None and hold.status == "expired":
            return "already-done"
        if hold is None or not self.due(key):
            return "not-eligible"
        if hold.locked:
            return "locked"
        if hold.poison:
            return self.fail(key, deadline, 1, since)
        self.trail.append((key, hold.deadline))
        hold.status = "expired"
        return "expired"

    def take_back(self) -> None:
        """What claims and sweeps do first: end what lapsed, notice whose session is gone."""
        for claim in self.active().values():
            gone = claim.session is not None and claim.session not in self.sessions
            if claim.until <= self.now or (gone and claim.lost_at is not None and claim.lost_at <= self.now - GONE):
                claim.ending = "taken-back"
                left = {
                    key: deadline
                    for key, deadline in claim.deadlines.items()
                    if key not in claim.settled and self.due(key) and self.holds[key].deadline == deadline
                }
                for key, deadline in left.items():
                    # Nobody dies of a crash that another may have caused.
                    self.fail(key, deadline, MAX_ATTEMPTS if len(left) == 1 else 2**31, claim.claimed_at)
            elif gone and claim.lost_at is None:
                claim.lost_at = self.now

    def claim_of(self, token: str) -> Claim:
        claim = self.claims[token]
        if claim.ending is not None:
            raise LeaseLostError
        return claim

    def expire(self, token: str, keys: list[str] | None) -> dict[str, str]:
        claim = self.claims[token]
        if claim.ending == "expired":
            return {key: outcome for key, outcome in claim.settled.items() if keys is None or key in keys}
        claim = self.claim_of(token)
        outcomes = {}
        for key, deadline in claim.deadlines.items():
            if keys is not None and key not in keys:
                continue
            outcome = claim.settled.get(key) or self.transition(key, deadline, claim.claimed_at)
            outcomes[key] = outcome
            if outcome != "locked":
                claim.settled[key] = outcome
            elif (failure := self.failures.get(key)) and failure.deadline == deadline and failure.ready_at:
                failure.ready_at = max(failure.ready_at, self.now + timedelta(seconds=1))  # a locked retry is put off
        if keys is None:
            claim.ending = "expired"
        return outcomes

    def sweep(self) -> set[str]:
        """Returns what the sweep might have taken besides: a later incarnation of what is leased."""
        self.take_back()
        ready = {key for key in self.claimable() if self.ready(key)}
        fresh = self.fresh()
        must = {key for key in fresh if not self.leased(key)}
        for key in [*ready, *must]:
            if self.transition(key, self.holds[key].deadline, None) == "locked" and key in ready:
                self.failures[key].ready_at = self.now + timedelta(seconds=1)
        return {key for key in fresh - must if not self.leased_as(key, self.holds[key].deadline)}

"""What the functions of schema ``pgreaper`` answer: one frozen record per kind of row."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID


@dataclass(frozen=True, slots=True)
class Change:
    """One setting that a registration changed; ``old_value`` is None for a new policy."""

    setting: str
    old_value: str | None
    new_value: str | None


@dataclass(frozen=True, slots=True)
class Granted:
    """A GRANT or REVOKE; ``done`` False: it was not carried out, and somebody who may has to."""

    statement: str
    done: bool


@dataclass(frozen=True, slots=True)
class Preview:
    """
    What a run would meet now; counts stop at 10,000.

    ``due`` holds are free and have not failed; it is a floor when ``due_capped``.  ``locked`` ones are among them;
    None: that cannot be read from a view.  ``looked_at``: among so many rows were ``no_deadline`` and ``no_state``
    counted; None: among all.
    """

    policy: str
    due: int
    due_capped: bool
    oldest_deadline: datetime | None
    locked: int | None
    leased: int
    retrying: int
    dead: int
    no_deadline: int
    no_state: int
    looked_at: int | None


@dataclass(frozen=True, slots=True)
class Hold:
    """One leased hold.  ``payload`` has the registered payload columns."""

    token: UUID
    key: str
    deadline: datetime
    attempt: int
    claim_until: datetime
    payload: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one hold: one of :data:`pgreaper.api.OUTCOMES`, and the state that was found."""

    key: str
    outcome: str
    state: str | None


@dataclass(frozen=True, slots=True)
class Command:
    """
    What a command to expire a hold came to: one of :data:`pgreaper.api.ANSWERS`, and the state that was found.

    ``due_at`` is when to ask again, and ``wait`` the seconds until then by the database's clock, negative once it
    has passed: for ``not-due``, ``retry`` and, where that is known, ``resting``.
    """

    key: str
    outcome: str
    state: str | None
    due_at: datetime | None
    wait: float | None


@dataclass(frozen=True, slots=True)
class Answer:
    """
    What the application is told of one hold; ``outcome`` is ``consumed``, ``extended``, ``restored``, or why not.

    ``state`` and ``deadline`` are those found or written; a state of None: there is no such hold.
    ``constraint_name``: what refused a restoration, because somebody else has by now what it held.
    """

    key: str
    outcome: str
    state: str | None
    deadline: datetime | None
    constraint_name: str | None

    @property
    def done(self) -> bool:
        """Whether the hold is as the application wants it, by this call or by an earlier one."""
        return self.outcome != "not-eligible"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why so many holds of one claim failed: class, SQLSTATE and constraint; a message is never kept."""

    outcome: str
    error_class: str
    sqlstate: str | None
    constraint_name: str | None
    holds: int
    keys: list[str]


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to become of a hold: ``retry`` at ``not_before``, or ``dead-letter``; anything else is an end."""

    outcome: str
    attempts: int | None
    not_before: datetime | None


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """Something that happened to a hold; see the view ``pgreaper.history``."""

    policy: str
    key: str | None
    deadline: datetime | None
    outcome: str
    state: str | None
    worker: str | None
    token: UUID | None
    at: datetime
    attempts: int | None
    error_class: str | None
    sqlstate: str | None
    constraint_name: str | None
    actor: str | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class OpenedRelay:
    """A relay, and whether it was just made."""

    relay: str
    policy: str
    created: bool
    created_at: datetime


@dataclass(frozen=True, slots=True)
class RelayEvent:
    """
    An expired hold that a relay is to deliver, under the lease ``token`` until ``lease_until``.

    ``event`` names it within the relay, the same each time it is handed out; ``attempt`` counts from 1
    how often it was.  ``payload`` is JSON text, None when no columns were asked for or the row has gone.
    """

    token: UUID
    event: str
    key: str
    deadline: datetime
    expired_at: datetime
    state: str
    attempt: int
    lease_until: datetime
    payload: str | None


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """What became of a delivery: events delivered, waiting for a retry, given up, and come back untried."""

    delivered: int
    retry: int
    dead: int
    returned: int


@dataclass(frozen=True, slots=True)
class RelayStatus:
    """How a relay is doing; see the view ``pgreaper.relay_status``.  ``waiting`` is a floor when ``waiting_capped``."""

    relay: str
    policy: str
    owner: str
    waiting: int
    waiting_capped: bool
    oldest_waiting: timedelta | None
    leased: int
    retrying: int
    dead: int
    delivered: int
    redelivered: int
    refused: int
    trouble: str | None
    trouble_since: datetime | None
    latency_p50: timedelta | None
    latency_p99: timedelta | None
    last_delivered_at: datetime | None
    created_at: datetime
    restarted_at: datetime | None


@dataclass(frozen=True, slots=True)
class DeadEvent:
    """An event that was given up; see the view ``pgreaper.dead_events``."""

    relay: str
    policy: str
    owner: str
    event: str
    key: str
    deadline: datetime
    expired_at: datetime
    attempts: int
    first_failed_at: datetime
    died_at: datetime
    error_class: str
    replay_command: str


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A hold that was given up; see the view ``pgreaper.dead_letters``."""

    policy: str
    key: str
    owner: str
    deadline: datetime
    attempts: int
    first_seen_at: datetime
    died_at: datetime
    error_class: str
    sqlstate: str | None
    constraint_name: str | None
    replay_command: str


@dataclass(frozen=True, slots=True)
class Verification:
    """An invariant of a policy: whether it holds, how many violations there are, and the key of one."""

    policy: str
    invariant: str
    holds: bool
    found: int
    example: str | None


@dataclass(frozen=True, slots=True)
class Pruned:
    """How many rows of a policy's claims, transitions or events went; ``more``: there are others."""

    policy: str
    kind: str
    removed: int
    more: bool


@dataclass(frozen=True, slots=True)
class PolicyStatus:
    """How a policy is doing; see the view ``pgreaper.status``.  ``due`` is a floor when ``due_capped``."""

    policy: str
    target: str
    owner: str
    state: str
    reason: str | None
    due: int | None
    due_capped: bool
    oldest_deadline: datetime | None
    oldest_due: timedelta | None
    oldest_retry: timedelta | None
    leased: int
    retrying: int
    dead: int
    expired: int
    already_done: int
    not_eligible: int
    retries: int
    dead_letters: int
    taken_back: int
    duplicate_rate: float | None
    objective: timedelta
    lateness_p50: timedelta | None
    lateness_p99: timedelta | None
    lateness_max: timedelta | None
    start_p50: timedelta | None
    start_p99: timedelta | None
    finish_p50: timedelta | None
    finish_p99: timedelta | None
    clock_skew: timedelta | None
    last_success: datetime | None


@dataclass(frozen=True, slots=True)
class PolicyMetrics:
    """
    What an exporter needs of a policy; see the view ``pgreaper.metrics``.

    ``due`` and ``oldest_due_seconds`` are None when the target cannot be read, ``last_success_timestamp_seconds``
    before the first transition, ``clock_skew_seconds`` while no worker tells.  Of ``lateness_counts``, each counts the
    transitions no later than the bound in the same place.
    """

    policy: str
    owner: str
    state: str
    due: int | None
    oldest_due_seconds: float | None
    leased: int
    retrying: int
    dead: int
    oldest_dead_letter_seconds: float
    objective_seconds: float
    paused_seconds: float
    last_success_timestamp_seconds: float | None
    clock_skew_seconds: float | None
    expired_total: int
    already_done_total: int
    not_eligible_total: int
    retry_total: int
    dead_letter_total: int
    taken_back_total: int
    lateness_bounds: list[float]
    lateness_counts: list[int]


@dataclass(frozen=True, slots=True)
class Policy:
    """A registered policy, as ``pgreaper.policies`` has it."""

    policy: str
    target_schema: str
    target_table: str
    key_columns: list[str]
    deadline_column: str
    status_column: str | None
    held: list[str] | None
    expired: str | None
    stamp_column: str | None
    set_values: dict[str, Any]
    zone: str | None
    stamp_zone: str | None
    grace: timedelta
    payload_columns: list[str]
    lease: timedelta
    batch: int
    max_attempts: int
    permanent_attempts: int
    backoff_base: timedelta
    backoff_cap: timedelta
    rate_limit: float | None
    max_claims: int | None
    owner: str
    objective: timedelta
    paused_at: datetime | None
    pause_reason: str | None
    registered_at: datetime
    consumed: str | None = None
    consumed_stamp_column: str | None = None
    restored: str | None = None
    restore_within: timedelta | None = None

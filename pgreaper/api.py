"""
The SQL interface as Python: one method per function, one statement per call.

:class:`Reaper` works on a psycopg connection that belongs to the caller.  It opens
no transaction and commits none, keeps no state on the session, prepares nothing
and listens to nothing, so it may sit behind a pooler in transaction mode.  On a
connection in autocommit each call is a transaction of its own; otherwise the call
joins the caller's transaction, which should be short and READ COMMITTED.

Results arrive in binary through loaders on this module's own cursors: no session
setting (``DateStyle``, ``TimeZone``, ``IntervalStyle``) and no adapter of the caller
changes them, and a deadline of ``-infinity`` or before Christ is clamped to
``datetime.min`` in UTC where psycopg would refuse it (``infinity`` to ``datetime.max``).

The answers are in :mod:`pgreaper.records`, which each method imports when it is first
called: a worker that only counts starts without them.
"""

import json
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast
from uuid import UUID

import psycopg
from psycopg import pq
from psycopg.adapt import Buffer, Loader
from psycopg.rows import tuple_row
from psycopg.types import bool as _bool
from psycopg.types import json as _json
from psycopg.types import numeric as _numeric
from psycopg.types import string as _string
from psycopg.types import uuid as _uuid

from pgreaper import trust
from pgreaper.errors import (
    UPGRADE_HINT,
    AccessDenied,
    InvalidInput,
    NotInstalled,
    ReaperError,
    RegistrationRefused,
    UnknownPolicy,
    UntrustedSchema,
    VersionMismatch,
    WrongTransaction,
    translate,
)
from pgreaper.rights import needed
from pgreaper.statement import qualified
from pgreaper.text import visible

if TYPE_CHECKING:
    from pgreaper.records import (
        Acknowledged,
        Answer,
        Change,
        Command,
        DeadEvent,
        DeadLetter,
        Decision,
        Failure,
        Granted,
        HistoryEntry,
        Hold,
        OpenedRelay,
        Outcome,
        Policy,
        PolicyMetrics,
        PolicyStatus,
        Preview,
        Pruned,
        RelayEvent,
        RelayStatus,
        Verification,
    )

SQL_VERSION: Final = "0.1"
"""The version of the SQL interface that this driver was written for; ``migrations/README.md`` says what fits it."""

SQL_OLDEST: Final = "0.1"
"""The oldest version that it works on: at least the one before, so that workers may be upgraded first."""

EXPIRED: Final = "expired"
ALREADY_DONE: Final = "already-done"
NOT_ELIGIBLE: Final = "not-eligible"
LOCKED: Final = "locked"
RETRY: Final = "retry"
DEAD_LETTER: Final = "dead-letter"
OUTCOMES: Final = (EXPIRED, ALREADY_DONE, NOT_ELIGIBLE, LOCKED, RETRY, DEAD_LETTER)
"""Everything that can become of a hold, in the order in which it is told."""
NOT_DUE: Final = "not-due"
RESTING: Final = "resting"
WRONG_KEY: Final = "wrong-key"
ANSWERS: Final = (*OUTCOMES, NOT_DUE, RESTING, WRONG_KEY)
"""What a command to expire a hold can come to."""
TOO_SLOW: Final = "StatementTimeout"
"""The class of error of a hold whose transition takes longer, alone, than a statement may."""

Interval = str | timedelta
"""A length of time: a timedelta, or whatever Postgres reads as an interval (``'5 min'``)."""


class Backend(NamedTuple):
    """A session of the server's: its process, and when that began, since numbers repeat."""

    pid: int
    start: datetime | None


class ServerState(NamedTuple):
    """What a connection leads to; see :meth:`Reaper.server`."""

    version: str
    isolation: str
    read_only: bool
    standby: bool
    clock: datetime
    backend: Backend

    @property
    def repeats_reads(self) -> bool:
        """Whether a transaction that asks for nothing gets another level than READ COMMITTED."""
        return self.isolation != "read committed"


class Batch(NamedTuple):
    """A claim as a whole: ``holds`` are leased under ``token`` until ``claim_until``; ``attempt`` counts from 1."""

    token: UUID
    holds: int
    claim_until: datetime
    attempt: int = 1


class Pace(NamedTuple):
    """How fast a policy may go: holds in a batch, and holds per second of the whole fleet, None: no limit."""

    batch: int
    rate_limit: float | None


class Look(NamedTuple):
    """
    What :meth:`Reaper.agenda` tells about a policy.

    ``wait``: seconds until there may be work, never negative; None: nothing lies ahead, or nobody looked.
    ``limited``: something is due, and waits for the policy's rate limit.  ``cost``: seconds that looking took.
    """

    policy: str
    pace: Pace
    wait: float | None
    limited: bool
    cost: float


class Reaper:
    """
    The functions of schema ``pgreaper`` on one connection.

    Every method raises a subclass of :class:`pgreaper.errors.ReaperError` and nothing
    of psycopg's; the original is kept as ``error.original``.
    """

    __slots__ = ("connection",)

    def __init__(self, connection: "psycopg.Connection[Any]") -> None:
        self.connection = connection

    # -- what is there

    def server(self) -> ServerState:
        """
        Tell what the connection leads to, in two round trips, or three where the schema is another role's.

        The isolation level is that of this call's transaction: in autocommit, the default.
        Raises NotInstalled, and UntrustedSchema before any function of the schema is called.
        """
        (row,) = self._query(
            "select current_setting('transaction_isolation'), current_setting('transaction_read_only') = 'on',"  # noqa: S608  our own text
            f" pg_is_in_recovery(), clock_timestamp(), ({trust.STRANGE}), pg_backend_pid(),"
            " (select a.backend_start from pg_stat_get_activity(pg_backend_pid()) as a)"
        )
        isolation, read_only, standby, clock, strange, *backend = row
        version = self._found_version(strange=strange)
        return ServerState(version, isolation, read_only, standby, clock, Backend(*backend))

    def clock(self) -> datetime:
        """Return what the database's clock says."""
        ((now,),) = self._query("select clock_timestamp()")
        return cast("datetime", now)

    def version(self) -> str:
        """Return the version of the SQL interface in the database.  Raises NotInstalled, UntrustedSchema."""
        return self._found_version(strange=True)

    def _found_version(self, *, strange: bool) -> str:
        if strange:
            for stranger in self._query(trust.SCHEMA):
                raise _distrust(*stranger)
        ((version,),) = self._query("select pgreaper.reaper_version()::text")
        return str(version)

    def require_version(self, found: str | None = None) -> None:
        """Raise VersionMismatch (RP005) unless this driver works on the database's version of the SQL."""
        version = self.version() if found is None else found
        number = _version(version)
        beyond = (_version(SQL_VERSION)[0] + 1, 0)
        if not _version(SQL_OLDEST) <= number < beyond:
            raise VersionMismatch(
                f"the database has schema version {version} of pgreaper, this driver needs"
                f" {SQL_OLDEST} or newer, below {beyond[0]}.0",
                hint=UPGRADE_HINT if number < beyond else "The database was upgraded: use a pgreaper that fits it.",
                sqlstate="RP005",
            )

    # -- policies

    def register(
        self,
        policy: str,
        target: str,
        *,
        deadline_column: str,
        status_column: str | None = None,
        held: Sequence[str] | None = None,
        expired: str | None = None,
        owner: str | None = None,
        key_columns: Sequence[str] | None = None,
        stamp_column: str | None = None,
        set: Mapping[str, object] | None = None,  # noqa: A002  the SQL parameter's name
        zone: str | None = None,
        stamp_zone: str | None = None,
        grace: Interval = "0",
        payload_columns: Sequence[str] | None = None,
        lease: Interval = "1 minute",
        batch: int = 500,
        max_attempts: int = 5,
        permanent_attempts: int = 1,
        backoff_base: Interval = "1 second",
        backoff_cap: Interval = "1 hour",
        rate_limit: float | None = None,
        max_claims: int | None = None,
        objective: Interval = "1 minute",
        dry_run: bool = False,
        consumed: str | None = None,
        consumed_stamp_column: str | None = None,
        restored: str | None = None,
        restore_within: Interval | None = None,
    ) -> "list[Change]":
        """
        Register a policy, or bring it to these settings; returns what changed, nothing when nothing did.

        ``target`` is written as in SQL: ``shop.bookings``, ``'"PaymentRequests"'``.  Declarative:
        what the call omits has its default.  Raises RegistrationRefused or InvalidInput.
        """
        from pgreaper.records import Change

        return [
            Change(*row)
            for row in self._query(
                "select setting, old_value, new_value from pgreaper.reaper_register("
                " policy => %s::text, target => %s::text::regclass, deadline_column => %s::text,"
                " status_column => %s::text, held => %s::text[], expired => %s::text, owner => %s::text,"
                ' key_columns => %s::text[], stamp_column => %s::text, "set" => %s::text::jsonb,'
                " zone => %s::text, stamp_zone => %s::text, grace => %s::interval,"
                " payload_columns => %s::text[], lease => %s::interval, batch => %s::integer,"
                " max_attempts => %s::integer, permanent_attempts => %s::integer,"
                " backoff_base => %s::interval, backoff_cap => %s::interval,"
                " rate_limit => %s::double precision, max_claims => %s::integer,"
                " objective => %s::interval, dry_run => %s::boolean, consumed => %s::text,"
                " consumed_stamp_column => %s::text, restored => %s::text, restore_within => %s::interval)",
                policy, target, deadline_column,
                status_column, _texts(held), expired, owner,
                _texts(key_columns), stamp_column, None if set is None else json.dumps(dict(set)),
                zone, stamp_zone, grace,
                _texts(payload_columns), lease, batch,
                max_attempts, permanent_attempts,
                backoff_base, backoff_cap,
                rate_limit, max_claims,
                objective, dry_run, consumed,
                consumed_stamp_column, restored, restore_within,
            )
        ]  # fmt: skip

    def unregister(self, policy: str) -> None:
        """Withdraw a policy; its books stay.  Raises UnknownPolicy."""
        self._query("select pgreaper.reaper_unregister(%s::text)::text", policy)

    def pause(self, policy: str, *, reason: str | None = None) -> bool:
        """Claim nothing more for a policy.  Returns whether that changed anything."""
        return self._truth("select pgreaper.reaper_pause(%s::text, %s::text)", policy, reason)

    def resume(self, policy: str) -> bool:
        """Let a paused policy go on.  Returns whether that changed anything."""
        return self._truth("select pgreaper.reaper_resume(%s::text)", policy)

    def policies(self) -> "list[Policy]":
        """Return the registered policies by name."""
        from pgreaper.records import Policy

        return [
            Policy(*row)
            for row in self._query(
                "select name, target_schema, target_table, key_columns, deadline_column, status_column, held, expired,"
                " stamp_column, set_values, zone, stamp_zone, grace, payload_columns, lease, batch, max_attempts,"
                " permanent_attempts, backoff_base, backoff_cap, rate_limit, max_claims, owner, objective, paused_at,"
                " pause_reason, registered_at, consumed, consumed_stamp_column, restored, restore_within"
                " from pgreaper.policies where unregistered_at is null order by name"
            )
        ]

    def missing_columns(self, policy: str, columns: Sequence[str]) -> list[str]:
        """Return those of these columns that a policy's target does not have; none where there is no such target."""
        rows = self._query(
            "select c.name from pgreaper.policies as p cross join unnest(%s::text[]) as c (name)"
            " where p.name = %s::text and p.unregistered_at is null"
            " and to_regclass(format('%%I.%%I', p.target_schema, p.target_table)) is not null"
            " and not exists (select from pg_attribute as a"
            "   where a.attrelid = to_regclass(format('%%I.%%I', p.target_schema, p.target_table))"
            "   and a.attname = c.name and a.attnum > 0 and not a.attisdropped)",
            _texts(columns), policy,
        )  # fmt: skip
        return [str(name) for (name,) in rows]

    def registered(self) -> dict[str, Pace]:
        """Return the registered policies, paused ones too, and all that a worker must know of each."""
        rows = self._query(
            "select name, batch, rate_limit from pgreaper.policies where unregistered_at is null order by name"
        )
        return {str(name): Pace(*pace) for name, *pace in rows}

    # -- rights

    def grant(self, role: str, kind: str, *, dry_run: bool = False) -> "list[Granted]":
        """
        Give an existing role what a ``worker``, ``operator``, ``reader``, ``registrar`` or ``application`` needs.

        And no more than that.

        Returns the statements that were missing, with ``done`` False for those that the current role may not say.
        Raises AccessDenied when it does not own pgreaper, InvalidInput when there is no such kind or role.
        """
        from pgreaper.records import Granted

        return [
            Granted(*row)
            for row in self._query(
                "select statement, done from pgreaper.reaper_grant(%s::text, %s::text, %s::boolean)",
                role, kind, dry_run,
            )
        ]  # fmt: skip

    def revoke(self, role: str) -> "list[Granted]":
        """Take back what :meth:`grant` gave on pgreaper; what was given on targets is told, with ``done`` False."""
        from pgreaper.records import Granted

        rows = self._query("select statement, done from pgreaper.reaper_revoke(%s::text)", role)
        return [Granted(*row) for row in rows]

    def ungranted(self) -> list[tuple[str, str]]:
        """Roles that :meth:`grant` knows and that lack something by now, as (role, kind); a new target, perhaps."""
        rows = self._query(
            "select g.role, g.kind from pgreaper.grants as g"
            " where exists (select from pgreaper._missing_rights(g.role, g.kind)) order by g.role, g.kind"
        )
        return [(str(role), str(kind)) for role, kind in rows]

    # -- work

    def preview(self, policy: str) -> "Preview":
        """Tell what a run would meet now; writes nothing."""
        from pgreaper.records import Preview

        (row,) = self._query(
            "select policy, due, due_capped, oldest_deadline, locked, leased, retrying, dead, no_deadline, no_state,"
            " looked_at"
            " from pgreaper.reaper_preview(%s::text)",
            policy,
        )
        return Preview(*row)

    def claim(
        self,
        policy: str,
        *,
        batch: int | None = None,
        worker: str | None = None,
        rescan: bool = False,
        session: bool = False,
        skew: timedelta | None = None,
    ) -> "list[Hold]":
        """
        Lease up to ``batch`` due holds (default: the policy's batch).  Empty: nothing to do, nothing written.

        ``rescan`` begins again at the oldest deadline, for holds that the forward cursor has passed;
        ``session`` binds the claim to this connection, see the documentation of ``reaper_claim``.
        ``skew`` is by how much the caller's clock is ahead of the database's; it is only shown.
        """
        from pgreaper.records import Hold

        return [
            Hold(*row)
            for row in self._query(
                "select token, key, deadline, attempt, claim_until, payload" + _CLAIM,
                policy, batch, worker, rescan, session, skew,
            )
        ]  # fmt: skip

    def claim_batch(
        self,
        policy: str,
        *,
        batch: int | None = None,
        worker: str | None = None,
        rescan: bool = False,
        session: bool = False,
        skew: timedelta | None = None,
    ) -> Batch | None:
        """:meth:`claim` for whoever needs no keys: one row comes back, or None when there is nothing to do."""
        (claimed,) = self._query(_CLAIM_BATCH, policy, batch, worker, rescan, session, skew)
        return None if claimed[0] is None else Batch(*claimed)

    def expire(self, token: UUID, *, keys: Sequence[str] | None = None) -> "list[Outcome]":
        """
        Make the guarded transition for a claim's holds, or for those of ``keys``.

        Without ``keys`` it finishes the claim.  Repeat it when the reply was lost: it answers what was
        recorded.  Raises LeaseLost when the lease was taken back.
        """
        from pgreaper.records import Outcome

        return [Outcome(*row) for row in self._query("select key, outcome, state" + _EXPIRE, token, _texts(keys))]

    def expire_batch(self, token: UUID) -> Counter[str]:
        """:meth:`expire` of a whole claim for whoever needs no keys: how many holds had which outcome."""
        return self.expire_batch_and_claim(token, batch=None)[0]

    def expire_keys(self, policy: str, keys: Sequence[str], *, worker: str | None = None) -> "list[Command]":
        """
        Expire the holds with these keys, those that are due: the answer to a command from outside.

        Each of ``keys`` (at most 10,000) comes back once, in any order: with one of :data:`ANSWERS`.  No lease is
        taken and none is respected, no handler is called.  Repeat it when the reply was lost.
        """
        from pgreaper.records import Command

        return [
            Command(*row)
            for row in self._query(
                "select key, outcome, state, due_at, extract(epoch from due_at - pgreaper._clock())::double precision"
                " from pgreaper.reaper_expire_keys(policy => %s::text, keys => %s::text[], worker => %s::text)",
                policy, list(keys), worker,
            )
        ]  # fmt: skip

    def expire_batch_and_claim(
        self, token: UUID, *, batch: int | None, session: bool = False, skew: timedelta | None = None
    ) -> tuple[Counter[str], Batch | None]:
        """
        :meth:`expire_batch`, and :meth:`claim_batch` in the same transaction, for the same policy and worker.

        The claim, of ``batch`` holds, is made only when every hold was expired and nobody else has a claim of the
        policy.  Whatever either of the two raises undoes both.
        """
        ((outcomes, counts, *claimed),) = self._query(_EXPIRE_BATCH, token, batch, session, skew)
        settled = Counter(dict(zip(outcomes, counts, strict=True)))
        return settled, None if claimed[0] is None else Batch(*claimed)

    def release_unheard(self, backend: Backend, worker: str, known: "Sequence[UUID]" = ()) -> bool:
        """
        Release what a session of this worker's claimed in a call whose answer never came.

        ``known`` are the tokens of its claims that were heard of.  Whether the session is gone: if it is not, the
        call may still be running, and its claim may come later.
        """
        # Before the claims are looked at: it ends after its commit.
        ((gone,),) = self._query(
            "select not exists (select from pg_stat_get_activity(%s::integer) as a"
            " where a.backend_start is null or a.backend_start = %s::timestamptz)",
            *backend,
        )
        self._query(
            "select pgreaper.reaper_release(token => c.token) from pgreaper.claims as c"
            " where c.session_pid = %s::integer and c.session_start = %s::timestamptz and c.worker = %s::text"
            " and c.finished_at is null and c.token <> all (%s::uuid[])",
            *backend, worker, list(known),
        )  # fmt: skip
        return bool(gone)

    def fail(
        self,
        token: UUID,
        key: str,
        *,
        error_class: str,
        transient: bool = False,
        retry_in: Interval | None = None,
        final: bool = False,
        charged: bool = True,
    ) -> "Decision":
        """
        Tell that the work outside the database failed for one hold; the claim goes on with the others.

        Repeat it when the reply was lost: it charges once.  ``retry_in`` replaces the computed delay, ``final``
        gives the hold up at once, and what is not ``charged`` is put off without costing an attempt.  Only
        the class of the error is kept.  Raises LeaseLost when the lease was taken back.
        """
        from pgreaper.records import Decision

        (row,) = self._query(
            "select outcome, attempts, not_before from pgreaper.reaper_fail(token => %s::uuid, key => %s::text,"
            " error_class => %s::text, transient => %s::boolean, retry_in => %s::interval, final => %s::boolean,"
            " charged => %s::boolean)",
            token, key, error_class, transient, retry_in, final, charged,
        )  # fmt: skip
        return Decision(*row)

    def failures(self, token: UUID) -> "list[Failure]":
        """Why holds of a claim failed, one row per reason, most holds first; empty when none did."""
        from pgreaper.records import Failure

        return [
            Failure(*row)
            for row in self._query(
                "select kind, error_class, sqlstate, constraint_name, count(*), array_agg(key order by event_id)"
                " from pgreaper.events"
                " where token = %s::uuid and kind = any('{retry,dead-letter}')"
                " group by kind, error_class, sqlstate, constraint_name order by count(*) desc, error_class",
                token,
            )
        ]

    def leased_keys(self, token: UUID) -> list[str]:
        """Return the holds of a claim that is not over yet; none when it is."""
        rows = self._query(
            "select unnest(keys) from pgreaper.claims where token = %s::uuid and finished_at is null", token
        )
        return [str(key) for (key,) in rows]

    def statement_timeout(self) -> float:
        """Seconds that the server gives a statement of this session; 0: as long as it takes."""
        ((seconds,),) = self._query(
            "select extract(epoch from current_setting('statement_timeout')::interval)::double precision"
        )
        return float(seconds)

    def table_lock(self, policy: str) -> str | None:
        """Who keeps the target from being worked on as a whole, in a few words; to be asked after DatabaseBusy."""
        ((who,),) = self._query("select pgreaper._table_lock(%s::text)", policy)
        return None if who is None else str(who)

    def renew(self, token: UUID, *, lease: Interval | None = None) -> datetime:
        """Keep a lease for longer (default: the policy's lease from now).  Raises LeaseLost."""
        ((until,),) = self._query("select pgreaper.reaper_renew(%s::uuid, %s::interval)", token, lease)
        assert isinstance(until, datetime)  # noqa: S101
        return until

    def time_left(self, token: UUID) -> float | None:
        """Seconds until a lease ends, by the database's clock; negative once it has lapsed, None when it is over."""
        rows = self._query(
            "select extract(epoch from claim_until - pgreaper._clock())::double precision"
            " from pgreaper.claims where token = %s::uuid and finished_at is null",
            token,
        )
        return float(rows[0][0]) if rows else None

    def release(self, token: UUID) -> int:
        """Give a claim back without charging an attempt.  Returns the holds given back, 0 when it was over already."""
        ((holds,),) = self._query("select pgreaper.reaper_release(%s::uuid)", token)
        return int(holds)

    def sweep(
        self,
        policy: str | None = None,
        *,
        batch: int | None = None,
        max_rows: int | None = None,
        max_seconds: float | None = None,
    ) -> int:
        """
        Expire what is due, without leases, committing after each batch; all policies by default.

        Returns how many holds expired.  The procedure commits, so the connection must be in autocommit
        and outside a transaction: raises WrongTransaction otherwise.
        """
        info = self.connection.info
        if not self.connection.autocommit or info.transaction_status is not pq.TransactionStatus.IDLE:
            raise WrongTransaction(
                "a sweep commits after each batch and cannot run inside a transaction",
                hint="Use a connection with autocommit=True.",
                sqlstate="RP004",
            )
        if settings := getattr(self.connection, "local_settings", {}):
            raise InvalidInput(
                f"a sweep commits, so {', '.join(settings)} cannot be set for it behind this pooler",
                hint="Give the setting to the role: alter role … set … = …",
            )
        ((expired,),) = self._query(
            "call pgreaper.reaper_sweep(%s::text, %s::integer, %s::bigint, %s::double precision, 0)",
            policy, batch, max_rows, max_seconds,
        )  # fmt: skip
        return int(expired)

    def next_due(self, policies: Sequence[str] | None = None) -> float | None:
        """Seconds until there may be work for these policies (default: all), never negative; None: nothing ahead."""
        if policies is None:
            ((seconds,),) = self._query("select extract(epoch from pgreaper.reaper_next_due(null))::double precision")
        else:
            ((seconds,),) = self._query(
                "select extract(epoch from min(pgreaper.reaper_next_due(p.name)))::double precision"
                " from unnest(%s::text[]) as p (name)",
                list(policies),
            )
        return None if seconds is None else max(float(seconds), 0.0)

    def agenda(
        self,
        policies: Sequence[str] | None = None,
        *,
        without: Sequence[str] = (),
        rescan: Sequence[str] = (),
    ) -> list[Look]:
        """
        For each of these policies (default: all) that is registered, when there may be work: a daemon's one question.

        Those of ``without`` are listed and not looked at; those of ``rescan`` are searched from the oldest deadline.
        Raises VersionMismatch when the database was upgraded to a version that this driver does not work on.
        """
        rows = self._query(
            "select v.version, a.policy, a.batch, a.rate_limit, a.wait, a.limited, a.cost"
            " from (select pgreaper.reaper_version()::text as version) as v"
            " left join pgreaper._agenda(policies => %s::text[], without => %s::text[], rescan => %s::text[]) as a"
            " on true order by a.policy",
            _texts(policies), list(without), list(rescan),
        )  # fmt: skip
        self.require_version(rows[0][0])
        return [
            Look(policy, Pace(batch, rate_limit), *look)
            for _, policy, batch, rate_limit, *look in rows
            if policy is not None
        ]

    # -- the application's side of the race

    def consume(self, policy: str, key: str) -> "Answer":
        """
        Take a hold for good, if it is still alive: ``consumed``, ``already-done`` or ``not-eligible``.

        Part of the caller's transaction, at any isolation level; waits for whoever has the row.
        """
        from pgreaper.records import Answer

        return Answer(*self._query(_ANSWER + "reaper_consume(%s::text, %s::text)", policy, key)[0])

    def extend(self, policy: str, key: str, until: datetime) -> "Answer":
        """
        Keep a hold until then, if it is still alive: ``extended``, ``already-done`` or ``not-eligible``.

        Never for shorter.  Raises InvalidInput when ``until`` has no time zone or is not later than the database's now.
        """
        from pgreaper.records import Answer

        return Answer(
            *self._query(
                _ANSWER + "reaper_extend(%s::text, %s::text, %s::text::timestamptz)", policy, key, _instant(until)
            )[0]
        )

    def restore(self, policy: str, key: str, until: datetime, *, reason: str) -> "Answer":
        """
        Hold an expired hold again: ``restored``, ``already-done`` or ``not-eligible``.

        Inside the policy's ``restore_within``.  With ``constraint_name`` a unique or exclusion constraint says that
        somebody else has by now what it held.  Who and why go to events.
        """
        from pgreaper.records import Answer

        return Answer(
            *self._query(
                _ANSWER + "reaper_restore(%s::text, %s::text, %s::text::timestamptz, %s::text)",
                policy, key, _instant(until), reason,
            )[0]
        )  # fmt: skip

    # -- relays: events out

    def relay(self, policy: str, *, relay: str | None = None, backfill: bool = False) -> "OpenedRelay":
        """
        Find or make a relay, by default one that is called like its policy; safe to call each time before work begins.

        A new one begins now, with ``backfill`` at the oldest row of the trail.  Raises UnknownPolicy, and InvalidInput
        when the name belongs to a relay of another policy.
        """
        from pgreaper.records import OpenedRelay

        (row,) = self._query(
            "select relay, policy, created, created_at"
            " from pgreaper.reaper_relay(policy => %s::text, relay => %s::text, backfill => %s::boolean)",
            policy, relay, backfill,
        )  # fmt: skip
        return OpenedRelay(*row)

    def unrelay(self, relay: str) -> None:
        """Remove a relay and its place: what it has not delivered, it never will.  Raises UnknownPolicy (RP002)."""
        self._query("select pgreaper.reaper_unrelay(%s::text)::text", relay)

    def fetch(
        self,
        relay: str,
        *,
        batch: int = 500,
        worker: str | None = None,
        lease: Interval = "1 minute",
        payload: Sequence[str] = (),
    ) -> "list[RelayEvent]":
        """
        Lease the next events of a relay, at most ``batch``.  Empty: nothing to deliver, nothing written.

        ``payload`` names columns of the target, read now.  Two events of one hold are never leased at the same time.
        Raises UnknownPolicy (RP002) when there is no such relay.
        """
        from pgreaper.records import RelayEvent

        return [
            RelayEvent(*row)
            for row in self._query(
                # As text: a number with more digits than a float passes unchanged.
                "select token, event, key, deadline, expired_at, state, attempt, lease_until, payload::text"
                " from pgreaper.reaper_fetch(relay => %s::text, batch => %s::integer, worker => %s::text,"
                " lease => %s::interval, payload => %s::text[])",
                relay, batch, worker, lease, _texts(payload),
            )
        ]  # fmt: skip

    def ack(
        self,
        token: UUID,
        *,
        delivered: Sequence[str] | None = None,
        refused: Sequence[str] = (),
        error_classes: Sequence[str] = (),
        transient: Sequence[bool] = (),
        retry_in: Sequence[timedelta | None] = (),
        trouble: str | None = None,
    ) -> "Acknowledged":
        """
        Tell what became of a delivery, and end its lease.

        ``delivered`` None: all that is not ``refused``.  For each refused event there is its class of error, whether
        it may be tried again (``transient``), and after how long at the earliest.  What is neither delivered nor
        refused comes back at once, charged to nobody.  ``trouble`` is shown until something is delivered.

        Repeat it when the reply was lost.  Raises LeaseLost when the lease was taken over.
        """
        from pgreaper.records import Acknowledged

        (row,) = self._query(
            "select delivered, retry, dead, returned"
            " from pgreaper.reaper_ack(token => %s::uuid, delivered => %s::text[], refused => %s::text[],"
            " error_classes => %s::text[], transient => %s::boolean[], retry_in => %s::interval[],"
            " trouble => %s::text)",
            token, _texts(delivered), list(refused), list(error_classes), list(transient), list(retry_in), trouble,
        )  # fmt: skip
        return Acknowledged(*row)

    def keep(self, token: UUID, *, lease: Interval = "1 minute") -> datetime:
        """Keep a delivery's lease for longer, from now.  Raises LeaseLost."""
        ((until,),) = self._query("select pgreaper.reaper_keep(%s::uuid, %s::interval)", token, lease)
        return cast("datetime", until)

    def resend(self, relay: str, event: str | None = None) -> int:
        """Let events that were given up be tried again, all of them unless one is named.  Returns how many."""
        ((resent,),) = self._query("select pgreaper.reaper_resend(%s::text, %s::text)", relay, event)
        return int(resent)

    def relays(self, relay: str | None = None) -> "list[RelayStatus]":
        """How the relays are doing, or this one, by name; counts are bounded, so this may be polled."""
        from pgreaper.records import RelayStatus

        return [
            RelayStatus(*row)
            for row in self._query(
                "select relay, policy, owner, waiting, waiting_capped, oldest_waiting, leased, retrying, dead,"
                " delivered, redelivered, refused, trouble, trouble_since, latency_p50, latency_p99,"
                " last_delivered_at, created_at, restarted_at"
                " from pgreaper.relay_status where %s::text is null or relay = %s::text order by relay",
                relay, relay,
            )
        ]  # fmt: skip

    def dead_events(
        self, relay: str | None = None, *, event: str | None = None, limit: int | None = None
    ) -> "list[DeadEvent]":
        """Return events that were given up, the newest first, of all relays unless one is named."""
        from pgreaper.records import DeadEvent

        return [
            DeadEvent(*row)
            for row in self._query(
                "select d.relay, d.policy, d.owner, d.event, d.key, d.deadline, d.expired_at, d.attempts,"
                " d.first_failed_at, d.died_at, d.error_class, d.replay_command"
                " from pgreaper.dead_events as d, (select %s::text, %s::text) as f (relay, event)"
                " where (f.relay is null or d.relay = f.relay) and (f.event is null or d.event = f.event)"
                " order by d.died_at desc, d.relay, d.event limit %s::bigint",
                relay, event, limit,
            )
        ]  # fmt: skip

    # -- dead letters

    def dead_letters(
        self,
        policy: str | None = None,
        *,
        key: str | None = None,
        error_class: str | None = None,
        older_than: Interval | None = None,
        limit: int | None = None,
    ) -> "list[DeadLetter]":
        """Return dead letters, the newest first; each filter that is not None narrows them."""
        from pgreaper.records import DeadLetter

        return [
            DeadLetter(*row)
            for row in self._query(
                "select d.policy, d.key, d.owner, d.deadline, d.attempts, d.first_seen_at, d.died_at, d.error_class,"
                " d.sqlstate, d.constraint_name, d.replay_command"
                " from pgreaper.dead_letters as d,"
                " (select %s::text, %s::text, %s::text, %s::interval) as f (policy, key, error_class, older_than)"
                " where (f.policy is null or d.policy = f.policy) and (f.key is null or d.key = f.key)"
                " and (f.error_class is null or d.error_class = f.error_class)"
                " and (f.older_than is null or d.died_at <= (clock_timestamp() - f.older_than))"
                " order by d.died_at desc, d.policy, d.key limit %s::bigint",
                policy, key, error_class, older_than, limit,
            )
        ]  # fmt: skip

    def dead(self, policies: Sequence[str]) -> dict[str, int]:
        """Return how many dead letters each of these policies has; those that have none are left out."""
        rows = self._query(
            "select policy, count(*) from pgreaper.dead_letters where policy = any(%s::text[]) group by policy",
            list(policies),
        )
        return {str(policy): int(n) for policy, n in rows}

    def replay(
        self,
        policy: str,
        *,
        key: str | None = None,
        reason: str | None = None,
        error_class: str | None = None,
        older_than: Interval | None = None,
    ) -> "list[Outcome]":
        """
        Give dead letters a fresh budget; all of the policy unless a filter narrows them.

        Each comes back with outcome ``replay``, or ``moot`` when the hold is no longer held and due.
        """
        from pgreaper.records import Outcome

        return [
            Outcome(*row)
            for row in self._query(
                "select key, outcome, state from pgreaper.reaper_replay(policy => %s::text, key => %s::text,"
                " reason => %s::text, error_class => %s::text, older_than => %s::interval)",
                policy, key, reason, error_class, older_than,
            )
        ]  # fmt: skip

    def discard(
        self,
        policy: str,
        *,
        key: str | None = None,
        reason: str,
        error_class: str | None = None,
        older_than: Interval | None = None,
    ) -> list[str]:
        """Leave dead letters be, all of the policy unless a filter narrows them.  Returns their keys."""
        rows = self._query(
            "select d.key from pgreaper.reaper_discard(policy => %s::text, key => %s::text, reason => %s::text,"
            " error_class => %s::text, older_than => %s::interval) as d (key)",
            policy, key, reason, error_class, older_than,
        )  # fmt: skip
        return [str(found) for (found,) in rows]

    # -- seeing it

    def verify(self, policy: str | None = None) -> "list[Verification]":
        """Check the invariants of a policy, or of all, from the books and the target; reads the whole trail."""
        from pgreaper.records import Verification

        return [
            Verification(*row)
            for row in self._query(
                "select policy, invariant, holds, found, example from pgreaper.reaper_verify(%s::text)", policy
            )
        ]

    def history(self, policy: str, key: str) -> "list[HistoryEntry]":
        """Everything that happened to one hold, oldest first."""
        from pgreaper.records import HistoryEntry

        return [
            HistoryEntry(*row)
            for row in self._query(
                "select policy, key, deadline, outcome, state, worker, token, at, attempts, error_class, sqlstate,"
                " constraint_name, actor, reason from pgreaper.reaper_history(%s::text, %s::text) order by at",
                policy, key,
            )
        ]  # fmt: skip

    def status(self, policies: Sequence[str] | None = None) -> "list[PolicyStatus]":
        """How these policies (default: all) are doing, by name; counts are bounded, so this may be polled."""
        from pgreaper.records import PolicyStatus

        return [
            PolicyStatus(*row)
            for row in self._query(
                "select policy, target, owner, state, reason, due, due_capped, oldest_deadline, oldest_due,"
                " oldest_retry, leased,"
                " retrying, dead, expired, already_done, not_eligible, retries, dead_letters, taken_back,"
                " duplicate_rate, objective, lateness_p50, lateness_p99, lateness_max, start_p50, start_p99,"
                " finish_p50, finish_p99, clock_skew, last_success"
                " from pgreaper.status where %s::text[] is null or policy = any(%s::text[]) order by policy",
                _texts(policies), _texts(policies),
            )
        ]  # fmt: skip

    def metrics(self, policy: str | None = None) -> "list[PolicyMetrics]":
        """What an exporter needs of this policy (default: of each), by name; bounded like :meth:`status`."""
        from pgreaper.records import PolicyMetrics

        return [
            PolicyMetrics(*row)
            for row in self._query(
                "select policy, owner, state, due, oldest_due_seconds, leased, retrying, dead,"
                " oldest_dead_letter_seconds, objective_seconds, paused_seconds, last_success_timestamp_seconds,"
                " clock_skew_seconds, expired_total, already_done_total, not_eligible_total, retry_total,"
                " dead_letter_total, taken_back_total, lateness_bounds, lateness_counts"
                " from pgreaper.metrics where %s::text is null or policy = %s::text order by policy",
                policy, policy,
            )
        ]  # fmt: skip

    def suspended(self, policies: Sequence[str]) -> dict[str, str]:
        """Return those of these policies that are suspended because every hold failed alike, and the reason."""
        # What the view costs is only asked of who fails.
        failing = self._query(
            "select p.name from pgreaper.policies as p join pgreaper.cursors as c on c.policy_id = p.policy_id"
            " where c.failing_at is not null and p.name = any(%s::text[])",
            list(policies),
        )
        if not failing:
            return {}
        rows = self._query(
            "select s.policy, s.reason from pgreaper.status as s"
            " where s.policy = any(%s::text[]) and s.state = 'suspended' order by s.policy",
            [name for (name,) in failing],
        )
        return {str(name): str(reason) for name, reason in rows}

    def resting(self, policies: Sequence[str]) -> dict[str, str]:
        """Return those of these policies that are paused or passive, and so claim nothing, and why."""
        rows = self._query(
            "select p.name, p.paused_at, p.pause_reason, r.subscription"
            " from pgreaper.policies as p"
            " cross join lateral (select case when p.paused_at is null then pgreaper._subscription(p) end)"
            "   as r (subscription)"
            " where p.unregistered_at is null and p.name = any(%s::text[])"
            " and (p.paused_at is not null or r.subscription is not null) order by p.name",
            list(policies),
        )
        return {
            str(name): f"paused since {since.astimezone(UTC):%Y-%m-%d %H:%M} UTC" + (f": {reason}" if reason else "")
            if since is not None
            else f"passive: its rows come through subscription {subscription}, and expire at the publisher"
            for name, since, reason, subscription in rows
        }

    def rows(self, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
        """The rows of a statement on pgreaper's views and books; for modules of this package that only read."""
        return self._query(statement, *parameters)

    # -- retention

    def prune(
        self,
        *,
        keep: Interval = "90 days",
        keep_events: Interval | None = None,
        keep_claims: Interval = "7 days",
        max_rows: int = 10_000,
    ) -> "list[Pruned]":
        """
        Remove at most ``max_rows`` rows of each kind of each policy; again while one of them says ``more``.

        ``keep_events`` None: as long as the trail.  Raises InvalidInput for less than an hour.
        """
        from pgreaper.records import Pruned

        return [
            Pruned(*row)
            for row in self._query(
                "select policy, kind, removed, more from pgreaper.reaper_prune(keep => %s::interval,"
                " keep_events => %s::interval, keep_claims => %s::interval, max_rows => %s::integer)",
                keep, keep_events, keep_claims, max_rows,
            )
        ]  # fmt: skip

    # -- how

    def _query(self, sql: str, *parameters: object) -> list[tuple[Any, ...]]:
        """Run one statement on a cursor of our own and fetch all of it."""
        try:
            with self._settled(), psycopg.Cursor(self.connection, row_factory=tuple_row) as cursor:
                for oid, loader in _LOADERS:
                    cursor.adapters.register_loader(oid, loader)
                cursor.execute(qualified(sql), parameters or None, prepare=False, binary=True)
                return cursor.fetchall()
        except psycopg.Error as error:
            failure = translate(error, None if self.connection.closed else self.connection.info.dbname)
        # Raised outside the handler: the server's words stay out of tracebacks and trackers.
        raise self._understood(failure, sql)

    @contextmanager
    def _settled(self) -> Iterator[None]:
        """Settings that a pooler kept back, set for the statement inside: for its transaction, and never longer."""
        settings: Mapping[str, str] = getattr(self.connection, "local_settings", {})
        if not settings:
            yield
            return
        idle = self.connection.info.transaction_status is pq.TransactionStatus.IDLE
        with self.connection.transaction() if idle else nullcontext():
            psycopg.Cursor(self.connection).execute(
                "select pg_catalog.set_config(s.name, s.value, true)"
                " from unnest(%s::pg_catalog.text[], %s::pg_catalog.text[]) as s (name, value)",
                [list(settings), list(settings.values())],
                prepare=False,
            )
            yield

    def _understood(self, failure: ReaperError, statement: str) -> ReaperError:
        """Tell apart what only the caller of this module can: whose table, whose argument, which version."""
        original = failure.original
        if isinstance(failure, AccessDenied) and original is not None and not original.diag.message_hint:
            kind = needed(statement)
            words = original.diag.message_primary or ""
            # No grant of ours mends what a trigger raises (its words are withheld), nor that the schema of a table is
            # closed to who registers it.
            foreign = kind == "registrar" and not original.diag.context and "reaper" not in words
            if failure.message == (words or original.sqlstate) and not foreign:
                failure.hint = (
                    f"As the owner of pgreaper: `pgreaper grant {self._user()} --as {kind}`."
                    if kind
                    else "Let the owner of pgreaper do it."
                )
            return failure
        # In any language a function's frame says "SQL" or "PL/pgSQL"; an argument's does not.
        if original is None or "SQL" in (original.diag.context or ""):
            return failure
        if isinstance(failure, NotInstalled):
            if isinstance(original, psycopg.errors.UndefinedFunction) and self._has_version():
                return VersionMismatch(
                    "pgreaper's SQL in the database lacks a function that this driver calls",
                    hint=UPGRADE_HINT,
                    sqlstate="RP005",
                    original=original,
                )
        elif isinstance(original, (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName)):
            return RegistrationRefused(
                "the target does not exist", hint="Name it as in SQL, with its schema.", original=original
            )
        elif isinstance(original, psycopg.DataError) and original.sqlstate is not None:
            return InvalidInput(
                "an argument is not of the type that the function wants",
                hint="A length of time is written as Postgres does: '30 seconds', '5 min'.",
                sqlstate=original.sqlstate,
                original=original,
            )
        return failure

    def _user(self) -> str:
        """Who we are, as a word of a shell."""
        import shlex

        return shlex.quote(self.connection.info.user)

    def _has_version(self) -> bool:
        """Whether pgreaper is there at all.  Asks only where asking cannot disturb a transaction of the caller."""
        if self.connection.info.transaction_status is not pq.TransactionStatus.IDLE:
            return False
        try:
            self.version()
        except NotInstalled:
            return False
        return True

    def _truth(self, sql: str, *parameters: object) -> bool:
        ((answer,),) = self._query(sql, *parameters)
        return bool(answer)


def unknown_policy(name: str, registered: Sequence[str]) -> UnknownPolicy:
    """RP002 with the name that was probably meant."""
    from difflib import get_close_matches

    near = get_close_matches(name, registered, 1)
    if near:
        hint = f"Did you mean {visible(near[0])}?"
    elif registered:
        hint = "`pgreaper policies` lists the registered ones."
    else:
        hint = "No policy is registered yet: `pgreaper register` adds one."
    return UnknownPolicy(f"there is no policy {visible(name)}", hint=hint, sqlstate="RP002")


def _distrust(owner: str, caller: str, what: str) -> UntrustedSchema:
    who = {"owner": visible(owner), "caller": visible(caller), "what": what}
    return UntrustedSchema(trust.FACT.format(**who), hint=trust.HINT.format(**who))


def _version(text: str) -> tuple[int, int]:
    """A version of the interface as numbers; what is none comes before all that are."""
    major, _, minor = text.partition(".")
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else (-1, 0)


_CLAIM_ARGUMENTS = (
    "(policy => %s::text, batch => %s::integer, worker => %s::text,"
    " rescan => %s::boolean, session => %s::boolean, skew => %s::interval)"
)
_CLAIM = " from pgreaper.reaper_claim" + _CLAIM_ARGUMENTS
_CLAIM_BATCH = "select token, holds, claim_until, attempt from pgreaper.reaper_claim_batch" + _CLAIM_ARGUMENTS  # noqa: S608
_ANSWER = "select key, outcome, state, deadline, constraint_name from pgreaper."
_EXPIRE = " from pgreaper.reaper_expire(token => %s::uuid, keys => %s::text[])"
_EXPIRE_BATCH = (
    "select outcomes, counts, token, holds, claim_until, attempt from pgreaper.reaper_expire_batch("
    "token => %s::uuid, next => %s::integer, session => %s::boolean, skew => %s::interval)"
)


def _instant(moment: datetime) -> str:
    """As Postgres reads it under any setting; ``datetime.max``, as which infinity arrives, is infinity again."""
    if moment.tzinfo is None:
        raise InvalidInput(
            f"until {moment} has no time zone", hint="Give it one, such as datetime.now(UTC) + timedelta(minutes=15)."
        )
    return "infinity" if moment >= _LAST else moment.isoformat()


def _texts(values: Sequence[str] | None) -> list[str] | None:
    return None if values is None else list(values)


_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
_LAST = datetime.max.replace(tzinfo=UTC)
_INT8 = struct.Struct("!q")
_MINUS_INFINITY = -(2**63)
_FOUR_CENTURIES = 146_097 * 86_400 * 1_000_000
_INTERVAL = struct.Struct("!qii")


class TooEarly(datetime):
    """
    What is before Python's first instant, clamped to that; ``told`` is the instant itself.

    As ISO 8601 writes it, in UTC, where 44 BC is the year -0043; ``-infinity`` for that.
    """

    # None in what Python makes of it, by adding to it for example.
    told: str | None = None

    @classmethod
    def of(cls, micros: int) -> "TooEarly":
        """From microseconds since 2000 in UTC."""
        early = cls(1, 1, 1, tzinfo=UTC)
        if micros == _MINUS_INFINITY:
            early.told = "-infinity"
            return early
        # The calendar repeats itself after 400 years.
        cycles = -(micros // _FOUR_CENTURIES)
        moment = _EPOCH + timedelta(microseconds=micros + cycles * _FOUR_CENTURIES)
        year = moment.year - 400 * cycles
        early.told = f"{'-' if year < 0 else ''}{abs(year):04d}-{moment:%m-%dT%H:%M:%S.%fZ}"
        return early


class _TimestamptzLoader(Loader):
    """Microseconds since 2000 in UTC; what Python cannot tell is clamped, not refused."""

    format = pq.Format.BINARY

    def load(self, data: Buffer) -> datetime:
        (micros,) = _INT8.unpack(data)
        try:
            return _EPOCH + timedelta(microseconds=micros)
        except OverflowError:
            return TooEarly.of(micros) if micros < 0 else _LAST


class _IntervalLoader(Loader):
    """A month counts 30 days, as Postgres compares intervals; the infinite ones are clamped."""

    format = pq.Format.BINARY

    def load(self, data: Buffer) -> timedelta:
        micros, days, months = _INTERVAL.unpack(data)
        try:
            return timedelta(days=days + 30 * months, microseconds=micros)
        except OverflowError:
            return timedelta.min if months < 0 else timedelta.max


# Pinned, so that an adapter which the caller registered changes nothing here.
_LOADERS: tuple[tuple[int, type[Loader]], ...] = (
    (1184, _TimestamptzLoader),
    (1186, _IntervalLoader),
    (16, _bool.BoolBinaryLoader),
    (20, _numeric.Int8BinaryLoader),
    (23, _numeric.Int4BinaryLoader),
    (25, _string.TextBinaryLoader),
    (701, _numeric.Float8BinaryLoader),
    (2950, _uuid.UUIDBinaryLoader),
    (3802, _json.JsonbBinaryLoader),
)

"""
Errors raised by pgreaper.

Every error that the SQL raises on purpose has a SQLSTATE of class ``RP``; this
module is the only place that knows which is which, and the only one that decides
what of a server's answer may be repeated.  The wording of pgreaper's own functions
is written for people and passes, and so is a pooler's about connections.  Any other message or detail may carry a row's
values: it is replaced by the error's name, its SQLSTATE and its constraint.  The
psycopg exception stays reachable as ``original`` for whoever may see it.
"""

import re
from typing import TYPE_CHECKING, ClassVar, Final

import psycopg
from psycopg import errors as pg

if TYPE_CHECKING:
    from psycopg.errors import Diagnostic


class ReaperError(Exception):
    """
    Something did not work; ``str()`` is one sentence that is safe to log.

    ``hint`` says what to do, ``sqlstate`` and ``constraint`` come from the server,
    ``original`` is the psycopg error (it may contain values of rows: do not log it).
    """

    exit_code: ClassVar[int] = 1
    code: ClassVar[str] = "error"
    # Whether it stands on stderr already, in another form than the two lines for people.
    told: bool = False

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        detail: str | None = None,
        sqlstate: str | None = None,
        constraint: str | None = None,
        original: psycopg.Error | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.detail = detail
        self.sqlstate = sqlstate
        self.constraint = constraint
        self.original = original


class LeaseLost(ReaperError):
    """The lease was taken back: stop, another worker may have these holds (RP001)."""

    code = "lease-lost"


class UnknownPolicy(ReaperError):
    """No policy of that name is registered (RP002)."""

    exit_code = 2
    code = "unknown-policy"


class RegistrationRefused(ReaperError):
    """The policy does not fit its target; nothing was stored (RP003)."""

    exit_code = 2
    code = "registration-refused"


class WrongTransaction(ReaperError):
    """The transaction is not READ COMMITTED, or it may not write (RP004)."""

    exit_code = 75
    code = "wrong-transaction"


class VersionMismatch(ReaperError):
    """The SQL in the database and this driver do not fit (RP005); try later, as their other half is on its way."""

    exit_code = 75
    code = "version-mismatch"


class NotInstalled(ReaperError):
    """The database has no pgreaper in it."""

    code = "not-installed"


class InvalidInput(ReaperError):
    """An argument cannot be what it is (22023, or refused before it was sent)."""

    exit_code = 2
    code = "invalid-input"


class AccessDenied(ReaperError):
    """The role lacks a right (42501)."""

    code = "access-denied"


class UntrustedSchema(AccessDenied):
    """Schema pgreaper belongs to somebody who could do with it what only the caller may; nothing of it was called."""

    code = "untrusted-schema"


class QueryCancelled(ReaperError):
    """A statement was cancelled: by a statement timeout, or because we were told to stop (57014)."""

    code = "cancelled"


class StatementTimeout(QueryCancelled):
    """A statement took longer than ``statement_timeout`` allows: known to be that, and not a person's cancel."""

    code = "statement-timeout"


class DatabaseUnavailable(ReaperError):
    """The database cannot be reached, cannot write, or has no room: try later."""

    exit_code = 75
    code = "database-unavailable"


class DatabaseBusy(DatabaseUnavailable):
    """A deadlock, a serialization failure or a lock that did not come in time: try again."""

    code = "database-busy"


class TableLocked(DatabaseBusy):
    """A whole target is locked, by a migration for example: nothing was done, try again."""

    code = "table-locked"


class QueueUnavailable(ReaperError):
    """A queue cannot be reached, or does not take or give messages: try later."""

    exit_code = 75
    code = "queue-unavailable"


_OWN: dict[str, type[ReaperError]] = {
    "RP001": LeaseLost,
    "RP002": UnknownPolicy,
    "RP003": RegistrationRefused,
    "RP004": WrongTransaction,
    "RP005": VersionMismatch,
    "22023": InvalidInput,
    "42501": AccessDenied,
}
_BUSY = frozenset({"40001", "40P01", "55P03"})
# Classes of trouble that no row is to blame for; 25006 is a read-only node, 25P03 and 25P04 end the session of
# whoever has a transaction for too long.
_ENVIRONMENT = ("08", "53", "57P", "58", "25006", "25P03", "25P04")
READ_ONLY: Final = frozenset({"25006", "RP004"})
"""SQLSTATEs of a node, or a transaction, that may not write; the connection as such is well."""
# A statement of ours that names what is not there: schema, function, relation.
_MISSING = frozenset({"3F000", "42883", "42P01"})
# The same inside our functions, where the server says of its own accord that a piece is not there.
_INCOMPLETE = _MISSING | {"42703", "42704"}
_OWN_FRAME: Final = r"\bpgreaper\.\w+\(|\breaper_\w+\(|\b_(?:target|policy|require_writable)\("
_OWN_FUNCTION: Final = r"\bpgreaper\.\w+\(|\breaper_\w+\("

UPGRADE_HINT = "Run `pgreaper install` to upgrade the database, or use the driver that fits it."
INSTALL_HINT = "Run `pgreaper install`, or look whether this is the database you meant."


def translate(error: psycopg.Error, database: str | None = None) -> ReaperError:
    """Turn a psycopg error into ours, naming the database if told.  Never raises, never repeats a row's values."""
    state = error.sqlstate
    diag = error.diag
    if state is None:
        return _without_sqlstate(error)

    kind = _OWN.get(state)
    if kind is not None and (state.startswith("RP") or _is_own(diag)):
        return kind(
            diag.message_primary or state,
            hint=diag.message_hint,
            detail=diag.message_detail,
            sqlstate=state,
            original=error,
        )
    if state in _MISSING and diag.context is None and diag.statement_position is not None:
        return NotInstalled(
            f"pgreaper is not installed in {f'database {database}' if database else 'this database'}",
            hint=INSTALL_HINT,
            sqlstate=state,
            original=error,
        )
    if state == "42703" and diag.context is None and diag.statement_position is not None:
        return VersionMismatch(
            "pgreaper's tables and views in the database are not those that this driver knows",
            hint=UPGRADE_HINT,
            sqlstate="RP005",
            original=error,
        )
    if state in _INCOMPLETE and _lacks_a_piece(diag):
        return VersionMismatch(
            f"pgreaper is not complete in this database: {diag.message_primary}",
            hint=UPGRADE_HINT,
            sqlstate="RP005",
            original=error,
        )
    if state in _BUSY:
        return DatabaseBusy(
            f"the database was busy: {_name(error)}",
            hint="Another transaction was in the way; try again.",
            sqlstate=state,
            original=error,
        )
    if state == "57014":
        return QueryCancelled(
            "the statement was cancelled",
            hint="A statement_timeout did it, unless somebody asked for it; a smaller batch takes less time.",
            sqlstate=state,
            original=error,
        )
    if state.startswith("08") and diag.source_function is None:
        return _of_a_pooler(error)
    if state.startswith(_ENVIRONMENT):
        return DatabaseUnavailable(
            "the node or transaction is read-only"
            if state == "25006"
            else f"the database cannot serve now: {_name(error)} (SQLSTATE {state})",
            hint="Connect to the primary." if state == "25006" else "Try again later.",
            sqlstate=state,
            original=error,
        )
    if _is_own(diag):
        return ReaperError(diag.message_primary or state, hint=diag.message_hint, sqlstate=state, original=error)
    if state == "42501":
        return AccessDenied(
            # The server's own checks name the object and nothing else; a trigger may say anything.
            diag.message_primary or state
            if diag.source_function != "exec_stmt_raise"
            else "a trigger says that the role lacks a right (SQLSTATE 42501)",
            hint="Grant it to the role, or connect as one that has it.",
            sqlstate=state,
            original=error,
        )
    # RAISE may pass off anything as a constraint's name.
    constraint = diag.constraint_name if diag.source_function != "exec_stmt_raise" else None
    return ReaperError(
        f"the database refused: {_name(error)} (SQLSTATE {state}{f', constraint {constraint}' if constraint else ''})",
        hint="--debug shows the server's words; they may contain values of rows.",
        sqlstate=state,
        constraint=constraint,
        original=error,
    )


def _of_a_pooler(error: psycopg.Error) -> ReaperError:
    """What says no function of the server's source was written before it: by a pooler, about connections."""
    words = " ".join((error.diag.message_primary or "no reason was given").split())
    if "statement pooling" in words:
        return ReaperError(
            f"the pooler refused: {words}",
            hint="This needs transactions: pool_mode must be transaction or session, or go past the pooler.",
            sqlstate=error.sqlstate,
            original=error,
        )
    return DatabaseUnavailable(
        f"the pooler refused: {words}", hint="Try again later.", sqlstate=error.sqlstate, original=error
    )


def _without_sqlstate(error: psycopg.Error) -> ReaperError:
    """Whatever libpq or psycopg itself says: about the connection, or about an argument."""
    if isinstance(error, (pg.DataError, psycopg.NotSupportedError)):
        # psycopg's own words about an argument, for example a NUL byte in a text.
        return InvalidInput(
            "an argument cannot be sent to Postgres (a NUL byte, or a number out of range)", original=error
        )
    if isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError)):
        return DatabaseUnavailable("the connection to the database is lost", hint="Try again later.", original=error)
    return ReaperError(f"the driver refused: {_name(error)}", hint="--debug shows its words.", original=error)


def _is_own(diag: "Diagnostic") -> bool:
    """Whether a RAISE in one of pgreaper's own functions wrote this message."""
    if diag.source_function != "exec_stmt_raise" or not diag.context:
        return False
    return re.search(_OWN_FRAME, diag.context.partition("\n")[0]) is not None


def _lacks_a_piece(diag: "Diagnostic") -> bool:
    """
    Whether a statement of our own functions names what is not there.

    What EXECUTE cannot parse is a matter of the target, unless the message names us; triggers of the user's run
    inside statements whose errors do not come as far as this.
    """
    if diag.source_function == "exec_stmt_raise" or not diag.context:
        return False
    first = diag.context.partition("\n")[0]
    return bool(re.search(r"\bpgreaper\.", diag.message_primary or "")) or (
        re.search(_OWN_FUNCTION, first) is not None and not first.endswith("EXECUTE")
    )


def _name(error: psycopg.Error) -> str:
    """``CheckViolation`` as ``check violation``: the class is the server's condition name."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(error).__name__).lower()

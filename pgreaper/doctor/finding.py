"""What a check finds, and what it looks at and how."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from pgreaper.reading import Reader, Row

if TYPE_CHECKING:
    import psycopg

ERROR: Final = "error"
WARNING: Final = "warning"
NOTE: Final = "note"
LEVELS: Final = (ERROR, WARNING, NOTE)
"""Holds do not expire as promised; they will not, or somebody is hurt; good to know."""


@dataclass(frozen=True, slots=True)
class Finding:
    """
    One thing that is not as it should be.

    ``code`` is stable, ``subject`` is the object that it is about, ``policy`` is None for what concerns all of
    them.  ``sql`` are statements and ``commands`` are shell commands that repair it, in order and complete; where
    no statement can, ``advice`` says what a person should do.  ``database`` is where the statements are run when it
    is not the one that was looked at.
    """

    code: str
    level: str
    policy: str | None
    subject: str
    fact: str
    sql: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    advice: str | None = None
    database: str | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """From when on something is worth a finding."""

    snapshot: timedelta = timedelta(minutes=15)
    """An open transaction keeps vacuum from removing what died since."""
    lock: timedelta = timedelta(minutes=1)
    """A transaction keeps due holds locked."""
    dead_letter: timedelta = timedelta(days=1)
    """A dead letter has had no reaction."""
    late: timedelta = timedelta(minutes=1)
    """The least lateness that is told, however short the objective is."""
    relay: timedelta = timedelta(hours=1)
    """An event has not been delivered."""
    clock: timedelta = timedelta(seconds=1)
    """Clocks of the worker's host and of the database differ."""
    scan: int = 8 * 2**20
    """Bytes of a table that a claim may read from end to end."""
    dead_rows: int = 10_000
    """Dead row versions, when they are also more than a fifth of the table."""
    books: int = 2**30
    """Bytes of pgreaper's own tables."""
    count: int = 10_000
    """Counting stops here."""
    seconds: float = 5
    """A look of a check may take so long."""


@dataclass(slots=True)
class Look(Reader):
    """A connection as the checks use it, and what they have learned on the way."""

    limits: Limits
    facts: Row = field(default_factory=lambda: Row({}))
    """The session: role, database, settings; see :func:`pgreaper.doctor.server.learn`."""
    policies: tuple[Row, ...] = ()
    heard: "list[tuple[Finding, psycopg.Error]]" = field(default_factory=list)
    """What the server said where a finding only repeats that it refused: it may contain values of rows."""
    open_database: "Callable[[str], psycopg.Connection[Any]] | None" = None
    """Opens another database of the same server, where pg_cron may live."""


def listed(names: Sequence[str], most: int = 5) -> str:
    """``a, b and c``; of a long list the first few."""
    shown = list(names[:most])
    if len(names) > most:
        return f"{', '.join(shown)} and {len(names) - most:,} more"
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1] if shown else ""]))

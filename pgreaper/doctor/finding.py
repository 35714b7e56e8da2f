"""What a check finds, what it may look at, and how it looks: read-only, bounded, under a fixed search path."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from psycopg.rows import dict_row

if TYPE_CHECKING:
    import psycopg
    from psycopg import sql

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
    no statement can, ``advice`` says what a person should do.
    """

    code: str
    level: str
    policy: str | None
    subject: str
    fact: str
    sql: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    advice: str | None = None


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
    clock: timedelta = timedelta(seconds=5)
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


class Row(Mapping[str, Any]):
    """A row whose columns are attributes too."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def __getattr__(self, column: str) -> Any:
        try:
            return self._values[column]
        except KeyError:
            raise AttributeError(column) from None

    def __getitem__(self, column: str) -> Any:
        return self._values[column]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


@dataclass(slots=True)
class Look:
    """A connection in autocommit as the checks use it, and what they have learned on the way."""

    connection: "psycopg.Connection[Any]"
    limits: Limits
    facts: Row = field(default_factory=lambda: Row({}))
    """The session: role, database, settings; see :func:`pgreaper.doctor.server.learn`."""
    policies: tuple[Row, ...] = ()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A transaction that writes nothing, waits for no lock, ends in bounded time and leaves no setting behind."""
        with self.connection.transaction():
            self.connection.execute("set transaction isolation level read committed, read only")
            self.connection.execute(
                "select pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true),"
                " pg_catalog.set_config('statement_timeout', %s::pg_catalog.text, true),"
                " pg_catalog.set_config('lock_timeout', '1s', true),"
                " pg_catalog.set_config('idle_in_transaction_session_timeout', '0', true),"
                " pg_catalog.set_config('IntervalStyle', 'postgres', true),"
                " pg_catalog.set_config('jit', 'off', true)",
                [str(round(self.limits.seconds * 1000))],
            )
            yield

    def rows(self, query: "str | sql.SQL", **values: object) -> list[Row]:
        """The rows of a query, whose parameters are ``%(name)s``; inside :meth:`reading`."""
        with self.connection.cursor(row_factory=dict_row) as cursor:
            cursor.execute(query, values or None)
            return [Row(row) for row in cursor.fetchall()]

    def row(self, query: "str | sql.SQL", **values: object) -> Row:
        """The only row of a query."""
        (row,) = self.rows(query, **values)
        return row


def listed(names: Sequence[str], most: int = 5) -> str:
    """``a, b and c``; of a long list the first few."""
    shown = list(names[:most])
    if len(names) > most:
        return f"{', '.join(shown)} and {len(names) - most:,} more"
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1] if shown else ""]))

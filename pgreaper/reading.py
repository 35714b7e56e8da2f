"""
Looking at a database without leaving a trace.

Owns the transaction that reading tools use: read-only, under a fixed search path, bounded in time, with no
setting left behind, so that it is harmless on a busy primary and behind a pooler.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from psycopg.rows import dict_row

if TYPE_CHECKING:
    import psycopg
    from psycopg import sql

SYSTEM: Final = "pg_catalog, pg_temp"


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
class Reader:
    """A connection in autocommit, on which every statement may take ``seconds``."""

    connection: "psycopg.Connection[Any]"
    seconds: float

    @contextmanager
    def reading(self, search_path: str = SYSTEM) -> Iterator[None]:
        """
        A transaction that writes nothing, waits for no lock, ends in bounded time and leaves no setting behind.

        Another ``search_path`` than the system's is for statements in which functions of the user's run; whatever
        stands in them names its schema.
        """
        with self.connection.transaction():
            self.connection.execute("set transaction isolation level read committed, read only")
            self.connection.execute(
                "select pg_catalog.set_config('search_path', %s::pg_catalog.text, true),"
                " pg_catalog.set_config('statement_timeout', %s::pg_catalog.text, true),"
                " pg_catalog.set_config('lock_timeout', '1s', true),"
                " pg_catalog.set_config('idle_in_transaction_session_timeout', '0', true),"
                " pg_catalog.set_config('IntervalStyle', 'postgres', true),"
                " pg_catalog.set_config('jit', 'off', true)",
                [search_path, str(round(self.seconds * 1000))],
            )
            yield

    def rows(self, query: "str | sql.SQL | sql.Composed", **values: object) -> list[Row]:
        """The rows of a query, whose parameters are ``%(name)s``; inside :meth:`reading`."""
        with self.connection.cursor(row_factory=dict_row) as cursor:
            cursor.execute(query, values or None)
            return [Row(row) for row in cursor.fetchall()]

    def row(self, query: "str | sql.SQL | sql.Composed", **values: object) -> Row:
        """The only row of a query."""
        (row,) = self.rows(query, **values)
        return row

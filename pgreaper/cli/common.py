"""
What every command shares: its options, its connection, its JSON.

``emit`` prints the one document of a command: keys of holds are strings, lengths
of time are seconds in a field whose name says so, timestamps are ISO 8601 in UTC,
and a number that JSON lacks is null.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar
from uuid import UUID

import click
from click.core import ParameterSource
from psycopg import IsolationLevel

from pgreaper.api import Reaper
from pgreaper.api import unknown_policy as unknown_policy
from pgreaper.connection import connect, resolve
from pgreaper.errors import DatabaseUnavailable
from pgreaper.text import visible

SCHEMA_VERSION: Final = 1
"""The version of the JSON documents; a field is never renamed or dropped within one."""

_F = TypeVar("_F", bound=Callable[..., object])


def common_options(function: _F) -> _F:
    """Give a command ``--database-url``, ``--json`` (as ``as_json``) and ``--debug``."""
    for option in (
        click.option(
            "--debug",
            is_flag=True,
            expose_value=False,
            help="Show tracebacks and the server's own words, which may hold values of rows; nothing else does.",
        ),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text."),
        click.option(
            "--database-url",
            metavar="URL",
            help="Which database; default: PGREAPER_DATABASE_URL, DATABASE_URL, libpq's variables.",
        ),
    ):
        function = option(function)
    return function


def debugging(ctx: click.Context) -> bool:
    """Whether ``--debug`` was given, or PGREAPER_DEBUG says so."""
    given = ctx.get_parameter_source("debug") is ParameterSource.COMMANDLINE
    return given or os.environ.get("PGREAPER_DEBUG", "0") not in ("", "0")


if TYPE_CHECKING:
    _ParamType = click.ParamType[int | float]
else:
    _ParamType = click.ParamType  # older versions of click cannot be subscripted


class _Number(_ParamType):
    """A number above zero; says so in a sentence instead of an interval."""

    def __init__(self, kind: type[int] | type[float], most: float = math.inf) -> None:
        self._kind = kind
        self._most = most
        self.name = kind.__name__

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | float:
        try:
            number = self._kind(value)
        except ValueError:
            number = 0
        if not 0 < number <= self._most:
            self._refuse(value, param, ctx)
        return number

    def _refuse(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> NoReturn:
        what = "a whole number" if self._kind is int else "a number of seconds"
        most = "" if self._most == math.inf else f" and at most {self._most:,.0f}"
        self.fail(f"{visible(str(value))} is not {what} above 0{most}", param, ctx)


SECONDS = _Number(float, 1e9)
COUNT = _Number(int, 10**15)
INTEGER = _Number(int, 2**31 - 1)
BATCH = _Number(int, 10_000)
CALLS = _Number(int, 1000)


def read_only_error(*, standby: bool) -> DatabaseUnavailable:
    """The node cannot be written to; try later, or elsewhere."""
    return DatabaseUnavailable(
        "the server is a standby: it is read-only" if standby else "the database is read-only for this role",
        hint="Connect to the primary (target_session_attrs=read-write finds it)."
        if standby
        else "Clear default_transaction_read_only, or connect to another node.",
        sqlstate="25006",
    )


@contextmanager
def database(url: str | None, *, writes: bool = False, name: str | None = None) -> Iterator[Reaper]:
    """
    Connect, look that pgreaper is there in the right version, and hand out a Reaper.

    ``writes``: refuse a read-only node, and work under READ COMMITTED whatever the role's default is.
    ``name``: what the session is called instead of a worker's name.
    """
    connection = connect(resolve(url), name=name)
    try:
        reaper = Reaper(connection)
        server = reaper.server()
        reaper.require_version(server.version)
        if writes and server.read_only:
            raise read_only_error(standby=server.standby)
        if writes and server.repeats_reads:
            connection.isolation_level = IsolationLevel.READ_COMMITTED
            with connection.transaction():
                yield reaper
        else:
            yield reaper
    finally:
        connection.close()


def document(value: object) -> Any:
    """The value as JSON can say it; a dataclass's lengths of time get names that end in ``_seconds``."""
    if is_dataclass(value) and not isinstance(value, type):
        return {
            f"{f.name}_seconds" if "timedelta" in str(f.type) else f.name: document(getattr(value, f.name))
            for f in fields(value)
        }
    if isinstance(value, Mapping):
        return {str(k): document(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [document(v) for v in value]
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def emit(command: str | None, *, compact: bool = False, **content: Any) -> None:
    """Print the document of a command on stdout."""
    whole = {"schema_version": SCHEMA_VERSION, "command": command, **document(content)}
    text = json.dumps(whole, ensure_ascii=True, allow_nan=False, indent=None if compact else 2)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()

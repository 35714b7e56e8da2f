"""
The tables of ten applications, each loaded once, and a clone of them per test.

``data/README.md`` says where they come from.
"""

from __future__ import annotations

import csv
import re
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import sql

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DATA = Path(__file__).parent / "data"
ROWS = 1000


@dataclass(frozen=True, slots=True)
class Line:
    """A line of expected.tsv, read for what ``pgreaper register`` is to be told."""

    id: str
    file: str
    table: str
    key: list[str]
    deadline: str
    status: str
    held: list[str]
    expired: str
    predicate: str
    stamp: str | None
    changed: int
    after: dict[str, int]

    @property
    def zone(self) -> str | None:
        found = re.search(r"AT TIME ZONE '([^']+)'", self.predicate)
        return found[1] if found else None

    @property
    def condition(self) -> str | None:
        """What the application's own rule asks for besides the deadline: the WHERE of a view."""
        return self.predicate.split(" AND ", 1)[1] if self.id.endswith("_rule") else None

    @property
    def target(self) -> str:
        return "due_by_rule" if self.condition else self.table


def lines() -> list[Line]:
    with (DATA / "expected.tsv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE) if not row[0].startswith("#")]
    return [
        Line(
            id=row[0],
            file=row[1],
            table=row[2],
            key=[bare(name) for name in row[3].split(",")],
            deadline=bare(row[4]),
            status=bare(row[5]),
            held=[bare(value) for value in row[6].split(",")],
            expired=bare(row[7]),
            predicate=row[8],
            stamp=None if row[9] == "-" else row[9],
            changed=int(row[10]),
            after={state: int(number) for state, number in (pair.split("=") for pair in row[11].split(","))},
        )
        for row in rows
    ]


def bare(word: str) -> str:
    """A name or a literal without its quotes."""
    return word.strip("\"'")


def script(file: str) -> str:
    """The statements of a file, its psql commands left out."""
    text = (DATA / file).read_text(encoding="utf-8")
    text = "\n".join(line for line in text.splitlines() if not line.startswith("\\"))
    return re.sub(r"(?<![:\w]):n\b", str(ROWS), text)


@pytest.fixture(scope="session")
def load(server: Any, postgresql_noproc: Any) -> Iterator[Callable[[str], str]]:
    """A function that loads a file into a database with pgreaper, once, and returns the database's name."""
    loaded: dict[str, str] = {}
    template = sql.Identifier(postgresql_noproc.template_dbname)
    with psycopg.connect(server.url(server.maintenance_dbname), autocommit=True) as admin:

        def load(file: str) -> str:
            if file not in loaded:
                name = f"pgreaper_{Path(file).stem}"
                admin.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))
                admin.execute(sql.SQL("create database {} template {}").format(sql.Identifier(name), template))
                with psycopg.connect(server.url(name), autocommit=True) as connection:
                    connection.execute(script(file).encode())
                loaded[file] = name
            return loaded[file]

        yield load
        for name in loaded.values():
            admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


@pytest.fixture
def application(server: Any, load: Callable[[str], str]) -> Iterator[Callable[..., str]]:
    """A function that clones a loaded file, sessions in a time zone, and returns the clone's URL."""
    with psycopg.connect(server.url(server.maintenance_dbname), autocommit=True) as admin, ExitStack() as stack:

        def application(file: str, zone: str = "UTC") -> str:
            original, clone = sql.Identifier(load(file)), sql.Identifier("pgreaper_realworld")
            admin.execute(sql.SQL("drop database if exists {} with (force)").format(clone))
            admin.execute(sql.SQL("create database {} template {}").format(clone, original))
            stack.callback(admin.execute, sql.SQL("drop database if exists {} with (force)").format(clone))
            admin.execute(sql.SQL("alter database {} set timezone = {}").format(clone, sql.Literal(zone)))
            return str(server.url("pgreaper_realworld"))

        yield application

"""
Fixtures for the tests of the SQL functions.

A test works in a transaction on one shared database and leaves nothing behind: that is fast, and the
functions behave in a transaction as they do alone.  A test whose point is a commit, a second connection
or a statistic asks for ``committed`` and gets a database of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg
import pytest
from psycopg import sql

if TYPE_CHECKING:
    from collections.abc import Iterator

    Connection = psycopg.Connection[Any]


# A statement that does not end is a failure of its test.
NO_HANG = "set statement_timeout = '20s'"


class Hold(NamedTuple):
    """A row of ``reaper_claim``, times as text: psycopg cannot read infinity, nor every DateStyle."""

    token: str
    key: str
    deadline: str
    attempt: int
    claim_until: str
    payload: Any


class Core:
    """The SQL interface on one connection, as the tests speak of it."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def rows(self, query: str, *parameters: Any) -> list[tuple[Any, ...]]:
        return self.connection.execute(query, parameters or None).fetchall()

    def column(self, query: str, *parameters: Any) -> list[Any]:
        return [row[0] for row in self.rows(query, *parameters)]

    def value(self, query: str, *parameters: Any) -> Any:
        [(value,)] = self.rows(query, *parameters)
        return value

    def do(self, *statements: str) -> None:
        for statement in statements:
            self.connection.execute(statement)

    def call(self, function: str, *columns: str, **arguments: Any) -> list[tuple[Any, ...]]:
        """Call a set-returning or scalar function with named arguments."""
        query = sql.SQL("select {} from pgreaper.{}({}) as f").format(
            sql.SQL(", ".join(columns or ["f.*"])),
            sql.Identifier(function),
            sql.SQL(", ").join(
                sql.SQL("{} => {}").format(sql.Identifier(name), sql.Placeholder(name)) for name in arguments
            ),
        )
        return self.connection.execute(query, arguments).fetchall()

    def register(self, policy: str = "p", target: str = "holds", **arguments: Any) -> list[tuple[Any, ...]]:
        """Register with the plain columns of the holds unless told otherwise; return what changed."""
        plain = {"deadline_column": "expires_at", "status_column": "status", "held": ["held"], "expired": "expired"}
        arguments = plain | {"owner": "tests"} | arguments
        return self.call("reaper_register", policy=policy, target=target, **arguments)

    def claim(self, policy: str = "p", **arguments: Any) -> list[Hold]:
        columns = ("token::text", "key", "deadline::text", "attempt", "to_jsonb(claim_until)", "payload")
        return [Hold(*row) for row in self.call("reaper_claim", *columns, policy=policy, **arguments)]

    def expire(self, token: str, keys: list[str] | None = None) -> dict[str, tuple[str, str | None]]:
        """Expire a claim; outcome and state by key."""
        found = self.call("reaper_expire", token=token, keys=keys)
        outcomes = {key: (outcome, state) for key, outcome, state in found}
        assert len(outcomes) == len(found), f"a key came back twice: {found}"
        return outcomes

    def run(self, policy: str = "p", **arguments: Any) -> dict[str, str]:
        """Claim and expire until nothing is due; outcome by key."""
        outcomes: dict[str, str] = {}
        for _ in range(200):
            batch = self.claim(policy, rescan=True, **arguments)
            if not batch:
                return outcomes
            outcomes |= {key: outcome for key, (outcome, _) in self.expire(batch[0].token).items()}
        pytest.fail(f"the run does not end: {outcomes}")

    def refused(self, query: str, *parameters: Any) -> psycopg.Error:
        """Run a statement that must fail, in a transaction or savepoint of its own; return the error."""
        with pytest.raises(psycopg.Error) as caught, self.connection.transaction():
            self.connection.execute(query, parameters or None)
        return caught.value

    def preview(self, policy: str = "p") -> dict[str, Any]:
        names = "due due_capped oldest_deadline locked leased retrying dead no_deadline no_state looked_at".split()
        columns = ["oldest_deadline::text" if name == "oldest_deadline" else name for name in names]
        return dict(zip(names, self.call("reaper_preview", *columns, policy=policy)[0], strict=True))

    def status(self, policy: str = "p") -> dict[str, Any]:
        return self.record(
            "select to_jsonb(s) || jsonb_build_object('finite', isfinite(oldest_due)) from pgreaper.status as s"
            " where policy = %s",
            policy,
        )

    def record(self, query: str, *parameters: Any) -> dict[str, Any]:
        record = self.value(query, *parameters)
        assert isinstance(record, dict)
        return record

    def changed_nothing(self) -> bool:
        """Whether the running transaction has taken no transaction id."""
        return bool(self.value("select pg_current_xact_id_if_assigned() is null"))


@pytest.fixture(scope="session")
def shared_database(server: Any, postgresql_noproc: Any) -> Iterator[str]:
    """The URL of a database with pgreaper, in which nothing is ever committed."""
    name = sql.Identifier("pgreaper_contract")
    template = sql.Identifier(postgresql_noproc.template_dbname)
    with psycopg.connect(server.url(server.maintenance_dbname), autocommit=True) as admin:
        admin.execute(sql.SQL("drop database if exists {} with (force)").format(name))
        admin.execute(sql.SQL("create database {} template {}").format(name, template))
        yield server.url("pgreaper_contract")
        admin.execute(sql.SQL("drop database {} with (force)").format(name))


@pytest.fixture(scope="session")
def shared_connection(shared_database: str) -> Iterator[Connection]:
    connection = psycopg.connect(shared_database, autocommit=True)
    connection.execute(NO_HANG)
    yield connection
    connection.close()


@pytest.fixture
def committed(connect: Any) -> Any:
    """Asked for by name: the test's statements commit, in its own database.  The value opens more connections."""
    return connect


@pytest.fixture
def db(request: pytest.FixtureRequest) -> Iterator[Connection]:
    """A connection as superuser: in a transaction to be rolled back, or (with ``committed``) autocommitting."""
    if "committed" in request.fixturenames:
        connection = request.getfixturevalue("connect")()
        connection.execute(NO_HANG)
        yield connection
        return
    connection = request.getfixturevalue("shared_connection")
    with connection.transaction(force_rollback=True):
        yield connection


@pytest.fixture
def core(db: Connection) -> Core:
    """The SQL interface on the test's connection."""
    return Core(db)


@pytest.fixture
def wal_written(core: Core) -> Any:
    """A function that returns how many bytes of WAL an action writes (the least of five tries: others write too)."""

    def wal_written(action: Any) -> int:
        position = "select pg_current_wal_insert_lsn()"
        least = None
        for _ in range(5):
            before = core.value(position)
            action()
            written = int(core.value("select pg_wal_lsn_diff(pg_current_wal_insert_lsn(), %s::pg_lsn)", before))
            least = written if least is None else min(least, written)
            if least == 0:
                break
        assert least is not None
        return least

    return wal_written

"""Sessions, and a witness of what happens to the holds."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.concurrency import books
from tests.concurrency.sessions import Connect, Connection, Session
from tests.conftest import Holds


@pytest.fixture
def session(connect: Connect) -> Iterator[Callable[..., Session]]:
    """A function that opens a session with a thread of its own (arguments: psycopg.connect's)."""
    watcher = connect()
    with ExitStack() as stack:

        def session(**arguments: Any) -> Session:
            opened = Session(connect(**arguments), watcher)
            stack.callback(opened.close)
            return opened

        yield session


@pytest.fixture
def witnessed(db: Connection, holds: Holds) -> Iterator[Holds]:
    """The table of holds with its witness; at the end of the test, trail and witness must agree."""
    db.execute(books.WITNESS)
    yield holds
    assert books.violations(db) == []


@pytest.fixture
def deadlocks(db: Connection, connect: Connect) -> Iterator[None]:
    """No deadlock happens in this test; a cycle of locks is found at once, before a lock_timeout hides it."""
    name = db.info.dbname
    db.execute(f"alter database \"{name}\" set deadlock_timeout = '20ms'")
    yield
    count = "select deadlocks from pg_stat_database where datname = current_database()"
    if db.info.server_version >= 150000:
        # A session reports its statistics when it ends; this one's own are flushed by hand.
        db.execute("select pg_stat_force_next_flush()")
    else:
        # A deadlock is reported at once, and answers are up to half a second old.
        db.execute("""
            do $$
            declare v_end constant timestamptz := clock_timestamp();
            begin
              while pg_stat_get_snapshot_timestamp() <= v_end loop
                perform pg_stat_clear_snapshot(), pg_sleep(0.01);
              end loop;
            end $$""")
    row = connect().execute(count).fetchone()
    assert row == (0,)

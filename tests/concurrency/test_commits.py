"""The transition, its trail and the user's own side effects commit together, or not at all."""

from collections.abc import Callable

import psycopg
import pytest

from tests.concurrency.faults import FAULTS
from tests.concurrency.sessions import Connection, Session, drain, rows
from tests.conftest import Holds

CLAIM = "select * from pgreaper.reaper_claim('holds', batch => 10)"
EXPIRE = "select key, outcome from pgreaper.reaper_expire(%s)"
OUTBOX = """
create table outbox (hold bigint not null);
create function notify_expiry() returns trigger language plpgsql as
$$ begin insert into public.outbox values (new.id); return null; end $$;
create trigger notify_expiry after update on holds for each row
  when (old.status = 'held' and new.status = 'expired') execute function notify_expiry();
"""
# A door between the update and the commit: whoever holds the advisory lock keeps it shut.
DOOR = """
create function door() returns trigger language plpgsql as
$$ begin perform pg_advisory_xact_lock_shared(1); return null; end $$;
create trigger z_door after update on holds for each statement execute function door();
"""


@pytest.fixture
def outbox(db: Connection, witnessed: Holds) -> Holds:
    """Ten due holds whose expiry writes to an outbox."""
    witnessed.register()
    witnessed.due(10)
    db.execute(OUTBOX)
    return witnessed


def terminate(db: Connection, session: Session) -> None:
    assert rows(db, "select pg_terminate_backend(%s, 10000) as gone", session.pid) == [{"gone": True}]


def once(db: Connection) -> bool:
    sent = rows(db, "select hold from outbox order by hold")
    return [row["hold"] for row in sent] == list(range(1, 11))


@pytest.mark.parametrize("way", ["expire", "sweep"])
def test_c005_backend_lost_between_update_and_commit(
    outbox: Holds, db: Connection, session: Callable[..., Session], way: str
):
    """Nothing of it happened: no state, no side effect, no trail; the same token finishes the work."""
    db.execute(DOOR)
    db.execute("alter function pgreaper.reaper_expire set lock_timeout = '10s'")
    db.execute("alter function pgreaper._sweep_step set lock_timeout = '10s'")
    worker, doorman = session(), session(autocommit=False)
    doorman.run("select pg_advisory_xact_lock(1)")
    token = rows(db, CLAIM)[0]["token"] if way == "expire" else None

    dying = (
        worker.starts_waiting(EXPIRE, token)
        if way == "expire"
        else worker.starts_waiting("call pgreaper.reaper_sweep('holds')")
    )
    terminate(db, worker)
    assert isinstance(dying.exception(timeout=30), psycopg.OperationalError)
    doorman.connection.commit()

    assert set(outbox.states().values()) == {"held"}
    assert rows(db, "select * from outbox") == []
    assert rows(db, "select * from pgreaper.transitions") == []
    if token:
        assert len(rows(db, EXPIRE, token)) == 10
    else:
        rows(db, "call pgreaper.reaper_sweep('holds')")
    assert once(db)
    assert rows(db, "select * from pgreaper.failures") == []


def test_c005_c013_backend_lost_after_the_commit(outbox: Holds, db: Connection, session: Callable[..., Session]):
    """The reply is lost, the work is not: asking again tells what was done and does nothing twice."""
    worker = session()
    token = worker.run(CLAIM)[0]["token"]
    first = worker.run(EXPIRE, token)
    terminate(db, worker)

    for _ in range(2):  # however often it asks
        assert sorted(map(str, rows(db, EXPIRE, token))) == sorted(map(str, first))
    assert drain(db, "next") == []

    assert once(db)
    assert rows(db, "select count(*) from pgreaper.history where outcome = 'expired'") == [{"count": 10}]
    assert rows(db, "select * from pgreaper.failures") == []
    assert rows(db, "select * from pgreaper.events where kind in ('retry', 'dead-letter', 'already-done')") == []


def test_c013_an_answer_repeated_after_a_mixed_batch(outbox: Holds, db: Connection):
    """Also what was not expired is answered again as it was recorded."""
    token = rows(db, CLAIM)[0]["token"]
    db.execute("update holds set status = 'consumed' where id = 1; delete from holds where id = 2")
    first = rows(db, EXPIRE, token)

    db.execute("update holds set status = 'held' where id = 1")

    assert sorted(map(str, rows(db, EXPIRE, token))) == sorted(map(str, first))
    assert {row["key"]: row["outcome"] for row in first} == {"1": "not-eligible", "2": "not-eligible"} | {
        str(n): "expired" for n in range(3, 11)
    }


def test_a_trail_that_is_forgotten_is_noticed(db: Connection, holds: Holds):
    """Meta: the witness tells a transition without a trail."""
    from tests.concurrency import books

    db.execute(books.WITNESS)
    holds.register()
    holds.due(3)
    FAULTS["trail"].plant(db)
    drain(db, "forgetful")

    assert any("in the trail" in violation for violation in books.violations(db))

"""The next batch is claimed in the transaction that settles the last one, where that keeps nobody waiting."""

import signal
from typing import Any

import psycopg

from pgreaper.api import Reaper
from pgreaper.worker import Worker


def one(connection: psycopg.Connection[Any], query: str) -> Any:
    ((value,),) = connection.execute(query).fetchall()
    return value


ACTIVE = "select count(*) from pgreaper.claims where finished_at is null"


def ahead(reaper, batch, size=10):
    return reaper.expire_batch_and_claim(batch.token, batch=size, session=True)


def test_one_transaction(db, holds, connect):
    """Both are there when it commits, and the claim is that of any other call."""
    holds.due(25)
    holds.register()
    reaper = Reaper(connect())
    first = reaper.claim_batch("holds", batch=10, worker="w", session=True)
    outcomes, second = ahead(reaper, first)
    # The row that ended and the row that is new were written by one transaction.
    assert one(db, "select count(distinct xmin::text) from pgreaper.claims") == 1
    assert (outcomes, second.holds, second.attempt) == ({"expired": 10}, 10, 1)
    outcomes, third = ahead(reaper, second)
    assert (outcomes, third.holds) == ({"expired": 10}, 5)
    assert ahead(reaper, third) == ({"expired": 5}, None)
    assert one(db, ACTIVE) == 0


def test_a_batch_that_did_not_go_well_is_looked_at_first(db, holds, connect):
    """A hold that fails: what comes next is decided with that in mind."""
    db.execute("""
        create function no() returns trigger language plpgsql as $$ begin raise exception 'no'; end $$;
        create trigger no before update on holds for each row when (old.id = 3) execute function no();
    """)
    holds.due(20)
    holds.register()
    reaper = Reaper(connect())
    outcomes, claimed = ahead(reaper, reaper.claim_batch("holds", batch=10, worker="w", session=True))
    assert (outcomes, claimed) == ({"expired": 9, "dead-letter": 1}, None)


def test_not_while_somebody_else_has_a_claim(db, holds, connect):
    """Claims take turns: whoever waited for one at the end of a transition would keep the other waiting for longer."""
    holds.due(30)
    holds.register()
    reaper = Reaper(connect())
    first = reaper.claim_batch("holds", batch=10, worker="w", session=True)
    other = Reaper(db).claim_batch("holds", batch=10, worker="other")
    assert ahead(reaper, first) == ({"expired": 10}, None)
    assert other is not None
    Reaper(db).release(other.token)
    assert ahead(reaper, reaper.claim_batch("holds", batch=10, worker="w", session=True))[1].holds == 10


def test_a_run_that_ends_gives_it_back(db, holds, work):
    """What was claimed ahead and not begun is nobody's again, and no attempt is charged."""
    holds.due(20_000)
    holds.register(batch=10)
    run, _ = work(max_seconds=0.5)
    assert run.exit_code == 0
    assert 10 < run.expired < 20_000
    assert run.policies["holds"].released == 10
    assert one(db, ACTIVE) == 0
    assert one(db, "select count(*) from pgreaper.failures") == 0


def test_what_is_ahead_is_given_back_wherever_the_signal_comes(db, holds, work, monkeypatch):
    """Also between two batches, where a daemon would rest if nothing were due."""
    holds.due(1000)
    holds.register(batch=100)
    report = Worker._report

    def told(worker: Worker) -> None:
        if any(turn.ahead for turn in worker._turns):
            signal.raise_signal(signal.SIGTERM)
        report(worker)

    monkeypatch.setattr(Worker, "_report", told)

    run, _ = work(daemon=True)

    assert (run.ended, run.exit_code, run.policies["holds"].released) == ("signal", 0, 100)
    assert 0 < run.expired < 1000
    assert one(db, ACTIVE) == 0

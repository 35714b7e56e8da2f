"""A lease that is lost is lost: its holds come back once, and its token changes nothing any more."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.concurrency import books
from tests.concurrency.sessions import Connect, Connection, Session, at_once, drain, rows
from tests.conftest import Holds

CLAIM = "select * from pgreaper.reaper_claim('holds', batch => %s, worker => %s)"
EXPIRE = "select key, outcome from pgreaper.reaper_expire(%s)"
LATER = timedelta(minutes=5)
PATIENT = """
do $$ declare f regprocedure; begin
  for f in select oid from pg_proc
    where pronamespace = 'pgreaper'::regnamespace and proconfig::text like '%lock_timeout%' loop
    execute format('alter function %s set lock_timeout = ''10s''', f);
  end loop;
end $$
"""


def sqlstate(answer: Any) -> str | None:
    """The SQLSTATE that a session's answer failed with."""
    error = answer.exception(timeout=30)
    return error.sqlstate if isinstance(error, psycopg.Error) else None


def test_c011_the_holds_of_a_killed_worker_come_back_after_its_lease(
    db: Connection, witnessed: Holds, dsn: str, set_clock: Callable[..., None]
):
    """SIGKILL in mid-batch: the rest of the batch is leased until the lease ends, then expired once, by a namesake."""
    witnessed.register(lease="1 minute")
    witnessed.due(30)
    worker = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("worker_process.py"), dsn, "host-0", "4"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert worker.stdout is not None
    claim = json.loads(worker.stdout.readline())
    worker.kill()
    worker.communicate()

    # Before the lease ends its holds stay away, whatever name the next worker has.
    assert len(drain(db, "host-0", 7)) == 20
    left = [key for key, state in witnessed.states().items() if state == "held"]
    assert [str(key) for key in left] == claim["keys"][4:]

    set_clock(LATER)
    assert rows(db, CLAIM, 10, "host-0") == []  # takes the lease back; what is due waits for its retry
    books.settle(db)

    assert set(witnessed.states().values()) == {"expired"}
    charged = rows(db, "select key, outcome, error_class from pgreaper.history where outcome = 'retry'")
    assert sorted(charged, key=lambda row: int(row["key"])) == [
        {"key": str(key), "outcome": "retry", "error_class": "LeaseExpired"} for key in left
    ]
    with pytest.raises(psycopg.Error) as late:
        rows(db, EXPIRE, claim["token"])
    assert late.value.sqlstate == "RP001"
    # The part that was settled before the death is the only thing that token ever did.
    done = rows(db, "select keys from pgreaper.transitions where token = %s", claim["token"])
    assert done == [{"keys": claim["keys"][:4]}]
    rows(db, "delete from pgreaper.claims where token = %s", claim["token"])


def test_a_short_lease_ends_by_itself(db: Connection, witnessed: Holds):
    """The shortest lease, real time: next_due says when, and the holds are there then."""
    witnessed.register(lease="1 second", backoff_base="0", backoff_cap="0")
    witnessed.due(3)
    rows(db, CLAIM, 3, "dead")

    # No sleep of ours: the server waits exactly as long as the books say.
    rows(db, "select pg_sleep_for(pgreaper.reaper_next_due('holds'))")
    taken = drain(db, "alive", 3)
    taken += drain(db, "alive", 3)

    assert Counter(taken) == {("1", "expired"): 1, ("2", "expired"): 1, ("3", "expired"): 1}


@pytest.mark.parametrize("call", ["reaper_expire(%s)", "reaper_renew(%s)", "reaper_expire(%s, array['1'])"])
def test_a_stale_token_changes_nothing(db: Connection, witnessed: Holds, set_clock: Callable[..., None], call: str):
    """After the takeover the late worker is refused, before and after the holds were expired by another."""
    witnessed.register(backoff_base="0", backoff_cap="0")
    witnessed.due(3)
    token = rows(db, CLAIM, 3, "slow")[0]["token"]
    set_clock(LATER)
    rows(db, CLAIM, 3, "other")
    everything = (
        "select (select array_agg(h order by id) from holds as h) as holds,"
        " (select array_agg(c order by token) from pgreaper.claims as c) as claims,"
        " (select count(*) from pgreaper.transitions) as transitions, (select count(*) from pgreaper.events) as events"
    )

    for turn in range(2):
        before = rows(db, everything)
        with pytest.raises(psycopg.Error, match="is lost") as refused:
            rows(db, f"select pgreaper.{call}", token)
        assert refused.value.sqlstate == "RP001"
        assert rows(db, everything) == before
        assert rows(db, "select pgreaper.reaper_release(%s) as given_back", token) == [{"given_back": 0}]
        if turn == 0:
            books.settle(db)

    assert set(witnessed.states().values()) == {"expired"}


@pytest.mark.parametrize("call", ["reaper_expire(%s)", "reaper_renew(%s)", "reaper_release(%s)"])
@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_the_token_while_the_takeover_is_in_progress(
    db: Connection,
    witnessed: Holds,
    session: Callable[..., Session],
    set_clock: Callable[..., None],
    call: str,
    ending: str,
):
    """The late call waits for the takeover's end, and is refused or served by how that ends."""
    witnessed.register()
    witnessed.due(3)
    db.execute(PATIENT)
    late, other = session(), session(autocommit=False)
    token = late.run(CLAIM, 3, "late")[0]["token"]
    set_clock(LATER)

    other.run(CLAIM, 3, "other")
    waiting = late.starts_waiting(f"select pgreaper.{call} as answer", token)
    assert late.blockers() == {other.pid}
    other.run(ending)

    if ending == "rollback":
        assert waiting.result(timeout=30)
        assert rows(db, "select * from pgreaper.events where kind = 'taken-back'") == []
    elif call.startswith("reaper_release"):
        assert waiting.result(timeout=30) == [{"answer": 0}]
    else:
        assert sqlstate(waiting) == "RP001"
        assert witnessed.states() == {1: "held", 2: "held", 3: "held"}


@pytest.mark.parametrize("ending", ["commit", "rollback"])
@pytest.mark.parametrize("call", ["reaper_expire(%s)", "reaper_renew(%s, '1 day')", "reaper_release(%s)"])
def test_a_late_call_under_way_keeps_its_lease(
    db: Connection,
    witnessed: Holds,
    session: Callable[..., Session],
    set_clock: Callable[..., None],
    call: str,
    ending: str,
):
    """Who came first has the claim: a takeover does not wait for it and takes nothing, or all, when it is over."""
    witnessed.register(backoff_base="0", backoff_cap="0")
    witnessed.due(3)
    late, other = session(autocommit=False), session(options="-c statement_timeout=5s")
    token = late.run(CLAIM, 3, "late")[0]["token"]
    late.connection.commit()
    set_clock(LATER)

    late.run(f"select pgreaper.{call}", token)
    if call.startswith("reaper_release"):  # has the cursor, so that others wait their turn for it
        with pytest.raises(psycopg.errors.LockNotAvailable):
            other.run(CLAIM, 3, "other")
    else:
        assert other.run(CLAIM, 3, "other") == []
    assert rows(db, "select * from pgreaper.events where kind = 'taken-back'") == []
    late.run(ending)

    other.run(CLAIM, 3, "other")
    taken_back = [{"token": token}] if ending == "rollback" else []
    assert rows(db, "select token from pgreaper.events where kind = 'taken-back'") == taken_back


def test_two_calls_with_one_token_settle_it_once(db: Connection, witnessed: Holds, session: Callable[..., Session]):
    """A retry that overtakes its own first try waits for it, and gets the same answer."""
    witnessed.register()
    witnessed.due(3)
    db.execute(PATIENT)
    first, retry = session(autocommit=False), session()
    token = first.run(CLAIM, 3, "one")[0]["token"]
    first.connection.commit()

    answer = first.run(EXPIRE, token)
    waiting = retry.starts_waiting(EXPIRE, token)
    first.connection.commit()

    assert sorted(map(str, waiting.result())) == sorted(map(str, answer))


def test_c006_work_longer_than_the_lease(
    db: Connection, witnessed: Holds, connect: Connect, set_clock: Callable[..., None]
):
    """A trigger slower than the lease, two workers: an expire under way is not taken over, and all happens once."""
    witnessed.register(lease="1 second", batch=50)
    witnessed.due(100)
    db.execute(
        "create function slow() returns trigger language plpgsql as 'begin perform pg_sleep(0.025); return new; end';"
        "create trigger slow before update on holds for each row execute function slow()"
    )
    connections = [connect(application_name=f"reaper-{n}") for n in range(2)]

    outcomes = at_once([lambda c=c: drain(c, "pod-0", 50) for c in connections])  # type: ignore[misc]

    assert Counter(outcome for worker in outcomes for _, outcome in worker) == {"expired": 100}
    assert rows(db, "select * from pgreaper.failures") == []


def test_c006_work_outside_longer_than_the_lease(
    db: Connection, witnessed: Holds, session: Callable[..., Session], set_clock: Callable[..., None]
):
    """Work outside the database outlives the lease: the other worker does it, the late one learns that it lost."""
    witnessed.register(lease="5 seconds", backoff_base="0", backoff_cap="0")
    witnessed.due(10)
    slow, quick = session(), session()
    token = slow.run(CLAIM, 10, "pod-0")[0]["token"]

    set_clock(timedelta(seconds=6))
    taken = quick.call(lambda connection: [*drain(connection, "pod-0"), *drain(connection, "pod-0")]).result()
    late = slow.start(EXPIRE, token)

    assert len(taken) == len(set(taken)) == 10
    assert sqlstate(late) == "RP001"


def test_c006_a_renewed_lease_is_not_taken_over(
    db: Connection, witnessed: Holds, session: Callable[..., Session], set_clock: Callable[..., None]
):
    """Whoever renews in time keeps its holds however long the work takes."""
    witnessed.register(lease="5 seconds")
    witnessed.due(10)
    slow, quick = session(), session()
    token = slow.run(CLAIM, 10, "pod-0")[0]["token"]

    for seconds in (4, 8, 12, 16):
        set_clock(timedelta(seconds=seconds))
        slow.run("select pgreaper.reaper_renew(%s)", token)
        assert quick.run(CLAIM, 10, "pod-0") == []

    assert Counter(row["outcome"] for row in slow.run(EXPIRE, token)) == {"expired": 10}

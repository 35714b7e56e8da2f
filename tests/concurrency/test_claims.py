"""Workers that claim at the same time share nothing and lose nothing."""

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from itertools import chain

import psycopg
import pytest

from tests.concurrency import books
from tests.concurrency.faults import FAULTS
from tests.concurrency.sessions import Connect, Connection, Session, at_once, drain, rows
from tests.conftest import Holds

CLAIM = "select * from pgreaper.reaper_claim('holds', batch => %s)"
NO_TIMEOUT = "alter function pgreaper.reaper_claim set lock_timeout = '10s'"


def keys(claim: list[dict[str, object]]) -> list[str]:
    return [str(hold["key"]) for hold in claim]


def test_two_claims_at_once_share_nothing(db: Connection, witnessed: Holds, session: Callable[..., Session]):
    """The second claim waits for the first to commit, and then reads on."""
    witnessed.register()
    witnessed.due(6)
    db.execute(NO_TIMEOUT)
    first, second = session(autocommit=False), session()

    one = first.run(CLAIM, 3)
    waiting = second.starts_waiting(CLAIM, 3)
    assert second.blockers() == {first.pid}
    first.connection.commit()

    assert (keys(one), keys(waiting.result())) == (["1", "2", "3"], ["4", "5", "6"])


def test_a_claim_that_is_rolled_back_leaves_its_holds_to_the_next(
    db: Connection, witnessed: Holds, session: Callable[..., Session]
):
    """What was claimed in a transaction that fails was never claimed."""
    witnessed.register()
    witnessed.due(3)
    db.execute(NO_TIMEOUT)
    first, second = session(autocommit=False), session()

    first.run(CLAIM, 3)
    waiting = second.starts_waiting(CLAIM, 3)
    first.connection.rollback()

    assert keys(waiting.result()) == ["1", "2", "3"]


@pytest.mark.parametrize("fault", ["", "cursor locked", "read again", "leased left out"])
def test_eight_claims_released_by_a_barrier_share_nothing(db: Connection, holds: Holds, connect: Connect, fault: str):
    """Eight threads claim at the same instant, many times: no hold is leased twice.  Planted faults show."""
    holds.register()
    holds.due(400)
    db.execute(NO_TIMEOUT)
    if fault:
        FAULTS[fault].plant(db)
    connections = [connect() for _ in range(8)]

    def claims(connection: Connection) -> Callable[[], list[str]]:
        return lambda: list(chain.from_iterable(keys(rows(connection, CLAIM, 5)) for _ in range(10)))

    leased = Counter(chain.from_iterable(at_once([claims(connection) for connection in connections])))
    twice = [key for key, times in leased.items() if times > 1]

    if fault:
        assert twice
    else:
        assert (twice, len(leased)) == ([], 400)
        assert books.violations(db, books.SHARED) == []


def test_sixteen_workers_drain_five_thousand_holds(db: Connection, witnessed: Holds, connect: Connect, deadlocks: None):
    """Every hold is in exactly one claim and is expired by it; nobody meets a hold of somebody else's."""
    witnessed.register(lease="10 minutes")
    witnessed.due(5000, overdue="3 hours")
    db.execute(NO_TIMEOUT)
    connections = [connect(application_name=f"reaper-{n}") for n in range(16)]

    outcomes = at_once([lambda c=c: drain(c, "pod-0", 50) for c in connections])  # type: ignore[misc]

    settled = Counter(chain.from_iterable(outcomes))
    assert len(settled) == 5000
    assert {outcome for _, outcome in settled} == {"expired"}
    assert set(settled.values()) == {1}
    assert set(witnessed.states().values()) == {"expired"}
    for connection in connections:
        connection.close()


def test_c024_workers_and_takeovers_do_not_deadlock(
    db: Connection,
    witnessed: Holds,
    connect: Connect,
    deadlocks: None,
    set_clock: Callable[..., None],
):
    """Eight workers, twenty rounds, leases that lapse and are taken back meanwhile: no deadlock, nothing lost."""
    witnessed.register(lease="1 minute", max_attempts=1000, backoff_base="0", backoff_cap="0")
    witnessed.due(500)
    db.execute(
        "create table clock as select interval '0' as ahead;"
        "create or replace function pgreaper._clock() returns timestamptz language sql as"
        " 'select clock_timestamp() + (select ahead from public.clock)'"
    )
    connections = [connect() for _ in range(8)]

    def work(connection: Connection, n: int) -> Callable[[], int]:
        def rounds() -> int:
            for turn in range(20):
                try:
                    claim = rows(connection, CLAIM, 100)
                    if turn % 8 == n:  # one in eight goes missing, and everybody's lease with it
                        connection.execute("update clock set ahead = ahead + interval '2 minutes'")
                    elif claim:
                        rows(connection, "select pgreaper.reaper_expire(%s)", claim[0]["token"])
                    if turn % 5 == 4:
                        connection.execute(
                            "update holds set status = 'held', expires_at = pgreaper._clock()"
                            " where id in (select id from holds where status = 'expired' and id %% 8 = %s"
                            " order by id for update skip locked limit 20)",
                            (n,),
                        )
                except psycopg.Error as error:
                    if error.sqlstate not in ("RP001", "55P03"):
                        raise
            return 20

        return rounds

    assert at_once([work(connection, n) for n, connection in enumerate(connections)]) == [20] * 8

    assert books.violations(db) == []
    books.settle(db)
    assert books.lost(db) == []
    for connection in connections:
        connection.close()


FORCED = [
    "hashjoin mergejoin hashagg sort material",  # the plan that the report forced
    "hashjoin nestloop",
    "indexscan indexonlyscan bitmapscan",
    "seqscan",
    "tidscan seqscan",
]


@pytest.mark.parametrize("off", FORCED)
def test_c014_the_limit_holds_under_any_plan(
    db: Connection, witnessed: Holds, session: Callable[..., Session], off: str
):
    """A claim of 5 leases 5, an expire writes those 5, a sweep of 5 writes 5: whatever the planner does."""
    witnessed.register()
    witnessed.due(1000)  # and no analyze
    one, two, application = session(), session(), session(autocommit=False)
    for each in (one, two):
        for node in off.split():
            each.run(f"set enable_{node} = off")
    application.run("select from holds where id in (2, 4, 7) for update")

    claim = one.run(CLAIM, 5)
    again = two.run(CLAIM, 5)
    expired = one.run("select key, outcome from pgreaper.reaper_expire(%s)", claim[0]["token"])
    swept = two.run("call pgreaper.reaper_sweep('holds', batch => 5, max_rows => 5)")

    assert (keys(claim), keys(again)) == (["1", "2", "3", "4", "5"], ["6", "7", "8", "9", "10"])
    assert Counter(row["outcome"] for row in expired) == {"expired": 3, "locked": 2}
    assert [row["expired"] for row in swept] == [5]
    assert Counter(witnessed.states().values()) == {"expired": 8, "held": 992}


def test_c080_ten_sweeps_at_once_and_sixty_with_nothing_to_do(
    db: Connection, witnessed: Holds, connect: Connect, deadlocks: None
):
    """Overlapping runs share the work; a run that finds nothing takes no transaction id."""
    witnessed.register()
    witnessed.due(2000)
    connections = [connect(application_name=f"reaper-{n}") for n in range(10)]

    sweep = "call pgreaper.reaper_sweep('holds', batch => 100)"
    swept = at_once([lambda c=c: rows(c, sweep)[0]["expired"] for c in connections])  # type: ignore[misc]

    assert sum(swept) == 2000
    assert set(witnessed.states().values()) == {"expired"}
    assert rows(db, "select * from pgreaper.failures") == []
    quiet = False
    for _ in range(5):  # Autovacuum may take an id meanwhile; sweeps that took one would take sixty each time.
        before = rows(db, "select pg_snapshot_xmax(pg_current_snapshot()) as next")
        for _ in range(60):
            assert rows(connections[0], sweep) == [{"expired": 0}]
        quiet = quiet or rows(db, "select pg_snapshot_xmax(pg_current_snapshot()) as next") == before
    assert quiet
    for connection in connections:
        connection.close()


@pytest.mark.parametrize("fault", ["", "release counts as a move"])
def test_a_release_is_seen_by_the_claim_that_waits_for_it(
    db: Connection, witnessed: Holds, session: Callable[..., Session], fault: str
):
    """Released holds are claimable at once: a claim that had read on already must not leave them behind."""
    witnessed.register()
    witnessed.due(6)
    db.execute(NO_TIMEOUT)
    if fault:
        FAULTS[fault].plant(db)
    stopping, other = session(autocommit=False), session()
    token = stopping.run(CLAIM, 2)[0]["token"]
    stopping.connection.commit()

    stopping.run("select pgreaper.reaper_release(%s)", token)
    waiting = other.starts_waiting(CLAIM, 2)
    stopping.connection.commit()
    got = keys(waiting.result())
    got += keys(other.run(CLAIM, 10))

    assert (sorted(got) == ["1", "2", "3", "4", "5", "6"]) is (not fault)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("select pgreaper.reaper_unregister('holds')", "RP002"),
        ("select pgreaper.reaper_pause('holds')", []),
    ],
)
def test_a_claim_that_waited_obeys_what_was_decided_meanwhile(
    db: Connection, witnessed: Holds, session: Callable[..., Session], change: str, said: object
):
    """A policy that was withdrawn or paused while a claim waited for its turn is not claimed from."""
    witnessed.register()
    witnessed.due(3)
    db.execute(NO_TIMEOUT)
    operator, worker = session(autocommit=False), session()

    operator.run("select from pgreaper.cursors for update")
    operator.run(change)
    waiting = worker.starts_waiting(CLAIM, 3)
    operator.connection.commit()

    try:
        answer: object = waiting.result()
    except psycopg.Error as error:
        answer = error.sqlstate
    assert answer == said
    assert rows(db, "select * from pgreaper.claims") == []


def test_a_hold_is_seen_again_behind_the_cursor(db: Connection, witnessed: Holds, set_clock: Callable[..., None]):
    """A rescan finds what became due behind the cursor."""
    witnessed.register()
    witnessed.due(2)
    assert drain(db, "one", rescans=False) == [("1", "expired"), ("2", "expired")]

    witnessed.due(1, overdue="5 hours")
    set_clock(timedelta(seconds=1))

    assert rows(db, CLAIM, 5) == []
    assert drain(db, "one") == [("3", "expired")]

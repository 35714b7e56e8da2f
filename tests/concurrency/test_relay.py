"""
A relay and the order in which transactions commit: nothing is skipped, nothing overtakes its own, nobody stalls it.

The trail is read by what is settled.  What could go wrong is an id that is not there yet, that never comes, or that
somebody keeps for long.
"""

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import psycopg
import pytest

from pgreaper.embedded import Cluster
from tests.concurrency.sessions import Connect, Connection, Rows, Session, at_once, rows
from tests.concurrency.test_leases import PATIENT
from tests.conftest import Holds

FETCH = "select token, event, key, attempt from pgreaper.reaper_fetch(%s, batch => %s, lease => %s)"
OPEN = "select relay, created from pgreaper.reaper_relay('holds', %s)"
ACK = "select * from pgreaper.reaper_ack(%s)"
GAPS = "select count(*) - 1 as gaps from unnest((select settled from pgreaper.relays where name = 'holds'))"
SECONDS = 5.0
SEED = 7_3


def deliver(connection: Connection, relay: str = "holds", batch: int = 500) -> list[str]:
    """Fetch once and confirm everything; the keys."""
    events = rows(connection, FETCH, relay, batch, "1 minute")
    if events:
        rows(connection, ACK, events[0]["token"])
    return [event["key"] for event in events]


def expire(session: Connection, *ids: int, end: str = "commit") -> None:
    """Expire these holds in a transaction of its own, which ends so; with ``end=""`` it stays open."""
    claim = rows(session, "select token, key from pgreaper.reaper_claim('holds', batch => 1, rescan => true)")
    assert [row["key"] for row in claim] == [str(one) for one in ids]
    rows(session, "begin")
    outcome = rows(session, "select key, outcome from pgreaper.reaper_expire(%s)", claim[0]["token"])
    assert [row["outcome"] for row in outcome] == ["expired"] * len(ids)
    if end:
        rows(session, end)


@pytest.fixture
def relay(db: Connection, holds: Holds) -> Holds:
    """Ten holds that are due, and a relay of their policy."""
    holds.register()
    holds.due(10)
    rows(db, "select pgreaper.reaper_relay('holds')")
    return holds


def test_a_small_id_that_becomes_visible_after_a_large_one(db: Connection, connect: Connect, relay: Holds):
    """What commits late is delivered when it commits, and what is there is not held up by it."""
    late = connect()
    expire(late, 1, end="")
    expire(db, 2)
    expire(db, 3)
    assert deliver(db) == ["2", "3"]
    # It waits for nothing that could be told by reading: an idle pass is free although an id is open.
    with db.transaction():
        assert deliver(db) == []
        assert rows(db, "select pg_current_xact_id_if_assigned() as x") == [{"x": None}]
    late.commit()
    assert deliver(db) == ["1"]
    expire(db, 4)
    assert deliver(db) == ["4"]
    assert rows(db, GAPS) == [{"gaps": 0}]


def test_an_id_that_was_rolled_back_is_closed(db: Connection, connect: Connect, relay: Holds):
    """The hole closes with the next delivery, or as soon as nobody who was there when it was seen is left."""
    other, writer = connect(), connect()
    expire(writer, 1, end="")
    expire(other, 2, end="rollback")
    expire(db, 3)
    assert deliver(db) == ["3"]
    # Whether the open id is the writer's or nobody's, nobody can tell yet.
    assert rows(db, GAPS) == [{"gaps": 1}]
    second = connect()
    expire(second, 4, end="")
    expire(db, 5)
    assert deliver(db) == ["5"]
    writer.commit()
    # One that came later does not keep the hole open.
    assert deliver(db) == ["1"]
    assert rows(db, GAPS) == [{"gaps": 1}]
    expire(db, 6)
    assert deliver(db) == ["6"]
    second.rollback()
    expire(db, 7)
    assert deliver(db) == ["7"]
    assert rows(db, GAPS) == [{"gaps": 0}]


@pytest.mark.parametrize("where", ["here", "in another database"])
def test_a_long_foreign_transaction_stalls_nothing(
    db: Connection, connect: Connect, new_database: Callable[[], str], relay: Holds, where: str
):
    """One that has a transaction id and a snapshot, for hours: events are delivered and holes are closed."""
    foreign = connect(autocommit=False) if where == "here" else psycopg.connect(new_database())
    foreign.execute("set transaction isolation level repeatable read")
    foreign.execute("create table foreign_one (id int)")
    foreign.execute("select count(*) from foreign_one")
    expire(connect(), 1, end="rollback")
    expire(db, 2)
    assert deliver(db) == ["2"]
    assert rows(db, GAPS) == [{"gaps": 0}]
    foreign.close()


def test_ids_that_a_session_keeps_in_store(db: Connection, connect: Connect, relay: Holds):
    """A sequence with a cache hands out small ids late, from sessions that write nothing now: none is skipped."""
    rows(db, "alter sequence pgreaper.transitions_transition_id_seq cache 10")
    early = connect()
    expire(early, 1)
    expire(db, 2)
    assert deliver(db) == ["1", "2"]
    expire(db, 3)
    assert deliver(db) == ["3"]
    expire(early, 4)
    assert deliver(db) == ["4"]


def test_a_new_relay_delivers_what_is_under_way(db: Connection, connect: Connect, relay: Holds):
    """Made while a transition is in flight: that one is delivered, what had committed is not, nor what was undone."""
    expire(db, 1)
    expire(connect(), 2, end="rollback")
    late = connect()
    expire(late, 3, end="")
    expire(db, 4)
    rows(db, "select pgreaper.reaper_relay('holds', 'new')")
    expire(db, 5)
    assert deliver(db, "new") == ["5"]
    late.commit()
    assert deliver(db, "new") == ["3"]
    assert deliver(db, "new") == []


def test_several_make_the_same_relay(db: Connection, connect: Connect, relay: Holds):
    """One makes it and the others find it, whoever comes first."""
    makers = [connect() for _ in range(4)]
    for turn in range(10):
        name = f"turn {turn}"
        made = at_once([partial(rows, maker, OPEN, name) for maker in makers])
        assert sorted(row[0]["created"] for row in made) == [False, False, False, True]
        assert {row[0]["relay"] for row in made} == {name}


@pytest.fixture
def two_phase() -> Iterator[Cluster]:
    with Cluster(settings={"max_prepared_transactions": 5}) as started:
        yield started


@pytest.mark.parametrize("crash", [False, True], ids=["plain", "crash"])
def test_a_prepared_transaction(two_phase: Cluster, install: Callable[[str], None], crash: bool):
    """Its event is not skipped, however often the relay looks, also where the server went down in between."""
    install(two_phase.dsn)
    db = psycopg.connect(two_phase.dsn, autocommit=True)
    holds = Holds(db)
    holds.register()
    holds.due(10)
    rows(db, "select pgreaper.reaper_relay('holds')")
    writer = psycopg.connect(two_phase.dsn, autocommit=True)
    expire(writer, 1, end="")
    expire(db, 2)
    assert deliver(db) == ["2"]
    # The relay has noted a session; from now on the transaction is nobody's, and after a restart it has another name.
    writer.execute("prepare transaction 'late'")
    writer.close()
    if crash:
        db.close()
        two_phase.stop("immediate")
        two_phase.start()
        db = psycopg.connect(two_phase.dsn, autocommit=True)
    for one in (3, 4, 5):
        expire(db, one)
        assert deliver(db) == [str(one)]
    db.execute("commit prepared 'late'")
    assert deliver(db) == ["1"]
    expire(db, 6)
    assert deliver(db) == ["6"]
    assert rows(db, GAPS) == [{"gaps": 0}]
    db.close()


def test_a_lease_that_is_renewed_is_not_taken_over(
    db: Connection, session: Callable[..., Session], relay: Holds, set_clock: Callable[..., None]
):
    """Whoever comes to take over while it is being renewed, or acknowledged, finds it so and takes nothing."""
    rows(db, PATIENT)
    expire(db, 1)
    holder, taker = session(), session()
    for call, turns in (("reaper_keep(%s)", 1), ("reaper_ack(%s, '{}')", 2)):
        token = holder.run(FETCH, "holds", 10, "1 second")[0]["token"]
        set_clock(f"2040-01-0{turns} 12:00Z")
        holder.run("begin")
        holder.run(f"select pgreaper.{call}", token)
        taken = taker.starts_waiting(FETCH, "holds", 10, "1 minute")
        holder.run("commit")
        if "keep" in call:
            assert taken.result(timeout=30) == []
            holder.run("select pgreaper.reaper_ack(%s, '{}')", token)
        else:
            # It came back, so it is leased anew, and no lease was taken over.
            assert [row["attempt"] for row in taken.result(timeout=30)] == [1]
    assert rows(db, "select redelivered from pgreaper.relays") == [{"redelivered": 0}]


def test_an_acknowledgement_that_comes_while_it_is_taken_over(
    db: Connection, session: Callable[..., Session], relay: Holds, set_clock: Callable[..., None]
):
    """It waits, is refused with RP001, and books nothing."""
    rows(db, PATIENT)
    expire(db, 1)
    holder, taker = session(), session()
    token = holder.run(FETCH, "holds", 10, "1 second")[0]["token"]
    set_clock("2040-01-01 12:00Z")
    taker.run("begin")
    new = taker.run(FETCH, "holds", 10, "1 minute")
    late = holder.starts_waiting(ACK, token)
    taker.run("commit")
    error = late.exception(timeout=30)
    assert isinstance(error, psycopg.Error)
    assert error.sqlstate == "RP001"
    assert rows(db, "select delivered from pgreaper.relays") == [{"delivered": 0}]
    assert rows(db, ACK, new[0]["token"]) == [{"delivered": 1, "retry": 0, "dead": 0, "returned": 0}]


class Book:
    """What was sent, by whom first: sending is what a consumer sees."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.sent: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self.confirmed: set[str] = set()
        self.wrong: list[str] = []

    def send(self, events: Rows) -> None:
        with self.lock:
            for event in events:
                number = tuple(int(part) for part in event["event"].split("."))
                self.sent[event["key"]].append(number)  # type: ignore[arg-type]


def write(connection: Connection, seed: int, over: threading.Event, book: Book) -> None:
    """Hold, expire, and now and then think better of it; transactions of any length, in any order."""
    dice = random.Random(seed)
    try:
        while not over.is_set():
            rows(connection, "update holds set status = 'held', expires_at = clock_timestamp() where id = any(array("
                 "select id from holds where status = 'expired' order by random() limit %s for update skip locked))",
                 dice.randint(1, 8))  # fmt: skip
            if dice.random() < 0.3:
                rows(connection, "call pgreaper.reaper_sweep('holds', batch => %s)", dice.randint(1, 5))
                continue
            claim = rows(connection, "select token from pgreaper.reaper_claim('holds', batch => %s, rescan => true)",
                         dice.randint(1, 6))  # fmt: skip
            if claim:
                rows(connection, "begin")
                rows(connection, "select from pgreaper.reaper_expire(%s)", claim[0]["token"])
                if dice.random() < 0.3:
                    time.sleep(dice.random() * 0.02)
                undone = dice.random() < 0.3
                rows(connection, "rollback" if undone else "commit")
                if undone:
                    rows(connection, "select pgreaper.reaper_release(%s)", claim[0]["token"])
    except psycopg.Error as error:
        if error.sqlstate not in ("55P03", "RP001"):
            book.wrong.append(f"writer: {error.sqlstate} {error}")


def pass_on(connection: Connection, seed: int, over: threading.Event, book: Book) -> None:
    """Be a process of the relay that dies before or after sending, gives back, and meets refusals."""
    dice = random.Random(seed)
    try:
        while not over.is_set():
            events = rows(connection, FETCH, "holds", dice.randint(1, 12), "1 minute")
            if not events:
                # Time passes quickly here: what waits for its retry may go, what a dead process holds is lapsed.
                rows(connection, "update pgreaper.undelivered set not_before = clock_timestamp()"
                     " where not_before < 'infinity' and not_before > clock_timestamp()")  # fmt: skip
                continue
            token, fate = events[0]["token"], dice.random()
            if fate < 0.1:
                rows(connection, "update pgreaper.deliveries set lease_until = '-infinity' where token = %s", token)
                continue
            book.send(events)
            if fate < 0.2:
                rows(connection, "update pgreaper.deliveries set lease_until = '-infinity' where token = %s", token)
                continue
            names = [event["event"] for event in events]
            delivered, refused = names, []
            if fate < 0.5:
                dice.shuffle(names)
                delivered, refused = names[: len(names) // 2], names[len(names) // 2 :][: dice.randint(0, 2)]
            rows(connection, "select pgreaper.reaper_ack(%s, %s, %s, %s, %s)", token, delivered, refused,
                 ["E"] * len(refused), [True] * len(refused))  # fmt: skip
            with book.lock:
                book.confirmed.update(delivered)
    except psycopg.Error as error:
        book.wrong.append(f"relay: {error.sqlstate} {error}")


def test_writers_and_relays_at_random(db: Connection, connect: Connect, holds: Holds):
    """Rollbacks, late commits, lapses, refusals: every event that committed is delivered, each hold's in order."""
    holds.register()
    holds.due(40)
    rows(db, "select pgreaper.reaper_relay('holds')")
    over, book = threading.Event(), Book()
    crowd: list[Any] = []
    for seed in range(3):
        crowd.append(partial(write, connect(), SEED + seed, over, book))
        crowd.append(partial(pass_on, connect(), SEED + 100 + seed, over, book))
    timer = threading.Timer(SECONDS, over.set)
    timer.start()
    at_once(crowd)
    timer.join()
    assert book.wrong == []

    rows(db, "update pgreaper.deliveries set lease_until = '-infinity' where finished_at is null")
    rows(db, "update pgreaper.undelivered set not_before = clock_timestamp() where not_before < 'infinity'")
    while events := rows(db, FETCH, "holds", 100, "1 minute"):
        book.send(events)
        rows(db, ACK, events[0]["token"])
        book.confirmed.update(event["event"] for event in events)

    trail = rows(db, "select transition_id || '.' || k.n as event, k.key from pgreaper.transitions"
                 " cross join lateral unnest(keys) with ordinality as k (key, n)")  # fmt: skip
    assert len(trail) > 300
    assert book.confirmed == {row["event"] for row in trail}
    assert {key for key, sent in book.sent.items() if sent != sorted(sent)} == set()
    assert max(len(set(sent)) for sent in book.sent.values()) > 3
    rows(db, "update holds set status = 'held', expires_at = clock_timestamp() where id = 1")
    rows(db, "call pgreaper.reaper_sweep('holds')")
    assert "1" in deliver(db)
    assert rows(db, GAPS) == [{"gaps": 0}]
    assert rows(db, "select count(*) as left from pgreaper.undelivered") == [{"left": 0}]

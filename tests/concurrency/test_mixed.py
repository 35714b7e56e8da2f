"""Workers, sweeps and an application on the same holds for some seconds; then the books are audited."""

import random
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import psycopg
import pytest

from tests.concurrency import books
from tests.concurrency.faults import FAULTS
from tests.concurrency.sessions import Connect, Connection, at_once, rows
from tests.conftest import Holds

SECONDS = 4.0
SEED = 20_211
HONEST = {"RP001", "55P03"}

WORKER = {
    "claim": 10,
    "rescan": 3,
    "expire": 10,
    "one": 1,
    "renew": 1,
    "release": 1,
    "forget": 1,
}
APPLICATION = {
    "update holds set status = 'consumed' where id = %s and status = 'held'": 3,
    "update holds set expires_at = pgreaper._clock() + interval '1 second' where id = %s and status = 'held'": 3,
    "update holds set status = 'held', expires_at = pgreaper._clock() where id = %s and status <> 'held'": 6,
    "update holds set customer_email = 'changed' where id = %s": 3,
    "delete from holds where id = %s": 1,
    "insert into holds (id, expires_at) overriding system value values (%s, pgreaper._clock())"
    " on conflict do nothing": 3,
}


def work(connection: Connection, seed: int, over: threading.Event) -> list[str]:
    """Be a worker that forgets, releases and renews; return what it must not have met."""
    dice = random.Random(seed)
    wrong: list[str] = []
    token, keys = None, []
    while not over.is_set():
        step = dice.choices(list(WORKER), list(WORKER.values()))[0]
        try:
            if step in ("claim", "rescan") and token is None:
                claim = rows(
                    connection,
                    "select token, key from pgreaper.reaper_claim('holds', batch => %s, rescan => %s)",
                    dice.randint(1, 30),
                    step == "rescan",
                )
                token, keys = (claim[0]["token"], [row["key"] for row in claim]) if claim else (None, [])
            elif token is not None and step == "expire":
                rows(connection, "select pgreaper.reaper_expire(%s)", token)
                token = None
            elif token is not None and step == "one":
                rows(connection, "select pgreaper.reaper_expire(%s, %s)", token, keys[:1])
            elif token is not None and step in ("renew", "release"):
                rows(connection, f"select pgreaper.reaper_{step}(%s)", token)
                token = None if step == "release" else token
            elif step == "forget":
                token = None
        except psycopg.Error as error:
            token = None if error.sqlstate == "RP001" else token
            if error.sqlstate not in HONEST:
                wrong.append(f"{step}: {error.sqlstate} {error}")
    return wrong


def sweep(connection: Connection, seed: int, over: threading.Event) -> list[str]:
    dice = random.Random(seed)
    wrong: list[str] = []
    while not over.is_set():
        try:
            rows(connection, "call pgreaper.reaper_sweep('holds', batch => %s, max_rows => 40)", dice.randint(1, 20))
        except psycopg.Error as error:
            if error.sqlstate not in HONEST:
                wrong.append(f"sweep: {error.sqlstate} {error}")
    return wrong


def apply(connection: Connection, seed: int, over: threading.Event) -> list[str]:
    """Be the application: now and then in a transaction of several statements, some rolled back."""
    dice = random.Random(seed)
    wrong: list[str] = []
    while not over.is_set():
        statements = dice.choices(list(APPLICATION), list(APPLICATION.values()), k=dice.choice([1, 1, 1, 3]))
        ids = sorted(dice.sample(range(1, 301), len(statements)))  # in one order, as an application should
        try:
            with connection.transaction(force_rollback=dice.random() < 0.1):
                for statement, id_ in zip(statements, ids, strict=True):
                    connection.execute(statement, (id_,))
        except psycopg.Error as error:
            wrong.append(f"application: {error.sqlstate} {error}")
    return wrong


def play(connect: Connect, seconds: float) -> list[str]:
    """Let everybody at it for so long; return what anybody met that nobody should."""
    over = threading.Event()

    def stop() -> list[str]:
        time.sleep(seconds)  # how long the play is; nothing is waited for
        over.set()
        return []

    players: list[Callable[[], list[str]]] = [stop]
    for n, (role, name) in enumerate(
        [
            (work, "reaper"),
            (work, "reaper"),
            (work, "reaper"),
            (sweep, "reaper"),
            (apply, "application"),
            (apply, "application"),
        ]
    ):
        connection = connect(application_name=f"{name}-{n}", options="-c deadlock_timeout=20ms")
        players.append(partial(role, connection, SEED + n, over))
    return [wrong for answers in at_once(players) for wrong in answers]


@pytest.fixture
def crowd(db: Connection, holds: Holds) -> Holds:
    holds.register(lease="1 second", max_attempts=1000, backoff_base="0", backoff_cap="0")
    holds.due(300)
    db.execute(books.WITNESS)
    db.execute(
        "insert into witness (id, new_status, new_deadline, by) select id, status, expires_at, 'seed' from holds"
    )
    return holds


def audit(db: Connection) -> list[str]:
    # A worker of this play also settles single holds of a claim that it then loses or gives back.
    promises = [promise for promise in books.INVARIANTS if "given back or taken back expired nothing" not in promise]
    return books.violations(db, *promises)


def test_everybody_at_once(
    db: Connection, crowd: Holds, connect: Connect, deadlocks: None, set_clock: Callable[..., None]
):
    """Invariants hold in the crowd, nobody meets a deadlock, and nothing is lost when it has gone."""
    assert play(connect, SECONDS) == []

    done = rows(db, "select count(*) from pgreaper.history where outcome = 'expired'")[0]["count"]
    assert done > 300, "too little happened to say anything"
    assert audit(db) == []
    set_clock(timedelta(minutes=1))  # what was extended is due by now, and nothing becomes due meanwhile
    books.settle(db)
    assert audit(db) == []
    assert books.lost(db) == []


@pytest.mark.parametrize("rule", ["guard: held", "trail"])
def test_the_audit_notices_a_planted_fault(db: Connection, crowd: Holds, connect: Connect, rule: str):
    """Meta: the same play with a fault in it does not pass."""
    FAULTS[rule].plant(db)
    play(connect, 1.0)
    assert audit(db)

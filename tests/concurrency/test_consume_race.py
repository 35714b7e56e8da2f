"""The application's side of the race: it waits for its row, judges it by the clock of then, and is told the truth."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.concurrency import race
from tests.concurrency.sessions import Connect, Connection, Session, drain, rows
from tests.conftest import Holds

CONSUME = "select outcome, state from pgreaper.reaper_consume('holds', '1')"
EXTEND = "select outcome, state from pgreaper.reaper_extend('holds', '1', '2100-01-01Z')"
RESTORE = "select outcome, state from pgreaper.reaper_restore('holds', '1', '2100-01-01Z', 'r')"
NOON = "timestamptz '2030-01-01 12:00Z'"


@pytest.fixture
def clock(db: Connection) -> Callable[[int], None]:
    """A function that sets pgreaper's clock to so many seconds after noon, for what is under way too."""
    # What a sequence says is not a matter of snapshots.
    db.execute(
        "create sequence moment minvalue -100000; select setval('moment', 0);"
        "create or replace function pgreaper._clock() returns timestamptz language sql as"
        f" $$ select {NOON} + last_value * interval '1 second' from public.moment $$"
    )

    def clock(seconds: int) -> None:
        db.execute("select setval('moment', %s)", (seconds,))

    return clock


@pytest.fixture
def hold(db: Connection, holds: Holds, clock: Callable[[int], None]) -> Holds:
    """At noon, one hold that is due after ten seconds; it may be consumed, extended and, for a minute, restored."""
    db.execute(f"insert into holds (expires_at) values ({NOON} + interval '10 s')")
    holds.register(consumed="consumed", restore_within="1 minute")
    return holds


def said(outcome: str, state: str | None) -> list[dict[str, Any]]:
    return [{"outcome": outcome, "state": state}]


def test_c004_one_winner_each_and_both_are_told_the_truth(db: Connection, connect: Connect):
    """Hundreds of holds, each consumed or extended and expired within the same few milliseconds."""
    race.lay(db)
    told = race.run(connect, 400, seed=7)
    found, wins = race.audit(db, told, 400)
    assert found == []
    late = sum(count for what, count in wins.items() if what.startswith("expired"))
    assert 20 < late < 380, f"it was no race: {wins}"


@pytest.mark.parametrize("call", [CONSUME, EXTEND])
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_c063_the_clock_is_read_after_the_row_is_granted(
    hold: Holds, db: Connection, session: Callable[..., Session], clock: Callable[[int], None], call: str, end: str
):
    """A hold that was alive when the call was made, and is due when the lock comes, is the reaper's."""
    other, application = session(autocommit=False), session()
    # Only locked, or written and rolled back: either way the server would not compare the deadline again.
    other.run("select from holds where id = 1 for update")
    if end == "rollback":
        other.run("update holds set customer_email = 'x'")
    answer = application.starts_waiting(call)
    clock(10)
    other.run(end)

    assert answer.result(timeout=30) == said("not-eligible", "held")
    assert drain(db, "reaper") == [("1", "expired")]


def test_c063_the_window_is_judged_after_the_row_is_granted(
    hold: Holds, db: Connection, session: Callable[..., Session], clock: Callable[[int], None]
):
    """What could be restored when the call was made cannot when the lock comes too late."""
    clock(69)
    db.execute("update holds set status = 'expired'")
    other, application = session(autocommit=False), session()
    other.run("select from holds where id = 1 for update")
    answer = application.starts_waiting(RESTORE)
    clock(70)
    other.run("commit")

    assert answer.result(timeout=30) == said("not-eligible", "expired")


@pytest.mark.parametrize("call", [EXTEND, RESTORE])
def test_a_deadline_that_passes_while_the_call_waits(
    hold: Holds, db: Connection, session: Callable[..., Session], clock: Callable[[int], None], call: str
):
    """`until` was later than now when the call was made, and is refused when the lock comes."""
    if call == RESTORE:
        clock(10)
        assert drain(db, "reaper") == [("1", "expired")]
    other, application = session(autocommit=False), session()
    other.run("select from holds where id = 1 for update")
    answer = application.starts_waiting(call.replace("2100-01-01Z", "2030-01-01 12:00:30Z"))
    clock(30)
    other.run("commit")
    with pytest.raises(psycopg.Error, match="until must be later than now"):
        answer.result(timeout=30)


@pytest.mark.parametrize(("end", "told"), [("commit", "already-done"), ("rollback", "consumed")])
def test_two_that_consume_the_same_hold(hold: Holds, session: Callable[..., Session], end: str, told: str):
    """The second waits for the first and is told how that ended."""
    first, second = session(autocommit=False), session()
    assert first.run(CONSUME) == said("consumed", "consumed")
    answer = second.starts_waiting(CONSUME)
    first.run(end)
    assert answer.result(timeout=30) == said(told, "consumed")


@pytest.mark.parametrize("call", [CONSUME, EXTEND])
def test_c001_the_application_waits_for_the_reapers_commit(
    hold: Holds, db: Connection, session: Callable[..., Session], clock: Callable[[int], None], call: str
):
    """An expiry that is under way is waited for, not missed: never both."""
    clock(10)
    reaper, application = session(autocommit=False), session()
    token = reaper.run("select token from pgreaper.reaper_claim('holds')")[0]["token"]
    reaper.run("select pgreaper.reaper_expire(%s)", token)
    answer = application.starts_waiting(call)
    reaper.run("commit")
    assert answer.result(timeout=30) == said("not-eligible", "expired")


@pytest.mark.parametrize("way", ["claim", "sweep"])
def test_c001_the_reaper_passes_by_what_is_being_consumed(
    hold: Holds, db: Connection, session: Callable[..., Session], clock: Callable[[int], None], way: str
):
    """The application may take its time to commit; its hold stays its own, although its deadline passes."""
    application, reaper = session(autocommit=False), session()
    assert application.run(CONSUME) == said("consumed", "consumed")
    clock(10)
    if way == "claim":
        assert drain(reaper.connection, "reaper") == [("1", "locked")]
    else:
        answer = reaper.start("call pgreaper.reaper_sweep('holds')")
        assert reaper.settle(), "the reaper waits for the application"
        answer.result()
    application.run("commit")
    drain(db, "reaper")
    assert hold.states() == {1: "consumed"}


@pytest.mark.parametrize("call", [CONSUME, EXTEND, RESTORE])
def test_how_long_to_wait_is_the_applications_own_setting(
    hold: Holds, db: Connection, session: Callable[..., Session], call: str
):
    """Its lock_timeout ends the wait with 55P03, and no setting of pgreaper's does: after that nothing has happened."""
    other, patient, hasty = session(autocommit=False), session(), session(options="-c lock_timeout=50ms")
    other.run("select from holds where id = 1 for update")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        hasty.run(call)
    answer = patient.starts_waiting(call)
    other.run("rollback")
    assert len(answer.result(timeout=30)) == 1
    settings = rows(
        db,
        "select distinct unnest(proconfig) as setting from pg_proc where pronamespace = 'pgreaper'::regnamespace"
        " and proname in ('reaper_consume', 'reaper_extend', 'reaper_restore', '_lock_hold', '_change_hold')",
    )
    assert settings == [{"setting": "search_path=pg_catalog, pg_temp"}]


def test_a_key_that_is_deleted_and_inserted_anew_meanwhile(
    hold: Holds, db: Connection, session: Callable[..., Session]
):
    """The row that has the key when the lock comes is the hold that is meant."""
    db.execute("alter table holds alter id set generated by default")
    other, application = session(autocommit=False), session()
    other.run("delete from holds")
    answer = application.starts_waiting(CONSUME)
    other.run("insert into holds (id, expires_at) values (1, '2100-01-01Z')")
    other.run("commit")
    assert answer.result(timeout=30) == said("consumed", "consumed")


def test_a_row_that_moves_to_another_partition_meanwhile(db: Connection, session: Callable[..., Session]):
    """In READ COMMITTED that is no error of the application's: the hold with this key is gone."""
    db.execute(
        "create table holds (id int, status text, expires_at timestamptz, primary key (id, status))"
        " partition by list (status);"
        "create table h partition of holds for values in ('held'); create table r partition of holds default;"
        "insert into holds values (1, 'held', now() + interval '1 hour');"
        "select pgreaper.reaper_register('holds', 'holds', 'expires_at', 'status', held => '{held}',"
        " expired => 'expired', consumed => 'consumed', owner => 'tests')"
    )
    consume = "select outcome, state from pgreaper.reaper_consume('holds', '[\"1\", \"held\"]')"
    first, second = session(autocommit=False), session()
    assert first.run(consume) == said("consumed", "consumed")
    answer = second.starts_waiting(consume)
    first.run("commit")
    assert answer.result(timeout=30) == said("not-eligible", None)


# -- other isolation levels

LEVELS = ["repeatable read", "serializable"]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("call", [CONSUME, EXTEND, RESTORE])
def test_c016_the_application_may_run_under_any_level(
    hold: Holds, db: Connection, connect: Connect, level: str, call: str
):
    """The row is locked and judged by the clock; nothing is refused."""
    strict = connect()
    if call == RESTORE:
        db.execute("update holds set status = 'expired'")
    strict.execute(f"begin isolation level {level}")
    (answer,) = rows(strict, call)
    assert answer["outcome"] in ("consumed", "extended", "restored")
    strict.execute("commit")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("call", [CONSUME, EXTEND])
def test_c016_an_old_snapshot_tells_no_lie(
    hold: Holds, db: Connection, connect: Connect, clock: Callable[[int], None], level: str, call: str
):
    """A hold that expired after the snapshot is 40001, to begin anew, and never a win or an old state."""
    strict = connect()
    strict.execute(f"begin isolation level {level}")
    rows(strict, "select 1 from holds")
    clock(10)
    assert drain(db, "reaper") == [("1", "expired")]
    with pytest.raises(psycopg.errors.SerializationFailure):
        rows(strict, call)
    strict.execute("rollback")
    strict.execute(f"begin isolation level {level}")
    assert rows(strict, call) == said("not-eligible", "expired")


@pytest.mark.parametrize("level", LEVELS)
def test_c016_an_old_snapshot_and_a_deadline_that_has_passed(
    hold: Holds, connect: Connect, clock: Callable[[int], None], level: str
):
    """The snapshot is old, the clock is not."""
    strict = connect()
    strict.execute(f"begin isolation level {level}")
    assert rows(strict, "select status, expires_at > pgreaper._clock() as alive from holds") == [
        {"status": "held", "alive": True}
    ]
    clock(10)
    assert rows(strict, CONSUME) == said("not-eligible", "held")


# -- the plain pattern of docs/application.md

PLAIN = [
    "select from holds where id = 1 for update",
    "update holds set status = 'consumed' where id = 1 and status = 'held' and expires_at > clock_timestamp()",
]


def test_c063_the_plain_pattern_in_two_statements(holds: Holds, db: Connection, session: Callable[..., Session]):
    """Lock first, then compare: a wait for the row does not make the comparison old."""
    holds.register()
    holds.ahead(1, within="-500 ms")
    other, application = session(autocommit=False), session(autocommit=False)
    other.run(PLAIN[0])
    answer = application.starts_waiting(PLAIN[0])
    # Until the deadline has passed, by the server's clock and in the server.
    db.execute("do $$ begin while (select expires_at > clock_timestamp() from holds) loop end loop; end $$")
    other.run("commit")
    answer.result(timeout=30)
    assert application.call(lambda connection: connection.execute(PLAIN[1]).rowcount).result() == 0
    application.run("commit")
    assert drain(db, "reaper") == [("1", "expired")]


def test_the_plain_pattern_is_the_one_in_the_document():
    """What is tested here is what docs/application.md shows."""
    document = (Path(__file__).parents[2] / "docs/application.md").read_text()
    shown = re.findall(r"```sql\n(begin;\n.*?)```", document, re.DOTALL)[0]
    for theirs, ours in (("bookings", "holds"), ("hold_until", "expires_at"), ("$1", "1")):
        shown = shown.replace(theirs, ours)
    assert [line.rstrip(";") for line in shown.splitlines() if line.startswith(("select", "update"))] == PLAIN


def test_c063_the_plain_pattern_takes_what_is_alive(holds: Holds, db: Connection):
    """And pgreaper respects it."""
    holds.register()
    holds.ahead(1)
    with db.transaction():
        assert [db.execute(statement).rowcount for statement in PLAIN] == [1, 1]
    assert drain(db, "reaper") == []

"""C076, C077, C078: what a worker does when it is told to stop."""

from __future__ import annotations

import signal
import socket
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

TRANSITION = "exists (select from pg_stat_activity where query like '%reaper_expire%' and wait_event = 'PgSleep')"
IDLE = (
    "exists (select from pg_stat_activity where application_name like 'pgreaper/%'"
    " and query like '%_agenda%' and state = 'idle')"
)


@pytest.fixture
def slow(db: Any, holds: Any) -> Callable[[float], None]:
    """A function that gives the table a trigger of the user's own which takes so many seconds a row."""

    def slow(seconds: float) -> None:
        db.execute(f"""
            create function slow() returns trigger language plpgsql as
              $$ begin perform pg_sleep({seconds}); return new; end $$;
            create trigger slow before update on holds for each row execute function slow();
        """)

    return slow


def unfinished(db: Any) -> int:
    ((n,),) = db.execute("select count(*) from pgreaper.claims where finished_at is null").fetchall()
    return int(n)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_c076_the_first_signal_finishes_the_batch_in_hand(db, holds, slow, start, wait_until, number):
    """What is claimed is expired, nothing more is claimed, exit 0, no lease is left behind."""
    holds.due(10)
    holds.register(batch=1)
    slow(1.0)
    worker = start("work")
    wait_until(f"select {TRANSITION}")

    worker.popen.send_signal(number)
    result, _ = worker.end()

    assert result.code == 0
    assert 0 < list(holds.states().values()).count("expired") < 10
    assert unfinished(db) == 0
    assert "Traceback" not in result.err


def test_c076_the_second_signal_cancels_the_query(db, holds, slow, start, wait_until):
    """The transition is broken off, its claim given back at once, and the exit code tells of the signal."""
    holds.due(3)
    holds.register()
    slow(60)
    worker = start("work")
    wait_until(f"select {TRANSITION}")

    worker.popen.send_signal(signal.SIGTERM)
    assert worker.popen.stderr is not None
    assert "a second signal cancels it" in worker.popen.stderr.readline()
    worker.popen.send_signal(signal.SIGTERM)
    result, seconds = worker.end()

    assert (result.code, set(holds.states().values())) == (128 + signal.SIGTERM, {"held"})
    assert seconds < 5
    assert db.execute("select ending from pgreaper.claims").fetchall() == [("released",)]
    assert db.execute("select count(*) from pgreaper.failures").fetchone() == (0,)


def test_c077_a_long_query_is_cancelled_within_the_shutdown_timeout(db, holds, slow, start, wait_until):
    """A statement of a minute does not outlive --shutdown-timeout; nobody is charged for it."""
    holds.due(1)
    holds.register()
    slow(60)
    worker = start("work", "--shutdown-timeout", "2")
    wait_until(f"select {TRANSITION}")

    worker.popen.send_signal(signal.SIGTERM)
    result, seconds = worker.end()

    assert result.code == 0
    assert seconds < 10
    assert db.execute("select ending from pgreaper.claims").fetchall() == [("released",)]
    assert holds.states() == {1: "held"}


def test_an_idle_daemon_is_gone_at_once(holds, start, wait_until):
    """SIGTERM interrupts the sleep, however long it is."""
    holds.register()
    worker = start("work", "--daemon", "--poll", "600")
    wait_until(f"select {IDLE}")

    worker.popen.send_signal(signal.SIGTERM)
    result, seconds = worker.end()

    assert (result.code, result.out) == (0, "")
    assert seconds < 10


def test_c078_a_signal_while_connecting(start):
    """A server that accepts and never answers: SIGTERM ends the attempt."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        worker = start("work", "--daemon", "--json", url=f"postgresql://u@127.0.0.1:{silent.getsockname()[1]}/db")
        client, _ = silent.accept()
        with client:
            worker.popen.send_signal(signal.SIGTERM)
            result, seconds = worker.end()

    assert (result.code, result.json["ended"]) == (0, "signal")
    assert seconds < 7  # of ten that an attempt may take


def test_the_handlers_are_there_before_the_first_attempt(start):
    """A database that is down at the start of a daemon: it keeps trying, and SIGTERM ends that."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    worker = start("work", "--daemon", url=f"postgresql://u@127.0.0.1:{port}/db")
    assert worker.popen.stderr is not None
    first, second = worker.popen.stderr.readline(), worker.popen.stderr.readline()

    worker.popen.send_signal(signal.SIGTERM)
    result, seconds = worker.end()

    assert "cannot be reached" in first
    assert "trying again in" in second
    assert result.code == 0
    assert seconds < 10


def test_a_daemon_expires_a_hold_when_its_time_comes(db, holds, start, wait_until):
    """No poll in between: it sleeps for as long as the database says."""
    holds.register()
    worker = start("work", "--daemon", "--poll", "600")
    wait_until(f"select {IDLE}")
    worker.popen.send_signal(signal.SIGTERM)
    worker.end()

    holds.ahead(3, within="1 second")
    worker = start("work", "--daemon", "--poll", "600")
    wait_until("select count(*) = 3 from holds where status = 'expired'")
    worker.popen.send_signal(signal.SIGTERM)
    result, _ = worker.end()

    assert result.code == 0
    ((late,),) = db.execute(
        "select max(extract(epoch from t.at - k.deadline))::float8 from pgreaper.transitions as t,"
        " unnest(t.deadlines) as k (deadline)"
    ).fetchall()
    assert late < 5


def test_a_daemon_that_finds_only_locked_rows_looks_less_and_less_often(db, holds, start, wait_until, connect):
    """Each look is a claim, and writes; the pauses grow, and the hold expires when its lock is gone."""
    holds.register()
    (only,) = holds.due(1)
    application = connect()
    with application.transaction():
        application.execute("update holds set customer_email = 'x' where id = %s", (only,))
        worker = start("work", "--daemon")
        wait_until("select count(*) >= 7 from pgreaper.claims where locked = 1")
        pauses = db.execute(
            "select extract(epoch from claimed_at - lag(finished_at) over (order by claimed_at))::float8"
            " from pgreaper.claims order by claimed_at offset 1"
        ).fetchall()
    wait_until("select status = 'expired' from holds")
    worker.popen.send_signal(signal.SIGTERM)
    result, _ = worker.end()

    assert result.code == 0
    assert max(pause for (pause,) in pauses[4:]) > 0.3


def test_a_daemon_survives_the_loss_of_its_connection(holds, start, wait_until, db):
    """Its backend is terminated while it sleeps: one line a step, then it works again."""
    holds.register()
    worker = start("work", "--daemon", "--poll", "0.2")
    wait_until(f"select {IDLE}")

    db.execute("select pg_terminate_backend(pid) from pg_stat_activity where application_name like 'pgreaper/%'")
    holds.due(5)
    wait_until("select count(*) = 5 from holds where status = 'expired'")
    worker.popen.send_signal(signal.SIGTERM)
    result, _ = worker.end()

    assert result.code == 0
    lines = result.err.splitlines()
    assert len(lines) == 3
    assert "trying again in" in lines[1]
    assert lines[2].endswith("connected again")


def test_a_daemon_takes_up_a_policy_registered_meanwhile(holds, start, wait_until):
    """Without names it serves whatever is registered."""
    holds.due(5)
    worker = start("work", "--daemon", "--poll", "0.2")
    assert worker.popen.stderr is not None
    assert "0 policies" in worker.popen.stderr.readline()

    holds.register()
    wait_until("select count(*) = 5 from holds where status = 'expired'")
    worker.popen.send_signal(signal.SIGTERM)
    assert worker.end()[0].code == 0


def test_a_broken_policy_does_not_stop_a_daemon(db, holds, start, wait_until):
    """It backs off from the broken one, serves the other, and recovers without a person."""
    db.execute("create table other (like holds including all)")
    db.execute("alter table holds add constraint never_expired check (status <> 'expired')")
    holds.due(20)
    holds.register()
    holds.register("other", target="other")
    worker = start("work", "--daemon", "--poll", "0.2")
    assert worker.popen.stderr is not None
    worker.popen.stderr.readline()
    assert "is suspended, no hold is charged" in worker.popen.stderr.readline()

    db.execute("insert into other (expires_at) select expires_at from holds")
    wait_until("select count(*) = 20 from other where status = 'expired'")
    db.execute("alter table holds drop constraint never_expired")
    wait_until("select count(*) = 20 from holds where status = 'expired'")
    worker.popen.send_signal(signal.SIGTERM)
    assert worker.end()[0].code == 0

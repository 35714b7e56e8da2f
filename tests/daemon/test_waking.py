"""When a daemon wakes: for the next deadline, at its poll, and for nothing else."""

from __future__ import annotations

import signal
import socket
import time
from typing import TYPE_CHECKING, Any

from tests.daemon.conftest import SLEEPING

if TYPE_CHECKING:
    from tests.daemon.conftest import Recorder


def wait(condition: Any, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "never true"
        time.sleep(0.02)


def xids(db: Any) -> str:
    ((xmax,),) = db.execute("select pg_snapshot_xmax(pg_current_snapshot())::text").fetchall()
    return str(xmax)


def test_the_deadlines_of_several_policies_wake_it(db, holds, others, start, wait_until):
    """Three deadlines within two seconds, two policies, a poll of ten minutes: each is met."""
    holds.register()
    others()
    db.execute("insert into holds (expires_at) values (now() + interval '1 s'), (now() + interval '2 s')")
    db.execute("insert into others (expires_at) values (now() + interval '1500 ms')")
    start("work", "--daemon", "--poll", "600")

    wait_until("select count(*) = 3 from (table holds union all table others) as h where status = 'expired'")


def test_a_hold_that_is_due_before_the_planned_wake_up_is_seen_at_the_poll(db, holds, start, wait_until):
    """The daemon means to sleep for an hour; a hold comes in that is due at once."""
    holds.ahead(1)
    holds.register()
    start("work", "--daemon", "--poll", "0.5")
    wait_until(f"select {SLEEPING}")

    db.execute("insert into holds (expires_at) values (clock_timestamp() + interval '100 ms')")

    wait_until("select status = 'expired' from holds where id = 2", seconds=10)
    assert holds.states()[1] == "held"


def test_a_hold_that_was_committed_late_is_seen_at_the_poll(db, connect, holds, start, wait_until):
    """Its deadline lies behind those that have expired already: the poll looks from the oldest deadline on."""
    holds.register()
    late = connect(autocommit=False)
    late.execute("insert into holds (expires_at) values (clock_timestamp() - interval '1 minute')")
    holds.due(1, overdue="2 seconds")
    start("work", "--daemon", "--poll", "0.5")
    wait_until(f"select (select status = 'expired' from holds) and {SLEEPING}")

    late.commit()

    wait_until("select count(*) = 2 from holds where status = 'expired'")


def test_an_idle_daemon_asks_one_question_a_poll_and_writes_nothing(recorder: Recorder, start):
    """Two policies, nothing due: one read-only statement a poll, and no transaction id."""
    db, poll = recorder.db, 0.3
    recorder.holds.ahead(3)
    recorder.holds.register()
    db.execute("create table others (like holds including all)")
    recorder.holds.register("others", target="others")
    daemon = start("work", "--daemon", "--poll", str(poll), url=recorder.dsn)
    assert " is up" in daemon.popen.stderr.readline()
    before = xids(db)
    wait(lambda: recorder.asked())
    ((name, _),) = recorder.asked().items()
    seen = len(recorder.asked()[name])

    # The first look is that of the start.
    wait(lambda: len(recorder.asked()[name]) >= seen + 20)

    polls = recorder.asked()[name][seen:]
    assert [asked.text for asked in polls if "pgreaper._agenda(" not in asked.text] == []
    assert polls[-1].at - polls[0].at > (len(polls) - 2) * poll
    assert xids(db) == before


def test_daemons_do_not_move_in_step(recorder: Recorder, start):
    """Six daemons that started together, and that one hold woke together, poll at moments of their own."""
    db, poll, number = recorder.db, 1.0, 6
    recorder.holds.register()
    daemons = [start("work", "--daemon", "--poll", str(poll), url=recorder.dsn) for _ in range(number)]
    for daemon in daemons:
        assert " is up" in daemon.popen.stderr.readline()
    wait(lambda: len(recorder.asked()) == number)

    db.execute("insert into holds (expires_at) values (clock_timestamp() + interval '1500 ms')")
    wait(lambda: db.execute("select status = 'expired' from holds").fetchone() == (True,))
    ((expired,),) = db.execute("select extract(epoch from clock_timestamp())::float8").fetchall()
    wait(lambda: all(sum(a.at > expired + poll for a in asked) >= 3 for asked in recorder.asked().values()))

    woken = [a.who for w in recorder.asked().values() for a in w if "reaper_claim" in a.text]
    assert len(set(woken)) > 1, "the deadline wakes those that knew of it"
    phases = sorted(next(a.at for a in asked if a.at > expired + poll) % poll for asked in recorder.asked().values())
    gaps = [after - before for before, after in zip(phases, [*phases[1:], phases[0] + poll], strict=True)]
    # Six in step leave a gap of nearly the whole poll; by chance that comes about once in a hundred thousand runs.
    assert max(gaps) < 0.93 * poll, phases


def test_many_daemons_on_one_stream_of_holds(db, holds, start, wait_until):
    """Three daemons, sixty deadlines in three seconds, no poll: each expires, and once."""
    holds.register()
    db.execute("insert into holds (expires_at) select now() + g * interval '50 ms' from generate_series(1, 60) as g")
    for _ in range(3):
        start("work", "--daemon", "--poll", "600")

    wait_until("select count(*) = 60 from holds where status = 'expired'")

    assert db.execute("select sum(cardinality(keys)) from pgreaper.transitions").fetchone() == (60,)


def test_c067_a_terminated_connection_costs_a_poll_at_most(db, holds, start, wait_until):
    """No LISTEN that could be lost: a due row that comes in while the connection is gone expires all the same."""
    holds.register()
    daemon = start("work", "--daemon", "--poll", "0.5")
    wait_until(f"select {SLEEPING}")
    db.execute("select pg_terminate_backend(pid) from pg_stat_activity where application_name like 'pgreaper/%'")

    holds.due(1)

    wait_until("select status = 'expired' from holds", seconds=10)
    daemon.popen.send_signal(signal.SIGTERM)
    assert daemon.end()[0].code == 0


def test_c067_nothing_of_ours_is_in_the_way_of_those_who_write(db, holds, start, wait_until):
    """No trigger, no rule, no NOTIFY, and a daemon at rest has no lock: an insert does what it did before."""
    catalog = (
        "select (select count(*) from pg_trigger where tgrelid = 'holds'::regclass),"
        " (select count(*) from pg_rewrite where ev_class = 'holds'::regclass),"
        " (select count(*) from pg_constraint where conrelid = 'holds'::regclass),"
        " (select count(*) from pg_index where indrelid = 'holds'::regclass),"
        " (select relhastriggers or relhasrules or relrowsecurity from pg_class where oid = 'holds'::regclass)"
    )
    before = db.execute(catalog).fetchall()
    holds.ahead(1, within="2 seconds")
    holds.register()
    start("work", "--daemon", "--poll", "600")
    wait_until(f"select (select status = 'expired' from holds) and {SLEEPING}")

    assert db.execute(catalog).fetchall() == before
    daemon = "from pg_stat_activity as a where application_name like 'pgreaper/%'"
    assert db.execute(f"select count(*) from pg_locks where pid in (select pid {daemon})").fetchone() == (0,)
    assert db.execute(f"select backend_xid, backend_xmin {daemon}").fetchall() == [(None, None)]
    speaking = "prosrc ~* '(pg_notify|\\mnotify\\M|\\mlisten\\M)' and pronamespace = 'pgreaper'::regnamespace"
    assert db.execute(f"select proname from pg_proc where {speaking}").fetchall() == []
    assert db.execute("select pg_notification_queue_usage()").fetchone() == (0,)


def test_a_long_outage_is_a_few_lines(start):
    """Nothing listens: a line for each attempt while the pauses grow, and then silence for a minute."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    daemon = start("work", "--daemon", "--poll", "0.2", url=f"postgresql://u@127.0.0.1:{port}/db")
    assert daemon.popen.stderr is not None
    daemon.popen.stderr.readline()
    time.sleep(3)  # a dozen attempts and more

    daemon.popen.send_signal(signal.SIGTERM)
    result, _ = daemon.end()

    assert result.code == 0
    assert len(result.err.splitlines()) <= 4, result.err

"""``pgreaper work --handler``: real processes that are told to stop, stopped, killed, or that kill themselves."""

from __future__ import annotations

import signal
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from pgreaper.worker import HANDLER_TIMEOUT

if TYPE_CHECKING:
    from pathlib import Path

MODULE = """
import asyncio, os, signal, sys, threading, time
import psycopg

def connect():
    return psycopg.connect(os.environ["DATABASE_URL"], autocommit=True, application_name="handler")

def note(call):
    with connect() as connection:
        connection.execute("insert into calls values (%s, %s, %s)", (call.key, call.attempt, call.idempotency_key))

def waits(call):
    note(call)
    with connect() as connection:
        while not connection.execute("select exists (select from gate)").fetchone()[0]:
            time.sleep(0.01)

async def waits_async(call):
    await asyncio.to_thread(waits, call)

def hangs(call):
    note(call)
    threading.Event().wait()

async def hangs_async(call):
    note(call)
    await asyncio.sleep(3600)

async def hangs_in_a_thread(call):
    note(call)
    await asyncio.to_thread(threading.Event().wait)

def dies(call):
    note(call)
    os.kill(os.getpid(), signal.SIGKILL)

def leaves(call):
    note(call)
    sys.exit(0)

def interrupts(call):
    note(call)
    raise KeyboardInterrupt

def fails(call):
    note(call)
    raise ValueError("secret")
"""


@pytest.fixture(autouse=True)
def module(db: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The handlers, where a process finds them; what they were called for is in table `calls`."""
    (tmp_path / "tickets.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tickets", raising=False)
    db.execute("create table calls (key text, attempt integer, idempotency_key text); create table gate (open integer)")


def states(holds: Any) -> list[str]:
    return sorted(holds.states().values())


def failures(db: Any) -> list[tuple[Any, ...]]:
    return db.execute("select error_class, attempts from pgreaper.failures").fetchall()  # type: ignore[no-any-return]


def open_claims(db: Any) -> int:
    return int(db.execute("select count(*) from pgreaper.leases").fetchone()[0])


@pytest.mark.parametrize("handler", ["waits", "waits_async"])
@pytest.mark.parametrize("mode", [[], ["--daemon"]], ids=["drain", "daemon"])
def test_sigterm_lets_running_calls_finish_and_starts_none(db, holds, start, wait_until, handler, mode):
    """The two that run are settled, the others given back: nobody is charged, exit 0."""
    holds.due(10)
    holds.register()
    worker = start("work", "--handler", f"tickets:{handler}", "--concurrency", "2", *mode)
    wait_until("select count(*) = 2 from calls")

    worker.popen.send_signal(signal.SIGTERM)
    assert worker.popen.stderr is not None
    while "stopping" not in worker.popen.stderr.readline():
        pass
    db.execute("insert into gate values (1)")
    result, seconds = worker.end()

    assert result.code == 0
    assert seconds < 15
    assert states(holds) == ["expired"] * 2 + ["held"] * 8
    assert db.execute("select count(*) from calls").fetchone() == (2,)
    assert (open_claims(db), failures(db)) == (0, [])
    assert "given back" in result.out


@pytest.mark.parametrize("handler", ["hangs", "hangs_async", "hangs_in_a_thread"])
def test_a_call_that_hangs_does_not_keep_the_process(db, holds, start, wait_until, handler):
    """Gone within --shutdown-timeout. The hold whose call hung is charged, the others are given back."""
    holds.due(5)
    holds.register(backoff_base="1 hour")
    worker = start("work", "--handler", f"tickets:{handler}", "--concurrency", "1", "--shutdown-timeout", "2")
    wait_until("select count(*) = 1 from calls")

    worker.popen.send_signal(signal.SIGTERM)
    result, seconds = worker.end()

    assert result.code == 0
    assert seconds < 2
    assert states(holds) == ["held"] * 5
    assert failures(db) == [("ShutdownTimeout", 1)]
    assert open_claims(db) == 0


def test_a_call_that_outlives_its_time_does_not_keep_the_process(db, holds, pgreaper):
    """Its hold is charged, the process ends by itself with exit 1 and says that it left a call behind."""
    holds.due(3)
    holds.register(backoff_base="1 hour")

    result = pgreaper("work", "--handler", "tickets:hangs", "--handler-timeout", "0.3", "--concurrency", "3")

    assert result.code == 1
    assert sorted(failures(db)) == [("HandlerTimeout", 1)] * 3
    assert states(holds) == ["held"] * 3
    assert "holds: 3 to be tried again" in result.out
    assert "pgreaper: left behind: 3 calls of the handler that did not end" in result.err.splitlines()


def test_the_second_signal_waits_for_no_call(db, holds, start, wait_until):
    """Out at once, with the signal in the exit code; the books are in order all the same."""
    holds.due(5)
    holds.register(backoff_base="1 hour")
    worker = start("work", "--handler", "tickets:hangs", "--concurrency", "1")
    wait_until("select count(*) = 1 from calls")

    worker.popen.send_signal(signal.SIGTERM)
    assert worker.popen.stderr is not None
    while "stopping" not in worker.popen.stderr.readline():
        pass
    worker.popen.send_signal(signal.SIGTERM)
    result, seconds = worker.end()

    assert (result.code, states(holds), open_claims(db)) == (128 + signal.SIGTERM, ["held"] * 5, 0)
    assert seconds < 15


def test_a_process_that_dies_between_the_work_and_the_acknowledgement(db, holds, pgreaper, set_clock):
    """The effect is there and the hold is not expired: called again under the same idempotency key, expired once."""
    holds.due(1)
    holds.register()
    result = pgreaper("work", "--handler", "tickets:dies")
    assert result.code == -signal.SIGKILL
    assert (states(holds), open_claims(db)) == (["held"], 1)

    db.execute("insert into gate values (1)")
    set_clock(timedelta(hours=1))
    pgreaper("work", "--handler", "tickets:waits")  # takes the lease back
    set_clock(timedelta(hours=2))
    result = pgreaper("work", "--handler", "tickets:waits")

    assert result.code == 0
    assert states(holds) == ["expired"]
    assert db.execute("select array_agg(attempt), count(distinct idempotency_key) from calls").fetchone() == ([1, 2], 1)
    assert db.execute("select count(*) from pgreaper.transitions").fetchone() == (1,)


def test_c042_a_worker_that_is_stopped_beyond_its_lease_writes_nothing(db, holds, start, wait_until, set_clock):
    """SIGSTOP, somebody takes the lease back, SIGCONT: the call returns and its hold is not expired by that token."""
    holds.due(1)
    holds.register(lease="1 second", backoff_base="1 hour")
    worker = start("work", "--handler", "tickets:waits")
    wait_until("select count(*) = 1 from calls")

    worker.popen.send_signal(signal.SIGSTOP)
    set_clock(timedelta(minutes=1))
    db.execute("select pgreaper.reaper_claim('holds')")
    assert failures(db) == [("LeaseExpired", 1)]
    db.execute("insert into gate values (1)")
    worker.popen.send_signal(signal.SIGCONT)
    result, _ = worker.end()

    assert states(holds) == ["held"]
    assert db.execute("select count(*) from pgreaper.transitions").fetchone() == (0,)
    assert "lease of 1 hold is lost" in result.err
    assert "left to other workers" in result.out


def test_a_handler_that_exits_does_not_end_the_process(db, holds, pgreaper):
    """Each call has failed; the command ends as it would for any error, with 1, and names the handler."""
    holds.due(5)
    holds.register()

    result = pgreaper("work", "--handler", "tickets:leaves", "--concurrency", "1")

    assert result.code == 1
    assert sorted(failures(db)) == [("SystemExit", 1)] * 5
    assert open_claims(db) == 0
    assert "pgreaper: policy holds: the handler tickets:leaves raised SystemExit: that fails its call" in result.err
    assert "Traceback" not in result.err


def test_a_daemon_whose_handler_exits_goes_on(db, holds, start, wait_until):
    """A service manager that restarts what failed would not restart what ended with 0."""
    holds.due(3)
    holds.register()
    worker = start("work", "--daemon", "--poll", "0.2", "--handler", "tickets:leaves")
    wait_until("select count(*) = 3 from pgreaper.dead_letters")
    holds.due(1)
    wait_until("select count(*) = 4 from pgreaper.dead_letters")

    assert worker.popen.poll() is None
    worker.popen.send_signal(signal.SIGTERM)
    assert worker.end()[0].code == 0


def test_an_interrupt_of_a_handlers_is_a_stop(db, holds, pgreaper):
    """As Ctrl-C would be where nobody listens for it: 130."""
    holds.due(3)
    holds.register(backoff_base="1 hour")

    result = pgreaper("work", "--handler", "tickets:interrupts", "--concurrency", "1")

    assert result.code == 130
    assert (failures(db), open_claims(db)) == ([("KeyboardInterrupt", 1)], 0)
    assert "Traceback" not in result.err


def test_a_call_has_a_time_limit_although_nobody_gave_one(db, holds, in_process, pgreaper, tmp_path):
    """Five minutes, here a moment: a call that hangs does not keep its lease, and the other policies, for ever."""
    assert HANDLER_TIMEOUT == 300
    assert "[default: 300]" in in_process("work", "--help").out
    holds.due(2)
    holds.register(backoff_base="1 hour")
    (tmp_path / "impatient.py").write_text(
        "import pgreaper.cli.work\npgreaper.cli.work.HANDLER_TIMEOUT = 0.3\nfrom tickets import hangs_async\n"
    )

    result = pgreaper("work", "--handler", "impatient:hangs_async", "--concurrency", "2", "--json")

    assert (result.code, result.json["outcomes"]["retry"]) == (1, 2)
    assert failures(db) == [("HandlerTimeout", 1)] * 2


def test_a_daemon_calls_when_the_time_comes(db, holds, start, wait_until):
    """No poll in between; a batch after another under one process."""
    db.execute("insert into gate values (1)")
    holds.ahead(2, within="1 second")
    holds.register()
    worker = start("work", "--daemon", "--poll", "600", "--handler", "tickets:waits")

    wait_until("select count(*) = 2 from holds where status = 'expired'")
    worker.popen.send_signal(signal.SIGTERM)

    assert worker.end()[0].code == 0
    assert db.execute("select count(*) from calls").fetchone() == (2,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--concurrency", "3"], "--concurrency is for a --handler"),
        (["--handler-timeout", "3"], "--handler-timeout is for a --handler"),
        (["--handler", "tickets:waits", "--handler-timeout", "0"], "0 is not a number of seconds above 0"),
        (["--handler", "tickets"], "tickets does not name a handler"),
        (["--handler", "theatre:waits"], "there is no module theatre"),
        (["--handler", "tickets:wait"], "module tickets has no wait"),
        (["--handler", "tickets:signal"], "tickets:signal cannot be called"),
        (["--handler", "tickets:waits", "--concurrency", "0"], "0 is not a whole number above 0"),
        (["--handler", "tickets:waits", "--once", "--daemon"], "exclude each other"),
        (["--daemon", "--fail-on-dead-letter"], "--fail-on-dead-letter needs a run that ends"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_nonsense_is_refused_before_anything_is_claimed(db, holds, in_process, arguments, message):
    """Exit code 2, one sentence, nothing touched."""
    holds.due(1)
    holds.register()

    result = in_process("work", *arguments)

    assert result.code == 2
    assert message in result.err
    assert "Traceback" not in result.err
    assert db.execute("select count(*) from pgreaper.claims").fetchone() == (0,)


def test_dead_letters_and_the_exit_code(db, holds, in_process):
    """A new dead letter is a failure of the run in which it came about; an old one only for whoever asks."""
    holds.due(1)
    holds.register()

    born = in_process("work", "--handler", "tickets:fails")
    later = in_process("work", "--handler", "tickets:fails", "--json")
    asked = in_process("work", "--fail-on-dead-letter", "--json")
    db.execute("select pgreaper.reaper_discard('holds', null, 'none')")
    gone = in_process("work", "--fail-on-dead-letter")

    assert (born.code, later.code, asked.code, gone.code) == (1, 0, 1, 0)
    assert "ValueError" in born.err
    assert "secret" not in born.err + born.out
    assert later.json["policies"] == [] or later.json["policies"][0]["dead"] == 0
    assert asked.json["policies"][0]["dead"] == 1
    assert "policy holds has 1 dead letter" in asked.err


def test_a_run_that_finds_a_policy_suspended_says_so(db, holds, in_process):
    """Nothing was claimed, and yet it is not well: exit 1 and one line with the class of error and its SQLSTATE."""
    db.execute("alter table holds add constraint never_expired check (status <> 'expired')")
    holds.due(20)
    holds.register()
    assert in_process("work").code == 1

    result = in_process("work")

    assert result.code == 1
    (line,) = [line for line in result.err.splitlines() if "holds is suspended" in line]
    assert "23514" in line

"""Cases of the field: a fleet that starts at once, clocks that are wrong, processes that are stopped and killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pgreaper.embedded import Cluster
from tests.cli.conftest import PGREAPER, environment
from tests.conftest import Holds
from tests.daemon.conftest import SLEEPING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

# Forty interpreters would take half a minute to start on two cores; forty forks of one are as many processes.
FLEET = """
import os, sys
import pgreaper.cli.work
from pgreaper import session
from pgreaper.cli import main

number, session._PATIENCE = int(sys.argv[1]), float(sys.argv[2])
sys.stdin.readline()
children = []
for _ in range(number):
    child = os.fork()
    if not child:
        os._exit(main(["work"]))
    children.append(child)
print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
"""


class SmallServer:
    """A server with twenty places, three of them the superuser's, and a worker's role without privileges."""

    def __init__(self, cluster: Cluster, install: Callable[[str], None]) -> None:
        install(cluster.dsn)
        self.admin = psycopg.connect(cluster.dsn, autocommit=True)
        self.holds = Holds(self.admin)
        self.admin.execute("""
            create role plain login;
            grant usage on schema pgreaper to plain;
            grant execute on all routines in schema pgreaper to plain;
            grant all on all tables in schema pgreaper to plain;
            grant all on all sequences in schema pgreaper to plain;
            grant select, update on holds to plain;
        """)
        self.url = cluster.dsn.replace("//postgres@", "//plain@")

    def fleet(self, number: int, patience: float) -> subprocess.Popen[str]:
        """So many runs of `pgreaper work`, ready to begin at once."""
        command = [sys.executable, "-c", FLEET, str(number), str(patience)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=environment(self.url), stdin=pipe, stdout=pipe, stderr=pipe, text=True)


@pytest.fixture
def small(install: Callable[[str], None]) -> Iterator[SmallServer]:
    with Cluster(settings={"max_connections": 20, "fsync": False}) as cluster:
        small = SmallServer(cluster, install)
        yield small
        small.admin.close()


def test_c036_a_fleet_of_forty_on_a_server_of_twenty(small):
    """All forty get their turn: one connection each, waiting instead of failing, and a place is left for others."""
    small.holds.due(300)
    small.holds.register(batch=5)
    small.admin.execute("""
        create function slow() returns trigger language plpgsql as $$ begin perform pg_sleep(0.02); return new; end $$;
        create trigger slow before update on holds for each row execute function slow();
    """)
    fleet = small.fleet(40, patience=60)
    assert fleet.stdin is not None
    fleet.stdin.write("go\n")
    fleet.stdin.close()
    fleet.stdin = None
    most, crowds = 0, 0
    while fleet.poll() is None:
        # This one is another's connection: the fleet does not keep it out.
        seen = small.admin.execute(
            "select count(*) from pg_stat_activity where application_name like 'pgreaper/%' group by application_name"
        ).fetchall()
        most = max([most, *(n for (n,) in seen)])
        crowds = max(crowds, len(seen))
        time.sleep(0.01)
    out, err = fleet.communicate(timeout=60)

    assert json.loads(out.splitlines()[-1]) == [0] * 40, err
    assert most == 1
    assert crowds <= 17
    assert "trying again in" in err, "there was no crowd"
    assert set(small.holds.states().values()) == {"expired"}
    assert small.admin.execute("select sum(cardinality(keys)) from pgreaper.transitions").fetchone() == (300,)


def test_c036_whoever_never_gets_in_says_so(small):
    """All places are taken and stay so: after its patience each run ends with 75, having tried at growing intervals."""
    occupants: list[psycopg.Connection[Any]] = []
    with suppress(psycopg.OperationalError):
        while True:
            occupants.append(psycopg.connect(small.url))
    fleet = small.fleet(3, patience=1.5)
    out, err = fleet.communicate("go\n", timeout=60)

    assert json.loads(out) == [75, 75, 75]
    assert err.count("error: the database cannot be reached: ") == 3
    assert 6 <= err.count("trying again in") <= 60
    for occupant in occupants:
        occupant.close()


@pytest.fixture
def wrong_clock(needs: Callable[..., Path]) -> Callable[[Path], list[str]]:
    """A function that gives the beginning of a command whose wall clock a file says: ``+10m``, and later ``-2h``."""
    needs("faketime", package="faketime")

    def wrong_clock(file: Path) -> list[str]:
        # The monotonic clock stays: no step of the wall clock touches it.
        settings = {"FAKETIME_TIMESTAMP_FILE": str(file), "FAKETIME_NO_CACHE": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
        (library,) = {
            line.partition("=")[2]
            for line in subprocess.run(
                ["faketime", "-f", "+0", "env"], capture_output=True, text=True, check=True
            ).stdout.splitlines()
            if line.startswith("LD_PRELOAD=")
        }
        return ["env", f"LD_PRELOAD={library}", *(f"{k}={v}" for k, v in settings.items())]

    return wrong_clock


@pytest.fixture
def launch(dsn: str) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """A function that starts a command on this test's database."""
    started: list[subprocess.Popen[str]] = []

    def launch(command: list[str], url: str = dsn) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        popen = subprocess.Popen(command, env=environment(url), stdin=subprocess.DEVNULL, stderr=pipe, text=True)
        started.append(popen)
        return popen

    yield launch
    for popen in started:
        popen.kill()
        popen.communicate()


@pytest.mark.parametrize("step", ["+10m", "-10m"])
def test_c041_a_worker_whose_clock_is_wrong(db, holds, launch, wait_until, wrong_clock, tmp_path, step):
    """Ten minutes ahead or behind: what is due expires, a live lease is not stolen, what comes in 5 minutes waits."""
    (tmp_path / "time").write_text(step)
    holds.due(3)
    holds.register(lease="1 minute")
    db.execute("select pgreaper.reaper_claim('holds', batch => 1)")
    db.execute("insert into holds (expires_at) values (now() + interval '5 minutes'), (now() + interval '2 seconds')")
    daemon = launch([*wrong_clock(tmp_path / "time"), *PGREAPER, "work", "--daemon", "--poll", "600"])

    wait_until("select count(*) = 3 from holds where status = 'expired'")

    assert holds.states() == {1: "held", 2: "expired", 3: "expired", 4: "held", 5: "expired"}
    assert db.execute("select count(*) from pgreaper.failures").fetchone() == (0,)
    daemon.send_signal(signal.SIGTERM)
    assert daemon.wait(20) == 0


def test_c042_steps_of_the_clock_neither_wake_nor_stun_a_daemon(recorder, launch, wrong_clock, tmp_path):
    """Two hours forward, four back, a stop of two seconds: one look a poll before, between and after."""
    poll, file = 0.3, tmp_path / "time"
    file.write_text("+0")
    recorder.holds.register()
    daemon = launch([*wrong_clock(file), *PGREAPER, "work", "--daemon", "--poll", str(poll)], recorder.dsn)

    def looks() -> list[float]:
        return [asked.at for who in recorder.asked().values() for asked in who if "_agenda" in asked.text]

    def wait_for_looks(number: int) -> list[float]:
        end = time.monotonic() + 20
        while len(seen := looks()) < number:
            assert time.monotonic() < end, "it sleeps too long"
            time.sleep(0.02)
        return seen

    wait_for_looks(3)
    for step in ("+2h", "-2h"):
        file.with_suffix(".new").write_text(step)
        file.with_suffix(".new").rename(file)
        wait_for_looks(len(looks()) + 3)
    daemon.send_signal(signal.SIGSTOP)
    time.sleep(2)
    stopped = len(looks())
    daemon.send_signal(signal.SIGCONT)
    seen = wait_for_looks(stopped + 6)

    # The first two: that of the start, and one that was late.  Then never two in one poll.
    for some in (seen[1:stopped], seen[stopped:]):
        assert some[-1] - some[0] > (len(some) - 2) * poll
    recorder.db.execute("insert into holds (expires_at) values (now())")
    end = time.monotonic() + 20
    while recorder.holds.states() != {1: "expired"}:
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("backend", ["dies", "goes on"])
def test_c079_killed_in_the_middle_of_recovery(db, holds, start, wait_until, pgreaper, set_clock, backend):
    """SIGKILL while lapsed leases are being taken back: the next run takes them back, charges once, expires all."""
    holds.due(4)
    holds.register(lease="1 minute", backoff_base="1 hour")
    db.execute("select pgreaper.reaper_claim('holds')")
    set_clock(timedelta(minutes=2))
    db.execute("""
        create table gate (open boolean);
        create function in_recovery() returns trigger language plpgsql as $$ begin
          while new.kind = 'taken-back' and not exists (select from public.gate) loop perform pg_sleep(0.01); end loop;
          return new;
        end $$;
        create trigger in_recovery before insert on pgreaper.events for each row execute function in_recovery();
    """)
    inside = "from pg_stat_activity where query like '%reaper_claim%' and wait_event = 'PgSleep'"
    worker = start("work")
    wait_until(f"select exists (select {inside})")
    ((pid,),) = db.execute("select pid from pg_stat_activity where application_name like 'pgreaper/%'").fetchall()

    os.kill(worker.popen.pid, signal.SIGKILL)
    worker.popen.wait()
    if backend == "dies":
        db.execute("select pg_terminate_backend(%s, 10000)", [pid])
        assert db.execute("select ending from pgreaper.claims").fetchall() == [(None,)], "undone with its transaction"
    db.execute("insert into gate values (true)")
    wait_until("select not exists (select from pg_stat_activity where pid = %s)", pid)

    assert pgreaper("work").code == 0
    assert db.execute("select count(*), max(attempts) from pgreaper.failures").fetchone() == (4, 1)
    set_clock(timedelta(hours=4))
    assert pgreaper("work").code == 0
    assert set(holds.states().values()) == {"expired"}
    assert db.execute("select count(*) from pgreaper.claims where finished_at is null").fetchone() == (0,)
    assert db.execute("select count(*) from pgreaper.events where kind = 'taken-back'").fetchone() == (1,)


def _down(db: Any, holds: Holds) -> None:
    """The address of the test leads nowhere."""


def _missing(db: Any, holds: Holds) -> None:
    holds.register()
    db.execute("drop table holds")


def _one_of_ten(db: Any, holds: Holds) -> None:
    holds.due(10)
    holds.register()
    db.execute("alter table holds add constraint not_five check (status <> 'expired' or id <> 5)")


def _fine(db: Any, holds: Holds) -> None:
    holds.due(10)
    holds.register()


def _nothing(db: Any, holds: Holds) -> None:
    holds.ahead(10)
    holds.register()


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize(
    ("prepare", "arguments", "code", "words"),
    [
        (_down, [], 75, "the database cannot be reached"),
        (_missing, [], 1, "public.holds, the target of policy holds, does not exist"),
        (_one_of_ten, [], 1, "1 hold failed, now a dead letter: ConstraintViolation"),
        (_fine, [], 0, ""),
        (_nothing, [], 0, ""),
        (_fine, ["--batch", "0"], 2, "is not a whole number above 0"),
        (_fine, ["nobody"], 2, "there is no policy nobody"),
    ],
    ids=["a-down", "b-table-missing", "c-one-of-ten", "d-fine", "e-nothing-due", "g-bad-option", "g-bad-policy"],
)
def test_c085_the_exit_code_of_a_run(db, holds, in_process, monkeypatch, prepare, arguments, code, words, as_json):
    """Each end has its code, in JSON too; data on stdout, words on stderr, nothing where there is nothing to say."""
    prepare(db, holds)
    if prepare is _down:
        arguments = [*arguments, "--database-url", "postgresql://u@127.0.0.1:1/db"]

    result = in_process("work", *arguments, *(["--json"] if as_json else []))

    assert result.code == code
    assert words in result.err
    assert (result.err == "") == (code == 0)
    if as_json:
        assert result.json["exit_code"] == code
        assert (result.json["error"] is None) == (code in (0, 1))
    else:
        expected = {_one_of_ten: "9 expired", _fine: "10 expired"}.get(prepare, "")
        assert (expected if code < 2 else "") in result.out
        assert (result.out == "") == (not expected or code >= 2)


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_c085_the_exit_code_of_a_run_that_is_told_to_stop(holds, start, wait_until, as_json):
    """f) SIGTERM is no failure: 0, and the document says what ended it."""
    holds.due(3)
    holds.register()
    daemon = start("work", "--daemon", "--poll", "600", *(["--json"] if as_json else []))
    wait_until(f"select (select count(*) = 3 from holds where status = 'expired') and {SLEEPING}")

    daemon.popen.send_signal(signal.SIGTERM)
    result, _ = daemon.end()

    assert result.code == 0
    if as_json:
        assert (result.json["exit_code"], result.json["ended"], result.json["outcomes"]["expired"]) == (0, "signal", 3)
    else:
        assert "3 expired" in result.out

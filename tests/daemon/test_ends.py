"""How a worker ends, whatever it is in the middle of: which signals, how soon, with which exit code, saying what."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.cli.conftest import PGREAPER, Process, environment
from tests.daemon.conftest import SLEEPING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def launch(dsn: str) -> Iterator[Callable[..., Process]]:
    """A function that starts any command, with what subprocess.Popen takes."""
    started: list[subprocess.Popen[str]] = []

    def launch(command: list[str], *, url: str | None = dsn, **more: Any) -> Process:
        popen = subprocess.Popen(
            command, env=environment(url) | more.pop("env", {}), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL, text=True, **more,
        )  # fmt: skip
        started.append(popen)
        return Process(popen)

    yield launch
    for popen in started:
        popen.kill()
        popen.communicate()


def test_sighup_ends_it_like_sigterm(holds, start, wait_until):
    """The terminal is gone: finish, give back, exit 0."""
    holds.register()
    daemon = start("work", "--daemon", "--poll", "600")
    wait_until(f"select {SLEEPING}")

    daemon.popen.send_signal(signal.SIGHUP)
    result, seconds = daemon.end()

    assert result.code == 0
    assert seconds < 5


@pytest.mark.parametrize("ignored", [signal.SIGHUP, signal.SIGINT])
def test_what_was_ignored_at_the_start_stays_ignored(db, holds, launch, wait_until, ignored):
    """``nohup`` ignores SIGHUP and a shell's ``&`` ignores SIGINT; SIGTERM ends it all the same."""
    holds.register()
    daemon = launch(
        [*PGREAPER, "work", "--daemon", "--poll", "0.2"],
        preexec_fn=lambda: signal.signal(ignored, signal.SIG_IGN),
    )
    wait_until(f"select {SLEEPING}")

    daemon.popen.send_signal(ignored)
    holds.due(1)
    wait_until("select status = 'expired' from holds")
    assert daemon.popen.poll() is None
    daemon.popen.send_signal(signal.SIGTERM)

    assert daemon.end()[0].code == 0


def test_c078_as_process_1_while_it_waits(holds, launch, unshare, wait_until, tmp_path):
    """Process 1 gets only the signals that it has a handler for: SIGTERM is one of them."""
    holds.register()
    daemon = launch([*unshare("--pid", "--fork"), *PGREAPER, "work", "--daemon", "--poll", "600"])
    wait_until(f"select {SLEEPING}")

    os.kill(child_of(daemon), signal.SIGTERM)
    result, seconds = daemon.end()

    assert result.code == 0
    assert seconds < 5


def test_c078_as_process_1_while_it_starts(launch, unshare, tmp_path):
    """SIGTERM comes while Python imports psycopg, seconds before there is anything to finish: it ends all the same."""
    package = tmp_path / "psycopg"
    package.mkdir()
    (package / "__init__.py").write_text("import sys, time; sys.stderr.write('importing\\n'); time.sleep(60)")
    daemon = launch(
        [*unshare("--pid", "--fork"), *PGREAPER, "work", "--daemon"],
        env={"PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path.cwd())])},
    )
    assert daemon.popen.stderr is not None
    assert daemon.popen.stderr.readline() == "importing\n"

    os.kill(child_of(daemon), signal.SIGTERM)
    result, seconds = daemon.end()

    assert result.code == 128 + signal.SIGTERM
    assert seconds < 5
    assert "Traceback" not in result.err


def child_of(parent: Process) -> int:
    found = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(parent.popen.pid)], capture_output=True, text=True, check=True
    )
    return int(found.stdout)


def test_a_signal_while_it_reconnects(recorder, network, start):
    """The connection is cut and nobody answers any more: SIGTERM ends the pause between two attempts."""
    recorder.holds.register()
    daemon = start("work", "--daemon", "--poll", "5", "--json", url=network.url)
    assert " is up" in daemon.popen.stderr.readline()
    recorder.cluster.stop()
    assert "trying again in" in daemon.popen.stderr.readline()

    daemon.popen.send_signal(signal.SIGTERM)
    result, seconds = daemon.end()

    assert (result.code, result.json["ended"], result.json["exit_code"]) == (0, "signal", 0)
    assert seconds < 3


def test_a_signal_while_a_call_hangs(recorder, network, start):
    """The network swallows the answers: gone within the timeout, with the code for 'later', a document printed."""
    recorder.holds.register()
    daemon = start("work", "--daemon", "--poll", "0.2", "--json", "--shutdown-timeout", "2", url=network.url)
    assert " is up" in daemon.popen.stderr.readline()
    while len(next(iter(recorder.asked().values()), [])) < 4:
        time.sleep(0.01)
    assert network.swallow(0, 3600)
    time.sleep(0.5)

    daemon.popen.send_signal(signal.SIGTERM)
    result, seconds = daemon.end()

    assert (result.code, result.json["exit_code"], result.json["ended"]) == (75, 75, "signal")
    assert seconds < 10
    assert "the database does not answer" in result.err


def test_a_signal_while_a_name_is_looked_up(launch, unshare, tmp_path):
    """The resolver does not answer, and libpq waits where nothing can interrupt it: gone soon, the document printed."""
    here = f"127.83.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as resolver:
        try:
            resolver.bind((here, 53))
        except PermissionError:
            pytest.skip("only root may be a resolver: run as root")
        configuration = tmp_path / "resolv.conf"
        configuration.write_text(f"nameserver {here}\noptions timeout:30 attempts:5\n")
        script = f"mount --bind {configuration} /etc/resolv.conf && exec {' '.join(PGREAPER)} work --json"
        worker = launch([*unshare("--mount", "--fork"), "sh", "-c", script], url="postgresql://u@nowhere.example/db")
        resolver.settimeout(20)
        assert b"nowhere" in resolver.recv(512)

        os.kill(child_of(worker), signal.SIGTERM)
        result, seconds = worker.end()

    assert (result.code, result.json["ended"], result.json["exit_code"]) == (0, "signal", 0)
    assert seconds < 5


def test_a_closed_stderr_does_not_stop_the_work(db, holds, start, wait_until):
    """Whoever read the log is gone: the daemon goes on, and ends when it is told to."""
    holds.register()
    daemon = start("work", "--daemon", "--poll", "0.2")
    wait_until(f"select {SLEEPING}")
    assert daemon.popen.stderr is not None
    daemon.popen.stderr.close()

    for _ in range(2):
        db.execute("select pg_terminate_backend(pid) from pg_stat_activity where application_name like 'pgreaper/%'")
        wait_until("select exists (select from pg_stat_activity where application_name like 'pgreaper/%')")
    holds.due(1)
    wait_until("select status = 'expired' from holds")
    daemon.popen.send_signal(signal.SIGTERM)

    assert daemon.popen.wait(20) == 0

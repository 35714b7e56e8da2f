"""The heartbeat: fresh while the main loop goes round, whatever the database does; old when it hangs."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from pgreaper import heartbeat
from pgreaper.heartbeat import Heartbeat, read
from tests.daemon.conftest import SLEEPING

if TYPE_CHECKING:
    from pathlib import Path

HANDLER = """
import time
def slow(call):
    time.sleep(60)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "heartbeat"


def beaten_at(file: Path) -> float:
    return float(file.read_text().split()[0])


def wait_for_a_beat(file: Path, after: float = 0.0, seconds: float = 20) -> float:
    end = time.monotonic() + seconds
    while not file.exists() or beaten_at(file) <= after:
        assert time.monotonic() < end, "no beat"
        time.sleep(0.02)
    return beaten_at(file)


def goes_on(file: Path) -> None:
    """Another beat comes, sooner than a lease would be renewed."""
    wait_for_a_beat(file, beaten_at(file), seconds=12)


def stands_still(file: Path) -> bool:
    """Whether no beat comes in a time in which a living daemon beats: it sleeps with a short poll."""
    before = beaten_at(file)
    time.sleep(2.5)
    return beaten_at(file) == before


def test_it_beats_while_the_daemon_sleeps_and_is_gone_afterwards(holds, start, pgreaper, file):
    """Alive (0) while it runs; removed at a clean end, and then nobody is alive (3)."""
    holds.register()
    daemon = start("work", "--daemon", "--poll", "600", "--heartbeat", str(file))
    wait_for_a_beat(file)

    alive = pgreaper("heartbeat", str(file), "--json", url=None)
    goes_on(file)
    daemon.popen.send_signal(signal.SIGTERM)
    result, _ = daemon.end()

    assert (alive.code, alive.json["alive"], alive.json["worker"]) == (
        0,
        True,
        f"pgreaper/{socket.gethostname()}/{daemon.popen.pid}",
    )
    assert 0 <= alive.json["age_seconds"] < 20
    assert (result.code, list(file.parent.iterdir())) == (0, [])
    gone = pgreaper("heartbeat", str(file), url=None)
    assert (gone.code, gone.out) == (3, "")
    assert f"error: there is no heartbeat in {file}" in gone.err


def test_an_outage_of_the_database_is_no_reason_to_die(start, file):
    """Nothing listens there: it beats before the first attempt and with every attempt that fails."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    start("work", "--daemon", "--heartbeat", str(file), url=f"postgresql://u@127.0.0.1:{port}/db")

    wait_for_a_beat(file)
    goes_on(file)


def test_a_call_that_never_returns_is_one(recorder, network, start, file, in_process):
    """The network swallows the answers: the main thread waits for ever, the beats end, the probe says so (3)."""
    recorder.holds.register()
    daemon = start("work", "--daemon", "--poll", "0.5", "--heartbeat", str(file), url=network.url)
    wait_for_a_beat(file)
    goes_on(file)
    assert network.swallow(0, 3600)
    time.sleep(1)  # a poll at least

    assert stands_still(file)
    assert daemon.popen.poll() is None
    old = in_process("heartbeat", str(file), "--max-age", "2")
    assert (old.code, old.out) == (3, "")
    assert "was last alive" in old.err
    assert in_process("heartbeat", str(file)).code == 0


def test_a_stopped_process_is_one(holds, start, wait_until, file, in_process):
    """SIGSTOP: no beats; SIGCONT: alive again."""
    holds.register()
    daemon = start("work", "--daemon", "--poll", "0.5", "--heartbeat", str(file))
    wait_until(f"select {SLEEPING}")

    daemon.popen.send_signal(signal.SIGSTOP)
    assert stands_still(file)
    assert in_process("heartbeat", str(file), "--max-age", "2").code == 3
    daemon.popen.send_signal(signal.SIGCONT)

    goes_on(file)
    assert in_process("heartbeat", str(file), "--max-age", "20").code == 0


def test_it_beats_while_handlers_run(db, holds, tmp_path, file, dsn, start, monkeypatch):
    """A call of a minute: the main loop waits for it, renews its lease, and is alive."""
    (tmp_path / "slow_handler.py").write_text(HANDLER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    holds.due(1)
    holds.register()
    start("work", "--daemon", "--handler", "slow_handler:slow", "--heartbeat", str(file))
    while db.execute("select count(*) from pgreaper.claims").fetchone() != (1,):
        time.sleep(0.02)
    wait_for_a_beat(file)

    goes_on(file)


def test_a_disk_that_fails_later_does_not_stop_the_work(db, holds, start, wait_until, tmp_path):
    """The folder vanishes: holds expire all the same; it comes back, and so do the beats."""
    folder = tmp_path / "run"
    folder.mkdir()
    holds.register()
    start("work", "--daemon", "--poll", "0.5", "--heartbeat", str(folder / "beat"))
    wait_for_a_beat(folder / "beat")

    folder.rename(tmp_path / "away")
    time.sleep(1.5)  # a beat comes due
    holds.due(1)
    wait_until("select status = 'expired' from holds")
    folder.mkdir()

    wait_for_a_beat(folder / "beat")


def test_a_file_that_cannot_be_written_is_refused_at_once(in_process, tmp_path):
    """Exit 2 before anything is claimed; and so is a heartbeat without a daemon, and a folder."""
    for arguments, words in (
        (("--daemon", "--heartbeat", str(tmp_path / "nowhere/beat")), "cannot be written: no such file or directory"),
        (("--heartbeat", str(tmp_path / "beat")), "--heartbeat is for a --daemon"),
        (("--daemon", "--heartbeat", str(tmp_path)), "is a directory"),
    ):
        result = in_process("work", *arguments)
        assert (result.code, result.out) == (2, "")
        assert words in result.err
    assert list(tmp_path.iterdir()) == []


def test_the_age_is_the_monotonic_clocks(tmp_path, file):
    """The times of the file, which a step of the wall clock spoils, say nothing."""
    Heartbeat(file, "w")
    for moment in (0, 4_000_000_000):
        os.utime(file, (moment, moment))
        beat = read(file)
        assert beat is not None
        assert 0 <= beat.age < 60


@pytest.mark.parametrize("text", ["", "\n", "x", "nan w", "inf w", "-inf w", "99999999999999 from another boot"])
def test_what_is_no_beat_is_no_life(file, text, in_process):
    """An empty file, another one, one from before the machine was started anew: 3, and no traceback."""
    file.write_text(text)

    result = in_process("heartbeat", str(file))

    assert result.code == 3
    assert result.err.startswith("error: ")


def test_nobody_reads_half_a_beat(file, monkeypatch):
    """A reader beside a writer that does nothing else: each time a whole beat."""
    monkeypatch.setattr(heartbeat, "_EVERY", 0.0)
    beats = Heartbeat(file, "pgreaper/host/1")
    done = threading.Event()

    def write() -> None:
        while not done.is_set():
            beats.beat()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        found: list[Any] = [read(file) for _ in range(2000)]
    finally:
        done.set()
        writer.join()

    assert all(beat is not None and beat.worker == "pgreaper/host/1" for beat in found)
    assert len({beat.age for beat in found}) > 1


def test_beats_are_no_load(file):
    """However often the loop goes round, there is one beat a second at most."""
    beats = Heartbeat(file, "w")
    first = file.stat().st_ino, beaten_at(file)

    for _ in range(1000):
        beats.beat()
        if time.monotonic() - first[1] > 0.9:
            break

    assert (file.stat().st_ino, beaten_at(file)) == first


def test_what_is_no_file_is_wrong_usage_and_is_not_waited_for(in_process, tmp_path):
    """A folder, a pipe that nobody writes to, a socket, a device: 2, at once."""
    os.mkfifo(tmp_path / "pipe")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "socket"))
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "socket", "/dev/zero"):
        result = in_process("heartbeat", str(path))
        assert (result.code, result.err.splitlines()[0]) == (2, f"error: {path} is no file")
    listener.close()


def test_where_no_file_can_be_there_is_no_life(in_process, file):
    """Below a file, in a loop of links: nothing was ever written there (3), and why is told."""
    file.write_text("x")
    assert in_process("heartbeat", str(file / "below")).code == 3
    file.unlink()
    file.symlink_to(file)
    result = in_process("heartbeat", str(file))
    assert (result.code, "too many levels of symbolic links" in result.err) == (3, True)

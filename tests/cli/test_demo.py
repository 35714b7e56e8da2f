"""`pgreaper demo`: played for real, its proof put to the test, interrupted at bad moments."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pgreaper import demo
from pgreaper.cli import main

if TYPE_CHECKING:
    from collections.abc import Iterator

COMMAND = [sys.executable, "-m", "pgreaper", "demo", "--holds", "2000"]


@pytest.fixture
def room() -> Iterator[Path]:
    """A folder for the demo's temporary folders, which the server's user may enter; its path marks its processes."""
    yield from make_room()


def make_room() -> Iterator[Path]:
    room = Path(tempfile.mkdtemp(prefix="pgreaper-demo-", dir="/tmp"))
    room.chmod(0o711)
    yield room
    shutil.rmtree(room)


def environment(room: Path, **more: str) -> dict[str, str]:
    return os.environ | {"TMPDIR": str(room)} | more


def leftovers(room: Path) -> list[str]:
    """Everything that is still there: files, and processes that name the folder in arguments or environment."""
    found = [str(path) for path in room.iterdir()]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        except OSError:
            continue  # gone meanwhile
        if int(process.name) != os.getpid() and os.fsencode(room) in words:
            found.append(f"{process.name}: {words.replace(bytes(1), b' ').decode(errors='replace')[:100]}")
    return found


def nothing_left(room: Path) -> bool:
    deadline = time.monotonic() + 20
    while leftovers(room):
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: {leftovers(room)}")
        time.sleep(0.05)
    return True


class Kept:
    """A demo that was played to its end, and its server."""

    def __init__(self, document: dict[str, Any], connection: psycopg.Connection[Any]) -> None:
        self.document = document
        self.connection = connection


@pytest.fixture(scope="module")
def kept() -> Iterator[Kept]:
    """One demo with --keep for the whole module, in a shell whose PG* variables lead astray."""
    for room in make_room():
        astray = {"PGHOST": "nowhere.invalid", "PGSERVICE": "nothing", "PGOPTIONS": "-c search_path=nowhere"}
        run = subprocess.run(
            [*COMMAND, "--keep", "--json"], env=environment(room, **astray), capture_output=True, text=True, timeout=120
        )
        assert run.returncode == 0, run.stderr + run.stdout
        assert run.stderr == ""
        document = json.loads(run.stdout)
        with psycopg.connect(document["kept"]["url"], autocommit=True) as connection:
            yield Kept(document, connection)
        subprocess.run(["/bin/sh", "-c", document["kept"]["stop"]], check=True, timeout=60)
        nothing_left(room)


def test_every_line_of_the_proof_holds_and_its_numbers_add_up(kept):
    """Four workers, one of them killed with a lease in hand, customers meanwhile: each overdue hold expires once."""
    proof = {line["name"]: line["numbers"] for line in kept.document["proof"]}
    assert [line["name"] for line in kept.document["proof"] if not line["holds"]] == []
    assert list(proof) == ["settled", "once", "untouched", "ahead", "taken-over"]

    settled = proof["settled"]
    assert settled["overdue"] == 2000
    assert settled["overdue_expired"] + settled["overdue_paid"] + settled["overdue_extended"] == 2000
    assert {proof["once"][name] for name in ("rows_expired", "trail_expired", "trigger_expired")} == {
        settled["overdue_expired"]
    }
    application = kept.document["application"]
    assert (proof["untouched"]["paid"], proof["untouched"]["extended"]) == (
        application["paid"],
        application["extended"],
    )
    assert proof["ahead"]["ahead"] > 0


def test_the_victim_dies_with_a_lease_and_others_finish_its_holds(kept):
    """What was leased to the killed worker is taken back when the lease lapses, not before; others expire it."""
    over = next(line["numbers"] for line in kept.document["proof"] if line["name"] == "taken-over")
    assert over["victim"] == 3
    assert over["leased"] > 0
    assert 4.0 <= over["taken_back_after"] < 20
    assert over["taken_over"] + over["taken_over_changed"] == over["leased"]
    assert sum(over["taken_over_by"].values()) == over["taken_over"] > 0
    assert "3" not in over["taken_over_by"]
    assert [w["worker"] for w in kept.document["workers"] if w["killed"]] == [3]


def test_the_queries_to_try_can_be_tried(kept):
    """Each query that is printed runs in the server that was kept; the first tells of a hold that was taken over."""
    results = [kept.connection.execute(query).fetchall() for query in kept.document["queries"]]
    assert len(results) == 3
    assert all(results)
    assert {"retry", "expired"} <= {outcome for _, outcome, _ in results[0]}


def test_the_kept_server_is_reached_with_the_command_that_is_printed(kept):
    """The psql command and the URL lead to the demo's database."""
    run = subprocess.run(
        ["/bin/sh", "-c", f"{kept.document['kept']['psql']} --no-psqlrc --tuples-only --command 'select 42'"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == ["42"]


# What is planted, and the lines of the proof that must not hold then.
PLANTED = {
    "an expired hold is held again": (
        """
        update bookings set status = 'held', expired_at = null
         where id = (select max(id) from bookings where status = 'expired')
        """,
        {"settled", "once"},
    ),
    "a hold was expired twice, says the trail": (
        """
        insert into pgreaper.transitions
          (policy_id, token, worker, at, state, holds, keys, deadlines, first_deadline, last_deadline, lateness)
        select policy_id, token, worker, at, state, holds, keys, deadlines, first_deadline, last_deadline, lateness
          from pgreaper.transitions where not keys && (select keys from kills) limit 1
        """,
        {"settled", "once"},
    ),
    "a hold was expired twice, saw the trigger": (
        "insert into changes values ('held', 'expired', 1)",
        {"once"},
    ),
    "a hold was expired behind the books, ahead of its deadline": (
        """
        update bookings set status = 'expired', expired_at = now()
         where id = (select max(id) from bookings
                      where status = 'held' and hold_until = booked_at + interval '1 hour')
        """,
        {"once", "ahead"},
    ),
    "a paid one was expired": (
        """
        update bookings set status = 'expired', expired_at = now()
         where id = (select max(id) from bookings where status = 'paid' and hold_until < now())
        """,
        {"settled", "once", "untouched"},
    ),
    "an extension was lost": (
        """
        update bookings set hold_until = booked_at + interval '1 hour'
         where id = (select min(id) from bookings
                      where status = 'held' and hold_until > now() and booked_at + interval '1 hour' < now()
                        and hold_until <> booked_at + interval '1 hour')
        """,
        {"settled", "untouched"},
    ),
    "the dead worker wrote after its death": (
        """
        update pgreaper.transitions set token = (select token from kills)
         where transition_id = (select max(transition_id) from pgreaper.transitions)
        """,
        {"taken-over"},
    ),
    "a hold of the dead worker is missing in the trail": (
        """
        update pgreaper.transitions as t set keys = t.keys[2:], deadlines = t.deadlines[2:]
         where t.transition_id = (select min(t.transition_id) from pgreaper.transitions as t, kills as k
                                   where t.keys[1] = any (k.keys))
        """,
        {"settled", "once", "taken-over"},
    ),
    "the lease was never taken back": (
        "update pgreaper.claims set ending = 'expired' where token = (select token from kills)",
        {"taken-over"},
    ),
    "nobody was killed": ("delete from kills", {"taken-over"}),
}


@pytest.mark.parametrize("violation", PLANTED)
def test_the_proof_finds_a_violation(kept, violation):
    """A proof that cannot fail proves nothing: each planted violation breaks the lines that speak of it, no other."""
    statement, broken = PLANTED[violation]
    with kept.connection.transaction(force_rollback=True):
        planted = kept.connection.execute(statement)
        assert planted.rowcount == 1
        assert {line.name for line in demo.prove(kept.connection) if not line.holds} == broken
    assert all(line.holds for line in demo.prove(kept.connection))


def test_a_violation_is_told_and_the_exit_code_is_1(monkeypatch, capsys):
    """A run whose proof does not hold says which line, shows the numbers, and fails; no control code leaves it."""
    prove = demo.prove

    def sabotaged(connection: psycopg.Connection[Any]) -> Any:
        connection.execute(
            "update bookings set status = 'held' where id = (select id from bookings where status = 'expired' limit 1)"
        )
        return prove(connection)

    monkeypatch.setattr(demo, "prove", sabotaged)
    assert main(["demo", "--holds", "8000"]) == 1
    told = capsys.readouterr()
    assert told.err == ""
    assert "\x1b" not in told.out
    assert "\nFAIL  Every overdue hold is settled\n" in told.out
    assert re.search(r"8,000 = .* paid \+ .* extended, 1 left\n", told.out)
    assert "\nFAIL  Each expired once, none twice\n" in told.out
    assert "\nok    What was paid or extended is untouched\n" in told.out


@pytest.mark.parametrize(
    ("moment", "number", "code"),
    [
        ("starting PostgreSQL", signal.SIGINT, 130),
        ("filling the table", signal.SIGTERM, 143),
        ("is killed", signal.SIGKILL, -9),
    ],
)
def test_a_signal_at_any_moment_leaves_nothing(room, moment, number, code):
    """Ctrl-C, SIGTERM and even SIGKILL: no process and no folder stays, and nobody sees a traceback."""
    with subprocess.Popen(
        COMMAND, env=environment(room), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert any(moment in line for line in process.stdout)
        process.send_signal(number)
        _, complaint = process.communicate(timeout=30)
        assert process.returncode == code
    assert complaint == ("stopped; nothing is left behind\n" if code > 0 else "")
    assert nothing_left(room)


def test_ctrl_c_on_a_terminal(room):
    """On a terminal of 80 columns a picture moves, without colour under NO_COLOR; Ctrl-C gives the cursor back."""
    process, screen = pty.fork()
    if process == 0:  # the child
        os.execve(sys.executable, COMMAND, environment(room, NO_COLOR="1", TERM="xterm", COLUMNS="80", LINES="24"))
    shown, interrupted, deadline = "", False, time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            shown += os.read(screen, 65536).decode(errors="replace")
        except OSError:  # its end is closed
            break
        if not interrupted and "is killed" in shown:
            interrupted = True
            os.write(screen, b"\x03")
    os.close(screen)
    _, status = os.waitpid(process, 0)

    assert os.waitstatus_to_exitcode(status) == 130
    assert nothing_left(room)
    assert "3 killed" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
    assert not re.search(r"\x1b\[[0-9;]*\b(3[0-7]|9[0-7]|38;)", shown)
    assert "Traceback" not in shown


def test_without_binaries_one_line_says_what_to_do(tmp_path):
    """No server programs: the launcher's error and its remedy, exit code 1."""
    run = subprocess.run(
        COMMAND, env=environment(tmp_path, PGREAPER_PG_BINDIR=str(tmp_path)), capture_output=True, text=True
    )
    assert run.returncode == 1
    error, hint = run.stderr.splitlines()
    assert error.startswith(f"error: PGREAPER_PG_BINDIR={tmp_path} does not have")
    assert hint.startswith("hint: ")
    assert "Traceback" not in run.stderr


def test_the_picture_of_the_last_screen(kept, tmp_path):
    """--svg draws what the screen shows, and nothing of this machine but process ids."""
    from pgreaper.cli.demo import _draw

    scene = demo.Scene(
        demo.Plan(), server="18.6", workers=[demo.WorkerScene(3, 4711, "pgreaper/host/4711", killed=True)]
    )
    scene.tell("worker 3 is killed", "bad")
    picture = tmp_path / "demo.svg"
    _draw(demo.Report(scene, demo.prove(kept.connection), [], None), picture)
    words = re.sub(r"<[^>]+>", " ", picture.read_text()).replace("&#160;", " ")
    assert "worker 3 is killed" in words
    assert "Every overdue hold is settled" in words
    assert "pgreaper/host" not in words

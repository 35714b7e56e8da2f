"""What a run says: for people and for machines, bounded, an event a line."""

from __future__ import annotations

import json
import pickle
import re
import time
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

import pytest

from pgreaper import worker
from pgreaper.logs import Event, as_json, as_text
from tests.cli.conftest import in_process, pgreaper, start, wait_until  # noqa: F401
from tests.driver.conftest import daemon, work  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
NOON = datetime(2026, 1, 31, 12, 0, 0, 1999, tzinfo=UTC)
HOSTILE = ["line\nline\r\n", "\x00\x1b[2J\x07", "\u2028\u2029\u202e", "k" * 1_000_000, '"}\n{"event": "forged"']


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:9]))
def test_an_event_is_one_line_whatever_is_in_it(text):
    """Names, keys, classes and sentences: no line break and no control character, and of a bounded length."""
    event = Event(
        "holds.failed", text, policy=text, key=text, keys=[text] * 3, error_class=text, constraint=text, hint=text
    )
    line = as_json(event, "w", NOON)
    assert line.isascii()
    assert line.isprintable()
    assert len(line) < 20_000
    read = json.loads(line)
    assert read["event"] == "holds.failed"
    assert read["key"] == text or read["key"].startswith(text[:200] + "… (1,000,000 characters)")
    shown = as_text(event)
    assert len(shown) == 2  # the sentence and the hint
    assert all(line.isprintable() and len(line) <= 1100 for line in shown)


def test_the_fields_of_an_event():
    """Documented and stable: the time in UTC to the millisecond, and only what has a value."""
    token = UUID(int=7)
    whole = Event(
        "a.b", "said", "debug", "p", token, "k", ["1"], "retry", {"holds": 2}, 0.25, "c", "E", "P0001", "x", "h"
    )
    assert json.loads(as_json(whole, "w", NOON)) == {
        "time": "2026-01-31T12:00:00.001Z", "level": "debug", "event": "a.b", "worker": "w", "policy": "p",
        "token": str(token), "key": "k", "keys": ["1"], "outcome": "retry", "counts": {"holds": 2}, "seconds": 0.25,
        "code": "c", "error_class": "E", "sqlstate": "P0001", "constraint": "x", "message": "said", "hint": "h",
    }  # fmt: skip
    assert set(json.loads(as_json(Event("a.b"), "w"))) == {"time", "level", "event", "worker"}


def test_an_event_may_be_passed_to_another_process():
    """As a log may do that has a process write for it."""
    event = Event("batch.done", "3 expired", counts={"holds": 3})
    assert pickle.loads(pickle.dumps((event, Event("worker.started")))) == (event, Event("worker.started"))


def test_each_event_and_field_is_documented():
    """docs/logs.md names what the code can say, and nothing else."""
    told = (ROOT / "docs/logs.md").read_text()
    code = "".join(path.read_text() for path in (ROOT / "pgreaper").rglob("*.py"))
    named = set(re.findall(r'(?:Event|_say)\(\s*"([a-z]+\.[a-z-]+)"', code)) | set(
        re.findall(r'name="([a-z]+\.[a-z-]+)"', code)
    )
    assert len(named) > 15
    assert set(re.findall(r"^\| `([a-z]+\.[a-z-]+)`", told, re.MULTILINE)) == named
    fields = re.findall(r'^        "(\w+)": ', (ROOT / "pgreaper/logs.py").read_text(), re.MULTILINE)
    assert re.findall(r"^\| `(\w+)` ", told, re.MULTILINE) == fields


def spoil(db, condition, code="P0001"):
    db.execute(
        "create function spoils() returns trigger language plpgsql as $$ begin"
        f" if {condition} then raise exception using errcode = '{code}', message = 'no'; end if; return new; end $$;"
        " create trigger spoils before update on holds for each row execute function spoils()"
    )


def test_json_lines_on_stderr_and_the_result_on_stdout(db, holds, in_process):  # noqa: F811
    """Each line is an event; the run's begin and end are among them, and what failed names its holds."""
    ids = holds.due(20)
    holds.register()
    spoil(db, "new.id = 3 or new.id = 7")
    done = in_process("work", "--log-format", "json")
    events = [json.loads(line) for line in done.err.splitlines()]
    assert [e["event"] for e in events] == ["worker.started", "holds.failed", "worker.stopped"]
    assert len({e["worker"] for e in events}) == 1
    failed, end = events[1:]
    assert (failed["level"], failed["outcome"], failed["counts"]) == ("error", "dead-letter", {"holds": 2})
    assert (failed["error_class"], failed["sqlstate"], sorted(failed["keys"])) == (
        "TriggerException",
        "P0001",
        ["3", "7"],
    )
    assert (end["level"], end["outcome"], end["counts"]["expired"]) == ("error", "drained", len(ids) - 2)
    assert "18 expired" in done.out


def test_at_level_debug_each_batch_and_each_failure_is_an_event(db, holds, in_process, monkeypatch):  # noqa: F811
    """And from the environment as from an option."""
    holds.due(20)
    holds.register()
    spoil(db, "new.id = 3 or new.id = 7")
    monkeypatch.setenv("PGREAPER_LOG_FORMAT", "json")
    monkeypatch.setenv("PGREAPER_LOG_LEVEL", "debug")
    events = [json.loads(line) for line in in_process("work", "--batch", "5").err.splitlines()]
    batches = [e for e in events if e["event"] == "batch.done"]
    assert sum(e["counts"]["holds"] for e in batches) == 20
    assert len(batches) == len({e["token"] for e in batches}) >= 4
    assert all(e["seconds"] > 0 and e["level"] == "debug" for e in batches)
    assert [(e["key"], e["outcome"]) for e in events if e["event"] == "hold.failed"] == [
        ("3", "dead-letter"), ("7", "dead-letter"),
    ]  # fmt: skip


def test_a_run_that_does_not_begin_says_so_in_the_format_asked_for(in_process):  # noqa: F811
    """An unknown policy, for machines: one event, no line for people."""
    done = in_process("work", "nobody", "--log-format", "json", "--json")
    (event,) = [json.loads(line) for line in done.err.splitlines()]
    assert (event["event"], event["code"], event["sqlstate"]) == ("worker.refused", "unknown-policy", "RP002")
    assert done.json["error"]["code"] == "unknown-policy"
    assert done.code == 2


def test_a_daemon_does_not_flood(db, holds, daemon):  # noqa: F811
    """Dozens of batches, every hold failing, each by a class of its own: so many reasons are told, and then none."""
    holds.due(60)
    holds.register(batch=1, permanent_attempts=1)

    def handler(call):
        raise type(f"Kind{call.key}", (ValueError,), {})

    def until_all_are_dead(beside):
        beside.wait_for(lambda: db.execute("select count(*) from pgreaper.dead_letters").fetchone() == (60,))

    run, lines = daemon(until_all_are_dead, handler=handler, batch=1)
    assert run.policies["holds"].claims >= 60
    assert sum("failed, now a dead letter" in line for line in lines) == worker._TOLD_REASONS


def test_a_reason_is_told_once_a_minute_and_then_with_all_its_holds(db, holds, daemon, monkeypatch):  # noqa: F811
    """What was kept back is counted in the next line of its kind."""
    holds.due(30)
    holds.register(batch=1)
    monkeypatch.setattr(worker, "REPORT_EVERY", 0.3)

    def handler(call):
        time.sleep(0.05)
        if int(call.key) % 2:
            raise ValueError

    def until_all_is_done(beside):
        beside.wait_for(lambda: "held" not in {s for i, s in holds.states().items() if i % 2 == 0})
        beside.wait_for(lambda: db.execute("select count(*) from pgreaper.dead_letters").fetchone() == (15,))

    run, lines = daemon(until_all_is_done, handler=handler, batch=1)
    told = [int(m[1]) for line in lines if (m := re.search(r"(\d+) holds? failed", line))]
    assert len(told) < 15
    assert max(told) > 1
    assert sum(told) <= run.policies["holds"].outcomes["dead-letter"] == 15


def test_text_is_for_people(holds, in_process):  # noqa: F811
    """A run that drains says nothing on stderr, and nothing is said twice."""
    holds.due(3)
    holds.register()
    done = in_process("work")
    assert (done.out, done.err) == ("holds: 3 expired in " + done.out.partition(" in ")[2], "")

"""What a person types: `pgreaper relay` and `pgreaper relays`, their errors, and what they never show."""

from __future__ import annotations

import json
import shlex
from datetime import timedelta

import pytest

from pgreaper.text import instant
from tests.relay.conftest import Queue, away, refuses

SECRET = "hunter2hunter2"


@pytest.fixture
def dead(opened, expired, relaying) -> str:
    """Three events of relay ``holds`` were delivered, and one was given up; the hold of that one."""
    opened()
    keys: list[str] = expired(4)
    relaying(Queue(refuses(keys[1], error_class="HTTP 422")))
    return keys[1]


def test_the_list_of_relays(in_process, dead):
    """How far each is, in words and as JSON."""
    shown = in_process("relays", "list").out
    assert [line.split()[:5] for line in shown.splitlines()[1:2]] == [["holds", "holds", "0", "-", "1"]]
    assert shown.splitlines()[-1] == "given up: `pgreaper relays dead holds` lists them"
    (relay,) = in_process("relays", "list", "holds", "--json").json["relays"]
    assert (relay["delivered"], relay["dead"], relay["waiting"], relay["trouble"]) == (3, 1, 0, None)
    assert relay["latency_p99_seconds"] > 0


def test_trouble_is_in_the_list(in_process, opened, expired, relaying):
    """A relay whose queue is away shows it, with what waits and since when."""
    opened()
    expired(3)
    relaying(Queue(away))
    (relay,) = in_process("relays", "list", "--json").json["relays"]
    assert (relay["trouble"], relay["waiting"], relay["oldest_waiting_seconds"] > 0) == ("ConnectionRefused", 3, True)
    assert "ConnectionRefused for " in in_process("relays", "list").out


def test_a_dead_event_and_the_command_that_resends_it(in_process, opened, dead, relaying):
    """What the list tells to paste does what it says."""
    shown = in_process("relays", "dead").out
    assert (dead in shown, "HTTP 422" in shown) == (True, True)
    command = shown.splitlines()[-1].removeprefix("try one again: pgreaper ")
    assert "1 event to be sent again" in in_process(*shlex.split(command)).out
    queue = Queue()
    relaying(queue)
    assert queue.keys() == [dead]
    assert in_process("relays", "dead").out == "no event was given up\n"


def test_resending(in_process, dead):
    """All or one, never by accident; what was not given up cannot be resent, and a dry run changes nothing."""
    assert in_process("relays", "resend", "holds").code == 2
    assert in_process("relays", "resend", "holds", "--all", "--event", "1.1").code == 2
    (event,) = in_process("relays", "dead", "--json").json["dead_events"]
    wrong = in_process("relays", "resend", "holds", "--event", "99.9")
    assert (wrong.code, wrong.err) == (
        1,
        "error: relay holds: event 99.9 was not given up\nhint: `pgreaper relays dead holds` lists those that were.\n",
    )
    assert event["event"] in in_process("relays", "resend", "holds", "--all", "--dry-run").out
    assert in_process("relays", "resend", "holds", "--event", event["event"], "--json").json["resent"] == 1
    assert in_process("relays", "resend", "holds", "--all", "--json").json["resent"] == 0


def test_removing(in_process, db, dead, expired):
    """Not while something is undelivered, unless that is wanted; then it is gone, and the trail is not."""
    expired(2)
    refused = in_process("relays", "remove", "holds")
    assert (refused.code, refused.err.splitlines()[0]) == (
        1, "error: relay holds has 2 events to deliver and 1 given up",
    )  # fmt: skip
    assert in_process("relays", "remove", "holds", "--yes").out == "relay holds is removed\n"
    assert in_process("relays", "list").out == "there is no relay: `pgreaper relay POLICY --to URL` makes one\n"
    assert db.execute("select sum(holds) from pgreaper.transitions").fetchone() == (6,)


@pytest.mark.parametrize("command", [("list",), ("dead",), ("resend", "--all"), ("remove",)])
def test_a_relay_that_does_not_exist(in_process, opened, command):
    """Named, with what was probably meant."""
    opened()
    done = in_process("relays", command[0], "hold", *command[1:])
    assert (done.code, done.err) == (2, "error: there is no relay hold\nhint: Did you mean holds?\n")


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (("nix", "--to", "stdout:"), 2, "there is no policy nix"),
        (("holds",), 2, "no queue was named"),
        (("holds", "--to", "nats://h/q"), 2, "begins with nats:, which is no queue that pgreaper knows"),
        (("holds", "--to", "stdin:"), 2, "names something to read from"),
        (("holds", "--to", "stdout:", "--payload", "nix"), 2, "the target of policy holds has no column nix"),
        (("holds", "--to", "stdout:", "--json"), 2, "--json and --to stdout: would both write on stdout"),
        (("holds", "--to", "stdout:", "--batch", "0"), 2, "is not a whole number above 0"),
        (("holds", "--to", f"amqp://u:{SECRET}@127.0.0.1:1/?queue=q"), 75, "amqp://127.0.0.1:1?queue=q does not take"),
        (("holds", "--to", f"http://u:{SECRET}@127.0.0.1:1/{SECRET}"), 75, "http://127.0.0.1:1 does not take events"),
        (("holds", "--to", f"kafka://u:{SECRET}@h/t?{SECRET}=1"), 2, "has an option"),
    ],
)
def test_errors_name_the_thing_and_no_secret(in_process, opened, expired, arguments, code, error):
    """Two lines and an exit code; the password of a URL is in none of them."""
    opened()
    expired(1)
    done = in_process("relay", *arguments, "--once")
    assert (done.code, error in done.err) == (code, True), done.err
    if "=1" not in arguments[-1]:  # An option's name is shown: it is no secret.
        assert SECRET not in done.out + done.err


def test_the_url_from_the_environment_is_named_as_such(in_process, opened, monkeypatch):
    """An error of PGREAPER_RELAY_URL says so, and does not repeat it."""
    opened()
    monkeypatch.setenv("PGREAPER_RELAY_URL", f"amqp://u:{SECRET}@h@h/?queue=q")
    done = in_process("relay", "holds", "--once")
    assert (done.code, "the URL of PGREAPER_RELAY_URL has a character" in done.err) == (2, True)
    assert SECRET not in done.err


def test_events_of_the_run_for_machines(pgreaper, opened, expired):
    """A JSON object a line on stderr; the lines on stdout are the events."""
    opened()
    expired(2)
    done = pgreaper("relay", "holds", "--to", "stdout:", "--once", "--log-format", "json")
    told = [json.loads(line) for line in done.err.splitlines()]
    assert [event["event"] for event in told] == ["relay.started", "relay.stopped"]
    assert told[-1]["counts"]["delivered"] == 2
    assert len(done.out.splitlines()) == 2


def test_status_tells_what_does_not_reach_its_queue(in_process, db, dead, expired, relaying, set_clock):
    """Events that were given up, a queue that is away, and a relay that nobody runs, each with the next command."""
    notices = in_process("status", "--json").json["policies"][0]["notices"]
    assert [(n["state"], n["what"], n["next"]) for n in notices] == [
        ("relay", "1 event was given up by relay holds", "pgreaper relays dead holds")
    ]
    expired(3)
    relaying(Queue(away))
    (trouble, _) = in_process("status", "--json").json["policies"][0]["notices"]
    assert trouble["what"].startswith("3 events of relay holds cannot be delivered, the oldest for ")
    assert trouble["why"].startswith("its queue: ConnectionRefused; it last took one ")
    assert "3 events of relay holds cannot be delivered" in " ".join(in_process("status").out.split())
    db.execute("update pgreaper.relays set trouble = null, trouble_since = null")
    assert len(in_process("status", "--json").json["policies"][0]["notices"]) == 1
    set_clock(timedelta(minutes=6))
    (behind, _) = in_process("status", "--json").json["policies"][0]["notices"]
    assert behind["what"].startswith("3 events of relay holds are not delivered, the oldest for 6 min")
    assert (behind["why"].startswith("nobody runs it"), behind["next"]) == (True, "pgreaper relays list holds")


def test_check_judges_relays_where_it_is_asked(in_process, opened, expired, relaying, set_clock):
    """An event that waits too long is not well, whoever runs the relay, and the queue's trouble is told with it."""
    opened(objective="1 day")
    expired(3)
    relaying(Queue(away))
    set_clock(timedelta(minutes=20))
    assert in_process("check").code == 0
    assert in_process("check", "--max-relay-lag", "1 hour").code == 0
    done = in_process("check", "--max-relay-lag", "10 min")
    assert (done.code, done.out.startswith("not well: an event of relay holds waits for 20 min")) == (3, True)
    assert "allowed is 10 min; its queue: ConnectionRefused (owner: tests)" in done.out
    (finding,) = in_process("check", "--max-relay-lag", "10 min", "--json").json["findings"]
    assert (finding["kind"], finding["relay"], finding["max_lateness_seconds"]) == ("relay", "holds", 600)
    assert in_process("check", "--max-relay-lag=-1 min").code == 2


def test_what_another_process_has_is_in_the_summary(in_process, db, opened, expired):
    """How many, and when they are anybody's at the latest; as JSON too."""
    opened()
    expired(2)
    (until,) = db.execute("select max(lease_until) from pgreaper.reaper_fetch('holds', lease => '1 h')").fetchone()
    once = ["relay", "holds", "--to", "stdout:", "--once"]
    done = in_process(*once)
    assert (done.code, done.out) == (0, "")
    assert done.err == f"holds: 2 wait for another process's lease, until {instant(until)} at the latest\n"


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        ("import a_module_that_is_not_there", "No module named 'a_module_that_is_not_there'"),
        ("raise ImportError('librdkafka.so.1: cannot open')", "librdkafka.so.1: cannot open"),
    ],
)
def test_a_library_that_is_broken_is_named(tmp_path, pgreaper, broken, told):
    """It is there and cannot be imported: its package's fault, and nobody's bug."""
    (tmp_path / "confluent_kafka.py").write_text(broken)
    done = pgreaper("relay", "holds", "--to", "kafka://localhost/t", "--once", PYTHONPATH=str(tmp_path))
    assert (done.code, done.err.splitlines()) == (
        2,
        [
            f"error: kafka: the package confluent_kafka of the extra kafka is broken: {told}",
            "hint: pip install --force-reinstall 'postgres-reaper[kafka]'",
        ],
    )

"""``pgreaper listen`` as a command: its arguments, what it prints, how it ends."""

from __future__ import annotations

import json
import subprocess

import pytest

from pgreaper.api import ANSWERS
from tests.cli.conftest import PGREAPER, Result, environment
from tests.listen.conftest import command


@pytest.fixture
def piped(dsn):
    """A function that runs the command with these messages on its stdin."""

    def piped(*messages: bytes, arguments: tuple[str, ...] = ()) -> Result:
        done = subprocess.run(
            [*PGREAPER, "listen", "--from", "stdin:", *arguments],
            input=b"\n".join(messages),
            env=environment(dsn),
            capture_output=True,
            timeout=60,
            check=False,
        )
        return Result(done.returncode, done.stdout.decode(), done.stderr.decode())

    return piped


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "which queue? Give --from URL, or set PGREAPER_LISTEN_URL"),
        (("--from", "stdout:"), "the URL of --from names something to write to, stdout:"),
        (("--from", "https://example.com/hook"), "the URL of --from names something to write to"),
        (("--from", "ampq://h/?queue=q"), "Did you mean amqp:?"),
        (("--from", "amqp://h/"), "names no queue"),
        (("--from", "stdin:", "--batch", "0"), "0 is not a whole number above 0"),
        (("--from", "stdin:", "--policy", "hold"), "Did you mean holds?"),
    ],
)
def test_what_makes_no_sense(holds, in_process, arguments, says):
    """Exit 2, with the thing and the remedy."""
    holds.register()
    result = in_process("listen", *arguments)
    assert result.code == 2
    assert says in result.err


def test_the_document(holds, piped):
    """One JSON document on stdout, whatever came; its fields are documented by this."""
    holds.due(2)
    holds.register()
    result = piped(command(1), command(1), b"x", command("y"), command(7), arguments=("--json", "--once"))
    document = result.json
    names = ("received", "done", "put_off", "lost", "rejected", "ended", "source")
    assert {name: document[name] for name in names} == {
        "received": 5, "done": 3, "put_off": 0, "lost": 0, "rejected": {"Malformed": 1, "WrongKey": 1},
        "ended": "drained", "source": "stdin:",
    }  # fmt: skip
    assert list(document["outcomes"]) == list(ANSWERS)
    assert document["policies"][0]["policy"] == "holds"
    assert document["exit_code"] == result.code == 1
    assert document["error"] is None


def test_what_a_person_reads(holds, piped):
    """A line a policy and one about the messages; warnings go to stderr."""
    holds.due(3)
    holds.register()
    result = piped(*(command(n) for n in (1, 2, 3, 3)), b"{}")
    assert result.code == 1
    policy, messages = result.out.splitlines()
    assert policy.startswith("holds: 3 expired")
    assert messages.startswith("5 messages in ")
    assert messages.endswith(": 4 done, 1 rejected (1 Malformed)")
    assert "1 message rejected: not of the form" in result.err
    assert piped().out == ""


def test_a_pipe_that_loses_commands(connect, holds, piped):
    """75, with what was not done on stderr and its number on stdout: exit 0 would say that nothing is left to do."""
    holds.due(2)
    holds.register()
    other = connect(autocommit=False)
    other.execute("select from holds where id = 1 for update")
    result = piped(command(1), command(2), arguments=("--once",))
    other.rollback()
    assert result.code == 75
    assert "1 command not done, and lost with this run: holds 1\n" in result.err
    assert "hint: stdin: keeps nothing" in result.err
    assert result.out.endswith("1 done, 1 put off, 1 lost\n")


def test_without_a_database(in_process, monkeypatch):
    """75, and nothing was read."""
    result = in_process("listen", "--from", "stdin:", "--once", "--database-url", "postgresql://127.0.0.1:1/x")
    assert result.code == 75
    assert "cannot be reached" in result.err


def test_without_pgreaper(empty_dsn, in_process):
    """1, with the command that installs it."""
    result = in_process("listen", "--from", "stdin:", "--once", "--database-url", empty_dsn)
    assert result.code == 1
    assert "pgreaper install" in result.err


def test_events_for_machines(holds, piped):
    """Each line on stderr is an event; the last one has the counts."""
    holds.due(1)
    holds.register()
    events = [json.loads(line) for line in piped(command(1), b"x", arguments=("--log-format", "json")).err.splitlines()]
    assert [event["event"] for event in events] == ["worker.started", "queue.rejected", "worker.stopped"]
    assert events[1]["error_class"] == "Malformed"
    assert {"messages": 2, "done": 1, "rejected": 1, "expired": 1, "exit_code": 1}.items() <= events[2][
        "counts"
    ].items()

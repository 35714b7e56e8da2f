"""``stdout:`` and ``stdin:`` on real pipes, files and processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pgreaper import queues
from pgreaper.queues import Sent
from pgreaper.queues.lines import StdinSource, StdoutSink
from tests.queues.conftest import message, messages


@pytest.fixture
def pipe():
    """Both ends of a pipe, unbuffered: where to read, where to write."""
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb", 0) as read, os.fdopen(writer, "wb", 0) as write:
        yield read, write


# -- stdout


def test_an_event_is_a_line(tmp_path):
    """All are confirmed; a line break inside of a document does not end the line."""
    with (tmp_path / "events").open("wb") as file:
        sink = StdoutSink(file.fileno())
        sent = sink.send([*messages(3), message(3, body=b'{\r\n  "key": "3"\n}')], timeout=5)

    assert sent == Sent(frozenset(range(4)), {})
    lines = (tmp_path / "events").read_bytes().splitlines()
    assert [json.loads(line)["key"] for line in lines] == ["0", "1", "2", "3"]


def test_a_reader_that_goes_ends_the_run():
    """As `| head` does: BrokenPipeError reaches the command, which ends with 141 and without a word."""
    program = (
        "from pgreaper import queues\n"
        "from tests.queues.conftest import messages\n"
        "sink = queues.sink('stdout:')\n"
        "try:\n"
        "    while True: assert not sink.send(messages(500), timeout=20).trouble\n"
        "except BrokenPipeError: sink.close(); raise SystemExit(141)\n"
    )
    run = subprocess.run(
        ["/bin/sh", "-c", '{ "$1" -c "$2"; echo $? >&2; } | head -n 2', "sh", sys.executable, program],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHONPATH": "."},
    )

    assert [json.loads(line)["key"] for line in run.stdout.splitlines()] == ["0", "1"]
    assert run.stderr == "141\n"


def test_a_slow_reader_is_not_waited_for_without_end_and_gets_whole_lines(pipe):
    """What did not fit is unconfirmed; the line that was begun is ended before the next one begins."""
    reader, writer = pipe
    sink = StdoutSink(writer.fileno())
    batch = messages(500)
    big = [message(i, body=b'{"key":"%d","x":"%s"}' % (i, b"x" * 1000)) for i in range(500)]

    first = sink.send(big, timeout=0.1)
    assert first.trouble == "Timeout"
    assert 0 < len(first.confirmed) < 500
    assert first.confirmed == set(range(len(first.confirmed)))

    seen = bytearray()
    thread = threading.Thread(target=lambda: seen.extend(b"".join(iter(lambda: reader.read(65536), b""))))
    thread.start()
    second = sink.send(batch, timeout=20)
    writer.close()
    thread.join()

    assert second.trouble is None
    assert len(second.confirmed) == 500
    keys = [json.loads(line)["key"] for line in bytes(seen).splitlines()]
    assert keys == [str(i) for i in range(len(first.confirmed) + 1)] + [str(i) for i in range(500)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux' /dev/full")
def test_a_full_disk_is_trouble():
    """Nothing is confirmed, and the class says why."""
    with Path("/dev/full").open("wb", buffering=0) as full:
        sent = StdoutSink(full.fileno()).send(messages(2), timeout=5)

    assert sent == Sent(frozenset(), {}, "NoSpace")


# -- stdin


def test_a_line_is_a_command(pipe):
    """Up to the limit at once; empty lines are none; the last line needs no end; then the source has ended."""
    reader, writer = pipe
    source = StdinSource(reader.fileno())
    writer.write(b'{"key":"1"}\n\n{"key":"2"}\n{"key":"3"}')

    assert [m.body for m in source.receive(2, wait=5)] == [b'{"key":"1"}', b'{"key":"2"}']
    assert source.receive(2, wait=0) == []
    assert not source.ended
    writer.close()
    assert [(m.body, m.attempt) for m in source.receive(2, wait=5)] == [(b'{"key":"3"}', 1)]
    assert source.receive(2, wait=5) == []
    assert source.ended


def test_a_line_comes_as_soon_as_it_is_there(pipe):
    """A receive that waits returns with the line, not at the end of its wait."""
    reader, writer = pipe
    source = StdinSource(reader.fileno())
    threading.Timer(0.1, writer.write, (b"{}\n",)).start()

    began = time.monotonic()
    assert [m.body for m in source.receive(10, wait=30)] == [b"{}"]
    assert time.monotonic() - began < 10


def test_a_command_that_is_put_off_comes_again_in_its_time(pipe):
    """Also after the end of the input, which is not the end of the source before that."""
    reader, writer = pipe
    source = StdinSource(reader.fileno())
    writer.write(b"one\ntwo\n")
    writer.close()
    one, two = source.receive(10, wait=5)

    began = time.monotonic()
    source.later(one, seconds=0.3)
    source.later(two, seconds=0.1)

    assert source.receive(10, wait=0) == []
    assert not source.ended
    assert [m.body for m in source.receive(10, wait=5)] == [b"two"]
    assert [m.body for m in source.receive(10, wait=5)] == [b"one"]
    assert 0.3 <= time.monotonic() - began < 3
    assert source.ended


def test_a_line_without_end_does_not_fill_the_memory(pipe):
    """Its beginning is delivered, as something that is no command, and what follows is read again."""
    reader, writer = pipe
    source = StdinSource(reader.fileno())

    def write():
        for _ in range(300):
            writer.write(b"x" * 10_000)
            most.append(len(source._begun))
        writer.write(b'\n{"key":"1"}\n')
        writer.close()

    most: list[int] = []
    thread = threading.Thread(target=write)
    thread.start()
    found: list[queues.Received] = []
    while not source.ended:
        found += source.receive(10, wait=5)
    thread.join()

    assert [len(m.body) for m in found] == [1_000_000, len(b'{"key":"1"}')]
    assert max(most) < 1_100_000


def test_the_urls_lead_to_the_descriptors():
    """`stdin:` and `stdout:` are the process's own."""
    program = (
        "from pgreaper import queues\nfrom tests.queues.conftest import message\n"
        "source, sink = queues.source('stdin:'), queues.sink('stdout:')\n"
        "while not source.ended:\n"
        "    got = source.receive(10, wait=5)\n"
        "    sink.send([message(m.body.decode()) for m in got], timeout=5)\n"
        "    source.done(got)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        input="a\nb\n",
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHONPATH": "."},
    )

    assert [json.loads(line)["key"] for line in run.stdout.splitlines()] == ["a", "b"]
    assert queues.source("stdin:").name == "stdin:"

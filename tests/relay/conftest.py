"""Fixtures of the relay's tests: a queue that does as it is told, and a relay in this process."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pgreaper.connection import resolve
from pgreaper.handlers import idempotency_key
from pgreaper.logs import sentences
from pgreaper.queues import Message, Refusal, Sent
from pgreaper.relay import Relay, RelayRun, Settings
from tests.cli.conftest import in_process, pgreaper, start, wait_until  # noqa: F401
from tests.driver.conftest import Beside, proxy, work  # noqa: F401
from tests.queues.aws import aws, moto  # noqa: F401
from tests.queues.conftest import certificates, endpoint, kafka, rabbit, rabbitmq  # noqa: F401

if TYPE_CHECKING:
    from tests.conftest import Holds

Answer = Callable[[Sequence[Message]], Sent]


class Queue:
    """
    A queue in this process.

    ``answers`` are what the next batches come to, one after the other, the last one from then on; without any,
    everything is taken.  ``batches`` is all that was sent, ``taken`` what was confirmed.  ``probes`` counts how often
    it was asked whether it would take anything; that comes to ``probed``.
    """

    name = "queue:"

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.batches: list[list[Message]] = []
        self.taken: list[Message] = []
        self.is_closed = False
        self.probes = 0
        self.probed: str | None = None

    def send(self, messages: Sequence[Message], *, timeout: float) -> Sent:
        assert timeout > 0
        if not messages:
            self.probes += 1
            return Sent(frozenset(), {}, self.probed)
        self.batches.append(list(messages))
        answer = self.answers[0] if self.answers else takes
        if len(self.answers) > 1:
            self.answers.pop(0)
        sent = answer(messages)
        self.taken += [messages[position] for position in sorted(sent.confirmed)]
        return sent

    def close(self) -> None:
        self.is_closed = True

    def keys(self) -> list[str]:
        """The holds whose events were confirmed, in that order."""
        return [message.key for message in self.taken]


def takes(messages: Sequence[Message]) -> Sent:
    """Everything is confirmed."""
    return Sent(frozenset(range(len(messages))), {})


def away(messages: Sequence[Message]) -> Sent:
    """Nobody answers."""
    return Sent(frozenset(), {}, "ConnectionRefused")


def refuses(*keys: str, error_class: str = "TooLarge", transient: bool = False) -> Answer:
    """These holds' events are refused, or all where none is named, and the others confirmed."""

    def refuse(messages: Sequence[Message]) -> Sent:
        refused: Mapping[int, Refusal] = {
            i: Refusal(error_class, transient) for i, m in enumerate(messages) if not keys or m.key in keys
        }
        return Sent(frozenset(range(len(messages))) - frozenset(refused), refused)

    return refuse


Play = Callable[[Beside], None]


@pytest.fixture
def relaying(dsn: str) -> Callable[..., tuple[RelayRun, list[str]]]:
    """
    A function that runs a relay of policy ``holds`` in this process; returns what it did and what it logged.

    With a ``script`` it stays, and the script plays beside it, in a thread; when that returns, the relay is told to
    stop, as by SIGTERM.  An error of the script's is the test's.
    """

    def relaying(sink: Any, script: Play | None = None, *, url: str = dsn, **settings: Any) -> Any:
        lines: list[str] = []
        beside = Beside(lines, dsn)
        errors: list[BaseException] = []

        def play() -> None:
            assert script is not None
            try:
                beside.hears(" is up: ")
                script(beside)
            except BaseException as error:  # noqa: BLE001  raised again below, in the test's own thread
                errors.append(error)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

        chosen: dict[str, Any] = {"policy": "holds", "once": script is None, "poll": 0.05} | settings
        relay = Relay(resolve(url), sink, Settings(**chosen), log=sentences(lines.append))
        if script is None:
            return relay.run(), lines
        player = threading.Thread(target=play)
        # Until the relay listens a signal would end the tests.
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            player.start()
            run = relay.run()
            player.join(30)
        finally:
            signal.signal(signal.SIGTERM, before)
        if errors:
            raise errors[0]
        return run, lines

    return relaying


@pytest.fixture
def opened(db: psycopg.Connection[Any], holds: Holds) -> Callable[..., None]:
    """A function that registers the holds and opens a relay for them, by default one of the policy's name."""

    def opened(relay: str | None = None, **settings: Any) -> None:
        with suppress(psycopg.errors.UniqueViolation):
            holds.register(**settings)
        db.execute("select pgreaper.reaper_relay('holds', %s)", (relay,))

    return opened


@pytest.fixture
def expired(db: psycopg.Connection[Any], holds: Holds) -> Callable[..., list[str]]:
    """A function that makes so many holds and expires them; returns their keys."""

    def expired(n: int, batch: int = 500) -> list[str]:
        keys = [str(number) for number in holds.due(n)]
        db.execute("call pgreaper.reaper_sweep('holds', %s)", (batch,))
        return keys

    return expired


@pytest.fixture
def identities(db: psycopg.Connection[Any]) -> Callable[[], set[str]]:
    """A function that returns the idempotency keys of all that has expired, as the trail tells."""

    def identities() -> set[str]:
        rows = db.execute(
            "select k.key, k.deadline from pgreaper.transitions as t, unnest(t.keys, t.deadlines) as k (key, deadline)"
        )
        return {idempotency_key("holds", key, deadline) for key, deadline in rows}

    return identities


def told(bodies: Sequence[bytes | str]) -> list[str]:
    """The idempotency keys in what a queue was sent, in that order."""
    return [json.loads(body)["idempotency_key"] for body in bodies]


def wait_for(condition: Callable[[], object], seconds: float = 30) -> None:
    """Return as soon as it is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.01)

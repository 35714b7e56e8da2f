"""Fixtures of the listener's tests: listeners in this process and in others, and a gate in the transition."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from pgreaper.connection import resolve
from pgreaper.listen import Listener, Run, Settings
from pgreaper.logs import sentences
from pgreaper.queues.lines import StdinSource
from tests.cli.conftest import in_process, pgreaper, start, wait_until  # noqa: F401
from tests.queues.aws import aws, moto  # noqa: F401
from tests.queues.conftest import certificates, rabbit, rabbitmq  # noqa: F401
from tests.queues.kafka_cluster import kafka  # noqa: F401

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import psycopg

    from pgreaper.queues import Received, Source


def command(key: object, policy: str = "holds") -> bytes:
    """A message that asks for the expiry of one hold."""
    return json.dumps({"policy": policy, "key": key}).encode()


class Witness:
    """A source that writes down what it is told, and passes it on to the real one."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.name = source.name
        self.told: list[tuple[str, Any, float | str | None]] = []
        self.closed = False

    @property
    def ended(self) -> bool:
        return self._source.ended

    @property
    def lost(self) -> Sequence[Received]:
        return self._source.lost

    def receive(self, limit: int, *, wait: float) -> Sequence[Received]:
        return self._source.receive(limit, wait=wait)

    def done(self, messages: Sequence[Received]) -> None:
        self.told += [("done", json.loads(message.body), None) for message in messages]
        self._source.done(messages)

    def later(self, message: Received, *, seconds: float) -> None:
        self.told.append(("later", json.loads(message.body), seconds))
        self._source.later(message, seconds=seconds)

    def put_off(self, messages: Sequence[tuple[Received, float]]) -> None:
        self.told += [("later", json.loads(message.body), seconds) for message, seconds in messages]
        self._source.put_off(messages)

    def reject(self, message: Received, *, reason: str) -> None:
        self.told.append(("reject", message.body, reason))
        self._source.reject(message, reason=reason)

    def keep(self, messages: Sequence[Received], *, seconds: float) -> None:
        self.told.append(("keep", len(messages), seconds))
        self._source.keep(messages, seconds=seconds)

    def close(self) -> None:
        self.closed = True
        self._source.close()

    def of(self, what: str) -> list[tuple[Any, Any]]:
        """What it was told of that kind, in order."""
        return [(message, value) for kind, message, value in self.told if kind == what]


class Beside:
    """
    A script that plays against a listener, in a thread.

    ``lines`` is what the listener has said so far, ``queue`` knows what its queue was told.
    """

    def __init__(self, lines: list[str], queue: Witness, write: int) -> None:
        self.lines = lines
        self.queue = queue
        self.stopped = False
        self._write = write

    def say(self, *messages: bytes) -> None:
        """Send lines to its stdin."""
        os.write(self._write, b"".join(message + b"\n" for message in messages))

    def wait_for(self, condition: Callable[[], Any], seconds: float = 20) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"it never came about; the listener said {self.lines}"
            time.sleep(0.01)

    def stop(self) -> None:
        """Send SIGTERM, which otherwise comes when the script is over."""
        self.stopped = True
        os.kill(os.getpid(), signal.SIGTERM)

    def hears(self, text: str, times: int = 1) -> None:
        """Wait until so many lines with this text were said."""
        self.wait_for(lambda: sum(text in line for line in list(self.lines)) >= times)


@pytest.fixture
def listen(dsn: str) -> Iterator[Callable[..., tuple[Run, Witness, list[str]]]]:
    """
    A function that runs a listener in this process, and beside it a script in a thread.

    It reads the messages given, and what the script says, from a pipe, unless another ``source`` is given.  The script
    gets a :class:`Beside`; when it returns, the listener is told to stop, as by SIGTERM.  Without one the pipe ends
    after the messages, and so does the run.  Returns what the run did, what the queue was told, and the log.
    """
    with ExitStack() as stack:

        def listen(
            *messages: bytes,
            script: Callable[[Beside], None] | None = None,
            url: str = dsn,
            source: Source | None = None,
            visibility: float = 60.0,
            **settings: Any,
        ) -> tuple[Run, Witness, list[str]]:
            read, write = os.pipe()
            lines: list[str] = []
            errors: list[BaseException] = []
            witness = Witness(source or StdinSource(read))
            # A message that is never settled is a failure, and no test that hangs.
            settings = {"max_seconds": 30} | settings
            listener = Listener(
                resolve(url), witness, Settings(**settings), log=sentences(lines.append), visibility=visibility
            )
            beside = Beside(lines, witness, write)

            def play() -> None:
                try:
                    # As the pipe has room.
                    for message in messages:
                        beside.say(message)
                    if script is None:
                        os.close(write)
                        return
                    beside.hears(" listens to ")
                    script(beside)
                except BaseException as error:  # noqa: BLE001  raised again below, in the test's own thread
                    errors.append(error)
                if script is not None:
                    os.close(write)
                    if not beside.stopped:
                        beside.stop()

            player = threading.Thread(target=play, daemon=True)
            # Until the listener listens a signal would end the tests.
            before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
            stack.callback(os.close, read)
            try:
                player.start()
                run = listener.run()
                player.join(30)
            finally:
                signal.signal(signal.SIGTERM, before)
            if errors:
                raise errors[0]
            assert witness.closed
            return run, witness, lines

        yield listen


class Gate:
    """Stands in the transition of holds: whoever expires one waits there until it is opened."""

    WAITING = (
        "exists (select from pg_stat_activity where wait_event = 'PgSleep' and application_name like 'pgreaper/%')"
    )

    def __init__(self, db: psycopg.Connection[Any]) -> None:
        self._db = db
        db.execute("create table gate (open boolean not null); insert into gate values (false)")
        db.execute(
            "create function waits() returns trigger language plpgsql as $$ begin"
            " while not (select open from public.gate) loop perform pg_sleep(0.01); end loop; return new; end $$;"
            " create trigger waits before update on holds for each row execute function waits()"
        )

    def open(self) -> None:
        self._db.execute("update gate set open = true")


@pytest.fixture
def gate(db: psycopg.Connection[Any], holds: Any) -> Gate:
    """See :class:`Gate`; it is closed."""
    return Gate(db)


@pytest.fixture
def trail(db: psycopg.Connection[Any]) -> Callable[[], dict[int, int]]:
    """A function that tells how often each hold has made the transition."""

    def trail() -> dict[int, int]:
        rows = db.execute(
            "select k.key::bigint, count(*) from pgreaper.transitions as t, unnest(t.keys) as k (key) group by 1"
        )
        return dict(rows.fetchall())

    return trail

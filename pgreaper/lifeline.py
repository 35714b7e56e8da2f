"""
The lifeline: notices that a call to the database will never be answered.

A network may die without a word, and a proxy may hold a connection and forward nothing.  TCP's
own timers find a lost peer, not a mute one.  So a call that takes long is asked about on a second
connection: when the server does not work on it any more, or cannot be reached either, the first
connection is shut, and the call fails as on any other lost connection.  A statement that the
server does work on may take as long as it likes.

Owns one thread and a second handle of the connection's socket.  Knows nothing about calls but when they began.
"""

import os
import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

import psycopg

from pgreaper.connection import Address, Unreachable, connect
from pgreaper.errors import ReaperError
from pgreaper.logs import WARNING, Event, Log
from pgreaper.text import duration

if TYPE_CHECKING:
    from psycopg import Connection

# Seconds without an answer before anybody asks: `tcp_user_timeout` says the same of TCP.
_PATIENCE: Final = 45.0
# The second connection has so long to answer.
_ANSWER_WITHIN: Final = 10.0

# Behind a pooler the backend is whoever serves us now: only the name is ours.
_SERVED: Final = """
select exists (
  select from pg_catalog.pg_stat_activity as a
   where coalesce(a.state, '') not like 'idle%%'
     and a.pid <> pg_backend_pid()
     and case when %s::boolean then a.pid = %s::integer
              else a.application_name = current_setting('application_name') end)
"""


class Lifeline:
    """
    Watches the calls on one connection at a time.

    :meth:`attach` names the connection, :meth:`call` surrounds a call, :meth:`close` ends the thread.
    """

    def __init__(self, address: Address, name: str, log: Log) -> None:
        self.patience = _patience(address)
        self._address = address
        self._name = name
        self._log = log
        self._line: socket.socket | None = None
        self._pid = 0
        self._direct = True
        self._lock = threading.Lock()
        self._number = 0
        self._running: tuple[int, float] | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def attach(self, connection: "Connection[Any]") -> None:
        """Watch this connection from now on."""
        self.detach()
        with self._lock:
            # A handle of our own: it never leads to another connection that got the same number.
            self._line = socket.socket(fileno=os.dup(connection.fileno()))
            self._pid, self._direct = connection.info.backend_pid, True
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="lifeline", daemon=True)
            self._thread.start()

    def pooled(self) -> None:
        """The connection leads to a pooler: its process id says nothing."""
        self._direct = False

    def detach(self) -> None:
        """Watch nothing."""
        with self._lock:
            line, self._line = self._line, None
            if line is not None:
                line.close()

    def close(self) -> None:
        """End the thread."""
        self.detach()
        self._over.set()
        if self._thread is not None:
            self._thread.join(2 * self._step)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Surround one call."""
        self._number += 1
        self._running = (self._number, time.monotonic())
        try:
            yield
        finally:
            self._running = None

    @property
    def _step(self) -> float:
        return min(1.0, self.patience / 4)

    def _watch(self) -> None:
        asked = (0, 0.0)
        while not self._over.wait(self._step):
            running = self._running
            if running is None:
                continue
            number, began = running
            since = max(began, asked[1]) if asked[0] == number else began
            if time.monotonic() - since < self.patience:
                continue
            if self._is_served():
                asked = (number, time.monotonic())
            # The answer may be on its way.
            elif not self._over.wait(self._step):
                self._shut(number, time.monotonic() - began)

    def _is_served(self) -> bool:
        """Whether the server works on the call, as far as can be told within some seconds."""
        answer: queue.SimpleQueue[bool] = queue.SimpleQueue()

        def ask() -> None:
            served = False
            try:
                with closing(connect(self._address, name=self._name)) as second:
                    row = second.execute(_SERVED, (self._direct, self._pid)).fetchone()
                    served = bool(row and row[0])
            except Unreachable as trouble:
                served = trouble.waiting  # It is there and full: nobody can tell.
            except (psycopg.Error, ReaperError):
                pass
            answer.put(served)

        threading.Thread(target=ask, name="lifeline-asks", daemon=True).start()
        try:
            return answer.get(timeout=min(_ANSWER_WITHIN, max(self.patience, 1.0)))
        except queue.Empty:
            return False

    def _shut(self, number: int, seconds: float) -> None:
        with self._lock:
            running = self._running
            if running is None or running[0] != number or self._line is None:
                return
            with suppress(OSError):
                self._line.shutdown(socket.SHUT_RDWR)
        text = f"the database has not answered for {duration(seconds)} and does not work on it: connection given up"
        self._log(Event("database.silent", text, WARNING, seconds=seconds))


def _patience(address: Address) -> float:
    """``tcp_user_timeout`` of the address, in seconds; where it is absent, zero or nonsense, the default."""
    try:
        return int(address.parameters.get("tcp_user_timeout", "")) / 1000 or _PATIENCE
    except ValueError:
        return _PATIENCE

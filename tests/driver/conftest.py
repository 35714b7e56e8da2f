"""Fixtures of the driver's tests: a driver, a worker in this process, and a way to lose a reply."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from pgreaper.api import Reaper
from pgreaper.connection import resolve
from pgreaper.logs import sentences
from pgreaper.worker import Run, Settings, Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def reaper(connect: Callable[..., Any]) -> Reaper:
    """A driver on an autocommit connection."""
    return Reaper(connect())


@pytest.fixture
def work(dsn: str) -> Callable[..., tuple[Run, list[str]]]:
    """A function that runs a worker to its end in this process; returns what it did and what it logged."""

    def work(*policies: str, url: str = dsn, **settings: Any) -> tuple[Run, list[str]]:
        lines: list[str] = []
        run = Worker(resolve(url), Settings(policies=policies, **settings), log=sentences(lines.append)).run()
        return run, lines

    return work


class Beside:
    """A script that plays against a daemon, in a thread; ``lines`` is what the daemon has said so far."""

    def __init__(self, lines: list[str], dsn: str) -> None:
        self.lines = lines
        self._dsn = dsn

    def wait_for(self, condition: Callable[[], Any], seconds: float = 20) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"it never came about; the daemon said {self.lines}; {self._scene()}"
            time.sleep(0.01)

    def hears(self, text: str, times: int = 1) -> None:
        """Wait until so many lines with this text were said."""
        self.wait_for(lambda: sum(text in line for line in list(self.lines)) >= times)

    def _scene(self) -> str:
        """What the database has, for whoever reads of a failure that comes once in a thousand runs."""
        things = {
            "time": "select clock_timestamp()",
            "claims": "table pgreaper.claims",
            "cursors": "table pgreaper.cursors",
            "failures": "table pgreaper.failures",
            "sessions": "select pid, state, wait_event, backend_start, xact_start, query from pg_stat_activity"
            " where datname = current_database()",
            "locks": "select pid, locktype, relation::regclass, mode from pg_locks where not granted",
        }
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            return "\n".join(f"{name}: {connection.execute(query).fetchall()}" for name, query in things.items())


@pytest.fixture
def daemon(dsn: str) -> Callable[..., tuple[Run, list[str]]]:
    """
    A function that runs a daemon in this process, and beside it a script in a thread.

    The script gets a :class:`Beside`; when it returns, the daemon is told to stop, as by SIGTERM.  An error of the
    script's is the test's.  Returns what the daemon did and what it logged.
    """

    def daemon(script: Callable[[Beside], None], *policies: str, url: str = dsn, **settings: Any) -> Any:
        lines: list[str] = []
        beside = Beside(lines, dsn)
        errors: list[BaseException] = []

        def play() -> None:
            try:
                beside.hears(" is up, ")
                script(beside)
            except BaseException as error:  # noqa: BLE001  raised again below, in the test's own thread
                errors.append(error)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

        worker = Worker(resolve(url), Settings(policies=policies, daemon=True, **settings), log=sentences(lines.append))
        player = threading.Thread(target=play)
        # Until the worker listens a signal would end the tests.
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            player.start()
            run = worker.run()
            player.join(30)
        finally:
            signal.signal(signal.SIGTERM, before)
        if errors:
            raise errors[0]
        return run, lines

    return daemon


class Proxy:
    """Forwards TCP to the server; swallows the reply to one statement, after it was carried out."""

    def __init__(self, dsn: str) -> None:
        self.parameters = conninfo_to_dict(dsn)
        self.dropped = 0
        self._markers: list[bytes] = []
        self._countdown = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._mute: set[int] = set()
        self._mute_all = False
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        user, password, name = (self.parameters.get(k) for k in ("user", "password", "dbname"))
        secret = f":{password}" if password else ""
        return f"postgresql://{user}{secret}@127.0.0.1:{self.port}/{name}"

    def drop_reply(self, *markers: str, after: int = 0) -> None:
        """Lose the reply to the call that contains all the markers, not the first `after` times."""
        self._markers, self._countdown = [marker.encode() for marker in markers], after

    def mute(self, *, new: bool = False) -> None:
        """Keep the connections there are, and forward nothing on them ever again; with `new`, nor on later ones."""
        self._mute |= {id(end) for end in self._open}
        self._mute_all = new

    def cut(self) -> None:
        """End the connections there are; what the server is doing for one of them it does to its end."""
        for client in self._open[::2]:
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

    def unmute_new(self) -> None:
        """Later connections work again."""
        self._mute_all = False

    def close(self) -> None:
        self._listener.close()
        for end in self._open:
            end.close()

    def _server(self) -> socket.socket:
        host, port = str(self.parameters["host"]), int(self.parameters["port"] or 5432)
        if host.startswith("/"):
            server = socket.socket(socket.AF_UNIX)
            server.connect(f"{host}/.s.PGSQL.{port}")
            return server
        return socket.create_connection((host, port))

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = self._server()
            except OSError:
                return
            self._open += [client, server]
            if self._mute_all:
                self._mute.add(id(client))
            threading.Thread(target=self._forward, args=(client, server), daemon=True).start()

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        losing = False
        try:
            while True:
                for ready in select.select([client, server], [], [])[0]:
                    data = ready.recv(65536)
                    if id(client) in self._mute and data:
                        continue
                    if ready is client and data and self._markers and all(m in data for m in self._markers):
                        losing = self._countdown == 0
                        self._countdown -= 1
                    if ready is server and losing:
                        # ReadyForQuery: the server has committed.  Nobody will hear of it.
                        if data.endswith(b"Z\x00\x00\x00\x05I"):
                            self.dropped += 1
                            data = b""
                        else:
                            continue
                    if not data:
                        client.close()
                        server.close()
                        return
                    (server if ready is client else client).sendall(data)
        except (OSError, ValueError):
            return


@pytest.fixture
def proxy(dsn: str) -> Iterator[Proxy]:
    """A TCP proxy before the server; see :class:`Proxy`."""
    proxy = Proxy(dsn)
    yield proxy
    proxy.close()

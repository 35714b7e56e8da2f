"""Fixtures of the driver's tests: a driver, a worker in this process, and a way to lose a reply."""

from __future__ import annotations

import select
import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest
from psycopg.conninfo import conninfo_to_dict

from pgreaper.api import Reaper
from pgreaper.connection import resolve
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
        run = Worker(resolve(url), Settings(policies=policies, **settings), log=lines.append).run()
        return run, lines

    return work


class Proxy:
    """Forwards TCP to the server; swallows the reply to one statement, after it was carried out."""

    def __init__(self, dsn: str) -> None:
        self.parameters = conninfo_to_dict(dsn)
        self.dropped = 0
        self._marker = b""
        self._countdown = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        user, password, name = (self.parameters.get(k) for k in ("user", "password", "dbname"))
        secret = f":{password}" if password else ""
        return f"postgresql://{user}{secret}@127.0.0.1:{self.port}/{name}"

    def drop_reply(self, marker: str, *, after: int = 0) -> None:
        """Lose the reply to the statement that contains the marker, not the first `after` times."""
        self._marker, self._countdown = marker.encode(), after

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
            threading.Thread(target=self._forward, args=(client, server), daemon=True).start()

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        losing = False
        try:
            while True:
                for ready in select.select([client, server], [], [])[0]:
                    data = ready.recv(65536)
                    if ready is client and data and self._marker and self._marker in data:
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

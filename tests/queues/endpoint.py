"""A real HTTP server on a free port of this machine that answers as it is told, with or without TLS."""

from __future__ import annotations

import socket
import ssl
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Request(NamedTuple):
    """What was posted."""

    identity: str
    body: bytes
    headers: dict[str, str]
    path: str


class Endpoint:
    """
    Alive inside a ``with`` block.

    ``answer`` decides by the request: a status; ``hang`` until :meth:`release`; ``die``, the connection ends without an
    answer; ``drip``, a head that comes without end; ``huge``, a 200 with a body without end.
    ``headers`` go with every answer.  ``requests`` are those that came whole, ``at_once`` the most that were answered
    at a time.
    """

    def __init__(self, certificates: Path | None = None) -> None:
        self.requests: list[Request] = []
        self.answer: Callable[[Request], int | str] = lambda request: 204
        self.headers: dict[str, str] = {}
        self.connections = 0
        self.at_once = 0
        self.sent = 0
        self._now = 0
        self._lock = threading.Lock()
        self._released = threading.Event()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # Head and body in one packet, and at once.
            wbufsize = 65536
            disable_nagle_algorithm = True

            def setup(self) -> None:
                super().setup()
                with endpoint._lock:
                    endpoint.connections += 1

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                request = Request(self.headers["Idempotency-Key"], body, dict(self.headers), self.path)
                with endpoint._lock:
                    endpoint.requests.append(request)
                    endpoint._now += 1
                    endpoint.at_once = max(endpoint.at_once, endpoint._now)
                try:
                    self.close_connection = self.close_connection or not self.respond(endpoint.answer(request))
                except OSError:
                    self.close_connection = True
                finally:
                    with endpoint._lock:
                        endpoint._now -= 1

            def respond(self, answer: int | str) -> bool:
                """Whether the connection can be used again."""
                if answer == "hang":
                    endpoint._released.wait(60)
                    return False
                if answer == "die":
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    self.connection.close()
                    return False
                if answer == "drip":
                    self.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
                    while not endpoint._released.wait(0.05):
                        self.wfile.write(b"x")
                        self.wfile.flush()
                    return False
                if answer == "huge":
                    self.wfile.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
                    while not endpoint._released.is_set():
                        self.wfile.write(b"x" * 65536)
                        endpoint.sent += 65536
                    return False
                assert isinstance(answer, int)
                self.send_response(answer)
                for name, value in endpoint.headers.items():
                    self.send_header(name, value)
                if answer != 204:
                    self.send_header("Content-Length", "2")
                self.end_headers()
                if answer != 204:
                    self.wfile.write(b"no")
                return True

            def log_message(self, *arguments: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 64
            daemon_threads = True

            def handle_error(self, *arguments: object) -> None:
                """A client that leaves is what these tests are about."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self._scheme = "http"
        if certificates:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificates / "cert.pem", certificates / "key.pem")
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
            self._scheme = "https"

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self.port}/hook?token=t"

    def identities(self) -> list[str]:
        return [request.identity for request in self.requests]

    def release(self) -> None:
        self._released.set()

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
        self._server.shutdown()
        self._server.server_close()

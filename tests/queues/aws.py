"""
SQS for tests: moto's server as a process of its own, and a way in that can refuse, cut and delay.

``aws`` is moto and a client past pgreaper; the URLs that it gives lead through :class:`Front`, which sees every call,
passes it on, and does with it or with its answer what a test says.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import sys
import threading
from contextlib import nullcontext, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import TYPE_CHECKING, Any

import boto3
import pytest

from tests.queues.broker import Process, free_port, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Call = tuple[str, dict[str, Any]]

SECRET = "not-a-real-s3cret"
SETTINGS = {
    "AWS_ACCESS_KEY_ID": "tests",
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_REGION": "eu-central-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}


class Front:
    """
    Between pgreaper and moto.

    ``before`` gets the operation and what is asked, and may return an answer (a status and a document) in moto's place;
    ``after`` gets moto's answer too, and may return another document.  Either may return ``CUT``: the connection ends
    without an answer.  ``calls`` are those that came.
    """

    CUT = "cut"

    def __init__(self, port: int) -> None:
        self.port = port
        self.calls: list[Call] = []
        self.receiving = threading.Lock()
        self.before: Callable[[str, dict[str, Any]], Any] = lambda operation, asked: None
        self.after: Callable[[str, dict[str, Any], dict[str, Any]], Any] = lambda operation, asked, answer: None
        front = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                operation, asked = self.headers["X-Amz-Target"].partition(".")[2], json.loads(body)
                front.calls.append((operation, asked))
                given = front.before(operation, asked)
                if given is None:
                    # moto's threads give one message to two calls that ask at the same moment.
                    alone = operation == "ReceiveMessage" and not asked.get("WaitTimeSeconds")
                    with front.receiving if alone else nullcontext():
                        given = front.pass_on(port, dict(self.headers), body)
                    if given[0] == 200:
                        other = front.after(operation, asked, given[1])
                        given = other if other == Front.CUT else (200, given[1] if other is None else other)
                if given == Front.CUT:
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                text = json.dumps(given[1]).encode()
                with suppress(ConnectionError):
                    self.send_response(given[0])
                    self.send_header("Content-Type", "application/x-amz-json-1.0")
                    self.send_header("Content-Length", str(len(text)))
                    self.end_headers()
                    self.wfile.write(text)

            def log_message(self, *arguments: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 64
            daemon_threads = True

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    @staticmethod
    def pass_on(port: int, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        try:
            connection.request("POST", "/", body, headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read() or b"{}")
        finally:
            connection.close()

    def asked(self, operation: str) -> list[dict[str, Any]]:
        """What was asked in each call of this operation."""
        return [asked for name, asked in list(self.calls) if name == operation]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Aws:
    """moto past pgreaper, and queues in it."""

    _numbers = count(1)

    def __init__(self, port: int, front: Front) -> None:
        self.front = front
        self.client: Any = boto3.client("sqs", region_name="eu-central-1", endpoint_url=f"http://127.0.0.1:{port}")
        self._where: dict[str, str] = {}

    def queue(self, *, fifo: bool = False, name: str | None = None, **attributes: object) -> str:
        """Make a queue; returns its name."""
        name = name or f"queue-{next(self._numbers)}" + (".fifo" if fifo else "")
        given = {key: str(value) for key, value in ({"FifoQueue": "true"} if fifo else attributes).items()}
        self._where[name] = self.client.create_queue(QueueName=name, Attributes=given)["QueueUrl"]
        return name

    def url(self, queue: str) -> str:
        return f"sqs://{queue}?endpoint={self.front.url}"

    def write(self, queue: str, *bodies: str) -> None:
        for body in bodies:
            self.client.send_message(QueueUrl=self._where[queue], MessageBody=body)

    def drain(self, queue: str) -> list[dict[str, Any]]:
        """Take all that is visible in it."""
        found: list[dict[str, Any]] = []
        while some := self.client.receive_message(
            QueueUrl=self._where[queue], MaxNumberOfMessages=10, AttributeNames=["All"], MessageAttributeNames=["All"]
        ).get("Messages"):
            for one in some:
                self.client.delete_message(QueueUrl=self._where[queue], ReceiptHandle=one["ReceiptHandle"])
            found += some
        return found

    def arn(self, queue: str) -> str:
        answer = self.client.get_queue_attributes(QueueUrl=self._where[queue], AttributeNames=["QueueArn"])
        return str(answer["Attributes"]["QueueArn"])

    def counts(self, queue: str) -> tuple[int, int]:
        """How many messages are visible, and how many are not."""
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        answer = self.client.get_queue_attributes(QueueUrl=self._where[queue], AttributeNames=names)["Attributes"]
        return int(answer[names[0]]), int(answer[names[1]])


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of moto's server, which starts in two seconds."""
    port, log = free_port(), tmp_path_factory.mktemp("moto") / "out"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = Process(*command, env={**os.environ, **SETTINGS}, log=log, user=None)

    def answers() -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
            return True
        return False

    try:
        wait_until(answers, 60, why=f"moto does not start:\n{log.read_text(errors='replace')}")
        yield port
    finally:
        process.end()


@pytest.fixture
def aws(moto: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Aws]:
    """SQS, its queues shared with nobody, and the environment that leads to it."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    front = Front(moto)
    found = Aws(moto, front)
    yield found
    found.client.close()
    front.close()

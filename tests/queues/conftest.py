"""
Real brokers for the queues.

``rabbitmq`` is one RabbitMQ a run, ``rabbit`` a way past what is tested to look at it and to set it up.  Without
Debian's ``rabbitmq-server`` these tests are skipped.
"""

from __future__ import annotations

import asyncio
import datetime
import functools
import ipaddress
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec
from urllib.parse import quote
from uuid import uuid4

import aio_pika
import pytest

from pgreaper.queues import Message
from tests.queues.aws import aws as aws
from tests.queues.aws import moto as moto
from tests.queues.broker import CERTIFIED, SERVER, STARTED, Broker, wait_until
from tests.queues.endpoint import Endpoint
from tests.queues.kafka_cluster import kafka as kafka

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

P = ParamSpec("P")


@pytest.fixture(scope="session")
def certificates(pytestconfig: pytest.Config, tmp_path_factory) -> Path:
    """A folder with ``ca.pem``, and ``cert.pem`` and ``key.pem`` of a server on 127.0.0.1 that it vouches for."""
    if CERTIFIED in pytestconfig.stash:
        return pytestconfig.stash[CERTIFIED]
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    folder: Path = tmp_path_factory.mktemp("certificates")
    pytestconfig.stash[CERTIFIED] = folder
    now = datetime.datetime.now(datetime.UTC)

    def certify(name: str, key, issuer, signer, *, authority: bool) -> x509.Certificate:
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer.subject if issuer else subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
            .sign(signer, hashes.SHA256())
        )

    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority = certify("tests", authority_key, None, authority_key, authority=True)
    certificate = certify("127.0.0.1", key, authority, authority_key, authority=False)
    pem = serialization.Encoding.PEM
    (folder / "ca.pem").write_bytes(authority.public_bytes(pem))
    (folder / "cert.pem").write_bytes(certificate.public_bytes(pem))
    (folder / "key.pem").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return folder


@pytest.fixture(scope="session")
def rabbitmq(pytestconfig: pytest.Config, needs: Callable[..., Path], certificates: Path) -> Broker:
    """A RabbitMQ of this run's own, one for all folders that ask for it; a test that crashes it starts it again."""
    needs(str(SERVER), package="rabbitmq-server")
    broker = pytestconfig.stash.get(STARTED, None)
    if broker is None:
        broker = pytestconfig.stash[STARTED] = Broker(certificates=certificates)
        pytestconfig.add_cleanup(broker.close)
        broker.__enter__()
    return broker


@dataclass(frozen=True, slots=True)
class Found:
    """A message, as it lay in a queue."""

    body: bytes
    message_id: str | None
    headers: dict[str, Any]
    properties: aio_pika.abc.AbstractIncomingMessage


class Lost(Exception):
    """The broker itself does not know a durable queue any more: there is nothing to see of what is tested."""


def again_if_lost(scenario: Callable[P, None]) -> Callable[P, None]:
    """Run a scenario that crashes the broker, and again when it ends as :class:`Lost`; the third such end is red."""

    @functools.wraps(scenario)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        for _ in range(2):
            with suppress(Lost):
                return scenario(*args, **kwargs)
        return scenario(*args, **kwargs)

    return run


class Rabbit:
    """The broker past pgreaper: each call is a connection of its own, so it survives any crash."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker

    def queue(self, name: str | None = None, **arguments: Any) -> str:
        """Make a durable queue; ``max_length=10`` is its argument ``x-max-length``.  Returns its name."""
        name = name or f"test-{uuid4().hex[:12]}"
        spelled = {"x-" + key.replace("_", "-"): value for key, value in arguments.items()}
        self._do(lambda channel: channel.declare_queue(name, durable=True, arguments=spelled))
        return name

    def exchange(self, name: str, kind: str, *queues: tuple[str, str]) -> str:
        """Make a durable exchange and bind queues to it, each by a key."""

        async def declare(channel: aio_pika.abc.AbstractChannel) -> None:
            exchange = await channel.declare_exchange(name, kind, durable=True)
            for queue, key in queues:
                await (await channel.get_queue(queue)).bind(exchange, key)

        self._do(declare)
        return name

    def count(self, queue: str) -> int:
        """How many messages are ready in it."""

        async def ask(channel: aio_pika.abc.AbstractChannel) -> int:
            return (await channel.declare_queue(queue, passive=True)).declaration_result.message_count or 0

        return int(self._do(ask))

    def exists(self, queue: str) -> bool:
        try:
            self.count(queue)
        except aio_pika.exceptions.ChannelNotFoundEntity:
            return False
        return True

    def drain(self, queue: str) -> list[Found]:
        """Take all that is ready in it."""

        async def take(channel: aio_pika.abc.AbstractChannel) -> list[Found]:
            source, found = await channel.get_queue(queue), []
            while (message := await source.get(fail=False, no_ack=True)) is not None:
                found.append(Found(message.body, message.message_id, dict(message.headers), message))
            return found

        taken: list[Found] = self._do(take)
        return taken

    def publish(self, queue: str, *bodies: bytes, **properties: Any) -> None:
        """Put persistent messages into it."""

        async def put(channel: aio_pika.abc.AbstractChannel) -> None:
            for body in bodies:
                message = aio_pika.Message(body, delivery_mode=2, **properties)
                await channel.default_exchange.publish(message, queue)

        self._do(put)

    def crash(self) -> None:
        """
        End the broker with SIGKILL.

        In about one such crash of ten RabbitMQ 3.10 loses the durable queue that was made last, of 65 never another.
        So that is one which nobody needs.
        """
        self.queue()
        self.broker.crash()

    def start(self, *queues: str) -> None:
        """Start the broker after a crash; :class:`Lost` if it does not know all of these queues within five seconds."""
        self.broker.start()
        end = time.monotonic() + 5
        while gone := [queue for queue in queues if not self.exists(queue)]:
            if time.monotonic() > end:
                raise Lost(*gone)
            time.sleep(0.1)

    def delete(self, queue: str) -> None:
        self._do(lambda channel: channel.queue_delete(queue))

    def wait_for(self, queue: str, messages: int, seconds: float = 20.0) -> None:
        """Return as soon as so many are ready in it."""
        wait_until(lambda: self.count(queue) == messages, seconds, why=f"{queue} has {self.count(queue)}")

    def wait_until_a_silent_client_is_thrown_out(self) -> None:
        """Return when the broker has closed a connection with a heartbeat of a second that has sent none since now."""
        before = self.broker.log().count("missed heartbeats")
        with asyncio.Runner() as runner:
            # Once it is there, nobody runs its loop.
            connection = runner.run(aio_pika.connect(self.broker.url(), heartbeat=1, timeout=10))
            wait_until(lambda: self.broker.log().count("missed heartbeats") > before)
            runner.run(connection.close())

    def _do(self, what: Callable[[aio_pika.abc.AbstractChannel], Any]) -> Any:
        async def run() -> Any:
            connection = await aio_pika.connect(self.broker.url(), timeout=10)
            async with connection, connection.channel() as channel:
                return await what(channel)

        return asyncio.run(run())


@pytest.fixture
def rabbit(rabbitmq: Broker) -> Rabbit:
    return Rabbit(rabbitmq)


def message(number: int | str, *, key: str | None = None, body: bytes | None = None) -> Message:
    """The event of a hold; its identity is in the body too, as a consumer gets it."""
    name = key if key is not None else str(number)
    identity = f"holds/{quote(name, safe='')}/{number}"
    return Message(
        body=body if body is not None else b'{"key":"%s","idempotency_key":"%s"}' % (name.encode(), identity.encode()),
        key=name,
        identity=identity,
        headers={"content-type": "application/json", "policy": "holds"},
    )


def messages(n: int, start: int = 0) -> list[Message]:
    return [message(i) for i in range(start, start + n)]


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    """An HTTP server that answers as it is told."""
    with Endpoint() as endpoint:
        yield endpoint

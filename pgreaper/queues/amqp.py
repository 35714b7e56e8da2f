"""
RabbitMQ: ``amqp://`` and ``amqps://``, by way of aio-pika.

The library is asynchronous and runs on a loop in a thread of its own: heartbeats, deliveries and confirms go on
there while the caller works.  Its plain connection is used, not the one that reconnects behind our back: what was
unconfirmed when a connection broke is the caller's to send again, and a delivery of a connection that is gone
belongs to nobody.

A publish counts when the broker has confirmed it: every message is persistent and ``mandatory``, and all of a
batch wait for their confirms together.

RabbitMQ delivers no message later by itself.  What is put off for more than a second moves to a queue
``pgreaper.later.<queue>.<milliseconds>`` that nobody reads: there it expires, and is dead-lettered back.  Only
queues of equal times are exact, because a queue expires from its head; so there is one for each power of two, a
message waits in the largest that fits, and comes again a little early, to be put off for the rest.  They are made
on demand and leave when they are not used.  ``docs/decisions/0024-queue-libraries.md`` says what was weighed.

A move to another queue that fails costs the consumer nothing: it goes over a connection of its own.  The message waits
here, unacknowledged and so within the prefetch, until it is due or the move works; each other queue is asked again
later and later, by one message.
"""

import asyncio
import heapq
import logging
import math
import ssl
from collections import deque
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import count
from socket import gaierror
from typing import Any, Final, TypeVar
from urllib.parse import unquote
from uuid import uuid4

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractExchange, AbstractIncomingMessage, AbstractQueue
from aio_pika.exceptions import (
    AMQPChannelError,
    AMQPConnectionError,
    AMQPError,
    AuthenticationError,
    ChannelClosed,
    ChannelInvalidStateError,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
    DeliveryError,
    ProbableAuthenticationError,
)
from aiormq.exceptions import ChannelAccessRefused, InvalidFrameError

from pgreaper.errors import InvalidInput
from pgreaper.queues import Message, Received, Refusal, Sent, Trouble, Url
from pgreaper.queues.loop import Loop
from pgreaper.queues.order import by_key
from pgreaper.text import visible

_R = TypeVar("_R")

# What these log repeats the broker's words and whole messages.
for _library in ("aio_pika", "aiormq"):
    logging.getLogger(_library).addHandler(logging.NullHandler())

# Seconds for a connection, name lookup and handshakes included.
_CONNECT: Final = 10.0
# Seconds for a word to the broker that it answers at once.
_ANSWER: Final = 10.0
# Seconds between heartbeats; after three of them without a sign the connection is given up.
_HEARTBEAT: Final = 15
# Milliseconds of the delay queues: 2**6 is 64 ms, 2**30 twelve days.  What is put off for longer comes again.
_SHORTEST: Final = 6
_LONGEST: Final = 30
# What is put off for less than so many seconds waits here, as long as it takes no more than half the prefetch.
_SHORT: Final = 1.0
# A rejected message is delivered so often before it takes the queue's dead-letter path.
_ATTEMPTS: Final = 5
# A queue that could not be moved to is tried again after so many seconds, then after twice as many, up to the cap.
_MOVE_FIRST: Final = 0.5
_MOVE_CAP: Final = 30.0
_FAILURES: Final = "pgreaper-failures"
_IDENTITY: Final = "pgreaper-identity"
_REASON: Final = "pgreaper-reason"
_LONGEST_NAME: Final = 255
# The names of delay queues are longer than the queue's own by at most 26; of a longer one they have the digest.
_LONGEST_STEM: Final = 200
_MOST_PREFETCHED: Final = 65535


def open_sink(url: Url) -> "AmqpSink":
    """
    ``amqp://user:password@host:5672/vhost?queue=NAME``, or ``?exchange=NAME`` with an optional ``routing_key``.

    Without a routing key it is the policy's name.  Raises InvalidInput.
    """
    options = url.options("queue", "exchange", "routing_key", *_Broker.options)
    queue, exchange, routing_key = (options.get(name) for name in ("queue", "exchange", "routing_key"))
    if bool(queue) == bool(exchange) or (queue and routing_key):
        raise url.refused(
            "does not name one place for events",
            hint="Give ?queue=NAME, or ?exchange=NAME and, if it is not the policy's name, &routing_key=KEY.",
        )
    for name in ("queue", "exchange", "routing_key"):
        _fits(url, name)
    return AmqpSink(_Broker(url), queue=queue, exchange=exchange, routing_key=routing_key)


def open_source(url: Url, *, visibility: float) -> "AmqpSource":  # noqa: ARG001  RabbitMQ counts no seconds
    """
    ``amqp://user:password@host:5672/vhost?queue=NAME``.

    ``attempts`` is how often a rejected message is delivered before it goes the queue's dead-letter way, and
    ``dead`` a queue that takes it then, for a queue that has no such way of its own; it has to exist, or nothing is
    received.  Raises InvalidInput.
    """
    options = url.options("queue", "attempts", "dead", *_Broker.options)
    if not options.get("queue"):
        raise url.refused("names no queue", hint="Add ?queue=NAME.")
    for name in ("queue", "dead"):
        _fits(url, name)
    return AmqpSource(
        _Broker(url),
        queue=options["queue"],
        attempts=_number(url, "attempts", _ATTEMPTS, least=1),
        dead=options.get("dead") or None,
    )


def _fits(url: Url, name: str) -> None:
    if len(url.query.get(name, "").encode()) > _LONGEST_NAME:
        raise url.refused(f"has a {name} that is too long", hint=f"RabbitMQ has names of up to {_LONGEST_NAME} bytes.")


def _number(url: Url, name: str, default: int, *, least: int) -> int:
    text = url.query.get(name, str(default))
    if not text.isascii() or not text.isdigit() or not least <= int(text) <= 65535:
        raise url.refused(f"has {name} that is no number from {least} to 65535", hint=f"{name}={default} is usual.")
    return int(text)


class _Broker:
    """Where the broker is and how one gets in."""

    options: Final = ("heartbeat", "cacertfile", "certfile", "keyfile")

    def __init__(self, url: Url) -> None:
        tls = url.scheme == "amqps"
        host, port = url.endpoint(5671 if tls else 5672)
        self.shown = f"{url.scheme}://{url.host}{url.path.rstrip('/')}"
        self._arguments: dict[str, Any] = {
            "host": host,
            "port": port,
            "login": "guest" if url.user is None else url.user,
            "password": "guest" if url.password is None else url.password,
            "virtualhost": unquote(url.path[1:]) or "/",
            "heartbeat": _number(url, "heartbeat", _HEARTBEAT, least=1),
            "client_properties": {"connection_name": "pgreaper"},
        }
        if tls:
            self._arguments |= {"ssl": True, "ssl_context": _tls(url)}
        elif found := [name for name in ("cacertfile", "certfile", "keyfile") if name in url.query]:
            raise url.refused(f"has {found[0]}, and amqp: is not encrypted", hint="Begin it with amqps://.")

    async def connect(self) -> AbstractConnection:
        """A new connection.  Raises Trouble."""
        try:
            with _translated():
                async with asyncio.timeout(_CONNECT):
                    connection: AbstractConnection = await aio_pika.connect(**self._arguments)
                    return connection
        except InvalidFrameError:
            # The broker let us in and closed when it heard the name of the virtual host.
            raise Trouble("VhostRefused") from None
        except (AMQPError, OSError, RuntimeError) as error:
            raise Trouble(_named(error)) from None


def _tls(url: Url) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=url.query.get("cacertfile"))
        if certificate := url.query.get("certfile"):
            context.load_cert_chain(certificate, url.query.get("keyfile"))
    except OSError as error:
        raise InvalidInput(
            f"the certificates that the URL of {url.option} names cannot be read: {type(error).__name__}",
            hint="cacertfile, certfile and keyfile are files in PEM format.",
        ) from None
    return context


@contextmanager
def _translated() -> Iterator[None]:
    """
    What the library raises, as errors of its own, also when a connection has ended.

    One that ended between two frames it takes for closed in order, and whoever waits for an answer gets a bare
    Exception; of one that it gave up itself they are cancelled.
    """
    try:
        yield
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise AMQPConnectionError("the connection was given up") from error
    except Exception as error:
        if type(error) in (Exception, StopAsyncIteration):
            raise AMQPConnectionError("the connection ended") from error
        raise


def _is_up(connection: AbstractConnection) -> bool:
    """Whether it is there; ``is_closed`` only tells whether we have closed it."""
    return connection.connected.is_set() and not connection.is_closed


def _named(error: BaseException, missing: str = "NotFound") -> str:
    """A name for what went wrong; ``missing`` for what was asked for and is not there."""
    cause = error.__cause__
    for kinds, name in (
        ((ProbableAuthenticationError, AuthenticationError, ChannelAccessRefused), "AccessRefused"),
        ((ChannelNotFoundEntity,), missing),
        ((ChannelPreconditionFailed,), "PreconditionFailed"),
        ((ssl.SSLError,), "TlsError"),
        ((gaierror,), "HostUnknown"),
        ((ConnectionRefusedError,), "ConnectionRefused"),
        ((TimeoutError,), "Timeout"),
    ):
        if isinstance(error, kinds) or isinstance(cause, kinds):
            return name
    # A RuntimeError says that what is asked of a connection comes after its end.
    lost = (AMQPConnectionError, ChannelClosed, ChannelInvalidStateError, OSError, RuntimeError, asyncio.CancelledError)
    return "ConnectionLost" if isinstance(error, lost) else type(error).__name__


async def _close(connection: AbstractConnection) -> None:
    """Close; a broker that does not answer is not waited for."""
    with suppress(AMQPError, OSError, RuntimeError), _translated():
        await asyncio.wait_for(connection.close(), 2.0)


def _forget(connection: AbstractConnection) -> None:
    """Close a connection that is not what it should be, while the caller goes on."""
    closing = asyncio.create_task(_close(connection))
    _closings.add(closing)
    closing.add_done_callback(_closings.discard)


# The event loop itself would not keep them.
_closings: Final[set[asyncio.Task[None]]] = set()


# -- events out


@dataclass(slots=True)
class _Line:
    """A connection with a channel that confirms, and the exchange that is published to."""

    connection: AbstractConnection
    channel: AbstractChannel
    exchange: AbstractExchange


class AmqpSink:
    """Publishes to a queue, or to an exchange."""

    def __init__(self, broker: _Broker, *, queue: str | None, exchange: str | None, routing_key: str | None) -> None:
        self.name = f"{broker.shown}?{'queue' if queue else 'exchange'}={visible(queue or exchange or '')}"
        self._broker = broker
        self._queue = queue
        self._exchange = exchange
        self._routing_key = queue or routing_key
        self._loop = Loop("amqp-sink")
        self._line: _Line | None = None

    def send(self, messages: Sequence[Message], *, timeout: float) -> Sent:
        """Publish all, and wait for the confirms together; see :class:`pgreaper.queues.Sink`."""
        batch = _Batch(messages)
        try:
            self._loop.run(self._send(batch, timeout), timeout=timeout)
        except TimeoutError:
            batch.trouble = "Timeout"
        return batch.sent()

    def close(self) -> None:
        """End the connection."""
        line, self._line = self._line, None
        with suppress(TimeoutError):
            if line is not None:
                self._loop.run(_close(line.connection), timeout=2.0)
        self._loop.close()

    async def _send(self, batch: "_Batch", timeout: float) -> None:
        end = asyncio.get_running_loop().time() + timeout
        try:
            async with asyncio.timeout_at(end):
                exchange = await self._open()
                await self._publish(exchange, batch)
                if batch.guilty_unknown:
                    await self._publish_singly(batch)
        except TimeoutError:
            batch.trouble = "Blocked" if self._line and await _is_blocked(self._line.connection) else "Timeout"
        except Trouble as trouble:
            batch.trouble = trouble.error_class
        if batch.trouble:
            self._drop()

    async def _open(self) -> AbstractExchange:
        """The exchange, on the channel there is or on a new one.  Raises Trouble."""
        line = self._line
        if line and _is_up(line.connection) and not line.channel.is_closed:
            return line.exchange
        if line is None or not _is_up(line.connection):
            self._drop()
            connection = await self._broker.connect()
        else:
            connection, self._line = line.connection, None
        try:
            with _translated():
                async with asyncio.timeout(_ANSWER):
                    channel = await connection.channel()
                    exchange = channel.default_exchange
                    if self._exchange:
                        exchange = await channel.get_exchange(self._exchange)
        except BaseException as error:
            _forget(connection)
            if isinstance(error, (AMQPError, OSError, RuntimeError)):
                raise Trouble(_named(error, "NoSuchExchange")) from None
            raise
        self._line = _Line(connection, channel, exchange)
        return exchange

    def _drop(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            _forget(line.connection)

    async def _publish(self, exchange: AbstractExchange, batch: "_Batch") -> None:
        """Publish everything at once, except that the messages of one key go one after the other."""
        async with asyncio.TaskGroup() as tasks:
            for positions in batch.by_key:
                tasks.create_task(self._publish_in_order(exchange, batch, positions))

    async def _publish_in_order(self, exchange: AbstractExchange, batch: "_Batch", positions: Sequence[int]) -> None:
        for position in positions:
            if not await self._publish_one(exchange, batch, position):
                return

    async def _publish_singly(self, batch: "_Batch") -> None:
        """The broker closed the channel over one message and did not say which: one after the other finds it."""
        batch.trouble = None
        # On a closed channel, what the library still had to write has closed the connection too, or will.
        self._drop()
        for positions in batch.by_key:
            for position in positions:
                if position in batch.confirmed or position in batch.refused:
                    continue
                batch.guilty_unknown = False
                taken = await self._publish_one(await self._open(), batch, position)
                if batch.guilty_unknown:
                    batch.refused[position] = Refusal(batch.guilt, transient=False)
                    batch.trouble = None
                    self._drop()
                elif batch.trouble:
                    return
                elif not taken:
                    break

    async def _publish_one(self, exchange: AbstractExchange, batch: "_Batch", position: int) -> bool:
        """Publish, wait for the confirm and note what it was; whether the next one of the key may follow."""
        message = batch.messages[position]
        key = self._routing_key if self._routing_key is not None else message.headers.get("policy", "")
        if len(key.encode()) > _LONGEST_NAME:
            batch.refused[position] = Refusal("RoutingKeyTooLong", transient=False)
            return True
        try:
            with _translated():
                answer = await exchange.publish(_outgoing(message), key, mandatory=True)
        except DeliveryError:
            # Not taken: the queue is full and says so, or it failed on the broker's side.
            batch.refused[position] = Refusal("Nack", transient=True)
            return False
        except ChannelPreconditionFailed as error:
            batch.guilty_unknown = True
            batch.guilt = "TooLarge" if "size" in str(error) else "PreconditionFailed"
            batch.trouble = batch.trouble or batch.guilt
            return False
        except (AMQPError, OSError, RuntimeError) as error:
            batch.trouble = batch.trouble or _named(error, "NoSuchExchange")
            return False
        if answer is None or not hasattr(answer, "body"):
            batch.confirmed.add(position)
        elif self._queue:
            # The default exchange returns it: there is no queue of that name any more, for whichever event.
            batch.trouble = batch.trouble or "NoSuchQueue"
            return False
        else:
            batch.refused[position] = Refusal("Unroutable", transient=False)
        return True


class _Batch:
    """The messages of one call, and what has become of them."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self.messages = messages
        self.by_key = by_key(messages)
        self.confirmed: set[int] = set()
        self.refused: dict[int, Refusal] = {}
        self.trouble: str | None = None
        self.guilty_unknown = False
        self.guilt = ""

    def sent(self) -> Sent:
        return Sent(frozenset(self.confirmed), dict(self.refused), self.trouble)


def _outgoing(message: Message) -> aio_pika.Message:
    return aio_pika.Message(
        message.body,
        message_id=message.identity,
        content_type=message.headers.get("content-type"),
        headers={name: value for name, value in message.headers.items() if name != "content-type"},
        delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
        app_id="pgreaper",
    )


async def _is_blocked(connection: AbstractConnection) -> bool:
    """Whether the broker has told that it takes nothing for now: its memory or its disk is full."""
    transport = connection.transport
    if transport is None or not _is_up(connection):
        return False
    try:
        await asyncio.wait_for(transport.ready(), 0.01)
    except TimeoutError:
        return True
    return False


# -- commands in


class _Deliveries:
    """What one connection has delivered; when it is gone, so are they, and come again on the next one."""

    def __init__(self, connection: AbstractConnection) -> None:
        self.connection = connection
        self.channel: AbstractChannel | None = None
        self.queue: AbstractQueue | None = None
        # A connection of its own for copies: a broker that is short of memory stops reading from one that publishes,
        # and would not hear our acknowledgements on it.
        self.outgoing: AbstractConnection | None = None
        self.copies: AbstractChannel | None = None
        self.tag = ""
        self.prefetch = 0
        self.ready: deque[Received] = deque()
        # Put off for a moment: (when, a number that keeps equal times apart, what).
        self.held: list[tuple[float, int, Received]] = []
        self.numbers = count()
        self.opening = asyncio.Lock()
        self.moves: set[asyncio.Task[None]] = set()
        # Moves that wait for their next try.
        self.waiting: set[asyncio.Task[None]] = set()
        # To be told by the next receive, which goes on.
        self.asides: deque[Trouble] = deque()
        self.lost: str | None = None
        self.wake = asyncio.Event()

    def connections(self) -> list[AbstractConnection]:
        return [self.connection] + ([self.outgoing] if self.outgoing is not None else [])

    def tell(self, trouble: Trouble) -> None:
        self.asides.append(trouble)
        self.wake.set()

    def lose(self, error_class: str) -> None:
        self.lost = self.lost or error_class
        self.wake.set()

    def take(self, limit: int, now: float) -> list[Received]:
        """Up to so many messages, those first that were put off and whose time has come."""
        while self.held and self.held[0][0] <= now:
            self.ready.append(heapq.heappop(self.held)[2])
        return [self.ready.popleft() for _ in range(min(limit, len(self.ready)))]

    def hold(self, message: Received, until: float) -> None:
        heapq.heappush(self.held, (until, next(self.numbers), message))
        self.wake.set()


@dataclass(frozen=True, slots=True)
class _Handle:
    """``failures`` are those that no header has, because the message could not be moved."""

    deliveries: _Deliveries
    message: AbstractIncomingMessage
    failures: int = 0


@dataclass(slots=True)
class _Way:
    """How moves to one queue fare: failures in a row, and until when none is tried, by the loop's clock."""

    failures: int = 0
    until: float = 0.0
    # When a delay queue was last said to be needed.
    declared: float = -1e9
    # While it fails one message tries it, and nobody declares a queue twice.
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class AmqpSource:
    """Consumes a queue."""

    ended: Final = False
    lost: Final[Sequence[Received]] = ()

    def __init__(self, broker: _Broker, *, queue: str, attempts: int, dead: str | None) -> None:
        self.name = f"{broker.shown}?queue={visible(queue)}"
        self._broker = broker
        self._queue = queue
        self._attempts = attempts
        self._dead = dead
        self._loop = Loop("amqp-source")
        self._deliveries: _Deliveries | None = None
        # By the other queue's name; they outlive a connection, and so does the back-off.
        self._ways: dict[str, _Way] = {}

    def receive(self, limit: int, *, wait: float) -> Sequence[Received]:
        """
        See :class:`pgreaper.queues.Source`.  Twice ``limit`` are with us or on their way to us at most.

        Raises Trouble that is ``aside`` when messages cannot be moved to another queue: each time that one was tried.
        """
        return self._run(self._receive(limit, wait), timeout=_CONNECT + _ANSWER + wait)

    def done(self, messages: Sequence[Received]) -> None:
        """Acknowledge.  RabbitMQ does not answer: what it did not hear comes again."""
        if messages:
            self._run(self._done(messages), timeout=_ANSWER)

    def later(self, message: Received, *, seconds: float) -> None:
        """
        Put off, here or in a delay queue.  The move goes on in the background.

        What cannot be moved waits here, and the next :meth:`receive` raises Trouble that is ``aside``.
        """
        self.put_off([(message, seconds)])

    def put_off(self, messages: Sequence[tuple[Received, float]]) -> None:
        """:meth:`later` for many, in one turn of the loop."""
        if messages:
            self._run(self._put_off(messages), timeout=_ANSWER)

    def reject(self, message: Received, *, reason: str) -> None:
        """Deliver again after a second, two, four and so on; the last time, give it to the dead-letter path."""
        self._run(self._reject(message, reason), timeout=_ANSWER)

    def keep(self, messages: Sequence[Received], *, seconds: float) -> None:
        """Nothing to be told: an unacknowledged message is ours while the connection lives."""

    def close(self) -> None:
        """Finish the moves to delay queues, as far as that takes no longer than a moment, and leave."""
        with suppress(TimeoutError, Trouble):
            if self._deliveries is not None:
                self._run(self._leave(), timeout=_ANSWER)
        self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, _R], *, timeout: float) -> _R:
        try:
            return self._loop.run(coroutine, timeout=timeout)
        except TimeoutError:
            raise Trouble("Timeout") from None

    # Everything below runs on the loop.

    async def _receive(self, limit: int, wait: float) -> list[Received]:
        clock = asyncio.get_running_loop().time
        end = clock() + wait
        deliveries = await self._consume(limit)
        while True:
            deliveries.wake.clear()
            if deliveries.lost:
                self._drop()
                raise Trouble(deliveries.lost)
            if deliveries.asides:
                raise deliveries.asides.popleft()
            if found := deliveries.take(limit, clock()):
                return found
            until = min(end, deliveries.held[0][0]) if deliveries.held else end
            try:
                async with asyncio.timeout_at(until):
                    await deliveries.wake.wait()
            except TimeoutError:
                if clock() >= end and not (deliveries.held and deliveries.held[0][0] <= end):
                    return []

    async def _consume(self, limit: int) -> _Deliveries:
        """The deliveries there are, or those of a new connection.  Raises Trouble."""
        prefetch = min(2 * limit, _MOST_PREFETCHED)
        deliveries = self._deliveries
        if deliveries is None:
            deliveries = _Deliveries(await self._broker.connect())
        elif deliveries.lost or prefetch <= deliveries.prefetch <= 4 * prefetch:
            return deliveries
        try:
            with _translated():
                async with asyncio.timeout(_ANSWER):
                    await self._begin(deliveries, prefetch)
        except (AMQPError, OSError, RuntimeError) as error:
            self._deliveries = deliveries
            self._drop()
            raise Trouble(_named(error, "NoSuchQueue")) from None
        except Trouble:
            self._deliveries = deliveries
            self._drop()
            raise
        self._deliveries = deliveries
        return deliveries

    async def _begin(self, deliveries: _Deliveries, prefetch: int) -> None:
        if deliveries.channel is None or deliveries.queue is None:
            if self._dead is not None:
                await self._require_dead(deliveries.connection, self._dead)
            deliveries.channel = channel = await deliveries.connection.channel(publisher_confirms=False)
            deliveries.queue = await channel.get_queue(self._queue)
            deliveries.connection.close_callbacks.add(lambda _, error: deliveries.lose(_named_loss(error)))
            channel.close_callbacks.add(lambda _, error: deliveries.lose(_named_loss(error)))
            # The queue was deleted, or its node is gone: the broker ends the consumer and nothing else.
            below = await channel.get_underlay_channel()
            below.on_consumer_cancel_callbacks.add(lambda _: deliveries.lose("ConsumerCancelled"))
        else:
            # What was delivered stays ours; only the next deliveries go by the new number.
            await deliveries.queue.cancel(deliveries.tag)
        await deliveries.channel.set_qos(prefetch_count=prefetch)
        deliveries.prefetch = prefetch

        async def delivered(message: AbstractIncomingMessage) -> None:
            identity = message.headers.get(_IDENTITY)
            deliveries.ready.append(
                Received(
                    body=message.body,
                    attempt=_attempt(message),
                    handle=_Handle(deliveries, message),
                    identity=identity if isinstance(identity, str) else uuid4().hex,
                )
            )
            deliveries.wake.set()

        deliveries.tag = await deliveries.queue.consume(delivered)

    @staticmethod
    async def _require_dead(connection: AbstractConnection, dead: str) -> None:
        """Raises Trouble unless the queue for dead ones is there: better now than with the first of them."""
        channel = await connection.channel(publisher_confirms=False)
        try:
            await channel.declare_queue(dead, passive=True)
        except AMQPChannelError as error:
            raise Trouble(_named(error, "NoSuchQueue"), queue=dead) from None
        await channel.close()

    def _mine(self, message: Received) -> _Handle | None:
        """The message's handle, if it is a delivery of the connection that we have."""
        handle = message.handle
        assert isinstance(handle, _Handle)  # noqa: S101  for the type checker: we made it
        return handle if handle.deliveries is self._deliveries and not handle.deliveries.lost else None

    async def _done(self, messages: Sequence[Received]) -> None:
        for message in messages:
            if handle := self._mine(message):
                await _tell(handle, handle.message.ack())

    async def _later(self, message: Received, seconds: float) -> None:
        handle = self._mine(message)
        if handle is None:
            return
        deliveries = handle.deliveries
        if seconds < _SHORT and len(deliveries.held) < max(deliveries.prefetch // 2, 1):
            deliveries.hold(message, asyncio.get_running_loop().time() + max(seconds, 0.0))
        else:
            self._move(message, handle, seconds, {})

    async def _put_off(self, messages: Sequence[tuple[Received, float]]) -> None:
        for message, seconds in messages:
            await self._later(message, seconds)

    async def _reject(self, message: Received, reason: str) -> None:
        handle = self._mine(message)
        if handle is None:
            return
        failures = _failures(handle.message) + handle.failures + 1
        marks = {_FAILURES: failures, _REASON: reason}
        if failures < self._attempts:
            # In the largest delay queue for a second, for two, and so on.
            self._move(message, handle, 1.024 * 2 ** (failures - 1), marks)
        elif self._dead is not None:
            self._move(message, handle, None, marks)
        else:
            await _tell(handle, handle.message.reject(requeue=False))

    def _move(self, message: Received, handle: _Handle, seconds: float | None, marks: Mapping[str, Any]) -> None:
        """Publish a copy to a delay queue, or to the one for dead ones, and acknowledge when that is confirmed."""
        deliveries = handle.deliveries
        move = asyncio.create_task(self._moved(message, handle, seconds, marks))
        deliveries.moves.add(move)
        move.add_done_callback(deliveries.moves.discard)

    async def _moved(self, message: Received, handle: _Handle, seconds: float | None, marks: Mapping[str, Any]) -> None:
        """
        Try until it is moved, as often as the other queue's back-off lets it.

        What was to be delayed and cannot be is delivered from here in its time.
        """
        deliveries = handle.deliveries
        clock = asyncio.get_running_loop().time
        due = math.inf if seconds is None else clock() + seconds
        name, milliseconds = (self._dead or "", 0) if seconds is None else self._delay_queue(seconds)
        way = self._ways.setdefault(name, _Way())
        if seconds is not None:
            marks = {_IDENTITY: message.identity, **marks}
        copy = _copy(handle.message, marks)
        while not await self._tried(handle, copy, name, milliseconds, way):
            if deliveries.lost:
                return
            now = clock()
            if now >= due:
                break
            task = asyncio.current_task()
            assert task is not None  # noqa: S101  for the type checker: this is one
            deliveries.waiting.add(task)
            try:
                await asyncio.sleep(max(min(way.until, due) - now, 0.01))
            finally:
                deliveries.waiting.discard(task)
            if clock() >= due:
                break
        else:
            return
        if failures := marks.get(_FAILURES):
            here = _Handle(deliveries, handle.message, failures - _failures(handle.message))
            message = Received(message.body, message.attempt + 1, here, message.identity)
        deliveries.hold(message, due)

    async def _tried(self, handle: _Handle, copy: aio_pika.Message, name: str, milliseconds: int, way: _Way) -> bool:
        """Move it now, unless the queue is not to be asked yet; whether that worked, or need not be tried again."""
        deliveries = handle.deliveries
        clock = asyncio.get_running_loop().time
        channel = None
        try:
            with _translated():
                async with asyncio.timeout(_ANSWER):
                    alone = way.failures > 0 or (milliseconds > 0 and not _is_fresh(way, milliseconds, clock()))
                    async with way.turn if alone else nullcontext():
                        if clock() < way.until or deliveries.lost:
                            return False
                        channel = await self._copies(deliveries)
                        if milliseconds and not _is_fresh(way, milliseconds, clock()):
                            await self._declare(deliveries, name, milliseconds)
                            way.declared = clock()
                        if probes := way.failures > 0:
                            await self._publish(channel, copy, name, way)
                    if not probes:
                        await self._publish(channel, copy, name, way)
        except DeliveryError:
            # It takes none for now.
            error_class = "Nack"
        except Trouble as trouble:
            error_class = trouble.error_class
        except TimeoutError:
            error_class = "Timeout"
            self._hang_up(deliveries, channel)
        except (AMQPError, OSError, RuntimeError) as error:
            error_class = _named(error, "NoSuchQueue")
        else:
            await _tell(handle, handle.message.ack())
            return True
        if clock() >= way.until:
            # Of the many that failed together the first one counts.
            way.failures += 1
            way.until = clock() + min(_MOVE_CAP, _MOVE_FIRST * 2.0 ** min(way.failures - 1, 40))
            deliveries.tell(Trouble(error_class, queue=name, aside=True))
        return False

    @staticmethod
    async def _publish(channel: AbstractChannel, copy: aio_pika.Message, name: str, way: _Way) -> None:
        """Publish and wait for the confirm: the way is open then."""
        answer = await channel.default_exchange.publish(copy, name, mandatory=True)
        if answer is not None and hasattr(answer, "body"):
            way.declared = -1e9
            raise Trouble("NoSuchQueue")
        way.failures = 0

    async def _copies(self, deliveries: _Deliveries) -> AbstractChannel:
        """The channel for copies, on the other connection.  Raises Trouble."""
        async with deliveries.opening:
            if deliveries.outgoing is None or not _is_up(deliveries.outgoing):
                if deliveries.outgoing is not None:
                    _forget(deliveries.outgoing)
                deliveries.outgoing, deliveries.copies = await self._broker.connect(), None
                if deliveries is not self._deliveries:
                    _forget(deliveries.outgoing)
                    raise Trouble("ConnectionLost")
            if deliveries.copies is None or deliveries.copies.is_closed:
                deliveries.copies = await deliveries.outgoing.channel()
            return deliveries.copies

    @staticmethod
    def _hang_up(deliveries: _Deliveries, channel: AbstractChannel | None) -> None:
        """Give up the connection for copies that did not answer, unless there is another one by now."""
        if deliveries.outgoing is not None and channel is not None and channel is deliveries.copies:
            _forget(deliveries.outgoing)
            deliveries.outgoing = deliveries.copies = None

    def _delay_queue(self, seconds: float) -> tuple[str, int]:
        """The largest delay queue that is not too long, and its milliseconds."""
        power = max(min(int(seconds * 1000).bit_length() - 1, _LONGEST), _SHORTEST)
        stem = self._queue
        if len(stem.encode()) > _LONGEST_STEM:
            stem = sha256(stem.encode()).hexdigest()
        return f"pgreaper.later.{stem}.{2**power}", 2**power

    async def _declare(self, deliveries: _Deliveries, name: str, milliseconds: int) -> None:
        """Make a delay queue, or say that it is needed.  It lives for as long as something can wait in it."""
        assert deliveries.outgoing is not None  # noqa: S101  for the type checker: it has the channel for copies
        # The broker closes the channel of a queue that it refuses; the copies of other moves are on another one.
        channel = await deliveries.outgoing.channel(publisher_confirms=False)
        await channel.declare_queue(
            name,
            durable=True,
            arguments={
                # Of the kinds of queue the one whose dead-lettering waits for the confirm of the other queue.
                "x-queue-type": "quorum",
                "x-dead-letter-strategy": "at-least-once",
                "x-overflow": "reject-publish",
                "x-message-ttl": milliseconds,
                "x-dead-letter-exchange": "",
                "x-dead-letter-routing-key": self._queue,
                # Longer than a message that comes just before the next declaration can wait.
                "x-expires": 3 * milliseconds + 3_600_000,
            },
        )
        await channel.close()

    def _drop(self) -> None:
        deliveries, self._deliveries = self._deliveries, None
        if deliveries is not None:
            for way in self._ways.values():
                way.declared = -1e9
            for move in deliveries.waiting:
                move.cancel()
            for connection in deliveries.connections():
                _forget(connection)

    async def _leave(self) -> None:
        deliveries = self._deliveries
        if deliveries is None:
            return
        for move in deliveries.waiting:
            move.cancel()
        if deliveries.moves:
            await asyncio.wait(deliveries.moves, timeout=2.0)
        self._deliveries = None
        await asyncio.gather(*map(_close, deliveries.connections()))


def _is_fresh(way: _Way, milliseconds: int, now: float) -> bool:
    """Whether a delay queue was declared so lately that it cannot have expired."""
    return now - way.declared <= min(milliseconds / 1000, 3600.0)


async def _tell(handle: _Handle, word: Any) -> None:
    """Say a word about a message.  If that cannot be said any more, the message comes again."""
    try:
        with _translated():
            async with asyncio.timeout(_ANSWER):
                await word
    except (AMQPError, OSError, RuntimeError) as error:
        handle.deliveries.lose(_named(error))


def _named_loss(error: BaseException | None) -> str:
    return _named(error, "NoSuchQueue") if isinstance(error, AMQPChannelError) else "ConnectionLost"


def _attempt(message: AbstractIncomingMessage) -> int:
    """Which delivery this is: quorum queues count, classic ones only tell a first one from a further one."""
    counted = message.headers.get("x-delivery-count")
    told = counted + 1 if isinstance(counted, int) else 1 + bool(message.redelivered)
    return _failures(message) + told


def _failures(message: AbstractIncomingMessage) -> int:
    failures = message.headers.get(_FAILURES)
    return failures if isinstance(failures, int) and failures > 0 else 0


def _copy(message: AbstractIncomingMessage, marks: Mapping[str, Any]) -> aio_pika.Message:
    """
    The same message, to be published by us.

    Without who published it (the broker refuses another's name), without its time to live, and without the broker's
    record of its deaths: each delay is one, and the broker drops what it takes for a circle.
    """
    headers = {name: value for name, value in message.headers.items() if not name.startswith(("x-death", "x-first-"))}
    for name in ("x-delivery-count", "x-last-death-reason", _IDENTITY):
        headers.pop(name, None)
    return aio_pika.Message(
        message.body,
        headers=headers | dict(marks),
        content_type=message.content_type,
        content_encoding=message.content_encoding,
        delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
        priority=message.priority,
        correlation_id=message.correlation_id,
        reply_to=message.reply_to,
        message_id=message.message_id,
        timestamp=message.timestamp,
        type=message.type,
        app_id=message.app_id,
    )

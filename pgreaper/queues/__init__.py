"""
Queues: where events go and where commands come from.

Owns what a queue is to the rest of pgreaper (:class:`Sink`, :class:`Source` and what passes through them) and
which module speaks to which URL.  Knows no broker and no database: a module of this package knows one broker, is
imported only when its scheme is used, and is the only one that imports that broker's library, an extra of the
distribution.

A module ``m`` has ``open_sink(url)`` or ``open_source(url, visibility=seconds)``, or both.  Neither connects: a
broker that is down is trouble of the first call, not of the start.  What can be known to be wrong without a
broker is InvalidInput at once.
"""

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Final, Protocol
from urllib.parse import parse_qsl, unquote

from pgreaper.errors import InvalidInput
from pgreaper.text import one_line, visible

# -- what passes through


@dataclass(frozen=True, slots=True)
class Message:
    """
    One event for a sink.

    ``body`` is JSON in UTF-8.  ``key`` is the hold's: what shares it stays in order.  ``identity`` is the
    idempotency key, the same on every redelivery.  ``headers`` are ``content-type`` and ``policy``.
    """

    body: bytes = field(repr=False)
    key: str
    identity: str
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Refusal:
    """
    The answer to one event that was not taken.

    ``error_class`` is a name such as ``Unroutable``, ``HTTP 422`` or ``TooLarge``, never a text of the broker's.
    ``transient``: try this event again, at the earliest after ``retry_after`` seconds; if not, it will never be
    taken.
    """

    error_class: str
    transient: bool
    retry_after: float | None = None


@dataclass(frozen=True, slots=True)
class Sent:
    """
    What became of the messages that were given to :meth:`Sink.send`, by their positions.

    ``trouble`` is the error class of the broker's or the network's trouble.  Positions that are neither confirmed
    nor refused are unconfirmed: they may have arrived, and must be sent again.
    """

    confirmed: frozenset[int]
    refused: Mapping[int, Refusal]
    trouble: str | None = None


class Sink(Protocol):
    """Where events go.  Used by one thread at a time."""

    @property
    def name(self) -> str:
        """What may be shown: scheme, host, queue; no password."""
        ...

    def send(self, messages: Sequence[Message], *, timeout: float) -> Sent:
        """
        Send, and wait for the broker's answers for at most ``timeout`` seconds.

        Messages with equal keys arrive in their order: after one that is neither confirmed nor refused for good, no
        later one of its key is confirmed.  Trouble is told, not raised, and the next call connects anew.

        Without messages it tells whether the broker can be reached, knows us and has the place for them, as far as
        that can be asked without sending: over HTTP it cannot, and a queue of RabbitMQ is not looked for.

        Raises BrokenPipeError where nobody can ever read again: the reader of ``stdout:`` has gone.
        """
        ...

    def close(self) -> None:
        """End the connection; what was not confirmed stays unconfirmed.  May be called twice."""
        ...


@dataclass(frozen=True, slots=True)
class Received:
    """
    One command, as it was delivered.

    ``attempt`` counts deliveries from 1, as far as the broker tells.  ``handle`` is the source's own.  ``identity`` is
    equal for two deliveries of one message that was put off, and for no others; where the broker has no such thing it
    holds as long as this object does.
    """

    body: bytes = field(repr=False)
    attempt: int
    handle: object = field(repr=False)
    identity: object = field(default_factory=object, repr=False)


class Trouble(Exception):
    """
    The broker cannot be reached or does not answer as it should: wait a little, then call again.

    ``error_class`` is a name, never a text of the broker's.  ``queue`` is the queue that it is about, if that is not
    the one that is read.  ``aside``: what is read goes on, so call again at once; what was to go to ``queue`` waits.
    """

    def __init__(self, error_class: str, *, queue: str | None = None, aside: bool = False) -> None:
        super().__init__(error_class)
        self.error_class = error_class
        self.queue = queue
        self.aside = aside


class Source(Protocol):
    """
    Where commands come from.  Used by one thread at a time.

    What was received and neither acknowledged, put off nor rejected comes again, from the broker, after a crash.
    A message whose connection is gone cannot be acknowledged any more: it comes again, and telling so is nobody's
    error, so :meth:`done`, :meth:`later`, :meth:`put_off`, :meth:`reject` and :meth:`keep` pass over it.  All of them
    raise Trouble when the broker does not take what they say; the messages come again then.
    """

    @property
    def name(self) -> str:
        """What may be shown: scheme, host, queue; no password."""
        ...

    @property
    def ended(self) -> bool:
        """Whether nothing will ever come any more, put-off messages included: ``stdin:`` at its end."""
        ...

    @property
    def lost(self) -> Sequence[Received]:
        """What :meth:`close` would lose, because nobody else has it: only ``stdin:`` loses anything."""
        ...

    def receive(self, limit: int, *, wait: float) -> Sequence[Received]:
        """At most ``limit`` messages, as soon as there is one; none after ``wait`` seconds.  Raises Trouble."""
        ...

    def done(self, messages: Sequence[Received]) -> None:
        """Acknowledge: their transition is committed."""
        ...

    def later(self, message: Received, *, seconds: float) -> None:
        """Deliver this one again within so many seconds, and not before if it can be helped."""
        ...

    def put_off(self, messages: Sequence[tuple[Received, float]]) -> None:
        """:meth:`later` for many, each with its seconds, in as few words to the broker as that takes."""
        ...

    def reject(self, message: Received, *, reason: str) -> None:
        """
        This delivery failed for good: the queue's own dead-letter path, after its budget.

        ``reason`` is a name such as ``Malformed``; it goes with the message where the queue has a place for it.
        """
        ...

    def keep(self, messages: Sequence[Received], *, seconds: float) -> None:
        """These are still worked on: nobody else gets them for so many seconds from now."""
        ...

    def close(self) -> None:
        """End the connection; what was not acknowledged comes again, at once.  May be called twice."""
        ...


# -- which module speaks to which URL


@dataclass(frozen=True, slots=True, repr=False)
class Url:
    """
    The address of a queue, taken apart.  Its text and its password are never shown.

    ``host`` and ``path`` are as they were written, ``user`` and ``password`` decoded, ``path`` begins with a slash
    if there is one.  ``query`` are the options behind the question mark.  ``option`` is where the URL came from, for
    messages: ``--to``.
    """

    text: str
    option: str
    scheme: str
    user: str | None
    password: str | None
    host: str
    path: str
    query: Mapping[str, str]

    def __repr__(self) -> str:
        return f"Url({self.scheme}, {self.option})"

    def endpoint(self, default_port: int) -> tuple[str, int]:
        """
        The one host and its port.  Raises InvalidInput when there is no host, or the port is none.

        An IPv6 address loses its brackets.
        """
        found = re.fullmatch(r"(\[[0-9A-Fa-f:.%]+\]|[^:\[\]]+)(?::(\d*))?", self.host)
        port = int(found[2] or default_port) if found and len(found[2] or "") <= 5 else 0
        if not found or not 0 < port < 65536:
            raise self.refused("names no host" if not self.host else "has a host or a port that is none", hint=ESCAPES)
        return found[1].strip("[]"), port

    def options(self, *known: str) -> Mapping[str, str]:
        """The options behind the question mark.  Raises InvalidInput when there is one that nobody reads."""
        for name in self.query:
            if name not in known:
                near = get_close_matches(name, known, 1)
                known_ones = ", ".join(known) or "none"
                hint = f"Did you mean {near[0]}?" if near else f"{self.scheme}: has {known_ones}."
                raise self.refused(f"has an option {visible(name)} that does not exist", hint=hint)
        return self.query

    def refused(self, what: str, *, hint: str) -> InvalidInput:
        """The error for a URL that cannot be used: ``the URL of --to names no host``."""
        return InvalidInput(f"the URL of {self.option} {what}", hint=hint)


ESCAPES: Final = (
    "In the user or the password of a URL, write @ as %40, / as %2F, : as %3A, # as %23, ? as %3F and % as %25."
)


@dataclass(frozen=True, slots=True)
class _Way:
    module: str
    extra: str | None = None
    sink: bool = False
    source: bool = False


_WAYS: Final = {
    "stdout": _Way("lines", sink=True),
    "stdin": _Way("lines", source=True),
    "http": _Way("http", "http", sink=True),
    "https": _Way("http", "http", sink=True),
    "amqp": _Way("amqp", "rabbitmq", sink=True, source=True),
    "amqps": _Way("amqp", "rabbitmq", sink=True, source=True),
    "sqs": _Way("sqs", "sqs", sink=True, source=True),
    "kafka": _Way("kafka", "kafka", sink=True, source=True),
}
# What an extra brings: if one of these is missing, the extra is; if another module is, this one is broken.
_BROUGHT: Final = {"http": "httpx", "rabbitmq": "aio_pika", "sqs": "boto3", "kafka": "confluent_kafka"}
# https://sqs.eu-west-1.amazonaws.com/123456789012/name, its older forms, FIPS, China, and private endpoints.
_AWS_QUEUE: Final = re.compile(
    r"(?:[\w-]+\.)?(?:sqs(?:-fips)?\.[\w-]+|[\w-]+\.queue|queue)(?:\.vpce)?\.amazonaws\.com(?:\.cn)?(?::\d+)?",
    re.IGNORECASE,
)


def sink(url: str, *, option: str = "--to") -> Sink:
    """
    The sink that a URL names; nothing is connected yet.

    Raises InvalidInput, without repeating the URL, when it names none, or the extra is not installed or broken.
    """
    parsed = parse(url, option, "sink")
    way = _way(parsed, "sink")
    if not way.sink:
        raise parsed.refused(f"names something to read from, {parsed.scheme}:", hint=_begins(option, "sink"))
    found: Sink = _module(parsed, way).open_sink(parsed)
    return found


def source(url: str, *, visibility: float = 60.0, option: str = "--from") -> Source:
    """
    The source that a URL names; nothing is connected yet.

    ``visibility`` is for how many seconds a received message is nobody else's, until :meth:`Source.keep` says
    otherwise, where the broker counts seconds (SQS).  Raises InvalidInput as :func:`sink` does.
    """
    parsed = parse(url, option, "source")
    way = _way(parsed, "source")
    if not way.source:
        raise parsed.refused(f"names something to write to, {parsed.scheme}:", hint=_begins(option, "source"))
    found: Source = _module(parsed, way).open_source(parsed, visibility=visibility)
    return found


def parse(url: str, option: str, role: str | None = None) -> Url:
    """
    Take a URL apart.  Raises InvalidInput, without repeating it, when it cannot be one.

    ``role``, ``sink`` or ``source``, is what the URL is wanted for: the hint names those only.
    """
    scheme, colon, rest = url.strip().partition(":")
    scheme = scheme.lower()
    if not colon or not re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme):
        raise InvalidInput(f"the text of {option} is no URL", hint=_begins(option, role))
    whole = f"{scheme}:{rest}"
    before, _, query = rest.partition("?")
    authority, slash, path = before.removeprefix("//").partition("/")
    credentials, at, host = authority.rpartition("@")
    # Of a password that was cut in two, the rest would be shown as a host or as an option's name.
    cut = "@" in credentials or (scheme not in ("http", "https") and "@" in path + query)
    if cut or "#" in rest or any(c.isspace() or not c.isprintable() for c in rest):
        raise InvalidInput(f"the URL of {option} has a character that must be escaped", hint=ESCAPES)
    user, has_password, password = credentials.partition(":")
    pairs = parse_qsl(query, keep_blank_values=True)
    if scheme not in ("http", "https") and len(dict(pairs)) < len(pairs):
        raise InvalidInput(f"the URL of {option} has an option twice", hint="Give each one once.")
    return Url(
        text=whole,
        option=option,
        scheme=scheme,
        user=unquote(user) if at else None,
        password=unquote(password) if has_password else None,
        host=host,
        path=slash + path,
        query=dict(pairs),
    )


def _way(url: Url, role: str | None = None) -> _Way:
    way = _WAYS.get(url.scheme)
    if way is None:
        near = get_close_matches(url.scheme, _schemes(role), 1)
        hint = f"Did you mean {near[0]}:?" if near else _begins(url.option, role)
        raise url.refused(f"begins with {visible(url.scheme)}:, which is no queue that pgreaper knows", hint=hint)
    if url.scheme in ("http", "https") and _AWS_QUEUE.fullmatch(url.host):
        return _WAYS["sqs"]
    return way


def _schemes(role: str | None) -> list[str]:
    return [scheme for scheme, way in _WAYS.items() if role is None or getattr(way, role)]


def _begins(option: str, role: str | None = None) -> str:
    *most, last = [f"{scheme}:" if scheme.startswith("std") else f"{scheme}://" for scheme in _schemes(role)]
    return f"{option} begins with {', '.join(most)} or {last}."


def _module(url: Url, way: _Way) -> Any:
    try:
        return importlib.import_module(f"{__name__}.{way.module}")
    except ImportError as error:
        missing = error.name or ""
        if way.extra is None or missing.partition(".")[0] == __name__.partition(".")[0]:
            raise
        brought = _BROUGHT[way.extra]
        if isinstance(error, ModuleNotFoundError) and missing.partition(".")[0] == brought:
            raise InvalidInput(
                f"{url.scheme}: needs the extra {way.extra}, which is not installed: there is no module"
                f" {one_line(missing)}",
                hint=f"pip install 'postgres-reaper[{way.extra}]'",
            ) from None
        raise InvalidInput(
            f"{url.scheme}: the package {brought} of the extra {way.extra} is broken: {one_line(str(error))}",
            hint=f"pip install --force-reinstall 'postgres-reaper[{way.extra}]'",
        ) from None

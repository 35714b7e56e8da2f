"""
HTTP: ``https://`` and ``http://``, by way of httpx.

One POST an event, with the idempotency key as a header, a few at once over connections that are kept.  The answer's
status is the answer: of its body no more is read than keeps the connection, and no redirect is followed, since
that would send the event where nobody said it should go.  Certificates are verified, always.

An endpoint's trouble and an event's are told apart by the others of the call.  An event that gets no answer while
others do is refused, and so is one that is sent elsewhere or to log in while others are taken.  When none is, it is
the endpoint's trouble, and no event is charged.
"""

import asyncio
import email.utils
import logging
import math
import ssl
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from socket import gaierror
from typing import Final
from urllib.parse import quote

import httpx

from pgreaper import __version__
from pgreaper.queues import ESCAPES, Message, Refusal, Sent, Url
from pgreaper.queues.loop import Loop
from pgreaper.queues.order import by_key

# What it logs repeats the whole URL, and a webhook's path or query is often its password.
logging.getLogger("httpx").setLevel(logging.WARNING)

# So many requests are under way at once: enough to hide a round trip, few for one endpoint.
_AT_ONCE: Final = 8
_CONNECT: Final = 10.0
# Seconds for one answer, and the part of the call's time that one may take.
_ANSWER: Final = 10.0
_SHARE: Final = 0.8
# An answer's body is read for the sake of the connection, which can be used again then; a larger one is not.
_BODY: Final = 65536
_BODY_SECONDS: Final = 1.0
# Say that again, later; so does every status from 500.
_TRANSIENT: Final = frozenset({408, 425, 429})
# Not now, whichever event: no use in going on.
_OVERLOADED: Final = frozenset({429, 503})
# Not like this, whichever event: who are you, not with POST, a proxy wants to know you.  So does every redirect.
_OF_THE_ENDPOINT: Final = frozenset({401, 405, 407})
_LONGEST_RETRY_AFTER: Final = 86400.0


def open_sink(url: Url) -> "HttpSink":
    """
    The URL is the endpoint's own, options included; a user and a password go as basic authentication.

    Raises InvalidInput.
    """
    url.endpoint(443 if url.scheme == "https" else 80)
    try:
        return HttpSink(url)
    except httpx.InvalidURL:
        raise url.refused("cannot be asked for anything", hint=ESCAPES) from None


class HttpSink:
    """Posts to one endpoint."""

    def __init__(self, url: Url) -> None:
        # Neither path nor query: they are what a webhook is kept secret with.
        self.name = f"{url.scheme}://{url.host}"
        authority = url.text.partition("//")[2].partition("/")[0].partition("?")[0]
        self._endpoint = httpx.URL(url.text.replace(authority, url.host, 1))
        self._auth = (url.user, url.password or "") if url.user is not None else None
        self._loop = Loop("http-sink")
        self._client: httpx.AsyncClient | None = None

    def send(self, messages: Sequence[Message], *, timeout: float) -> Sent:
        """Post each; see :class:`pgreaper.queues.Sink`.  ``timeout`` is for all of them together."""
        batch = _Batch(messages)
        try:
            self._loop.run(self._send(batch, timeout), timeout=timeout)
        except TimeoutError:
            batch.trouble = batch.trouble or "Timeout"
        return batch.sent()

    def close(self) -> None:
        """End the connections."""
        client, self._client = self._client, None
        with suppress(TimeoutError):
            if client is not None:
                self._loop.run(client.aclose(), timeout=2.0)
        self._loop.close()

    async def _send(self, batch: "_Batch", timeout: float) -> None:
        if self._client is None:
            self._client = httpx.AsyncClient(
                auth=self._auth,
                headers={"User-Agent": f"pgreaper/{__version__}"},
                follow_redirects=False,
                limits=httpx.Limits(max_connections=_AT_ONCE, max_keepalive_connections=_AT_ONCE),
                timeout=None,  # noqa: S113  asyncio counts: httpx would count each piece of an answer anew
                verify=ssl.create_default_context(),
            )
        queues = iter(by_key(batch.messages))
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout), asyncio.TaskGroup() as tasks:
                for _ in range(_AT_ONCE):
                    tasks.create_task(self._work(self._client, batch, queues, min(_ANSWER, _SHARE * timeout)))

    async def _work(
        self, client: httpx.AsyncClient, batch: "_Batch", queues: Iterator[Sequence[int]], seconds: float
    ) -> None:
        """Post the events of one key after the other, then those of the next key that nobody has begun."""
        for positions in queues:
            for position in positions:
                if batch.trouble or (batch.doubtful and not batch.answered):
                    return
                await self._post(client, batch, position, seconds)
                if position not in batch.confirmed and not batch.is_refused_for_good(position):
                    break

    async def _post(self, client: httpx.AsyncClient, batch: "_Batch", position: int, seconds: float) -> None:
        message = batch.messages[position]
        headers = {
            "Content-Type": message.headers.get("content-type", "application/json"),
            "Idempotency-Key": message.identity,
            "Pgreaper-Policy": quote(message.headers.get("policy", "")),
        }
        try:
            async with asyncio.timeout(seconds):
                request = client.build_request("POST", self._endpoint, content=message.body, headers=headers)
                response = await client.send(request, stream=True)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError) as error:
            batch.trouble = batch.trouble or _unreachable(error)
        except (TimeoutError, httpx.TimeoutException):
            batch.doubtful[position] = Refusal("Timeout", transient=True)
        except (httpx.NetworkError, httpx.ProtocolError):
            batch.doubtful[position] = Refusal("ConnectionLost", transient=True)
        except httpx.HTTPError as error:
            batch.doubtful[position] = Refusal(type(error).__name__, transient=True)
        else:
            batch.note(position, response)
            await _skim(response)


class _Batch:
    """The messages of one call, and what has become of them."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self.messages = messages
        self.confirmed: set[int] = set()
        self.refused: dict[int, Refusal] = {}
        # Whose fault it is depends on what becomes of the others.
        self.doubtful: dict[int, Refusal] = {}
        self.answered = False
        self.trouble: str | None = None

    def note(self, position: int, response: httpx.Response) -> None:
        """What a status says."""
        status = response.status_code
        name = f"HTTP {status}"
        if 200 <= status < 300:
            self.confirmed.add(position)
        elif status < 400 or status in _OF_THE_ENDPOINT:
            self.doubtful[position] = Refusal(name, transient=False)
            return
        elif status >= 500 or status in _TRANSIENT:
            retry_after = _retry_after(response.headers.get("Retry-After"))
            self.refused[position] = Refusal(name, transient=True, retry_after=retry_after)
            if status in _OVERLOADED:
                self.trouble = self.trouble or name
        else:
            self.refused[position] = Refusal(name, transient=False)
        self.answered = True

    def is_refused_for_good(self, position: int) -> bool:
        refusal = self.refused.get(position)
        return refusal is not None and not refusal.transient

    def sent(self) -> Sent:
        trouble = self.trouble
        for position, refusal in self.doubtful.items():
            if self.answered if refusal.transient else self.confirmed:
                self.refused[position] = refusal
            else:
                trouble = trouble or refusal.error_class
        if not (trouble or self.confirmed or self.refused) and self.messages:
            trouble = "Timeout"
        return Sent(frozenset(self.confirmed), dict(self.refused), trouble)


def _unreachable(error: httpx.HTTPError) -> str:
    """A name for why there is no connection; the library keeps the reason somewhere below."""
    found: BaseException | None = error
    while found is not None:
        for kind, name in (
            (ssl.SSLError, "TlsError"),
            (gaierror, "HostUnknown"),
            (ConnectionRefusedError, "ConnectionRefused"),
            ((TimeoutError, httpx.ConnectTimeout), "Timeout"),
            (httpx.ProxyError, "ProxyError"),
        ):
            if isinstance(found, kind):
                return name
        found = found.__cause__ or found.__context__
    return "Unreachable"


def _retry_after(text: str | None) -> float | None:
    """Seconds, from a number of them or from a date; None when it is neither."""
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            moment = email.utils.parsedate_to_datetime(text)
        except ValueError:
            return None
        seconds = (moment.replace(tzinfo=moment.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
    return None if math.isnan(seconds) else min(max(seconds, 0.0), _LONGEST_RETRY_AFTER)


async def _skim(response: httpx.Response) -> None:
    """Read a short body to its end; with a long or a slow one, the connection is closed."""
    with suppress(httpx.HTTPError, TimeoutError):
        async with asyncio.timeout(_BODY_SECONDS):
            if int(response.headers.get("Content-Length", "0") or 0) <= _BODY:
                size = 0
                async for part in response.aiter_raw():
                    size += len(part)
                    if size > _BODY:
                        break
    await response.aclose()

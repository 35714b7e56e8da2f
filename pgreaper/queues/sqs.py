"""
Amazon SQS: ``sqs://QUEUE?region=…&endpoint=…``, or the queue's own ``https://sqs.<region>.amazonaws.com/…``.

Owns the calls to SQS, ten messages a call and several calls at once, what its error codes mean, and how long a
message stays invisible.  Credentials come from where boto3 finds them; a URL has no place for them.

A FIFO queue gets the hold's key as the message group and the identity as the deduplication id; where SQS would not
take one of these, a digest of it.  A standard queue keeps no order, and says so itself.
"""

import heapq
import itertools
import json
import math
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, Final, TypeVar

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    MetadataRetrievalError,
    ProfileNotFound,
)
from botocore.parsers import ResponseParserError

from pgreaper.errors import InvalidInput
from pgreaper.queues import Message, Received, Refusal, Sent, Trouble, Url
from pgreaper.queues.order import waves

_R = TypeVar("_R")

# SQS's own limits: messages a call, bytes a message and a call, seconds a message stays invisible in all, seconds
# that a call may wait for messages.
_BATCH: Final = 10
_MOST_BYTES: Final = 1024 * 1024
_LONGEST_INVISIBLE: Final = 12 * 3600
_LONGEST_WAIT: Final = 20
# So many calls are under way at once.
_AT_ONCE: Final = 8
# A call is given up after so many seconds, the longest wait included.
_CONNECT_WITHIN: Final = 5
_ANSWER_WITHIN: Final = _LONGEST_WAIT + 10
# SQS counts whole seconds.  What must come again within the next one is kept here, invisible to others for so long.
_SOON: Final = 1.0
_SOON_INVISIBLE: Final = 30
# A rejected message of a queue without a redrive policy comes again after 2^attempt seconds, at most so many.
_LONGEST_REJECTION: Final = 900

_QUEUE_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,80}|(?=.{1,80}$)[A-Za-z0-9_-]+\.fifo")
# A message group, or a deduplication id.
_ID: Final = re.compile(r"[!-~]{1,128}")
_REGION: Final = re.compile(r"(?:sqs(?:-fips)?\.)?([a-z]{2,}(?:-[a-z]+)+-\d+)\.", re.IGNORECASE)
# What XML 1.0 has no room for; in JSON each of them can be written as an escape, and in a name percent-encoded.
_UNSENDABLE: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")

# What is wrong with this one message, whoever sends it.
_TOO_LONG: Final = frozenset({"BatchRequestTooLong", "MessageTooLong"})
_OF_THE_MESSAGE: Final = frozenset({"InvalidMessageContents", "InvalidParameterValue", "InvalidAttributeValue"})
# The message is not ours any more, or not for longer than it is: it comes again.
_NOT_OURS: Final = frozenset({"ReceiptHandleIsInvalid", "MessageNotInflight", "InvalidParameterValue"})
_NO_QUEUE: Final = frozenset({"QueueDoesNotExist", "NonExistentQueue"})

_CREDENTIALS: Final = (
    "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or AWS_PROFILE, or run where AWS gives the machine, the pod or"
    " the task a role."
)


# -- the queue, for both directions


class _Failed(Trouble):
    """A call that SQS refused, or that did not come to an answer."""


class _Queue:
    """One queue: its session, its client, where it is and what is known of it.  Connects at the first call."""

    def __init__(self, url: Url) -> None:
        options = url.options("region", "endpoint")
        if url.user is not None:
            raise url.refused("has credentials in it, which SQS does not take from a URL", hint=_CREDENTIALS)
        self._endpoint = options.get("endpoint")
        if self._endpoint is not None and not re.match(r"https?://[^/@]+", self._endpoint):
            raise url.refused("has an endpoint that is no URL", hint="It begins with http:// or https://.")
        region = options.get("region")
        if url.scheme == "sqs":
            self.queue = url.host
            self._given: str | None = None
            if url.path.strip("/") or not _QUEUE_NAME.fullmatch(self.queue):
                raise url.refused(
                    "names no queue", hint="Write it as sqs://QUEUE?region=…, or take the queue's own https:// URL."
                )
        else:
            self.queue = url.path.rpartition("/")[2]
            self._given = url.text.partition("?")[0]
            if url.path.count("/") != 2 or not _QUEUE_NAME.fullmatch(self.queue):
                raise url.refused(
                    "names no queue of SQS", hint="It ends with /ACCOUNT/QUEUE, as `aws sqs get-queue-url` prints it."
                )
            if "vpce" in url.host or "fips" in url.host:
                self._endpoint = self._endpoint or f"{url.scheme}://{url.host}"
            within = _REGION.search(url.host + ".")
            region = region or (within[1] if within else "us-east-1")
        self.name = f"sqs://{self.queue}"
        self.is_fifo = self.queue.endswith(".fifo")
        self._found = self._given
        self._attributes: Mapping[str, str] | None = None
        self._client: Any = None
        self._pool = _Pool()
        self._session = _session(url, region)

    def call(self, operation: str, **arguments: Any) -> Mapping[str, Any]:
        """One call about this queue.  Raises _Failed."""
        try:
            if self._client is None:
                self._client = self._session.client(
                    "sqs",
                    endpoint_url=self._endpoint,
                    config=Config(
                        connect_timeout=_CONNECT_WITHIN,
                        read_timeout=_ANSWER_WITHIN,
                        max_pool_connections=_AT_ONCE,
                        # Who calls us knows when to try again, and wants to know what is going on.
                        retries={"total_max_attempts": 1, "mode": "standard"},
                        user_agent_extra="pgreaper",
                    ),
                )
            if self._found is None:
                self._found = str(self._client.get_queue_url(QueueName=self.queue)["QueueUrl"])
            answer: Mapping[str, Any] = getattr(self._client, operation)(QueueUrl=self._found, **arguments)
        except ClientError as error:
            failure = _Failed(_class_of(error))
        except (BotoCoreError, ResponseParserError) as error:
            failure = _Failed(type(error).__name__)
        else:
            return answer
        if failure.error_class in _NO_QUEUE:  # Another of its name may be made.
            self._found = self._given
            self._attributes = None
        raise failure

    def attribute(self, name: str) -> str | None:
        """One of the queue's attributes; None when it has none of that name, or the role may not read them."""
        if self._attributes is None:
            try:
                answer = self.call("get_queue_attributes", AttributeNames=["MaximumMessageSize", "RedrivePolicy"])
            except _Failed as failure:
                if not failure.error_class.startswith("AccessDenied"):
                    raise
                answer = {}
            self._attributes = answer.get("Attributes", {})
        return self._attributes.get(name)

    def start(self, operation: str, **arguments: Any) -> Future[Mapping[str, Any]]:
        """A call in the background.  One at most, and only when no other runs, may be the first of all."""
        return self._pool.submit(lambda: self.call(operation, **arguments))

    def ask(self, name: str) -> Future[str | None]:
        """:meth:`attribute` in the background."""
        return self._pool.submit(lambda: self.attribute(name))

    def each(self, operation: str, entries: Sequence[Mapping[str, Any]]) -> None:
        """
        Say something about many messages, ten a call; each has its ``ReceiptHandle``.

        Messages that are not ours any more are passed over.  Raises Trouble when SQS did not take the rest, after a
        second try, and not before everything was said.
        """
        left = list(entries)
        trouble: str | None = None
        for _ in range(2):
            trouble = None
            calls = []
            again: list[Mapping[str, Any]] = []
            for part in _parts(left, _BATCH):
                named = [{"Id": str(n), **entry} for n, entry in enumerate(part)]
                calls.append((part, self.start(operation, Entries=named)))
            for part, call in calls:
                try:
                    failed = call.result().get("Failed", ())
                except _Failed as failure:
                    if failure.error_class not in _NOT_OURS:
                        trouble = failure.error_class
                        again += part
                    continue
                for entry in failed:
                    if (code := _tail(entry["Code"])) not in _NOT_OURS:
                        trouble = code
                        again.append(part[int(entry["Id"])])
            left = again
            if not left:
                return
        raise Trouble(trouble or "Unknown")

    def close(self) -> None:
        self._pool.close()
        if self._client is not None:
            self._client.close()
            self._client = None


class _Pool:
    """A few threads, started when they are needed.  They are daemons: a call that hangs does not keep the process."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = 0

    def submit(self, work: Callable[[], _R]) -> Future[_R]:
        future: Future[_R] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001  raised again where the result is asked for
                future.set_exception(error)

        if self._threads < _AT_ONCE:
            self._threads += 1
            threading.Thread(target=self._serve, name=f"sqs-{self._threads}", daemon=True).start()
        self._work.put(run)
        return future

    def _serve(self) -> None:
        while (run := self._work.get()) is not None:
            run()

    def close(self) -> None:
        for _ in range(self._threads):
            self._work.put(None)
        self._threads = 0


def _session(url: Url, region: str | None) -> Any:
    """boto3's session; what it lacks and no waiting brings is said at once."""
    try:
        session = boto3.session.Session(region_name=region or None)
        region = session.region_name or os.environ.get("AWS_REGION")
        if region is None:
            raise url.refused(
                "names no AWS region, and nothing else does",
                hint="Add ?region=… to the URL, or set AWS_REGION.",
            )
        if session.region_name is None:
            session = boto3.session.Session(region_name=region)
    except ProfileNotFound:
        raise InvalidInput("AWS_PROFILE names a profile that does not exist", hint=_CREDENTIALS) from None
    try:
        credentials = session.get_credentials()
    except (CredentialRetrievalError, MetadataRetrievalError):
        return session  # There is somebody who gives them, who does not answer now.
    except BotoCoreError as error:
        raise InvalidInput(f"the AWS credentials cannot be used: {type(error).__name__}", hint=_CREDENTIALS) from None
    if credentials is None:
        raise InvalidInput("there are no AWS credentials", hint=_CREDENTIALS)
    return session


def _class_of(error: ClientError) -> str:
    code = str(error.response.get("Error", {}).get("Code", ""))
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return f"HTTP {status}" if not code or code.isdigit() else _tail(code)


def _tail(code: str) -> str:
    """``AWS.SimpleQueueService.NonExistentQueue`` without what stands before the last dot; a name, whatever it was."""
    tail = code.rpartition(".")[2]
    return tail if re.fullmatch(r"\w{1,60}", tail, re.ASCII) else "ClientError"


def _parts(entries: Sequence[Mapping[str, Any]], size: int) -> Iterator[Sequence[Mapping[str, Any]]]:
    for start in range(0, len(entries), size):
        yield entries[start : start + size]


# -- events out


@dataclass(slots=True)
class _Entry:
    """A message on its way: its position in the caller's list, as SQS wants it, and how much of a call it takes."""

    position: int
    key: str
    entry: dict[str, Any]
    size: int


class SqsSink:
    """
    No call has two messages of one key, which SQS may take and refuse one by one; the next one of a key goes out
    when the last one is known to be there.
    """

    def __init__(self, url: Url) -> None:
        self._queue = _Queue(url)
        self.name = self._queue.name
        # Calls that were not waited for any longer: what they carry may still arrive.
        self._late: set[Future[Any]] = set()

    def send(self, messages: Sequence[Message], *, timeout: float) -> Sent:
        """Send, and wait for the word on each; see :class:`pgreaper.queues.Sink`."""
        until = time.monotonic() + timeout
        state = _State(messages)
        self._late = set(wait(self._late, timeout=timeout).not_done)
        if self._late:
            state.trouble = "Timeout"
            return state.sent()
        asked = self._queue.ask("MaximumMessageSize")
        try:
            most = int(asked.result(max(until - time.monotonic(), 0)) or _MOST_BYTES)
        except TimeoutError:
            self._late.add(asked)
            state.trouble = "Timeout"
            return state.sent()
        except _Failed as failure:
            state.trouble = failure.error_class
            return state.sent()
        for wave in waves(messages):
            entries = []
            for position in wave:
                entry = self._entry(position, messages[position])
                if entry.size > most:
                    state.refused[position] = Refusal("TooLarge", transient=False)
                elif entry.key not in state.waiting:
                    entries.append(entry)
            self._wave(entries, state, until)
            if state.trouble is not None:
                break
            state.waiting |= {entry.key for entry in entries if not state.is_over(entry.position)}
        return state.sent()

    def _wave(self, entries: Sequence[_Entry], state: "_State", until: float) -> None:
        """Send these, several calls at once, and note the answers; after trouble, begin nothing more."""
        todo: list[Sequence[_Entry]] = list(reversed(list(_calls(entries))))
        running: dict[Future[Mapping[str, Any]], Sequence[_Entry]] = {}
        while todo or running:
            while todo and len(running) < _AT_ONCE and state.trouble is None and time.monotonic() < until:
                part = todo.pop()
                named = [{"Id": str(n), **one.entry} for n, one in enumerate(part)]
                running[self._queue.start("send_message_batch", Entries=named)] = part
            answered = wait(running, timeout=max(until - time.monotonic(), 0), return_when=FIRST_COMPLETED).done
            if not answered:
                if state.trouble is None:
                    state.trouble = "Timeout"
                for call in running:
                    if not call.cancel():
                        self._late.add(call)
                return
            for call in answered:
                part = running.pop(call)
                todo += self._note(call, part, state)
            if state.trouble is not None:
                todo.clear()

    @staticmethod
    def _note(call: Future[Mapping[str, Any]], part: Sequence[_Entry], state: "_State") -> list[Sequence[_Entry]]:
        """Note one answer.  What must be tried one by one is returned."""
        try:
            answer = call.result()
        except _Failed as failure:
            if failure.error_class not in _TOO_LONG | _OF_THE_MESSAGE:
                state.trouble = failure.error_class
                return []
            if len(part) > 1:
                return [[one] for one in part]
            state.refuse(part[0], failure.error_class)
            return []
        state.confirmed.update(part[int(entry["Id"])].position for entry in answer.get("Successful", ()))
        for entry in answer.get("Failed", ()):
            one, code = part[int(entry["Id"])], _tail(entry["Code"])
            if code in _TOO_LONG | _OF_THE_MESSAGE:
                state.refuse(one, code)
            elif entry.get("SenderFault") and not _is_of_all(code):
                state.refused[one.position] = Refusal(code, transient=True)
            else:
                state.trouble = code
        return []

    def _entry(self, position: int, message: Message) -> _Entry:
        body = _UNSENDABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", message.body.decode())
        attributes = {
            name: {"DataType": "String", "StringValue": _UNSENDABLE.sub(_percent, value)}
            for name, value in {**message.headers, "idempotency-key": message.identity}.items()
            if value
        }
        entry: dict[str, Any] = {"MessageBody": body, "MessageAttributes": attributes}
        if self._queue.is_fifo:
            entry |= {"MessageGroupId": _id(message.key), "MessageDeduplicationId": _id(message.identity)}
        size = len(body.encode()) + sum(
            len(name) + len("String") + len(value["StringValue"].encode()) for name, value in attributes.items()
        )
        return _Entry(position, message.key, entry, size)

    def close(self) -> None:
        """End the connections."""
        self._queue.close()


class _State:
    """What is known about the messages of one :meth:`SqsSink.send`."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self.confirmed: set[int] = set()
        self.refused: dict[int, Refusal] = {}
        self.trouble: str | None = None
        # Keys of which one is to be tried again: no later one goes out before it.
        self.waiting: set[str] = set()
        self._messages = messages

    def refuse(self, one: _Entry, error_class: str) -> None:
        name = "TooLarge" if error_class in _TOO_LONG else error_class
        self.refused[one.position] = Refusal(name, transient=False)

    def is_over(self, position: int) -> bool:
        """Whether this one is there, or will never be taken."""
        refusal = self.refused.get(position)
        return position in self.confirmed or (refusal is not None and not refusal.transient)

    def sent(self) -> Sent:
        return Sent(frozenset(self.confirmed), dict(self.refused), self.trouble)


def _calls(entries: Iterable[_Entry]) -> Iterator[list[_Entry]]:
    """Fill one call after the other, as far as number and bytes allow."""
    part: list[_Entry] = []
    size = 0
    for one in entries:
        if part and (len(part) == _BATCH or size + one.size > _MOST_BYTES):
            yield part
            part, size = [], 0
        part.append(one)
        size += one.size
    if part:
        yield part


def _is_of_all(code: str) -> bool:
    """Whether a refusal speaks of the sender or the queue, and not of the message."""
    return code.startswith(("Kms", "KMS", "AccessDenied")) or "Throttl" in code or code in {"OverLimit", *_NO_QUEUE}


def _id(text: str) -> str:
    return text if _ID.fullmatch(text) else f"sha256:{sha256(text.encode()).hexdigest()}"


def _percent(found: "re.Match[str]") -> str:
    return "".join(f"%{byte:02X}" for byte in found[0].encode())


# -- commands in


@dataclass(frozen=True, slots=True)
class _Handle:
    """What proves to SQS that a message is ours, and when (monotonic) it was received at the earliest."""

    receipt: str
    since: float


class SqsSource:
    """
    SQS counts deliveries and moves a message to its dead-letter queue when the redrive policy's budget is spent.

    Every time a message comes again counts, so does one that was put off; a deadline further away than twelve hours
    costs one delivery for each twelve hours.  Without a redrive policy a rejected message comes again, at longer and
    longer intervals, until the queue's retention period ends.
    """

    ended = False
    lost: Sequence[Received] = ()

    def __init__(self, url: Url, visibility: float) -> None:
        self._queue = _Queue(url)
        self.name = self._queue.name
        self._visibility = min(max(math.ceil(visibility), 1), _LONGEST_INVISIBLE)
        # What was received and is not yet settled, by receipt.
        self._open: dict[str, _Handle] = {}
        # What comes again within the second: when (monotonic), a number that makes it unique, the message.
        self._soon: list[tuple[float, int, Received]] = []
        self._numbers = itertools.count()

    def receive(self, limit: int, *, wait: float) -> Sequence[Received]:
        """Messages, as soon as there is one; see :class:`pgreaper.queues.Source`."""
        until = time.monotonic() + wait
        found: list[Received] = []
        while True:
            now = time.monotonic()
            while self._soon and self._soon[0][0] <= now and len(found) < limit:
                found.append(heapq.heappop(self._soon)[2])
            room = limit - len(found)
            if room <= 0:
                return found
            left = min(until, self._soon[0][0] if self._soon else until) - now
            found += self._fetch(room, 0 if found else min(max(int(left), 0), _LONGEST_WAIT))
            now = time.monotonic()
            if found or now >= until:
                return found
            # Less than the second that SQS can wait.
            if (pause := min(until, self._soon[0][0] if self._soon else until) - now) < 1:
                time.sleep(max(pause, 0))

    def _fetch(self, limit: int, seconds: int) -> list[Received]:
        """One call that waits, and if it came back full, as many as the limit has room for, at once."""
        found = self._messages(self._ask(min(limit, _BATCH), seconds), time.monotonic())
        while found and len(found) % _BATCH == 0 and len(found) < limit:
            since = time.monotonic()
            rest = limit - len(found)
            sizes = [min(rest - n * _BATCH, _BATCH) for n in range(min(-(-rest // _BATCH), _AT_ONCE))]
            calls = [self._queue.start("receive_message", **self._arguments(size, 0)) for size in sizes]
            more: list[Received] = []
            for call in calls:
                # What the others brought is not to be lost; trouble that lasts is met again.
                with suppress(_Failed):
                    more += self._messages(call.result(), since)
            found += more
            if len(more) < sum(sizes):
                break
        return found

    def _ask(self, size: int, seconds: int) -> Mapping[str, Any]:
        return self._queue.call("receive_message", **self._arguments(size, seconds))

    def _arguments(self, size: int, seconds: int) -> dict[str, Any]:
        return {
            "MaxNumberOfMessages": size,
            "WaitTimeSeconds": seconds,
            "VisibilityTimeout": self._visibility,
            "AttributeNames": ["ApproximateReceiveCount"],
        }

    def _messages(self, answer: Mapping[str, Any], since: float) -> list[Received]:
        found = []
        for message in answer.get("Messages", ()):
            handle = _Handle(message["ReceiptHandle"], since)
            attempt = int(message.get("Attributes", {}).get("ApproximateReceiveCount", 1))
            self._open[handle.receipt] = handle
            found.append(Received(message["Body"].encode(), max(attempt, 1), handle, message["MessageId"]))
        return found

    def done(self, messages: Sequence[Received]) -> None:
        """Delete these."""
        handles = self._settled(messages)
        self._queue.each("delete_message_batch", [{"ReceiptHandle": handle.receipt} for handle in handles])

    def later(self, message: Received, *, seconds: float) -> None:
        """Show this one again after so many seconds, rounded down, and after twelve hours at most."""
        self.put_off([(message, seconds)])

    def put_off(self, messages: Sequence[tuple[Received, float]]) -> None:
        """:meth:`later` for many, ten to a call."""
        shown: list[tuple[_Handle, float]] = []
        soon: list[tuple[Received, float]] = []
        for message, seconds in messages:
            if 0 < seconds < _SOON:
                # Not with fewer seconds than it has: SQS would show it to others while we wait.
                shown.append((_handle(message), max(_SOON_INVISIBLE, self._visibility)))
                soon.append((message, seconds))
            else:
                shown += [(handle, seconds) for handle in self._settled([message])]
        self._show(shown)
        for message, seconds in soon:
            again = replace(message, attempt=message.attempt + 1)
            heapq.heappush(self._soon, (time.monotonic() + seconds, next(self._numbers), again))

    def reject(self, message: Received, *, reason: str) -> None:
        """Show this one again at once, until the redrive policy's budget is spent; without one, later and later."""
        handles = self._settled([message])
        redrive = self._queue.attribute("RedrivePolicy")
        has_budget = redrive is not None and "deadLetterTargetArn" in json.loads(redrive)
        seconds = 0 if has_budget else min(2.0 ** min(message.attempt, 20), _LONGEST_REJECTION)
        self._show([(handle, seconds) for handle in handles])

    def keep(self, messages: Sequence[Received], *, seconds: float) -> None:
        """Hide these for so many seconds from now; twelve hours after they came, no longer."""
        self._show([(_handle(message), math.ceil(seconds)) for message in messages])

    def _show(self, handles: Sequence[tuple[_Handle, float]]) -> None:
        """Show these again after so many seconds each, rounded down; SQS refuses more than twelve hours in all."""
        now = time.monotonic()
        entries = [
            {
                "ReceiptHandle": handle.receipt,
                "VisibilityTimeout": int(max(min(seconds, _LONGEST_INVISIBLE - math.ceil(now - handle.since) - 1), 0)),
            }
            for handle, seconds in handles
        ]
        self._queue.each("change_message_visibility_batch", entries)

    def _settled(self, messages: Sequence[Received]) -> list[_Handle]:
        handles = [_handle(message) for message in messages]
        for handle in handles:
            self._open.pop(handle.receipt, None)
        return handles

    def close(self) -> None:
        """Show what is not settled to others, and end the connections."""
        handles = list(self._open.values())
        self._open.clear()
        self._soon.clear()
        if handles:
            with suppress(Trouble):
                self._show([(handle, 0) for handle in handles])
        self._queue.close()


def _handle(message: Received) -> _Handle:
    assert isinstance(message.handle, _Handle)  # noqa: S101
    return message.handle


def open_sink(url: Url) -> SqsSink:
    """Events to a queue.  Raises InvalidInput when the URL names none, or there is no region or no credential."""
    return SqsSink(url)


def open_source(url: Url, *, visibility: float) -> SqsSource:
    """Commands from a queue, each for ``visibility`` seconds.  Raises InvalidInput as :func:`open_sink` does."""
    return SqsSource(url, visibility)

"""
Kafka: ``kafka://host:9092[,host2:9092]/TOPIC``, for a source with ``?group=…`` and perhaps ``dead=…``.

Owns what goes to librdkafka and what its errors mean, which offsets are committed and when, and what is kept in
memory for later.  A name with a dot behind the question mark is a setting of librdkafka's, such as
``security.protocol=SASL_SSL``; those that the promises of this module rest on cannot be given.  A user and a
password in the URL are used for SASL, over TLS unless the URL says otherwise.
"""

import heapq
import itertools
import logging
import re
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka import Message as Record

from pgreaper.errors import InvalidInput
from pgreaper.queues import ESCAPES, Message, Received, Refusal, Sent, Trouble, Url
from pgreaper.queues.order import waves
from pgreaper.text import visible

_PORT: Final = 9092
_TOPIC: Final = re.compile(r"[A-Za-z0-9._-]{1,249}")
_SERVER: Final = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[\w.-]+)(?::\d{1,5})?", re.ASCII)
# librdkafka is asked in slices of so many seconds: between them Python sees signals.
_SLICE: Final = 0.2
# All brokers are gone for so many seconds: no use in waiting for answers.
_PATIENCE: Final = 3.0
# The first call of a source waits so many seconds for the group to give out its partitions.
_JOIN_WITHIN: Final = 10.0
_PROBE_WITHIN: Final = 1.0
_CLOSE_WITHIN: Final = 3.0
# A dead letter has so many seconds to arrive; one that did not is handed out again after some.
_BURY_WITHIN: Final = 10.0
_BURY_AGAIN: Final = 5.0
# So many messages of a partition wait in memory; beyond that the partition is paused until half of them are gone.
_MOST_WAITING: Final = 10_000

# librdkafka's own words would go to stderr; what they tell comes as errors too.
_SILENT: Final = logging.getLogger("pgreaper.queues.kafka")
_SILENT.setLevel(logging.CRITICAL + 1)

_COMMON: Final[dict[str, Any]] = {
    "client.id": "pgreaper",
    "reconnect.backoff.max.ms": 2000,
    "socket.keepalive.enable": True,
}
_WRITER: Final[dict[str, Any]] = {
    "linger.ms": 5,
    # The broker refuses a batch as a whole: a small topic limit is to be met by few messages at once.
    "batch.size": 65536,
    # As Java's clients do it, so that one key is in one partition whoever writes.
    "partitioner": "murmur2_random",
    "topic.metadata.propagation.max.ms": 5000,
}
_READER: Final[dict[str, Any]] = {
    # A new group begins with what is there.
    "auto.offset.reset": "earliest",
    "partition.assignment.strategy": "cooperative-sticky",
}
# What is promised rests on these.
_WRITER_RULES: Final = {"enable.idempotence": True, "acks": "all"}
_READER_RULES: Final = {"enable.auto.commit": False, "enable.auto.offset.store": False}
_OURS: Final = frozenset(
    {*_WRITER_RULES, *_READER_RULES, "group.id", "bootstrap.servers", "metadata.broker.list", "request.required.acks"}
)

# What is wrong with this one message, or with one of those in its batch.
_TOO_LARGE: Final = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE})
_OF_THE_MESSAGE: Final = _TOO_LARGE | {
    KafkaError.INVALID_RECORD,
    KafkaError.INVALID_TIMESTAMP,
    KafkaError.POLICY_VIOLATION,
}
# No waiting helps.
_HOPELESS: Final = frozenset({KafkaError._AUTHENTICATION, KafkaError._SSL, KafkaError._FATAL})  # noqa: SLF001


def _class_of(error: KafkaError) -> str:
    """``_ALL_BROKERS_DOWN`` as ``AllBrokersDown``."""
    return "TooLarge" if error.code() in _TOO_LARGE else error.name().title().replace("_", "")


def _of(exception: KafkaException) -> KafkaError:
    error = exception.args[0]
    return error if isinstance(error, KafkaError) else KafkaError(KafkaError._FAIL)  # noqa: SLF001


class _Address:
    """Where the brokers are, the topic, and the settings that the URL gives."""

    def __init__(self, url: Url, *known: str) -> None:
        settings = [name for name in url.query if "." in name]
        options = url.options(*known, *settings)
        servers = url.host.split(",")
        if not url.host or not all(_SERVER.fullmatch(server) for server in servers):
            raise url.refused("names no broker", hint=f"Write it as kafka://HOST:{_PORT}/TOPIC. {ESCAPES}")
        self.url = url
        self.topic = url.path.removeprefix("/")
        if not _TOPIC.fullmatch(self.topic) or self.topic in (".", ".."):
            raise url.refused("names no topic", hint=f"Write it as kafka://HOST:{_PORT}/TOPIC.")
        for name in settings:
            if name in _OURS or name.startswith("test."):
                raise url.refused(
                    f"has the setting {visible(name)}, which is not to be changed", hint="Leave it out of the URL."
                )
        self.name = f"kafka://{url.host}/{self.topic}"
        self._settings: dict[str, Any] = {
            "bootstrap.servers": ",".join(s if re.search(r":\d+$", s) else f"{s}:{_PORT}" for s in servers)
        }
        if url.user is not None:
            self._settings |= {
                "security.protocol": "SASL_SSL",
                "sasl.mechanism": "PLAIN",
                "sasl.username": url.user,
                "sasl.password": url.password or "",
            }
        self._settings |= {name: options[name] for name in settings}

    def settings(self, *more: dict[str, Any]) -> dict[str, Any]:
        """Settings of ours, then the URL's, then those that are not to be changed (the last of ``more``)."""
        *ours, rules = more
        whole = dict(_COMMON)
        for some in ours:
            whole |= some
        return whole | self._settings | rules | {"logger": _SILENT}

    def misfit(self, exception: KafkaException) -> InvalidInput:
        """The error for a setting that librdkafka does not take; its words may repeat a secret, so the name alone."""
        words = str(_of(exception).str())
        named = [name for name in self.url.query if "." in name and name in words]
        what = f"the setting {visible(named[0])}" if named else "one of the settings"
        return self.url.refused(
            f"has something that librdkafka does not take: {what}",
            hint="See librdkafka's CONFIGURATION.md for names and values.",
        )


# -- writing


@dataclass(frozen=True, slots=True)
class _Letter:
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, str | bytes | None]]


class _Writer:
    """
    Writes to one topic and waits for the broker's word on each message.

    The brokers drop what librdkafka sends twice.  A message that was given up goes with its producer: nothing of it is
    sent later, behind the caller's back.
    """

    def __init__(self, address: _Address, topic: str) -> None:
        self._address = address
        self._topic = topic
        self._producer: Producer | None = None
        self._down_since: float | None = None
        self._hopeless = False
        # What librdkafka has told since the last write began; and what of it the last write has met.
        self._heard: str | None = None
        self.trouble: str | None = None

    def open(self) -> Producer:
        """The producer; librdkafka connects by itself.  Raises InvalidInput for a setting that it does not take."""
        if self._producer is None:
            settings = self._address.settings(_WRITER, {**_WRITER_RULES, "error_cb": self._note_error})
            try:
                self._producer = Producer(settings)
            except KafkaException as error:
                raise self._address.misfit(error) from None
        return self._producer

    def _note_error(self, error: KafkaError) -> None:
        code = error.code()
        if code == KafkaError._ALL_BROKERS_DOWN:  # noqa: SLF001
            self._down_since = self._down_since or time.monotonic()
        self._hopeless |= error.fatal() or code in _HOPELESS
        # That one connection failed is the lesser word.
        if self._heard is None or code != KafkaError._TRANSPORT:  # noqa: SLF001
            self._heard = _class_of(error)

    def write(self, letters: Mapping[int, _Letter], *, until: float) -> dict[int, KafkaError | None]:
        """
        Write all at once, and return the answers that came: None when the brokers have it, or an error.

        ``until`` is monotonic.  Whatever had no answer by then is dropped, and may have arrived; :attr:`trouble` says
        why.
        """
        producer = self.open()
        self._forget()
        answers: dict[int, KafkaError | None] = {}
        dropping = False

        def note(position: int, error: KafkaError | None, _: Record) -> None:
            if dropping:
                return
            answers[position] = error
            if error is None:
                self._down_since = None

        for position, letter in letters.items():
            try:
                while not self._hand_over(producer, letter, partial(note, position)) and self._is_hopeful(until):
                    producer.poll(_SLICE)
            except KafkaException as error:
                answers[position] = _of(error)
            if not self._is_hopeful(until):
                break
        while len(answers) < len(letters) and self._is_hopeful(until):
            producer.poll(min(_SLICE, max(until - time.monotonic(), 0)))
        if len(answers) < len(letters) or self._hopeless:
            self.trouble = self._heard or "Timeout"
        if self.trouble or not all(answer is None or _is_of_the_message(answer) for answer in answers.values()):
            # With what librdkafka remembers of the topic: it would not ask again for minutes.
            dropping = True
            self.close()
        return answers

    def probe(self, *, until: float) -> str | None:
        """Ask the brokers for the topic; what the trouble is, if there is any.  ``until`` is monotonic."""
        producer = self.open()
        self._forget()
        about = None
        while about is None:
            try:
                about = producer.list_topics(self._topic, timeout=_PROBE_WITHIN).topics.get(self._topic)
            except KafkaException as error:
                code = _of(error).code()
                vague = code in (KafkaError._TRANSPORT, KafkaError._TIMED_OUT)  # noqa: SLF001
                producer.poll(0)  # Tells what was heard.
                if vague and self._is_hopeful(until):
                    continue
                self.close()
                return (self._heard if vague else None) or _class_of(_of(error))
            if about is None:
                return None
        if about.error is None:
            return None
        self.close()
        return _class_of(about.error)

    def _forget(self) -> None:
        self.trouble = self._heard = None

    def _hand_over(self, producer: Producer, letter: _Letter, note: Any) -> bool:
        try:
            producer.produce(
                self._topic, value=letter.value, key=letter.key, headers=list(letter.headers), on_delivery=note
            )
        except BufferError:
            return False  # Its queue is full, for the moment.
        producer.poll(0)
        return True

    def _is_hopeful(self, until: float) -> bool:
        now = time.monotonic()
        down = self._down_since is not None and now - self._down_since > _PATIENCE
        return now < until and not down and not self._hopeless

    def close(self) -> None:
        if self._producer is not None:
            with suppress(KafkaException):
                self._producer.purge()
                self._producer.poll(0)
            self._producer = None
        self._down_since = None
        self._hopeless = False


class KafkaSink:
    """
    Events to a topic; see :class:`pgreaper.queues.Sink`.

    A topic that does not exist, or that may not be written to, is trouble and refuses nothing: it is no event's fault.
    """

    def __init__(self, url: Url) -> None:
        address = _Address(url)
        self.name = address.name
        self._writer = _Writer(address, address.topic)
        self._writer.open()

    def send(self, messages: Sequence[Message], *, timeout: float) -> Sent:
        """Send, and wait for the word on each; see :class:`pgreaper.queues.Sink`."""
        until = time.monotonic() + timeout
        confirmed: set[int] = set()
        refused: dict[int, Refusal] = {}
        trouble = None if messages else self._writer.probe(until=until)
        for wave in waves(messages):
            answers = self._writer.write({n: _letter(messages[n]) for n in wave}, until=until)
            trouble = self._writer.trouble
            for position, answer in list(answers.items()):
                # Maybe it was only in bad company.
                if _is_of_the_message(answer) and len(wave) > 1:
                    del answers[position]
                    answers |= self._writer.write({position: _letter(messages[position])}, until=until)
                    trouble = trouble or self._writer.trouble
            for position, answer in answers.items():
                if answer is None:
                    confirmed.add(position)
                elif _is_of_the_message(answer):
                    refused[position] = Refusal(_class_of(answer), transient=False)
                else:
                    trouble = _class_of(answer)
            if trouble is not None:
                break
        return Sent(frozenset(confirmed), refused, trouble)

    def close(self) -> None:
        """Drop what had no answer."""
        self._writer.close()


def _is_of_the_message(answer: KafkaError | None) -> bool:
    return answer is not None and answer.code() in _OF_THE_MESSAGE


def _letter(message: Message) -> _Letter:
    headers = {**message.headers, "idempotency-key": message.identity}
    return _Letter(message.key.encode(), message.body, [(name, value.encode()) for name, value in headers.items()])


# -- reading


class _Partition:
    """A partition that is ours, and which of its messages are not finished yet."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.is_ours = True
        self.is_paused = False
        self.waiting = 0
        # Offsets in their order; the lowest one is where a successor of ours would have to begin.
        self.unfinished: OrderedDict[int, None] = OrderedDict()
        self.next: int | None = None
        # What the broker was told, as far as it took it.
        self.told: int | None = None

    def place(self) -> int | None:
        """The offset up to which everything is finished; None when nothing was received."""
        return next(iter(self.unfinished), self.next)


@dataclass(frozen=True, slots=True)
class _Handle:
    partition: _Partition
    record: Record
    offset: int


class KafkaSource:
    """
    One member of a consumer group.

    Kafka counts no deliveries, so the budget of a rejected message is one: it goes to the dead-letter topic, and is
    finished when that topic has it.  A message that was put off waits in memory and holds its partition's offset,
    though not the messages behind it: after a crash what came since is delivered again.

    The first :meth:`receive` may take longer than it was told, up to ten seconds: a group gives out its partitions when
    it has gathered, or when it is sure that a member is dead.
    """

    ended = False
    lost: Sequence[Received] = ()

    def __init__(self, url: Url) -> None:
        self._address = _Address(url, "group", "dead")
        self.name = self._address.name
        self._topic = self._address.topic
        self._group = url.query.get("group", "")
        if not self._group:
            raise url.refused(
                "names no consumer group",
                hint="Add ?group=NAME: those who read under one name share the messages.",
            )
        dead = url.query.get("dead", f"{self._topic}.dead")
        if not _TOPIC.fullmatch(dead) or dead == self._topic:
            raise url.refused("has a dead= that names no other topic", hint="Leave it out for TOPIC.dead.")
        self._graves = _Writer(self._address, dead)
        self._graves.open()
        self._partitions: dict[int, _Partition] = {}
        self._buffer: deque[_Handle] = deque()
        # What waits in memory: when (monotonic), a number that makes it unique, the message.
        self._waiting: list[tuple[float, int, Received]] = []
        self._numbers = itertools.count()
        self._trouble: str | None = None
        self._is_subscribed = self._has_joined = False
        self._consumer: Consumer | None = None
        self._open()

    def _open(self) -> Consumer:
        if self._consumer is None:
            rules = {
                **_READER_RULES,
                "group.id": self._group,
                "error_cb": self._note_error,
                "on_commit": self._note_commit,
            }
            try:
                self._consumer = Consumer(self._address.settings(_READER, rules))
            except KafkaException as error:
                raise self._address.misfit(error) from None
            self._is_subscribed = self._has_joined = False
        return self._consumer

    def _subscribed(self) -> Consumer:
        """The consumer, which asks for partitions from here on: whoever does so must poll."""
        consumer = self._open()
        if not self._is_subscribed:
            self._is_subscribed = True
            consumer.subscribe([self._topic], on_assign=self._assign, on_revoke=self._revoke, on_lost=self._lose)
        return consumer

    # What librdkafka calls from inside a poll.

    def _note_error(self, error: KafkaError) -> None:
        if error.fatal() or error.code() in _HOPELESS | {KafkaError._ALL_BROKERS_DOWN}:  # noqa: SLF001
            self._trouble = _class_of(error)

    def _note_commit(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:
        for told in partitions:
            partition = self._partitions.get(told.partition)
            if partition is not None and (error or told.error) and partition.told == told.offset:
                partition.told = None  # It is told again with the next word.

    def _assign(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        self._has_joined = True
        for one in partitions:
            self._partitions[one.partition] = _Partition(one.partition)

    def _revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        gone = [self._partitions[one.partition] for one in partitions if one.partition in self._partitions]
        offsets = self._untold(gone)
        if offsets:
            with suppress(KafkaException):  # Then the next owner gets them again.
                consumer.commit(offsets=offsets, asynchronous=False)
        self._lose(consumer, partitions)

    def _lose(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        for one in partitions:
            partition = self._partitions.pop(one.partition, None)
            if partition is not None:
                partition.is_ours = False
        self._buffer = deque(handle for handle in self._buffer if handle.partition.is_ours)
        self._waiting = [entry for entry in self._waiting if _handle(entry[2]).partition.is_ours]
        heapq.heapify(self._waiting)

    # What the caller asks.

    def receive(self, limit: int, *, wait: float) -> Sequence[Received]:
        """Messages, as soon as there is one; see :class:`pgreaper.queues.Source`."""
        now = time.monotonic()
        until = now + wait
        join_until = until if self._has_joined else now + max(wait, _JOIN_WITHIN)
        self._tell()
        while True:
            found = self._due(limit)
            while self._buffer and len(found) < limit:
                handle = self._buffer.popleft()
                found.append(Received(handle.record.value() or b"", 1, handle))
            if found:
                if len(found) < limit and not self._buffer:
                    self._poll(limit - len(found), 0)
                    while self._buffer and len(found) < limit:
                        handle = self._buffer.popleft()
                        found.append(Received(handle.record.value() or b"", 1, handle))
                self._trouble = None
                return found
            now = time.monotonic()
            if self._trouble is not None:
                self._probe()
            if not self._has_joined and now >= join_until:
                raise Trouble("GroupNotReady")  # To say that there is nothing would be a lie.
            if self._has_joined and now >= until:
                return []
            joined = self._has_joined
            end = min(until if joined else join_until, self._waiting[0][0] if self._waiting else now + _SLICE)
            self._poll(limit, min(max(end - now, 0), _SLICE))
            if self._has_joined and not joined:
                until = max(until, time.monotonic() + wait)

    def _due(self, limit: int) -> list[Received]:
        """What has waited long enough."""
        found: list[Received] = []
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now and len(found) < limit:
            message = heapq.heappop(self._waiting)[2]
            found.append(message)
            partition = _handle(message).partition
            partition.waiting -= 1
            if partition.is_paused and partition.waiting <= _MOST_WAITING // 2:
                partition.is_paused = False
                self._open().resume([TopicPartition(self._topic, partition.number)])
        return found

    def _poll(self, limit: int, seconds: float) -> None:
        """Ask librdkafka, which also serves the group; what it has goes to the buffer."""
        consumer = self._subscribed()
        try:
            first = consumer.poll(seconds)
            records = [] if first is None else [first, *(consumer.consume(limit - 1, 0) if limit > 1 else ())]
        except KafkaException as error:
            self._trouble = _class_of(_of(error))
            return
        for record in records:
            problem = record.error()
            if problem is not None:
                if problem.code() != KafkaError._MAX_POLL_EXCEEDED:  # noqa: SLF001  it joins again by itself
                    self._trouble = _class_of(problem)
                if problem.fatal():
                    self._abandon()
                    return
                continue
            number, offset = record.partition(), record.offset()
            partition = self._partitions.get(number) if number is not None else None
            if partition is None or offset is None:
                continue
            if partition.next is not None and offset < partition.next:
                # The topic begins anew: it was made again, or has lost its end.  Nothing of what we know holds.
                self._lose(consumer, [TopicPartition(self._topic, partition.number)])
                partition = self._partitions[partition.number] = _Partition(partition.number)
            partition.next = offset + 1
            partition.unfinished[offset] = None
            self._buffer.append(_Handle(partition, record, offset))

    def _probe(self) -> None:
        """Ask a broker whether there still is trouble.  Raises Trouble."""
        trouble, self._trouble = self._trouble, None
        try:
            about = self._open().list_topics(self._topic, timeout=_PROBE_WITHIN).topics.get(self._topic)
        except KafkaException as error:
            code = _of(error).code()
            self._trouble = trouble
            vague = code in (KafkaError._TRANSPORT, KafkaError._TIMED_OUT)  # noqa: SLF001
            raise Trouble(trouble if vague and trouble else _class_of(_of(error))) from None
        if about is not None and about.error is not None:
            self._trouble = _class_of(about.error)
            raise Trouble(self._trouble)

    def done(self, messages: Sequence[Received]) -> None:
        """These are finished; what the broker is told is the lowest offset of each partition that is not."""
        for message in messages:
            self._finish(_handle(message))
        self._tell()

    @staticmethod
    def _finish(handle: _Handle) -> None:
        handle.partition.unfinished.pop(handle.offset, None)

    def _untold(self, partitions: Sequence[_Partition]) -> list[TopicPartition]:
        offsets = []
        for partition in partitions:
            place = partition.place()
            if place is not None and place != partition.told:
                partition.told = place
                offsets.append(TopicPartition(self._topic, partition.number, place))
        return offsets

    def _tell(self) -> None:
        """Commit what is finished, without waiting; what the broker does not take is told again."""
        offsets = self._untold(list(self._partitions.values()))
        if offsets:
            try:
                self._open().commit(offsets=offsets, asynchronous=True)
            except KafkaException:
                self._note_commit(KafkaError(KafkaError._FAIL), offsets)  # noqa: SLF001

    def later(self, message: Received, *, seconds: float) -> None:
        """Keep this one in memory for so many seconds."""
        self._wait(replace(message, attempt=message.attempt + 1), seconds)

    def put_off(self, messages: Sequence[tuple[Received, float]]) -> None:
        """Keep these in memory, each for its seconds."""
        for message, seconds in messages:
            self.later(message, seconds=seconds)

    def _wait(self, message: Received, seconds: float) -> None:
        partition = _handle(message).partition
        if not partition.is_ours:
            return
        heapq.heappush(self._waiting, (time.monotonic() + seconds, next(self._numbers), message))
        partition.waiting += 1
        if not partition.is_paused and partition.waiting >= _MOST_WAITING:
            partition.is_paused = True
            self._open().pause([TopicPartition(self._topic, partition.number)])

    def reject(self, message: Received, *, reason: str) -> None:
        """Write this one to the dead-letter topic, and finish it.  Raises Trouble; it comes again then."""
        handle = _handle(message)
        if not handle.partition.is_ours:
            return
        record = handle.record
        origin = f"{self._topic}/{handle.partition.number}/{handle.offset}"
        headers = [*(record.headers() or ()), ("dead-reason", reason.encode()), ("dead-origin", origin.encode())]
        letter = _Letter(record.key(), record.value(), headers)
        answers = self._graves.write({0: letter}, until=time.monotonic() + _BURY_WITHIN)
        answer = answers.get(0)
        if answer is None and answers:
            self._finish(handle)
            self._tell()
            return
        self._wait(message, _BURY_AGAIN)
        raise Trouble(_class_of(answer) if answer is not None else self._graves.trouble or "Timeout")

    def keep(self, messages: Sequence[Received], *, seconds: float) -> None:
        """Stay in the group, for another ``max.poll.interval.ms`` (five minutes)."""
        # Who does not poll is put out of the group; the connection's heartbeats go on by themselves.
        self._tell()
        self._poll(1, 0)

    def close(self) -> None:
        """Commit what is finished and leave the group; the rest comes again, to somebody else at once."""
        self._graves.close()
        self._abandon()

    def _abandon(self) -> None:
        """Leave the group; what was not acknowledged comes again."""
        if self._consumer is not None:
            # librdkafka waits for as long as it takes to hear about the last commit.
            closing = threading.Thread(target=self._close, args=(self._consumer,), name="kafka-close", daemon=True)
            closing.start()
            closing.join(_CLOSE_WITHIN)
        self._consumer = None
        for partition in self._partitions.values():
            partition.is_ours = False
        self._partitions.clear()
        self._buffer.clear()
        self._waiting.clear()

    @staticmethod
    def _close(consumer: Consumer) -> None:
        with suppress(KafkaException, RuntimeError):
            consumer.close()


def _handle(message: Received) -> _Handle:
    assert isinstance(message.handle, _Handle)  # noqa: S101
    return message.handle


def open_sink(url: Url) -> KafkaSink:
    """Events to a topic.  Raises InvalidInput when the URL names none, or has a setting that librdkafka refuses."""
    return KafkaSink(url)


def open_source(url: Url, *, visibility: float) -> KafkaSource:  # noqa: ARG001  a partition is ours as long as we poll
    """Commands from a topic.  Raises InvalidInput as :func:`open_sink` does, and when the URL names no group."""
    return KafkaSource(url)

"""Kafka as a sink and a source: against brokers that go away, refuse, are slow, and hand partitions around."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import pytest

from pgreaper import queues
from pgreaper.errors import InvalidInput
from pgreaper.queues import Refusal, Sent, Trouble
from pgreaper.queues import kafka as module
from tests.queues.broker import wait_until
from tests.queues.conftest import message, messages
from tests.queues.kafka_cluster import (
    MESSAGE_TOO_LARGE,
    OFFSET_COMMIT,
    PRODUCE,
    REBALANCE_IN_PROGRESS,
    TOPIC_AUTHORIZATION_FAILED,
    UNKNOWN_TOPIC,
    UNSUPPORTED,
    Kafka,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from confluent_kafka import Message as Record

    from pgreaper.queues import Received, Sink, Source


# For a second member: these brokers give partitions out anew a second before the session of the first one is over.
SHORT_SESSION = {"session__timeout__ms": 1500, "heartbeat__interval__ms": 200}


@pytest.fixture
def open_sink(kafka: Kafka) -> Iterator[Callable[..., Sink]]:
    """A function that opens a sink for a topic; options are the URL's, with __ for a dot."""
    opened: list[Sink] = []

    def open_sink(topic: str, **options: object) -> Sink:
        opened.append(queues.sink(kafka.url(topic, **options)))
        return opened[-1]

    yield open_sink
    for sink in opened:
        sink.close()


@pytest.fixture
def open_source(kafka: Kafka) -> Iterator[Callable[..., Source]]:
    """A function that opens a source, of the group `listeners`."""
    opened: list[Source] = []

    def open_source(topic: str, **options: object) -> Source:
        opened.append(queues.source(kafka.url(topic, group="listeners", **options)))
        return opened[-1]

    yield open_source
    for source in opened:
        source.close()


def identity(record: Record) -> str:
    found = dict(record.headers() or [])["idempotency-key"]
    assert isinstance(found, bytes)
    return found.decode()


def receive(source: Source, n: int, seconds: float = 20.0) -> list[Received]:
    """So many messages, in as many calls as it takes."""
    found: list[Received] = []

    def is_complete() -> bool:
        found.extend(source.receive(n - len(found), wait=0.1))
        return len(found) == n

    wait_until(is_complete, seconds)
    return found


def wait_for_offset(kafka: Kafka, source: Source, offset: int, partition: int = 0) -> None:
    """Go on receiving, nothing, until the group's offset is that one."""

    def is_told() -> bool:
        assert source.receive(10, wait=0.05) == []
        return kafka.committed("commands", partition) == offset

    wait_until(is_told)


def bodies(received: list[Received]) -> list[bytes]:
    return [one.body for one in received]


# -- events out


def test_an_event_has_its_key_its_identity_and_its_headers(kafka, open_sink):
    """What a consumer gets: the key for the order, the identity against duplicates, the body as it was given."""
    kafka.topic("events")
    assert open_sink("events").send([message(7, key="seat ü")], timeout=10) == Sent(frozenset({0}), {})
    (record,) = kafka.records("events")
    assert (record.key(), record.value()) == ("seat ü".encode(), message(7, key="seat ü").body)
    assert dict(record.headers()) == {
        "content-type": b"application/json",
        "policy": b"holds",
        "idempotency-key": b"holds/seat%20%C3%BC/7",
    }


def test_keys_go_where_javas_clients_put_them(kafka, open_sink):
    """The partition of a key is that of every other client: murmur2, with the figures of Kafka's own tests."""
    kafka.topic("events", partitions=7)
    open_sink("events").send([message("21"), message("foobar"), message("a-little-bit-long-string")], timeout=10)
    hashes = {b"21": -973932308, b"foobar": -790332482, b"a-little-bit-long-string": -985981536}
    for record in kafka.records("events", partitions=7):
        assert record.partition() == (hashes[record.key()] & 0x7FFFFFFF) % 7


def test_brokers_that_are_down_are_trouble_and_lose_nothing(kafka, open_sink, capfd):
    """Told after seconds and not after the whole timeout, silently; the same sink goes on when they are back."""
    kafka.topic("events")
    sink = open_sink("events")
    assert len(sink.send(messages(10), timeout=10).confirmed) == 10
    kafka.down()
    began = time.monotonic()
    assert sink.send(messages(10, 10), timeout=60) == Sent(frozenset(), {}, "AllBrokersDown")
    assert time.monotonic() - began < 20
    kafka.up()
    assert len(sink.send(messages(10, 10), timeout=20).confirmed) == 10
    assert Counter(map(identity, kafka.records("events"))) == Counter(one.identity for one in messages(20))
    assert capfd.readouterr().err == ""


def test_brokers_restart_in_mid_stream(kafka, open_sink):
    """Whatever was confirmed is there; what was not is sent again, and a duplicate has the same identity."""
    kafka.topic("events")
    sink = open_sink("events")
    confirmed = 0

    def restart() -> None:
        for level in range(300, 1800, 500):
            wait_until(partial(lambda at: confirmed >= at, level))
            kafka.down()
            kafka.up()

    blows = threading.Thread(target=restart)
    blows.start()
    for start in range(0, 2000, 100):
        left = messages(100, start)
        while left:
            sent = sink.send(left, timeout=5)
            assert not sent.refused
            confirmed += len(sent.confirmed)
            left = [one for n, one in enumerate(left) if n not in sent.confirmed]
    blows.join()
    assert confirmed == 2000
    assert {identity(record) for record in kafka.records("events")} == {one.identity for one in messages(2000)}


def test_what_is_not_answered_in_time_is_unconfirmed_and_not_sent_later(kafka, open_sink):
    """It may have arrived, and is told as that; nothing goes out behind the caller's back afterwards."""
    kafka.topic("events")
    sink = open_sink("events")
    sink.send(messages(1), timeout=10)
    kafka.slow(1.5)
    began = time.monotonic()
    assert sink.send(messages(200, 1), timeout=0.5) == Sent(frozenset(), {}, "Timeout")
    assert time.monotonic() - began < 1.4
    kafka.slow(0)
    assert len(sink.send(messages(200, 1), timeout=20).confirmed) == 200
    written = Counter(map(identity, kafka.records("events")))
    assert set(written) == {one.identity for one in messages(201)}
    assert max(written.values()) <= 2


def test_an_event_that_is_too_large_is_refused_alone(kafka, open_sink):
    """It will never be taken; those beside it are."""
    kafka.topic("events")
    large = message("large", body=b"x" * 1_000_001)
    sent = open_sink("events").send([message(1), large, message(2)], timeout=10)
    assert sent == Sent(frozenset({0, 2}), {1: Refusal("TooLarge", transient=False)})


def test_a_batch_that_the_broker_finds_too_large_is_tried_one_by_one(kafka, open_sink):
    """A broker refuses a batch as a whole: only what it refuses alone is refused for good."""
    kafka.topic("events")
    kafka.answer(PRODUCE, MESSAGE_TOO_LARGE, MESSAGE_TOO_LARGE)
    sent = open_sink("events").send(messages(3), timeout=10)
    assert sent == Sent(frozenset({1, 2}), {0: Refusal("TooLarge", transient=False)})
    assert [identity(record) for record in kafka.records("events")] == [one.identity for one in messages(3)[1:]]


def test_events_of_one_key_do_not_overtake_each_other(kafka, open_sink):
    """Not even one that had to be sent again."""
    kafka.topic("events")
    sink = open_sink("events", batch__num__messages=1)
    kafka.answer(PRODUCE, MESSAGE_TOO_LARGE)
    sent = sink.send([message(1, key="a"), message(2, key="b"), message(3, key="a")], timeout=10)
    assert len(sent.confirmed) == 3
    assert [identity(record) for record in kafka.records("events") if record.key() == b"a"] == [
        "holds/a/1",
        "holds/a/3",
    ]


def test_after_an_unconfirmed_event_no_later_one_of_its_key_goes_out(kafka, open_sink):
    """Otherwise the earlier one, sent again, would come after it."""
    kafka.topic("events")
    sink = open_sink("events", batch__num__messages=1)
    sink.send([message(0)], timeout=10)
    kafka.answer(PRODUCE, UNSUPPORTED)
    sent = sink.send([message(1, key="a"), *messages(5, 10), message(2, key="a")], timeout=10)
    assert sent == Sent(frozenset({1, 2, 3, 4, 5}), {}, "UnsupportedForMessageFormat")
    assert {record.key() for record in kafka.records("events")} == {b"0", b"10", b"11", b"12", b"13", b"14"}


@pytest.mark.parametrize(
    ("error", "trouble"),
    [(UNKNOWN_TOPIC, "UnknownTopicOrPart"), (TOPIC_AUTHORIZATION_FAILED, "TopicAuthorizationFailed")],
)
def test_a_topic_that_is_missing_or_forbidden_is_nobodys_dead_letter(kafka, open_sink, error, trouble):
    """A typo or a lacking right must not turn every event into a dead letter: somebody repairs it, and they go out."""
    kafka.topic("events")
    kafka.topic_error("events", error)
    sink = open_sink("events", topic__metadata__propagation__max__ms=200)
    assert sink.send(messages(3), timeout=10) == Sent(frozenset(), {}, trouble)
    kafka.topic_error("events", 0)
    assert len(sink.send(messages(3), timeout=10).confirmed) == 3


def test_more_events_than_librdkafka_has_room_for(kafka, open_sink):
    """A full queue is waited for."""
    kafka.topic("events")
    sink = open_sink("events", queue__buffering__max__messages=10)
    assert sink.send(messages(100), timeout=10) == Sent(frozenset(range(100)), {})
    assert len(kafka.records("events")) == 100


# -- commands in


def test_the_offset_is_that_of_the_lowest_unfinished_message(kafka, open_source):
    """Committed only after done(), and never beyond a message that is not: a crash would lose it."""
    kafka.topic("commands")
    kafka.write("commands", b"0", b"1", b"2")
    source = open_source("commands")
    first, second, third = receive(source, 3)
    source.done([third])
    source.keep([first, second], seconds=1)
    assert kafka.committed("commands") in (None, 0)
    source.done([first])
    wait_for_offset(kafka, source, 1)
    source.done([second])
    wait_for_offset(kafka, source, 3)


def test_an_offset_that_the_broker_did_not_take_is_told_again(kafka, open_source):
    """As while partitions move: without another message to be done."""
    kafka.topic("commands")
    kafka.write("commands", b"1")
    source = open_source("commands")
    received = receive(source, 1)
    kafka.answer(OFFSET_COMMIT, REBALANCE_IN_PROGRESS)
    source.done(received)
    wait_for_offset(kafka, source, 1)


LISTENER = """
import sys
from pgreaper import queues
source = queues.source(sys.argv[1])
found = []
while len(found) < 5:
    found += source.receive(10, wait=1)
source.done(found[:2])
source.later(found[4], seconds=1000)
source.receive(10, wait=1)  # serves what is on its way, the commit among it
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_consumer_that_is_killed_leaves_its_messages(kafka, open_source):
    """What was received, or waits in its memory, is delivered again; what was done is not."""
    kafka.topic("commands")
    kafka.write("commands", *(b"%d" % n for n in range(5)))
    command = [sys.executable, "-c", LISTENER, kafka.url("commands", group="listeners", **SHORT_SESSION)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as listener:
        assert listener.stdout
        assert listener.stdout.readline() == "ready\n"
        wait_until(lambda: kafka.committed("commands") == 2)
        listener.send_signal(signal.SIGKILL)
    assert bodies(receive(open_source("commands", **SHORT_SESSION), 3)) == [b"2", b"3", b"4"]


def test_partitions_that_move_take_their_messages_along(kafka, open_source, monkeypatch):
    """A second member gets partitions: done() of the first one no longer counts there, and the second gets them."""
    kafka.topic("commands", partitions=2)
    for number in range(2):
        kafka.write("commands", b"%d" % number, partition=number)
    first = open_source("commands", **SHORT_SESSION)
    held = {one.body: one for one in receive(first, 2)}
    second, moved = open_source("commands", **SHORT_SESSION), list[queues.Received]()
    monkeypatch.setattr(module, "_JOIN_WITHIN", 0.1)  # Both must speak, to agree.

    def has_moved() -> bool:
        first.keep(list(held.values()), seconds=1)
        with suppress(Trouble):
            moved.extend(second.receive(10, wait=0.1))
        return len(moved) == 1

    wait_until(has_moved)
    number = int(moved[0].body)
    first.later(held[b"%d" % number], seconds=0)
    first.reject(held[b"%d" % number], reason="Malformed")
    first.done(list(held.values()))
    wait_for_offset(kafka, first, 1, 1 - number)
    assert kafka.committed("commands", number) in (None, 0)
    second.done(moved)
    wait_for_offset(kafka, second, 1, number)


def test_a_group_that_has_not_gathered_is_trouble_and_not_an_empty_queue(kafka, open_source, monkeypatch):
    """A run that ends when nothing is left must not end because a member is silent; a member without work is fine."""
    kafka.topic("commands")
    first = open_source("commands", **SHORT_SESSION)
    assert first.receive(1, wait=0) == []
    second = open_source("commands", **SHORT_SESSION)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_JOIN_WITHIN", 0.3)
        with pytest.raises(Trouble, match=r"^GroupNotReady$"):
            second.receive(1, wait=0)
    first.close()
    assert second.receive(1, wait=0) == []


def test_an_early_command_waits_and_does_not_block_the_others(kafka, open_source):
    """It comes again when it was told to, and the offset stays before it until it is done."""
    kafka.topic("commands")
    kafka.write("commands", b"early", b"next")
    source = open_source("commands")
    early, following = receive(source, 2)
    began = time.monotonic()
    source.later(early, seconds=1)
    source.done([following])
    kafka.write("commands", b"third")
    assert bodies(receive(source, 1)) == [b"third"]
    assert kafka.committed("commands") in (None, 0)
    (again,) = source.receive(10, wait=5)
    assert 1 <= time.monotonic() - began < 5
    assert (again.body, again.attempt) == (b"early", 2)


def test_more_early_commands_than_there_is_room_for(kafka, open_source, monkeypatch):
    """The partition rests until half of them are gone, and the other one does not; nothing is lost."""
    monkeypatch.setattr(module, "_MOST_WAITING", 4)
    kafka.topic("commands", partitions=2)
    kafka.write("commands", *(b"early %d" % n for n in range(4)))
    source = open_source("commands")
    early = receive(source, 4)
    for one in early:
        source.later(one, seconds=1.5)
    kafka.write("commands", b"behind them")
    kafka.write("commands", b"beside them", partition=1)
    assert bodies(receive(source, 1)) == [b"beside them"]
    again = receive(source, 5)
    assert sorted(bodies(again)) == [b"behind them", *(b"early %d" % n for n in range(4))]
    assert again[-1].body == b"behind them"


def test_a_rejected_command_goes_to_the_dead_letter_topic(kafka, open_source):
    """As it came, with the reason and where it was; and the offset moves on."""
    kafka.topic("commands")
    kafka.topic("commands.dead")
    kafka.write("commands", b"no command", b"next")
    source = open_source("commands")
    poison, following = receive(source, 2)
    source.done([following])
    source.reject(poison, reason="Malformed")
    (letter,) = kafka.records("commands.dead")
    assert (letter.key(), letter.value()) == (b"key of no command", b"no command")
    assert dict(letter.headers()) == {"origin": b"tests", "dead-reason": b"Malformed", "dead-origin": b"commands/0/0"}
    wait_for_offset(kafka, source, 2)


def test_a_rejected_command_is_not_finished_before_its_letter_is_there(kafka, open_source, monkeypatch):
    """A dead-letter topic that cannot be written to is trouble: the command comes again, its offset stays."""
    monkeypatch.setattr(module, "_BURY_AGAIN", 0.2)
    kafka.topic("commands")
    kafka.topic("grave")
    kafka.topic_error("grave", TOPIC_AUTHORIZATION_FAILED)
    kafka.write("commands", b"no command", b"next")
    source = open_source("commands", dead="grave")
    poison, following = receive(source, 2)
    source.done([following])
    with pytest.raises(Trouble, match=r"^TopicAuthorizationFailed$"):
        source.reject(poison, reason="Malformed")
    (again,) = source.receive(10, wait=5)
    assert again.body == b"no command"
    assert kafka.committed("commands") in (None, 0)
    kafka.topic_error("grave", 0)
    source.reject(again, reason="Malformed")
    assert len(kafka.records("grave")) == 1


def test_who_works_for_long_keeps_its_place(kafka, open_source):
    """keep() is a sign of life: without one the group would give the partition to others."""
    kafka.topic("commands")
    kafka.write("commands", b"slow", b"next")
    source = open_source(
        "commands", session__timeout__ms=1000, max__poll__interval__ms=1000, heartbeat__interval__ms=200
    )
    slow, following = receive(source, 2)
    until = time.monotonic() + 2.5

    def is_over() -> bool:
        source.keep([slow, following], seconds=1)
        return time.monotonic() > until

    wait_until(is_over)
    source.done([slow, following])
    wait_for_offset(kafka, source, 2)
    assert source.receive(10, wait=0.2) == []


def test_what_was_done_while_the_brokers_were_down_is_told_later(kafka, open_source):
    """Down is trouble of receive(); afterwards it goes on where it was, without being opened anew."""
    kafka.topic("commands")
    kafka.write("commands", b"before")
    source = open_source("commands")
    received = receive(source, 1)
    kafka.down()
    source.done(received)
    with pytest.raises(Trouble, match=r"^AllBrokersDown$"):
        receive(source, 1)
    kafka.up()

    def is_back() -> bool:
        with suppress(Trouble):
            received.extend(source.receive(10, wait=0.1))
        return bool(kafka.committed("commands") == len(received))

    wait_until(is_back)
    kafka.write("commands", b"after")
    received += receive(source, 1)
    source.done(received)
    wait_for_offset(kafka, source, 2)


def test_a_topic_that_is_missing_is_trouble(kafka, open_source):
    """And is looked for again and again."""
    kafka.topic("commands")
    kafka.topic_error("commands", UNKNOWN_TOPIC)
    with pytest.raises(Trouble, match=r"^UnknownTopicOrPart$"):
        open_source("commands").receive(1, wait=0.1)


def test_close_gives_the_messages_back_at_once(kafka, open_source):
    """What is done is committed before; the next member begins behind it."""
    kafka.topic("commands")
    kafka.write("commands", b"done", b"not done")
    source = open_source("commands", **SHORT_SESSION)
    done, _ = receive(source, 2)
    source.done([done])
    source.close()
    source.close()
    assert bodies(receive(open_source("commands", **SHORT_SESSION), 1)) == [b"not done"]


def test_close_does_not_hang_without_brokers(kafka, open_source):
    """A broker that is gone does not keep the process."""
    kafka.topic("commands")
    kafka.write("commands", b"1")
    source = open_source("commands")
    received = receive(source, 1)
    kafka.down()
    source.done(received)
    began = time.monotonic()
    source.close()
    assert time.monotonic() - began < 5


# -- what is wrong with a URL


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("kafka:///events", "names no broker"),
        ("kafka://host:port/events", "names no broker"),
        ("kafka://127.0.0.1:9", "names no topic"),
        ("kafka://127.0.0.1:9/a/b", "names no topic"),
        ("kafka://127.0.0.1:9/events?acks=1", "has an option acks that does not exist"),
        ("kafka://127.0.0.1:9/events?enable.idempotence=false", "which is not to be changed"),
        ("kafka://127.0.0.1:9/events?no.such.setting=1", "does not take: the setting no.such.setting"),
        ("kafka://127.0.0.1:9/events?security.protocol=pa55word", "does not take: the setting security.protocol"),
    ],
)
def test_a_sink_that_cannot_be_is_refused_at_once(url, what):
    """Without a broker, with the remedy, and without the value, which may be a secret."""
    with pytest.raises(InvalidInput, match=what) as refused:
        queues.sink(url)
    assert refused.value.hint
    assert "pa55word" not in f"{refused.value} {refused.value.hint}"


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ("", "names no consumer group"),
        ("?group=g&dead=commands", "has a dead= that names no other topic"),
        ("?group=g&enable.auto.commit=true", "which is not to be changed"),
    ],
)
def test_a_source_that_cannot_be_is_refused_at_once(options, what):
    """Likewise."""
    with pytest.raises(InvalidInput, match=what):
        queues.source(f"kafka://127.0.0.1:9/commands{options}")


def test_a_password_is_used_over_tls_and_shown_nowhere():
    """Whoever gives one does not send it in the clear unless the URL says so."""
    sink = queues.sink("kafka://me:pa55word@127.0.0.1:9,[::1]/events")
    settings = sink._writer._address.settings({}, {})  # type: ignore[attr-defined]
    assert (settings["security.protocol"], settings["sasl.password"]) == ("SASL_SSL", "pa55word")
    assert settings["bootstrap.servers"] == "127.0.0.1:9,[::1]:9092"
    assert sink.name == "kafka://127.0.0.1:9,[::1]/events"
    sink.close()

"""Events to a real RabbitMQ: confirmed, refused, cut off, crashed."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from pgreaper import queues
from pgreaper.queues import Message, Refusal, Sent
from pgreaper.queues.amqp import AmqpSink
from tests.chaos.proxy import Proxy
from tests.queues.broker import LARGEST, free_port, wait_until
from tests.queues.conftest import again_if_lost, message, messages
from tests.queues.leaver import Leaver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def open_sink() -> Iterator[Callable[[str], AmqpSink]]:
    """A function that opens a sink, closed at the end."""
    opened: list[AmqpSink] = []

    def open_sink(url: str) -> AmqpSink:
        sink = queues.sink(url)
        assert isinstance(sink, AmqpSink)
        opened.append(sink)
        return sink

    yield open_sink
    for sink in opened:
        sink.close()


@pytest.fixture
def proxy(rabbitmq) -> Iterator[Proxy]:
    """A bad network before the broker."""
    with Proxy(("127.0.0.1", rabbitmq.port)) as proxy:
        yield proxy


def everything(n: int) -> Sent:
    return Sent(frozenset(range(n)), {})


def test_an_event_is_a_persistent_message_with_its_identity(rabbitmq, rabbit, open_sink):
    """What a consumer needs to dedupe and to route is there, and the order is that of the batch."""
    queue = rabbit.queue()

    assert open_sink(rabbitmq.url(queue)).send(messages(500), timeout=20) == everything(500)

    found = rabbit.drain(queue)
    assert [m.message_id for m in found] == [m.identity for m in messages(500)]
    assert found[7].body == message(7).body
    assert found[7].headers == {"policy": "holds"}
    assert (found[7].properties.delivery_mode, found[7].properties.content_type) == (2, "application/json")


def test_an_exchange_routes_by_the_policy_or_by_a_key(rabbitmq, rabbit, open_sink):
    """The routing key is the policy's name unless the URL has one."""
    by_policy, by_key = rabbit.queue(), rabbit.queue()
    exchange = rabbit.exchange(f"{by_policy}-x", "direct", (by_policy, "holds"), (by_key, "a/b"))

    assert open_sink(rabbitmq.url(exchange=exchange)).send(messages(2), timeout=20) == everything(2)
    assert open_sink(rabbitmq.url(exchange=exchange, routing_key="a%2Fb")).send(messages(3), timeout=20) == everything(
        3
    )

    assert (rabbit.count(by_policy), rabbit.count(by_key)) == (2, 3)


def test_what_no_queue_takes_is_refused_for_good(rabbitmq, rabbit, open_sink):
    """The broker returns it instead of losing it; the others are confirmed."""
    queue = rabbit.queue()
    exchange = rabbit.exchange(f"{queue}-x", "topic", (queue, "holds"))
    stray = Message(body=b"{}", key="stray", identity="stray", headers={"policy": "carts"})
    long = Message(body=b"{}", key="long", identity="long", headers={"policy": "x" * 256})

    sent = open_sink(rabbitmq.url(exchange=exchange)).send([message(0), stray, message(2), long], timeout=20)

    assert sent.confirmed == {0, 2}
    assert sent.refused == {
        1: Refusal("Unroutable", transient=False),
        3: Refusal("RoutingKeyTooLong", transient=False),
    }
    assert sent.trouble is None


def test_no_event_pays_for_a_queue_that_is_gone(rabbitmq, rabbit, open_sink):
    """Deleted while we are connected, it is trouble; made again, it gets everything."""
    queue = rabbit.queue()
    sink = open_sink(rabbitmq.url(queue))
    assert sink.send(messages(1), timeout=20) == everything(1)

    rabbit.delete(queue)
    assert sink.send(messages(3), timeout=20) == Sent(frozenset(), {}, "NoSuchQueue")
    assert sink.send(messages(3), timeout=20) == Sent(frozenset(), {}, "NoSuchQueue")


def test_a_full_queue_refuses_for_now(rabbitmq, rabbit, open_sink):
    """What was nacked is tried again; behind it, none of its key has overtaken it."""
    queue = rabbit.queue(max_length=3, overflow="reject-publish")
    rabbit.publish(queue, b"x", b"x", b"x")
    sink = open_sink(rabbitmq.url(queue))
    batch = [message(0, key="a"), message(1, key="a"), message(2, key="b")]

    sent = sink.send(batch, timeout=20)
    rabbit.drain(queue)
    again = sink.send(batch, timeout=20)

    nack = Refusal("Nack", transient=True)
    assert sent == Sent(frozenset(), {0: nack, 2: nack})
    assert again == everything(3)


def test_a_message_that_is_too_large_is_found_and_refused(rabbitmq, rabbit, open_sink):
    """The broker closes the channel over it and names none; the others are confirmed all the same."""
    queue = rabbit.queue()
    batch = messages(20)
    batch[7] = message(7, body=b"x" * (LARGEST + 1))
    batch[13] = message(13, body=b"x" * (LARGEST + 1))

    sent = open_sink(rabbitmq.url(queue)).send(batch, timeout=20)

    refusal = Refusal("TooLarge", transient=False)
    assert sent == Sent(frozenset(range(20)) - {7, 13}, {7: refusal, 13: refusal})
    assert {m.message_id for m in rabbit.drain(queue)} == {batch[i].identity for i in sent.confirmed}


@pytest.mark.parametrize(
    ("change", "trouble"),
    [
        (lambda url: url.replace(":guest@", ":wrong@"), "AccessRefused"),
        (lambda url: url.replace("/?", "/nowhere?"), "VhostRefused"),
        (lambda url: url + "-none", "NoSuchQueue"),
        (lambda url: url.partition("?")[0] + "?exchange=none", "NoSuchExchange"),
        (lambda url: url.replace("127.0.0.1", "nowhere.invalid"), "HostUnknown"),
        (lambda url: url.replace("amqp://", "amqps://"), "TlsError"),
    ],
)
def test_what_is_wrong_with_the_way_there_has_a_name(rabbitmq, rabbit, open_sink, change, trouble):
    """It is trouble, never an exception, and no event is refused for it."""
    sink = open_sink(change(rabbitmq.url(rabbit.queue())))

    assert sink.send(messages(3), timeout=10) == Sent(frozenset(), {}, trouble)


def test_nobody_there_is_trouble(open_sink):
    """Neither connected nor waited for."""
    sink = open_sink(f"amqp://127.0.0.1:{free_port()}/?queue=q")

    assert sink.send(messages(3), timeout=10) == Sent(frozenset(), {}, "ConnectionRefused")


def test_a_connection_cut_between_publish_and_confirm(rabbitmq, rabbit, open_sink, proxy):
    """Nothing is confirmed although it all arrived; sent again, the copies carry the same identity."""
    queue = rabbit.queue()
    sink = open_sink(rabbitmq.url(queue, port=proxy.port))
    assert sink.send(messages(1), timeout=20) == everything(1)
    batch = messages(50, 1)

    answers: list[Sent] = []
    assert proxy.swallow(0, 3600)
    sending = threading.Thread(target=lambda: answers.append(sink.send(batch, timeout=20)))
    sending.start()
    rabbit.wait_for(queue, 51)
    proxy.cut(0)
    sending.join()

    assert answers == [Sent(frozenset(), {}, "ConnectionLost")]
    assert sink.send(batch, timeout=20) == everything(50)
    found = [m.message_id for m in rabbit.drain(queue)]
    assert sorted(found) == sorted([message(0).identity] + 2 * [m.identity for m in batch])


@pytest.mark.parametrize("last", ["Connection.Open", "Channel.Open", "Confirm.Select"])
def test_a_broker_that_dies_between_two_frames(open_sink, last):
    """While we come in: trouble, never an exception, which would be the relay's end."""
    with Leaver(last) as broker:
        answers = [open_sink(broker.url).send(messages(3), timeout=20) for _ in range(10)]

    assert answers == [Sent(frozenset(), {}, "ConnectionLost")] * 10


def test_a_broker_that_dies_behind_its_confirms(open_sink):
    """More of them than the library reads in one go, and the end: what they confirm counts, the rest is trouble."""
    with Leaver(messages=50, confirms=40) as broker:
        sent = open_sink(broker.url).send(messages(50), timeout=20)

    assert (sent.refused, sent.trouble) == ({}, "ConnectionLost")
    assert sent.confirmed <= set(range(40))


def test_a_connection_that_ended_between_two_batches_costs_none(rabbitmq, rabbit, open_sink, proxy):
    """The next batch gets a new one, and no event waits for a pause."""
    sink = open_sink(rabbitmq.url(rabbit.queue(), port=proxy.port))
    assert sink.send(messages(1), timeout=20) == everything(1)
    line = sink._line
    assert line is not None
    proxy.cut(0)
    wait_until(lambda: line.channel.is_closed and not line.connection.connected.is_set())

    assert sink.send(messages(3), timeout=20) == everything(3)


def test_a_channel_that_is_not_opened_is_given_up(monkeypatch, open_sink):
    """Sooner than the batch: it is the broker's turn, and it answers at once if it answers at all."""
    monkeypatch.setattr("pgreaper.queues.amqp._ANSWER", 0.2)
    began = time.monotonic()
    with Leaver(silent="Channel.Open") as broker:
        assert open_sink(broker.url).send(messages(3), timeout=20) == Sent(frozenset(), {}, "Timeout")
    assert time.monotonic() - began < 10


def test_a_broker_that_does_not_answer_is_given_up(rabbitmq, rabbit, open_sink, proxy):
    """After the call's time, without the broker's consent."""
    queue = rabbit.queue()
    sink = open_sink(rabbitmq.url(queue, port=proxy.port))
    assert sink.send(messages(1), timeout=20) == everything(1)

    assert proxy.stall(0, 3600)
    assert sink.send(messages(3), timeout=0.5) == Sent(frozenset(), {}, "Timeout")
    assert sink.send(messages(3), timeout=20) == everything(3)


def test_a_broker_that_takes_nothing_for_now_is_trouble(rabbitmq, rabbit, open_sink):
    """Its memory is full: it says so, and takes everything when it has room again."""
    queue = rabbit.queue()
    sink = open_sink(rabbitmq.url(queue))
    assert sink.send(messages(1), timeout=20) == everything(1)
    rabbitmq.control("set_vm_memory_high_watermark", "0.000001")
    try:
        assert sink.send(messages(3), timeout=3) == Sent(frozenset(), {}, "Blocked")
    finally:
        rabbitmq.control("set_vm_memory_high_watermark", "0.4")

    assert sink.send(messages(3), timeout=20) == everything(3)


@again_if_lost
def test_nothing_that_was_confirmed_is_lost_when_the_broker_crashes(rabbitmq, rabbit, open_sink):
    """Killed in mid-stream and started again, it has every event that it confirmed; the rest is sent again."""
    queue = rabbit.queue()
    sink = open_sink(rabbitmq.url(queue))
    confirmed: set[str] = set()
    troubles: list[str] = []

    def crash() -> None:
        wait_until(lambda: len(confirmed) > 1000)
        rabbit.crash()
        rabbit.start(queue)

    end = time.monotonic() + 90
    with ThreadPoolExecutor(1) as beside:
        crashing = beside.submit(crash)
        for start in range(0, 10_000_000, 200):
            left = messages(200, start)
            while left:
                assert time.monotonic() < end, troubles
                sent = sink.send(left, timeout=20)
                assert not sent.refused
                confirmed.update(left[i].identity for i in sent.confirmed)
                left = [m for i, m in enumerate(left) if i not in sent.confirmed]
                if sent.trouble:
                    troubles.append(sent.trouble)
                    crashing.result()
            if crashing.done() and troubles:
                break

    assert confirmed <= {str(m.message_id) for m in rabbit.drain(queue)}
    assert len(confirmed) >= 1200


def test_an_idle_connection_lives(rabbitmq, rabbit, open_sink):
    """Heartbeats go on while nobody calls: the next batch finds the same connection."""
    sink = open_sink(rabbitmq.url(rabbit.queue(), heartbeat="1"))
    assert sink.send(messages(1), timeout=20) == everything(1)
    line = sink._line

    rabbit.wait_until_a_silent_client_is_thrown_out()

    assert sink.send(messages(1), timeout=20) == everything(1)
    assert line is not None
    assert sink._line is line


def test_certificates_are_verified(rabbitmq, rabbit, open_sink, certificates):
    """With TLS, only a broker that the given authority vouches for gets an event."""
    url = rabbitmq.url(rabbit.queue(), port=rabbitmq.tls_port).replace("amqp:", "amqps:")

    assert open_sink(url).send(messages(1), timeout=20) == Sent(frozenset(), {}, "TlsError")
    assert open_sink(f"{url}&cacertfile={certificates}/ca.pem").send(messages(1), timeout=20) == everything(1)


def test_no_word_of_the_broker_is_logged(rabbitmq, rabbit, open_sink, capfd):
    """What the library says about a broken connection may repeat messages: stderr stays empty."""
    queue = rabbit.queue()
    sink = open_sink(rabbitmq.url(queue))
    sink.send(messages(1), timeout=20)
    rabbit.delete(queue)
    sink.send([message(0, body=b"x" * (LARGEST + 1))], timeout=20)
    open_sink(rabbitmq.url(queue).replace(":guest@", ":wrong@")).send(messages(1), timeout=20)

    assert capfd.readouterr() == ("", "")

"""Commands from a real RabbitMQ: acknowledged, put off, rejected, and redelivered after every kind of death."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pgreaper import queues
from pgreaper.queues import Received, Trouble
from pgreaper.queues.amqp import AmqpSource
from tests.chaos.proxy import Proxy
from tests.queues.broker import free_port, wait_until
from tests.queues.conftest import again_if_lost
from tests.queues.leaver import Leaver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


@pytest.fixture
def open_source() -> Iterator[Callable[[str], AmqpSource]]:
    """A function that opens a source, closed at the end."""
    opened: list[AmqpSource] = []

    def open_source(url: str) -> AmqpSource:
        source = queues.source(url)
        assert isinstance(source, AmqpSource)
        opened.append(source)
        return source

    yield open_source
    for source in opened:
        source.close()


def bodies(n: int) -> list[bytes]:
    return [b"%d" % i for i in range(n)]


def receive(source: AmqpSource, n: int, limit: int = 100, seconds: float = 20.0) -> list[Received]:
    """Exactly so many messages, received in as many calls as it takes."""
    found: list[Received] = []
    end = time.monotonic() + seconds
    while len(found) < n:
        assert time.monotonic() < end, f"{len(found)} of {n} came"
        found += source.receive(min(limit, n - len(found)), wait=1)
    return found


def test_what_is_done_is_gone(rabbitmq, rabbit, open_source):
    """In its order, at most so many at once, and the queue is empty when it was acknowledged."""
    queue = rabbit.queue()
    rabbit.publish(queue, *bodies(25))
    source = open_source(rabbitmq.url(queue))

    found = receive(source, 10, limit=10)
    source.done(found)
    found += receive(source, 15, limit=10)
    source.done(found[10:20])
    assert source.receive(10, wait=0) == []
    assert not source.ended
    source.close()

    assert [m.body for m in found] == bodies(25)
    assert {m.attempt for m in found} == {1}
    rabbit.wait_for(queue, 5)


def test_a_command_comes_as_soon_as_it_is_there(rabbitmq, rabbit, open_source):
    """A receive that waits for long returns with it."""
    queue = rabbit.queue()
    source = open_source(rabbitmq.url(queue))
    assert source.receive(10, wait=0) == []
    began = time.monotonic()
    rabbit.publish(queue, b"{}")

    assert [m.body for m in source.receive(10, wait=60)] == [b"{}"]
    assert time.monotonic() - began < 30


def test_a_killed_consumers_messages_come_again(rabbitmq, rabbit, open_source):
    """SIGKILL with messages in flight, some received and some only on their way: nothing is lost."""
    queue = rabbit.queue()
    rabbit.publish(queue, *bodies(30))
    program = (
        "import sys, time; from pgreaper import queues\n"
        "source = queues.source(sys.argv[1])\n"
        "source.done(source.receive(10, wait=20)[:1])\n"
        "print('ready', flush=True); time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, rabbitmq.url(queue)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHONPATH": "."},
    ) as consumer:
        assert consumer.stdout is not None
        assert consumer.stdout.readline() == b"ready\n"
        consumer.kill()

    found = receive(open_source(rabbitmq.url(queue)), 29)
    assert sorted(m.body for m in found) == sorted(bodies(30)[1:])
    assert any(m.attempt > 1 for m in found)


def test_another_consumer_gets_its_share(rabbitmq, rabbit, open_source):
    """No more than two batches are taken away from the others; the number follows the batch, up and down."""
    queue = rabbit.queue()
    rabbit.publish(queue, *bodies(100))
    first, second = open_source(rabbitmq.url(queue)), open_source(rabbitmq.url(queue))

    mine = receive(first, 5, limit=5)
    second.done(receive(second, 90))
    second.close()
    first.done([*mine, *receive(first, 5, limit=5)])

    assert first.receive(50, wait=0) == []
    rabbit.publish(queue, *bodies(100))
    rabbit.wait_for(queue, 0)
    first.done(receive(first, 100, limit=50))

    assert first.receive(5, wait=0) == []
    rabbit.publish(queue, *bodies(100))
    third = open_source(rabbitmq.url(queue))
    third.done(receive(third, 90))


# -- later


def test_what_is_put_off_for_a_moment_waits_here(rabbitmq, rabbit, open_source):
    """It comes again in its time, the sooner one first, and costs the broker no queue."""
    queue = rabbit.queue()
    rabbit.publish(queue, b"one", b"two")
    source = open_source(rabbitmq.url(queue))
    one, two = receive(source, 2)

    began = time.monotonic()
    source.later(one, seconds=0.4)
    source.later(two, seconds=0.2)
    first, second = receive(source, 2)

    assert (first.body, second.body) == (b"two", b"one")
    assert 0.4 <= time.monotonic() - began < 5
    assert not rabbit.exists(f"pgreaper.later.{queue}.256")
    source.done([first, second])
    source.close()
    rabbit.wait_for(queue, 0)


def test_what_is_put_off_for_longer_leaves_us(rabbitmq, rabbit, open_source):
    """It waits in the broker, unchanged, and comes again a little early, to be put off for the rest."""
    queue = rabbit.queue()
    rabbit.publish(queue, b"{}", message_id="id-1", headers={"mine": "yes"}, content_type="application/json")
    source = open_source(rabbitmq.url(queue))
    (message,) = receive(source, 1)
    began = time.monotonic()

    hops = 0
    while (left := began + 1.5 - time.monotonic()) > 0:
        source.later(message, seconds=left)
        (message,) = receive(source, 1)
        hops += 1

    assert hops <= 8
    assert message.attempt == 1
    assert rabbit.exists(f"pgreaper.later.{queue}.1024")
    source.close()
    rabbit.wait_for(queue, 1)
    (found,) = rabbit.drain(queue)
    assert (found.message_id, found.headers["mine"], found.properties.content_type) == (
        "id-1",
        "yes",
        "application/json",
    )


def test_early_commands_do_not_keep_due_ones_waiting(rabbitmq, rabbit, open_source):
    """Hundreds, put off for an hour and for a moment, with a prefetch of 20; a due one behind them comes at once."""
    queue = rabbit.queue()
    rabbit.publish(queue, *bodies(500))
    source = open_source(rabbitmq.url(queue))

    for i in range(50):
        for message in receive(source, 10, limit=10):
            source.later(message, seconds=3600 if i % 2 else 0.9)
    rabbit.publish(queue, b"due")
    began = time.monotonic()
    found: list[bytes] = []
    while b"due" not in found:
        assert time.monotonic() - began < 20
        got = source.receive(10, wait=5)
        source.done(got)
        found += [m.body for m in got]
    source.close()

    assert rabbit.count(f"pgreaper.later.{queue}.{2**21}") == 250


@pytest.mark.parametrize("last", ["Connection.Open", "Channel.Open"])
def test_a_broker_that_dies_between_two_frames(open_source, last):
    """While we come in: trouble, never another exception, which would be the listener's end."""
    with Leaver(last) as broker:
        for _ in range(10):
            with pytest.raises(Trouble) as raised:
                open_source(broker.url).receive(10, wait=20)
            assert raised.value.error_class == "ConnectionLost"


@again_if_lost
def test_a_broker_that_crashes_keeps_what_was_put_off(rabbitmq, rabbit, open_source):
    """Neither we nor the broker need to live until then."""
    queue = rabbit.queue()
    rabbit.publish(queue, *bodies(20))
    source = open_source(rabbitmq.url(queue))
    for message in receive(source, 20):
        source.later(message, seconds=2.1)
    later = f"pgreaper.later.{queue}.2048"
    wait_until(lambda: rabbit.exists(later))
    source.close()
    rabbit.crash()
    rabbit.start(queue, later)

    assert sorted(m.body for m in receive(open_source(rabbitmq.url(queue)), 20)) == sorted(bodies(20))


@pytest.fixture
def narrow(rabbitmq):
    """The user of a role that may read everything, and write only where a queue's own dead ones go."""
    rabbitmq.control("add_user", "narrow", "narrow")
    rabbitmq.control("set_permissions", "narrow", "^$", "^$", ".*")
    yield "narrow:narrow"
    rabbitmq.control("delete_user", "narrow")


def asides(source: AmqpSource, seconds: float) -> tuple[list[Received], list[Trouble]]:
    """What comes within so many seconds, and what cannot be moved meanwhile; the consumer is not to be lost."""
    deliveries = source._deliveries
    found: list[Received] = []
    troubles: list[Trouble] = []
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        try:
            found += source.receive(100, wait=left)
        except Trouble as trouble:
            if not trouble.aside:
                raise
            troubles.append(trouble)
    assert source._deliveries is deliveries
    return found, troubles


def test_a_role_that_may_make_no_queue_hears_of_it(rabbitmq, rabbit, open_source, narrow):
    """Trouble names it and what to; the command waits here until its time, and what is due comes meanwhile."""
    queue = rabbit.queue()
    rabbit.publish(queue, b"early")
    source = open_source(rabbitmq.url(queue).replace("guest:guest", narrow))
    (early,) = receive(source, 1)
    source.later(early, seconds=2.5)
    rabbit.publish(queue, b"due")
    found, troubles = asides(source, 2.0)
    assert [(m.body, m.attempt) for m in found] == [(b"due", 1)]
    assert {(t.error_class, t.queue) for t in troubles} == {("AccessRefused", f"pgreaper.later.{queue}.2048")}
    found, more = asides(source, 1.5)
    assert [(m.body, m.attempt, m.identity) for m in found] == [(b"early", 1, early.identity)]
    # After 0, 0.5 and 1.5 seconds.
    assert 2 <= len(troubles + more) <= 3


def test_poison_keeps_its_budget_without_a_delay_queue(rabbitmq, rabbit, open_source, narrow):
    """It is counted and waits here between its deliveries; then it takes the queue's own way."""
    dead = rabbit.queue()
    queue = rabbit.queue(dead_letter_exchange="", dead_letter_routing_key=dead)
    rabbit.publish(queue, b"poison")
    source = open_source(rabbitmq.url(queue, attempts="3").replace("guest:guest", narrow))
    attempts = []
    rejected_at = time.monotonic()
    for wait in (0, 1.0, 2.0):
        (poison,) = receive_past_asides(source)
        assert time.monotonic() - rejected_at > wait
        attempts.append(poison.attempt)
        rejected_at = time.monotonic()
        source.reject(poison, reason="Malformed")
    rabbit.wait_for(dead, 1)
    assert attempts == [1, 2, 3]


def receive_past_asides(source: AmqpSource) -> Sequence[Received]:
    """The next messages, whatever cannot be moved meanwhile."""
    while True:
        try:
            if found := source.receive(100, wait=20):
                return found
        except Trouble as trouble:
            if not trouble.aside:
                raise


def test_a_delay_queue_of_another_make_stands_in_nobodys_way(rabbitmq, rabbit, open_source):
    """What cannot be moved there waits here, what goes to others is moved; made right, it is used."""
    queue = rabbit.queue()
    wrong = rabbit.queue(f"pgreaper.later.{queue}.{2**21}")
    rabbit.publish(queue, b"an hour", b"a day")
    source = open_source(rabbitmq.url(queue))
    hour, day = receive(source, 2)
    source.put_off([(hour, 3600), (day, 86400)])
    found, troubles = asides(source, 1)
    assert found == []
    assert {(t.error_class, t.queue) for t in troubles} == {("PreconditionFailed", wrong)}
    rabbit.wait_for(f"pgreaper.later.{queue}.{2**26}", 1)
    rabbit.delete(wrong)
    wait_until(lambda: rabbit.exists(wrong))
    rabbit.wait_for(wrong, 1)
    source.close()
    assert rabbit.count(queue) == 0


def test_a_queue_with_a_long_name_can_be_put_off_for_longer(rabbitmq, rabbit, open_source):
    """There is no room in the names of its delay queues."""
    queue = rabbit.queue("q" * 255)
    rabbit.publish(queue, b"{}")
    source = open_source(rabbitmq.url(queue))
    try:
        (message,) = receive(source, 1)
        source.later(message, seconds=1.1)
        (again,) = receive(source, 1)
        assert again.identity == message.identity
        assert again.handle != message.handle
    finally:
        rabbit.delete(queue)


def test_a_broker_without_room_hears_what_was_done(rabbitmq, rabbit, open_source):
    """It takes no command that is put off, and must not stop listening to the connection with the others for that."""
    queue = rabbit.queue()
    rabbit.publish(queue, b"early", b"due")
    source = open_source(rabbitmq.url(queue))
    early, due = receive(source, 2)
    rabbitmq.control("set_vm_memory_high_watermark", "0.000001")
    try:
        source.later(early, seconds=60)
        wait_until(lambda: source._deliveries and source._deliveries.outgoing)
        source.done([due])
        source.close()
        assert [m.body for m in rabbit.drain(queue)] == [b"early"]
    finally:
        rabbitmq.control("set_vm_memory_high_watermark", "0.4")


# -- reject


def test_a_rejected_command_takes_the_queues_own_way_after_its_budget(rabbitmq, rabbit, open_source):
    """It is delivered again, later and later; the last time it goes where the queue sends its dead."""
    dead = rabbit.queue()
    queue = rabbit.queue(dead_letter_exchange="", dead_letter_routing_key=dead)
    rabbit.publish(queue, b"poison", message_id="id-1")
    source = open_source(rabbitmq.url(queue, attempts="2"))

    began = time.monotonic()
    (first,) = receive(source, 1)
    source.reject(first, reason="Malformed")
    (second,) = receive(source, 1)
    waited = time.monotonic() - began
    source.reject(second, reason="Malformed")
    rabbit.wait_for(dead, 1)

    assert (first.attempt, second.attempt) == (1, 2)
    assert waited > 0.9
    (found,) = rabbit.drain(dead)
    assert (found.body, found.message_id, found.headers["pgreaper-reason"]) == (b"poison", "id-1", "Malformed")
    assert source.receive(1, wait=0) == []


def test_a_queue_without_such_a_way_can_be_given_one(rabbitmq, rabbit, open_source):
    """`dead` names the queue; rejected before anything else of it is known, the message is not lost."""
    dead, queue = rabbit.queue(), rabbit.queue()
    rabbit.publish(queue, b"poison")
    source = open_source(rabbitmq.url(queue, attempts="1", dead=dead))

    source.reject(receive(source, 1)[0], reason="UnknownPolicy")
    rabbit.wait_for(dead, 1)

    assert rabbit.drain(dead)[0].headers == {"pgreaper-failures": 1, "pgreaper-reason": "UnknownPolicy"}
    source.close()
    rabbit.wait_for(queue, 0)


def test_the_dead_letter_queue_has_to_exist(rabbitmq, rabbit, open_source):
    """It is looked for at the start, and named; nothing is taken without it."""
    queue = rabbit.queue()
    rabbit.publish(queue, b"{}")
    source = open_source(rabbitmq.url(queue, dead="nowhere"))
    for _ in range(2):
        with pytest.raises(Trouble, match="NoSuchQueue") as trouble:
            source.receive(1, wait=20)
        assert (trouble.value.queue, trouble.value.aside) == ("nowhere", False)
    rabbit.wait_for(queue, 1)
    assert [m.attempt for m in receive(open_source(rabbitmq.url(queue)), 1)] == [1]


def test_a_dead_letter_queue_that_goes_costs_nobody_else(rabbitmq, rabbit, open_source):
    """Poison waits here, tried less and less often; others come at once, once; there again, it takes the poison."""
    queue, dead = rabbit.queue(), rabbit.queue()
    rabbit.publish(queue, b"poison", b"poison")
    source = open_source(rabbitmq.url(queue, attempts="1", dead=dead))
    poison = receive(source, 2)
    rabbit.delete(dead)
    for message in poison:
        source.reject(message, reason="Malformed")
    rabbit.publish(queue, b"due")
    found, troubles = asides(source, 3)
    assert [(m.body, m.attempt) for m in found] == [(b"due", 1)]
    assert {(t.error_class, t.queue) for t in troubles} == {("NoSuchQueue", dead)}
    # After 0, 0.5 and 1.5 seconds.
    assert 2 <= len(troubles) <= 3
    rabbit.queue(dead)
    rabbit.wait_for(dead, 2)
    source.done(found)
    source.close()
    rabbit.wait_for(queue, 0)


# -- trouble


def test_a_cut_connection_is_trouble_and_its_messages_come_again(rabbitmq, rabbit, open_source):
    """Told once, while it waits; acknowledging a message of that connection is nobody's error and does nothing."""
    queue = rabbit.queue()
    with Proxy(("127.0.0.1", rabbitmq.port)) as proxy:
        source = open_source(rabbitmq.url(queue, port=proxy.port))
        rabbit.publish(queue, b"a", b"b")
        found = receive(source, 2)

        assert proxy.cut(0)
        with pytest.raises(Trouble, match="ConnectionLost"):
            source.receive(10, wait=20)
        source.done(found[:1])
        source.later(found[1], seconds=0)
        source.reject(found[1], reason="Malformed")
        source.keep(found, seconds=60)

        again = receive(source, 2)
        assert [(m.body, m.attempt) for m in again] == [(b"a", 2), (b"b", 2)]
        source.done(again)
        source.close()
    rabbit.wait_for(queue, 0)


def test_a_cut_connection_for_copies_is_opened_again(rabbitmq, rabbit, open_source):
    """Only that one ended: the next message that is put off gets a new one, and commands come meanwhile."""
    queue = rabbit.queue()
    delayed = f"pgreaper.later.{queue}.{2**21}"
    rabbit.publish(queue, b"a", b"b")
    with Proxy(("127.0.0.1", rabbitmq.port)) as proxy:
        source = open_source(rabbitmq.url(queue, port=proxy.port))
        first, second = receive(source, 2)
        source.later(first, seconds=3000)
        wait_until(lambda: rabbit.exists(delayed))
        rabbit.wait_for(delayed, 1)
        outgoing = source._deliveries.outgoing
        assert proxy.cut(1)
        wait_until(lambda: not outgoing.connected.is_set())
        source.later(second, seconds=3000)
        rabbit.wait_for(delayed, 2)
        source.close()


def test_an_acknowledgement_that_is_lost_brings_the_command_again(rabbitmq, rabbit, open_source):
    """The connection breaks between the commit and the broker: at least once, with the attempt told."""
    queue = rabbit.queue()
    rabbit.publish(queue, b"{}")
    with Proxy(("127.0.0.1", rabbitmq.port)) as proxy:
        source = open_source(rabbitmq.url(queue, port=proxy.port))
        found = receive(source, 1)
        assert proxy.stall(0, 3600)
        source.done(found)
        assert proxy.cut(0)
        with pytest.raises(Trouble, match="ConnectionLost"):
            source.receive(10, wait=20)
        (again,) = receive(source, 1)

    assert (again.body, again.attempt) == (b"{}", 2)


@again_if_lost
def test_a_broker_that_crashes_in_mid_stream_loses_nothing(rabbitmq, rabbit, open_source):
    """Trouble until it is back; then all that was not acknowledged is there, and maybe what was, just before."""
    queue = rabbit.queue()
    rabbit.publish(queue, *bodies(300))
    source = open_source(rabbitmq.url(queue))
    done = source.receive(100, wait=20)
    source.done(done)
    rabbit.wait_for(queue, 100 - len(done))  # 200 are with us, some of them received
    source.receive(100, wait=20)

    rabbit.crash()
    wait_until(lambda: source._deliveries is not None and source._deliveries.lost)
    troubles = set()
    for _ in range(2):
        with pytest.raises(Trouble) as trouble:
            source.receive(100, wait=20)
        troubles.add(trouble.value.error_class)
    rabbit.start(queue)
    found: set[bytes] = set()
    end = time.monotonic() + 40
    while not found >= set(bodies(300)) - {m.body for m in done}:
        assert time.monotonic() < end, f"{len(found)} came"
        with suppress(Trouble):  # the broker answers before it has found its queues again
            got = source.receive(100, wait=1)
            source.done(got)
            found |= {m.body for m in got}

    assert troubles == {"ConnectionLost", "ConnectionRefused"}


def test_the_connection_lives_while_the_caller_works_for_long(rabbitmq, rabbit, open_source):
    """Heartbeats go on between a receive and its acknowledgement."""
    queue = rabbit.queue()
    rabbit.publish(queue, b"{}")
    source = open_source(rabbitmq.url(queue, heartbeat="1"))
    found = receive(source, 1)

    rabbit.wait_until_a_silent_client_is_thrown_out()
    source.done(found)
    source.close()

    rabbit.wait_for(queue, 0)


def test_a_queue_that_is_deleted_is_trouble(rabbitmq, rabbit, open_source):
    """The broker only ends the consumer: nobody may wait for ever for what cannot come."""
    queue = rabbit.queue()
    source = open_source(rabbitmq.url(queue))
    assert source.receive(1, wait=0) == []
    rabbit.delete(queue)

    with pytest.raises(Trouble, match="ConsumerCancelled"):
        source.receive(1, wait=20)
    with pytest.raises(Trouble, match="NoSuchQueue"):
        source.receive(1, wait=20)


def test_a_quorum_queue_counts_its_deliveries(rabbitmq, rabbit, open_source):
    """Each return to the queue is an attempt."""
    queue = rabbit.queue(queue_type="quorum")
    rabbit.publish(queue, b"{}")
    attempts = []
    for _ in range(3):
        source = open_source(rabbitmq.url(queue))
        attempts.append(receive(source, 1)[0].attempt)
        source.close()

    assert attempts == [1, 2, 3]


@pytest.mark.parametrize(
    ("change", "trouble"),
    [
        (lambda url: url.replace(":guest@", ":wrong@"), "AccessRefused"),
        (lambda url: url.replace("/?", "/nowhere?"), "VhostRefused"),
        (lambda url: url + "-none", "NoSuchQueue"),
    ],
)
def test_what_is_wrong_with_the_way_there_has_a_name(rabbitmq, rabbit, open_source, change, trouble):
    """Each call says so again, and is over soon."""
    source = open_source(change(rabbitmq.url(rabbit.queue())))

    for _ in range(2):
        with pytest.raises(Trouble, match=f"^{trouble}$"):
            source.receive(1, wait=0)


def test_nobody_there_is_trouble(open_source):
    """Also to a source that was never connected, which can be closed all the same."""
    source = open_source(f"amqp://127.0.0.1:{free_port()}/?queue=q")

    with pytest.raises(Trouble, match="ConnectionRefused"):
        source.receive(1, wait=0)

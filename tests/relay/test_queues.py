"""Relays as processes, to real brokers, through kills and outages: at least once, under one key."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING

from tests.cli.conftest import PGREAPER, environment
from tests.relay.conftest import told, wait_for

if TYPE_CHECKING:
    from tests.queues.endpoint import Request

DELIVERED = "select coalesce(sum(delivered), 0) >= %s from pgreaper.relays"
LEASED = "select exists (select from pgreaper.deliveries where finished_at is null)"


def in_order(bodies: list[bytes]) -> bool:
    """Whether the events of each hold came in the order of their deadlines, repetitions left out."""
    seen: dict[str, list[str]] = {}
    for body in bodies:
        event = json.loads(body)
        deadlines = seen.setdefault(event["key"], [])
        if event["deadline"] not in deadlines:
            deadlines.append(event["deadline"])
    return all(deadlines == sorted(deadlines) for deadlines in seen.values())


# -- one of each


def test_lines_on_stdout(pgreaper, opened, expired, identities):
    """Events on stdout, and nothing else there; what the run did is told on stderr."""
    opened()
    expired(30)
    done = pgreaper("relay", "holds", "--to", "stdout:", "--once", "--batch", "7")
    assert done.code == 0
    assert Counter(told(done.out.splitlines())) == Counter(identities())
    assert done.err.startswith("holds: 30 delivered in ")


def test_an_endpoint_over_http(pgreaper, opened, expired, identities, endpoint):
    """A POST an event, its key as a header and in the body; a redirect or a 422 is nobody else's trouble."""
    opened()
    keys = expired(30)
    endpoint.answer = lambda request: 422 if json.loads(request.body)["key"] == keys[3] else 204
    done = pgreaper("relay", "holds", "--once", "--json", PGREAPER_RELAY_URL=endpoint.url)
    assert Counter(endpoint.identities()) == Counter(identities()) == Counter(told([r.body for r in endpoint.requests]))
    assert (done.code, done.json["delivered"], done.json["dead"]) == (1, 29, 1)
    assert done.json["refused"] == [{"error_class": "HTTP 422", "events": 1}]
    assert "token=t" not in done.out + done.err


def test_a_queue_of_rabbitmq(pgreaper, opened, expired, identities, rabbit):
    """Messages with the key as their id; a queue that is not there is trouble and costs no event."""
    opened()
    expired(30)
    lost = pgreaper("relay", "holds", "--once", "--to", rabbit.broker.url("nowhere"))
    assert (lost.code, "does not take events now: NoSuchQueue" in lost.err) == (75, True)
    queue = rabbit.queue()
    done = pgreaper("relay", "holds", "--once", "--to", rabbit.broker.url(queue))
    found = rabbit.drain(queue)
    assert (done.code, Counter(message.message_id for message in found)) == (0, Counter(identities()))
    assert told([message.body for message in found]) == [message.message_id for message in found]
    assert rabbit.broker.password not in lost.out + lost.err + done.out + done.err


def test_a_topic_of_kafka(in_process, opened, expired, identities, kafka):
    """Events of a hold in one partition, by its key."""
    opened()
    expired(30)
    topic = kafka.topic("expired", 2)
    done = in_process("relay", "holds", "--once", "--to", kafka.url(topic))
    records = kafka.records(topic, 2)
    assert (done.code, Counter(told([r.value() for r in records]))) == (0, Counter(identities()))
    assert all(json.loads(r.value())["key"].encode() == r.key() for r in records)


def test_a_queue_of_sqs(in_process, opened, expired, identities, aws):
    """An answer is cut off after the queue has the events: trouble, and the next run sends those again."""
    opened()
    expired(30)
    queue = aws.queue()
    cut = iter([aws.front.CUT] * 20)
    aws.front.after = lambda operation, asked, answer: (operation == "SendMessageBatch" and next(cut, None)) or None
    lost = in_process("relay", "holds", "--once", "--to", aws.url(queue))
    assert (lost.code, "sqs://" in lost.err) == (75, True)
    aws.front.after = lambda operation, asked, answer: None
    done = in_process("relay", "holds", "--once", "--to", aws.url(queue))
    arrived = Counter(told([message["Body"] for message in aws.drain(queue)]))
    assert (done.code, set(arrived)) == (0, identities())
    assert arrived.total() > 30


# -- somebody dies


def test_killed_between_publish_and_confirm(db, opened, expired, identities, start, endpoint, wait_until):
    """The event arrived and its relay did not hear of it: sent again after the lease, under the same key."""
    opened()
    expired(20)
    victims: list[int] = []

    def kill(request: Request) -> int:
        if len(endpoint.requests) == 5 and victims:
            os.kill(victims.pop(), signal.SIGKILL)
        return 204

    endpoint.answer = kill
    command = ["relay", "holds", "--to", endpoint.url, "--batch", "10", "--lease", "1", "--poll", "0.05"]
    first = start(*command)
    victims.append(first.popen.pid)
    assert first.end()[0].code == -signal.SIGKILL
    assert db.execute("select delivered from pgreaper.relays").fetchone() == (0,)
    start(*command)
    wait_until(DELIVERED, 20)
    assert set(endpoint.identities()) == identities()
    # Of the first batch five had arrived, and others were on their way.
    assert 20 + 5 <= len(endpoint.requests) <= 20 + 10
    assert db.execute("select redelivered, delivered from pgreaper.relays").fetchone() == (10, 20)


def test_killed_between_confirm_and_acknowledgement(
    connect, db, opened, expired, identities, start, endpoint, wait_for_lock, wait_until
):
    """Everything arrived and nothing was booked: all of it comes again, under the same keys."""
    opened()
    expired(10)
    blocker = connect()
    gate = {"open": False}

    def hold(request: Request) -> int:
        if not gate["open"]:
            gate["open"] = True
            blocker.execute("begin")
            blocker.execute("select from pgreaper.relays for update")
        return 204

    endpoint.answer = hold
    command = ["relay", "holds", "--to", endpoint.url, "--lease", "1", "--poll", "0.05"]
    relay = start(*command)
    wait_for(lambda: len(endpoint.requests) == 10)
    (pid,) = db.execute("select pid from pg_stat_activity where application_name like 'pgreaper/%'").fetchone()
    wait_for_lock(pid)
    relay.popen.kill()
    relay.end()
    # Whoever waits for a lock does not notice that nobody waits for him: as if the request had not left.
    db.execute("select pg_terminate_backend(%s)", (pid,))
    blocker.execute("rollback")
    start(*command)
    wait_until(DELIVERED, 10)
    assert Counter(endpoint.identities()) == Counter(dict.fromkeys(identities(), 2))


def test_a_reader_that_leaves(dsn, db, opened, expired, pgreaper, identities):
    """`| head -1`: no complaint, and what nobody read is there for the next run."""
    opened()
    expired(2000)
    done = subprocess.run(
        ["/bin/sh", "-c", '"$@" | head -1', "sh", *PGREAPER, "relay", "holds", "--to", "stdout:"],
        env=environment(dsn), capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    assert len(told(done.stdout.splitlines())) == 1
    assert [line for line in done.stderr.splitlines() if "is up" not in line] == []
    rest = pgreaper("relay", "holds", "--to", "stdout:", "--once")
    (delivered,) = db.execute("select delivered from pgreaper.relays").fetchone()
    assert (rest.code, delivered) == (0, 2000)


# -- the broker dies


def test_rabbitmq_restarts_in_mid_stream(db, opened, expired, identities, start, rabbit, wait_until):
    """Killed with messages in flight: nothing confirmed is lost, what was not is sent again, and the relay lives on."""
    opened()
    expired(1500)
    queue = rabbit.queue()
    relay = start("relay", "holds", "--to", rabbit.broker.url(queue), "--batch", "50")
    wait_until(DELIVERED, 150)
    rabbit.crash()
    wait_until("select trouble is not null from pgreaper.relays")
    (delivered,) = db.execute("select delivered from pgreaper.relays").fetchone()
    assert delivered < 1500
    rabbit.broker.start()
    # Now and then RabbitMQ 3.10 does not know the queue any more that was just made, nor what it has confirmed in it.
    # The relay's part is what it did not confirm.
    if not (kept := rabbit.exists(queue)):
        rabbit.queue(queue)
    wait_until(DELIVERED, 1500, seconds=60)
    relay.popen.send_signal(signal.SIGTERM)
    done, _ = relay.end()
    found = set(told([message.body for message in rabbit.drain(queue)]))
    missing = identities() - found
    assert len(missing) <= (0 if kept else delivered)
    assert (done.code, "takes events again" in done.err) == (0, True)


def test_kafka_restarts_in_mid_stream(db, opened, expired, identities, relaying, kafka):
    """Its brokers are gone and come back: none missing, and order per hold."""
    from pgreaper import queues

    opened()
    expired(2000)
    topic = kafka.topic("expired", 2)

    def outage(beside) -> None:
        beside.wait_for(lambda: db.execute(DELIVERED, (300,)).fetchone()[0])
        kafka.down()
        beside.wait_for(lambda: not db.execute(DELIVERED, (2000,)).fetchone()[0])
        kafka.up()
        beside.wait_for(lambda: db.execute(DELIVERED, (2000,)).fetchone()[0], seconds=60)

    run, _ = relaying(queues.sink(kafka.url(topic)), outage, batch=100)
    assert set(told([record.value() for record in kafka.records(topic, 2)])) == identities()
    assert (run.delivered, run.exit_code) == (2000, 0)


# -- several


def test_processes_of_a_relay_share_its_events(dsn, db, opened, expired, identities, tmp_path, wait_until):
    """Nobody sends what another has; the events of one hold keep their order whoever sends them."""
    opened()
    for _ in range(3):
        expired(100, batch=30)
        db.execute(
            "update holds set status = 'held',"
            " expires_at = clock_timestamp() - interval '1 minute' + id * interval '1 ms'"
        )
        db.execute("call pgreaper.reaper_sweep('holds', 40)")
    expected = identities()
    # What is appended to one file has the order in which it was sent.
    with (tmp_path / "events").open("ab") as file, ExitStack() as stack:
        relays = []
        for _ in range(3):
            relay = subprocess.Popen(
                [*PGREAPER, "relay", "holds", "--to", "stdout:", "--batch", "17", "--poll", "0.05"],
                env=environment(dsn), stdout=file, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            stack.callback(relay.wait)
            stack.callback(relay.kill)
            relays.append(relay)
        wait_until(DELIVERED, len(expected), seconds=30)
        for relay in relays:
            relay.send_signal(signal.SIGTERM)
        told_by = [relay.communicate()[1] for relay in relays]
    lines = (tmp_path / "events").read_bytes().splitlines()
    assert Counter(told(lines)) == Counter(expected)
    assert in_order(lines)
    assert sum(" delivered in " in text for text in told_by) > 1


def test_prune_waits_for_a_slow_relay(dsn, db, opened, expired, identities, start, endpoint, wait_until):
    """Two relays of a policy at different speeds: the fast one does not wait, and prune waits for the slow one."""
    opened()
    opened("slow")
    expired(100, batch=20)
    db.execute("update pgreaper.transitions set at = at - interval '2 days'")
    expected = identities()
    slow = start("relay", "holds", "--name", "slow", "--to", endpoint.url, "--batch", "10", "--lease", "2")
    endpoint.answer = lambda request: "hang"
    wait_until(LEASED)
    prune = "select sum(removed) from pgreaper.reaper_prune(keep => '1 day') where kind = 'transitions'"
    fast = subprocess.run(
        [*PGREAPER, "relay", "holds", "--to", "stdout:", "--once"],
        env=environment(dsn), capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    assert set(told(fast.stdout.splitlines())) == expected
    assert db.execute(prune).fetchone() == (0,)
    endpoint.answer = lambda request: 204
    endpoint.release()
    wait_until("select delivered = 100 from pgreaper.relays where name = 'slow'", seconds=30)
    slow.popen.send_signal(signal.SIGTERM)
    slow.end()
    assert set(endpoint.identities()) == expected
    assert db.execute(prune).fetchone()[0] > 0


# -- nothing to send


def test_a_wrong_password_of_rabbitmq_is_found_without_an_event(in_process, opened, rabbit):
    """The first run of somebody who sets it up: the broker is asked, and a queue that is right is no trouble."""
    opened()
    url = rabbit.broker.url(rabbit.queue())
    wrong = in_process("relay", "holds", "--once", "--to", url.replace(rabbit.broker.password, "wrong"))
    assert (wrong.code, "does not take events now: AccessRefused" in wrong.err) == (75, True), wrong
    assert in_process("relay", "holds", "--once", "--to", url).code == 0


def test_a_broker_of_kafka_that_is_away_is_found_without_an_event(in_process, opened, kafka):
    """So is one that is not there."""
    opened()
    wrong = in_process("relay", "holds", "--once", "--to", "kafka://127.0.0.1:9/t")
    assert (wrong.code, "does not take events now: " in wrong.err) == (75, True), wrong
    assert in_process("relay", "holds", "--once", "--to", kafka.url(kafka.topic("probed", 1))).code == 0


def test_a_missing_queue_of_sqs_is_found_without_an_event(in_process, opened, aws):
    """So is one that is not there."""
    opened()
    queue = aws.queue()
    wrong = in_process("relay", "holds", "--once", "--to", aws.url(queue).replace(queue, "nowhere"))
    assert (wrong.code, "does not take events now: " in wrong.err) == (75, True), wrong
    assert in_process("relay", "holds", "--once", "--to", aws.url(queue)).code == 0

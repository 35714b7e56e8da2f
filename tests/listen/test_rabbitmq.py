"""Commands from a real RabbitMQ: what crashes and cuts do to them, and what becomes of poison."""

from __future__ import annotations

import random
import re
import signal
from datetime import timedelta

import pytest

from pgreaper.queues import source
from pgreaper.queues.amqp import AmqpSource
from tests.chaos.proxy import Proxy
from tests.listen.conftest import command
from tests.queues.conftest import again_if_lost


def with_dead_letters(rabbit):
    """A queue with a dead-letter path, and where poison goes on it."""
    dead = rabbit.queue()
    name = rabbit.queue(dead_letter_exchange="", dead_letter_routing_key=dead)
    return name, dead


@pytest.fixture
def queue(rabbit):
    return with_dead_letters(rabbit)


def test_cut_between_commit_and_acknowledgement(db, holds, listen, rabbitmq, rabbit, queue, gate, trail, wait_until):
    """The commit is through and the broker never hears of it: delivered again, found done, one transition."""
    name, _ = queue
    ids = holds.due(20)
    holds.register()
    rabbit.publish(name, *(command(n) for n in ids))
    with Proxy(("127.0.0.1", rabbitmq.port)) as proxy:
        url = re.sub(rf":{rabbitmq.port}/", f":{proxy.port}/", rabbitmq.url(name))

        def script(beside):
            wait_until(f"select {gate.WAITING}")
            assert proxy.cut(0)
            gate.open()
            beside.wait_for(lambda: trail() == dict.fromkeys(ids, 1))
            rabbit.wait_for(name, 0)
            # What the first batch had of them, at least one, was there twice.
            beside.wait_for(lambda: db.execute("select already_done > 0 from pgreaper.totals").fetchone()[0])
            beside.hears("is there again")

        run, _, lines = listen(script=script, source=source(url))
    assert trail() == dict.fromkeys(ids, 1)
    assert run.received == 20 + run.outcomes["already-done"]
    assert run.exit_code == 0
    assert any("trying again" in line for line in lines)
    assert rabbit.count(name) == 0


def test_killed_with_messages_in_flight(holds, listen, rabbitmq, rabbit, queue, start, gate, trail, wait_until):
    """SIGKILL in mid-transition: the broker delivers to the next listener, each hold expires once."""
    name, _ = queue
    ids = holds.due(30)
    holds.register()
    rabbit.publish(name, *(command(n) for n in ids))
    victim = start("listen", "--from", rabbitmq.url(name), "--batch", "10")
    wait_until(f"select {gate.WAITING}", seconds=30)
    victim.popen.send_signal(signal.SIGKILL)
    victim.popen.wait()
    gate.open()
    rabbit.wait_for(name, 30)
    # Its transaction may still commit, or be rolled back: both are fine.
    run, _, _ = listen(source=source(rabbitmq.url(name)), once=True)
    assert trail() == dict.fromkeys(ids, 1)
    assert set(holds.states().values()) == {"expired"}
    assert run.done == 30
    assert rabbit.count(name) == 0


def test_poison_ends_in_the_dead_letter_queue(holds, listen, rabbitmq, rabbit, queue, trail):
    """After its budget, as it was; what came with it is done at once."""
    name, dead = queue
    holds.due(2)
    holds.register()
    poison = [b"\x00 no command", command("x"), command(1, policy="nobody")]
    rabbit.publish(name, command(1), *poison, command(2))

    def script(beside):
        beside.wait_for(lambda: len(beside.queue.of("done")) == 2)
        rabbit.wait_for(dead, 3)

    run, witness, _ = listen(script=script, source=source(f"{rabbitmq.url(name)}&attempts=2"))
    assert trail() == {1: 1, 2: 1}
    assert sorted(found.body for found in rabbit.drain(dead)) == sorted(poison)
    assert run.rejected.total() == len(witness.of("reject")) == 6


def test_poison_without_a_dead_letter_queue(holds, listen, rabbitmq, rabbit):
    """It is rejected once and told once, with the queue that is not there; the listener goes on, as if it were."""
    queue, dead = rabbit.queue(), rabbit.queue()
    holds.due(2)
    holds.register()
    amqp = source(f"{rabbitmq.url(queue)}&attempts=1&dead={dead}")
    assert isinstance(amqp, AmqpSource)
    ways = amqp._ways

    def script(beside):
        rabbit.publish(queue, command(1))
        beside.wait_for(lambda: len(beside.queue.of("done")) == 1)
        rabbit.delete(dead)
        rabbit.publish(queue, b"no command")
        beside.hears(f"no command can be moved to queue {dead}: NoSuchQueue")
        rabbit.publish(queue, command(2))
        beside.wait_for(lambda: len(beside.queue.of("done")) == 2)
        beside.wait_for(lambda: ways[dead].failures > 1)
        rabbit.queue(dead)
        rabbit.wait_for(dead, 1)

    run, _, lines = listen(script=script, source=amqp)
    assert (run.received, run.rejected) == (3, {"Malformed": 1})
    assert sum("NoSuchQueue" in line for line in lines) == 1
    assert not any("trying again" in line for line in lines)


def test_without_the_dead_letter_queue_nothing_begins(holds, rabbitmq, rabbit, in_process):
    """The trouble names it, and not the queue that is read."""
    holds.register()
    url = f"{rabbitmq.url(rabbit.queue())}&dead=nowhere"
    result = in_process("listen", "--from", url, "--max-seconds", "0.5")
    assert result.code == 75
    assert "NoSuchQueue nowhere" in result.err


def test_a_locked_hold_is_asked_for_less_and_less(connect, holds, listen, rabbitmq, rabbit, queue):
    """Also when the broker had it in between and counts nothing; the other keys of its message are over."""
    name, _ = queue
    holds.due(2)
    holds.register()
    other = connect(autocommit=False)
    other.execute("select from holds where id = 1 for update")
    rabbit.publish(name, b'{"policy": "holds", "keys": [1, 2]}')

    def script(beside):
        beside.wait_for(lambda: len(beside.queue.of("later")) >= 5)
        other.rollback()
        beside.wait_for(lambda: beside.queue.of("done"))

    run, witness, _ = listen(script=script, source=source(rabbitmq.url(name)))
    for turn, (_, seconds) in enumerate(witness.of("later")):
        assert 0.1 * 2**turn <= seconds <= 0.2 * 2**turn
    assert run.outcomes["expired"] == 2
    assert run.outcomes["already-done"] == 0


def test_an_early_command_and_one_for_a_consumed_hold(db, holds, listen, rabbitmq, rabbit, queue):
    """The first expires within a second after its deadline and not before; the other is acknowledged and done with."""
    name, _ = queue
    holds.due(1)
    holds.register()
    db.execute("update holds set status = 'consumed'")

    def script(beside):
        db.execute("insert into holds (expires_at) values (clock_timestamp() + interval '2.5 seconds')")
        rabbit.publish(name, command(2), command(1))
        beside.wait_for(lambda: len(beside.queue.of("done")) == 2)

    run, _, _ = listen(script=script, source=source(rabbitmq.url(name)))
    ((late,),) = db.execute("select at - deadlines[1] from pgreaper.transitions").fetchall()
    assert timedelta(0) <= late < timedelta(seconds=1)
    assert holds.states() == {1: "consumed", 2: "expired"}
    assert run.exit_code == 0
    assert rabbit.count(name) == 0


def test_a_broker_that_crashes_in_mid_stream(holds, listen, rabbitmq, rabbit, trail):
    """Duplicates, any order, a crash: every hold expires once, and in the end the queue is empty."""
    holds.register()

    @again_if_lost
    def scenario():
        name, _ = with_dead_letters(rabbit)
        ids = holds.due(600)
        asked = [*ids, *ids[::3]]
        random.Random(7).shuffle(asked)
        rabbit.publish(name, *(command(n) for n in asked))

        def expired():
            return {n: times for n, times in trail().items() if n >= ids[0]}

        def script(beside):
            beside.wait_for(lambda: beside.queue.of("done"))
            rabbit.crash()
            beside.hears("trying again in")
            rabbit.start(name)
            beside.wait_for(lambda: len(expired()) == 600, 60)
            rabbit.wait_for(name, 0)

        run, _, _ = listen(script=script, source=source(rabbitmq.url(name)), batch=50)
        assert expired() == dict.fromkeys(ids, 1)
        assert run.exit_code == 0

    scenario()


def test_the_password_is_shown_nowhere(holds, rabbitmq, queue, in_process, monkeypatch):
    """Neither by a run that is refused at the broker, nor by a URL that is wrong."""
    name, _ = queue
    url = rabbitmq.url(name).replace("guest:guest@", "guest:s3cr3t@")
    refused = in_process("listen", "--from", url, "--max-seconds", "0.5")
    assert refused.code == 75
    assert "AccessRefused" in refused.err
    monkeypatch.setenv("PGREAPER_LISTEN_URL", url)
    machine = in_process("listen", "--max-seconds", "0.5", "--json", "--log-format", "json")
    assert machine.json["error"]["code"] == "queue-unavailable"
    wrong = in_process("listen", "--from", url.replace("@", "@@"))
    assert wrong.code == 2
    for result in (refused, machine, wrong):
        assert "s3cr3t" not in result.out + result.err

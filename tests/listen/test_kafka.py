"""Commands from Kafka: offsets follow the commits, and a topic takes the poison."""

from __future__ import annotations

import signal

from pgreaper.queues import source
from tests.listen.conftest import command


def test_commands_of_every_kind(db, holds, listen, kafka, trail):
    """Due, early, twice and poison: each ends where it belongs, and the offset stands behind all of them."""
    topic, dead = kafka.topic("expiries"), kafka.topic("expiries.dead")
    holds.due(2)
    holds.register()
    db.execute("insert into holds (expires_at) values (clock_timestamp() + interval '1.5 seconds')")
    kafka.write(topic, command(3), command(1), b"no command", command(2), command(1))

    def script(beside):
        beside.wait_for(lambda: len(beside.queue.of("done")) == 4)
        beside.wait_for(lambda: kafka.committed(topic) == 5)

    run, _, _ = listen(script=script, source=source(kafka.url(topic, group="listeners")))
    assert trail() == {1: 1, 2: 1, 3: 1}
    assert [record.value() for record in kafka.records(dead)] == [b"no command"]
    assert run.rejected == {"Malformed": 1}


def test_killed_with_messages_in_flight(holds, listen, kafka, start, gate, trail, wait_until):
    """No offset before the commit: what a killed listener had comes to the next one of its group."""
    topic = kafka.topic("expiries")
    kafka.topic("expiries.dead")
    ids = holds.due(20)
    holds.register()
    kafka.write(topic, *(command(n) for n in ids))
    url = kafka.url(topic, group="listeners", session__timeout__ms=2000, heartbeat__interval__ms=200)
    victim = start("listen", "--from", url)
    wait_until(f"select {gate.WAITING}", seconds=30)
    assert kafka.committed(topic) is None
    victim.popen.send_signal(signal.SIGKILL)
    victim.popen.wait()
    gate.open()

    def script(beside):
        beside.wait_for(lambda: kafka.committed(topic) == 20, 40)

    listen(script=script, source=source(url))
    assert trail() == dict.fromkeys(ids, 1)
    assert set(holds.states().values()) == {"expired"}

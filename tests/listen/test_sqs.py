"""Commands from SQS: what is acknowledged when, and what the queue's own budget does."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest

from pgreaper.queues import source
from tests.listen.conftest import command
from tests.queues.aws import Front


@pytest.fixture
def queue(aws):
    """A queue whose poison goes to another one after three deliveries."""
    dead = aws.queue()
    policy = json.dumps({"deadLetterTargetArn": aws.arn(dead), "maxReceiveCount": 3})
    return aws.queue(RedrivePolicy=policy), dead


def test_commands_of_every_kind(db, holds, listen, aws, queue, trail):
    """Due, early, twice, for a consumed hold, and poison: each ends where it belongs, and the queue is empty."""
    name, dead = queue
    holds.due(3)
    holds.register()
    db.execute("update holds set status = 'consumed' where id = 3")

    def script(beside):
        db.execute("insert into holds (expires_at) values (clock_timestamp() + interval '1.5 seconds')")
        aws.write(name, *(command(n).decode() for n in (4, 1, 2, 1, 3)), "no command")
        beside.wait_for(lambda: len(beside.queue.of("done")) == 5)
        beside.wait_for(lambda: aws.counts(dead)[0] == 1)

    run, _, _ = listen(script=script, source=source(aws.url(name)))
    assert trail() == {1: 1, 2: 1, 4: 1}
    assert holds.states()[3] == "consumed"
    ((late,),) = db.execute(
        "select at - deadlines[array_position(keys, '4')] from pgreaper.transitions where '4' = any (keys)"
    ).fetchall()
    assert timedelta(0) <= late < timedelta(seconds=5)
    assert aws.counts(name) == (0, 0)
    assert [found["Body"] for found in aws.drain(dead)] == ["no command"]
    assert run.rejected == {"Malformed": 3}


def test_an_acknowledgement_that_is_cut_off(holds, listen, aws, queue, trail):
    """The commit is through, the answer to the deletion never comes: delivered again, found done, one transition."""
    name, _ = queue
    holds.due(1)
    holds.register()
    aws.write(name, command(1).decode())
    lost: list[dict[int, int]] = []

    def before(operation, asked):
        if operation == "DeleteMessageBatch" and not lost:
            lost.append(trail())
            # botocore tries again by itself; so do those.
        if operation == "DeleteMessageBatch" and len(lost) < 4:
            lost.append({})
            return Front.CUT
        return None

    aws.front.before = before

    def script(beside):
        beside.wait_for(lambda: len(beside.queue.of("done")) == 2)
        beside.wait_for(lambda: aws.counts(name) == (0, 0))

    run, _, lines = listen(script=script, source=source(aws.url(name), visibility=1), visibility=1)
    assert lost[0] == {1: 1}, "it is told only what is committed"
    assert trail() == {1: 1}
    assert run.outcomes == {"expired": 1, "already-done": 1}
    assert any("what it was told comes again" in line for line in lines)


def test_many_early_commands_cost_few_calls(holds, listen, aws, queue):
    """Ten messages are put off in a call, each until its own deadline: those that are due must not wait for them."""
    name, _ = queue
    ids = holds.ahead(30, within="10 minutes")
    holds.register()
    aws.write(name, *(command(n).decode() for n in ids))

    def script(beside):
        beside.wait_for(lambda: len(beside.queue.of("later")) == 30)

    run, _, _ = listen(script=script, source=source(aws.url(name)))
    asked = aws.front.asked("ChangeMessageVisibilityBatch")
    seconds = [entry["VisibilityTimeout"] for call in asked for entry in call["Entries"]]
    assert len(seconds) == run.put_off == 30
    assert len(set(seconds)) > 20
    assert len(asked) <= run.received // 10 + 3
    assert aws.counts(name) == (0, 30)


def test_long_work_outlives_the_visibility(holds, listen, aws, queue, gate, wait_until, trail):
    """A batch that takes longer than its messages are invisible is not delivered to anybody else meanwhile."""
    name, _ = queue
    holds.due(1)
    holds.register()
    aws.write(name, command(1).decode())

    def script(beside):
        wait_until(f"select {gate.WAITING}")
        beside.wait_for(lambda: len(aws.front.asked("ChangeMessageVisibilityBatch")) >= 5)
        assert aws.counts(name) == (0, 1)
        gate.open()
        beside.wait_for(lambda: beside.queue.of("done"))
        beside.wait_for(lambda: aws.counts(name) == (0, 0))

    run, _, _ = listen(script=script, source=source(aws.url(name), visibility=1), visibility=1)
    assert trail() == {1: 1}
    assert run.received == 1

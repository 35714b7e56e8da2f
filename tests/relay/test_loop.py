"""The loop: fetch, send, acknowledge, through everything that may come between."""

from __future__ import annotations

import os
import signal
import time

import psycopg
import pytest

from pgreaper.errors import InvalidInput, UnknownPolicy
from pgreaper.queues import Sent
from pgreaper.relay import SAME
from tests.conftest import Holds
from tests.relay.conftest import Queue, away, refuses, takes, wait_for

IDLE = "count(*) = 0 from pgreaper.deliveries where finished_at is null"


def test_each_event_once_and_in_the_order_of_expiry(opened, expired, relaying, identities):
    """A run that ends delivers all there is, in batches; the next one has nothing."""
    opened()
    keys = expired(25)
    queue = Queue()
    run, _ = relaying(queue, batch=10)
    assert queue.keys() == keys
    assert {message.identity for message in queue.taken} == identities()
    assert (run.delivered, run.batches, run.ended, run.exit_code, queue.is_closed) == (25, 3, "drained", 0, True)
    assert relaying(Queue())[0].batches == 0


def test_events_of_a_large_row_go_in_parts(opened, expired, relaying):
    """What one statement expired is delivered a batch at a time, in order."""
    opened()
    keys = expired(1000, batch=1000)
    queue = Queue()
    relaying(queue, batch=300)
    assert [len(batch) for batch in queue.batches] == [300, 300, 300, 100]
    assert queue.keys() == keys


def test_a_new_relay_begins_now_or_with_the_oldest(holds, expired, relaying):
    """What expired before is history, unless --backfill asks for it."""
    holds.register()
    keys = expired(3)
    queue = Queue()
    run, lines = relaying(queue)
    assert (queue.keys(), run.created, run.begins, lines) == ([], True, "what expires from now on", [])
    run, _ = relaying(queue, name="all", backfill=True)
    assert (queue.keys(), run.relay, run.begins) == (keys, "all", "the oldest of the trail")
    assert relaying(queue)[0].begins is None


def test_a_busy_relay_says_what_it_did(monkeypatch, opened, expired, relaying):
    """Once a minute, also when there is always more."""
    monkeypatch.setattr("pgreaper.relay.REPORT_EVERY", 0.0)
    opened()
    expired(30)
    _, lines = relaying(Queue(), batch=10)
    assert sum("relay holds: 10 delivered in the last " in line for line in lines) == 3


def test_relays_of_a_policy_are_independent(opened, expired, relaying):
    """What one has delivered, the other still has."""
    opened()
    opened("audit")
    keys = expired(5)
    for name in (None, "audit"):
        queue = Queue()
        relaying(queue, name=name)
        assert queue.keys() == keys


def test_what_is_refused_for_good_is_given_up(db, opened, expired, relaying):
    """The others go on; the run ends with 1 and says why, and the event is there for a person."""
    opened()
    keys = expired(5)
    queue = Queue(refuses(keys[2]))
    run, lines = relaying(queue)
    assert (queue.keys(), run.dead, run.exit_code) == ([keys[0], keys[1], keys[3], keys[4]], 1, 1)
    assert [line for line in lines if "TooLarge" in line] == [
        "relay holds: 1 event refused with TooLarge, given up: `pgreaper relays dead` lists them"
    ]
    assert db.execute("select key, error_class from pgreaper.dead_events").fetchall() == [(keys[2], "TooLarge")]


def test_what_is_sent_again_has_the_same_key(db, opened, expired, relaying):
    """A dead event that is resent goes out under the idempotency key that it had."""
    opened()
    expired(1)
    queue = Queue(refuses(), takes)
    relaying(queue)
    assert db.execute("select pgreaper.reaper_resend('holds')").fetchone() == (1,)
    relaying(queue)
    first, second = (batch[0] for batch in queue.batches)
    assert (first.identity, first.body) == (second.identity, second.body)


def test_a_wrong_address_is_told_as_trouble(db, opened, expired, relaying):
    """A queue that refuses everything for good costs some events, not all: the run ends with 75."""
    opened()
    expired(40)
    run, _ = relaying(Queue(refuses(error_class="HTTP 404")))
    assert (run.dead, run.returned, run.exit_code, run.ended) == (SAME, 40 - SAME, 75, "trouble")
    assert db.execute("select waiting, dead, trouble from pgreaper.relay_status").fetchone() == (
        40 - SAME, SAME, "HTTP 404",
    )  # fmt: skip


def test_a_queue_that_is_away_ends_a_run_with_75(db, opened, expired, relaying):
    """Nothing is lost and nobody is charged; status has the trouble until the queue takes events again."""
    opened()
    keys = expired(5)
    queue = Queue(away, takes)
    run, _ = relaying(queue)
    assert (run.delivered, run.returned, run.unconfirmed, run.exit_code) == (0, 5, 5, 75)
    assert run.trouble.message == "queue: does not take events now: ConnectionRefused"
    assert db.execute("select trouble, waiting from pgreaper.relay_status").fetchone() == ("ConnectionRefused", 5)
    assert db.execute("select count(*) from pgreaper.undelivered").fetchone() == (0,)
    run, _ = relaying(queue)
    assert (queue.keys(), run.exit_code) == (keys, 0)
    assert db.execute("select trouble from pgreaper.relay_status").fetchone() == (None,)


@pytest.mark.parametrize(("answer", "longest"), [(away, 5.0), (refuses(error_class="HTTP 503", transient=True), 30.0)])
def test_a_queue_that_is_away_is_asked_again_soon(monkeypatch, opened, expired, relaying, answer, longest):
    """Seconds after its return events flow again, however long it was away; one that answers is left alone longer."""
    slept: list[float] = []
    monkeypatch.setattr("pgreaper.relay.Relay._sleep", lambda relay, seconds: slept.append(seconds))
    opened()
    expired(2)
    relaying(Queue(*[answer] * 12, takes), lambda beside: beside.hears("takes events again"))
    assert longest / 2 <= max(slept) <= longest


def test_a_relay_that_stays_waits_for_its_queue(monkeypatch, opened, expired, relaying):
    """One line a step of the outage, one when it is over, and smaller batches meanwhile."""
    monkeypatch.setattr("pgreaper.relay._TROUBLE_FIRST", 0.01)
    monkeypatch.setattr("pgreaper.relay._AWAY_CAP", 0.02)
    opened()
    keys = expired(120)
    queue = Queue(*[away] * 8, takes)
    run, lines = relaying(queue, lambda beside: beside.wait_for(lambda: len(queue.taken) == 120), batch=100)
    assert queue.keys() == keys
    assert [len(batch) for batch in queue.batches] == [100, *[50] * 8, 70]
    assert sum("does not take events: ConnectionRefused; trying again in" in line for line in lines) == 2
    assert sum(line == "relay holds: queue: takes events again" for line in lines) == 1
    assert (run.troubles, run.returned, run.exit_code) == (8, 450, 0)


def test_a_reply_that_is_lost_is_asked_for_again(opened, expired, relaying, proxy):
    """The acknowledgement was booked, only its answer got lost: nothing is sent twice, and the counts are right."""
    opened()
    keys = expired(5)
    queue = Queue()
    proxy.drop_reply("reaper_ack")
    run, _ = relaying(queue, url=proxy.url)
    assert proxy.dropped == 1
    assert (queue.keys(), run.delivered, run.reconnects, run.lost) == (keys, 5, 1, 0)


def test_a_lease_that_nobody_heard_of_lapses(opened, expired, relaying, proxy):
    """The reply to a fetch got lost: its events come again after the lease, and no others are missing."""
    opened()
    keys = expired(5)
    queue = Queue()
    proxy.drop_reply("reaper_fetch")
    run, _ = relaying(queue, lambda beside: beside.wait_for(lambda: len(queue.taken) == 5), url=proxy.url, lease=0.3)
    assert proxy.dropped == 1
    assert (sorted(queue.keys(), key=int), run.delivered) == (keys, 5)


def test_a_lease_is_kept_while_a_send_takes_long(db, opened, expired, relaying):
    """A send that outlasts its lease is nobody else's: the token stays good, and the events are handed out once."""
    opened()
    expired(5)
    lease = 2.0

    def slow(messages):
        ends: set[object] = set()
        began = time.monotonic()
        with psycopg.connect(db.info.dsn, autocommit=True) as other:
            while len(ends) < 3 or time.monotonic() - began < 1.2 * lease:
                ends.update(other.execute("select lease_until from pgreaper.deliveries where finished_at is null"))
                assert other.execute("select count(*) from pgreaper.reaper_fetch('holds')").fetchone() == (0,)
        return takes(messages)

    run, _ = relaying(Queue(slow), lease=lease)
    assert (run.delivered, run.lost) == (5, 0)
    assert db.execute("select redelivered from pgreaper.relays").fetchone() == (0,)


def test_a_lease_that_was_taken_over_is_told(db, opened, expired, relaying, set_clock):
    """Another process has the events: what was sent is sent again by that one, and the run goes on."""
    opened()
    keys = expired(5)
    taken: list[str] = []

    def overtaken(messages):
        db.execute("update pgreaper.deliveries set lease_until = '-infinity'")
        taken.extend(row[0] for row in db.execute("select key from pgreaper.reaper_fetch('holds')"))
        return takes(messages)

    run, lines = relaying(Queue(overtaken))
    assert taken == keys
    assert (run.delivered, run.lost, run.exit_code) == (0, 5, 0)
    assert "the lease of 5 events was taken over" in lines[-1]
    assert db.execute("select redelivered, delivered from pgreaper.relays").fetchone() == (5, 0)


def test_a_signal_lets_the_send_in_hand_finish(db, opened, expired, relaying):
    """What is confirmed by then is booked; the rest goes back and is there for the next run."""
    opened()
    keys = expired(20)

    def interrupted(messages):
        os.kill(os.getpid(), signal.SIGTERM)
        return Sent(frozenset(range(4)), {}, "Timeout")

    queue = Queue(interrupted, takes)
    run, _ = relaying(queue, lambda beside: beside.wait_for(lambda: queue.is_closed), batch=10)
    assert (run.ended, run.exit_code, run.delivered, run.returned) == ("signal", 0, 4, 6)
    assert db.execute(f"select {IDLE}").fetchone() == (True,)
    relaying(queue)
    assert queue.keys() == keys


def test_a_second_signal_ends_it_at_once(db, opened, expired, start, endpoint):
    """A queue that hangs keeps nobody: the events are given back, and the process ends with 143."""
    opened()
    expired(5)
    endpoint.answer = lambda request: "hang"
    relay = start("relay", "holds", "--to", endpoint.url, "--poll", "0.05")
    assert " is up: " in relay.popen.stderr.readline()
    wait_for(lambda: endpoint.requests)
    relay.popen.send_signal(signal.SIGTERM)
    assert "finishing the batch in hand" in relay.popen.stderr.readline()
    relay.popen.send_signal(signal.SIGTERM)
    result, took = relay.end()
    assert (result.code, took < 18) == (143, True), (took, result)
    assert db.execute(f"select {IDLE}").fetchone() == (True,)
    assert db.execute("select waiting, trouble from pgreaper.relay_status").fetchone() == (5, None)


def test_a_server_that_restarts_in_mid_stream_loses_nothing(cluster, install, relaying):
    """Events that were confirmed and not yet booked are sent again under the same key; none is missing."""
    install(cluster.dsn)
    with psycopg.connect(cluster.dsn, autocommit=True) as db:
        holds = Holds(db)
        holds.register()
        db.execute("select pgreaper.reaper_relay('holds')")
        ids = [str(i) for i in holds.due(200)]
        db.execute("call pgreaper.reaper_sweep('holds')")

    def restarts(messages):
        if queue.taken and not crashed:
            crashed.append(cluster.restart("immediate"))
        return takes(messages)

    crashed = []
    queue = Queue(restarts)
    run, lines = relaying(
        queue, lambda beside: beside.wait_for(lambda: len(set(queue.keys())) == 200), url=cluster.dsn, batch=20
    )
    assert sorted(queue.keys(), key=int) == ids
    assert (run.delivered, run.reconnects, run.exit_code) == (200, 1, 0)
    assert sum("connected again" in line for line in lines) == 1


def test_an_idle_relay_writes_nothing(db, opened, relaying):
    """It asks again and again, and takes no transaction id."""
    opened()
    looks = set()

    def has_looked_often() -> bool:
        looks.update(
            db.execute(
                "select query_start from pg_stat_activity"
                " where query like '%reaper_fetch%' and application_name like 'pgreaper/%'"
            )
        )
        return len(looks) > 20

    queue = Queue()
    before = db.execute("select pg_snapshot_xmax(pg_current_snapshot())::text").fetchone()
    relaying(queue, lambda beside: beside.wait_for(has_looked_often), poll=0.01)
    assert db.execute("select pg_snapshot_xmax(pg_current_snapshot())::text").fetchone() == before
    assert queue.batches == []


def test_an_event_that_breaks_its_relay_is_found(db, opened, expired, relaying):
    """A bug ends the run and gives nothing back, so what brings it about ends up alone and is given up."""
    opened()
    keys = expired(20)

    def breaks(messages):
        if keys[3] in [message.key for message in messages]:
            raise ZeroDivisionError
        return takes(messages)

    queue = Queue(breaks)
    crashes = 0
    while not db.execute("select count(*) from pgreaper.dead_events").fetchone()[0]:
        db.execute("update pgreaper.deliveries set lease_until = '-infinity' where finished_at is null")
        try:
            relaying(queue, batch=20)
        except ZeroDivisionError:
            crashes += 1
        assert crashes < 40
    assert sorted(queue.keys(), key=int) == [key for key in keys if key != keys[3]]
    assert db.execute("select key, error_class from pgreaper.dead_events").fetchall() == [(keys[3], "LeaseExpired")]


def test_a_relay_that_is_removed_ends(db, opened, relaying):
    """Its name leads nowhere any more: the run ends with 2 and says so."""
    opened()
    queue = Queue()

    def script(beside):
        db.execute("select pgreaper.reaper_unrelay('holds')")
        beside.wait_for(lambda: queue.is_closed)

    run, _ = relaying(queue, script)
    assert (run.ended, run.exit_code, run.trouble.message) == ("failed", 2, "there is no relay holds")


def test_errors_that_end_a_run_before_it_begins(holds, relaying):
    """A policy, a column or a name that cannot be."""
    holds.register()
    with pytest.raises(UnknownPolicy, match="there is no policy hold") as unknown:
        relaying(Queue(), policy="hold")
    assert unknown.value.hint == "Did you mean holds?"
    with pytest.raises(InvalidInput, match="has no column nix"):
        relaying(Queue(), payload=["id", "nix"])
    relaying(Queue(), name="mine")
    holds.register("others", dry_run=False)
    with pytest.raises(InvalidInput, match="relay mine belongs to policy holds"):
        relaying(Queue(), policy="others", name="mine")


def test_payload_columns_are_read_when_the_event_is_sent(db, holds, opened, expired, relaying):
    """As the row is then, and null for a row that has gone; not part of the registration."""
    opened()
    keys = expired(2)
    db.execute("update holds set customer_email = 'new' where id = %s", (keys[0],))
    db.execute("delete from holds where id = %s", (keys[1],))
    queue = Queue()
    relaying(queue, payload=["customer_email", "id"])
    bodies = [message.body.decode() for message in queue.taken]
    assert '"payload":{"id": 1, "customer_email": "new"}' in bodies[0]
    assert '"payload":null' in bodies[1]


def test_the_key_is_that_of_handlers(holds, opened, relaying, work):
    """A consumer of events and a handler's effects share one idempotency key for a hold."""
    opened()
    calls = []
    holds.due(3)
    work("holds", handler=lambda call: calls.append(call.idempotency_key), concurrency=1)
    queue = Queue()
    relaying(queue)
    assert sorted(calls) == sorted(message.identity for message in queue.taken)


def test_a_queue_that_hangs_is_left_behind(db, opened, expired, start, endpoint):
    """It does not answer in the time after a signal: its events go back, and nothing waits for it."""
    opened()
    expired(3)
    endpoint.answer = lambda request: "hang"
    relay = start("relay", "holds", "--to", endpoint.url, "--shutdown-timeout", "6")
    wait_for(lambda: endpoint.requests)
    relay.popen.send_signal(signal.SIGTERM)
    result, took = relay.end()
    assert (result.code, 3 < took < 20) == (0, True), (took, result)
    assert result.out.startswith("holds: 3 tries to be repeated in ")
    assert db.execute(f"select {IDLE}").fetchone() == (True,)


@pytest.fixture
def weighty(db, holds):
    """
    The holds have a column ``weight``, whose value takes its time to be read.

    ``light`` takes 30 ms, ``heavy`` longer than the tests' statement timeout of 400 ms.
    """
    db.execute("""
        create type weight as enum ('light', 'heavy');
        create function weigh(weight) returns json language plpgsql as $$
        begin
          perform pg_sleep(case $1 when 'light' then 0.03 else 1 end);
          return to_json($1::text);
        end $$;
        create cast (weight as json) with function weigh(weight);
        alter table holds add weight weight not null default 'light';
    """)


@pytest.fixture
def hasty(dsn, weighty):
    """What a relay gets that reads the column, and may take 400 ms for a statement."""
    return {"url": f"{dsn}&options=-c%20statement_timeout%3D400ms", "payload": ["weight"]}


def test_a_statement_timeout_makes_batches_smaller(opened, expired, relaying, hasty):
    """What is too much for a statement goes in parts, said once; then they grow again, and not to what failed."""
    opened()
    keys = expired(40)
    queue = Queue()
    run, lines = relaying(queue, batch=40, **hasty)
    assert (queue.keys(), run.ended, run.exit_code) == (keys, "drained", 0)
    sizes = [len(batch) for batch in queue.batches]
    assert sizes[0] < max(sizes) < 20, sizes
    assert len([line for line in lines if "takes too long" in line]) == 1
    assert lines[0].startswith(
        "relay holds: fetching up to 40 events takes too long: a statement took longer than statement_timeout (400 ms)"
    )


def test_a_payload_that_takes_too_long_delays_only_its_event(db, opened, expired, relaying, hasty):
    """It is found alone, booked as trouble and put off, and the others go; three not in a row end nothing."""
    opened()
    keys = expired(6)
    heavy = keys[::2]
    db.execute("update holds set weight = 'heavy' where id = any (%s::bigint[])", (heavy,))
    troubles = []

    def notes(messages):
        troubles.extend(db.execute("select trouble from pgreaper.relay_status").fetchone())
        return takes(messages)

    queue = Queue(notes)
    run, lines = relaying(queue, batch=4, **hasty)
    assert queue.keys() == keys[1::2]
    assert (run.ended, run.retried, run.dead) == ("drained", 3, 0)
    assert "StatementTimeout" in troubles
    assert db.execute("select key, error_class from pgreaper.undelivered order by event").fetchall() == [
        (key, "StatementTimeout") for key in heavy
    ]
    (line,) = [line for line in lines if "one event alone" in line]
    assert line.startswith("relay holds: fetching the payload of one event alone takes too long")
    assert "slow trigger" not in " ".join(lines)


def test_payloads_that_all_take_too_long_end_a_run(db, opened, expired, relaying, hasty):
    """Then it is the timeout: the run says so and what helps, the list has the trouble, and few events are charged."""
    opened()
    expired(10)
    db.execute("update holds set weight = 'heavy'")
    run, lines = relaying(Queue(), batch=1, **hasty)
    assert (run.ended, run.exit_code, run.delivered, run.retried) == ("failed", 1, 0, 3)
    assert "one event alone takes too long" in run.trouble.message
    assert sum("to be tried again" in line for line in lines) == 1
    assert "leave large columns out of --payload" in run.trouble.hint
    assert db.execute("select trouble, waiting from pgreaper.relay_status").fetchone() == ("StatementTimeout", 10)


def test_what_another_process_has_is_told(db, opened, expired, relaying):
    """A run that ends has nothing to do for it, and is not silent about it."""
    opened()
    expired(3)
    (until,) = db.execute("select max(lease_until) from pgreaper.reaper_fetch('holds', lease => '1 h')").fetchone()
    run, _ = relaying(Queue())
    assert (run.delivered, run.leased, run.leased_until, run.exit_code) == (0, 3, until, 0)


def test_a_run_with_nothing_to_send_asks_the_queue(opened, expired, relaying):
    """A wrong password is found before there is an event; where there is one, its own sending tells."""
    opened()
    queue = Queue()
    queue.probed = "AccessRefused"
    run, _ = relaying(queue)
    assert (run.ended, run.exit_code, run.trouble.message, queue.batches) == (
        "trouble", 75, "queue: does not take events now: AccessRefused", [],
    )  # fmt: skip
    expired(1)
    run, _ = relaying(queue)
    assert (run.exit_code, run.delivered, queue.probes) == (0, 1, 1)


def test_a_relay_that_stays_asks_once_at_its_start(opened, expired, relaying):
    """It says what is wrong with the queue, and goes on."""
    opened()
    queue = Queue()
    queue.probed = "HostUnknown"

    def script(beside):
        beside.hears("queue: does not take events: HostUnknown; going on")
        expired(1)
        beside.wait_for(lambda: queue.taken)

    run, _ = relaying(queue, script)
    assert (run.exit_code, run.delivered, queue.probes) == (0, 1, 1)


def test_deadlines_before_the_year_1_have_keys_of_their_own(db, holds, opened, relaying, work):
    """Python cannot tell them, the keys do, to handlers as well: two incarnations are two."""
    opened()
    calls: list[str] = []
    (hold,) = holds.due(1)
    for deadline in ("-infinity", "0044-03-15 12:00:00.5+00 BC", "0001-12-31 00:00+00 BC"):
        db.execute("update holds set status = 'held', expires_at = %s where id = %s", (deadline, hold))
        work("holds", handler=lambda call: calls.append(call.idempotency_key), concurrency=1)
    queue = Queue()
    relaying(queue)
    assert [message.identity for message in queue.taken] == calls
    assert calls == [
        f"holds/{hold}/-infinity",
        f"holds/{hold}/-0043-03-15T12:00:00.500000Z",
        f"holds/{hold}/0000-12-31T00:00:00.000000Z",
    ]

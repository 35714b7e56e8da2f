"""reaper_ack: what became of the events of a delivery."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import pytest

from tests.contract.relays import Relay
from tests.contract.test_fetch import PLACE, trail

ACK = "select * from pgreaper.reaper_ack(%s, delivered => %s, refused => %s, error_classes => %s, transient => %s)"


@pytest.fixture
def relay(core, holds):
    core.register()
    core.call("reaper_relay", policy="p")
    return Relay(core)


def status(core, *columns):
    [row] = core.rows(f"select {', '.join(columns)} from pgreaper.relay_status")
    return row


def test_all_delivered(core, relay):
    """Without a word about any: all. The relay's place and counters move, the lease is over."""
    trail(core, "a", "b", "c")
    batch = relay.fetch()
    assert status(core, "waiting", "leased", "delivered") == (3, 3, 0)
    assert relay.ack(batch) == (3, 0, 0, 0)
    assert status(core, "waiting", "leased", "delivered", "dead", "retrying") == (0, 0, 3, 0, 0)
    assert core.rows("select events, keys, spans, delivered from pgreaper.deliveries") == [(None, None, None, 3)]
    assert core.value("select last_delivered_at from pgreaper.relay_status") is not None


def test_a_part_and_the_rest_comes_back_at_once(core, relay):
    """What is neither delivered nor refused is handed out again, in order, and is not charged."""
    trail(core, "a", "b", "c", "d")
    batch = relay.fetch()
    assert relay.ack(batch, delivered=[batch[1].event]) == (1, 0, 0, 3)
    again = relay.fetch()
    assert [(event.key, event.attempt) for event in again] == [("a", 1), ("c", 1), ("d", 1)]
    assert relay.ack(again, delivered=[]) == (0, 0, 0, 3)
    assert [(event.key, event.attempt) for event in relay.fetch()] == [("a", 1), ("c", 1), ("d", 1)]
    assert status(core, "delivered", "redelivered") == (1, 0)


def test_a_retry_that_comes_back_untried_is_not_charged(core, relay, set_clock):
    """It keeps its attempts, and is there at once."""
    trail(core, "a")
    relay.refuse(relay.fetch(), "a", transient=True)
    set_clock(timedelta(seconds=10))
    for _ in range(2):
        batch = relay.fetch()
        assert [event.attempt for event in batch] == [2]
        assert relay.ack(batch, delivered=[]) == (0, 0, 0, 1)
    relay.ack(relay.fetch())
    assert core.value("select count(*) from pgreaper.undelivered") == 0


def test_refused_for_now(core, relay, set_clock):
    """Two seconds, doubled each time up to an hour, with up to half on top; after twenty times it is dead."""
    trail(core, "a")
    waits = []
    for attempt in range(1, 20):
        batch = relay.fetch()
        assert [event.attempt for event in batch] == [attempt]
        assert relay.refuse(batch, "a", transient=True) == (0, 1, 0, 0)
        assert relay.fetch() == []
        waits.append(core.value("select extract(epoch from not_before - failed_at)::float8 from pgreaper.undelivered"))
        core.do("update pgreaper.undelivered set not_before = pgreaper._clock()")
    for attempt, wait in enumerate(waits, 1):
        least = min(3600, 2**attempt)
        assert least <= wait <= least * 1.5 + 0.001
    assert relay.refuse(relay.fetch(), "a", transient=True) == (0, 0, 1, 0)
    assert core.rows("select key, attempts, error_class from pgreaper.dead_events") == [("a", 20, "Unroutable")]


def test_not_before_the_queue_says(core, relay):
    """A Retry-After is kept, when it is longer than our own delay."""
    trail(core, "a", "b")
    batch = relay.fetch()
    relay.ack(batch, refused=[event.event for event in batch], error_classes=["HTTP 503"] * 2, transient=[True] * 2,
              retry_in=["1 hour", "0"])  # fmt: skip
    assert core.column("select not_before - failed_at >= '1 hour' from pgreaper.undelivered order by key") == [
        True,
        False,
    ]
    assert core.column("select not_before - failed_at >= '2 s' from pgreaper.undelivered order by key") == [True] * 2


def test_refused_for_good(core, relay):
    """Dead at once; it has an owner, a reason and a command; the others of the batch are delivered."""
    row = trail(core, "a", "b", "c")
    batch = relay.fetch()
    assert relay.refuse(batch, "b", error_class="HTTP 422") == (2, 0, 1, 0)
    assert relay.drain() == []
    assert core.rows(
        "select relay, policy, owner, event, key, attempts, error_class, replay_command from pgreaper.dead_events"
    ) == [("p", "p", "tests", f"{row}.2", "b", 1, "HTTP 422", f"pgreaper relays resend p --event {row}.2")]
    assert status(core, "waiting", "dead", "refused", "delivered") == (0, 1, 1, 2)
    assert core.value(PLACE, "p") == f"{{(,{(row + 1) << 20})}}"


def test_an_answer_that_got_lost(core, relay):
    """The same call again, or another with that token, is answered with what was booked, and books nothing."""
    trail(core, "a", "b", "c")
    batch = relay.fetch()
    first = relay.refuse(batch, "a")
    assert first == (2, 0, 1, 0)
    books = "select r::text, u::text from pgreaper.relays as r, pgreaper.undelivered as u"
    before = core.rows(books)
    assert relay.refuse(batch, "a") == first
    assert relay.ack(batch) == first
    assert core.rows(books) == before


def test_what_is_over_is_kept_for_minutes(core, relay, set_clock):
    """A delivery that ended goes with a later fetch; until then its token is answered."""
    trail(core, "a")
    old = relay.fetch()
    relay.ack(old)
    set_clock(timedelta(minutes=9))
    trail(core, "b")
    relay.ack(relay.fetch())
    assert relay.ack(old) == (1, 0, 0, 0)
    set_clock(timedelta(minutes=11))
    trail(core, "c")
    relay.fetch()
    assert core.refused("select pgreaper.reaper_ack(%s)", old[0].token).sqlstate == "RP001"


def test_a_lease_that_only_lapsed_is_good(core, relay, set_clock):
    """Nobody has taken it over, so what was delivered is delivered."""
    trail(core, "a")
    batch = relay.fetch()
    set_clock(timedelta(hours=1))
    assert relay.ack(batch) == (1, 0, 0, 0)
    assert relay.drain() == []


def test_trouble_is_shown_until_it_is_over(core, relay, set_clock):
    """Its kind, and since when it lasts; an acknowledgement without trouble ends it."""
    trail(core, "a")
    relay.ack(relay.fetch(), delivered=[], trouble="ConnectionError")
    [(trouble, since)] = core.rows("select trouble, trouble_since from pgreaper.relay_status")
    assert trouble == "ConnectionError"
    set_clock(timedelta(minutes=1))
    relay.ack(relay.fetch(), delivered=[], trouble="TimeoutError")
    assert status(core, "trouble", "trouble_since") == ("TimeoutError", since)
    relay.ack(relay.fetch())
    assert status(core, "trouble", "trouble_since") == (None, None)


def test_latency_is_counted(core, relay, set_clock):
    """From the transition to the confirmation, in the buckets of lateness."""
    trail(core, "a", "b", "c")
    batch = relay.fetch()
    set_clock(timedelta(seconds=30))
    relay.ack(batch, delivered=[event.event for event in batch[:2]])
    assert core.value("select latency from pgreaper.relays") == [2 if n == 14 else 0 for n in range(30)]
    assert status(core, "latency_p50 between '25 s' and '50 s'") == (True,)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((["9.9"], [], [], []), "does not hold the event '9.9'"),
        (([], ["nonsense"], ["E"], [True]), "does not hold the event 'nonsense'"),
        (([None], [], [], []), "does not hold the event NULL"),
        ((["A"], ["A"], ["E"], [True]), "told of twice"),
        ((None, ["A", "A"], ["E", "E"], [True, True]), "told of twice"),
        ((None, ["A"], [], [True]), "1 event(s) refused, but 0 error classes"),
        ((None, ["A"], ["E"], []), "0 words on whether it may pass"),
        ((None, ["A"], ["E"], None), "0 words on whether it may pass"),
        ((None, ["A"], None, [True]), "0 error classes"),
        ((None, None, ["E"], [True]), "0 event(s) refused"),
    ],
)
def test_nonsense_is_refused(core, relay, arguments, told):
    """22023, and nothing is booked: the delivery goes on."""
    trail(core, "a", "b")
    batch = relay.fetch()

    def real(part):
        return part and [batch[0].event if one == "A" else one for one in part]

    error = core.refused(ACK, batch[0].token, *map(real, arguments))
    assert error.sqlstate == "22023"
    assert told in str(error)
    assert relay.ack(batch) == (2, 0, 0, 0)


def test_a_list_that_is_null_is_empty(core, relay):
    """Nothing was refused, so all is delivered; no delay was asked for, so it is our own."""
    trail(core, "a")
    assert relay.ack(relay.fetch(), refused=None, error_classes=None, transient=None, retry_in=None) == (1, 0, 0, 0)
    trail(core, "a")
    batch = relay.fetch()
    told = {"refused": [batch[0].event], "error_classes": ["E"], "transient": [True], "retry_in": None}
    assert relay.ack(batch, **told) == (0, 1, 0, 0)


def test_there_never_was_such_a_lease(core, relay):
    """RP001, with the remedy."""
    for token in (str(uuid4()), None):
        error = core.refused("select pgreaper.reaper_ack(%s)", token)
        assert (error.sqlstate, error.diag.message_primary) == ("RP001", f"there is no lease {token or 'NULL'}")
        assert "fetch anew" in error.diag.message_hint

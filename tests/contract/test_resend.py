"""reaper_resend: dead events get a fresh budget."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.contract.relays import Relay
from tests.contract.test_fetch import trail


@pytest.fixture
def relay(core, holds):
    """A relay with three dead events, a, b and c, and one that waits for its retry."""
    core.register()
    core.call("reaper_relay", policy="p")
    relay = Relay(core)
    trail(core, "a", "b", "c", "w")
    batch = relay.fetch()
    relay.ack(batch, refused=[event.event for event in batch], error_classes=["E"] * 4,
              transient=[False, False, False, True])  # fmt: skip
    return relay


def test_one(core, relay):
    """Its name says which; the others stay dead, what waits for its retry is left alone."""
    event = core.value("select event from pgreaper.dead_events where key = 'b'")
    assert core.value("select pgreaper.reaper_resend('p', %s)", event) == 1
    batch = relay.fetch()
    assert [(one.key, one.event, one.attempt) for one in batch] == [("b", event, 1)]
    relay.ack(batch)
    assert core.column("select key from pgreaper.dead_events order by 1") == ["a", "c"]
    assert core.value("select pgreaper.reaper_resend('p', %s)", event) == 0


def test_all(core, relay):
    """And each only once, however often it is asked for."""
    assert core.value("select pgreaper.reaper_resend('p')") == 3
    assert core.value("select pgreaper.reaper_resend('p')") == 0
    assert sorted(relay.drain()) == ["a", "b", "c"]


def test_beside_later_events_of_its_hold(core, relay, set_clock):
    """Those that went past it are gone; those that come wait for it as for any other."""
    trail(core, "a")
    assert relay.drain() == ["a"]
    core.do("select pgreaper.reaper_resend('p')")
    trail(core, "a")
    first, second = relay.fetch(batch=20), relay.fetch(batch=20)
    assert ([event.key for event in first], second) == (["a", "b", "c"], [])
    relay.refuse(first, "a", transient=True)
    assert relay.fetch() == []
    set_clock(timedelta(seconds=10))
    assert sorted(relay.drain()) == ["a", "a", "w"]


@pytest.mark.parametrize("event", ["9.9", "nonsense", "99999999999999999999.1", ""])
def test_no_such_event(core, relay, event):
    """0, and nothing else is tried again."""
    assert core.value("select pgreaper.reaper_resend('p', %s)", event) == 0
    assert core.value("select count(*) from pgreaper.dead_events") == 3


def test_no_such_relay(core, relay):
    """RP002."""
    assert core.refused("select pgreaper.reaper_resend('nobody')").sqlstate == "RP002"

"""reaper_relay: a relay is found or made."""

from __future__ import annotations

import pytest

from tests.contract.relays import Relay
from tests.contract.test_fetch import PLACE, trail


@pytest.fixture(autouse=True)
def policy(core, holds):
    core.register()


def opened(core, **arguments):
    return core.call("reaper_relay", "f.relay", "f.policy", "f.created", **arguments)


def test_a_new_one_begins_now(core):
    """What expired before is not delivered; with `backfill` it is, from the oldest row of the trail."""
    trail(core, "old")
    assert opened(core, policy="p") == [("p", "p", True)]
    assert opened(core, policy="p", relay="all", backfill=True) == [("all", "p", True)]
    trail(core, "new")
    assert Relay(core).drain() == ["new"]
    assert Relay(core, "all").drain() == ["old", "new"]


def test_called_again_it_finds_it(core):
    """The same place, also with `backfill`, and also when the policy was withdrawn."""
    opened(core, policy="p")
    trail(core, "a")
    before = core.rows("select * from pgreaper.relays")
    assert opened(core, policy="p") == [("p", "p", False)]
    assert opened(core, policy="p", backfill=True) == [("p", "p", False)]
    core.do("select pgreaper.reaper_unregister('p')")
    assert opened(core, policy="p") == [("p", "p", False)]
    assert core.rows("select * from pgreaper.relays") == before
    assert Relay(core).drain() == ["a"]


def test_relays_of_one_policy_are_independent(core):
    """Each has its own place, its own leases and its own dead."""
    for name in ("quick", "slow"):
        opened(core, policy="p", relay=name)
    trail(core, "a", "b")
    quick, slow = Relay(core, "quick"), Relay(core, "slow")
    held = slow.fetch(batch=1)
    assert quick.drain() == ["a", "b"]
    trail(core, "a")
    assert quick.drain() == ["a"]
    slow.refuse(held, "a")
    assert slow.drain() == ["b", "a"]
    assert core.rows("select relay, dead, delivered from pgreaper.relay_status order by 1") == [
        ("quick", 0, 3),
        ("slow", 1, 2),
    ]


def test_an_empty_trail(core):
    """Also one whose sequence was never used."""
    core.do("truncate pgreaper.transitions restart identity")
    opened(core, policy="p")
    assert core.value(PLACE, "p") == f"{{(,{1 << 20})}}"
    assert Relay(core).fetch() == []
    trail(core, "a")
    assert Relay(core).drain() == ["a"]


def test_refusals(core):
    """RP002 for a policy that is not there, or withdrawn without such a relay; 22023 for another's name or none."""
    error = core.refused("select pgreaper.reaper_relay('nobody')")
    assert (error.sqlstate, error.diag.message_primary) == ("RP002", "there is no policy nobody")
    assert core.refused("select pgreaper.reaper_relay(null)").sqlstate == "RP002"
    core.do("create table others (like holds including all)")
    core.register("q", "others")
    opened(core, policy="p")
    error = core.refused("select pgreaper.reaper_relay('q', 'p')")
    assert (error.sqlstate, error.diag.message_primary) == ("22023", "relay p belongs to policy p")
    assert core.refused("select pgreaper.reaper_relay('p', '  ')").sqlstate == "22023"
    core.do("select pgreaper.reaper_unregister('q')")
    assert core.refused("select pgreaper.reaper_relay('q')").sqlstate == "RP002"


def test_only_finding_one_writes_nothing(core, committed):
    """A relay opens its place each time it starts: no transaction id."""
    opened(core, policy="p")
    with core.connection.transaction():
        opened(core, policy="p")
        assert core.changed_nothing()


def test_a_name_that_looks_like_sql(core):
    """Names are names, in the command to paste too."""
    name = "it's; drop"
    opened(core, policy="p", relay=name)
    trail(core, "a")
    relay = Relay(core, name)
    relay.refuse(relay.fetch(), "a")
    assert core.value("select replay_command from pgreaper.dead_events").startswith(
        "pgreaper relays resend 'it'\"'\"'s; drop' --event "
    )

"""reaper_unrelay: a relay is removed."""

from __future__ import annotations

from tests.contract.relays import Relay
from tests.contract.test_fetch import trail

BOOKS = (
    "select (select count(*) from pgreaper.relays), (select count(*) from pgreaper.deliveries),"
    " (select count(*) from pgreaper.undelivered)"
)


def test_nothing_is_left_of_it_and_others_stay(core, holds):
    """Its place, leases and dead events go; a process of it is refused; a new one of the name begins anew."""
    core.register()
    relays = {name: Relay(core, name) for name in ("one", "two")}
    for name in relays:
        core.call("reaper_relay", policy="p", relay=name)
    trail(core, "a", "b")
    for relay in relays.values():
        relay.refuse(relay.fetch(batch=1), "a")
    leased = relays["one"].fetch()
    core.do("select pgreaper.reaper_unrelay('one')")
    assert core.rows(BOOKS) == [(1, 1, 1)]
    assert core.refused("select pgreaper.reaper_ack(%s)", leased[0].token).sqlstate == "RP001"
    assert core.refused("select * from pgreaper.reaper_fetch('one')").sqlstate == "RP002"
    assert relays["two"].drain() == ["b"]
    core.call("reaper_relay", policy="p", relay="one")
    trail(core, "c")
    assert relays["one"].drain() == ["c"]


def test_no_such_relay(core, holds):
    """RP002, also the second time."""
    core.register()
    core.call("reaper_relay", policy="p")
    core.do("select pgreaper.reaper_unrelay('p')")
    error = core.refused("select pgreaper.reaper_unrelay('p')")
    assert (error.sqlstate, error.diag.message_primary) == ("RP002", "there is no relay p")

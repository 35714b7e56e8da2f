"""reaper_keep: a delivery that takes longer."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import pytest

from tests.contract.relays import Relay
from tests.contract.test_fetch import trail

KEEP = "select pgreaper.reaper_keep(%s, %s) = pgreaper._clock() + %s::interval"


@pytest.fixture
def batch(core, holds, set_clock):
    """One event under a lease of a minute; the clock stands still."""
    core.register()
    core.call("reaper_relay", policy="p")
    trail(core, "a")
    set_clock("2030-01-01Z")
    return Relay(core).fetch(lease="1 minute")


def test_the_lease_ends_later_and_never_sooner(core, batch, set_clock):
    """From now by the database clock; a shorter one changes nothing."""
    assert core.value(KEEP, batch[0].token, "5 minutes", "5 minutes") is True
    assert core.value(KEEP, batch[0].token, "1 second", "5 minutes") is True
    set_clock("2030-01-01 00:04Z")
    assert Relay(core).fetch() == []


def test_a_lapsed_lease_is_kept_while_nobody_has_it(core, batch, set_clock):
    """It is the holder's until it is taken over."""
    set_clock("2030-01-01 00:10Z")
    assert core.value(KEEP, batch[0].token, "1 minute", "1 minute") is True
    assert Relay(core).fetch() == []
    assert Relay(core).ack(batch) == (1, 0, 0, 0)


def test_a_lease_that_is_lost(core, batch):
    """RP001: acknowledged, taken over, or never there."""
    Relay(core).ack(batch)
    for token in (batch[0].token, str(uuid4()), None):
        error = core.refused("select pgreaper.reaper_keep(%s)", token)
        assert (error.sqlstate, error.diag.message_primary) == ("RP001", f"lease {token or 'NULL'} is lost")


@pytest.mark.parametrize("lease", [timedelta(0), timedelta(seconds=-1), None])
def test_a_lease_is_positive(core, batch, lease):
    """22023."""
    assert core.refused("select pgreaper.reaper_keep(%s, %s)", batch[0].token, lease).sqlstate == "22023"

"""reaper_release: a claim given back."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4


def test_what_is_still_due_is_claimable_at_once(core, holds):
    """Promise: returns how many; no attempt is charged, and no rescan is needed."""
    holds.due(5)
    core.register()
    token = core.claim(batch=3)[0].token
    core.claim(batch=1)
    assert core.call("reaper_release", token=token) == [(3,)]
    assert [(hold.key, hold.attempt) for hold in core.claim()] == [("1", 1), ("2", 1), ("3", 1), ("5", 1)]
    assert core.value("select count(*) from pgreaper.failures") == 0
    assert core.rows("select ending, keys from pgreaper.claims where token = %s", token) == [("released", None)]


def test_the_part_that_was_settled_is_not_given_back(core, holds):
    """Promise: the number of holds given back, and not of those that were expired before."""
    holds.due(3)
    core.register()
    token = core.claim()[0].token
    core.expire(token, ["1"])
    assert core.call("reaper_release", token=token) == [(2,)]
    assert core.run() == {"2": "expired", "3": "expired"}


def test_a_claim_that_is_over_gives_nothing_back(core, holds, set_clock):
    """Promise: 0, and no error: there is nothing to give back."""
    holds.due(3)
    core.register()
    settled, released, lost = (core.claim(batch=1)[0].token for _ in range(3))
    core.expire(settled)
    core.call("reaper_release", token=released)
    set_clock(timedelta(minutes=2))
    core.claim(rescan=True)
    before = core.rows("select * from pgreaper.claims order by token")
    assert [core.call("reaper_release", token=token) for token in (settled, released, lost)] == [[(0,)]] * 3
    assert core.rows("select * from pgreaper.claims order by token") == before


def test_there_never_was_such_a_lease(core, holds):
    """Raises RP001."""
    core.register()
    for token in (str(uuid4()), None):
        error = core.refused("select pgreaper.reaper_release(%s)", token)
        assert (error.sqlstate, error.diag.message_primary) == ("RP001", f"there is no lease {token or 'NULL'}")
        assert error.diag.message_hint == "Claim anew: reaper_claim() gives the token."


def test_a_released_retry_keeps_its_attempts(core, holds, set_clock):
    """A graceful release does not count, and forgets nothing: attempts never go down."""
    holds.due(1)
    core.register()
    core.claim()
    set_clock(timedelta(minutes=2))
    core.claim(rescan=True)
    set_clock(timedelta(minutes=3))
    batch = core.claim()
    assert batch[0].attempt == 2
    assert core.call("reaper_release", token=batch[0].token) == [(1,)]
    assert [hold.attempt for hold in core.claim()] == [2]


def test_where_it_cannot_write(committed, core, holds):
    """RP004 on a read-only node."""
    holds.due(1)
    core.register()
    token = core.claim()[0].token
    with core.connection.transaction(force_rollback=True):
        core.do("set transaction read only")
        assert core.refused("select pgreaper.reaper_release(%s)", token).sqlstate == "RP004"

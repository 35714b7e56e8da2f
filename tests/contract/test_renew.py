"""reaper_renew: a lease that goes on."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import pytest


def until(core):
    return core.value("select claim_until from pgreaper.claims")


def test_the_lease_ends_so_long_from_now(core, holds, set_clock):
    """Promise: `lease` (default: the policy's) from now by the database clock; the new end is returned."""
    holds.due(1)
    core.register(lease="1 minute")
    set_clock("2040-01-01 00:00Z")
    token = core.claim()[0].token
    set_clock("2040-01-01 00:00:30Z")
    [(renewed,)] = core.call("reaper_renew", token=token)
    assert renewed == until(core) == core.value("select timestamptz '2040-01-01 00:01:30Z'")
    [(renewed,)] = core.call("reaper_renew", token=token, lease="2 hours")
    assert renewed == until(core) == core.value("select timestamptz '2040-01-01 02:00:30Z'")


def test_a_lease_never_ends_sooner_than_before(core, holds):
    """Promise."""
    holds.due(1)
    core.register(lease="1 hour")
    token = core.claim()[0].token
    before = until(core)
    assert core.call("reaper_renew", token=token, lease="1 second") == [(before,)]
    assert until(core) == before


def test_a_lapsed_lease_that_nobody_took_back_is_renewed(core, holds, set_clock):
    """Nobody else was given its holds; afterwards nobody is."""
    holds.due(1)
    core.register()
    token = core.claim()[0].token
    set_clock(timedelta(hours=3))
    core.call("reaper_renew", token=token)
    assert core.claim(rescan=True) == []
    assert core.value("select count(*) from pgreaper.claims") == 1


def test_a_session_bound_claim_follows_the_session_that_renews(committed, core, holds):
    """Promise: a worker that reconnected keeps its holds; an unbound claim stays unbound."""
    holds.due(2)
    core.register()
    bound = core.claim(batch=1, session=True)[0].token
    free = core.claim(batch=1)[0].token
    core.do("update pgreaper.claims set session_lost_at = now() where session_pid is not null")
    other = committed()
    for token in (bound, free):
        other.execute("select pgreaper.reaper_renew(%s)", [token])
    pid = other.info.backend_pid
    assert core.rows(
        "select c.session_pid, a.backend_start, c.session_lost_at from pgreaper.claims as c"
        " left join pg_stat_activity as a on a.pid = c.session_pid and a.backend_start = c.session_start"
        " order by first_deadline"
    ) == [(pid, core.value("select backend_start from pg_stat_activity where pid = %s", pid), None), (None, None, None)]


@pytest.mark.parametrize("how", ["taken back", "released", "settled", "never given"])
def test_a_lost_lease(core, holds, set_clock, how):
    """Raises RP001: stop working on its holds."""
    holds.due(1)
    core.register()
    token = core.claim()[0].token
    if how == "taken back":
        set_clock(timedelta(minutes=2))
        core.claim(rescan=True)
    elif how == "released":
        core.call("reaper_release", token=token)
    elif how == "settled":
        core.expire(token)
    else:
        token = str(uuid4())
    before = core.rows("select * from pgreaper.claims")
    error = core.refused("select pgreaper.reaper_renew(%s)", token)
    assert error.sqlstate == "RP001"
    if how == "never given":
        assert error.diag.message_primary == f"there is no lease {token}"
    else:
        assert error.diag.message_primary == f"lease {token} is lost"
        assert error.diag.message_detail.startswith(f"It was {how} at ")
        assert error.diag.message_hint == "Stop working on its holds: another worker may have them."
    assert core.rows("select * from pgreaper.claims") == before


@pytest.mark.parametrize(("lease", "shown"), [("0", "00:00:00"), ("-1 minute", "-00:01:00")])
def test_a_lease_that_is_not_positive(core, holds, lease, shown):
    """Raises 22023."""
    holds.due(1)
    core.register()
    error = core.refused("select pgreaper.reaper_renew(%s, %s)", core.claim()[0].token, lease)
    assert (error.sqlstate, error.diag.message_primary) == ("22023", f"a lease must be positive, not {shown}")


def test_where_it_cannot_write(committed, core, holds):
    """Raises RP004."""
    holds.due(1)
    core.register()
    token = core.claim()[0].token
    with core.connection.transaction(force_rollback=True):
        core.do("set transaction read only")
        assert core.refused("select pgreaper.reaper_renew(%s)", token).sqlstate == "RP004"

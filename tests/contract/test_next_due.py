"""reaper_next_due: how long a daemon may sleep."""

from __future__ import annotations

from datetime import timedelta

import pytest


@pytest.fixture
def still(set_clock):
    """A clock that stands still, so that intervals are exact."""

    def at(moment="2040-01-01 00:00Z"):
        set_clock(moment)

    at()
    return at


def sleep(core, policy=None):
    return core.value("select pgreaper.reaper_next_due(%s)", policy)


def hold(core, deadline):
    core.do(f"insert into holds (expires_at) values ('{deadline}')")


def test_nothing_ahead(core, holds, still):
    """Promise: NULL when nothing lies ahead."""
    assert sleep(core) is None
    core.register()
    assert sleep(core) is None
    assert sleep(core, "p") is None
    hold(core, "infinity")
    assert sleep(core) is None


def test_until_the_next_deadline_and_its_grace(core, holds, still):
    hold(core, "2040-01-01 01:00Z")
    hold(core, "2040-01-01 00:10Z")
    core.register()
    assert sleep(core) == timedelta(minutes=10)
    core.register(grace="5 minutes")
    assert sleep(core) == timedelta(minutes=15)
    core.do("update holds set status = 'consumed' where id = 2")
    assert sleep(core) == timedelta(minutes=65)


def test_zero_when_something_may_be_claimed_now_and_never_negative(core, holds, still):
    """Promise."""
    hold(core, "2039-12-31Z")
    core.register()
    assert sleep(core) == timedelta(0)
    core.claim()
    still("2040-01-01 01:00Z")
    assert sleep(core) == timedelta(0), "a lapsed lease waits to be taken back"


def test_until_a_lease_lapses_and_until_a_retry(core, holds, still):
    hold(core, "2039-12-31Z")
    core.register(lease="1 minute", backoff_base="10 minutes")
    core.claim()
    assert sleep(core) == timedelta(minutes=1)
    still("2040-01-01 00:02Z")
    core.claim()
    waits = sleep(core)
    assert timedelta(minutes=20) <= waits <= timedelta(minutes=30)
    assert waits == core.value("select not_before - pgreaper._clock() from pgreaper.failures")


def test_a_dead_letter_is_not_waited_for(core, holds, still):
    hold(core, "2039-12-31Z")
    core.register(lease="1 minute", max_attempts=1)
    core.claim()
    still("2040-01-01 00:02Z")
    core.claim()
    assert core.preview()["dead"] == 1
    assert sleep(core) is None


def test_until_the_rate_limit_lets_one_go(core, holds, still):
    for _ in range(4):
        hold(core, "2039-12-31Z")
    core.register(rate_limit=2, lease="1 hour")
    assert sleep(core) == timedelta(0)
    core.claim()
    assert sleep(core) == timedelta(seconds=0.5)


def test_until_the_rate_limit_lets_a_portion_go(core, holds, still):
    """What comes in within half a second, or a batch, or all that is due, where that is less."""
    core.do("insert into holds (expires_at) select '2039-12-31Z' from generate_series(1, 180)")
    core.register(rate_limit=100, lease="1 hour")
    core.claim()
    assert sleep(core) == timedelta(seconds=0.5)
    assert core.rows("select wait, limited from pgreaper._agenda()") == [(0.5, True)]
    core.register(rate_limit=100, lease="1 hour", batch=5)
    assert sleep(core) == timedelta(seconds=0.05)
    core.do("delete from holds where id > 110")
    core.register(rate_limit=100, lease="1 hour")
    assert sleep(core) == timedelta(seconds=0.1)


def test_only_what_is_due_is_limited(core, holds, still):
    hold(core, "2040-01-01 00:00:01Z")
    core.register(rate_limit=1)
    core.do("update pgreaper.cursors set rate_tokens = 0, rate_at = pgreaper._clock()")
    assert core.rows("select wait, limited from pgreaper._agenda()") == [(1.0, False)]


def test_a_paused_policy_has_nothing_ahead(core, holds, still):
    """Promise: NULL."""
    hold(core, "2039-12-31Z")
    core.register()
    core.call("reaper_pause", policy="p")
    assert sleep(core, "p") is None
    assert sleep(core) is None


def test_the_earliest_of_all_policies(core, holds, still):
    core.do("create table others (like holds including all)")
    core.do("insert into others (expires_at) values ('2040-01-01 00:03Z')")
    hold(core, "2040-01-01 00:07Z")
    core.register()
    core.register("q", target="others")
    assert sleep(core) == timedelta(minutes=3)
    assert sleep(core, "p") == timedelta(minutes=7)


def test_it_looks_ahead_of_the_cursor_only(core, holds, still):
    """What becomes claimable behind it is the business of a rescan: an idle fleet must not spin on it."""
    hold(core, "2039-12-31Z")
    core.register()
    core.run()
    hold(core, "2039-12-30Z")
    assert sleep(core) is None


def test_the_hold_at_the_cursor_is_leased_and_its_neighbours_may_not_be(core, holds, still):
    """Alone at its deadline it is the one that an active claim ends with; where several share it, all are looked at."""
    core.register()
    hold(core, "2039-12-31 23:00Z")
    hold(core, "2040-01-01 00:01Z")
    (leased,) = core.claim(batch=1)
    assert sleep(core) == timedelta(minutes=1)
    hold(core, "2039-12-31 23:00Z")
    assert sleep(core) == timedelta(0)
    core.claim(batch=1)
    assert sleep(core) == timedelta(minutes=1)
    core.value("select pgreaper.reaper_release(%s)", leased.token)
    assert sleep(core) == timedelta(0)


def test_a_hold_at_the_cursor_that_nobody_has(core, holds, still):
    """It came when the claim that brought the cursor there had ended."""
    core.register()
    hold(core, "2039-12-31 23:00Z")
    core.run()
    hold(core, "2039-12-31 23:00Z")
    assert sleep(core) == timedelta(0)


def test_extreme_deadlines_do_not_overflow(core, holds, still):
    hold(core, "275760-09-13")
    hold(core, "-infinity")
    core.register()
    assert sleep(core) == timedelta(0)
    core.run()
    assert sleep(core) is None or sleep(core) > timedelta(days=300)


@pytest.mark.parametrize(
    ("column", "zone"), [("timestamptz", None), ("timestamp", "Asia/Tokyo"), ("date", "Asia/Tokyo")]
)
def test_every_kind_of_deadline_counts_in_its_zone(core, still, column, zone):
    """2040-01-03 begins in Tokyo nine hours earlier than in UTC."""
    core.do(f"create table kinds (id int primary key, status text, expires_at {column})", "set local timezone = 'UTC'")
    core.do("insert into kinds values (1, 'held', '2040-01-02')")
    core.register(target="kinds", zone=zone)
    assert sleep(core) == {
        "timestamptz": timedelta(hours=24), "timestamp": timedelta(hours=15), "date": timedelta(hours=39),
    }[column]  # fmt: skip


def test_it_writes_nothing(committed, core, holds, wal_written):
    """Promise: no transaction id, no WAL; works in a read-only transaction."""
    holds.due(1)
    holds.ahead(1)
    core.register()
    core.claim()
    with core.connection.transaction():
        core.do("set transaction read only")
        assert sleep(core) is not None
        assert core.changed_nothing()
    assert wal_written(lambda: sleep(core)) == 0


def test_a_policy_that_is_not_there(core):
    """Raises RP002."""
    assert core.refused("select pgreaper.reaper_next_due('nope')").sqlstate == "RP002"

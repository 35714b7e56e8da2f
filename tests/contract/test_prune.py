"""reaper_prune: what was kept long enough goes, in batches; what is counted or unfinished stays."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.contract.relays import Relay

BOOKS = (
    "select (select count(*) from pgreaper.claims), (select count(*) from pgreaper.transitions),"
    " (select count(*) from pgreaper.events where kind <> 'register')"
)
COUNTERS = (
    "select expired, already_done, not_eligible, retries, dead_letters, taken_back, last_success from pgreaper.status"
)


@pytest.fixture
def old(core, holds, set_clock):
    """Books of 100 days ago: ten claims that expired 20 holds, and found ten consumed; the clock is back at now."""
    set_clock(timedelta(days=-100))
    core.do("insert into holds (expires_at) select pgreaper._clock() - interval '1 hour' from generate_series(1, 30)")
    core.register()
    for _ in range(10):
        token = core.claim(batch=3, rescan=True)[0].token
        core.do("update holds set status = 'consumed' where id = (select min(id) from holds where status = 'held')")
        core.expire(token)
    set_clock(timedelta(0))
    assert core.rows(BOOKS) == [(10, 10, 10)]
    return holds


def prune(core, **arguments):
    """What was removed by kind, and the kinds of which there is more."""
    rows = core.call("reaper_prune", **arguments)
    return {kind: removed for _, kind, removed, _ in rows}, {kind for _, kind, _, more in rows if more}


def test_what_is_old_goes_and_the_counters_stay(core, old):
    """All three kinds; status says the same before and after, and verify finds nothing wrong."""
    before = core.rows(COUNTERS)
    removed, more = prune(core)
    assert (removed, more) == ({"claims": 10, "transitions": 10, "events": 11}, set())
    assert core.rows(BOOKS) == [(0, 0, 0)]
    assert core.rows(COUNTERS) == before
    assert before[0][:3] == (20, 0, 10)
    assert core.column("select holds from pgreaper.reaper_verify()") == [True] * 6


def test_what_is_young_stays(core, holds):
    """Nothing is old enough; the call writes nothing."""
    holds.due(3)
    core.register()
    core.run()
    before = core.rows(BOOKS)
    assert prune(core)[0] == {"claims": 0, "transitions": 0, "events": 0}
    assert core.rows(BOOKS) == before


def test_a_call_that_finds_nothing_writes_nothing(core, holds, committed, wal_written):
    """No transaction id and no WAL."""
    holds.due(3)
    core.register()
    core.run()
    core.do("vacuum pgreaper.claims, pgreaper.transitions, pgreaper.events")
    prune(core)
    with core.connection.transaction():
        prune(core)
        assert core.changed_nothing()
    assert wal_written(lambda: prune(core)) == 0


def test_a_call_is_bounded_and_the_next_goes_on(core, old):
    """At most so many rows of each kind, the oldest first."""
    assert prune(core, max_rows=4) == (
        {"claims": 4, "transitions": 4, "events": 4},
        {"claims", "transitions", "events"},
    )
    oldest = core.value("select min(at) from pgreaper.transitions")
    assert prune(core, max_rows=4)[0] == {"claims": 4, "transitions": 4, "events": 4}
    assert core.value("select min(at) from pgreaper.transitions") > oldest
    assert prune(core, max_rows=4) == ({"claims": 2, "transitions": 2, "events": 3}, set())


def test_each_kind_has_its_time(core, old):
    """Claims for a week, the trail and the events as long as one says."""
    assert prune(core, keep="200 days")[0] == {"claims": 10, "transitions": 0, "events": 0}
    assert prune(core, keep="200 days", keep_events="50 days")[0]["events"] == 11
    assert core.rows(BOOKS)[0][1] == 10


def test_a_claim_goes_before_its_trail(core, old):
    """While a claim is in the books, so is what it did: a repeated reaper_expire() and verify need it."""
    core.do(
        "update pgreaper.claims set finished_at = pgreaper._clock()"
        " where token = (select token from pgreaper.claims order by claimed_at limit 1)"
    )
    prune(core)
    assert core.rows(BOOKS) == [(1, 1, 1)]
    token = core.value("select token::text from pgreaper.claims")
    assert sorted(outcome for outcome, _ in core.expire(token).values()) == ["expired", "expired", "not-eligible"]
    assert core.column("select holds from pgreaper.reaper_verify()") == [True] * 6


def test_an_active_claim_is_left_alone(core, holds, set_clock):
    """A lease that nobody took back, of which a part is settled: nothing of it goes."""
    set_clock(timedelta(days=-100))
    core.do("insert into holds (expires_at) select pgreaper._clock() - interval '1 hour' from generate_series(1, 4)")
    core.register()
    claim = core.claim()
    core.expire(claim[0].token, [claim[0].key])
    set_clock(timedelta(0))
    prune(core)
    assert core.rows(BOOKS) == [(1, 1, 0)]
    assert len(core.expire(claim[0].token)) == 4


def test_dead_letters_and_retries_stay(core, holds, set_clock):
    """They are work, not history, however old."""
    set_clock(timedelta(days=-400))
    core.do("insert into holds (expires_at) select pgreaper._clock() - interval '1 hour' from generate_series(1, 2)")
    core.register(permanent_attempts=1)
    token = core.claim()[0].token
    for key, transient in (("1", False), ("2", True)):
        core.call("reaper_fail", "outcome", token=token, key=key, error_class="x", transient=transient)
    core.expire(token)
    set_clock(timedelta(0))
    prune(core)
    assert core.value("select count(*) from pgreaper.failures") == 2
    assert core.value("select count(*) from pgreaper.dead_letters") == 1


def test_two_at_once_share_the_work(core, old, committed):
    """The second skips what the first has locked and does not wait."""
    first = committed(autocommit=False)
    first.execute("select * from pgreaper.reaper_prune(max_rows => 6)")
    core.do("set lock_timeout = '1ms'")
    removed, _ = prune(core)
    assert (removed["claims"], removed["transitions"]) == (4, 4)
    first.commit()
    prune(core)
    assert core.rows(BOOKS) == [(0, 0, 0)]


def test_what_a_relay_has_not_delivered_stays(core, old):
    """Rows of the trail go when every relay of the policy is past them; a relay of another policy keeps nothing."""
    core.do("create table others (like holds including all)")
    core.register("q", "others")
    for policy, name in (("p", "quick"), ("p", "slow"), ("q", "other")):
        core.call("reaper_relay", policy=policy, relay=name, backfill=True)
    quick, slow = Relay(core, "quick"), Relay(core, "slow")
    assert len(quick.drain()) == 20
    # Three rows, and half of the fourth; the fifth is on its way.
    assert len(slow.keys(batch=7)) == 7
    slow.fetch(batch=3)
    prune(core)
    assert core.rows(BOOKS)[0][1] == 7
    core.do("update pgreaper.deliveries set lease_until = '-infinity' where finished_at is null")
    assert len(slow.drain()) == 13
    prune(core)
    assert core.rows(BOOKS)[0][1] == 0


def test_what_was_given_up_stays(core, old, set_clock):
    """A row that tells of a dead event, or of one that waits, goes when that one is settled."""
    core.call("reaper_relay", policy="p", backfill=True)
    relay = Relay(core)
    batch = relay.fetch()
    relay.refuse(batch, batch[0].key)
    assert prune(core)[0]["transitions"] == 9
    core.call("reaper_resend", relay="p")
    assert prune(core)[0]["transitions"] == 0
    [event] = relay.fetch()
    assert event == batch[0]._replace(token=event.token, lease_until=event.lease_until)
    relay.ack([event])
    assert prune(core)[0]["transitions"] == 1


def test_a_relay_that_is_removed_keeps_nothing(core, old):
    """Nobody delivers it any more."""
    core.call("reaper_relay", policy="p", backfill=True)
    assert prune(core)[0]["transitions"] == 0
    core.do("select pgreaper.reaper_unrelay('p')")
    assert prune(core)[0]["transitions"] == 10


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"keep": "59 minutes"}, "an hour at least"),
        ({"keep": None}, "an hour at least"),
        ({"keep_claims": "-1 day"}, "an hour at least"),
        ({"keep_events": "0"}, "an hour at least"),
        ({"max_rows": 0}, "max_rows must be between"),
        ({"max_rows": None}, "max_rows must be between"),
    ],
)
def test_nonsense_is_refused(core, old, arguments, told):
    """With the reason, and nothing is removed."""
    names = ", ".join(f"{name} => %s" for name in arguments)
    error = core.refused(f"select * from pgreaper.reaper_prune({names})", *arguments.values())
    assert error.sqlstate == "22023"
    assert told in str(error)
    assert core.rows(BOOKS) == [(10, 10, 10)]

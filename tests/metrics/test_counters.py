"""Counters never go back: not on prune, not on restart or crash, not when a policy is withdrawn, renamed or changed."""

from __future__ import annotations

from datetime import timedelta

import psycopg
import pytest

from pgreaper.connection import resolve
from pgreaper.metrics import Source, page
from tests.conftest import Holds
from tests.metrics.conftest import samples


def counters(url):
    """Every counter and bucket of every policy, by name and labels; some of each kind are above zero."""
    found = samples(page(Source(resolve(url)).latest()).decode())
    wanted = {k: v for k, v in found.items() if k[0].endswith(("_total", "_bucket", "_count"))}
    assert len([k for k in wanted if k[0] == "pgreaper_outcomes_total"]) % 5 == 0
    return wanted


def happen(db, first):
    """One of everything that is counted: a transition, conflicts, a retry, a dead letter, a lease taken back."""
    holds = Holds.__new__(Holds)
    holds.connection = db
    ids = holds.due(6)
    ((token,), *_) = db.execute("select token from pgreaper.reaper_claim('holds', 5, rescan => true)").fetchall()
    db.execute("update holds set status = 'consumed' where id = %s", (ids[0],))
    db.execute("update holds set status = 'expired' where id = %s", (ids[1],))
    db.execute("select pgreaper.reaper_fail(%s, %s, 'Timeout', true)", (token, str(ids[2])))
    db.execute("select pgreaper.reaper_fail(%s, %s, 'Refused', false)", (token, str(ids[3])))
    db.execute("select count(*) from pgreaper.reaper_expire(%s)", (token,))
    db.execute("select count(*) from pgreaper.reaper_claim('holds', 1, rescan => true)")
    db.execute("update pgreaper.claims set claim_until = clock_timestamp() where finished_at is null")
    db.execute("call pgreaper.reaper_sweep('holds')")


def grew(before, after, *, by_all=False):
    """Nothing went back or got lost; with `by_all`, each outcome went up."""
    assert before.keys() == after.keys()
    assert {k: (v, after[k]) for k, v in before.items() if after[k] < v} == {}
    if by_all:
        stuck = {k for k, v in before.items() if after[k] == v and k[0].endswith("_total")}
        assert stuck == set()
    return after


@pytest.fixture
def shop(db, holds, dsn):
    holds.register(permanent_attempts=1)
    nothing = counters(dsn)
    happen(db, 1)
    return grew(nothing, counters(dsn), by_all=True)


def test_prune_does_not_touch_them(db, dsn, set_clock, shop):
    """All the books are removed, and the counters are what they were, and go on from there."""
    set_clock(timedelta(days=3650))
    db.execute("select count(*) from pgreaper.reaper_prune('1 hour', keep_claims => '1 hour')")
    kept = "select (select count(*) from pgreaper.transitions), (select count(*) from pgreaper.claims)"
    assert db.execute(kept).fetchone() == (0, 0)
    assert counters(dsn) == shop
    set_clock(timedelta(0))
    happen(db, 7)
    grew(shop, counters(dsn), by_all=True)


def test_withdrawn_and_registered_again(db, dsn, holds, shop):
    """While it is withdrawn it is not told; the same name again goes on where it was."""
    db.execute("select pgreaper.reaper_unregister('holds')")
    assert counters(dsn) == {}
    holds.register(permanent_attempts=1, owner="others", batch=3)
    assert counters(dsn) == shop
    happen(db, 7)
    grew(shop, counters(dsn), by_all=True)


def test_another_policy_of_the_same_table(db, dsn, holds, shop):
    """Withdrawn, and registered under a new name: that begins at zero, and the old one is not counted again."""
    db.execute("select pgreaper.reaper_unregister('holds')")
    holds.register("renamed", permanent_attempts=1)
    found = counters(dsn)
    assert {dict(labels)["policy"] for _, labels in found} == {"renamed"}
    assert set(found.values()) == {0.0}
    holds.register(permanent_attempts=1)
    again = counters(dsn)
    assert {k: v for k, v in again.items() if dict(k[1])["policy"] == "holds"} == shop


def test_a_name_that_is_changed_in_the_books(db, dsn, shop):
    """An owner who renames a policy by hand takes its counters along."""
    db.execute("update pgreaper.policies set name = 'renamed' where name = 'holds'")
    renamed = counters(dsn)
    assert sorted(renamed.values()) == sorted(shop.values())
    assert {dict(labels)["policy"] for _, labels in renamed} == {"renamed"}


def test_restart_and_crash(cluster, install):
    """Counted in the transaction that did it: an orderly restart and a crash lose nothing."""
    install(cluster.dsn)
    with psycopg.connect(cluster.dsn, autocommit=True) as db:
        Holds(db).register(permanent_attempts=1)
        happen(db, 1)
    before = counters(cluster.dsn)
    cluster.restart()
    assert counters(cluster.dsn) == before
    with psycopg.connect(cluster.dsn, autocommit=True) as db:
        happen(db, 7)
    later = grew(before, counters(cluster.dsn), by_all=True)
    cluster.kill()
    cluster.start()
    assert counters(cluster.dsn) == later

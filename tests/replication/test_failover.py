"""Another server becomes the primary: workers find it, nobody is charged, nothing expires twice."""

from __future__ import annotations

import re
import signal
import time
from datetime import timedelta

from pgreaper.api import Reaper
from tests.conftest import Holds
from tests.replication.conftest import connect, either, follow, in_step, promote, until, value

STEP = re.compile(r"^pgreaper: .*; trying again in [\d.]+ m?s$")


def assert_charged_nobody(db) -> None:
    """No attempt, no dead letter, and the books agree with the rows."""
    assert value(db, "select count(*) from pgreaper.failures") == 0
    assert value(db, "select count(*) from pgreaper.events where kind in ('retry', 'dead-letter')") == 0
    assert db.execute("select invariant from pgreaper.reaper_verify() where not holds").fetchall() == []


def test_c072_a_daemon_finds_the_new_primary(failover, start):
    """Two hosts in the URL: the old primary stops, the standby is promoted, and the same process goes on there."""
    old, new = failover
    with connect(old) as db:
        holds = Holds(db)
        holds.due(2, overdue="10 seconds")
        holds.register()
        daemon = start("work", "--daemon", "--poll", "0.5", url=either(old, new))
        until(db, "select count(*) = 2 from holds where status = 'expired'")

    old.stop()
    promote(new)
    with connect(new) as db:
        _on(db).due(2, overdue="2 seconds")
        until(db, "select count(*) = 4 from holds where status = 'expired'")
        daemon.popen.send_signal(signal.SIGTERM)
        result, _ = daemon.end()
        assert result.code == 0, result
        assert_charged_nobody(db)

    up, *steps, back = result.err.splitlines()
    assert up.endswith("is up, 1 policy, looks at least every 500 ms"), result.err
    assert back == "pgreaper: connected again"
    assert steps, result.err
    assert all(STEP.match(line) for line in steps), result.err


def _on(db) -> Holds:
    """The helper on a table that is there already."""
    holds = object.__new__(Holds)
    holds.connection = db
    return holds


def test_c072_a_demoted_primary_under_a_live_daemon(failover, start):
    """The daemon knows one address, and what answers there is a standby now: it waits, line by line."""
    first, second = failover
    with connect(first) as db:
        Holds(db).due(1, overdue="10 seconds")
        _on(db).register()
        daemon = start("work", "--daemon", "--poll", "0.5", url=first.dsn)
        until(db, "select bool_and(status = 'expired') from holds")

    first.stop()
    promote(second)
    follow(first, second)
    with connect(second) as db, connect(first) as replica:
        _on(db).due(3, overdue="3 seconds")
        in_step(db, replica)
        # It looks, and looks again, and changes nothing on either side.
        end = time.monotonic() + 30
        while (first.room / "log").read_text().count(" application_name=pgreaper/") < 3:
            assert time.monotonic() < end, first.log()
            time.sleep(0.02)
        assert value(db, "select count(*) from holds where status = 'held'") == 3
        assert value(db, "select count(*) from pgreaper.claims") == 1

    second.stop()
    promote(first)
    with connect(first) as db:
        until(db, "select bool_and(status = 'expired') from holds")
        daemon.popen.send_signal(signal.SIGTERM)
        result, _ = daemon.end()
        assert result.code == 0
        assert_charged_nobody(db)

    _, *steps, back = result.err.splitlines()
    assert back == "pgreaper: connected again"
    assert all(STEP.match(line) for line in steps), result.err
    # Once the pauses have reached their full length, the same words are not said again and again.
    assert any("the server is a standby: it is read-only" in line for line in steps), result.err
    assert len(steps) < 20, result.err


def test_what_was_claimed_before_a_failover_is_charged_to_nobody(failover, set_clock):
    """The session that a claim is bound to went down with the old primary: that was the environment, not the hold."""
    old, new = failover
    with connect(old) as db:
        holds = Holds(db)
        holds.due(2, overdue="10 seconds")
        holds.register(lease="1 hour")
        claimed = Reaper(db).claim_batch("holds", worker="before", session=True)
        assert claimed is not None
        assert claimed.holds == 2
    old.kill()
    promote(new)

    with connect(new) as db:
        reaper = Reaper(db)
        assert reaper.claim("holds") == []  # seen to be gone
        set_clock(timedelta(seconds=6), on=db)
        again = reaper.claim("holds", worker="after")
        assert [(h.key, h.attempt) for h in again] == [("1", 1), ("2", 1)]
        reaper.expire(again[0].token)
        assert value(db, "select count(*) from pgreaper.failures") == 0
        assert value(db, "select count(*) from holds where status = 'expired'") == 2


def test_a_worker_that_survives_a_failover_keeps_its_lease(failover):
    """The token is in the books of both: whoever has it goes on with it on the new primary."""
    old, new = failover
    with connect(old) as db:
        Holds(db).due(2, overdue="10 seconds")
        _on(db).register()
        claimed = Reaper(db).claim_batch("holds", session=True)
        assert claimed is not None
    old.kill()
    promote(new)
    with connect(new) as db:
        here = "select node = pgreaper._node() from pgreaper.claims"
        assert value(db, here) is False
        Reaper(db).renew(claimed.token)
        assert value(db, here) is True  # from now on its end would be its own
        assert Reaper(db).expire_batch(claimed.token) == {"expired": 2}
        assert_charged_nobody(db)


def test_no_hold_expires_twice_across_a_failover(failover, start):
    """Workers drain, the primary is killed in the middle of it, the standby takes over: each hold once, none lost.

    What a worker was told has expired has expired on the new primary too: together they count each hold once.
    """
    old, new = failover
    with connect(old) as db:
        db.execute(
            """
            create table witness (id bigint not null);  -- no key: a second transition would be a second row
            create function witness() returns trigger language plpgsql as
              $$ begin insert into witness values (new.id); return null; end $$;
            """
        )
        holds = Holds(db)
        db.execute("create trigger witness after update on holds for each row execute function witness()")
        holds.due(4000, overdue="2 hours")
        holds.register(batch=50, objective="1 day")
        workers = [start("work", "--daemon", "--json", "--poll", "0.5", url=either(old, new)) for _ in range(3)]
        until(db, "select count(*) > 300 from witness")
        old.kill()
    promote(new)

    with connect(new) as db:
        assert value(db, "select count(*) from witness") < 4000, "killed too late to show anything"
        until(db, "select not exists (select from holds where status = 'held')", seconds=60)
        for worker in workers:
            worker.popen.send_signal(signal.SIGTERM)
        results = [worker.end()[0] for worker in workers]
        assert [r.code for r in results] == [0, 0, 0], results
        assert value(db, "select count(*) = 4000 and count(distinct id) = 4000 from witness")
        assert sum(r.json["outcomes"]["expired"] for r in results) == 4000, [r.json["outcomes"] for r in results]
        assert_charged_nobody(db)


def test_a_server_that_keeps_its_wal_to_itself(db):
    """Managed services may: claims work all the same, the node is then known by its database alone."""
    (full,) = db.execute("select pgreaper._node()").fetchone()
    assert re.fullmatch(r"\d+/[0-9A-F]{8}", full)

    db.execute("revoke execute on function pg_current_wal_lsn() from public")
    db.execute("create role pgreaper_plain")
    try:
        db.execute("grant usage on schema pgreaper to pgreaper_plain")
        db.execute("grant execute on function pgreaper._node() to pgreaper_plain")
        db.execute("set role pgreaper_plain")
        assert value(db, "select pgreaper._node()") == full.split("/")[0]
    finally:
        db.execute("reset role")
        db.execute("drop owned by pgreaper_plain")
        db.execute("drop role pgreaper_plain")

"""Taking leases back: from a worker that lapsed, from a session that is gone, and from another life."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import psycopg
import pytest

from tests.contract.conftest import Core

WORKER = """
import sys, psycopg
connection = psycopg.connect(sys.argv[1], autocommit=True)
rows = connection.execute("select token::text from pgreaper.reaper_claim('p', session => true, worker => 'killed')")
print(rows.fetchall()[0][0], flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _own_database(committed):
    """Sessions that end are the point here."""


@pytest.fixture
def worker(connect):
    """Another session, as a worker of the test's."""
    return Core(connect())


def gone(core, pid: int) -> None:
    """Wait until that backend is gone."""
    end = time.monotonic() + 10
    while core.value("select exists (select from pg_stat_activity where pid = %s)", pid):
        assert time.monotonic() < end
        time.sleep(0.005)


def terminate(core, other) -> None:
    pid = other.connection.info.backend_pid
    core.value("select pg_terminate_backend(%s)", pid)
    gone(core, pid)


def ending(core, token: str) -> str | None:
    value = core.value("select ending from pgreaper.claims where token = %s", token)
    assert value is None or isinstance(value, str)
    return value


def expired(core) -> int:
    count = core.value("select count(*) from holds where status = 'expired'")
    assert isinstance(count, int)
    return count


def test_a_session_that_is_gone_loses_its_claim_after_five_seconds(core, holds, worker, set_clock):
    """Found gone by one pass, taken back by the first pass five seconds later; an attempt is charged."""
    holds.due(3)
    core.register(lease="1 hour", backoff_base="0", backoff_cap="0")
    token = worker.claim(session=True)[0].token
    terminate(core, worker)
    assert core.claim() == [], "found gone now"
    set_clock(timedelta(seconds=4.9))
    assert core.claim() == []
    assert ending(core, token) is None
    set_clock(timedelta(seconds=6))
    taken = core.claim(batch=24)
    assert ending(core, token) == "taken-back"
    assert [(hold.attempt) for hold in taken] == [2, 2, 2]
    assert core.rows("select distinct error_class, attempts from pgreaper.failures") == [("LeaseExpired", 1)]
    assert core.refused("select pgreaper.reaper_expire(%s)", token).sqlstate == "RP001"


def test_a_sweep_takes_it_back_too(core, holds, worker, set_clock):
    holds.due(3)
    core.register(lease="1 hour", backoff_base="0", backoff_cap="0")
    token = worker.claim(session=True)[0].token
    terminate(core, worker)
    core.value("call pgreaper.reaper_sweep()")
    assert (ending(core, token), expired(core)) == (None, 0)
    set_clock(timedelta(seconds=6))
    for _ in range(3):  # a run tries no failure whose time came after its start
        core.value("call pgreaper.reaper_sweep()")
    assert (ending(core, token), expired(core)) == ("taken-back", 3)


def test_while_the_session_lives_only_the_lease_decides(core, holds, worker, set_clock):
    """However long it is silent."""
    holds.due(1)
    core.register(lease="1 hour")
    token = worker.claim(session=True)[0].token
    for minutes in (0, 1, 59):
        set_clock(timedelta(minutes=minutes))
        assert core.claim(rescan=True) == []
        assert ending(core, token) is None
        assert core.value("select session_lost_at from pgreaper.claims") is None
    set_clock(timedelta(minutes=61))
    core.claim(rescan=True)
    assert ending(core, token) == "taken-back"


def test_behind_a_pooler_only_the_lease_decides(core, holds, worker, set_clock):
    """session false: whose backend it was says nothing about the worker."""
    holds.due(1)
    core.register(lease="1 hour")
    token = worker.claim(session=False)[0].token
    terminate(core, worker)
    for minutes in (0, 1, 59):
        set_clock(timedelta(minutes=minutes))
        assert core.claim(rescan=True) == []
    assert ending(core, token) is None
    set_clock(timedelta(minutes=61))
    core.claim(rescan=True)
    assert ending(core, token) == "taken-back"


def test_renewed_from_a_new_session_it_goes_on(core, holds, worker, connect, set_clock):
    """A worker that merely reconnects keeps its claim, also when it was found gone; and is bound to the new session."""
    holds.due(1)
    core.register(lease="1 hour")
    token = worker.claim(session=True)[0].token
    terminate(core, worker)
    core.claim()
    again = Core(connect())
    again.call("reaper_renew", token=token)
    set_clock(timedelta(seconds=30))
    assert core.claim(rescan=True) == []
    assert ending(core, token) is None
    terminate(core, again)
    core.claim()
    assert ending(core, token) is None, "the five seconds begin anew"
    set_clock(timedelta(seconds=36))
    core.claim()
    assert ending(core, token) == "taken-back"


def test_a_process_id_that_came_round_again_is_another_session(core, holds, worker, set_clock):
    """Who has the number now is not who claimed."""
    holds.due(1)
    core.register(lease="1 hour")
    token = worker.claim(session=True)[0].token
    core.do("update pgreaper.claims set session_start = session_start - interval '1 day'")
    core.claim()
    set_clock(timedelta(seconds=6))
    core.claim()
    assert ending(core, token) == "taken-back"


def test_who_may_not_see_other_sessions_takes_nothing_back_early(core, holds, worker, connect, set_clock):
    """A role without pg_read_all_stats cannot tell whose a session is: while there is one, the lease decides."""
    holds.due(1)
    core.register(lease="1 hour")
    token = worker.claim(session=True)[0].token
    name = "reaper_blind"
    core.do(
        f"create role {name}",
        f"grant usage on schema pgreaper to {name}",
        f"grant all on all tables in schema pgreaper to {name}",
        f"grant execute on all functions in schema pgreaper to {name}",
        f"grant all on holds to {name}",
    )
    try:
        blind = Core(connect())
        blind.do(f"set role {name}")
        assert blind.claim() == []
        set_clock(timedelta(seconds=6))
        assert blind.claim() == []
        assert ending(core, token) is None
        terminate(core, worker)
        blind.claim()
        set_clock(timedelta(seconds=12))
        blind.claim()
        assert ending(core, token) == "taken-back", "that it is gone is to be seen by anybody"
    finally:
        blind.connection.close()
        core.do(f"drop owned by {name}", f"drop role {name}")


def test_a_killed_worker_is_replaced_within_ten_seconds(core, holds, dsn):
    """The real thing, with the real clock: SIGKILL, and passes of others once a second, at the default lease."""
    holds.due(5)
    core.register(backoff_base="0", backoff_cap="0")
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, dsn], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout
        token = process.stdout.readline().strip()
        assert len(token) == 36
        os.kill(process.pid, signal.SIGKILL)
        killed = time.monotonic()
        while expired(core) < 5:
            assert time.monotonic() - killed < 10
            for hold in core.claim()[:1]:
                core.expire(hold.token)
            [(wait,)] = core.call("reaper_next_due", policy="p")
            time.sleep(min(1.0, max(0.01, wait.total_seconds() if wait else 1.0)))
        assert time.monotonic() - killed >= 5
    finally:
        process.kill()
        process.communicate()
    assert ending(core, token) == "taken-back"


def test_next_due_watches_bound_claims(core, holds, worker, set_clock):
    """A daemon that sleeps until reaper_next_due() wakes up soon enough to notice."""
    holds.due(1)
    core.register(lease="1 hour")
    worker.claim(session=True)
    [(wait,)] = core.call("reaper_next_due", policy="p")
    assert wait <= timedelta(seconds=1)
    terminate(core, worker)
    core.claim()
    [(wait,)] = core.call("reaper_next_due", policy="p")
    assert timedelta(seconds=4) < wait <= timedelta(seconds=5)


def test_c075_leases_from_another_life(core, holds, worker, set_clock):
    """
    A restored database: a lease of hours whose worker and server are gone.

    A claim that was bound to its session is over in seconds; any other can be given back by its token, which
    the view `leases` shows. Nobody is charged: the server that restarted since explains the silence.
    """
    holds.due(4)
    core.register(lease="6 hours", batch=2)
    bound, plain = worker.claim(session=True)[0].token, worker.claim()[0].token
    terminate(core, worker)
    core.do(
        "update pgreaper.claims set claimed_at = pg_postmaster_start_time() - interval '1 hour',"
        " session_start = session_start - interval '1 day'"
    )
    core.claim()
    set_clock(timedelta(seconds=6))
    [first, second] = core.claim()
    assert ending(core, bound) == "taken-back"
    assert (first.attempt, core.value("select count(*) from pgreaper.failures")) == (1, 0)
    assert core.column("select token::text from pgreaper.leases where worker is null and token <> %s", first.token) == [
        plain
    ]
    assert core.call("reaper_release", token=plain) == [(2,)]
    assert len(core.claim()) == 2
    assert second.attempt == 1


def test_a_hold_that_kills_its_worker_ends_alone(core, holds, connect, set_clock):
    """Batches shrink with each attempt until the guilty hold is alone; its neighbours expire, it is a dead letter."""
    ids = holds.due(100)
    guilty = str(ids[41])
    core.register(batch=100, max_attempts=5, backoff_base="0", backoff_cap="0")
    ahead = timedelta(0)
    for _ in range(300):
        mortal = Core(connect())
        claim = mortal.claim(rescan=True)
        if not claim:
            if core.value("select count(*) from pgreaper.dead_letters") == 1 and expired(core) == 99:
                break
        elif guilty in [hold.key for hold in claim]:
            terminate(core, mortal)  # as it would when the hold crashes its worker
            ahead += timedelta(minutes=2)
            set_clock(ahead)
        else:
            mortal.expire(claim[0].token)
        mortal.connection.close()
    assert core.rows("select key, attempts, error_class from pgreaper.dead_letters") == [(guilty, 5, "LeaseExpired")]
    assert expired(core) == 99
    assert core.rows("select * from pgreaper.retries") == []


def test_a_claim_that_is_being_settled_is_not_taken_back(core, holds, worker, set_clock):
    """Whoever has the claim's row locked is at work: it keeps its lease until it has committed."""
    holds.due(1)
    core.register(lease="1 minute")
    token = worker.claim()[0].token
    set_clock(timedelta(minutes=2))
    with worker.connection.transaction():
        assert len(worker.expire(token)) == 1
        assert core.claim(rescan=True) == []
    assert ending(core, token) == "expired"
    assert core.value("select count(*) from pgreaper.failures") == 0
    with pytest.raises(psycopg.Error):
        core.call("reaper_renew", token=token)


def test_nobody_dies_of_a_crash_that_another_may_have_caused(core, holds, set_clock):
    """A budget of one: holds that lose a lease together stay retries, in ever smaller batches; alone it counts."""
    holds.due(20)
    core.register(lease="1 minute", max_attempts=1, backoff_base="1 second")
    core.claim(batch=20)
    sizes = []
    for hours in range(1, 60):
        set_clock(timedelta(hours=hours))
        batch = core.claim(batch=20)
        sizes.append(len(batch))
        if not batch and not core.value("select count(*) from pgreaper.retries"):
            break
        dead = core.column("select attempts from pgreaper.dead_letters")
        assert 1 not in dead, "it was not alone"
    assert max(sizes) == 2, "twenty at first, an eighth of that after one attempt, then each alone"
    assert core.value("select count(*) from pgreaper.dead_letters where error_class = 'LeaseExpired'") == 20

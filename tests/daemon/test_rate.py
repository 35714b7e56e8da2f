"""A rate limit spreads the work out, a portion now and then, and a run that ends waits for it."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import pytest

from pgreaper.api import EXPIRED, Batch, Reaper


def claims(db: Any) -> tuple[int, int, float]:
    """How many claims there were, the largest, and seconds from the first to the last."""
    (row,) = db.execute(
        "select count(*), max(holds), extract(epoch from max(claimed_at) - min(claimed_at)) from pgreaper.claims"
    ).fetchall()
    return int(row[0]), int(row[1]), float(row[2])


def test_a_run_waits_for_the_rate_limit(db, holds, work):
    """Two hundred and fifty at a hundred a second: a second's worth, a second later another, the rest after a third."""
    holds.due(250)
    holds.register(rate_limit=100)

    run, _ = work()

    assert (run.expired, run.ended, run.exit_code) == (250, "drained", 0)
    number, largest, seconds = claims(db)
    assert (number, largest) == (3, 100)
    assert seconds > 1.9


def test_a_run_does_not_wait_for_what_is_not_due_yet(holds, work):
    """The limit is used up and a hold lies ahead: that is the end."""
    holds.due(1)
    holds.ahead(1)
    holds.register(rate_limit=0.001)

    run, _ = work()

    assert (run.expired, run.ended) == (1, "drained")


@pytest.mark.parametrize(("settings", "ended"), [({"max_seconds": 0.3}, "max-seconds"), ({"once": True}, "once")])
def test_a_run_that_waits_for_the_rate_limit_ends_in_time(holds, work, settings, ended):
    """A hold in a quarter of an hour: the run does not stay for it when it was told not to."""
    holds.due(3)
    holds.register(rate_limit=0.001)

    run, _ = work(**settings)

    assert (run.expired, run.ended, run.exit_code) == (1, ended, 0)


def test_a_signal_ends_the_wait_for_the_rate_limit(db, holds, work, wait_until):
    """SIGTERM, as from a scheduler that has no more time."""
    holds.due(3)
    holds.register(rate_limit=0.001)

    def stop() -> None:
        wait_until("select count(*) = 1 from holds where status = 'expired'")
        signal.raise_signal(signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    run, _ = work()
    thread.join()

    assert (run.expired, run.ended, run.exit_code) == (1, "signal", 0)


def test_a_policy_that_waits_for_its_rate_limit_keeps_nobody_waiting(db, holds, work):
    """The other one is drained meanwhile, in batches of its own size."""
    db.execute("create table other (like holds including all)")
    holds.due(90)
    db.execute("insert into other (expires_at) select expires_at from holds")
    db.execute("delete from holds where id > 3")
    holds.register(rate_limit=1)
    holds.register("other", target="other", batch=10)

    run, _ = work()

    assert {p: r.outcomes[EXPIRED] for p, r in run.policies.items()} == {"holds": 3, "other": 90}
    ((sizes,),) = db.execute(
        "select array_agg(c.holds order by c.claimed_at)"
        "  from pgreaper.claims as c join pgreaper.policies using (policy_id) where name = 'other'"
    ).fetchall()
    assert sizes == [10] * 9
    ((last,),) = db.execute(
        "select (select max(finished_at)"
        "          from pgreaper.claims join pgreaper.policies using (policy_id) where name = 'other')"
        " < max(claimed_at)"
        "  from pgreaper.claims"
    ).fetchall()
    assert last


def test_a_fleet_under_a_rate_limit_takes_whole_portions(db, holds, start, wait_until):
    """Four daemons at a thousand a second: claims of what comes in within half a second, not of a few."""
    holds.due(3000)
    holds.register(rate_limit=1000, batch=1000)

    for _ in range(4):
        start("work", "--daemon", "--poll", "600")
    wait_until("select count(*) = 3000 from holds where status = 'expired'")

    number, largest, seconds = claims(db)
    assert number <= 5, "1000 at once, and then 500 at least"
    assert largest == 1000
    assert seconds > 1.9


def test_a_batch_that_was_asked_for_is_a_bound(db, holds, work):
    """--batch below the portion is kept, above it waits for no more than the portion."""
    holds.due(180)
    holds.register(rate_limit=100)

    work(batch=5, max_rows=60)
    assert claims(db)[:2] == (12, 5)
    work(batch=1000)
    assert claims(db)[0] <= 15


def test_a_portion_that_comes_in_after_a_refusal_is_taken(holds, work, monkeypatch):
    """The claim came a little too early and the look, a moment later, finds that it may go: that is not the end."""
    holds.due(5)
    holds.register(rate_limit=1000, batch=2)
    claim = Reaper.claim_batch
    calls = 0

    def early(reaper: Reaper, *arguments: Any, **keywords: Any) -> Batch | None:
        nonlocal calls
        calls += 1
        return None if calls == 2 else claim(reaper, *arguments, **keywords)

    monkeypatch.setattr(Reaper, "claim_batch", early)

    run, _ = work()

    assert (run.expired, run.ended) == (5, "drained")


@pytest.mark.parametrize("rate", [1, 50])
@pytest.mark.parametrize("apart", [0, 1], ids=["one deadline", "several"])
def test_locked_holds_do_not_use_the_limit_up(db, connect, holds, work, rate, apart):
    """What somebody has locked is left, and what lies behind it goes at the rate there is."""
    db.execute(
        "insert into holds (expires_at) select now() - interval '1 hour' + g * %s * interval '1 s'"
        " from generate_series(1, 63) as g",
        (apart,),
    )
    holds.register(rate_limit=rate)
    locker = connect(autocommit=False)
    locker.execute("select from holds where id <= 60 for update")

    run, _ = work(max_seconds=10)

    assert (run.expired, run.ended, run.exit_code) == (3, "drained", 0)
    assert {i for i, state in holds.states().items() if state == "expired"} == {61, 62, 63}


def test_what_came_in_behind_is_waited_for_too(db, holds, work):
    """The first claim would have looked behind the cursor, and the limit refused it."""
    holds.due(1, overdue="1 minute")
    holds.register(rate_limit=2)
    work()
    holds.due(3, overdue="1 hour")
    db.execute("update pgreaper.cursors set rate_tokens = 0, rate_at = clock_timestamp()")

    run, _ = work()

    assert (run.expired, run.ended) == (3, "drained")


@pytest.mark.parametrize("fresh", [0, 1])
def test_retries_are_waited_for_and_not_asked_for_again_and_again(db, holds, work, fresh):
    """They count like what is due for the first time, and a refused claim costs a transaction."""
    ids = holds.due(4 + fresh)
    holds.register(rate_limit=4, max_attempts=9)
    db.execute(
        "insert into pgreaper.failures"
        " (policy_id, key, deadline, attempts, first_seen_at, failed_at, not_before, error_class)"
        " select p.policy_id, h.id::text, h.expires_at, 1, now(), now(), now(), 'T'"
        "   from pgreaper.policies as p, holds as h where h.id = any (%s)",
        (ids[:4],),
    )
    db.execute("update pgreaper.cursors set rate_tokens = 0.5, rate_at = clock_timestamp()")
    ((before,),) = db.execute("select pg_snapshot_xmax(pg_current_snapshot())::text::bigint").fetchall()

    run, _ = work()

    ((after,),) = db.execute("select pg_snapshot_xmax(pg_current_snapshot())::text::bigint").fetchall()
    assert (run.expired, run.ended) == (4 + fresh, "drained")
    assert after - before < 40


def test_the_others_are_looked_after_while_one_waits(connect, holds, others, work, wait_until):
    """A run that stays for the limit of one does not leave what comes in for another."""
    holds.due(3)
    holds.register(rate_limit=1)
    others()

    def come() -> None:
        wait_until("select count(*) = 1 from holds where status = 'expired'")
        with connect() as application:
            application.execute("insert into others (expires_at) values (clock_timestamp() - interval '1 s')")

    thread = threading.Thread(target=come)
    thread.start()
    run, _ = work(poll=0.2)
    thread.join()

    assert {p: r.outcomes[EXPIRED] for p, r in run.policies.items()} == {"holds": 3, "others": 1}


def test_a_limit_that_is_lifted_is_waited_for_no_longer(holds, work, wait_until):
    """A run that waits asks again after a poll."""
    holds.due(30)
    holds.register(rate_limit=0.01)

    def lift() -> None:
        wait_until("select count(*) = 1 from holds where status = 'expired'")
        time.sleep(1.5)  # By then it has been told how long it would take.
        holds.register()

    thread = threading.Thread(target=lift)
    thread.start()
    run, _ = work(poll=0.2, max_seconds=20)
    thread.join()

    assert (run.expired, run.ended) == (30, "drained")

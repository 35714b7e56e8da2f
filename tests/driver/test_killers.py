"""Holds that end the session which touches them, and triggers that speak of an environment that is well."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from pgreaper.api import EXPIRED, RETRY
from tests.driver.test_failures import books, how, on_update, one

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from tests.driver.conftest import Beside

__all__ = ["how"]

KILLS = "perform pg_terminate_backend(pg_backend_pid());"


@pytest.fixture
def others(db: psycopg.Connection[Any], holds: Any) -> Callable[[int], None]:
    """A function that adds due holds to policy ``others``, whose table is well."""
    db.execute("create table others (like holds including all)")
    holds.register("others", target="others")

    def others(n: int) -> None:
        db.execute("insert into others (expires_at) select now() - interval '1 hour' from generate_series(1, %s)", (n,))

    return others


def held(db: psycopg.Connection[Any], table: str) -> int:
    return int(one(db, f"select count(*) from {table} where status = 'held'"))


def test_holds_that_kill_their_backend_do_not_stop_a_daemon(db, holds, others, daemon, how):
    """Other policies are served, the neighbours expire, and each of the two ends alone as a dead letter."""
    ids = holds.due(20)
    bad = {ids[6], ids[14]}
    holds.register(lease="1 second", backoff_base="0", backoff_cap="0", max_attempts=3)
    on_update(db, f"if new.id in ({ids[6]}, {ids[14]}) then {KILLS} end if;")

    def script(beside: Beside) -> None:
        beside.hears("policy holds: the connection was lost twice in the same work")
        others(5)
        beside.wait_for(lambda: not held(db, "others"))
        beside.wait_for(lambda: held(db, "holds") == len(bad), 40)
        beside.wait_for(lambda: one(db, "select count(*) from pgreaper.dead_letters") == len(bad), 40)

    run, lines = daemon(script, poll=0.2, **how)

    assert {i for i, s in holds.states().items() if s == "held"} == bad
    assert sorted(books(db)) == sorted((str(i), "LeaseExpired", 3, True) for i in bad)
    assert run.exit_code == 0
    assert any(line.startswith("policy holds works again, after ") for line in lines)


def test_a_hold_that_kills_its_backend_does_not_stop_runs_that_end(db, holds, others, work, set_clock, how):
    """The run goes on with what is well, in this policy and in others, and says 75; later runs isolate the hold."""
    ids = holds.due(40)
    bad = ids[6]
    holds.register(max_attempts=3)
    others(5)
    on_update(db, f"if new.id = {bad} then {KILLS} end if;")

    run, lines = work("holds", "others", batch=10, **how)

    assert run.exit_code == 75
    assert (held(db, "others"), held(db, "holds")) == (0, 10)
    assert run.policies["holds"].lost == 10
    assert any("the connection was lost twice" in line for line in lines)
    assert books(db) == []

    for days in range(1, 12):
        set_clock(timedelta(days=days))
        work("holds", batch=10, **how)
        if one(db, "select count(*) from pgreaper.dead_letters"):
            break
    assert {i for i, s in holds.states().items() if s == "held"} == {bad}
    assert [row[:2] + row[3:] for row in books(db)] == [(str(bad), "LeaseExpired", True)]
    assert work("holds", **how)[0].exit_code == 0


def test_a_run_leaves_a_policy_whose_every_batch_kills_its_backend(db, holds, others, work):
    """A few claims of it are left to lapse, not all; the others are served."""
    holds.due(100)
    holds.register(batch=5)
    others(5)
    on_update(db, KILLS)

    run, _ = work("holds", "others")

    assert (run.exit_code, held(db, "others"), held(db, "holds")) == (75, 0, 100)
    assert run.policies["holds"].claims == 4
    assert books(db) == []


def test_a_claim_that_kills_its_backend_does_not_stop_the_others(db, holds, others, work):
    """Reading a view may do that too: the run ends, with 75, and the other policy is served."""
    holds.due(3)
    db.execute("""
        create function dies(h holds) returns boolean language plpgsql as $$
        begin perform pg_terminate_backend(pg_backend_pid()); return true; end $$;
        create view deadly as select * from holds where dies(holds)""")
    holds.register(target="deadly", key_columns=["id"])
    others(5)

    run, _ = work("holds", "others")

    assert (run.exit_code, held(db, "others")) == (75, 0)


LIARS = {
    "25006": "raise exception 'x' using errcode = '25006';",
    "25P04": "raise exception 'x' using errcode = '25P04';",
    "57P01": "raise exception 'x' using errcode = '57P01';",
    "read-only": "set local transaction_read_only = on; insert into notes values (new.id);",
}


@pytest.mark.parametrize("liar", LIARS)
def test_a_trigger_that_speaks_of_another_node_is_no_lost_node(db, holds, others, work, how, liar):
    """The connection is alive and the server takes writes: this policy fails (75), nobody is charged, nobody waits."""
    holds.due(3)
    holds.register()
    others(5)
    db.execute("create table notes (id bigint)")
    on_update(db, LIARS[liar])

    run, lines = work("holds", "others", **how)

    assert (run.exit_code, run.ended, run.reconnects) == (75, "drained", 0)
    assert (held(db, "holds"), held(db, "others")) == (3, 0)
    assert books(db) == []
    assert one(db, "select count(*) from pgreaper.leases") == 0
    assert any("the server itself is up and takes writes" in line for line in lines)


def test_a_daemon_goes_on_beside_a_trigger_that_speaks_of_another_node(db, holds, others, daemon, how):
    """On the connection that it has; and one line says when the policy works again."""
    holds.due(3)
    holds.register()
    on_update(db, LIARS["25006"])

    def script(beside: Beside) -> None:
        beside.hears("policy holds: a trigger, or what it calls, raised SQLSTATE 25006")
        others(5)
        beside.wait_for(lambda: not held(db, "others"))
        db.execute("drop trigger the_trigger on holds")
        beside.wait_for(lambda: not held(db, "holds"))
        beside.hears("policy holds works again, after ")

    run, lines = daemon(script, poll=0.2, **how)

    assert (run.reconnects, run.expired, books(db)) == (0, 8, [])
    assert sum("works again" in line for line in lines) == 1


def test_a_policy_that_was_suspended_works_again_and_says_so(db, holds, daemon):
    """One line, when the cause is gone."""
    db.execute("alter table holds add constraint never_expired check (status <> 'expired')")
    holds.due(20)
    holds.register()

    def script(beside: Beside) -> None:
        beside.hears("policy holds is suspended")
        db.execute("alter table holds drop constraint never_expired")
        db.execute("update pgreaper.cursors set suspended_until = now()")
        beside.wait_for(lambda: not held(db, "holds"))

    _, lines = daemon(script, poll=0.2)

    assert lines.count("policy holds works again") == 1


@pytest.mark.parametrize("kind", ["trigger", "handler"])
def test_no_hold_is_tried_twice_in_a_run_that_ends(db, holds, work, kind):
    """Without a pause before the retry, and with a budget that is never spent; the next run tries again."""
    ids = holds.due(30)
    holds.register(backoff_base="0", backoff_cap="0", max_attempts=1_000_000, batch=10)
    calls: list[str] = []
    settings: dict[str, Any] = {}
    if kind == "trigger":
        on_update(db, f"if new.id = {ids[3]} then raise exception 'x' using errcode = '40001'; end if;")
    else:

        def handler(call: Any) -> None:
            calls.append(call.key)
            if call.key == str(ids[3]):
                raise TimeoutError

        settings = {"handler": handler}

    for attempt in (1, 2):
        run, _ = work(**settings)
        assert (run.ended, run.outcomes[RETRY], run.exit_code) == ("drained", 1, 1)
        assert [row[0::2] for row in books(db)] == [(str(ids[3]), attempt)]
        assert run.outcomes[EXPIRED] == (29 if attempt == 1 else 0)
        assert one(db, "select count(*) from pgreaper.leases") == 0
    assert calls.count(str(ids[3])) == (2 if calls else 0)


def test_a_target_that_ends_whoever_reads_it_does_not_keep_a_daemon_from_the_others(db, holds, others, daemon):
    """All policies are looked at in one statement: whose turn it is then asked alone, and rests."""
    holds.due(3)
    db.execute("""
        create function deadly(hold bigint) returns boolean language plpgsql as
          $$ begin perform pg_terminate_backend(pg_backend_pid()); return true; end $$;
        create view grave as select * from holds where deadly(id);
    """)
    holds.register("grave", target="grave", key_columns=["id"])

    def script(beside: Beside) -> None:
        beside.hears("policy grave: the connection was lost twice in the same work; trying again in")
        others(5)
        beside.wait_for(lambda: not held(db, "others"))

    run, _ = daemon(script, poll=0.2)

    assert (run.expired, run.policies["others"].failed) == (5, False)
    assert db.execute("select count(*) from pgreaper.failures").fetchone() == (0,)

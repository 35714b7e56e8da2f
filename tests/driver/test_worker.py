"""The worker in this process, against a real server: what it does, and what it does when things go wrong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import traceback
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from pgreaper.api import DEAD_LETTER, EXPIRED, LOCKED
from pgreaper.errors import AccessDenied, DatabaseUnavailable, NotInstalled, UnknownPolicy, VersionMismatch
from pgreaper.worker import _Turn

if TYPE_CHECKING:
    import psycopg


def trail(db: psycopg.Connection[Any]) -> list[str]:
    """Every key in the trail, once per transition."""
    return [key for (key,) in db.execute("select unnest(keys) from pgreaper.transitions").fetchall()]


def active_claims(db: psycopg.Connection[Any]) -> int:
    ((n,),) = db.execute("select count(*) from pgreaper.claims where finished_at is null").fetchall()
    return int(n)


def on_update(db: psycopg.Connection[Any], body: str) -> None:
    """Let the user's own trigger run `body` for each row that is expired."""
    db.execute(f"""
        create function the_trigger() returns trigger language plpgsql as $$ begin {body} return new; end $$;
        create trigger the_trigger before update on holds for each row execute function the_trigger();
    """)


def test_a_run_expires_all_that_is_due_and_nothing_else(db, holds, work):
    """A drain leaves nothing due, touches nothing that is not, and counts right."""
    due, ahead = holds.due(1234), holds.ahead(5)
    holds.register()

    run, lines = work(batch=100)

    assert {i for i, s in holds.states().items() if s == "expired"} == set(due)
    assert all(holds.states()[i] == "held" for i in ahead)
    assert (run.expired, run.ended, run.exit_code) == (1234, "drained", 0)
    assert sorted(trail(db)) == sorted(map(str, due))
    assert lines == []


def test_a_run_with_nothing_due_writes_nothing(db, holds, work):
    """Idle is free: no claim, no transaction id."""
    holds.ahead(3)
    holds.register()
    ((before,),) = db.execute("select pg_snapshot_xmax(pg_current_snapshot())::text").fetchall()

    run, _ = work()

    ((after,),) = db.execute("select pg_snapshot_xmax(pg_current_snapshot())::text").fetchall()
    assert (run.expired, run.exit_code) == (0, 0)
    assert before == after


@pytest.mark.parametrize(("settings", "expected"), [({"max_rows": 250}, 250), ({"once": True, "batch": 40}, 40)])
def test_a_run_stops_where_it_is_told(holds, work, settings, expected):
    """--max-rows and --once are exact."""
    holds.due(1000)
    holds.register(batch=100)

    run, _ = work(**settings)

    assert run.expired == expected
    assert run.ended == ("once" if "once" in settings else "max-rows")
    assert list(holds.states().values()).count("expired") == expected


def test_once_takes_one_batch_of_each_policy(db, holds, work):
    """--once serves every policy, not only the first."""
    db.execute("create table other (like holds including all)")
    holds.due(30)
    db.execute("insert into other (expires_at) select expires_at from holds")
    holds.register(batch=10)
    holds.register("other", target="other", batch=10)

    run, _ = work(once=True)

    assert {p: r.outcomes[EXPIRED] for p, r in run.policies.items()} == {"holds": 10, "other": 10}


def test_max_seconds_stops_a_run(db, holds, work):
    """After --max-seconds nothing more is claimed, and what was claimed is finished."""
    holds.due(1000)
    holds.register(batch=10)
    on_update(db, "perform pg_sleep(0.01);")

    run, _ = work(max_seconds=0.3)

    assert run.ended == "max-seconds"
    assert 0 < run.expired < 1000
    assert run.expired % 10 == 0
    assert active_claims(db) == 0


def test_an_unknown_policy_is_refused_with_a_suggestion(holds, work):
    """RP002 before anything is done."""
    holds.register()

    with pytest.raises(UnknownPolicy) as refused:
        work("hold")

    assert refused.value.hint == "Did you mean holds?"


def test_a_locked_hold_does_not_stop_the_run(connect, holds, work):
    """A row that somebody holds is left out, the others expire; the next run takes it.  Nobody waits."""
    first, *_ = holds.due(30)
    holds.register(batch=1)
    other = connect(autocommit=False)
    other.execute("select from holds where id = %s for update", [first])

    run, _ = work()
    assert (run.expired, run.exit_code) == (29, 0)
    assert run.outcomes[LOCKED] > 0

    other.rollback()
    run, _ = work()
    assert (run.expired, run.outcomes[LOCKED], run.exit_code) == (1, 0, 0)


def test_locked_holds_of_one_deadline_do_not_hide_the_others(db, connect, holds, work):
    """Everything expires at midnight, and more than a batch of it is locked: the rest expires all the same."""
    db.execute("insert into holds (expires_at) select date_trunc('day', now()) from generate_series(1, 100)")
    holds.register(batch=10)
    other = connect(autocommit=False)
    other.execute("select from holds where id <= 25 for update")

    run, _ = work()

    assert (run.expired, run.exit_code) == (75, 0)


def test_a_run_ends_although_every_hold_is_locked(connect, holds, work):
    """All rows locked, one a batch: the run gives up, says so, and is no failure."""
    holds.due(40)
    holds.register(batch=1)
    other = connect(autocommit=False)
    other.execute("select from holds for update")

    run, lines = work()

    assert (run.expired, run.exit_code) == (0, 0)
    assert run.policies["holds"].claims < 40
    assert lines == ["policy holds: the rest is locked by other transactions; the next run takes it"]


def test_a_broken_policy_is_reported_and_the_others_go_on(db, holds, work):
    """Every hold of a policy is refused by a constraint: exit 1, nothing kept claimed, the other policy served."""
    db.execute("create table other (like holds including all)")
    db.execute("alter table holds add constraint never_expired check (status <> 'expired')")
    holds.due(50)
    db.execute("insert into other (expires_at) select expires_at from holds")
    holds.register()
    holds.register("other", target="other")

    run, lines = work()

    assert run.exit_code == 1
    assert run.policies["other"].outcomes[EXPIRED] == 50
    assert run.policies["holds"].suspended is not None
    assert (run.policies["holds"].outcomes, run.policies["holds"].released) == ({}, 50), (
        "charged to nobody, so no retry"
    )
    assert active_claims(db) == 0
    assert set(holds.states().values()) == {"held"}
    (line,) = lines
    assert line.startswith("policy holds is suspended, no hold is charged: ")
    assert "23514" in line

    # Suspended already: nothing can be claimed, and that is not "all is well".
    again, lines = work("holds")
    assert (again.policies["holds"].claims, again.exit_code) == (0, 1)
    assert "23514" in lines[0]


def test_the_reasons_of_failed_holds_are_told_once(db, holds, work):
    """SQLSTATE and constraint, one line a reason, however many holds and batches."""
    holds.due(40)
    db.execute("alter table holds add constraint odd_only check (status <> 'expired' or id % 2 = 1)")
    holds.register(batch=10)

    run, lines = work()

    assert (run.expired, run.outcomes[DEAD_LETTER], run.exit_code) == (20, 20, 1)
    assert [
        n for (_, state, name), n in run.policies["holds"].reasons.items() if (state, name) == ("23514", "odd_only")
    ] == [20]
    (line,) = lines
    assert "SQLSTATE 23514, constraint odd_only" in line


def test_an_error_that_no_hold_is_to_blame_for_is_given_back(db, holds, work):
    """A trigger says that the disk is full: nothing is charged, the claim is released, cron tries later (75)."""
    holds.due(5)
    holds.register()
    on_update(db, "raise exception 'for %', new.customer_email using errcode = '53100';")

    run, lines = work()

    assert (run.exit_code, run.policies["holds"].released) == (75, 5)
    assert active_claims(db) == 0
    assert db.execute("select count(*) from pgreaper.failures").fetchone() == (0,)
    assert "53100" in lines[0]
    assert "example.com" not in lines[0]


@pytest.mark.parametrize("code", ["P0001", "42501", "23505"])
def test_c062_no_value_of_a_row_is_logged(db, holds, work, code):
    """A trigger that puts an e-mail address into its message and its detail, whatever it calls the error."""
    holds.due(3)
    holds.register()
    on_update(
        db,
        f"raise exception 'no mail for %', new.customer_email using detail = new.customer_email, errcode = '{code}';",
    )

    run, lines = work()

    error = run.policies["holds"].error
    assert run.exit_code == 1
    assert any(code in line for line in lines)
    shown = "".join(lines) + repr(run) + "".join(traceback.format_exception(error) if error else [])
    assert "example.com" not in shown


def test_one_poison_hold_makes_the_exit_code_1_and_stops_nobody(db, holds, work):
    """C085 c): one of ten fails, nine expire, and cron hears of it."""
    bad, *good = holds.due(10)
    holds.register()
    on_update(db, f"if new.id = {bad} then raise exception 'no'; end if;")

    run, _ = work()

    assert (run.expired, run.outcomes[DEAD_LETTER], run.exit_code) == (9, 1, 1)
    assert {i for i, s in holds.states().items() if s == "expired"} == set(good)


def test_c069_batches_grow_back_slowly():
    """After one that was too large: quickly up to half of it, then a hundredth of the full batch at a time."""
    turn = _Turn("holds", 500)
    turn.shrink(500)
    assert turn.batch == 125
    sizes = [turn.batch]
    while turn.batch < 500:
        turn.grow()
        sizes.append(turn.batch)
        assert len(sizes) < 60
    assert sizes[:3] == [125, 250, 255]
    assert all(b - a <= 5 for a, b in pairwise(sizes[1:]))


def test_c069_batches_shrink_under_a_statement_timeout(db, holds, work, dsn):
    """What is too much for one statement goes in smaller ones, and nobody is blamed."""
    holds.due(150)
    holds.register(batch=100)
    on_update(db, "perform pg_sleep(0.012);")
    db.execute(f"alter database {db.info.dbname} set statement_timeout = '600ms'")

    run, lines = work()

    assert (run.expired, run.exit_code) == (150, 0)
    assert len(lines) == 1
    assert "statement timeout" in lines[0]


def test_c013_a_reply_lost_after_commit_is_not_a_failure(db, holds, work, proxy):
    """The server commits the fifth of ten transitions and the reply never arrives: asked again, it answers."""
    due = holds.due(10)
    holds.register(batch=1)
    proxy.drop_reply("reaper_expire", after=4)

    run, lines = work(url=proxy.url)

    assert proxy.dropped == 1
    assert (run.expired, run.exit_code, run.reconnects) == (10, 0, 1)
    assert sorted(trail(db), key=int) == list(map(str, due))
    assert db.execute("select count(*) from pgreaper.failures").fetchone() == (0,)
    assert db.execute("select count(*) from pgreaper.events where kind <> 'register'").fetchone() == (0,)
    assert set(holds.states().values()) == {"expired"}
    assert lines[-1] == "connected again"


def test_c013_a_claim_whose_reply_is_lost_is_given_back(db, holds, work, proxy):
    """The claim was committed, the token never arrived: the worker gives back what its old session took."""
    holds.due(10)
    holds.register(batch=5)
    proxy.drop_reply("reaper_claim", after=0)

    run, _ = work(url=proxy.url)

    assert (run.expired, run.exit_code) == (10, 0)
    released = (
        "select (select sum(holds) from pgreaper.claims where ending = 'released'), count(*) from pgreaper.failures"
    )
    assert db.execute(released).fetchone() == (5, 0)
    assert len(trail(db)) == 10


def test_c016_a_role_that_defaults_to_repeatable_read(db, holds, work, connect):
    """Two workers and an application that consumes every third row: one final state each, no errors."""
    due = holds.due(1000)
    holds.register(batch=50)
    db.execute(
        f"alter role current_user in database {db.info.dbname} set default_transaction_isolation = 'repeatable read'"
    )
    ((level,),) = connect().execute("show transaction_isolation").fetchall()
    assert level == "repeatable read"
    consumed: list[int] = []

    def application() -> None:
        session = connect()
        session.execute("set default_transaction_isolation = 'read committed'")  # its own affair
        for hold in due[::3]:
            took = session.execute("update holds set status = 'consumed' where id = %s and status = 'held'", [hold])
            consumed.extend([hold] * took.rowcount)

    app = threading.Thread(target=application)
    app.start()
    results: list[Any] = []
    # Signals are for main threads: the second worker is a process, as in life.
    second = _process(db, results)
    run, _ = work()
    second.join()
    app.join()
    last, _ = work()

    states = holds.states()
    assert {i for i, s in states.items() if s == "consumed"} == set(consumed)
    assert set(states.values()) == {"consumed", "expired"}
    assert (run.exit_code, results, last.exit_code) == (0, [0], 0)
    assert len(trail(db)) == len(set(trail(db))) == 1000 - len(consumed)
    assert db.execute("select count(*) from pgreaper.failures").fetchone() == (0,)


def _process(db: psycopg.Connection[Any], results: list[Any]) -> threading.Thread:
    info = db.info
    url = f"host={info.host} port={info.port} user={info.user} dbname={info.dbname}"
    environment = os.environ | {"PGPASSWORD": info.password} if info.password else dict(os.environ)

    def run() -> None:
        command = [sys.executable, "-m", "pgreaper", "work", "--database-url", url]
        results.append(subprocess.run(command, env=environment, check=False).returncode)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_run_waits_out_a_lost_connection(db, holds, work):
    """The backend is terminated in the middle of a transition: the run connects again and finishes."""
    holds.due(200)
    holds.register(batch=100)
    db.execute("create sequence updates")  # not undone by a rollback
    on_update(db, "if nextval('updates') = 150 then perform pg_terminate_backend(pg_backend_pid()); end if;")

    run, lines = work()

    assert (run.exit_code, run.reconnects) == (0, 1)
    assert set(holds.states().values()) == {"expired"}
    assert len(trail(db)) == 200
    assert lines[-1] == "connected again"


def test_a_database_without_pgreaper(work, empty_dsn):
    """Says that it is not installed, and what to run."""
    with pytest.raises(NotInstalled) as error:
        work(url=empty_dsn)
    assert "pgreaper install" in str(error.value.hint)


def test_a_database_of_another_version(db, work):
    """RP005: the driver refuses to work on SQL that it does not know."""
    db.execute("create or replace function pgreaper.reaper_version() returns text language sql as $$ select '9.9' $$")
    with pytest.raises(VersionMismatch) as error:
        work()
    assert "9.9" in str(error.value)


def test_c072_a_read_only_node(db, work):
    """Nothing can be written: try later (75)."""
    db.execute(f"alter database {db.info.dbname} set default_transaction_read_only = on")
    with pytest.raises(DatabaseUnavailable) as error:
        work()
    assert "read-only" in str(error.value)
    assert error.value.exit_code == 75


def test_a_role_without_rights(db, work, dsn):
    """Says which object is denied."""
    db.execute("create role pgreaper_nobody login")
    try:
        with pytest.raises(AccessDenied, match="pgreaper"):
            work(url=re.sub(r"//[^@]*@", "//pgreaper_nobody@", dsn))
    finally:
        db.execute("drop role pgreaper_nobody")


def test_a_policy_whose_table_is_gone(db, holds, work):
    """Named in pgreaper's own words; the others go on."""
    db.execute("create table gone (like holds including all)")
    holds.due(5)
    holds.register()
    holds.register("gone", target="gone")
    db.execute("drop table gone")

    run, lines = work()

    assert (run.expired, run.exit_code) == (5, 1)
    assert "public.gone" in lines[0]

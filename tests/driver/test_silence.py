"""C071: a connection that is there and says nothing.  TCP is content; the worker must not be."""

from __future__ import annotations

from datetime import timedelta
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest

from pgreaper.api import Backend, Reaper
from tests.driver.test_failures import WORKER, books, on_update, one

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from tests.driver.conftest import Beside, Proxy

# Short, through the address's own parameters: a call is asked about after so many milliseconds.
SHORT = "?tcp_user_timeout=600&connect_timeout=2"


@pytest.fixture
def running(db: psycopg.Connection[Any]) -> Callable[[], int]:
    """A function that counts the statements of the worker's that are in a trigger's sleep."""
    return lambda: int(one(db, f"select count(*) from pg_stat_activity where {WORKER} and wait_event = 'PgSleep'"))


@pytest.fixture(params=["plain", "handler"])
def how(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {} if request.param == "plain" else {"handler": lambda call: None}


def as_soon_as(condition: Callable[[], int], act: Callable[[], None]) -> Thread:
    """A thread that does something when the condition holds."""

    def play() -> None:
        while not condition():
            pass
        act()

    thread = Thread(target=play)
    thread.start()
    return thread


def slow_claims(db: psycopg.Connection[Any]) -> None:
    """A claim of three holds takes 0.6 seconds, and keeps other claims waiting."""
    db.execute("""
        create function slowly() returns trigger language plpgsql as $$ begin perform pg_sleep(0.6); return new; end $$;
        create trigger slowly before insert on pgreaper.claims for each row when (new.holds = 3)
          execute function slowly()
    """)


def test_c071_the_network_falls_silent_during_a_call(db, holds, daemon, proxy: Proxy, running, how):
    """The transition is committed and its reply never comes: asked for again on a new connection, once all the same."""
    holds.due(3)
    holds.register()
    on_update(db, "perform pg_sleep(0.2);")

    def script(beside: Beside) -> None:
        beside.wait_for(running)
        proxy.mute()
        beside.hears("connected again")
        beside.wait_for(lambda: set(holds.states().values()) == {"expired"})
        holds.due(1)  # and it goes on
        beside.wait_for(lambda: set(holds.states().values()) == {"expired"})

    run, lines = daemon(script, url=proxy.url + SHORT, poll=0.5, **how)

    assert (run.expired, run.reconnects, run.exit_code) == (4, 1, 0)
    assert any("does not work on it: connection given up" in line for line in lines)
    assert books(db) == []
    assert one(db, "select count(*) = count(distinct k) from pgreaper.transitions, unnest(keys) as k")


def test_c071_the_network_falls_silent_while_nothing_is_due(db, holds, daemon, proxy: Proxy, how):
    """The next call gets no answer; what has come due meanwhile expires on a new connection."""
    holds.due(1)
    holds.register()

    def script(beside: Beside) -> None:
        beside.wait_for(lambda: set(holds.states().values()) == {"expired"})
        proxy.mute()
        holds.due(3)
        beside.wait_for(lambda: set(holds.states().values()) == {"expired"})

    run, _ = daemon(script, url=proxy.url + SHORT, poll=0.5, **how)

    assert (run.expired, run.reconnects, run.exit_code) == (4, 1, 0)
    assert books(db) == []


def test_c071_the_network_falls_silent_during_a_claim(db, holds, daemon, proxy: Proxy, running, how):
    """The claim is committed and its answer never comes: what it took is given back, not left to its lease."""
    holds.due(1)
    holds.register(lease="10 minutes")
    slow_claims(db)

    def script(beside: Beside) -> None:
        beside.wait_for(lambda: set(holds.states().values()) == {"expired"})
        holds.due(3)
        beside.wait_for(running)
        proxy.mute()
        beside.wait_for(lambda: set(holds.states().values()) == {"expired"})

    run, _ = daemon(script, url=proxy.url + SHORT, poll=0.5, **how)

    assert (run.expired, run.reconnects, run.exit_code) == (4, 1, 0)
    assert db.execute("select holds, attempt, ending from pgreaper.claims order by claimed_at").fetchall() == [
        (1, 1, "expired"),
        (3, 1, "released"),
        (3, 1, "expired"),
    ]
    assert books(db) == []


def test_c071_the_connection_breaks_during_a_claim_that_goes_on(db, holds, work, proxy: Proxy, running):
    """The worker is connected again before the claim is there, waits for its turn, and gives it back when it is."""
    holds.due(3)
    holds.register(lease="10 minutes", max_attempts=1)
    slow_claims(db)

    network = as_soon_as(running, proxy.cut)
    run, _ = work(url=proxy.url)
    network.join()

    assert (run.expired, run.ended, run.exit_code) == (0, "drained", 0)
    assert db.execute("select ending from pgreaper.claims").fetchall() == [("released",)]
    assert work()[0].expired == 3
    assert one(db, "select count(*) from pgreaper.failures") == 0


def test_c071_what_is_given_back_is_only_what_was_not_heard_of(db, holds, daemon, proxy: Proxy):
    """One policy's claim is lost while another one's next batch is claimed already: that one goes on."""
    holds.due(20_000)
    db.execute("create table early (like holds including all)")
    holds.register("early", target="early")
    holds.register("late", batch=10)
    waiting = "select count(*) from pgreaper.claims where finished_at is null"

    def script(beside: Beside) -> None:
        beside.wait_for(lambda: one(db, "select count(*) from pgreaper.transitions") > 20)
        beside.wait_for(lambda: one(db, waiting))
        proxy.drop_reply("reaper_claim_batch", "early")
        db.execute("insert into early (expires_at) select clock_timestamp()")
        beside.hears("connected again")
        beside.wait_for(lambda: one(db, "select count(*) from early where status = 'expired'"))

    run, _ = daemon(script, url=proxy.url, poll=0.2)

    ends = """
        select p.name, c.ending, count(*) from pgreaper.claims as c join pgreaper.policies as p using (policy_id)
         where c.ending <> 'expired' group by 1, 2
    """
    given_back = {(policy, ending): claims for policy, ending, claims in db.execute(ends).fetchall()}
    # At its end the daemon gives back what it has claimed ahead.
    assert given_back.pop(("late", "released"), 0) <= 1
    assert given_back == {("early", "released"): 1}
    assert (run.policies["late"].lost, run.reconnects) == (0, 1)
    assert one(db, "select count(*) from pgreaper.failures") == 0


def test_c071_nobody_answers_at_all_for_a_while(db, holds, daemon, proxy: Proxy):
    """New connections get no answer either: the old one is given up, and it is tried again until somebody answers."""
    holds.due(1)
    holds.register()

    def script(beside: Beside) -> None:
        beside.wait_for(lambda: set(holds.states().values()) == {"expired"})
        proxy.mute(new=True)
        holds.due(3)
        beside.hears("the database cannot be reached")
        proxy.unmute_new()
        beside.wait_for(lambda: set(holds.states().values()) == {"expired"})

    run, _ = daemon(script, url=proxy.url + SHORT, poll=0.5)

    assert (run.expired, run.exit_code) == (4, 0)
    assert books(db) == []


def test_c071_a_run_that_ends_comes_to_its_end(db, holds, work, proxy: Proxy, running):
    """Without anybody who looks after it, as under cron."""
    holds.due(3)
    holds.register()
    on_update(db, "perform pg_sleep(0.2);")

    network = as_soon_as(running, proxy.mute)
    run, _ = work(url=proxy.url + SHORT)
    network.join()

    assert (run.expired, run.reconnects, run.exit_code) == (3, 1, 0)


def test_a_statement_that_only_takes_long_is_left_alone(db, holds, work, proxy: Proxy):
    """The server works on it: no time limit of ours ends it, however often it is asked about."""
    holds.due(1)
    holds.register()
    on_update(db, "perform pg_sleep(1.2);")

    run, lines = work(url=proxy.url + "?tcp_user_timeout=100")

    assert (run.expired, run.reconnects, lines) == (1, 0, [])


def test_a_full_server_is_no_reason_to_give_up(db, holds, work, dsn, monkeypatch):
    """Nobody can ask while every place is taken: the statement goes on."""
    holds.due(1)
    holds.register()
    on_update(db, "perform pg_sleep(0.8);")
    role = "pgreaper_single"
    db.execute(f"create role {role} login superuser connection limit 1")
    try:
        db.execute(f"alter role {role} nosuperuser")
        db.execute(f"grant usage on schema pgreaper to {role}; grant all on all tables in schema pgreaper to {role};"
                   f"grant execute on all routines in schema pgreaper to {role}; grant all on holds to {role};"
                   f"grant usage on all sequences in schema pgreaper to {role}")  # fmt: skip
        import re

        run, lines = work(url=re.sub(r"//[^@]*@", f"//{role}@", dsn) + "&tcp_user_timeout=100")
    finally:
        db.execute(f"drop owned by {role}; drop role {role}")

    assert (run.expired, run.reconnects, lines) == (1, 0, [])


def test_what_a_session_claimed_and_nobody_heard_of(db, holds, connect):
    """Released are that session's claims, no other one's of the same number or name, and none that was heard of."""
    holds.due(2)
    holds.register()
    session = connect()
    worker = Reaper(session)
    backend = worker.server().backend
    assert backend.pid == session.info.backend_pid
    heard = worker.claim_batch("holds", batch=1, worker="w", session=True)
    assert heard is not None
    worker.claim_batch("holds", batch=1, worker="w", session=True)
    others = "select count(*) from pgreaper.claims where finished_at is null"

    assert backend.start is not None
    reaper = Reaper(db)
    gone = Backend(backend.pid, backend.start - timedelta(seconds=1))
    assert reaper.release_unheard(gone, "w") is True
    assert reaper.release_unheard(backend, "another") is False
    assert db.execute(others).fetchone() == (2,)

    assert reaper.release_unheard(backend, "w", [heard.token]) is False
    assert db.execute("select token from pgreaper.claims where finished_at is null").fetchall() == [(heard.token,)]
    session.close()
    while not reaper.release_unheard(backend, "w"):
        pass
    assert db.execute(others).fetchone() == (0,)

"""Trouble that a worker meets, and whom it blames: the hold, the policy, the table's lock, or nobody."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pgreaper.api import DEAD_LETTER, EXPIRED, RETRY, Reaper
from pgreaper.errors import DatabaseBusy, DatabaseUnavailable, TableLocked, VersionMismatch, translate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.driver.conftest import Beside

WORKER = "application_name like 'pgreaper/%'"


def one(connection: psycopg.Connection[Any], query: str, *parameters: Any) -> Any:
    ((value,),) = connection.execute(query, parameters or None).fetchall()
    return value


def books(db: psycopg.Connection[Any]) -> list[tuple[Any, ...]]:
    """Who was charged what."""
    return db.execute("select key, error_class, attempts, not_before = 'infinity' from pgreaper.failures").fetchall()


def on_update(db: psycopg.Connection[Any], body: str) -> None:
    db.execute(f"""
        create function the_trigger() returns trigger language plpgsql as $$ begin {body} return new; end $$;
        create trigger the_trigger before update on holds for each row execute function the_trigger();
    """)


def limit(db: psycopg.Connection[Any], setting: str, value: str) -> None:
    """What an administrator would set for the role, here for the database."""
    db.execute(f"alter database \"{db.info.dbname}\" set {setting} = '{value}'")


@pytest.fixture(params=["plain", "handler"])
def how(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The settings of a worker without and with a handler."""
    return {} if request.param == "plain" else {"handler": lambda call: None}


# -- the whole table is locked

LOCKS = {
    "access exclusive": ["lock table holds in access exclusive mode"],
    "a migration in the queue": ["select count(*) from holds", "lock table holds in access exclusive mode"],
    "create index": ["lock table holds in share mode"],
}


@pytest.fixture(params=LOCKS)
def table_locked(
    request: pytest.FixtureRequest, due: list[int], connect: Callable[..., Any], wait_for_lock: Any
) -> Iterator[Callable[[], None]]:
    """The table is locked as a whole; the value ends that."""
    from tests.concurrency.sessions import Session

    *before, lock = LOCKS[request.param]
    holder, session = connect(autocommit=False), Session(connect(autocommit=False), connect())
    for statement in before:
        holder.execute(statement)
    answer = session.start(lock)
    if before:
        wait_for_lock(session.pid)
    else:
        answer.result(10)

    def end() -> None:
        holder.rollback()
        answer.result(10)
        session.connection.rollback()
        session.close()

    yield end
    session.close()


@pytest.fixture
def due(holds: Any) -> list[int]:
    """Five due holds, before anybody locks the table."""
    ids: list[int] = holds.due(5)
    holds.register(lease="1 minute")
    return ids


def test_c015_a_locked_table_ends_a_run_and_is_told(db, due, table_locked, holds, work, how):
    """Within its lock budget, with a result of its own, exit 75; nobody is charged; it works when the lock is gone."""
    run, lines = work(**how)

    assert run.exit_code == 75
    assert isinstance(run.policies["holds"].error, TableLocked)
    assert run.policies["holds"].error.code == "table-locked"
    assert re.search(r"policy holds: table public\.holds is locked by backend \d+ \(\w+Lock\)", lines[-1])
    assert run.seconds < 15
    assert books(db) == []
    assert one(db, "select count(*) from pgreaper.leases") == 0

    table_locked()
    run, lines = work(**how)
    assert (run.expired, run.exit_code, lines) == (5, 0, [])


def test_c015_a_daemon_goes_on_when_the_lock_is_gone(db, due, table_locked, holds, daemon):
    """It says who has the table, keeps its connection, and charges nobody."""

    def script(beside: Beside) -> None:
        beside.hears("is locked by backend")
        table_locked()
        beside.wait_for(lambda: set(holds.states().values()) == {"expired"})

    run, _ = daemon(script, poll=0.5)

    assert (run.expired, run.reconnects, run.exit_code) == (5, 0, 0)
    assert books(db) == []


@pytest.mark.parametrize("lock", ["access exclusive", "share"])
def test_c015_every_call_gives_way(db, due, connect, lock):
    """Claim, expire, fail and sweep end with 55P03 within their lock_timeout, and change nothing."""
    reaper = Reaper(connect())
    (first, *_) = holds = reaper.claim("holds", batch=2)
    locker = connect(autocommit=False)
    locker.execute(f"lock table holds in {lock} mode")
    calls: list[Callable[[], Any]] = [lambda: reaper.expire(first.token), lambda: reaper.sweep("holds")]
    if lock != "share":  # which lets everybody read
        calls += [lambda: reaper.claim("holds"), lambda: reaper.fail(first.token, first.key, error_class="X")]

    for call in calls:
        with pytest.raises(DatabaseBusy) as busy:
            call()
        assert busy.value.sqlstate == "55P03"
        assert "is locked by backend" in str(reaper.table_lock("holds"))
    assert books(db) == []

    locker.rollback()
    assert reaper.table_lock("holds") is None
    assert {o.outcome for o in reaper.expire(first.token)} == {EXPIRED}
    assert reaper.sweep("holds") == 5 - len(holds)


@pytest.mark.parametrize("kind", ["partition", "view"])
def test_c015_the_lock_may_be_on_what_is_below(db, connect, work, kind):
    """A partition, or the table under a view."""
    if kind == "view":
        db.execute(
            "create table below (id int primary key, status text, expires_at timestamptz);"
            "create view top as select * from below"
        )
    else:
        db.execute("""
            create table top (id int primary key, status text, expires_at timestamptz) partition by range (id);
            create table below partition of top for values from (0) to (100)""")
    db.execute("insert into top values (1, 'held', now() - interval '1 hour')")
    db.execute(
        "select pgreaper.reaper_register('holds', 'top', 'expires_at', 'status', held => array['held'],"
        " expired => 'expired', owner => 'tests', key_columns => array['id'])"
    )
    connect(autocommit=False).execute("lock table below in access exclusive mode")

    run, _ = work()

    assert "table public.below is locked by backend" in str(run.policies["holds"].error)
    assert run.exit_code == 75


# -- statements that take too long


def test_c068_the_timeout_that_was_configured_bounds_a_batch(db, holds, work, dsn):
    """One row of five seconds and a limit of one second in the URL: it is cancelled and charged, the others expire."""
    bad, *good = holds.due(5)
    holds.register(backoff_base="1 hour")
    on_update(db, f"if new.id = {bad} then perform pg_sleep(5); end if;")

    run, _ = work(url=f"{dsn}&options=-c%20statement_timeout%3D1s", batch=1)

    assert (run.expired, run.outcomes[RETRY], run.exit_code) == (len(good), 1, 1)
    assert run.seconds < 4.9, "it ran to its end"
    assert books(db) == [(str(bad), "StatementTimeout", 1, False)]


def test_c068_no_function_believes_that_it_can_bound_itself(db):
    """`set statement_timeout` on a function has no effect on the statement that runs it."""
    assert db.execute(
        "select proname from pg_proc where pronamespace = 'pgreaper'::regnamespace"
        " and array_to_string(proconfig, ' ') like '%statement_timeout%'"
    ).fetchall() == []  # fmt: skip


@pytest.mark.parametrize("timeout", ["statement_timeout", "transaction_timeout"])
def test_a_hold_that_outlasts_the_timeout_alone_is_charged_alone(db, holds, work, set_clock, how, timeout):
    """Batches shrink, the others expire, the hold has its budget of attempts, then it is a dead letter."""
    if timeout == "transaction_timeout" and db.info.server_version < 170000:
        pytest.skip("PostgreSQL 17 has it first")
    ids = holds.due(20)
    bad = ids[7]
    holds.register(max_attempts=2, batch=16)
    on_update(db, f"if new.id = {bad} then perform pg_sleep(5); end if;")
    limit(db, timeout, "400ms")

    run, lines = work(**how)

    assert (run.expired, run.outcomes[RETRY], run.exit_code) == (19, 1, 1)
    assert books(db) == [(str(bad), "StatementTimeout", 1, False)]
    assert any("1 hold failed, to be tried again: StatementTimeout" in line for line in lines)
    assert one(db, "select count(*) from pgreaper.leases") == 0

    db.execute("update pgreaper.failures set not_before = now()")
    run, lines = work(**how)
    assert (run.outcomes, run.exit_code) == ({DEAD_LETTER: 1}, 1)
    assert books(db) == [(str(bad), "StatementTimeout", 2, True)]
    assert work(**how)[0].exit_code == 0
    assert {i for i, s in holds.states().items() if s == "held"} == {bad}


def test_a_policy_whose_every_hold_is_too_slow_rests(db, holds, work, how):
    """Eight of them in a row, each alone: the run ends for this policy, and not every hold is charged."""
    holds.due(60)
    holds.register(batch=16 if "handler" in how else 2, backoff_base="1 hour")
    on_update(db, "perform pg_sleep(5);")
    limit(db, "statement_timeout", "250ms")

    run, lines = work(**how)

    assert run.exit_code == 1
    assert len(books(db)) == 8
    assert set(holds.states().values()) == {"held"}
    assert one(db, "select count(*) from pgreaper.leases") == 0
    assert "statement" in lines[-1]


@pytest.mark.parametrize("batch", [1, 4])
def test_a_persons_cancel_charges_nobody(db, connect, holds, work, how, batch):
    """pg_cancel_backend has the timeout's SQLSTATE; the timeout is a minute away."""
    from threading import Event, Thread

    holds.due(batch)
    holds.register()
    on_update(db, "perform pg_sleep(60);")
    limit(db, "statement_timeout", "1min")
    other = connect()
    running = f"select pid, xact_start from pg_stat_activity where {WORKER} and wait_event = 'PgSleep'"
    over = Event()

    def cancel() -> None:
        cancelled: set[tuple[Any, ...]] = set()
        while not over.wait(0.005):
            # Each statement once: a second cancel might hit the one after it.
            for found in set(other.execute(running).fetchall()) - cancelled:
                cancelled.add(found)
                other.execute("select pg_cancel_backend(%s)", (found[0],))

    person = Thread(target=cancel)
    person.start()
    try:
        run, lines = work(batch=batch, concurrency=1, **how)
    finally:
        over.set()
        person.join()

    assert (run.expired, run.exit_code) == (0, 1)
    assert books(db) == []
    assert one(db, "select count(*) from pgreaper.events where kind in ('retry', 'dead-letter')") == 0
    assert one(db, "select count(*) from pgreaper.leases") == 0
    assert any("cancelled" in line for line in lines)
    assert not any("statement timeout" in line for line in lines)


# -- the node cannot be written to


def test_c072_a_daemon_leaves_a_node_that_became_read_only(cluster, install, daemon):
    """The connection is dropped, one line a step, nobody is charged; it goes on when the node takes writes again."""
    from tests.conftest import Holds

    install(cluster.dsn)
    # This session's own setting stands above the server's.
    admin = psycopg.connect(cluster.dsn, autocommit=True, options="-c default_transaction_read_only=off")
    holds = Holds(admin)
    holds.register()
    holds.due(5)
    pids: list[int] = []

    def switch(value: str) -> None:
        admin.execute(f"alter system set default_transaction_read_only = {value}")
        admin.execute("select pg_reload_conf()")

    def script(beside: Beside) -> None:
        beside.wait_for(lambda: set(holds.states().values()) == {"expired"})
        pids.append(one(admin, f"select pid from pg_stat_activity where {WORKER}"))
        switch("on")
        holds.due(5)
        beside.hears("read-only", times=2)
        beside.wait_for(lambda: not one(admin, "select count(*) from pg_stat_activity where pid = %s", pids[0]))
        assert list(holds.states().values()).count("held") == 5
        switch("off")
        beside.wait_for(lambda: set(holds.states().values()) == {"expired"})

    with admin:
        run, lines = daemon(script, url=cluster.dsn, poll=0.3)
        assert (run.expired, run.exit_code) == (10, 0)
        assert run.reconnects >= 1
        assert books(admin) == []
        assert one(admin, "select count(*) from pgreaper.events where kind not in ('register')") == 0
    steps = [line for line in lines if "read-only" in line]
    assert all(re.search(r"; trying again in \d+ ms$", line) for line in steps)
    assert len(steps) <= 5, "one line a step"
    assert lines.count("connected again") == run.reconnects


def test_c072_a_run_that_ends_says_try_later(db, holds, work, dsn):
    """Read-only from the start, and with target_session_attrs, where libpq itself refuses the node: 75 each time."""
    holds.due(5)
    holds.register()
    limit(db, "default_transaction_read_only", "on")

    for url in (dsn, f"{dsn}&target_session_attrs=read-write"):
        with pytest.raises(DatabaseUnavailable, match="read-only") as error:
            work(url=url)
        assert error.value.exit_code == 75
    assert books(db.execute("set default_transaction_read_only = off") and db) == []


# -- the schema moves

CHANGES: dict[str, list[str | None]] = {
    "add column": ["alter table holds add column z int"],
    "another type": ["alter table holds alter column status type varchar(20)"],
    "an enum": [
        "create type state as enum ('held', 'expired', 'consumed')",
        "alter table holds alter status drop default",
        "drop index holds_due",
        "alter table holds alter status type state using status::state, alter status set default 'held'",
    ],
    "rename and back": ["alter table holds rename to gone", None, "alter table gone rename to holds"],
    "another table": [
        "create table fresh (like holds including all)",
        "insert into fresh overriding system value select * from holds",
        "select setval(pg_get_serial_sequence('fresh', 'id'), 1000)",
        "begin; alter table holds rename to gone; alter table fresh rename to holds; commit",
    ],
}


@pytest.mark.parametrize("change", CHANGES)
def test_c074_the_schema_changes_under_a_daemon(db, holds, daemon, how, change):
    """The next poll works, on the same connection; nobody is charged, the policy is not suspended."""
    holds.register(payload_columns=["customer_email"])

    def due_and_expired(beside: Beside) -> None:
        db.execute("insert into holds (expires_at) values (now() - interval '1 minute')")
        beside.wait_for(lambda: not one(db, "select exists (select from holds where status <> 'expired')"))

    def script(beside: Beside) -> None:
        for _ in range(6):  # prepared plans would be generic by now
            due_and_expired(beside)
        for statement in CHANGES[change]:
            if statement is None:
                beside.hears("public.holds, the target of policy holds, does not exist")
            else:
                db.execute(statement)
        due_and_expired(beside)

    run, lines = daemon(script, poll=0.1, **how)

    assert (run.expired, run.reconnects) == (7, 0)
    assert books(db) == []
    assert one(db, "select count(*) from pgreaper.cursors where failing_at is not null") == 0
    if change != "rename and back":
        assert [line for line in lines if "trying again" in line] == []


def test_a_missing_piece_of_pgreaper_is_try_later(db, holds, work, how):
    """Half an upgrade: told by name, exit 75, nobody is charged, the policy is not suspended; and then it works."""
    holds.due(20)
    holds.register()
    piece = one(db, "select pg_get_functiondef('pgreaper._unlocked'::regproc)")
    db.execute("drop function pgreaper._unlocked")

    run, lines = work(**how)

    assert run.exit_code == 75
    assert isinstance(run.policies["holds"].error, VersionMismatch)
    assert "_unlocked" in lines[0]
    assert books(db) == []
    assert one(db, "select count(*) from pgreaper.cursors where failing_at is not null") == 0

    db.execute(piece)
    assert work(**how)[0].expired == 20


@pytest.mark.parametrize("piece", ["_due", "_retry_at", "_lapsed", "_allowance"])
def test_a_missing_piece_of_the_claim_is_told_too(db, holds, work, piece):
    """Not an error that only a programmer understands, and no traceback."""
    holds.due(1)
    holds.register()
    db.execute(f"drop function pgreaper.{piece} cascade")

    run, lines = work()

    assert run.exit_code == 75
    assert f"pgreaper is not complete in this database: function pgreaper.{piece}(" in lines[0]


def test_what_a_trigger_misses_is_not_taken_for_a_piece_of_pgreaper(db, holds, work):
    """42883 all the same; the policy is suspended, exit 1."""
    holds.due(20)
    holds.register()
    on_update(db, "perform pgreaper.no_such_function();")

    run, _ = work()

    assert (run.exit_code, run.policies["holds"].error) == (1, None)
    assert "42883" in str(run.policies["holds"].suspended)


# -- sessions that the server ends


@pytest.mark.parametrize(
    ("setting", "sqlstate"),
    [("idle_in_transaction_session_timeout", "25P03"), ("transaction_timeout", "25P04")],
)
def test_c070_a_session_that_the_server_ended_is_a_lost_connection(connect, setting, sqlstate):
    """Trouble of the environment, by its SQLSTATE."""
    session = connect(autocommit=False)
    if setting == "transaction_timeout" and session.info.server_version < 170000:
        pytest.skip("PostgreSQL 17 has it first")
    session.execute(f"set {setting} = '10ms'")
    session.execute("select 1")
    from time import sleep

    sleep(0.1)
    with pytest.raises(psycopg.Error) as error:
        session.execute("select pg_sleep(1)")
    assert error.value.sqlstate == sqlstate
    assert isinstance(translate(error.value), DatabaseUnavailable)


def test_c070_a_daemon_whose_idle_session_is_ended_comes_back(db, holds, daemon):
    """57P05 between two polls: a new connection, and the hold that is due then expires."""
    holds.register()
    limit(db, "idle_session_timeout", "50ms")

    def script(beside: Beside) -> None:
        beside.hears("connected again")
        holds.due(3)
        beside.wait_for(lambda: set(holds.states().values()) == {"expired"})

    run, _ = daemon(script, poll=0.3)

    assert (run.expired, run.exit_code) == (3, 0)
    assert run.reconnects >= 1
    assert books(db) == []


def test_c070_a_session_ended_during_a_call_of_the_handler(db, connect, holds, work):
    """57P05 while user code runs: the lease goes on from a new session, the hold expires by the same token."""
    holds.due(2)
    holds.register()
    limit(db, "idle_session_timeout", "50ms")
    watcher = connect()

    def handler(call: Any) -> None:
        pid = one(watcher, "select session_pid from pgreaper.claims where finished_at is null")
        while one(watcher, "select count(*) from pg_stat_activity where pid = %s", pid):
            pass

    watcher.execute("set idle_session_timeout = 0")
    run, _ = work(handler=handler, concurrency=1)

    assert (run.expired, run.exit_code) == (2, 0)
    assert run.reconnects >= 1
    assert one(db, "select count(*) from pgreaper.events where token is not null") == 0

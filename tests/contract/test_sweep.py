"""reaper_sweep: claim and transition fused, with a commit after each batch."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from datetime import timedelta

import psycopg
import pytest


@pytest.fixture(autouse=True)
def _own_database(committed):
    """A sweep commits."""


def sweep(core, **arguments):
    values = ", ".join(f"{name} => %s" for name in arguments)
    return core.value(f"call pgreaper.reaper_sweep({values})", *arguments.values())


def test_everything_due_is_expired_and_nothing_else(core, holds):
    """Promise: the guard, the outcomes and the books of claim + expire; without a lease."""
    holds.due(25)
    ahead = holds.ahead(2)
    core.do("update holds set status = 'consumed' where id <= 5")
    core.register()
    core.do("set application_name = 'cron'")
    assert sweep(core, policy="p", batch=10) == 20
    assert {id_ for id_, state in holds.states().items() if state == "expired"} == set(range(6, 26))
    assert {holds.states()[id_] for id_ in ahead} == {"held"}
    assert core.value("select count(*) from pgreaper.claims") == 0
    assert core.rows("select holds, token, worker, state from pgreaper.transitions order by transition_id") == [
        (10, None, "cron", "expired"), (10, None, "cron", "expired"),
    ]  # fmt: skip
    assert sweep(core) == 0


def test_a_step_commits_before_the_next_begins(core, holds):
    """Short transactions: each batch has its own."""
    holds.due(30)
    core.do(
        "create table log (xact xid8)",
        "create function note() returns trigger language plpgsql as"
        " $$ begin insert into log values (pg_current_xact_id()); return null; end $$",
        "create trigger note after update on holds for each statement execute function note()",
    )
    core.register()
    assert sweep(core, batch=10) == 30
    assert core.rows("select count(distinct xact), count(*) from log") == [(3, 3)]
    assert sweep(core) == 0
    assert core.value("select count(*) from log") == 3, "an UPDATE of no row fires statement triggers too"


def test_all_policies_take_turns(core, holds):
    """A batch of each, so that a huge backlog of one does not delay the others."""
    core.do("create table small (like holds including all)")
    holds.due(40)
    core.do("insert into small (expires_at) values (now() - interval '1 hour')")
    core.register("a_big")
    core.register("b_small", target="small")
    assert sweep(core, batch=10) == 41
    turns = core.column(
        "select p.name from pgreaper.transitions as t join pgreaper.policies as p using (policy_id)"
        " order by transition_id"
    )
    assert sorted(turns[:2]) == ["a_big", "b_small"], "whoever comes first"
    assert turns[2:] == ["a_big"] * 3


def test_holds_that_a_worker_has_leased_are_left_to_it(core, holds):
    """Freely mixed with claim + expire."""
    holds.due(10)
    core.register()
    batch = core.claim(batch=4)
    assert sweep(core) == 6
    assert [holds.states()[int(hold.key)] for hold in batch] == ["held"] * 4
    assert set(core.expire(batch[0].token).values()) == {("expired", "expired")}


def test_lapsed_leases_are_taken_back_on_the_way(core, holds, set_clock):
    holds.due(2)
    core.register()
    core.claim()
    set_clock(timedelta(minutes=2))
    assert sweep(core) == 0
    assert core.column("select ending from pgreaper.claims") == ["taken-back"]
    set_clock(timedelta(minutes=3))
    assert sweep(core) == 2


def test_a_locked_row_is_skipped_and_the_run_ends(core, holds, committed):
    """Never waits; the next run takes it."""
    holds.due(5)
    core.register()
    other = committed(autocommit=False)
    other.execute("update holds set customer_email = 'x' where id in (1, 5)")
    start = time.monotonic()
    assert sweep(core, batch=2) == 3
    assert time.monotonic() - start < 0.5
    other.rollback()
    assert sweep(core) == 2


def test_only_locked_rows_do_not_make_it_spin(core, holds, committed):
    holds.due(5)
    core.register()
    other = committed(autocommit=False)
    other.execute("update holds set customer_email = 'x'")
    core.do("set statement_timeout = '5s'")
    assert sweep(core, batch=2) == 0
    other.rollback()


def test_a_policy_that_fails_stops_alone(core, holds):
    """Promise: the others go on and are committed, then its error is raised, without private words."""
    core.do("create table others (like holds including all)", "create table third (like holds including all)")
    core.do("insert into others (expires_at) values (now() - interval '1 hour')")
    core.do("insert into third (expires_at) values (now() - interval '1 hour')")
    holds.due(3)
    core.register("a", target="others")
    core.register("b")
    core.register("c", target="third")
    core.do("drop table others")
    with pytest.raises(psycopg.Error, match="policies that could not be swept: a") as caught:
        sweep(core)
    assert caught.value.sqlstate == "42P01"
    assert caught.value.diag.message_hint == "The other policies were swept and committed."
    assert set(holds.states().values()) == {"expired"}
    assert core.column("select status from third") == ["expired"]


def test_no_hold_is_tried_twice_in_a_run(core, holds):
    """Promise: a retry that is due at once is left to the next run."""
    holds.due(3)
    core.do(
        "create sequence tries",
        "create function refuse() returns trigger language plpgsql as"
        " $$ begin perform nextval('tries'); raise exception 'no'; end $$",
        "create trigger refuse before update on holds for each row when (new.id = 2) execute function refuse()",
    )
    core.register(permanent_attempts=5, backoff_base="0", backoff_cap="0")
    assert sweep(core, batch=1) == 2
    assert core.value("select attempts from pgreaper.failures") == 1
    assert sweep(core, batch=1) == 0
    assert core.value("select attempts from pgreaper.failures") <= 2


def test_max_rows_ends_the_run(core, holds):
    """To the row, over all policies together."""
    core.do("create table others (like holds including all)")
    core.do("insert into others (expires_at) select now() - interval '1 hour' from generate_series(1, 10)")
    holds.due(10)
    core.register("a", target="others")
    core.register("b")
    assert sweep(core, batch=4, max_rows=7) == 7
    assert core.value("select sum(holds) from pgreaper.transitions") == 7
    assert sweep(core) == 13


def test_max_seconds_ends_the_run(core, holds):
    """Between two batches."""
    holds.due(10)
    core.do(
        "create function slow() returns trigger language plpgsql as $$ begin perform pg_sleep(0.05);"
        " return new; end $$",
        "create trigger slow before update on holds for each row execute function slow()",
    )
    core.register()
    assert sweep(core, batch=1, max_seconds=0.12) in (1, 2, 3)


def test_the_rate_limit_is_kept(core, holds):
    """A bucket of one second's worth, then as many as come in while the run lasts."""
    holds.due(500)
    core.register(rate_limit=100)
    assert 100 <= sweep(core, max_seconds=0.3) < 300


def test_the_rate_limit_lets_whole_portions_go(core, holds):
    """What comes in within half a second goes together, however often the sweep looks."""
    holds.due(200)
    core.register(rate_limit=100, batch=500)
    assert sweep(core) == 200
    assert core.value("select array_agg(holds order by at) from pgreaper.transitions") == [50, 50, 50, 50]


def test_a_sweep_does_not_wait_for_a_limit_that_nothing_needs(core, holds):
    """The last hold has gone: that the next one would have to wait for a quarter of an hour is nothing to wait for."""
    holds.due(1)
    core.register(rate_limit=0.001)
    core.do("set statement_timeout = '5s'")
    assert sweep(core) == 1


def test_a_sweep_looks_after_the_others_while_one_waits(core, holds, connect):
    """A due hold of another policy, of which there was nothing at first."""
    holds.due(8)
    core.register(rate_limit=1, batch=1)
    core.do("create table others (like holds including all)")
    core.register("o", target="others")
    application = connect()

    def come():
        time.sleep(1)
        application.execute("insert into others (expires_at) values (clock_timestamp() - interval '1 s')")

    thread = threading.Thread(target=come)
    thread.start()
    core.do("call pgreaper.reaper_sweep()")
    thread.join()
    assert core.column("select status from others") == ["expired"]


def test_a_run_that_finds_nothing_writes_nothing(core, holds, wal_written):
    """Promise."""
    holds.ahead(5)
    core.register()
    sweep(core)
    assert wal_written(lambda: sweep(core)) == 0
    before = core.value("select pg_snapshot_xmax(pg_current_snapshot())::text")
    sweep(core)
    assert core.value("select pg_snapshot_xmax(pg_current_snapshot())::text") == before


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_the_roles_default_isolation_does_not_matter(core, holds, level):
    """The guard needs READ COMMITTED, and the sweep sees to it, also after each of its commits."""
    holds.due(5)
    core.register()
    core.do(f"set default_transaction_isolation = '{level}'")
    assert sweep(core, batch=2) == 5


def test_inside_a_transaction_it_cannot_commit(core, holds):
    """Raises 2D000, and nothing is expired."""
    holds.due(1)
    core.register()
    assert core.refused("call pgreaper.reaper_sweep()").sqlstate == "2D000"
    assert holds.states() == {1: "held"}


def test_on_a_read_only_node(core, holds):
    """RP004, named in the message."""
    holds.due(1)
    core.register()
    core.do("set default_transaction_read_only = on")
    with pytest.raises(psycopg.Error, match="could not be swept: p") as caught:
        sweep(core)
    assert caught.value.sqlstate == "RP004"


def test_a_policy_that_is_not_there(core):
    """Raises RP002."""
    with pytest.raises(psycopg.Error, match="there is no policy nope") as caught:
        sweep(core, policy="nope")
    assert caught.value.sqlstate == "RP002"


@pytest.mark.parametrize(
    "arguments", [{"max_rows": 0}, {"max_seconds": 0.0}, {"max_seconds": -1.0}, {"batch": 0}, {"batch": 10001}]
)
def test_numbers_that_make_no_sense(core, holds, arguments):
    """Raises 22023."""
    holds.due(1)
    core.register()
    with pytest.raises(psycopg.Error, match=r"must be|could not be swept") as caught:
        sweep(core, **arguments)
    assert caught.value.sqlstate == "22023"
    assert holds.states() == {1: "held"}


def test_c112_the_same_key_in_two_tables(core):
    """Books are kept by policy: a dead letter of one tenant is none of the other."""
    for tenant in ("a", "b"):
        core.do(
            f"create schema tenant_{tenant}",
            f"create table tenant_{tenant}.holds (id int primary key, status text, expires_at timestamptz)",
            f"insert into tenant_{tenant}.holds values (1, 'held', '2020-01-01'), (2, 'held', '2020-01-01')",
        )
        core.register(tenant, target=f"tenant_{tenant}.holds")
    core.do("alter table tenant_a.holds add constraint no check (id <> 1 or status = 'held')")
    assert core.claim("b", batch=1)[0].key == "1"
    sweep(core)
    assert core.rows("select id, status from tenant_a.holds order by id") == [(1, "held"), (2, "expired")]
    assert core.rows("select id, status from tenant_b.holds order by id") == [(1, "held"), (2, "expired")]
    token = core.value("select token from pgreaper.claims")
    assert core.expire(token) == {"1": ("expired", "expired")}
    assert core.rows("select policy, key, outcome from pgreaper.history where key = '1' order by policy") == [
        ("a", "1", "dead-letter"), ("b", "1", "expired"),
    ]  # fmt: skip


def test_c111_one_broken_tenant_does_not_stop_the_others(core):
    """Forty schemas; one has a huge backlog, one lost its table, one raises: the rest is served in one run."""
    names = [f"t{number:02}" for number in range(40)]
    for name in names:
        core.do(
            f"create schema {name}",
            f"create table {name}.holds (id int primary key, status text, expires_at timestamptz)",
            f"insert into {name}.holds select g, 'held', now() - interval '1 hour'"
            f" from generate_series(1, {2000 if name == 't07' else 3}) as g",
        )
        core.register(name, target=f"{name}.holds")
    core.do("drop table t09.holds", "alter table t11.holds add constraint no check (id <> 2 or status = 'held')")
    with pytest.raises(psycopg.Error, match=r"could not be swept: t09 \(42P01"):
        core.connection.execute("call pgreaper.reaper_sweep(batch => 100)")
    core.do("reset all")
    for name in names:
        if name != "t09":
            left = core.column(f"select id from {name}.holds where status = 'held'")
            assert left == ([2] if name == "t11" else []), name
    turns = core.rows(
        "select p.name, min(transition_id) from pgreaper.transitions as t join pgreaper.policies as p using (policy_id)"
        " group by 1 order by 1"
    )
    assert [name for name, _ in turns] == [name for name in names if name != "t09"]
    assert max(number for _, number in turns) - min(number for _, number in turns) <= 40, "a batch of each in turn"


def test_a_policy_that_kills_its_session_does_not_keep_the_others_from_their_turn(core, holds, connect):
    """A sweep cannot charge it, so each run begins with another policy: whatever its name, the others expire."""
    holds.due(1)
    core.do(
        "create table m (like holds including all)",
        "insert into m (expires_at) select now() - interval '1 hour' from generate_series(1, 30)",
        "create function fatal() returns trigger language plpgsql as"
        " $$ begin perform pg_terminate_backend(pg_backend_pid()); return new; end $$",
        "create trigger fatal before update on holds for each row execute function fatal()",
    )
    core.register("a")
    core.register("b", target="m")
    for _ in range(60):
        with pytest.raises(psycopg.OperationalError):
            connect().execute("call pgreaper.reaper_sweep(batch => 10)")
        if core.column("select distinct status from m") == ["expired"]:
            break
    assert core.column("select distinct status from m") == ["expired"]
    assert core.column("select status from holds") == ["held"]


def test_what_kills_a_sweep_is_found_by_claims(core, holds, connect, set_clock):
    """A lease is on record before the risk: the guilty one is charged alone, and sweeps work again."""
    ids = holds.due(30)
    guilty = ids[4]
    core.do(
        "create function fatal() returns trigger language plpgsql as $$ begin"
        f" if new.id = {guilty} then perform pg_terminate_backend(pg_backend_pid()); end if; return new; end $$",
        "create trigger fatal before update on holds for each row execute function fatal()",
    )
    core.register(max_attempts=3, backoff_base="0", backoff_cap="0")
    with pytest.raises(psycopg.OperationalError):
        connect().execute("call pgreaper.reaper_sweep()")
    assert core.value("select count(*) from pgreaper.failures") == 0
    for turn in range(1, 20):
        set_clock(timedelta(hours=turn))
        claim = core.claim(rescan=True)
        if not claim:
            break
        with suppress(psycopg.OperationalError):
            connect().execute("select pgreaper.reaper_expire(%s)", (claim[0].token,))
    assert core.rows("select key, error_class from pgreaper.dead_letters") == [(str(guilty), "LeaseExpired")]
    holds.due(3)
    assert sweep(core) == 3
    assert {id_ for id_, state in holds.states().items() if state == "held"} == {guilty}


@pytest.mark.parametrize("kind", ["date", "timestamp", "-infinity"])
def test_nothing_but_locked_holds_of_one_deadline_does_not_make_it_spin(core, connect, kind):
    """Where the next instant is no other deadline, or there is none, the run ends."""
    type_, deadline = ("timestamptz", "-infinity") if kind == "-infinity" else (kind, "2020-02-02")
    core.do(
        f"create table t (id int primary key, status text default 'held', expires_at {type_})",
        f"insert into t select g, 'held', '{deadline}' from generate_series(1, 20) g",
        "create table stock (n int)",
        "insert into stock values (1)",
        "create function tally() returns trigger language plpgsql as"
        " $$ begin update public.stock set n = n + 1; return new; end $$",
        "create trigger tally before update on t for each row execute function tally()",
    )
    core.register(target="t", zone=None if type_ == "timestamptz" else "Europe/Berlin")
    other = connect()
    with other.transaction():
        other.execute("update stock set n = 0")
        core.do("set statement_timeout = '15s'")
        assert sweep(core, batch=10) == 0
    assert sweep(core, batch=10) == 20

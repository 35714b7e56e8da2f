"""The update that does not lock first: what happens in the instant between the look at a row and its update."""

import time
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from tests.concurrency.faults import Fault
from tests.concurrency.sessions import Connection, Rows, Session, drain, rows
from tests.conftest import Holds

# Where the statement has looked at the mark of hold 2 and has not updated it, it waits for a gate.
GATE = Fault("no gate", "_write", "and %5$s and %6$s'", "and %5$s and %6$s and public.passes(h.id)'")
PASSES = """
create table gate ();
create function passes(id bigint) returns boolean language plpgsql cost 1000000 as $$ begin
  loop
    exit when passes.id <> 2 or exists (select from public.gate);
    perform pg_catalog.pg_sleep(0.001);
  end loop;
  return true;
end $$;
"""


@pytest.fixture
def three(holds: Holds) -> Holds:
    holds.register()
    holds.due(3)
    return holds


@pytest.fixture
def midway(three: Holds, db: Connection, session: Callable[..., Session]) -> Callable[[str], Future[Rows]]:
    """A function that brings a reaper between look and update; the gate then lets it go on."""

    def midway(way: str) -> Future[Rows]:
        db.execute(PASSES)
        GATE.plant(db)
        reaper = session()
        if way == "sweep":
            answer = reaper.start("call pgreaper.reaper_sweep('holds')")
        else:
            token = reaper.run("select token from pgreaper.reaper_claim('holds')")[0]["token"]
            answer = reaper.start("select key, outcome from pgreaper.reaper_expire(%s)", token)
        until = time.monotonic() + 30
        asleep = "select from pg_stat_activity where pid = %s and wait_event = 'PgSleep'"
        while not rows(db, "select 1 as here where exists (" + asleep + ")", reaper.pid):
            assert time.monotonic() < until, "the reaper never looked"
        return answer

    return midway


WAYS = pytest.mark.parametrize("way", ["sweep", "claim"])


@WAYS
def test_a_row_that_is_locked_in_that_instant_is_left_alone(
    three: Holds, db: Connection, midway: Callable[[str], Future[Rows]], session: Callable[..., Session], way: str
):
    """The statement gives up, the careful one skips the row; the others expire, and nobody is charged."""
    answer = midway(way)
    application = session(autocommit=False)
    application.run("select from holds where id = 2 for update")
    db.execute("insert into gate default values")
    answer.result(timeout=30)

    assert three.states() == {1: "expired", 2: "held", 3: "expired"}
    application.connection.rollback()
    assert drain(db, "later") == [("2", "expired")]
    assert rows(db, "select * from pgreaper.failures") == []


@WAYS
@pytest.mark.parametrize(
    ("change", "left"),
    [
        ("set status = 'consumed'", ("consumed",)),
        ("set expires_at = clock_timestamp() + interval '1 hour'", ("held",)),
        ("set customer_email = 'another'", ("expired",)),
    ],
    ids=["consumed", "extended", "touched"],
)
def test_the_update_judges_the_row_as_it_is(
    three: Holds, db: Connection, midway: Callable[[str], Future[Rows]], way: str, change: str, left: tuple[str]
):
    """What was committed between look and update wins: the guard stands in the statement that writes."""
    answer = midway(way)
    db.execute(f"update holds {change} where id = 2")
    db.execute("insert into gate default values")
    answer.result(timeout=30)

    if left == ("expired",):
        drain(db, "later")
    assert three.states() == {1: "expired", 2: left[0], 3: "expired"}
    trail = rows(db, "select key from pgreaper.history where outcome = 'expired'")
    assert sorted(row["key"] for row in trail) == [
        str(key) for key, state in three.states().items() if state == "expired"
    ]


@WAYS
def test_the_trail_tells_the_deadline_that_was_there(
    three: Holds, db: Connection, midway: Callable[[str], Future[Rows]], way: str
):
    """A hold whose deadline moves in that instant, to another past one, expires with the one it has then."""
    answer = midway(way)
    db.execute("update holds set expires_at = '2001-02-03 04:05:06Z' where id = 2")
    db.execute("insert into gate default values")
    answer.result(timeout=30)
    drain(db, "later")

    assert rows(db, "select 1 as same from pgreaper.history where key = '2' and deadline = '2001-02-03 04:05:06Z'")


def unlocked(db: Connection) -> list[int]:
    """The holds that nobody has locked, by their marks."""
    (condition,) = rows(db, "select pgreaper._unlocked() as told")
    return [row["id"] for row in rows(db, f"select id from holds as h where {condition['told']} order by id")]


def test_a_mark_of_long_ago_is_no_lock(three: Holds, db: Connection, session: Callable[..., Session]):
    """Rows that once were locked, alone or by several at once, are told from those that are."""
    first, second = session(autocommit=False), session(autocommit=False)
    for hold in (1, 2):
        first.run("select from holds where id = %s for key share", hold)
        second.run("select from holds where id = %s for share", hold)
    first.run("select from holds where id = 3 for update")
    first.connection.rollback()
    second.connection.rollback()
    for other in (first, second):
        other.run("select from holds where id = 2 for key share")
    second.run("select from holds where id = 3 for update")

    assert rows(db, "select count(distinct xmax::text) as n from holds where xmax <> '0'") == [{"n": 3}]
    assert unlocked(db) == [1]
    second.connection.rollback()
    assert unlocked(db) == [1, 3]
    first.connection.rollback()
    assert unlocked(db) == [1, 2, 3]


@pytest.mark.parametrize("own", [False, True], ids=["", "with a number of our own"])
def test_what_a_released_savepoint_has_locked_stays_locked(
    holds: Holds, db: Connection, session: Callable[..., Session], own: bool
):
    """Its number has no lock in pg_locks any more; alone, in a list, of a child, and what was rolled back is free."""
    holds.register()
    holds.due(7)
    db.execute("create table children (hold bigint references holds)")
    first, second = session(autocommit=False), session(autocommit=False)
    first.run("savepoint s")
    first.run("select from holds where id = 2 for update")
    first.run("release s")
    first.run("savepoint s")
    first.run("select from holds where id = 3 for update")
    first.run("rollback to s")
    for other in (first, second):
        other.run("savepoint s")
        other.run("select from holds where id = 4 for share")
        other.run("release s")
    second.run("savepoint s")
    second.run("insert into children values (5)")
    second.run("release s")
    if own:
        db.execute("begin")
        db.execute("select pg_current_xact_id()")
    assert unlocked(db) == [1, 3, 6, 7]
    first.connection.commit()
    assert unlocked(db) == [1, 2, 3, 6, 7]
    second.connection.commit()
    assert unlocked(db) == [1, 2, 3, 4, 5, 6, 7]
    if own:
        db.execute("rollback")


def test_preview_and_verify_see_what_a_released_savepoint_has_locked(
    three: Holds, db: Connection, session: Callable[..., Session]
):
    """A hold that is due, behind the cursor and locked is no hold that was forgotten."""
    application = session(autocommit=False)
    application.run("savepoint s")
    application.run("select from holds where id = 2 for update")
    application.run("release s")
    assert ("2", "locked") in drain(db, "w")
    assert three.states() == {1: "expired", 2: "held", 3: "expired"}
    assert rows(db, "select locked from pgreaper.reaper_preview('holds')") == [{"locked": 1}]
    assert rows(db, "select invariant from pgreaper.reaper_verify('holds') where not holds") == []


@pytest.mark.parametrize(
    "change",
    [
        "create trigger t before update on holds for each row execute function suppress_redundant_updates_trigger()",
        "alter table holds alter expires_at type timestamp",
        "alter table holds enable row level security, force row level security",
        "select pgreaper.reaper_register('holds', 'holds', 'expires_at', 'status', '{held}', 'expired', 'others')",
        "alter table holds rename to old; create table holds (like old including all)",
    ],
)
def test_what_a_sweep_keeps_from_step_to_step_is_built_anew_when_something_changes(
    three: Holds, db: Connection, change: str
):
    """A trigger, a type, row level security, another registration, another table under the name."""
    version = "select pgreaper._target_version(p) as version from pgreaper.policies as p"
    before = rows(db, version)
    assert before[0]["version"] is not None
    assert rows(db, version) == before
    db.execute(change)
    assert rows(db, version) != before


def test_a_second_trigger_changes_it_too(three: Holds, db: Connection):
    """Only the first trigger of a table leaves a mark in pg_class."""
    db.execute("create table seats (hold bigint references holds)")
    version = "select pgreaper._target_version(p) as version from pgreaper.policies as p"
    before = rows(db, version)
    db.execute(
        "create trigger t before update on holds for each row execute function suppress_redundant_updates_trigger()"
    )
    assert rows(db, version) != before
    db.execute("alter table holds disable trigger t")
    assert rows(db, version) == before


def test_a_trigger_that_appears_in_the_instant_is_seen(three: Holds, db: Connection):
    """A target taken for one without triggers: what its trigger keeps from expiring is no transition."""
    db.execute(
        "create function keep() returns trigger language plpgsql as $$ begin new.status := 'held'; return new; end $$;"
        "create trigger keep before update on holds for each row execute function keep()"
    )
    Fault("a trigger counts", "_target", "not v_class.watched", "true").plant(db)
    assert (
        rows(db, "select outcome from pgreaper.reaper_claim('holds') as c, pgreaper.reaper_expire(c.token) limit 0")
        == []
    )
    token = rows(db, "select token from pgreaper.reaper_claim('holds')")[0]["token"]
    outcomes = {row["outcome"] for row in rows(db, "select outcome from pgreaper.reaper_expire(%s)", token)}
    assert outcomes <= {"retry", "dead-letter"}
    assert rows(db, "select * from pgreaper.transitions") == []


def test_a_role_from_which_rows_are_hidden_is_another_version(three: Holds, db: Connection):
    """What row level security shows depends on the role, which may lose its exemption in the middle of a run."""
    db.execute(
        "alter table holds enable row level security; create role reaper_of_version bypassrls;"
        "grant usage on schema pgreaper to reaper_of_version;"
        "grant select on pgreaper.policies, holds to reaper_of_version;"
        "grant execute on function pgreaper._target_version to reaper_of_version"
    )
    version = "select pgreaper._target_version(p) as version from pgreaper.policies as p"
    try:
        db.execute("set role reaper_of_version")
        before = rows(db, version)
        db.execute("reset role; alter role reaper_of_version nobypassrls; set role reaper_of_version")
        assert rows(db, version) != before
    finally:
        db.execute("reset role; drop owned by reaper_of_version; drop role reaper_of_version")


def test_a_key_alone_that_a_child_refers_to_is_no_locked_one(
    three: Holds, db: Connection, session: Callable[..., Session]
):
    """An open insert of a child marks the row; the careful statement knows better, and has its turn."""
    db.execute("create table seats (hold bigint references holds)")
    application = session(autocommit=False)
    application.run("insert into seats values (2)")
    answer = rows(db, "select key, outcome from pgreaper.reaper_expire_keys('holds', '{2}')")
    assert answer == [{"key": "2", "outcome": "expired"}]


# What _sweep_step tries to have alone; the two numbers that follow are the places.
SWEEP = 1919377517
PLACE = f"select pg_advisory_lock{{}}({SWEEP} + %s, policy_id) from pgreaper.policies"


def test_sweeps_side_by_side_lock_first(three: Holds, db: Connection, session: Callable[..., Session]):
    """Straight updates of the same holds would wait for one another; a sweep that is alone goes straight."""
    db.execute("create table straight ()")
    Fault(
        "told", "_write", "if target.bare then", "if target.bare then insert into public.straight default values;"
    ).plant(db)
    neighbour = session()
    neighbour.run(PLACE.format(""), 0)
    db.execute("call pgreaper.reaper_sweep('holds')")
    assert three.states() == dict.fromkeys((1, 2, 3), "expired")
    assert rows(db, "select 1 as here from straight") == []

    neighbour.run("select pg_advisory_unlock_all()")
    three.due(2)
    db.execute("call pgreaper.reaper_sweep('holds')")
    assert rows(db, "select 1 as here from straight limit 1")
    assert set(three.states().values()) == {"expired"}


def test_a_sweep_is_noticed_by_the_one_that_went_straight(three: Holds, session: Callable[..., Session]):
    """It takes the same lock, shared, for as long as its step lasts: whoever wants to be alone then is not."""
    neighbour, reaper = session(autocommit=False), session(autocommit=False)
    neighbour.run(PLACE.format("_shared"), 0)
    reaper.run("select (pgreaper._sweep_step('holds', 10, 10, 'w', pgreaper._clock(), null)).expired")
    shared = rows(
        neighbour.connection,
        "select count(*) as n from pg_locks where locktype = 'advisory' and classid = %s and mode = 'ShareLock'",
        SWEEP,
    )
    assert shared == [{"n": 2}]


def test_a_third_sweep_waits_until_one_is_through(three: Holds, db: Connection, session: Callable[..., Session]):
    """It would do little but skip what the others have; no hold is lost for it."""
    neighbour = session()
    for place in (1, 2):
        neighbour.run(PLACE.format(""), place)
    step = "select (s).more, (s).taken from pgreaper._sweep_step('holds', 10, 10, 'w', pgreaper._clock(), null) as s"
    assert rows(db, step) == [{"more": True, "taken": 0}]
    late = session()
    answer = late.start("call pgreaper.reaper_sweep('holds')")
    asleep = "select 1 as here from pg_stat_activity where pid = %s and wait_event = 'PgSleep'"
    until = time.monotonic() + 30
    while not rows(db, asleep, late.pid):
        assert time.monotonic() < until
    assert three.states() == dict.fromkeys((1, 2, 3), "held")
    neighbour.run("select pg_advisory_unlock_all()")
    answer.result(timeout=30)
    assert three.states() == dict.fromkeys((1, 2, 3), "expired")

"""reaper_extend: the application keeps a hold that is alive for longer, in the deadline's own type."""

from __future__ import annotations

from typing import Any

import pytest


def extend(core: Any, until: str, key: str = "1", policy: str = "p") -> tuple[Any, ...]:
    """Outcome, state, and the deadline in UTC."""
    columns = ("outcome", "state", "to_char(deadline at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS.US')")
    (found,) = core.call("reaper_extend", *columns, policy=policy, key=key, until=until)
    return tuple(found)


@pytest.fixture
def one(core: Any, holds: Any, set_clock: Any) -> Any:
    """One hold, due at noon, seen an hour before."""
    holds.ahead(1)
    core.do("update holds set expires_at = '2030-06-01 12:00Z'")
    core.register()
    set_clock("2030-06-01 11:00Z")
    return holds


def test_extended_never_for_shorter(core, one):
    """Repeated and reordered calls leave the latest deadline; the second writes nothing."""
    later = ("2030-06-01 13:00:00.000000",)
    assert extend(core, "2030-06-01 13:00Z") == ("extended", "held", *later)
    before = core.value("select xmin::text || ctid::text from holds")
    for until in ("2030-06-01 12:30Z", "2030-06-01 13:00Z"):
        assert extend(core, until) == ("already-done", "held", *later)
    assert core.value("select xmin::text || ctid::text from holds") == before
    assert core.value("select expires_at = '2030-06-01 13:00Z' from holds")


def test_c003_the_old_deadline_means_nothing_any_more(core, one, set_clock):
    """An extended hold expires after its new deadline, and a leased one survives its old one."""
    set_clock("2030-06-01 11:59:59Z")
    assert extend(core, "2030-06-01 12:10Z")[0] == "extended"
    set_clock("2030-06-01 12:05Z")
    assert core.run() == {}
    set_clock("2030-06-01 12:10Z")
    assert core.run() == {"1": "expired"}
    assert extend(core, "2030-06-01 13:00Z") == ("not-eligible", "expired", "2030-06-01 12:10:00.000000")


@pytest.mark.parametrize(
    ("now", "grace", "outcome"),
    [
        ("2030-06-01 11:59:59.999999Z", "0", "extended"),
        ("2030-06-01 12:00Z", "0", "not-eligible"),
        ("2030-06-01 12:09:59.999999Z", "10 minutes", "extended"),
        ("2030-06-01 12:10Z", "10 minutes", "not-eligible"),
    ],
)
def test_the_boundary(core, one, set_clock, now, grace, outcome):
    """Alive is what is not due, to the microsecond; inside the grace a hold is alive."""
    core.register(grace=grace)
    set_clock(now)
    assert extend(core, "2030-06-01 13:00Z")[0] == outcome
    assert (core.run() == {"1": "expired"}) == (outcome == "not-eligible")


@pytest.mark.parametrize("until", ["2030-06-01 11:00Z", "2030-06-01 10:00Z", "-infinity", None])
def test_a_deadline_that_has_passed_is_refused(core, one, until):
    """22023, and the hold keeps the one it has."""
    error = core.refused("select pgreaper.reaper_extend('p', '1', %s)", until)
    assert (error.sqlstate, error.diag.message_primary.startswith("until must be later than now")) == ("22023", True)


def test_a_deadline_of_null_lasts_as_long_as_any(core, one):
    """Never is not made sooner."""
    core.do("alter table holds alter expires_at drop not null", "update holds set expires_at = null")
    assert extend(core, "2030-06-01 13:00Z") == ("already-done", "held", None)
    core.do("update holds set expires_at = 'infinity'")
    assert extend(core, "2030-06-01 13:00Z")[0] == "already-done"
    core.do("update holds set expires_at = '2030-06-01 12:00Z'")
    assert extend(core, "infinity")[0] == "extended"
    assert core.value("select expires_at = 'infinity' from holds")


# A session's own zone plays no part.
ZONED = [
    ("timestamp", "Europe/Brussels", "2030-06-01 14:00Z", "2030-06-01 16:00:00", "2030-06-01 14:00:00.000000"),
    # The hour that occurs twice: never sooner than asked.
    ("timestamp", "Europe/Brussels", "2030-10-27 00:30Z", "2030-10-27 02:30:00", "2030-10-27 01:30:00.000000"),
    ("timestamp(0)", "UTC", "2030-06-01 14:00:00.7Z", "2030-06-01 14:00:01", "2030-06-01 14:00:01.000000"),
    # A day lasts until its end in the zone; the first that ends no sooner.
    ("date", "Europe/Brussels", "2030-06-03 22:00Z", "2030-06-03", "2030-06-03 22:00:00.000000"),
    ("date", "Europe/Brussels", "2030-06-03 22:00:00.000001Z", "2030-06-04", "2030-06-04 22:00:00.000000"),
    ("date", "Europe/Brussels", "2030-06-04 10:00Z", "2030-06-04", "2030-06-04 22:00:00.000000"),
]


@pytest.mark.parametrize(("column_type", "zone", "until", "stored", "deadline"), ZONED)
def test_types_of_deadlines(core, set_clock, column_type, zone, until, stored, deadline):
    """A deadline without a zone is written in the declared one, and told as the instant it means."""
    core.do(
        f"create table things (id int primary key, status text, expires_at {column_type})",
        "insert into things values (1, 'held', '2030-06-02'), (2, 'held', '5000-01-01')",
        "set local timezone = 'Asia/Tokyo'",
    )
    core.register(target="things", zone=zone)
    set_clock("2030-06-01 11:00Z")
    core.do("update things set expires_at = '2030-06-01 13:30' where id = 1")
    assert extend(core, until) == ("extended", "held", deadline)
    assert core.value(
        "select to_jsonb(expires_at) = to_jsonb(%s::" + column_type + ") from things where id = 1", stored
    )
    assert extend(core, until, key="2")[0] == "already-done"


@pytest.mark.parametrize("column_type", ["timestamp", "date"])
def test_a_deadline_too_far_for_an_instant(core, column_type):
    """It lasts longer than whatever is asked; nothing overflows."""
    core.do(
        f"create table things (id int primary key, status text, expires_at {column_type})",
        "insert into things values (1, 'held', '294276-12-31'), (2, 'held', 'infinity'), (3, 'held', null)",
    )
    core.register(target="things", zone="America/New_York", consumed="consumed")
    for key, told in (("1", True), ("2", True), ("3", None)):
        found = core.call("reaper_extend", "outcome", "deadline = 'infinity'", policy="p", key=key, until="2100-01-01Z")
        assert found == [("already-done", told)]
        assert core.call("reaper_consume", "outcome", policy="p", key=key) == [("consumed",)]


def test_a_deadline_that_its_column_makes_too_near(core, one, set_clock):
    """Rounded to a moment that has passed: refused, and nothing is written."""
    core.do("alter table holds alter expires_at type timestamptz(0)")
    core.do("update holds set expires_at = '2030-06-01 11:00:01Z'")
    set_clock("2030-06-01 11:00:00.8Z")
    assert extend(core, "2030-06-01 11:00:01.4Z")[0] == "extended"
    core.do("create function early() returns trigger language plpgsql as"
            " $$ begin new.expires_at := '2030-06-01 10:00Z'; return new; end $$",
            "create trigger early before update on holds for each row execute function early()")  # fmt: skip
    error = core.refused("select pgreaper.reaper_extend('p', '1', '2030-06-01 13:00Z')")
    assert (error.sqlstate, "until is too near for column expires_at" in str(error)) == ("22023", True)
    assert core.value("select expires_at = '2030-06-01 11:00:01Z' from holds")


def test_one_update_and_nothing_else(committed, core, one):
    """No book is written; a policy without a consumed state can extend."""
    core.do(
        "alter table holds add n int not null default 0",
        "create function counts() returns trigger language plpgsql as $$ begin new.n := old.n + 1; return new; end $$",
        "create trigger counts before update on holds for each row execute function counts()",
    )
    books = "claims transitions failures events totals cursors".split()
    before = [core.rows(f"select * from pgreaper.{book} order by 1") for book in books]
    assert extend(core, "2030-06-01 13:00Z")[0] == "extended"
    assert core.value("select n from holds") == 1
    assert [core.rows(f"select * from pgreaper.{book} order by 1") for book in books] == before

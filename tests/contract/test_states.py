"""States, stamps and constants: what tells a held row, and what the transition writes."""

from __future__ import annotations

import contextlib

import psycopg
import pytest

TYPES = """
create schema app;
create type app.st as enum ('held', 'it''s', 'expired');
create domain app.mood as text check (value in ('held', 'expired', 'other'));
create domain app.level as smallint check (value between 0 and 9);
create domain app.deep as app.mood;
"""

# type, held values as given, other values, expired as given, expired as stored
STATES = [
    ("text", ["held"], ["Held", "held ", "", None], "expired", "expired"),
    ("text", ["it's", 'say "x"', "back\\slash", "%s", "$1"], ["x"], "gone; drop table t;--", "gone; drop table t;--"),
    ("varchar(5)", ["held"], ["HELD", None], "gone", "gone"),
    ("char(1)", ["h"], ["x", None], "e", "e"),
    ("char(6)", ["held"], ["other", None], "gone", "gone  "),
    ("app.st", ["held", "it's"], [None], "expired", "expired"),
    ("smallint", ["0", "1"], ["3", None], "2", "2"),
    ("integer", ["0"], ["1", None], "-1", "-1"),
    ("bigint", ["9000000000"], ["1"], "0", "0"),
    ("numeric", ["1.0"], ["2"], "3", "3"),
    ("boolean", ["t"], [None], "f", "false"),
    ("boolean", ["false"], [None], "TRUE", "true"),
    ("app.mood", ["held"], ["other", None], "expired", "expired"),
    ("app.level", ["0"], ["5", None], "9", "9"),
    ("app.deep", ["held"], ["other"], "expired", "expired"),
    ('"char"', ["h"], ["x"], "e", "e"),
    ("date", ["2020-01-01"], ["2020-01-02"], "2021-01-01", "2021-01-01"),
]  # fmt: skip


def make(core, status_type, values):
    core.do(
        TYPES,
        f"create table things (id int generated always as identity primary key, status {status_type},"
        " expires_at timestamptz)",
    )
    for value in values:
        core.rows("insert into things (status, expires_at) values (%s, now() - interval '1 hour') returning 1", value)


@pytest.mark.parametrize(
    ("status_type", "held", "others", "expired", "stored"), STATES, ids=[f"{c[0]}-{c[1][0]}" for c in STATES]
)
def test_c045_every_type_of_state(core, status_type, held, others, expired, stored):
    """Values are given as strings and compared as the column's own type; NULL and others are never held."""
    make(core, status_type, [*held, *others])
    core.register(target="things", held=held, expired=expired)
    core.do("set local search_path = pg_catalog")
    outcomes = core.run()
    assert outcomes == {str(number + 1): "expired" for number in range(len(held))}
    states = core.column(
        "select case when id <= %s then rpad(status::text, length(%s)) end from public.things order by id",
        len(held),
        stored,
    )
    assert states == [stored] * len(held) + [None] * len(others)
    untouched = core.value(
        "select count(*) from public.things where id > %s and xmax = 0 and xmin <> (select xmin from"
        " public.things where id = 1)",
        len(held),
    )
    assert untouched == len(others)
    assert core.preview()["no_state"] == others.count(None)
    assert core.column("select distinct state from pgreaper.history where outcome = 'expired'") == [stored.strip()]


def test_c043_an_enum_in_a_schema_off_the_search_path_uses_the_partial_index(core):
    """The literal takes the column's own type: the index is proven usable, the cast form is not."""
    core.do(TYPES, "create table things (id int primary key, status app.st not null, expires_at timestamptz not null)")
    core.do(
        "insert into things select g, case when g % 100 = 0 then 'held' else 'expired' end::app.st,"
        " now() - g * interval '1 s'"
        " from generate_series(1, 20000) as g",
        "create index things_due on things (expires_at) where status = 'held'",
        "analyze things",
    )
    core.register(target="things")
    core.do("set local search_path = pg_catalog")
    scans = "select idx_scan from pg_stat_xact_user_tables where relname = 'things'"
    sequential = "select seq_scan from pg_stat_xact_user_tables where relname = 'things'"
    before = core.value(sequential), core.value(scans)
    assert len(core.claim(batch=10)) == 10
    assert core.value(sequential) == before[0]
    assert core.value(scans) > before[1]


def test_c043_the_allowed_labels_are_told(core):
    make(core, "app.st", [])
    error = core.refused(
        "select pgreaper.reaper_register('p', 'things', 'expires_at', 'status', '{Held}', 'expired', 'tests')"
    )
    assert error.diag.message_hint == "Allowed are 'held', 'it''s', 'expired'."


def test_a_label_that_was_renamed_after_registration_is_reported(core):
    """Nothing is lost or expired, and no hold is to blame."""
    make(core, "app.st", ["held"] * 20)
    core.register(target="things", held=["held", "it's"])
    core.do("alter type app.st rename value 'expired' to 'over'")
    token = core.claim()[0].token
    with contextlib.suppress(psycopg.errors.InvalidTextRepresentation), core.connection.transaction():
        assert {outcome for outcome, _ in core.expire(token).values()} == {"retry"}
    assert core.value("select count(*) from pgreaper.failures") == 0
    assert core.column("select distinct status::text from things") == ["held"]


def test_a_held_label_that_was_renamed_is_named(core):
    """The claim misses it already."""
    make(core, "app.st", ["held"])
    core.register(target="things", held=["held", "it's"])
    core.do("alter type app.st rename value 'it''s' to 'other'")
    error = core.refused("select pgreaper.reaper_claim('p')")
    assert error.sqlstate == "22P02"
    assert "it's" in error.diag.message_primary


def test_c020_null_states_and_deadlines_are_left_alone(core, holds):
    """NULL is never held and never due; infinity is never due."""
    core.do("alter table holds alter expires_at drop not null, alter status drop not null")
    core.do(
        "insert into holds (status, expires_at) values ('held', null), (null, now() - interval '1 hour'),"
        " ('held', now() - interval '1 hour'), ('held', 'infinity'), (null, null)"
    )
    core.register()
    assert core.run() == {"3": "expired"}
    assert holds.states() == {1: "held", 2: None, 3: "expired", 4: "held", 5: None}


STAMPS = [
    ("timestamptz", {}, "2040-07-01 22:30:00+00"),
    ("timestamp", {"stamp_zone": "UTC"}, "2040-07-01 22:30:00"),
    ("timestamp", {"stamp_zone": "Europe/Brussels"}, "2040-07-02 00:30:00"),
    ("timestamp(0)", {"stamp_zone": "Asia/Tokyo"}, "2040-07-02 07:30:00"),
    ("date", {"stamp_zone": "Europe/Brussels"}, "2040-07-02"),
    ("date", {"stamp_zone": "UTC"}, "2040-07-01"),
]


@pytest.mark.parametrize("zone", ["UTC", "America/Vancouver", "Asia/Tokyo"])
@pytest.mark.parametrize(
    ("stamp_type", "arguments", "written"), STAMPS, ids=[f"{c[0]} {c[1].get('stamp_zone', '')}" for c in STAMPS]
)
def test_a_stamp_is_the_clock_in_its_zone(core, holds, set_clock, stamp_type, arguments, written, zone):
    """The session's zone does not matter."""
    core.do(f"alter table holds add stamp {stamp_type}")
    holds.due(1)
    core.register(stamp_column="stamp", **arguments)
    set_clock("2040-07-01 22:30:00Z")
    core.do(f"set local timezone = '{zone}'")
    core.run()
    core.do("set local timezone = 'UTC'")
    assert core.column("select stamp::text from holds") == [written]


def test_a_stamp_without_a_zone_of_its_own_takes_the_deadlines(core, set_clock):
    core.do("create table things (id int primary key, status text, expires_at timestamp, stamp timestamp)")
    core.do("insert into things values (1, 'held', '2040-01-01 08:59:59')")
    core.register(target="things", stamp_column="stamp", zone="Asia/Tokyo")
    set_clock("2039-12-31 23:59:58Z")
    assert core.run() == {}
    set_clock("2039-12-31 23:59:59Z")
    assert core.run() == {"1": "expired"}
    assert core.column("select stamp::text from things") == ["2040-01-01 08:59:59"]


@pytest.mark.parametrize("stamp_type", ["timestamptz", "timestamp", "date"])
def test_a_stamp_alone_tells_held_from_expired(core, stamp_type):
    """Without a status: held means NULL, expired means set."""
    core.do(f"create table things (id int primary key, expires_at timestamptz, done {stamp_type})")
    core.do(
        "insert into things values (1, now() - interval '1 hour', null), (2, now() - interval '1 hour', now()),"
        " (3, now() + interval '1 hour', null), (4, now() - interval '2 hours', null), (5, now() -"
        " interval '3 hours', null)"
    )
    zone = {} if stamp_type == "timestamptz" else {"stamp_zone": "UTC"}
    core.register(target="things", status_column=None, held=None, expired=None, stamp_column="done", **zone)
    token = core.claim()[0].token
    core.do("update things set done = now() where id = 4", "delete from things where id = 5")
    assert core.expire(token) == {
        "1": ("expired", "expired"), "4": ("already-done", "expired"), "5": ("not-eligible", None),
    }  # fmt: skip
    assert core.column("select id from things where done is null") == [3]
    assert core.run() == {}
    assert core.column("select distinct state from pgreaper.history where outcome = 'expired'") == ["expired"]


def test_constants_are_written_with_the_transition(core, holds):
    """Literals of the column's type: NULL, numbers, JSON, arrays, words that look like SQL."""
    core.do(
        "alter table holds add token text default 'secret', add n numeric(5,2), add doc jsonb, add tags text[],"
        " add flag boolean, add reason text, add ratio double precision"
    )
    holds.due(1)
    core.register(
        set='{"token": null, "n": 1.5, "doc": {"a": [1, null, "it\'s"]}, "tags": "{a,b}", "flag": true,'
        ' "reason": "now(); drop table holds;-- \\\\ %s", "ratio": 1e-3}'
    )
    core.do("set local standard_conforming_strings = off")
    assert core.run() == {"1": "expired"}
    assert core.rows("select status, token, n::text, doc, tags, flag, reason, ratio from holds") == [
        ("expired", None, "1.50", {"a": [1, None, "it's"]}, ["a", "b"], True, "now(); drop table holds;-- \\ %s", 0.001)
    ]


def test_the_deadline_itself_may_be_cleared_and_the_trail_keeps_it(core, holds):
    """Hi.Events empties the deadline of an expired offer."""
    core.do(
        "alter table holds alter expires_at drop not null",
        "insert into holds (expires_at) values ('2020-01-01 00:00Z')",
    )
    core.register(set='{"expires_at": null}')
    core.do("set local timezone = 'UTC'")
    assert core.run() == {"1": "expired"}
    assert core.column("select expires_at from holds") == [None]
    assert core.column("select deadline::text from pgreaper.reaper_history('p', '1')") == ["2020-01-01 00:00:00+00"]
    assert core.run() == {}


def test_a_clock_that_writes_a_stamp_is_that_of_the_trail(core, holds):
    """One reading of the clock for guard, stamp and trail."""
    core.do("alter table holds add stamp timestamptz")
    holds.due(3)
    core.register(stamp_column="stamp")
    core.run()
    assert core.value(
        "select count(distinct stamp) = 1 and min(stamp) = (select at from pgreaper.transitions) from holds"
    )

"""Deadlines: every type and zone, the ends of time, and the hours in which the clocks change."""

# ruff: noqa: E501  a table of cases is read line by line
from __future__ import annotations

import pytest


def make(core, column, *deadlines):
    core.do(
        f"create table things (id int generated always as identity primary key, status text default 'held', expires_at {column})"
    )
    for deadline in deadlines:
        core.rows("insert into things (expires_at) values (%s) returning 1", deadline)
    core.do("create index on things (expires_at) where status = 'held'")


SESSION_ZONES = ["UTC", "America/Vancouver", "Asia/Tokyo"]

# column, zone, deadline, the moment before, the moment
MOMENTS = [
    ("timestamptz", None, "2040-07-01 12:00+02", "2040-07-01 09:59:59.999999Z", "2040-07-01 10:00Z"),
    ("timestamptz(0)", None, "2040-07-01 12:00+02", "2040-07-01 09:59:59.999999Z", "2040-07-01 10:00Z"),
    ("timestamp", "UTC", "2040-07-01 12:00", "2040-07-01 11:59:59.999999Z", "2040-07-01 12:00Z"),
    ("timestamp", "America/New_York", "2040-07-01 12:00", "2040-07-01 15:59:59.999999Z", "2040-07-01 16:00Z"),
    ("timestamp(0)", "Asia/Kolkata", "2040-07-01 12:00", "2040-07-01 06:29:59.999999Z", "2040-07-01 06:30Z"),
    ("date", "UTC", "2040-07-01", "2040-07-01 23:59:59.999999Z", "2040-07-02 00:00Z"),
    ("date", "Europe/Brussels", "2040-07-01", "2040-07-01 21:59:59.999999Z", "2040-07-01 22:00Z"),
    ("date", "America/New_York", "2040-12-31", "2041-01-01 04:59:59.999999Z", "2041-01-01 05:00Z"),
    ("date", "Asia/Tokyo", "2040-07-01", "2040-07-01 14:59:59.999999Z", "2040-07-01 15:00Z"),
    ("date", "Pacific/Apia", "2040-07-01", "2040-07-01 10:59:59.999999Z", "2040-07-01 11:00Z"),
    # The clocks change: an ambiguous time is its later reading, a missing one is shifted.
    ("timestamp", "America/New_York", "2026-11-01 01:30", "2026-11-01 06:29:59.999999Z", "2026-11-01 06:30Z"),
    ("timestamp", "America/New_York", "2026-11-01 00:59:59", "2026-11-01 04:59:58.999999Z", "2026-11-01 04:59:59Z"),
    ("timestamp", "America/New_York", "2026-11-01 02:00", "2026-11-01 06:59:59.999999Z", "2026-11-01 07:00Z"),
    ("timestamp", "America/New_York", "2026-03-08 02:30", "2026-03-08 07:29:59.999999Z", "2026-03-08 07:30Z"),
    ("timestamp", "Europe/Zurich", "2026-10-25 02:30", "2026-10-25 01:29:59.999999Z", "2026-10-25 01:30Z"),
    ("timestamp", "Europe/Zurich", "2026-03-29 02:30", "2026-03-29 01:29:59.999999Z", "2026-03-29 01:30Z"),
    # Days that begin in a clock change, or that a zone left out.
    ("date", "America/Havana", "2026-10-31", "2026-11-01 04:59:59.999999Z", "2026-11-01 05:00Z"),
    ("date", "America/Santiago", "2026-09-05", "2026-09-06 03:59:59.999999Z", "2026-09-06 04:00Z"),
    ("date", "Pacific/Apia", "2011-12-29", "2011-12-30 09:59:59.999999Z", "2011-12-30 10:00Z"),
]  # fmt: skip


@pytest.mark.parametrize("session_zone", SESSION_ZONES)
@pytest.mark.parametrize(
    ("column", "zone", "deadline", "before", "moment"), MOMENTS, ids=[f"{c[1]} {c[0]} {c[2]}" for c in MOMENTS]
)
def test_c038_due_to_the_microsecond_in_the_declared_zone(
    core, set_clock, column, zone, deadline, before, moment, session_zone
):
    """Neither early nor late, whatever the session's zone; the trail keeps the instant."""
    core.do("set local timezone = 'UTC'")
    make(core, column, deadline)
    core.register(target="things", zone=zone)
    core.do(f"set local timezone = '{session_zone}'")
    set_clock(before)
    assert core.preview()["due"] == 0
    assert core.run() == {}
    set_clock(moment)
    assert core.preview()["due"] == 1
    assert core.run() == {"1": "expired"}
    assert core.value("select deadline = %s::timestamptz from pgreaper.history where key = '1'", moment)
    assert core.value("select due from pgreaper.status") == 0


def test_c038_a_clock_that_crosses_the_change_leaves_no_row_behind(core, set_clock):
    """With the cursor, hour by hour, without a rescan: everything expires at its instant, once."""
    make(core, "timestamp")
    core.do(
        "insert into things (expires_at) select '2026-11-01 00:00'::timestamp + g * interval '10 minutes'"
        " from generate_series(0, 24) as g"
    )
    core.register(target="things", zone="America/New_York")
    seen = 0
    for quarter in range(30):
        set_clock(f"2026-11-01 {3 + quarter // 4:02}:{15 * (quarter % 4):02}Z")
        batch = core.claim()
        if batch:
            seen += len(core.expire(batch[0].token))
        due = core.value(
            "select count(*) from things where expires_at at time zone 'America/New_York' <= pgreaper._clock()"
        )
        assert seen == due
    assert seen > 20


def test_c038_rows_of_the_hour_that_is_left_out_are_not_stuck(core, set_clock):
    """02:30 is shifted to 03:30, past rows that are written later in the day: a rescan finds it at its instant."""
    make(core, "timestamp")
    core.do(
        "insert into things (expires_at) select '2026-03-08 01:30'::timestamp + g * interval '10 minutes'"
        " from generate_series(0, 18) as g"
    )
    core.register(target="things", zone="America/New_York")
    for quarter in range(24):
        set_clock(f"2026-03-08 {6 + quarter // 4:02}:{15 * (quarter % 4):02}Z")
        core.run(batch=3)
        late = core.column(
            "select expires_at::text from things"
            " where (status = 'expired') <> (expires_at at time zone 'America/New_York' <= pgreaper._clock())"
        )
        assert late == []
    assert core.value("select count(*) from things where status = 'held'") == 0


EXTREMES = [
    ("timestamptz", None, ["infinity", "-infinity", "0044-03-15 00:00Z BC", "275760-09-13", None, "4713-01-01 00:00:00Z BC", "294276-12-31 00:00Z"]),
    ("timestamp", "America/New_York", ["infinity", "-infinity", "0044-03-15 BC", "275760-09-13", None, "4713-01-02 00:00 BC", "294276-12-31"]),
    ("date", "Asia/Tokyo", ["infinity", "-infinity", "0044-03-15 BC", "275760-09-13", None, "4713-01-02 BC", "294276-12-30"]),
]  # fmt: skip


@pytest.mark.parametrize(("column", "zone", "deadlines"), EXTREMES, ids=[c[0] for c in EXTREMES])
def test_c039_the_ends_of_time(core, column, zone, deadlines):
    """Infinity, NULL and the far future are never due; -infinity and BC are, and expire with the others."""
    make(core, column, *deadlines, "2020-01-01")
    core.register(target="things", zone=zone, grace="1 day")
    assert core.preview()["due"] == 4
    assert core.value("select due from pgreaper.status") == 4
    assert core.column("select key from pgreaper.reaper_claim('p', batch => 1)") == ["2"], "oldest first"
    core.do("delete from pgreaper.claims")
    assert core.run() == dict.fromkeys(["2", "3", "6", "8"], "expired")
    assert core.column("select id from things where status = 'held' order by id") == [1, 4, 5, 7]
    assert core.value("select pgreaper.reaper_next_due() is null")
    assert core.column("select deadline::text from pgreaper.reaper_history('p', '2')") == ["-infinity"]
    assert core.value("select count(*) from pgreaper.backlog where due > 0") == 0


@pytest.mark.parametrize(
    ("column", "zone", "extreme"),
    [
        ("date", "UTC", "5874897-12-31"),
        ("date", "Asia/Tokyo", "294277-06-01"),
        ("timestamp", "America/New_York", "294276-12-31 23:59:59.999999"),
    ],
)
def test_c039_a_value_that_has_no_instant_does_no_harm(core, column, zone, extreme):
    """A date beyond timestamptz's last day must not be converted, and keeps nobody waiting."""
    make(core, column, extreme, "2020-01-01")
    core.register(target="things", zone=zone)
    assert core.preview()["due"] == 1
    assert core.value("select pgreaper.reaper_next_due()") is not None
    assert core.run() == {"2": "expired"}
    assert core.value("select pgreaper.reaper_next_due() is null")
    assert core.value("select sum(due) from pgreaper.backlog") == 0


def test_a_domain_over_a_deadline_type(core, set_clock):
    """Judged by what it is made of."""
    core.do("create domain moment as timestamp check (value > '2000-01-01')")
    make(core, "moment", "2040-07-01 12:00")
    core.register(target="things", zone="Asia/Tokyo")
    set_clock("2040-07-01 02:59:59Z")
    assert core.run() == {}
    set_clock("2040-07-01 03:00Z")
    assert core.run() == {"1": "expired"}


@pytest.mark.parametrize(
    ("column", "zone"), [("timestamptz", None), ("timestamp", "America/New_York"), ("date", "Asia/Tokyo")]
)
def test_the_zone_does_not_cost_the_index(core, column, zone):
    """The clock is converted, not the column."""
    make(core, column)
    core.do(
        "insert into things (status, expires_at) select case when g % 50 = 0 then 'held' else 'gone' end,"
        " '2020-01-01'::timestamp + g * interval '1 hour' from generate_series(1, 10000) as g",
        "analyze things",
    )
    core.register(target="things", zone=zone)
    scans = "select seq_scan from pg_stat_xact_user_tables where relname = 'things'"
    before = core.value(scans)
    batch = core.claim(batch=20)
    core.expire(batch[0].token)
    assert len(core.claim(batch=20)) == 20
    core.value("select pgreaper.reaper_next_due()")
    assert core.value(scans) == before
    core.value("select count(*) from things where status = 'gone'")
    assert core.value(scans) > before, "the measure cannot fail"


@pytest.mark.parametrize(("column", "zone"), [("timestamp", "Europe/Zurich"), ("date", "Europe/Zurich")])
def test_grace_counts_in_every_kind(core, set_clock, column, zone):
    make(core, column, "2040-07-01")
    core.register(target="things", zone=zone, grace="36 hours")
    start = "2040-06-30 22:00Z" if column == "timestamp" else "2040-07-01 22:00Z"
    set_clock(core.value("select (%s::timestamptz + interval '36 hours' - interval '1 us')::text", start))
    assert core.run() == {}
    set_clock(core.value("select (%s::timestamptz + interval '36 hours')::text", start))
    assert core.run() == {"1": "expired"}

"""Schedules: read as pg_cron reads them, refused with a reason, and when they start."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import islice
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgreaper.schedule import ScheduleError, parse

NOW = datetime(2026, 2, 27, 23, 58, 30, tzinfo=UTC)  # a Friday


@pytest.mark.parametrize(
    ("text", "starts"),
    [
        ("* * * * *", ["2026-02-27 23:59", "2026-02-28 00:00"]),
        ("*/20 * * * *", ["2026-02-28 00:00", "2026-02-28 00:20"]),
        ("5,7-9/2 22 * * *", ["2026-02-28 22:05", "2026-02-28 22:07", "2026-02-28 22:09", "2026-03-01 22:05"]),
        ("0 0 * * sun", ["2026-03-01 00:00", "2026-03-08 00:00"]),
        ("0 0 * * 7", ["2026-03-01 00:00", "2026-03-08 00:00"]),
        ("0 12 1 * *", ["2026-03-01 12:00", "2026-04-01 12:00"]),
        ("0 12 2 * mon", ["2026-03-02 12:00", "2026-03-09 12:00"]),  # either day will do
        ("0 12 */2 * mon", ["2026-03-09 12:00", "2026-03-23 12:00"]),  # a star restricts nothing: both must fit
        ("0 0 29 feb *", ["2028-02-29 00:00"]),
        ("0 12 $ * *", ["2026-02-28 12:00", "2026-03-31 12:00"]),
        ("@hourly", ["2026-02-28 00:00", "2026-02-28 01:00"]),
        ("@weekly", ["2026-03-01 00:00"]),
        ("0 0 31 2 *", [None]),
        ("@reboot", [None]),
    ],
)
def test_when_it_starts(text, starts):
    schedule, at = parse(text), NOW
    for expected in starts:
        found = schedule.after(at)
        assert (found and f"{found:%Y-%m-%d %H:%M}") == expected
        at = found or at


def test_seconds():
    schedule = parse("10 Seconds")
    assert schedule.after(NOW) == NOW + timedelta(seconds=10)
    assert schedule.gap(NOW) == timedelta(seconds=10)
    assert schedule.since == (1, 5)
    assert parse("0 12 $ * *").since == (1, 6)
    assert parse("* * * * *").since is None


def test_in_another_time_zone():
    """`cron.timezone`: nine o'clock there."""
    found = parse("0 9 * * *").after(NOW, ZoneInfo("Asia/Tokyo"))
    assert found == datetime(2026, 2, 28, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "0 fields and not five"),
        ("* * * *", "4 fields and not five"),
        ("* * * * * *", "6 fields and not five.*ignore the rest"),
        ("60 * * * *", "'60' is no minute: 0 to 59"),
        ("* 24 * * *", "no hour"),
        ("* * 0 * *", "no day of the month: 1 to 31"),
        ("* * * 13 *", "no month"),
        ("* * * * 8", "no day of the week"),
        ("* * * * sunday", "'sunday' is no day of the week"),
        ("5/15 * * * *", "would mean 5 only: write 5-59/15"),
        ("9-5 * * * *", "backwards"),
        ("*/0 * * * *", "step .* is zero"),
        ("1,,2 * * * *", "is no minute"),
        ("*; drop", "2 fields"),
        ("0 seconds", "1 to 59 seconds"),
        ("60 seconds", "1 to 59 seconds"),
        ("@every 5m", "2 fields"),
        ("@HOURLY", "knows @yearly"),
        ("१ * * * *", "is no minute"),
    ],
)
def test_refused(text, reason):
    with pytest.raises(ScheduleError, match=reason):
        parse(text)


def test_what_we_take_pg_cron_takes(cron):
    """Of many made-up schedules, none that we accept is refused by the real parser."""
    words = "* 1 7 12 31 59 */7 1-5 3-5/2 jan Dec sun MON 0 32 60 3-40/4 x */0 1- - 5/2 9-1".split()
    field = st.lists(st.sampled_from(words), min_size=1, max_size=2).map(",".join)
    good = st.sampled_from(["*", "1", "*/7", "1-5", "2,7", "2-6/2"])
    taken = set()

    with cron.connect() as connection:

        @settings(max_examples=400)
        @given(st.lists(good, min_size=5, max_size=5), st.integers(0, 4), field)
        def compare(fields, place, odd):
            text = " ".join([*fields[:place], odd, *fields[place + 1 :]])
            try:
                parse(text)
            except ScheduleError:
                return
            connection.execute("select cron.schedule('x', %s, 'select 1')", [text])
            taken.add(text)

        compare()
        assert len(taken) > 100
        for text in islice(map(" ".join, _plain()), 400):
            parse(text)
            connection.execute("select cron.schedule('x', %s, 'select 1')", [text])


def _plain():
    """What people write."""
    for minute in ("*", "0", "59", "*/5", "0,30", "10-50/10"):
        for hour in ("*", "0", "23", "*/6", "8-18"):
            for day in ("*", "1", "31", "*/2"):
                for month, weekday in (("*", "*"), ("jan", "*"), ("*", "mon-fri"), ("1-6", "0,7")):
                    yield minute, hour, day, month, weekday

"""How values are written for people."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgreaper import text


@given(st.text(), st.integers(10, 80))
def test_c050_no_text_can_forge_a_line_or_fill_the_screen(value, limit):
    """Whatever a key contains: one line, printable, of bounded length."""
    shown = text.visible(value, limit)
    assert shown.isprintable()
    assert len(shown) <= max(limit, 8) + 40
    assert len(shown.splitlines()) <= 1


@given(st.text())
def test_nothing_is_cut_from_one_line(value):
    assert text.one_line(value).isprintable()
    assert all(c in text.one_line(value) for c in value if c.isprintable())


def test_two_long_keys_are_told_apart_by_length():
    assert text.key("k" * 1_000_000) != text.key("k" * 999_999)
    assert "1,000,000 characters" in text.key("k" * 1_000_000)
    assert text.key("") == "''"
    assert text.key("a\nERROR fake\x1b[2J") == "a\\nERROR fake\\x1b[2J"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0 ms"), (0.25, "250 ms"), (0.9996, "1 s"), (1, "1 s"), (3.21, "3.2 s"), (9.96, "10 s"), (59.6, "1 min"),
        (250, "4 min 10 s"), (3600, "1 h"), (3599.7, "1 h"), (5400, "1 h 30 min"), (90000, "1 d 1 h"),
        (400 * 86400, "1 y 35 d"), (-5, "-5 s"),
    ],
)  # fmt: skip
def test_durations(seconds, shown):
    assert text.duration(float(seconds)) == shown
    assert text.duration(timedelta(seconds=seconds)) == shown


def test_instants_beyond_python():
    assert text.instant(datetime.min.replace(tzinfo=UTC)) == "-infinity"
    assert text.instant(datetime.max.replace(tzinfo=UTC)) == "infinity"
    assert text.instant(datetime(2026, 2, 3, 4, 5, 6, tzinfo=UTC)) == "2026-02-03 04:05:06Z"
    assert text.instant(None) == "-"


@given(st.text(min_size=1).filter(lambda s: "\x00" not in s and s.encode("utf-8", "replace").decode() == s))
def test_quoted_names_are_read_back_as_they_are(name):
    """As SQL reads them: plain ones fold to lower case, quoted ones stay."""
    shown = text.quoted(name)
    back = shown[1:-1].replace('""', '"') if shown.startswith('"') else shown.lower()
    assert back == name


@pytest.mark.parametrize("name", ["select", "user", "Holds", "a b", "ż", "9a", 'x"y'])
def test_names_that_need_quotes(name):
    assert text.quoted(name).startswith('"')

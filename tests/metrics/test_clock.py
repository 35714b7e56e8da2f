"""A worker whose clock is wrong works like any other, and the figure is right."""

from __future__ import annotations

import subprocess
from datetime import timedelta

import pytest

from tests.cli.conftest import PGREAPER, environment
from tests.metrics.conftest import one


def shifted(needs, dsn, *arguments, by):
    """Run a command whose clock is ahead by so many seconds; the database's is not."""
    faketime = needs("faketime", package="faketime")
    done = subprocess.run(
        [faketime, "-f", f"{by:+d}s", *PGREAPER, *arguments],
        env=environment(dsn, FAKETIME_DONT_FAKE_MONOTONIC="1"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("by", [180, -86400])
def test_a_wrong_clock_changes_nothing(db, holds, dsn, needs, in_process, by):
    """Minutes ahead or a day behind: what is due expires, what is not stays, and status and metrics say by how much."""
    due, ahead = holds.due(50), holds.ahead(20, within="90 seconds")
    holds.register()
    done = shifted(needs, dsn, "work", by=by)
    assert done.stdout.startswith("holds: 50 expired")
    states = holds.states()
    assert {states[i] for i in due} == {"expired"}
    assert {states[i] for i in ahead} == {"held"}
    trail = "select bool_and(abs(extract(epoch from clock_timestamp() - at)) < 60), bool_and(at >= last_deadline)"
    assert db.execute(f"{trail} from pgreaper.transitions").fetchone() == (True, True)

    (skew,) = db.execute("select extract(epoch from clock_skew)::float8 from pgreaper.status").fetchone()
    assert skew == pytest.approx(by, abs=1)
    assert one(in_process("metrics").out, "pgreaper_clock_skew_seconds", policy="holds") == pytest.approx(by, abs=1)
    lines = [line for line in done.stderr.splitlines() if "clock" in line]
    assert len(lines) == 1
    assert ("3 min ahead of" if by > 0 else "1 d behind") in lines[0]
    told = in_process("doctor", "holds")
    assert "clock" in told.out


def test_clocks_that_agree_are_not_told(db, holds, dsn, needs):
    """Within a second there is no line, and the figure is small."""
    holds.due(3)
    holds.register()
    done = shifted(needs, dsn, "work", by=0)
    assert "clock" not in done.stderr
    (skew,) = db.execute("select abs(extract(epoch from clock_skew)) from pgreaper.status").fetchone()
    assert skew < 1


def test_two_seconds_are_told_by_the_doctor(db, holds, in_process):
    """The tolerance is one second, for the doctor as for the worker."""
    holds.register()
    holds.due(2)
    for skew, told in (("0.9 seconds", False), ("1.1 seconds", True)):
        db.execute("select pgreaper.reaper_claim('holds', 1, worker => 'w7', skew => %s)", (skew,))
        said = " ".join(in_process("doctor", "holds").out.split())
        assert ("the clock of worker w7" in said) == told


def test_a_claim_hands_the_skew_on(db, holds, reaper):
    """Both ways of claiming write it to the books."""
    holds.due(2)
    holds.register()
    reaper.claim("holds", batch=1, skew=timedelta(seconds=-1.5))
    reaper.claim_batch("holds", batch=1, skew=timedelta(milliseconds=7))
    found = db.execute("select extract(epoch from skew)::float8 from pgreaper.claims order by claimed_at").fetchall()
    assert found == [(-1.5,), (0.007,)]

"""
Many at once: holds per second of one, two and sixteen workers and sweeps.

Workers are processes.  They are up before there is anything to do, because the policy is paused till then.  Sweeps are
connections that call at the same moment, as pg_cron's would.  The first and the last tenth of the holds do not count:
what it takes to start, and who comes last, is not what is asked here.  Medians of some rounds, one after the other.
"""

import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg

from bench.common import BATCH, Bench, command, table
from bench.speed import say

# A daemon that waits looks this often, in seconds: by so much they may begin one after the other.
POLL = 0.1
# Longest time for one measurement, in seconds.
PATIENCE = 300.0
ROUNDS = 3

# Holds per second between the first and the last tenth.
MIDDLE = """
select (max(t.done) - min(t.done)) / extract(epoch from max(t.at) - min(t.at))
  from (select at, sum(holds) over (order by at, transition_id) as done from pgreaper.transitions) as t
 where t.done between 0.1 * %s and 0.9 * %s
"""


@contextmanager
def daemons(dsn: str, number: int, poll: float) -> Iterator[list["subprocess.Popen[str]"]]:
    """So many daemons; up when the block begins."""
    arguments = command("work", "--daemon", "--database-url", dsn, "--batch", str(BATCH), "--poll", str(poll))
    started = [
        subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for _ in range(number)
    ]
    try:
        for daemon in started:
            assert daemon.stderr is not None  # noqa: S101
            if " is up" not in (line := daemon.stderr.readline()):
                raise SystemExit(f"a daemon did not start: {line}")
        yield started
    finally:
        for daemon in started:
            daemon.send_signal(signal.SIGTERM)
        for daemon in started:
            _, said = daemon.communicate(timeout=60)
            if daemon.returncode:
                sys.stderr.write(said)


def workers(bench: Bench, rows: int, number: int) -> None:
    """Drain the table with so many processes."""
    bench.execute("select pgreaper.reaper_pause('holds', 'till all are up')")
    with daemons(bench.dsn, number, POLL):
        bench.execute("select pgreaper.reaper_resume('holds')")
        _wait(bench, rows)


def sweeps(bench: Bench, _rows: int, number: int) -> None:
    """Drain the table with so many sweeps."""
    gate = threading.Barrier(number + 1)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with psycopg.connect(bench.dsn, autocommit=True, prepare_threshold=None) as connection:
                gate.wait()
                connection.execute(f"call pgreaper.reaper_sweep('holds', batch => {BATCH})".encode())
        except (psycopg.Error, threading.BrokenBarrierError) as error:
            errors.append(error)
            gate.abort()

    threads = [threading.Thread(target=run) for _ in range(number)]
    for thread in threads:
        thread.start()
    gate.wait()
    for thread in threads:
        thread.join()
    if errors:
        raise SystemExit(f"a sweep failed: {errors[0]}")


def fleet(bench: Bench, rows: int, most: int) -> list[str]:
    """Rates of one, two and ``most`` of a kind, and whether each hold was expired once."""
    lines: list[tuple[object, ...]] = []
    ways: dict[str, Callable[[Bench, int, int], None]] = {
        "pgreaper work, processes": workers,
        "sweeps at once": sweeps,
    }
    for name, way in ways.items():
        rates: dict[int, list[float]] = {1: [], 2: [], most: []}
        for _ in range(ROUNDS):
            for number, found in rates.items():
                bench.lay(rows)
                way(bench, rows, number)
                _audit(bench, rows, f"{number} {name}")
                found.append(float(bench.ask(MIDDLE, rows, rows)[0]))
                say(f"{number} {name}: {found[-1]:,.0f} holds/s")
        usual = {number: statistics.median(found) for number, found in rates.items()}
        for number, found in rates.items():
            against = {1: "", 2: f"{usual[2] / usual[1]:.2f} of one"}
            ratio = against.get(number, f"{usual[number] / usual[2]:.2f} of two")
            target = {1: "", 2: "≥ 1.5 of one" if way is workers else ""}.get(number, "≥ 1 of two")
            rounds = ", ".join(f"{rate:,.0f}" for rate in found)
            lines.append((name, number, f"{usual[number]:,.0f}", rounds, ratio, target))
    return table(("way", "at once", "holds per second", "each round", "ratio", "target"), lines)


def _wait(bench: Bench, rows: int) -> None:
    """Until so many holds are in the trail and no claim is under way; the table itself is left alone."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        done, leased = bench.ask(
            "select coalesce((select sum(holds) from pgreaper.transitions), 0),"
            "       exists (select from pgreaper.claims where finished_at is null)"
        )
        if done >= rows and not leased:
            return
        time.sleep(0.2)
    raise SystemExit(f"{bench.left} holds are left after {PATIENCE:.0f} s")


def _audit(bench: Bench, rows: int, who: str) -> None:
    """Every hold is expired, and the trail has each of them once."""
    found = bench.ask(
        "select (select count(*) from holds where status = 'expired'), count(*), count(distinct k.key)"
        "  from pgreaper.transitions as t cross join lateral unnest(t.keys) as k (key)"
    )
    if set(found) != {rows}:
        raise SystemExit(f"{who}: of {rows} holds {found[0]} expired; the trail has {found[1]}, {found[2]} different")

"""
Many at once: holds per second of one, two and sixteen workers and sweeps, and what the machine makes of others.

Workers are processes.  They are up before there is anything to do, because the policy is paused till then.  Sweeps are
connections that call at the same moment, as pg_cron's would.  The first and the last tenth of the holds do not count:
what it takes to start, and who comes last, is not what is asked here.  Medians of some rounds, one after the other;
a ratio is the median of the rounds' ratios, for the machine changes its speed from round to round.

To compare: the loop by hand, on as many connections, and the bulk UPDATE with the table shared out among them, which
is what sessions that have nothing to do with each other make of this machine.
"""

import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import psycopg

from bench.common import BATCH, Bench, command, table
from bench.speed import BY_CTID, say

# A daemon that waits looks this often, in seconds: by so much they may begin one after the other.
POLL = 0.1
# Longest time for one measurement, in seconds.
PATIENCE = 300.0
ROUNDS = 5

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


def workers(bench: Bench, rows: int, number: int) -> float:
    """Drain the table with so many processes."""
    bench.execute("select pgreaper.reaper_pause('holds', 'till all are up')")
    with daemons(bench.dsn, number, POLL):
        bench.execute("select pgreaper.reaper_resume('holds')")
        _wait(bench, rows)
    return _audited(bench, rows, f"{number} workers")


def sweeps(bench: Bench, rows: int, number: int) -> float:
    """Drain the table with so many sweeps."""

    def sweep(connection: "psycopg.Connection[Any]", _part: int) -> None:
        connection.execute(f"call pgreaper.reaper_sweep('holds', batch => {BATCH})".encode())

    _at_once(bench, number, sweep)
    return _audited(bench, rows, f"{number} sweeps")


def by_hand(bench: Bench, rows: int, number: int) -> float:
    """Drain the table with so many loops, addressed by ctid; they keep no books, so they tell the time themselves."""
    told: list[tuple[float, int]] = []

    def loop(connection: "psycopg.Connection[Any]", _part: int) -> None:
        while changed := connection.execute(BY_CTID).rowcount:
            told.append((time.perf_counter(), changed))

    _at_once(bench, number, loop)
    told.sort()
    done = list(accumulate(holds for _, holds in told))
    first, last = (next(i for i, n in enumerate(done) if n >= share * rows) for share in (0.1, 0.9))
    return (done[last] - done[first]) / (told[last][0] - told[first][0])


def bulk(bench: Bench, rows: int, number: int) -> float:
    """Update the table in so many statements, each of a part of it."""
    share = rows / number
    began = 0.0

    def update(connection: "psycopg.Connection[Any]", part: int) -> None:
        nonlocal began
        began = began or time.perf_counter()
        connection.execute(
            "update holds set status = 'expired'"
            " where status = 'held' and expires_at <= now() and id > %s and id <= %s",
            (round(part * share), round((part + 1) * share)),
        )

    _at_once(bench, number, update)
    return rows / (time.perf_counter() - began)


def _at_once(bench: Bench, number: int, do: Callable[["psycopg.Connection[Any]", int], None]) -> None:
    """Do something on so many connections, from the same moment on; ``do`` gets a connection and its number."""
    gate = threading.Barrier(number + 1)
    errors: list[BaseException] = []

    def run(part: int) -> None:
        try:
            with psycopg.connect(bench.dsn, autocommit=True, prepare_threshold=None) as connection:
                gate.wait()
                do(connection, part)
        except (psycopg.Error, threading.BrokenBarrierError) as error:
            errors.append(error)
            gate.abort()

    threads = [threading.Thread(target=run, args=(part,)) for part in range(number)]
    for thread in threads:
        thread.start()
    gate.wait()
    for thread in threads:
        thread.join()
    if errors:
        raise SystemExit(f"one of {number} at once failed: {errors[0]}")


def fleet(bench: Bench, rows: int, most: int) -> list[str]:
    """Rates of one, two and ``most`` of a kind, and whether each hold was expired once."""
    lines: list[tuple[object, ...]] = []
    ways: dict[str, tuple[Callable[[Bench, int, int], float], list[int], dict[int, str]]] = {
        "pgreaper work, processes": (workers, [1, 2, most], {2: "≥ 1.5 of one", most: "≥ 1 of two"}),
        "sweeps at once": (sweeps, [1, 2, most], {most: "≥ 1 of two"}),
        "loops by hand, by ctid": (by_hand, [1, 2, most], {}),
        "bulk UPDATE, of a part each": (bulk, [1, 2, most], {}),
    }
    for name, (way, numbers, targets) in ways.items():
        rates: dict[int, list[float]] = {number: [] for number in numbers}
        for _ in range(ROUNDS):
            for number, found in rates.items():
                bench.lay(rows)
                found.append(way(bench, rows, number))
                say(f"{number} {name}: {found[-1]:,.0f} holds/s")
        for number, found in rates.items():
            ratio, base = "", {2: 1, most: 2}.get(number)
            if base is not None:
                against = statistics.median(rate / one for rate, one in zip(found, rates[base], strict=True))
                ratio = f"{against:.2f} of {'one' if base == 1 else 'two'}"
            rounds = ", ".join(f"{rate:,.0f}" for rate in found)
            target = targets.get(number, "none, to compare" if not targets else "")
            lines.append((name, number, f"{statistics.median(found):,.0f}", rounds, ratio, target))
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


def _audited(bench: Bench, rows: int, who: str) -> float:
    """Every hold is expired, and the trail has each of them once: then the rate that the trail tells."""
    found = bench.ask(
        "select (select count(*) from holds where status = 'expired'), count(*), count(distinct k.key)"
        "  from pgreaper.transitions as t cross join lateral unnest(t.keys) as k (key)"
    )
    if set(found) != {rows}:
        raise SystemExit(f"{who}: of {rows} holds {found[0]} expired; the trail has {found[1]}, {found[2]} different")
    return float(bench.ask(MIDDLE, rows, rows)[0])

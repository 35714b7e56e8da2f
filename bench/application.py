"""
What an application on the same table notices of a drain: latency of pgbench's transactions.

Four clients write at a steady rate that leaves the machine room: point updates of holds that are not
due, and inserts.  Latency counts from when a transaction should have begun.  Before each drain there is a while
with nothing running, and each drain is compared with the median of those.
"""

import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.common import Bench, Cost, percentile, table
from bench.speed import say
from pgreaper.embedded import Cluster

CLIENTS = 4

# Four updates to an insert; ids of the holds that are not due follow those that are.
SCRIPT = """
\\set choice random(1, 5)
\\if :choice = 1
insert into holds (tenant, label, data, expires_at)
values (md5('1')::uuid, 'seat', '{{"note": "new"}}', now() + interval '40 days');
\\else
\\set id random({first}, {last})
update holds set data = jsonb_build_object('note', repeat('y', 80), 'n', :id), expires_at = expires_at + interval '1 s'
 where id = :id and status = 'held';
\\endif
"""


@dataclass(frozen=True, slots=True)
class Load:
    """Where the transactions of the application are logged while it runs."""

    folder: Path

    def latencies(self, since: float, until: float) -> list[float]:
        """Milliseconds of each transaction that ended between these two moments (seconds since the epoch)."""
        found: list[float] = []
        for file in self.folder.glob("log.*"):
            # The last line may be cut off.
            for line in file.read_text().splitlines()[:-1]:
                _, _, microseconds, _, second, part, *_ = line.split()
                if since <= int(second) + int(part) / 1e6 <= until:
                    found.append(int(microseconds) / 1000)
        return found


@contextmanager
def load(cluster: Cluster, due: int, future: int, rate: int) -> Iterator[Load]:
    """The application, at work as long as the block lasts."""
    with tempfile.TemporaryDirectory(prefix="pgreaper-bench-") as name:
        folder = Path(name)
        script = folder / "script"
        script.write_text(SCRIPT.format(first=due + 1, last=due + future))
        command = [cluster.tool("pgbench"), "--no-vacuum", f"--client={CLIENTS}", "--jobs=1", f"--rate={rate}",
                   "--time=3600", "--log", f"--log-prefix={folder / 'log'}", f"--file={script}",
                   f"--host={cluster.host}", f"--username={cluster.superuser}", "postgres"]  # fmt: skip
        pgbench = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            yield Load(folder)
        finally:
            ended = pgbench.poll()
            pgbench.terminate()
            _, said = pgbench.communicate(timeout=30)
        if ended is not None:
            raise SystemExit(f"pgbench ended too early, with {ended}: {said}")


def application(
    bench: Bench, cluster: Cluster, rows: int, future: int, rate: int, limit: int, seconds: float
) -> list[str]:
    """
    Latency with nothing running and beside three drains of ``rows`` holds.

    ``rate`` are the application's transactions per second.  ``limit`` are the holds per second of the last drain, which
    lasts ``seconds``, as the times with nothing running do.
    """
    limited = int(limit * seconds)
    ways = {
        "reaper_sweep": (rows, None, bench.sweep, "≤ 1.5"),
        "pgreaper work": (rows, None, bench.work, "≤ 1.5"),
        f"pgreaper work, rate_limit {limit:,}": (limited, float(limit), bench.work, "≤ 1.1"),
    }
    quiet: list[list[float]] = []
    drains: list[tuple[str, Cost, list[float], str]] = []
    for name, (due, rate_limit, run, target) in ways.items():
        bench.lay(due, future=future, rate_limit=rate_limit)
        with load(cluster, due, future, rate) as transactions:
            # It connects, and fills its caches.
            time.sleep(1)
            began = time.time()
            time.sleep(seconds)
            middle = time.time()
            cost = run(None)
            ended = time.time()
            # pgbench writes its log when a buffer is full.
            time.sleep(8192 / 30 / rate + 0.5)
            quiet.append(transactions.latencies(began, middle))
            found = transactions.latencies(middle, ended)
        if left := bench.left:
            raise SystemExit(f"{name} left {left} holds")
        say(f"{name}: p99 {percentile(found, 0.99):.2f} ms, before it {percentile(quiet[-1], 0.99):.2f} ms")
        drains.append((name, cost, found, target))

    usual = statistics.median(percentile(values, 0.99) for values in quiet)
    lines: list[tuple[object, ...]] = [
        _line(f"nothing, before {name}", "", values, usual, "")
        for (name, *_), values in zip(drains, quiet, strict=True)
    ]
    lines += [
        _line(name, f"{cost.holds / cost.wall:,.0f}", found, usual, target) for name, cost, found, target in drains
    ]
    slow = [len(values) for values in quiet if len(values) < 0.9 * rate * seconds]
    warning = (
        ["", f"Worth nothing: with nothing running only {slow[0]:,} came through in {seconds:g} s."] if slow else []
    )
    head = ("running", "holds per second", "transactions", "p50, ms", "p99, ms", "max, ms", "p99, ratio", "target")
    return [
        f"The application: {rate:,} transactions a second, {CLIENTS} clients.",
        "",
        *table(head, lines),
        *warning,
    ]


def _line(name: str, drained: str, values: list[float], usual: float, target: str) -> tuple[object, ...]:
    p50, p99 = (percentile(values, share) for share in (0.5, 0.99))
    times = (f"{p50:.2f}", f"{p99:.2f}", f"{max(values):.1f}", f"{p99 / usual:.2f}")
    return (name, drained, f"{len(values):,}", *times, target)

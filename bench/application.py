"""
What an application on the same table notices of a drain: latency of pgbench's transactions.

Four clients write at a steady rate that leaves the machine room: point updates of holds that are not
due, and inserts.  Latency counts from when a transaction should have begun.  Before each drain there is a while
with nothing running, and each drain is compared with the median of those.  A loop by hand tells what any drain costs.
"""

import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.common import Bench, Cost, percentile, table
from bench.speed import say
from pgreaper.embedded import Cluster

CLIENTS = 4
ROUNDS = 3
COMPARE = "none, to compare"

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


@dataclass(frozen=True, slots=True)
class Way:
    """A drain: of how many holds, how it is run, and how much slower the application may be beside it."""

    due: int
    rate_limit: float | None
    run: Callable[[], Cost | None]
    target: str


@dataclass(slots=True)
class Found:
    """What the application noticed: of each time, milliseconds of half and of 99 % of its transactions."""

    name: str
    transactions: list[int] = field(default_factory=list)
    usual: list[float] = field(default_factory=list)
    worst: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    def add(self, latencies: list[float], cost: Cost | None = None) -> None:
        """One more time."""
        self.transactions.append(len(latencies))
        self.usual.append(percentile(latencies, 0.5))
        self.worst.append(percentile(latencies, 0.99))
        if cost:
            self.rates.append(cost.holds / cost.wall)

    def line(self, usual: float, target: str) -> tuple[object, ...]:
        """A line of the table; ``usual`` is the p99 with nothing running."""
        p99 = statistics.median(self.worst)
        rounds = ", ".join(f"{worst:.1f}" for worst in self.worst)
        drained = f"{statistics.median(self.rates):,.0f}" if self.rates else ""
        times = (f"{statistics.median(self.usual):.2f}", f"{p99:.2f}", rounds, f"{p99 / usual:.2f}")
        return (self.name, drained, f"{sum(self.transactions):,}", *times, target)


def compute(seconds: float) -> None:
    """A process that knows nothing of databases, and needs a processor a tenth of the time."""
    code = "import time\nwhile True:\n  end = time.time() + 0.006\n  while time.time() < end: pass\n  time.sleep(0.054)"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        time.sleep(seconds)
        process.kill()


def application(
    bench: Bench, cluster: Cluster, rows: int, future: int, rate: int, limit: int, seconds: float
) -> list[str]:
    """
    Latency with nothing running and beside drains of ``rows`` holds; some rounds of all ways, one after the other.

    ``rate`` are the application's transactions per second.  ``limit`` are the holds per second of the last drain, ten
    times as many those of the one before it; these two last ``seconds``, as the times with nothing running do.
    """
    ways = {
        "no drain, a process that computes 6 of 60 ms": Way(0, None, lambda: compute(seconds), COMPARE),
        "loop by hand": Way(rows, None, lambda: bench.by_hand(math.inf), COMPARE),
        "reaper_sweep": Way(rows, None, bench.sweep, "≤ 1.5"),
        "pgreaper work": Way(rows, None, bench.work, "≤ 1.5"),
        f"pgreaper work, rate_limit {10 * limit:,}": Way(int(10 * limit * seconds), 10.0 * limit, bench.work, COMPARE),
        f"pgreaper work, rate_limit {limit:,}": Way(int(limit * seconds), float(limit), bench.work, "≤ 1.1"),
    }
    quiet = Found("nothing")
    found = {name: Found(name) for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            bench.lay(way.due, future=future, rate_limit=way.rate_limit)
            with load(cluster, way.due, future, rate) as transactions:
                # It connects, and fills its caches.
                time.sleep(1)
                began = time.time()
                time.sleep(seconds)
                middle = time.time()
                cost = way.run()
                ended = time.time()
                # pgbench writes its log when a buffer is full.
                time.sleep(8192 / 30 / rate + 0.5)
                quiet.add(transactions.latencies(began, middle))
                found[name].add(transactions.latencies(middle, ended), cost)
            if left := bench.left:
                raise SystemExit(f"{name} left {left} holds")
            say(f"{name}: p99 {found[name].worst[-1]:.2f} ms, before it {quiet.worst[-1]:.2f} ms")

    usual = statistics.median(quiet.worst)
    slow = [n for n in quiet.transactions if n < 0.9 * rate * seconds]
    warning = (
        ["", f"Worth nothing: with nothing running only {slow[0]:,} came through in {seconds:g} s."] if slow else []
    )
    head = ("running", "holds per second", "transactions", "p50, ms", "p99, ms", "p99 of each round", "ratio", "target")
    return [
        f"The application: {rate:,} transactions a second, {CLIENTS} clients. Medians of {ROUNDS} rounds.",
        "",
        *table(head, [quiet.line(usual, ""), *(found[name].line(usual, way.target) for name, way in ways.items())]),
        *warning,
    ]

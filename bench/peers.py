"""
How fast job queues expire a backlog with one job a hold, beside pgreaper and the UPDATE of everything.

A job queue keeps a row of its own for each hold, takes it, runs the guarded UPDATE of that one hold, and marks the job
as done.  Procrastinate and PGQueuer do it here as their documentation says one does it well: with their own bulk
enqueue and their own workers (``bench/peer.py``, in a virtual environment of their own, which ``make bench-peers``
makes).  All ways run on the same table, on the same server, in turn and several times over.  The queues get fewer
rows, or a run would take all day; what is compared is the rate, by its ratio within a round.

The clock of a job queue runs from when all jobs are enqueued and all workers are connected, until the last hold is
expired: neither enqueueing nor marking the last jobs as done counts.  The WAL counts all of it.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from bench.speed import BULK, Bench, say
from pgreaper.embedded import Cluster

REAPER = "pgreaper work, batch 1000"
HERE = Path(__file__).parent

LEGEND = """\
Every job runs the guarded UPDATE of one hold. The time of a job queue begins when all jobs are enqueued and its
workers are connected, and ends with the last hold: enqueueing stands apart, marking the last jobs as done does not
count. WAL is that of everything. Dead rows are those left in a way's own tables; the target has one per hold in every
way. [NOTES.md](NOTES.md) says how each queue is set up, and why."""

# Every table that only this way of expiring needs.
BOOKS = """
select format('%%I.%%I', s.schemaname, s.relname)
  from pg_stat_user_tables as s where format('%%s.%%s', s.schemaname, s.relname) like %s
"""
DEAD = "select coalesce(sum(s.n_dead_tup), 0) from pg_stat_user_tables as s where s.relid = any (%s::regclass[])"
WAL = "select pg_current_wal_insert_lsn() - '0/0'"

# The figures of a backend that has ended are in the statistics.
ALONE = """
select not exists (select from pg_stat_activity as a
                    where a.backend_type = 'client backend' and a.pid <> pg_backend_pid())
"""

HEAD = (
    "holds",
    "enqueued per second",
    "expired per second",
    "of the bulk UPDATE",
    "pgreaper: times as fast",
    "WAL bytes per hold",
    "dead rows per hold",
)

# Jobs of the run that tells how many are enough, and the most that are (the rate no longer rises then).
FEW, MANY = 300, 20_000


@dataclass(frozen=True, slots=True)
class Peer:
    """
    A job queue with so many worker processes.

    ``width`` is what ``bench/peer.py`` makes of it: jobs at once, or jobs taken at a time, in each process.
    """

    queue: str
    project: str
    processes: int
    width: int
    unit: str

    @property
    def name(self) -> str:
        """As it stands in the table."""
        workers = "1 process" if self.processes == 1 else f"{self.processes} processes"
        return f"{self.project}, {workers}, {self.unit} {self.width}"

    @property
    def books(self) -> str:
        """Pattern of the names of its own tables."""
        return f"public.{self.queue}%"


PEERS = (
    Peer("procrastinate", "procrastinate", 1, 8, "concurrency"),
    Peer("procrastinate", "procrastinate", 2, 8, "concurrency"),
    Peer("pgqueuer", "PGQueuer", 1, 100, "batch"),
    Peer("pgqueuer", "PGQueuer", 2, 100, "batch"),
)


@dataclass(frozen=True, slots=True)
class Took:
    """
    What it took to expire so many holds.

    Seconds, those of enqueueing apart (0 without any); WAL in bytes per hold; dead rows left in own tables per hold.
    """

    holds: int
    seconds: float
    enqueueing: float
    wal: float
    dead: float

    @property
    def rate(self) -> float:
        """Holds per second."""
        return self.holds / self.seconds


@dataclass(frozen=True, slots=True)
class Way:
    """
    One way of expiring everything that is due.

    ``run`` returns its seconds, those of the enqueueing before, and bytes of WAL that are ours and not its own.
    """

    name: str
    books: str
    run: Callable[[Bench], tuple[float, float, float]]


@dataclass(frozen=True, slots=True)
class Shop:
    """Where the job queues are installed, and the server they work on."""

    python: Path
    dsn: str

    def install(self) -> None:
        """Lay the tables of every queue.  Raises SystemExit when one cannot."""
        for peer in {peer.queue: peer for peer in PEERS}.values():
            self._ask(peer, "install")

    def versions(self) -> str:
        """What is installed there and matters."""
        names = ["procrastinate", "pgqueuer", "psycopg", "asyncpg", "uvloop"]
        code = f"from importlib.metadata import version\nprint(*(f'{{n}} {{version(n)}}' for n in {names}), sep=', ')"
        return subprocess.run([self.python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()

    def drain(self, peer: Peer, bench: Bench) -> tuple[float, float, float]:
        """Let its workers expire all holds, as :class:`Way` says.  Raises SystemExit if they do not."""
        enqueued = json.loads(self._ask(peer, "enqueue"))
        # A queue in service has statistics; autovacuum would have made them.
        wal = number(bench, WAL)
        bench.connection.execute("analyze")
        wal = number(bench, WAL) - wal
        with ExitStack() as stack:
            workers = [stack.enter_context(Worker(self._command(peer, "work"))) for _ in range(peer.processes)]
            if any(worker.hear() != "ready" for worker in workers):
                raise SystemExit(f"{peer.name}: a worker did not start; its own words are above")
            started = time.monotonic()
            for worker in workers:
                worker.go()
            answers = [json.loads(worker.hear() or "{}") for worker in workers]
        if not all(answers):
            raise SystemExit(f"{peer.name}: a worker ended before its jobs did; its own words are above")
        expired = sum(answer["expired"] for answer in answers)
        if expired != enqueued["jobs"]:
            raise SystemExit(f"{peer.name}: {enqueued['jobs']} jobs expired {expired} holds")
        return max(answer["last"] for answer in answers) - started, enqueued["seconds"], wal

    def _command(self, peer: Peer, command: str) -> list[str]:
        return [str(self.python), str(HERE / "peer.py"), peer.queue, command, self.dsn, "--width", str(peer.width)]

    def _ask(self, peer: Peer, command: str) -> str:
        done = subprocess.run(self._command(peer, command), stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{peer.name}: {command} ended with {done.returncode}; its own words are above")
        return done.stdout


class Worker:
    """A worker process; it is killed if the block ends before it does."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def hear(self) -> str:
        """The next line that it says; empty when it has ended."""
        return self._process.stdout.readline().rstrip() if self._process.stdout else ""

    def go(self) -> None:
        """Let it begin."""
        if self._process.stdin:
            self._process.stdin.write("go\n")
            self._process.stdin.flush()


def timed(run: Callable[[Bench], object]) -> Callable[[Bench], tuple[float, float, float]]:
    """A way that has nothing to enqueue."""

    def way(bench: Bench) -> tuple[float, float, float]:
        started = time.monotonic()
        run(bench)
        return time.monotonic() - started, 0.0, 0.0

    return way


def ways(shop: Shop) -> list[Way]:
    """The bulk UPDATE, pgreaper, and the job queues."""
    return [
        Way("one bulk UPDATE", "", timed(lambda bench: bench.connection.execute(BULK))),
        Way(REAPER, "pgreaper.%", timed(lambda bench: bench.work(1000))),
        *(Way(peer.name, peer.books, partial(shop.drain, peer)) for peer in PEERS),
    ]


def number(bench: Bench, query: str, *arguments: object) -> float:
    """The one number that a query has."""
    row = bench.connection.execute(query.encode(), arguments or None).fetchone()
    return float(row[0]) if row else 0.0


def measure(bench: Bench, way: Way, holds: int) -> Took:
    """Lay the table anew, empty the books, expire everything.  Raises SystemExit when a hold was left."""
    bench.rows = holds
    bench.lay()
    books = [str(row[0]) for row in bench.connection.execute(BOOKS, (way.books,))]
    for table in books:
        if not table.startswith("pgreaper."):
            bench.connection.execute(f"truncate {table} cascade".encode())
        bench.connection.execute(f"vacuum {table}".encode())
    bench.connection.execute("checkpoint")
    wal = number(bench, WAL)
    seconds, enqueueing, apart = way.run(bench)
    patience = time.monotonic() + 30
    while not number(bench, ALONE):
        if time.monotonic() > patience:
            raise SystemExit(f"{way.name}: a connection is still open 30 seconds after the last hold")
        time.sleep(0.01)
    wal = number(bench, WAL) - wal - apart
    if left := number(bench, "select count(*) from holds where status <> 'expired'"):
        raise SystemExit(f"{way.name} left {left:.0f} of {holds} holds")
    return Took(holds, seconds, enqueueing, wal / holds, number(bench, DEAD, books) / holds)


def compare(bench: Bench, shop: Shop, rows: int, seconds: float, rounds: int) -> dict[str, list[Took]]:
    """
    Measure every way in every round.

    The job queues get as many holds as they manage in so many seconds, by a short run before the first round.
    """
    holds: dict[str, int] = {}
    measured: dict[str, list[Took]] = {}
    for way in ways(shop):
        measured[way.name] = []
        holds[way.name] = rows
        if way.books.startswith("public."):
            holds[way.name] = int(min(max(measure(bench, way, FEW).rate * seconds, FEW), MANY))
    for turn in range(1, rounds + 1):
        for way in ways(shop):
            took = measure(bench, way, holds[way.name])
            measured[way.name].append(took)
            say(f"round {turn}/{rounds}: {way.name}: {took.rate:,.0f} holds/s")
    return measured


def table(measured: dict[str, list[Took]]) -> list[str]:
    """The median of each figure, and of the ratios within a round."""
    bulk, reaper = next(iter(measured.values())), measured[REAPER]
    lines = [
        f"| way | {' | '.join(HEAD)} |",
        f"|---|{'|'.join(['---:'] * len(HEAD))}|",
    ]
    for name, results in measured.items():
        enqueueing = statistics.median(took.enqueueing for took in results)
        figures = [
            f"{results[0].holds:,}",
            f"{results[0].holds / enqueueing:,.0f}" if enqueueing else "-",
            f"{statistics.median(took.rate for took in results):,.0f}",
            f"{ratio(results, bulk):.4f}",
            f"{ratio(reaper, results):.2f}",
            f"{statistics.median(took.wal for took in results):,.0f}",
            f"{statistics.median(took.dead for took in results):.3f}",
        ]
        lines.append(f"| {name} | {' | '.join(figures)} |")
    return lines


def ratio(some: list[Took], others: list[Took]) -> float:
    """How many times as fast as others of the same round."""
    return statistics.median(one.rate / other.rate for one, other in zip(some, others, strict=True))


def verdict(measured: dict[str, list[Took]]) -> str:
    """How many times as fast pgreaper is as the best of the job queues of each round."""
    names = [peer.name for peer in PEERS]
    times = [
        reaper.rate / max(measured[name][turn].rate for name in names) for turn, reaper in enumerate(measured[REAPER])
    ]
    return (
        f"One process of pgreaper is {statistics.median(times):.1f} times as fast as the best job queue of its round."
    )


def main() -> None:
    """Measure on an embedded server and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000, help="holds of pgreaper and of the bulk UPDATE")
    parser.add_argument("--seconds", type=float, default=4, help="how long a job queue is kept busy, about")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--python", type=Path, default=Path(".venv/peers/bin/python"), help="one that has the queues")
    parser.add_argument("--output", type=Path, default=HERE / "RESULTS-peers.md")
    options = parser.parse_args()
    if not options.python.exists():
        parser.error(f"there is no {options.python}; `make bench-peers` makes one and runs this")
    with Cluster() as cluster:
        shop = Shop(options.python, cluster.dsn)
        bench = Bench(cluster.dsn, FEW)
        shop.install()
        measured = compare(bench, shop, options.rows, options.seconds, options.rounds)
        about = (
            f"`make bench-peers`, with --rows {options.rows} --seconds {options.seconds:g} --rounds {options.rounds}: "
            f"medians of the interleaved rounds, PostgreSQL {cluster.version} with "
            f"its default settings (fsync and synchronous commit on), Python {platform.python_version()}, "
            f"{os.cpu_count()} cores, {platform.machine()}; {shop.versions()}."
        )
    lines = ["# Beside job queues", "", about, "", *table(measured), "", verdict(measured), "", LEGEND, ""]
    options.output.write_text("\n".join(lines))
    sys.stdout.write("\n".join(lines))


if __name__ == "__main__":
    main()

"""
How fast pgreaper expires a backlog, beside the UPDATE that people would write by hand.

Every way runs on the same rows, on the same server, in turn and several times over, and
is judged by its ratio to one bulk UPDATE of the same round: single times drift with the
machine, ratios within a round much less.  Run it with ``make bench``.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psycopg

from pgreaper.connection import resolve
from pgreaper.embedded import Cluster
from pgreaper.logs import sentences
from pgreaper.schema import install
from pgreaper.worker import Settings, Worker

ROWS = """
create table {table} (
  id bigint generated always as identity primary key,
  tenant uuid not null,
  label text not null,
  data jsonb not null,
  status text not null default 'held',
  expires_at timestamptz not null
);
insert into {table} (tenant, label, data, status, expires_at)
select md5((g % 1000)::text)::uuid, 'seat ' || g, jsonb_build_object('note', repeat('x', 80), 'n', g), 'held',
       now() - interval '2 days' + g * interval '100 milliseconds'
  from generate_series(1, {rows}) as g;
create index on {table} (expires_at) where status = 'held';
"""

BULK = "update holds set status = 'expired' where status = 'held' and expires_at <= clock_timestamp()"

# The loop of a careful person: short transactions, skip what is locked, join back on the key.
BY_KEY = """
with due as materialized (
  select id from holds where status = 'held' and expires_at <= clock_timestamp()
   order by expires_at limit 1000 for update skip locked
)
update holds as h set status = 'expired' from due where h.id = due.id
"""

# The loop of an expert: the same, addressed by ctid.
BY_CTID = """
with due as materialized (
  select ctid from holds where status = 'held' and expires_at <= clock_timestamp()
   order by expires_at limit 1000 for update skip locked
)
update holds as h set status = 'expired' where h.ctid = any (array(select d.ctid from due as d order by d.ctid))
"""


def say(line: str) -> None:
    """Tell how far it is, apart from the result."""
    sys.stderr.write(line + "\n")


@dataclass(frozen=True, slots=True)
class Way:
    """One way of expiring everything that is due."""

    name: str
    run: Callable[["Bench"], object]


class Bench:
    """A table of overdue holds that can be laid anew, and a connection to it."""

    def __init__(self, dsn: str, rows: int) -> None:
        self.dsn = dsn
        self.rows = rows
        self.connection = psycopg.connect(dsn, autocommit=True, prepare_threshold=None)
        install(dsn)
        self.lay()
        self.connection.execute(
            "select pgreaper.reaper_register('holds', 'holds', 'expires_at', 'status',"
            " array['held'], 'expired', 'bench')"
        )

    def lay(self) -> None:
        """Fresh rows, empty books, statistics, and no checkpoint due in the middle of a run."""
        self.connection.execute("drop table if exists holds")
        self.connection.execute(ROWS.format(table="holds", rows=self.rows))
        self.connection.execute("vacuum analyze holds")
        self.connection.execute("truncate pgreaper.claims, pgreaper.transitions, pgreaper.failures, pgreaper.events")
        self.connection.execute("update pgreaper.cursors set position = null")
        self.connection.execute("checkpoint")

    def measure(self, way: Way) -> tuple[float, float]:
        """Seconds, and bytes of WAL per hold, that a way takes to expire all rows."""
        self.lay()
        wal = self._number("select pg_current_wal_insert_lsn() - '0/0'")
        started = time.perf_counter()
        way.run(self)
        seconds = time.perf_counter() - started
        wal = self._number("select pg_current_wal_insert_lsn() - '0/0'") - wal
        left = self._number("select count(*) from holds where status <> 'expired'")
        if left:
            raise SystemExit(f"{way.name} left {left:.0f} of {self.rows} holds")
        return seconds, wal / self.rows

    def _number(self, query: str) -> float:
        row = self.connection.execute(query).fetchone()
        return float(row[0]) if row else 0.0

    def loop(self, statement: str) -> None:
        """Repeat a statement until it changes nothing."""
        while self.connection.execute(statement).rowcount:
            pass

    def sweep(self, batch: int) -> None:
        """The fused path."""
        self.connection.execute(f"call pgreaper.reaper_sweep(batch => {batch})")

    def work(self, batch: int) -> None:
        """The worker, in this process: a lease for each batch, then its transition."""
        result = Worker(resolve(self.dsn), Settings(batch=batch), log=sentences(say)).run()
        if result.exit_code:
            raise SystemExit(f"the worker ended with {result.exit_code}")


WAYS = (
    Way("one bulk UPDATE", lambda b: b.connection.execute(BULK)),
    Way("hand-written loop, by key", lambda b: b.loop(BY_KEY)),
    Way("hand-written loop, by ctid", lambda b: b.loop(BY_CTID)),
    Way("reaper_sweep, batch 500", lambda b: b.sweep(500)),
    Way("reaper_sweep, batch 1000", lambda b: b.sweep(1000)),
    Way("pgreaper work, batch 500", lambda b: b.work(500)),
    Way("pgreaper work, batch 1000", lambda b: b.work(1000)),
)


def drain(dsn: str, rows: int, rounds: int) -> list[str]:
    """Table of all ways: median rate, ratio to the bulk UPDATE of the same round, WAL."""
    bench = Bench(dsn, rows)
    seconds: dict[str, list[float]] = {way.name: [] for way in WAYS}
    wal: dict[str, list[float]] = {way.name: [] for way in WAYS}
    for number in range(rounds):
        for way in WAYS:
            took, written = bench.measure(way)
            seconds[way.name].append(took)
            wal[way.name].append(written)
            say(f"round {number + 1}/{rounds}: {way.name}: {rows / took:,.0f} holds/s")
    lines = ["| way | holds per second | of the bulk UPDATE | WAL bytes per hold |", "|---|---:|---:|---:|"]
    for way in WAYS:
        ratio = statistics.median(
            bulk / own for bulk, own in zip(seconds[WAYS[0].name], seconds[way.name], strict=True)
        )
        lines.append(
            f"| {way.name} | {rows / statistics.median(seconds[way.name]):,.0f} | {ratio:.2f} "
            f"| {statistics.median(wal[way.name]):,.0f} |"
        )
    return lines


def start_up(dsn: str, rounds: int) -> list[str]:
    """Table of what it costs to start and find nothing, beside a bare script."""
    bare = (
        "import os, click, psycopg\n"
        "with psycopg.connect(os.environ['PGREAPER_DATABASE_URL'], autocommit=True) as connection:\n"
        "    connection.execute('select 1').fetchone()"
    )
    environment = {"PGREAPER_DATABASE_URL": dsn, "PATH": "/usr/bin:/bin"}
    commands = {
        "a script that imports psycopg and click, connects and asks once": [sys.executable, "-c", bare],
        "pgreaper work, nothing due": [str(Path(sys.executable).with_name("pgreaper")), "work"],
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            started = time.perf_counter()
            subprocess.run(command, env=environment, check=True, capture_output=True)
            times[name].append(time.perf_counter() - started)
    first = next(iter(times.values()))
    lines = ["| start-up | milliseconds | ratio |", "|---|---:|---:|"]
    for name, taken in times.items():
        ratio = statistics.median(own / base for own, base in zip(taken, first, strict=True))
        lines.append(f"| {name} | {statistics.median(taken) * 1000:.0f} | {ratio:.2f} |")
    return lines


def main() -> None:
    """Measure on an embedded server and write the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("RESULTS.md"))
    options = parser.parse_args()
    with Cluster() as cluster:
        about = (
            f"`make bench`: {options.rows:,} overdue rows, medians of {options.rounds} interleaved rounds, "
            f"PostgreSQL {cluster.version} with its default settings (fsync and synchronous commit on), "
            f"Python {platform.python_version()}, {os.cpu_count()} cores, {platform.machine()}."
        )
        lines = [
            "# Results",
            "",
            about,
            "",
            *drain(cluster.dsn, options.rows, options.rounds),
            "",
            *start_up(cluster.dsn, 15),
            "",
        ]
    options.output.write_text("\n".join(lines))
    sys.stdout.write("\n".join(lines))


if __name__ == "__main__":
    main()

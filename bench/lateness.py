"""
How late holds expire while new ones come in all the time.

An application inserts holds at a steady rate, each with a random deadline some seconds ahead; daemons of
``pgreaper work`` expire them.  Lateness is taken from the trail (the transition's moment minus the deadline),
and beside it from the commit: that is when others see the new state.
"""

import argparse
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg

from pgreaper.embedded import Cluster
from pgreaper.schema import install

# A daemon that has seen nothing ahead looks again after its poll: what the first holds meet is not the steady state.
WARM_UP = 6.0

TABLE = """
create table holds (
  id bigint generated always as identity primary key,
  data text not null default repeat('x', 100),
  status text not null default 'held',
  expires_at timestamptz not null
);
create index on holds (expires_at) where status = 'held';
"""

# Deadlines lie half a second to five and a half ahead: none has passed when its row is committed.
INSERT = """
insert into holds (expires_at)
select clock_timestamp() + interval '500 ms' + random() * interval '5 seconds' from generate_series(1, %s)
"""

LATENESS = """
select count(*),
       percentile_cont(array[0.5, 0.99, 1]) within group (order by extract(epoch from t.at - k.deadline)),
       percentile_cont(array[0.5, 0.99, 1]) within group (
         order by extract(epoch from pg_xact_commit_timestamp(h.xmin) - k.deadline)),
       count(distinct t.at)
  from pgreaper.transitions as t
 cross join lateral unnest(t.keys, t.deadlines) as k (key, deadline)
  join holds as h on h.id = k.key::bigint
 where k.deadline > (select min(expires_at) from holds) + make_interval(secs => %s)
"""


@dataclass(frozen=True, slots=True)
class Lateness:
    """One measurement; lateness in seconds as median, 99th percentile and maximum."""

    rate: int
    daemons: int
    holds: int
    trail: Sequence[float]
    commit: Sequence[float]
    batches: int

    def line(self) -> str:
        """The measurement as a row of the table."""
        trail, commit = (" / ".join(f"{1000 * float(v):.1f}" for v in values) for values in (self.trail, self.commit))
        return (
            f"| {self.rate:,} | {self.daemons} | {self.holds:,} "
            f"| {trail} | {commit} | {self.holds / max(self.batches, 1):.1f} |"
        )


HEAD = (
    "| new holds a second | daemons | holds | lateness p50 / p99 / max, ms"
    " | until committed p50 / p99 / max, ms | holds per batch |\n|---:|---:|---:|---:|---:|---:|"
)


@contextmanager
def daemons(dsn: str, number: int, arguments: Sequence[str]) -> Iterator[None]:
    """So many daemons, as processes; up when the block begins."""
    command = [sys.executable, "-m", "pgreaper", "work", "--daemon", "--database-url", dsn, *arguments]
    started = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(number)]
    try:
        for daemon in started:
            assert daemon.stderr is not None  # noqa: S101
            if " is up" not in (line := daemon.stderr.readline()):
                raise SystemExit(f"a daemon did not start: {line}")
        yield
    finally:
        for daemon in started:
            daemon.send_signal(signal.SIGTERM)
        for daemon in started:
            _, said = daemon.communicate(timeout=30)
            sys.stderr.write(said)


def insert(dsn: str, rate: int, seconds: float) -> None:
    """Insert holds at a steady rate.  What falls behind is made up for at once, in one statement."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        began = time.monotonic()
        done = 0
        while (now := time.monotonic() - began) < seconds:
            if owed := int(now * rate) - done:
                connection.execute(INSERT, (owed,))
                done += owed
            else:
                time.sleep((done + 1) / rate - now)


def measure(dsn: str, rate: int, seconds: float, number: int, arguments: Sequence[str]) -> Lateness:
    """One rate, with so many daemons."""
    with psycopg.connect(dsn, autocommit=True) as admin:
        admin.execute("truncate pgreaper.claims, pgreaper.transitions, pgreaper.failures, pgreaper.events")
        admin.execute("truncate holds")
        with daemons(dsn, number, arguments):
            loader = threading.Thread(target=insert, args=(dsn, rate, WARM_UP + seconds))
            loader.start()
            loader.join()
            while _one(admin, "select exists (select from holds where status = 'held')")[0]:
                time.sleep(0.1)
        held, trail, commit, batches = _one(admin, LATENESS, WARM_UP)
        (inserted,) = _one(admin, "select count(*) from holds")
        if inserted < 0.98 * rate * (WARM_UP + seconds):
            raise SystemExit(f"only {inserted:,} holds could be inserted")
        return Lateness(rate, number, held, trail, commit, batches)


def _one(connection: "psycopg.Connection[Any]", query: str, *parameters: object) -> tuple[Any, ...]:
    row: tuple[Any, ...] | None = connection.execute(query, parameters or None).fetchone()
    assert row is not None  # noqa: S101
    return row


def main() -> None:
    """Measure on an embedded server and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--rate", type=int, nargs="+", default=[50, 500, 2000], help="holds a second")
    parser.add_argument("--seconds", type=float, default=30, help="how long each rate lasts")
    parser.add_argument("--daemons", type=int, nargs="+", default=[1])
    parser.add_argument("arguments", nargs="*", help="for `pgreaper work`, after --")
    options = parser.parse_args()
    with Cluster(settings={"track_commit_timestamp": True}) as cluster:
        install(cluster.dsn)
        with psycopg.connect(cluster.dsn, autocommit=True) as admin:
            admin.execute(TABLE)
            admin.execute(
                "select pgreaper.reaper_register('holds', 'holds', 'expires_at', 'status', array['held'],"
                " 'expired', 'bench')"
            )
        sys.stdout.write(
            f"PostgreSQL {cluster.version} with its default settings (fsync and synchronous commit on), Python"
            f" {platform.python_version()}, {os.cpu_count()} cores for the server, the application and the daemons;"
            f" {options.seconds:g} s a line.\n\n{HEAD}\n"
        )
        for number in options.daemons:
            for rate in options.rate:
                result = measure(cluster.dsn, rate, options.seconds, number, options.arguments)
                sys.stdout.write(result.line() + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()

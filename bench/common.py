"""
What the long benchmarks share: a table of overdue holds, the ways to drain it, and what a drain cost.

Owns one server's table ``holds`` and the books of its one policy.  Cost is told per hold and in two ways: by the
clock, and as time that the backend had a processor.  The second hardly depends on what else the machine does, but it
leaves out the client, and what other processes of the server do for the backend.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from bench.speed import BY_KEY, say
from pgreaper.connection import resolve
from pgreaper.logs import sentences
from pgreaper.schema import install
from pgreaper.worker import Settings, Worker

BATCH = 1000

TABLE = """
create table holds (
  id bigint generated always as identity primary key,
  tenant uuid not null,
  label text not null,
  data jsonb not null,
  status text not null default 'held',
  expires_at timestamptz not null
)
"""

# The id tells the place in the order of the deadlines.  What is not due yet comes last.
ROWS = """
insert into holds (tenant, label, data, expires_at)
select md5((g % 1000)::text)::uuid, 'seat ' || g, jsonb_build_object('note', repeat('x', 80), 'n', g),
       case when g > {due} then now() + interval '30 days' + g * interval '100 ms'
            when {shared} then now() - interval '1 hour'
            else now() - interval '1 hour' - ({due} - g) * interval '100 ms' end
  from generate_series(1, {due} + {future}) as g
"""

INDEX = "create index on holds (expires_at) where status = 'held'"

REGISTER = """
select pgreaper.reaper_register('holds', 'holds', 'expires_at', 'status', array['held'], 'expired', 'bench',
                                batch => {batch}, rate_limit => {rate_limit}, lease => '10 minutes')
"""

EMPTY_BOOKS = "truncate pgreaper.claims, pgreaper.transitions, pgreaper.failures, pgreaper.events"
FIRST = "update pgreaper.cursors set position = null, rate_tokens = null, rate_at = null, retried = false"

# The oldest holds of the table, each with a dead letter of its own.
DEAD = """
insert into pgreaper.failures
  (policy_id, key, deadline, attempts, first_seen_at, failed_at, not_before, error_class)
select p.policy_id, h.id::text, h.expires_at, 1, now(), now(), 'infinity', 'Refused'
  from holds as h cross join pgreaper.policies as p
 where h.id <= {dead} and p.name = 'holds'
"""


@dataclass(frozen=True, slots=True)
class Cost:
    """What it took to expire so many holds: seconds by the clock, seconds of the backend's processor, bytes of WAL."""

    holds: int
    wall: float
    processor: float
    wal: float

    def __sub__(self, other: "Cost") -> "Cost":
        """What is more than another."""
        return Cost(
            self.holds - other.holds,
            self.wall - other.wall,
            self.processor - other.processor,
            self.wal - other.wal,
        )

    @property
    def wall_each(self) -> float:
        """Microseconds per hold by the clock."""
        return 1e6 * self.wall / self.holds

    @property
    def processor_each(self) -> float:
        """Microseconds of the backend's processor per hold."""
        return 1e6 * self.processor / self.holds


class Bench:
    """
    A table of overdue holds that can be laid anew, with its policy, and a connection to it.

    With ``autovacuum`` off the target keeps every dead entry for the whole of a drain.  That is the worst case, and
    whether a vacuum ran by chance does not blur the figures.
    """

    def __init__(self, dsn: str, *, autovacuum: bool) -> None:
        if not Path("/proc/self/schedstat").exists():
            raise SystemExit("the long benchmarks read /proc/PID/schedstat, which Linux has; run them there")
        self.dsn = dsn
        self.autovacuum = autovacuum
        self.admin = psycopg.connect(dsn, autocommit=True, prepare_threshold=None)
        install(dsn)

    def lay(
        self,
        due: int,
        *,
        future: int = 0,
        shared: bool = False,
        partition: str | None = None,
        partitions: Sequence[str] = (),
        rate_limit: float | None = None,
        anew: bool = True,
    ) -> None:
        """
        Fresh rows, ``due`` of them overdue; empty books, statistics, and no checkpoint due soon.

        ``shared``: all have one deadline.  ``partition`` is how the table is partitioned, ``partitions`` for which
        values.  ``rate_limit`` in holds per second.  Without ``anew`` the books stay, only the cursor is put back.
        """
        self._clear()
        self.execute(TABLE + (f"partition by {partition}" if partition else ""))
        names = [f"holds_{number}" for number in range(len(partitions))] or ["holds"]
        for name, values in zip(names, partitions, strict=False):
            self.execute(f"create table {name} partition of holds for values {values}")
        if not self.autovacuum:
            for name in names:
                self.execute(f"alter table {name} set (autovacuum_enabled = off)")
        self.execute(ROWS.format(due=due, future=future, shared=str(shared).lower()))
        self.execute(INDEX)
        self.execute("vacuum analyze holds")
        self.execute(REGISTER.format(batch=BATCH, rate_limit=rate_limit or "null"))
        self.forget(anew=anew)

    def _clear(self) -> None:
        """Drop the table; many partitions one after the other, for each takes locks till the transaction ends."""
        for (partition,) in self.admin.execute(
            "select quote_ident(c.relname) from pg_inherits as i join pg_class as c on c.oid = i.inhrelid"
            " where i.inhparent = to_regclass('holds') and c.relkind = 'r'"
        ).fetchall():
            self.execute(f"drop table {partition}")
        self.execute("drop table if exists holds")

    def forget(self, *, anew: bool) -> None:
        """Put the cursor back, and with ``anew`` empty the books: as if nothing had ever been expired."""
        if anew:
            self.execute(EMPTY_BOOKS)
        self.execute(FIRST)
        self.execute("checkpoint")

    def bury(self, dead: int) -> None:
        """Make dead letters of the ``dead`` oldest holds."""
        self.execute(DEAD.format(dead=dead))
        self.execute("vacuum analyze pgreaper.failures")
        self.execute("checkpoint")

    def advance(self, last: int) -> None:
        """Put the cursor to the hold of this id, where it would be if a worker had expired what comes before."""
        position = "update pgreaper.cursors set position = (select expires_at from holds where id = %s)"
        self.admin.execute(position, (last,))
        self.execute("checkpoint")

    def execute(self, statement: str) -> None:
        """Run a statement of ours."""
        self.admin.execute(statement.encode())

    def ask(self, query: str, *parameters: object) -> tuple[Any, ...]:
        """The one row that a query has."""
        row: tuple[Any, ...] | None = self.admin.execute(query.encode(), parameters or None).fetchone()
        if row is None:
            raise SystemExit(f"no row: {query}")
        return row

    @property
    def wal(self) -> float:
        """Bytes of WAL written so far."""
        return float(self.ask("select pg_current_wal_insert_lsn() - '0/0'")[0])

    @property
    def left(self) -> int:
        """How many due holds are still held and have not failed."""
        return int(
            self.ask(
                "select count(*) from holds where status = 'held' and expires_at <= clock_timestamp()"
                " and id::text not in (select key from pgreaper.failures)"
            )[0]
        )

    # -- the ways

    def sweep(self, holds: int | None = None) -> Cost:
        """One sweep, on a connection of its own; at most so many holds."""
        with self._metered() as (connection, meter):
            call = f"call pgreaper.reaper_sweep('holds', batch => {BATCH}, max_rows => {holds or 'null'})"
            row: Any = connection.execute(call.encode()).fetchone()
            return meter(int(row[0]))

    def work(self, holds: int | None = None) -> Cost:
        """
        The worker, in this process; at most so many holds.

        Its backend ends with the run, so what that took is read after each batch.
        """
        pid = 0
        processor = 0.0

        def note(worker: Worker) -> None:
            nonlocal pid, processor
            if not pid:
                pid = self.ask("select pid from pg_stat_activity where application_name = %s", worker.name)[0]
            processor = on_processor(pid)

        wal, began = self.wal, time.perf_counter()
        settings = Settings(batch=BATCH, max_rows=holds)
        result = Worker(resolve(self.dsn), settings, log=sentences(say), on_batch=note).run()
        wall = time.perf_counter() - began
        if result.exit_code:
            raise SystemExit(f"the worker ended with {result.exit_code}")
        return Cost(result.expired, wall, processor, self.wal - wal)

    def by_hand(self, seconds: float) -> Cost:
        """The hand-written loop, joined back on the key; ends with the holds or after so many seconds."""
        with self._metered() as (connection, meter):
            done, began = 0, time.monotonic()
            while time.monotonic() - began < seconds and (changed := connection.execute(BY_KEY).rowcount):
                done += changed
            return meter(done)

    def bulk(self, last: int) -> Cost:
        """One UPDATE of all held rows up to this id."""
        with self._metered() as (connection, meter):
            update = "update holds set status = 'expired' where status = 'held' and id <= %s"
            return meter(connection.execute(update, (last,)).rowcount)

    @contextmanager
    def _metered(self) -> Iterator[tuple["psycopg.Connection[Any]", Callable[[int], Cost]]]:
        """A connection, and what tells the cost since it was made."""
        with psycopg.connect(self.dsn, autocommit=True, prepare_threshold=None) as connection:
            pid = connection.info.backend_pid
            wal, processor, began = self.wal, on_processor(pid), time.perf_counter()

            def meter(holds: int) -> Cost:
                wall = time.perf_counter() - began
                return Cost(holds, wall, on_processor(pid) - processor, self.wal - wal)

            yield connection, meter

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """An old snapshot, as a report or a dump has, for as long as the block lasts."""
        with psycopg.connect(self.dsn) as connection:
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            connection.execute("select count(*) from pgreaper.policies")
            yield


def on_processor(pid: int) -> float:
    """Seconds that the main thread of a process has had a processor."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def command(*arguments: str) -> list[str]:
    """The command line of ``pgreaper``, of this checkout."""
    return [sys.executable, "-m", "pgreaper", *arguments]


def median(costs: Sequence[Cost], of: Callable[[Cost], float]) -> float:
    """The median of a figure of some costs."""
    return statistics.median(map(of, costs))


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which this share of them lies; they need not be sorted."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def table(head: Sequence[str], lines: Sequence[Sequence[object]], left: int = 1) -> list[str]:
    """A markdown table; all but the first ``left`` columns are figures."""
    rule = "|".join(["---"] * left + ["---:"] * (len(head) - left))
    return [f"| {' | '.join(head)} |", f"|{rule}|", *(f"| {' | '.join(map(str, line))} |" for line in lines)]

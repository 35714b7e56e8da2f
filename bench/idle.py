"""
What it costs when there is nothing to do: buffers and WAL of each look, statements and CPU of a daemon.

On a table with nothing due, and on one whose head is full of holds that nobody may take: dead letters and leases.
"""

import time
from dataclasses import dataclass
from typing import Any

import psycopg

from bench.common import Bench, on_processor, table
from bench.fleet import daemons
from bench.speed import say
from pgreaper.embedded import Cluster

# What a daemon's backend logs begins with this.
PREFIX = "%a|"

# The daemon's usual poll, in seconds.
POLL = 5.0

# A look, and what it may cost in buffers; None: not said.
LOOKS: dict[str, tuple[str, int | None]] = {
    "reaper_claim": ("select * from pgreaper.reaper_claim('holds', 500)", 20),
    "reaper_next_due": ("select pgreaper.reaper_next_due('holds')", 20),
    "_agenda, a daemon's look": ("select * from pgreaper._agenda()", 20),
    "reaper_claim, rescan": ("select * from pgreaper.reaper_claim('holds', 500, rescan => true)", None),
    "_agenda, rescan": ("select * from pgreaper._agenda(rescan => '{holds}')", None),
    "_sweep_step, a whole sweep": (
        "select pgreaper._sweep_step('holds', 500, null, 'bench', clock_timestamp(), null)",
        None,
    ),
}


@dataclass(frozen=True, slots=True)
class Look:
    """
    Cost of one look: buffers of the first and of the last in a session, milliseconds, records of WAL of the last.

    Whoever is the first to read a page may have to tidy it, which is a record of WAL too.
    """

    first: int
    buffers: int
    milliseconds: float
    wal: int


def look(dsn: str, query: str) -> Look:
    """Ask several times on a connection of its own; the last counts, when the session's caches are filled."""
    with psycopg.connect(dsn, autocommit=True, prepare_threshold=None) as connection:
        seen: list[dict[str, Any]] = []
        for _ in range(7):
            row: Any = connection.execute(f"explain (analyze, buffers, wal, format json) {query}".encode()).fetchone()
            seen.append(row[0][0]["Plan"])
            if seen[-1]["Actual Rows"] and query.startswith("select * from pgreaper.reaper_claim"):
                raise SystemExit(f"something was due: {query}")
    buffers = [plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] for plan in seen]
    return Look(
        buffers[0], buffers[-1], min(plan["Actual Total Time"] for plan in seen), seen[-1].get("WAL Records", 0)
    )


def watch(bench: Bench, cluster: Cluster, seconds: float) -> tuple[int, float, float, float]:
    """Statements of an idle daemon, bytes of WAL, and the CPU shares of its backend and its process."""
    bench.execute("alter database postgres set log_statement = 'all'")
    try:
        with daemons(bench.dsn, 1, POLL) as (daemon,):
            name, backend = bench.ask(
                "select application_name, pid from pg_stat_activity where application_name like 'pgreaper%'"
            )
            # Its first looks fill the caches.
            time.sleep(1)
            before = (_statements(cluster, name), bench.wal, on_processor(backend), on_processor(daemon.pid))
            time.sleep(seconds)
            after = (_statements(cluster, name), bench.wal, on_processor(backend), on_processor(daemon.pid))
    finally:
        bench.execute("alter database postgres reset log_statement")
    statements, wal, server, client = (b - a for a, b in zip(before, after, strict=True))
    return int(statements), wal, server / seconds, client / seconds


def idle(bench: Bench, cluster: Cluster, rows: int, dead: int, leased: int, seconds: float) -> list[str]:
    """Both tables; ``rows`` holds are not due yet, the daemon is watched for ``seconds``."""
    looks: list[tuple[object, ...]] = []
    watched: list[tuple[object, ...]] = []
    for name, buried in (("nothing due", 0), (f"{dead:,} dead letters and {leased:,} leased holds at the head", dead)):
        bench.lay(buried + (leased if buried else 0), future=rows)
        if buried:
            bench.bury(buried)
            for _ in range(0, leased, 1000):
                bench.execute("select count(*) from pgreaper.reaper_claim('holds', 1000, worker => 'bench')")
        for what, (query, most) in LOOKS.items():
            cost = look(bench.dsn, query)
            target = f"≤ {most}" if most else ""
            looks.append(
                (name, what, f"{cost.buffers:,}", target, f"{cost.first:,}", f"{cost.milliseconds:.2f}", cost.wal)
            )
            say(f"{name}: {what}: {cost.buffers:,} buffers, {cost.milliseconds:.2f} ms")
        statements, wal, server, client = watch(bench, cluster, seconds)
        say(f"{name}: a daemon: {statements} statements, {100 * (server + client):.2f} % CPU")
        watched.append((name, f"{seconds:g}", statements, f"{wal:,.0f}", f"{100 * server:.2f}", f"{100 * client:.2f}"))
    head = ("holds", "look", "buffers", "target", "buffers, new session", "ms, best", "WAL records")
    daemon = ("a daemon with", "seconds", "statements", "WAL of the server, bytes", "backend, % CPU", "process, % CPU")
    return [
        *table(head, looks, left=2),
        "",
        *table(daemon, [*watched, ("target", "", "", "0", "≤ 2 together", "")]),
    ]


def _statements(cluster: Cluster, name: str) -> int:
    """How many statements a session of this name has had logged."""
    text = (cluster.room / "log").read_text(errors="replace")
    return sum(line.startswith((f"{name}|LOG:  statement:", f"{name}|LOG:  execute ")) for line in text.splitlines())

"""
What a drain leaves behind: row versions of the target, dead tuples in our tables, WAL, memory of the worker.

Vacuum runs by the server's defaults, as it would for people.  The drain of the worker is a process of its own here.
"""

import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.common import BATCH, Bench, Cost, command, percentile, table
from bench.speed import say

if TYPE_CHECKING:
    from collections.abc import Callable

TABLES = ("claims", "transitions", "cursors", "failures", "events", "policies")

# What the statistics say was done to the target, and what is dead in our tables now, in their toast too.
DONE = "select n_tup_upd, n_tup_hot_upd, n_tup_ins, n_tup_del from pg_stat_user_tables where relname = 'holds'"
DEAD = """
select coalesce(sum((public.pgstattuple(c.oid::regclass)).dead_tuple_count), 0)::bigint,
       coalesce(sum((public.pgstattuple(nullif(c.reltoastrelid, 0)::regclass)).dead_tuple_count), 0)::bigint
  from pg_class as c
 where c.relnamespace = 'pgreaper'::regnamespace and c.relname = any (%s)
"""


def process(bench: Bench, memory: list[tuple[float, float]]) -> Cost:
    """A worker as a process, its memory watched: pairs of seconds and MB go to ``memory``; its CPU is not told."""
    wal, began = bench.wal, time.perf_counter()
    arguments = command("work", "--database-url", bench.dsn, "--batch", str(BATCH))
    worker = subprocess.Popen(arguments, stdout=subprocess.DEVNULL)
    status = Path(f"/proc/{worker.pid}/status")
    while worker.poll() is None:
        size = [line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmRSS")]
        if size:
            memory.append((time.perf_counter() - began, int(size[0]) / 1024))
        time.sleep(0.02)
    wall = time.perf_counter() - began
    if worker.returncode:
        raise SystemExit(f"the worker ended with {worker.returncode}")
    (holds,) = bench.ask("select coalesce(sum(holds), 0)::bigint from pgreaper.transitions")
    return Cost(int(holds), wall, 0.0, bench.wal - wal)


def books(bench: Bench, rows: int) -> list[str]:
    """All of it after ``rows`` holds."""
    bench.execute("create extension if not exists pgstattuple schema public")
    memory: list[tuple[float, float]] = []
    ways: dict[str, Callable[[], Cost]] = {
        "one bulk UPDATE": lambda: bench.bulk(rows),
        "reaper_sweep": bench.sweep,
        "pgreaper work": lambda: process(bench, memory),
    }
    plain = 0.0
    lines: list[tuple[object, ...]] = []
    for name, way in ways.items():
        bench.lay(rows)
        before = _done(bench)
        cost = way()
        if left := bench.left:
            raise SystemExit(f"{name} left {left} of {rows} holds")
        own, toast = bench.ask(DEAD, list(TABLES))
        updated, hot, inserted, deleted = (b - a for a, b in zip(before, _done(bench), strict=True))
        if inserted or deleted:
            raise SystemExit(f"{name} inserted {inserted} and deleted {deleted} rows of the target")
        plain = plain or cost.wal / rows
        lines.append(
            (
                name,
                f"{updated / rows:.4f}",
                f"{hot / rows:.2f}",
                f"{own:,}",
                f"{toast:,}",
                f"{cost.wal / rows:,.0f}",
                f"{cost.wal / rows / plain:.2f}",
            )
        )
        say(f"{name}: {cost.holds:,} holds in {cost.wall:.1f} s; dead: {own:,} and {toast:,}")
    lines.append(("target", "1", "", "< 1,000", "< 1,000", "", "≤ 1.5"))
    head = (
        "way",
        "row versions a hold",
        "of them HOT",
        "dead in our tables",
        "dead in their toast",
        "WAL bytes a hold",
        "of the UPDATE",
    )
    return [*table(head, lines), "", *_memory(memory, rows)]


def _done(bench: Bench) -> tuple[Any, ...]:
    # A backend that has ended has told all; our own statistics are those of before, unless we ask anew.
    bench.execute("select pg_stat_clear_snapshot()")
    return bench.ask(DONE)


def _memory(memory: list[tuple[float, float]], rows: int) -> list[str]:
    """The worker's memory in the course of its drain: medians of tenths of the time."""
    if len(memory) < 20:
        return ["The drain was too short to watch the worker's memory."]
    tenth = len(memory) // 10
    shown = {place: percentile([mb for _, mb in memory[place * tenth :][:tenth]], 0.5) for place in (1, 3, 5, 7, 9)}
    head = (
        "memory of the worker, MB",
        *(f"{place + 1}/10 of the drain" for place in shown),
        "most",
        "growth, tenth 4 on",
    )
    growth = shown[9] - shown[3]
    most = max(mb for _, mb in memory)
    line = (f"{rows:,} holds", *(f"{mb:.1f}" for mb in shown.values()), f"{most:.1f}", f"{growth:+.2f}")
    return table(head, [line, ("target", *[""] * len(shown), "≤ 60", "flat")])

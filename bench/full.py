"""
The long benchmarks: growth, fleets, what is left behind, idleness, and what the application notices.

Each part has a server of its own with the default settings, and a section of ``RESULTS-full.md`` that it replaces; the
other sections stay.  Run it with ``make bench-full``, on a machine that does nothing else.
"""

import argparse
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.application import application
from bench.books import books
from bench.common import Bench
from bench.fleet import fleet
from bench.growth import growth
from bench.idle import PREFIX, idle
from bench.speed import say
from pgreaper.embedded import Cluster, Setting


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything: rows and holds as numbers, times in seconds."""

    deep: int = 10_000_000
    sample: int = 100_000
    trail: int = 50_000_000
    dead: int = 100_000
    partitions: int = 1000
    fleet: int = 600_000
    most: int = 16
    books: int = 1_000_000
    leased: int = 10_000
    watch: float = 30
    application: int = 1_000_000
    future: int = 100_000
    rate: int = 200
    limit: int = 500
    quiet: float = 10


QUICK = Sizes(
    deep=800_000, sample=50_000, trail=5_000_000, fleet=100_000, books=300_000, watch=11, application=300_000, quiet=5
)


@dataclass(frozen=True, slots=True)
class Part:
    """One part: its title, how it is run, and which setting its size is."""

    title: str
    size: str
    run: Callable[[Bench, Cluster, Sizes], list[str]]
    autovacuum: bool = True
    settings: tuple[tuple[str, Setting], ...] = ()


PARTS = {
    "growth": Part(
        "Growth",
        "deep",
        lambda b, _, s: growth(b, s.deep, s.sample, s.trail, s.dead, s.partitions),
        autovacuum=False,
    ),
    "fleet": Part("Fleet", "fleet", lambda b, _, s: fleet(b, s.fleet, s.most)),
    "books": Part("What is left behind", "books", lambda b, _, s: books(b, s.books)),
    "idle": Part(
        "Idle",
        "future",
        lambda b, c, s: idle(b, c, s.future, s.dead, s.leased, s.watch),
        settings=(("log_line_prefix", PREFIX),),
    ),
    "application": Part(
        "Application",
        "application",
        lambda b, c, s: application(b, c, s.application, s.future, s.rate, s.limit, s.quiet),
    ),
}


def measure(part: Part, sizes: Sizes) -> str:
    """One section: what it was measured on, and its tables."""
    began = time.monotonic()
    with Cluster(settings=dict(part.settings)) as cluster:
        bench = Bench(cluster.dsn, autovacuum=part.autovacuum)
        lines = part.run(bench, cluster, sizes)
        bench.admin.close()
        about = (
            f"{getattr(sizes, part.size):,} rows; PostgreSQL {cluster.version} with its default settings (fsync and"
            f" synchronous commit on{'' if part.autovacuum else ', no autovacuum of the target'}), Python"
            f" {platform.python_version()}, {os.cpu_count()} cores, {platform.machine()};"
            f" {time.monotonic() - began:.0f} s with the laying of the rows; load of the machine at the end"
            f" {os.getloadavg()[0]:.1f}. `{shlex.join(['python', '-m', 'bench.full', *sys.argv[1:]])}`"
        )
    return "\n".join([f"## {part.title}", "", about, "", *lines, ""])


def keep(file: Path, title: str, section: str) -> None:
    """Put a section into the file, in the place of an earlier one of this title."""
    text = file.read_text() if file.exists() else ""
    _, *sections = text.split("\n## ")
    found = {kept.partition("\n")[0]: f"## {kept.rstrip()}\n" for kept in sections} | {title: section}
    order = [part.title for part in PARTS.values()]
    file.write_text("\n".join(["# Results of the long benchmarks\n", *(found[t] for t in order if t in found)]))


def main() -> None:
    """Measure the parts that are asked for, and write and print their sections."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS), help="which, with commas; default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="smaller sizes: some minutes instead of twenty")
    parser.add_argument(
        "--rows", type=_number, help="rows of the largest table of each part, instead of its usual size"
    )
    parser.add_argument("--sample", type=_number, help="growth: holds in a sample")
    parser.add_argument("--trail", type=_number, help="growth: holds in the trail")
    parser.add_argument("--dead", type=_number, help="growth, idle: dead letters at the head")
    parser.add_argument("--partitions", type=_number, help="growth: how many")
    parser.add_argument("--most", type=_number, help="fleet: how many at once at most")
    parser.add_argument("--watch", type=_seconds, help="idle: seconds for which a daemon is watched")
    parser.add_argument("--rate", type=_number, help="application: transactions a second")
    parser.add_argument("--limit", type=_number, help="application: the rate limit, holds a second")
    parser.add_argument("--quiet", type=_seconds, help="application: seconds with nothing running, before each drain")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("RESULTS-full.md"))
    options = parser.parse_args()
    names = options.parts.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    for name in names:
        part = PARTS[name]
        asked = {
            field: value for field in Sizes.__dataclass_fields__ if (value := getattr(options, field, None)) is not None
        }
        if options.rows:
            asked[part.size] = options.rows
        say(f"-- {part.title}")
        section = measure(part, _sizes(quick=options.quick, asked=asked))
        keep(options.output, part.title, section)
        sys.stdout.write(section + "\n")


def _number(text: str) -> int:
    """A number of things: one at least."""
    return max(int(text), 1)


def _seconds(text: str) -> float:
    """A length of time that can be measured in."""
    return max(float(text), 1.0)


def _sizes(*, quick: bool, asked: dict[str, float]) -> Sizes:
    usual = QUICK if quick else Sizes()
    return Sizes(**{field: asked.get(field, getattr(usual, field)) for field in Sizes.__dataclass_fields__})


if __name__ == "__main__":
    main()

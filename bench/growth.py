"""
What a hold costs when everything around it has grown.

Each condition drains a sample of holds and is compared with a base of this run: a table with no more than such a
sample in it, drained in the same way.  Base and condition take turns, some rounds, and their
medians count; partitions and an old snapshot have one run.
Conditions: a deep backlog, one deadline for all, an old snapshot, dead letters at the head, a long trail, partitions.
"""

from collections.abc import Callable
from contextlib import nullcontext

from bench.common import BATCH, Bench, Cost, median, table
from bench.speed import say

ROUNDS = 3

# The hand-written loop may never come to an end.
PATIENCE = 20.0

# A stretch of a trail, in rows of 500 holds; they are older than any that is due.  Each is counted in one row of the
# totals, so a transaction of all of them would never end.
TRAIL = """
insert into pgreaper.transitions
  (policy_id, token, worker, at, state, holds, keys, deadlines, first_deadline, last_deadline, lateness)
select p.policy_id, gen_random_uuid(), 'pgreaper/host/' || b %% 16, now() - b * interval '1 minute', 'expired', 500,
       k.keys, k.deadlines, now() - interval '90 days' - b * interval '1 minute',
       now() - interval '90 days' - b * interval '1 minute' + interval '50 s',
       array_fill(0, array[12]) || array[500] || array_fill(0, array[17])
  from generate_series(%s, %s) as b
 cross join pgreaper.policies as p
 cross join (select array_agg((1000000000 + g)::text) as keys,
                    array_agg(now() - interval '90 days' + g * interval '100 ms') as deadlines
               from generate_series(1, 500) as g) as k
 where p.name = 'holds';
"""
STRETCH = 1000

CLAIMS = """
insert into pgreaper.claims
  (token, policy_id, worker, first_deadline, last_deadline, holds, attempt, claimed_at, claim_until, started_at,
   finished_at, ending, expired)
select t.token, t.policy_id, t.worker, t.first_deadline, t.last_deadline, 500, 1, t.at, t.at + interval '1 minute',
       t.at, t.at, 'expired', 500
  from pgreaper.transitions as t;
vacuum analyze pgreaper.transitions;
vacuum analyze pgreaper.claims;
checkpoint
"""

HEAD = ("condition", "way", "holds drained", "µs CPU a hold", "of the base", "µs wall a hold", "of the base", "target")

BASE = "no more than the sample"


class Growth:
    """The conditions, measured one after the other; ``holds`` is how many make a sample."""

    def __init__(self, bench: Bench, holds: int) -> None:
        self.bench = bench
        self.holds = holds
        self.bases: dict[str, list[Cost]] = {}
        self.found: list[tuple[str, str, Cost, str, str]] = []
        self.notes: list[str] = []

    @property
    def window(self) -> int:
        """Holds of a deep backlog that are drained in one place: of each way a batch, and a sample each round."""
        return 2 * ROUNDS * (BATCH + self.holds)

    # -- how it is told

    def lines(self) -> list[str]:
        """The table of all that was measured, and notes."""
        body: list[tuple[object, ...]] = []
        for condition, way, cost, target, base in self.found:
            against = self.bases[base]
            processor = cost.processor_each / median(against, lambda c: c.processor_each)
            wall = cost.wall_each / median(against, lambda c: c.wall_each)
            body.append(_line(condition, way, cost, f"{processor:.2f}", f"{wall:.2f}", target))
        bases = [
            _line(
                f"{name.partition(': ')[2] or BASE}, median of {len(costs)}", name.partition(": ")[0], _typical(costs)
            )
            for name, costs in self.bases.items()
        ]
        return [*table(HEAD, [*bases, *body], left=2), "", *self.notes]

    def note(self, condition: str, way: str, costs: list[Cost], target: str, base: str | None = None) -> None:
        """Keep one result, the median of some."""
        cost = _typical(costs)
        say(f"{condition}: {way}: {cost.processor_each:.1f} µs CPU, {cost.wall_each:.1f} µs wall a hold")
        self.found.append((condition, way, cost, target, base or way))

    def base(self, way: str, cost: Cost) -> None:
        """Keep one base."""
        say(f"base: {way}: {cost.processor_each:.1f} µs CPU, {cost.wall_each:.1f} µs wall a hold")
        self.bases.setdefault(way, []).append(cost)

    # -- what is measured

    def small(self, rows: int | None = None) -> None:
        """The base: a table with one sample, or so many rows, drained in each way."""
        for way, run in self.ways().items():
            self.bench.lay(rows or self.holds)
            self.base(_of(way, rows), run(rows))

    def ways(self) -> dict[str, Callable[[int | None], Cost]]:
        """The two ways of pgreaper."""
        return {"sweep": self.bench.sweep, "work": self.bench.work}

    def both(
        self, condition: str, target: str, lay: Callable[[], None], rows: int | None = None, rounds: int = ROUNDS
    ) -> None:
        """The base, of so many rows where it is more than a sample, then both ways, each on a table laid for it."""
        found: dict[str, list[Cost]] = {way: [] for way in self.ways()}
        for _ in range(rounds):
            self.small(rows)
            for way, run in self.ways().items():
                lay()
                found[way].append(run(rows))
                if left := self.bench.left:
                    raise SystemExit(f"{condition}: {way} left {left} holds")
        for way, costs in found.items():
            self.note(condition, way, costs, target, _of(way, rows))

    def deep(self, rows: int) -> None:
        """
        A deep backlog: windows at its beginning, in its middle and at its end.

        What lies between two windows is expired by one UPDATE, which leaves as many dead entries behind as a drain
        does; its own cost per hold is told too, since a large table makes every UPDATE dearer.  Each call begins with a
        batch that walks over the dead entries of all that went before; a call for one batch tells what that costs, and
        is taken off a sample's cost.
        """
        for _ in range(ROUNDS):
            self.small()
        self.bench.lay(self.holds)
        self.base("bulk UPDATE", self.bench.bulk(self.holds))
        self.bench.lay(rows)
        windows = {"first": 0, "middle": rows // 2, "last": rows - self.window}
        for name, start in windows.items():
            if start:
                cost = self.bench.bulk(start)
                self.note(f"{rows:,} overdue, {cost.holds:,} at once", "bulk UPDATE", [cost], "none, to compare")
                self.bench.advance(start)
            openings: dict[str, list[Cost]] = {way: [] for way in self.ways()}
            found: dict[str, list[Cost]] = {way: [] for way in self.ways()}
            for _ in range(ROUNDS):
                for way, run in self.ways().items():
                    openings[way].append(run(BATCH))
                    found[way].append(run(self.holds) - openings[way][-1])
            for way, costs in found.items():
                walls = ", ".join(f"{1000 * opening.wall:,.0f}" for opening in openings[way])
                self.notes.append(f"- {rows:,} overdue, {name} window, {way}: a call for one batch took {walls} ms.")
                self.note(f"{rows:,} overdue, {name} {self.window:,}", way, costs, "≤ 1.15")
        if left := self.bench.left:
            raise SystemExit(f"the deep backlog has {left} holds left")

    def shared(self, rows: int) -> None:
        """One deadline for all rows, drained to the end."""
        self.both(f"one deadline for {rows:,}", "≤ 1.3", lambda: self.bench.lay(rows, shared=True), rows)

    def pinned(self, rows: int) -> None:
        """A snapshot older than the drain, so that no dead entry may be forgotten; the hand-written loop beside it."""
        for _ in range(ROUNDS):
            self.small(rows)
        loop = _of("loop by hand", rows)
        for old in (False, True):
            ways: dict[str, Callable[[int | None], Cost]] = self.ways() if old else {}
            ways["loop by hand"] = lambda _: self.bench.by_hand(PATIENCE)
            for way, run in ways.items():
                self.bench.lay(rows)
                with self.bench.pinned() if old else nullcontext():
                    cost = run(rows)
                if not old:
                    self.base(loop, cost)
                elif way == "loop by hand":
                    self.note(f"an old snapshot, {rows:,} overdue", way, [cost], "none, to compare", loop)
                    if cost.holds < rows:
                        self.notes.append(
                            f"- An old snapshot: the loop by hand was stopped after {PATIENCE:.0f} s, with"
                            f" {cost.holds:,} of {rows:,} holds done; the rest would have cost more each."
                        )
                else:
                    self.note(f"an old snapshot, {rows:,} overdue", way, [cost], "≤ 1.2", _of(way, rows))

    def buried(self, dead: int) -> None:
        """Dead letters before all that is due; a run passes by them once."""
        rows = 3 * self.holds

        def lay() -> None:
            self.bench.lay(dead + rows)
            self.bench.bury(dead)

        self.both(f"{dead:,} dead letters at the head", "≤ 1.1", lay, rows)

    def remembered(self, trail: int) -> None:
        """A long trail."""
        laid = False

        def lay() -> None:
            nonlocal laid
            self.bench.lay(self.holds, anew=not laid)
            if not laid:
                last = trail // 500
                for first in range(1, last + 1, STRETCH):
                    self.bench.execute(TRAIL % (first, min(first + STRETCH - 1, last)))
                for statement in CLAIMS.split(";\n"):
                    self.bench.execute(statement)
            laid = True

        self.both(f"{trail:,} holds in the trail", "≤ 1.15", lay)

    def partitioned(self, number: int) -> None:
        """
        Partitions by hash, so that each batch meets all of them, and by ranges of the key, as deadlines go.

        They have three tenths of a sample, against a base of as many: planning may take longer than all else.
        """
        hashed = [f"with (modulus {number}, remainder {n})" for n in range(number)]
        rows = 3 * self.holds // 10
        step = rows // number + 1
        ranges = [f"from ({n * step}) to ({(n + 1) * step})" for n in range(number)]
        for name, by, values in (("hash", "hash (id)", hashed), ("range", "range (id)", ranges)):

            def lay(by: str = by, values: list[str] = values) -> None:
                self.bench.lay(rows, partition=by, partitions=values)

            self.both(f"{number:,} partitions, by {name}", "≤ 2", lay, rows, rounds=1)


def growth(bench: Bench, rows: int, holds: int, trail: int, dead: int, partitions: int) -> list[str]:
    """All conditions; ``rows`` is the depth of the deep backlog, ``holds`` a sample."""
    growth = Growth(bench, holds)
    growth.shared(2 * holds)
    growth.pinned(3 * holds)
    growth.buried(dead)
    growth.partitioned(partitions)
    growth.remembered(trail)
    growth.deep(max(rows, 5 * growth.window))
    return growth.lines()


def _of(way: str, rows: int | None) -> str:
    """The name of a base."""
    return f"{way}: {rows:,} overdue" if rows else way


def _typical(costs: list[Cost]) -> Cost:
    """A cost of which each figure is the median."""
    return Cost(
        costs[0].holds,
        median(costs, lambda c: c.wall),
        median(costs, lambda c: c.processor),
        median(costs, lambda c: c.wal),
    )


def _line(
    condition: str, way: str, cost: Cost, processor: str = "", wall: str = "", target: str = ""
) -> tuple[object, ...]:
    each = (f"{cost.processor_each:.1f}", processor, f"{cost.wall_each:.1f}", wall)
    return (condition, way, f"{cost.holds:,}", *each, target)

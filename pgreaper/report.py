"""
The figures of a report: what became of the holds in a span of time, and whether the objectives were kept.

Owns the reading and the judgement; draws nothing.  All of it comes from pgreaper's own books, through their
indexes, and each query is bounded: where a bound was reached the figure says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from pgreaper.api import Reaper
from pgreaper.errors import InvalidInput
from pgreaper.records import DeadLetter, PolicyStatus
from pgreaper.text import count, duration, plural, visible

MOST_BUCKETS: Final = 96
MOST_POLICIES: Final = 50
# Statements of the trail read per bucket: for counts from the index alone, to judge and for quantiles from the rows.
_COUNTED: Final = 20_000
_JUDGED: Final = 5_000
_SAMPLED: Final = 200
_EVENTS: Final = 100_000
_CLAIMS: Final = 20_000
_LISTED: Final = 10
_LETTERS: Final = 20

_STEPS: Final = (
    *(1, 2, 5, 10, 15, 30),
    *(60, 120, 300, 600, 900, 1800),
    *(3600, 7200, 10800, 21600, 43200),
    *(86400, 2 * 86400, 7 * 86400, 28 * 86400, 91 * 86400, 365 * 86400),
)
OUTCOMES: Final = ("expired", "already-done", "not-eligible", "retry", "dead-letter")


@dataclass(frozen=True, slots=True)
class Bucket:
    """
    A piece of the span.

    ``over`` holds expired later than the objective; ``lateness`` is None where nothing expired.  ``bounded``:
    more happened than was read, so ``expired`` is a floor or the lateness that of a part.
    """

    start: datetime
    expired: int
    over: int
    lateness_p50: timedelta | None
    lateness_p99: timedelta | None
    lateness_max: timedelta | None
    bounded: bool


@dataclass(frozen=True, slots=True)
class Age:
    """So many due holds are that old now; a floor when ``capped``."""

    age: str
    due: int
    capped: bool


@dataclass(frozen=True, slots=True)
class Failures:
    """Failures of one class in the span: how many led to a retry, how many to a dead letter."""

    error_class: str
    sqlstate: str | None
    constraint_name: str | None
    retries: int
    dead_letters: int
    first_at: datetime
    last_at: datetime


@dataclass(frozen=True, slots=True)
class Batch:
    """A finished claim; ``ending`` is expired, released or taken-back."""

    worker: str | None
    holds: int
    claimed_at: datetime
    took: timedelta
    ending: str


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """
    One policy over the span.

    ``kept``: whether nothing expired, or waits now, later than the objective; None: nothing was due.
    ``verdict`` says it in words.  ``bounds`` are sentences about figures that are not complete.
    """

    policy: str
    owner: str
    objective: timedelta
    kept: bool | None
    verdict: str
    outcomes: dict[str, int]
    over: int
    taken_back: int
    lateness_p50: timedelta | None
    lateness_p99: timedelta | None
    lateness_max: timedelta | None
    status: PolicyStatus
    buckets: list[Bucket]
    backlog: list[Age]
    failures: list[Failures]
    dead_letters: list[DeadLetter]
    slowest: list[Batch]
    lost: list[Batch]
    bounds: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Report:
    """
    What happened from ``since`` to ``until``; ``at`` is when it was read, by the database clock.

    ``more``: so many policies were left out.
    """

    database: str
    at: datetime
    since: datetime
    until: datetime
    step: timedelta
    headline: str
    kept: bool | None
    policies: list[PolicyReport]
    more: int


def span(reaper: Reaper, since: str, until: str | None) -> tuple[datetime, datetime, datetime]:
    """
    The instants that these words mean, and the database's clock: ``24h`` (ago), ``7 days`` or ISO 8601, UTC without
    a zone.  Raises InvalidInput.
    """
    ((now,),) = reaper.rows("select pgreaper._clock()")
    begin = _instant(reaper, since, now, "--since")
    end = min(_instant(reaper, until, now, "--until"), now) if until else now
    if not begin < end:
        raise InvalidInput(
            "the report's time ends before it begins", hint="--since lies before --until, and in the past."
        )
    if end - begin > timedelta(days=20 * 366):
        raise InvalidInput("a report goes over 20 years at most")
    return begin, end, now


def _instant(reaper: Reaper, text: str, now: datetime, option: str) -> datetime:
    if len(text) > 9 and text[:4].isdigit() and text[4] == "-":
        try:
            found = datetime.fromisoformat(text)
        except ValueError:
            pass
        else:
            return found if found.tzinfo else found.replace(tzinfo=UTC)
    elif all(c.isalnum() or c in " .:" for c in text):
        try:
            ((ago,),) = reaper.rows("select extract(epoch from %s::interval)::double precision", text)
            return now - timedelta(seconds=ago)
        except (InvalidInput, OverflowError):
            pass
        except Exception as error:
            if getattr(error, "sqlstate", None) not in ("22007", "22008", "22015"):
                raise
    raise InvalidInput(
        f"{option}: {visible(text)} is neither a length of time nor an instant",
        hint="Examples: 24h, '7 days', 2026-01-31, 2026-01-31T12:00Z.",
    )


def gather(reaper: Reaper, since: datetime, until: datetime, now: datetime, policies: Sequence[str] | None) -> Report:
    """Read the report of these policies, or of all; those that are not registered are left out."""
    names = None if policies is None else list(policies)
    seconds = (until - since).total_seconds()
    step = next((s for s in _STEPS if seconds / s <= MOST_BUCKETS), _STEPS[-1])
    start = datetime.fromtimestamp(since.timestamp() // step * step, UTC)
    found = reaper.rows(
        "select p.policy_id, p.name, p.owner, p.objective from pgreaper.policies as p where p.unregistered_at is null"
        " and (%s::text[] is null or p.name = any(%s::text[])) order by p.name", names, names,
    )  # fmt: skip
    ((database,),) = reaper.rows("select current_database()::text")
    chosen = found[:MOST_POLICIES]
    states = {s.policy: s for s in reaper.status([row[1] for row in chosen])} if chosen else {}
    times = (since, until, start, timedelta(seconds=step))
    told = [
        _policy(reaper, number, name, owner, objective, states[name], times, now)
        for number, name, owner, objective in chosen
        if name in states
    ]
    # The worst first.
    told.sort(key=lambda p: ((False, True, None).index(p.kept), -p.over, p.policy))
    headline, kept = _headline(told)
    return Report(database, now, since, until, timedelta(seconds=step), headline, kept, told, len(found) - len(chosen))


_Times = tuple[datetime, datetime, datetime, timedelta]


def _policy(
    reaper: Reaper,
    number: int,
    name: str,
    owner: str,
    objective: timedelta,
    status: PolicyStatus,
    times: _Times,
    now: datetime,
) -> PolicyReport:
    since, until, _, _ = times
    buckets, quantiles, bounds = _buckets(reaper, number, times)
    kinds, failures, complete = _events(reaper, number, since, until)
    if not complete:
        bounds.append(f"conflicts and failures: the newest {_EVENTS:,} only")
    slowest, lost, complete = _claims(reaper, number, since, until)
    if not complete:
        bounds.append(f"slowest batches: of the newest {_CLAIMS:,} only")
    letters = reaper.dead_letters(name, limit=_LETTERS) if status.dead else []
    if status.dead > len(letters):
        bounds.append(f"dead letters: the newest {len(letters)} of {count(status.dead, capped=status.dead >= 10_000)}")
    backlog = [
        Age(*row)
        for row in reaper.rows(
            "select age, due, capped from pgreaper.backlog where policy = %s::text order by position", name
        )
    ]
    outcomes = {"expired": sum(b.expired for b in buckets)} | {kind: kinds.get(kind, 0) for kind in OUTCOMES[1:]}
    over = sum(b.over for b in buckets)
    longest = max((b.lateness_max for b in buckets if b.lateness_max is not None), default=None)
    waits = status.oldest_due if now - until < timedelta(minutes=1) else None
    all_of_it = _complete(bounds)
    kept, verdict = _verdict(outcomes["expired"], over, longest, objective, waits, status, all_of_it=all_of_it)
    return PolicyReport(
        policy=name,
        owner=owner,
        objective=objective,
        kept=kept,
        verdict=verdict,
        outcomes=outcomes,
        over=over,
        taken_back=kinds.get("taken-back", 0),
        lateness_p50=_least(quantiles[0], longest),
        lateness_p99=_least(quantiles[1], longest),
        lateness_max=longest,
        status=status,
        buckets=buckets,
        backlog=backlog,
        failures=failures,
        dead_letters=letters,
        slowest=slowest,
        lost=lost,
        bounds=bounds,
    )


def _least(value: timedelta | None, most: timedelta | None) -> timedelta | None:
    """A quantile from a histogram is coarser than the one greatest value."""
    return value if value is None or most is None else min(value, most)


def _buckets(
    reaper: Reaper, number: int, times: _Times
) -> tuple[list[Bucket], tuple[timedelta | None, timedelta | None], list[str]]:
    since, until, start, step = times
    size = -((start - until) // step)
    rows = reaper.rows(
        "select b.i, c.holds, c.capped, l.statements, l.over, l.latest, h.statements, h.counts,"
        " pgreaper._quantile(h.counts, 0.5), pgreaper._quantile(h.counts, 0.99)"
        "  from pgreaper.policies as p"
        " cross join lateral (select i, greatest(%s::timestamptz, %s::timestamptz + (i * %s::interval)) as since,"
        "                            least(%s::timestamptz, %s::timestamptz + ((i + 1) * %s::interval)) as until"
        "                       from generate_series(0, %s::integer - 1) as i) as b"
        " cross join lateral ("
        "   select coalesce(sum(w.holds), 0)::bigint as holds, count(*) > %s::integer as capped"
        "     from (select t.holds from pgreaper.transitions as t"
        "            where t.policy_id = p.policy_id and t.at >= b.since and t.at < b.until"
        "            limit %s::integer + 1) as w) as c"
        "  left join lateral ("
        "   select count(*) as statements, coalesce(sum(w.over), 0)::bigint as over, max(w.latest) as latest"
        "     from (select t.at - p.grace - greatest(t.first_deadline, (t.at - interval '100 years')) as latest,"
        "                  case when t.first_deadline >= (t.at - p.grace - p.objective) then 0"
        "                       when t.last_deadline < (t.at - p.grace - p.objective) then t.holds"
        "                       else (select count(*) from unnest(t.deadlines) as d (deadline)"
        "                              where d.deadline < (t.at - p.grace - p.objective)) end as over"
        "             from pgreaper.transitions as t"
        "            where t.policy_id = p.policy_id and t.at >= b.since and t.at < b.until"
        "            order by t.at desc limit %s::integer) as w) as l on c.holds > 0"
        "  left join lateral ("
        "   select max(s.statements) as statements, array_agg(s.holds order by s.place) as counts"
        "     from (select u.place, sum(u.holds)::bigint as holds, count(*) as statements"
        "             from (select t.lateness from pgreaper.transitions as t"
        "                    where t.policy_id = p.policy_id and t.at >= b.since and t.at < b.until"
        "                    order by t.at desc limit %s::integer) as w"
        "            cross join lateral unnest(w.lateness) with ordinality as u (holds, place) group by 1) as s) as h"
        "   on c.holds > 0"
        " where p.policy_id = %s::integer order by b.i",
        since, start, step, until, start, step, size, _COUNTED, _COUNTED, _JUDGED, _SAMPLED, number,
    )  # fmt: skip
    buckets, whole = [], [0] * 30
    capped = judged = sampled = False
    for i, holds, stopped, statements, over, latest, drawn, counts, p50, p99 in rows:
        part = drawn == _SAMPLED
        capped, judged, sampled = capped or stopped, judged or statements == _JUDGED, sampled or part
        for place, n in enumerate(counts or ()):
            whole[place] += n
        buckets.append(
            Bucket(
                start + i * step, holds, over or 0, _least(p50, latest), _least(p99, latest), latest, stopped or part
            )
        )
    quantiles = (None, None)
    if any(whole):
        (quantiles,) = reaper.rows(
            "select pgreaper._quantile(%s::bigint[], 0.5), pgreaper._quantile(%s::bigint[], 0.99)", whole, whole
        )
    bounds = []
    if capped:
        bounds.append(f"expired: of a bar no more than {_COUNTED:,} statements were counted")
    if judged:
        bounds.append(f"late and latest: of a bar the newest {_JUDGED:,} statements only")
    if sampled:
        bounds.append(f"p50 and p99: of a bar the newest {_SAMPLED} statements only")
    return buckets, quantiles, bounds


def _events(
    reaper: Reaper, number: int, since: datetime, until: datetime
) -> tuple[dict[str, int], list[Failures], bool]:
    rows = reaper.rows(
        "select e.kind, e.error_class, e.sqlstate, e.constraint_name, count(*), min(e.at), max(e.at)"
        "  from (select e.kind, e.error_class, e.sqlstate, e.constraint_name, e.at from pgreaper.events as e"
        "         where e.policy_id = %s::integer and e.at >= %s::timestamptz and e.at < %s::timestamptz"
        "         order by e.at desc limit %s::integer) as e"
        " group by 1, 2, 3, 4 order by 5 desc, 1, 2", number, since, until, _EVENTS,
    )  # fmt: skip
    kinds: dict[str, int] = {}
    by_class: dict[tuple[Any, ...], list[Any]] = {}
    for kind, *what, holds, first, last in rows:
        kinds[kind] = kinds.get(kind, 0) + holds
        if kind in ("retry", "dead-letter"):
            entry = by_class.setdefault(tuple(what), [0, 0, first, last])
            entry[kind == "dead-letter"] += holds
            entry[2:] = [min(entry[2], first), max(entry[3], last)]
    failures = [Failures(str(c or "unknown"), s, k, *entry) for (c, s, k), entry in by_class.items()]
    failures.sort(key=lambda f: (-f.retries - f.dead_letters, f.error_class))
    return kinds, failures, sum(kinds.values()) < _EVENTS


def _claims(reaper: Reaper, number: int, since: datetime, until: datetime) -> tuple[list[Batch], list[Batch], bool]:
    inner = (
        "(select k.worker, k.holds, k.claimed_at, k.finished_at - k.claimed_at as took, k.ending, k.finished_at"
        "   from pgreaper.claims as k where k.policy_id = %s::integer and k.finished_at is not null"
        "    and k.finished_at >= %s::timestamptz and k.finished_at < %s::timestamptz"
        "  order by k.finished_at desc limit %s::integer) as k"
    )
    of = (number, since, until, _CLAIMS)
    what = "k.worker, k.holds, k.claimed_at, k.took, k.ending"
    ((all_,),) = reaper.rows(f"select count(*) from {inner}", *of)  # noqa: S608  constants of ours
    slowest = reaper.rows(f"select {what} from {inner} order by k.took desc limit %s::integer", *of, _LISTED)  # noqa: S608
    lost = reaper.rows(
        f"select {what} from {inner} where k.ending = 'taken-back' order by k.finished_at desc limit %s::integer",  # noqa: S608
        *of,
        _LISTED,
    )
    return [Batch(*row) for row in slowest], [Batch(*row) for row in lost], all_ < _CLAIMS


# -- judging


def _complete(bounds: Sequence[str]) -> bool:
    """Whether all of the trail was judged."""
    return not any(bound.startswith(("expired", "late")) for bound in bounds)


def _verdict(
    expired: int,
    over: int,
    longest: timedelta | None,
    objective: timedelta,
    waits: timedelta | None,
    status: PolicyStatus,
    *,
    all_of_it: bool,
) -> tuple[bool | None, str]:
    """Whether the objective was kept, and a sentence that says so."""
    promised = duration(objective)
    late_now = waits is not None and waits > objective
    parts = []
    if over:
        least = "" if all_of_it else "at least "
        parts.append(f"{least}{count(over)} of {plural(expired, 'hold')} expired later than the promised {promised},"
                     f" the latest {duration(longest)} after it was due")  # fmt: skip
    elif expired and not all_of_it:
        parts.append(f"of {plural(expired, 'hold')} none that was looked at expired later than the promised {promised};"
                     f" the latest of these took {duration(longest)}")  # fmt: skip
    elif expired:
        parts.append(f"all of {plural(expired, 'hold')} expired within the promised {promised};"
                     f" the latest took {duration(longest)}")  # fmt: skip
    if late_now:
        parts.append(f"now {count(status.due, capped=status.due_capped)} are due, the oldest for {duration(waits)}")
    if status.state in ("broken", "suspended", "paused"):
        parts.append(f"now it is {status.state}")
    if status.dead:
        parts.append(plural(status.dead, "dead letter") + " to be looked at")
    kept = None if not expired and not late_now else not over and not late_now
    if status.state in ("broken", "suspended"):
        kept = False
    return kept, "; ".join(parts) or "nothing was due"


def _headline(policies: Sequence[PolicyReport]) -> tuple[str, bool | None]:
    if not policies:
        return "No policy is registered.", None
    broken = [p for p in policies if p.kept is False]
    kept = [p for p in policies if p.kept]
    if broken and len(policies) == 1:
        return "The objective was not kept.", False
    if broken:
        names = ", ".join(visible(p.policy, 40) for p in broken[:3])
        more = f" and {len(broken) - 3} more" if len(broken) > 3 else ""
        return f"{len(broken)} of {len(policies)} policies did not keep their objective: {names}{more}.", False
    if kept:
        what = "The objective was kept" if len(policies) == 1 else "All objectives were kept"
        return what + ("." if all(_complete(p.bounds) for p in kept) else ", as far as was looked."), True
    return "Nothing was due in this time.", None

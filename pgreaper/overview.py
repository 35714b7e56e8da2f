"""
What an operator asks at night: what is late, since when, why, whose it is, and what to do next.

Reads the views of schema ``pgreaper`` and judges what they say; draws nothing.  Every figure is an index probe or
a bounded count, and none depends on a worker being alive: what counts is how long a hold has waited.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from pgreaper.api import Reaper
from pgreaper.commands import command
from pgreaper.records import PolicyStatus, RelayStatus
from pgreaper.text import count, duration, instant, plural, visible

SKEW_TOLERATED: Final = timedelta(seconds=1)
"""A worker's clock may be that far from the database's before anybody is told.  Nothing is decided by it."""

CAP: Final = 10_000
"""Where counting stops, as in the views."""

STATES: Final = ("broken", "suspended", "late", "paused", "dead letters", "on time", "passive", "idle")
"""The state of a policy in a word, the worst first."""

RELAY_LAG: Final = timedelta(minutes=5)
"""An event may wait for its queue that long before anybody is told: a relay may be a cron job."""

# Minutes over which the rate is taken; seconds after the last transition in which a policy counts as worked on.
_RECENT: Final = 3
_LATELY: Final = 15.0
_WORKER = re.compile(r"pgreaper/(.+)/[0-9]+")


@dataclass(frozen=True, slots=True)
class Session:
    """A worker that is connected to this database now."""

    worker: str
    host: str
    connected_at: datetime


@dataclass(frozen=True, slots=True)
class Age:
    """So many due holds are that old; a floor when ``capped``."""

    age: str
    due: int
    capped: bool


@dataclass(frozen=True, slots=True)
class Minute:
    """Transitions of one minute."""

    minute: datetime
    expired: int


@dataclass(frozen=True, slots=True)
class Kind:
    """Dead letters that failed alike; ``since``: when the first of them died."""

    error_class: str
    sqlstate: str | None
    constraint_name: str | None
    holds: int
    since: datetime


@dataclass(frozen=True, slots=True)
class Lease:
    """An active claim; ``lapsed``: it has run out and nobody has taken it back."""

    worker: str | None
    holds: int
    attempt: int
    claimed_at: datetime
    claim_until: datetime
    lapsed: bool


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that is wrong: what, why, since when (if known), and the command that comes next."""

    state: str
    what: str
    why: str
    since: datetime | None
    next: str | None


@dataclass(frozen=True, slots=True)
class View:
    """
    A policy as it is now.

    ``per_minute``: transitions a minute, over the last ones.
    ``waited`` is how long the hold has been due that has waited longest for somebody: a free one, one of a lease that
    lapsed, or one whose retry is overdue (then since the retry's time); ``waited_for`` says which: free, lapsed, retry.
    """

    status: PolicyStatus
    state: str
    waited: timedelta | None
    waited_for: str | None
    notices: list[Notice]
    backlog: list[Age]
    activity: list[Minute]
    per_minute: float
    dead_letters: list[Kind]
    leases: list[Lease]
    next_retry: datetime | None
    paused_at: datetime | None
    paused_by: str | None
    suspended_since: datetime | None
    suspended_until: datetime | None
    last_worker: str | None

    @property
    def late(self) -> bool:
        """Whether a hold has waited for longer than the policy's objective."""
        return self.waited is not None and self.waited > self.status.objective

    @property
    def needs_somebody(self) -> bool:
        """Whether a person has something to do."""
        return bool(self.notices)


@dataclass(frozen=True, slots=True)
class Overview:
    """The policies, the worst first, and who works on them; ``at`` by the database clock."""

    at: datetime
    database: str
    workers: list[Session]
    policies: list[View]


@dataclass(frozen=True, slots=True)
class Waiting:
    """What the view ``status`` does not say about a policy; see the columns of the statement."""

    at: datetime
    paused_at: datetime | None
    paused_by: str | None
    suspended_since: datetime | None
    suspended_until: datetime | None
    last_worker: str | None
    lapsed: timedelta | None
    next_retry: datetime | None


def look(reaper: Reaper, policies: Sequence[str] | None = None) -> Overview:
    """How these policies (default: all) are doing; names that are not registered are left out."""
    names = None if policies is None else list(policies)
    status = reaper.status(names)
    waiting = wait(reaper, names)
    ages: dict[str, list[Age]] = {}
    for name, *age in reaper.rows(
        "select policy, age, due, capped from pgreaper.backlog"
        " where %s::text[] is null or policy = any(%s::text[]) order by policy, position", names, names,
    ):  # fmt: skip
        ages.setdefault(name, []).append(Age(*age))
    minutes: dict[str, list[Minute]] = {}
    for name, *minute in reaper.rows(
        "select policy, minute, expired from pgreaper.activity"
        " where %s::text[] is null or policy = any(%s::text[]) order by policy, minute", names, names,
    ):  # fmt: skip
        minutes.setdefault(name, []).append(Minute(*minute))
    kinds = _kinds(reaper, [s.policy for s in status if s.dead])
    leases: dict[str, list[Lease]] = {}
    for name, *lease in reaper.rows(
        "select policy, worker, holds, attempt, claimed_at, claim_until, lapsed from pgreaper.leases"
        " where %s::text[] is null or policy = any(%s::text[]) order by claim_until limit 1000", names, names,
    ):  # fmt: skip
        leases.setdefault(name, []).append(Lease(*lease))
    relays: dict[str, list[RelayStatus]] = {}
    for relay in reaper.relays():
        relays.setdefault(relay.policy, []).append(relay)
    ((at, database),) = reaper.rows("select pgreaper._clock(), current_database()::text")
    workers = _sessions(reaper)

    views = []
    for s in status:
        known = waiting.get(s.policy)
        if known is None:
            continue  # registered between two statements: the next look has it
        waited, waited_for = longest(s, known)
        view = View(
            status=s,
            state="",
            waited=waited,
            waited_for=waited_for,
            notices=[],
            backlog=ages.get(s.policy, []),
            activity=minutes.get(s.policy, []),
            per_minute=_rate(minutes.get(s.policy, []), at),
            dead_letters=kinds.get(s.policy, []),
            leases=leases.get(s.policy, []),
            next_retry=known.next_retry,
            paused_at=known.paused_at,
            paused_by=known.paused_by,
            suspended_since=known.suspended_since,
            suspended_until=known.suspended_until,
            last_worker=known.last_worker,
        )
        views.append(_judged(view, at, workers, relays.get(s.policy, [])))
    views.sort(key=_badness)
    return Overview(at, database, workers, views)


def wait(reaper: Reaper, policies: Sequence[str] | None = None) -> dict[str, Waiting]:
    """Since when and for whom each of these policies (default: all) waits."""
    names = None if policies is None else list(policies)
    rows = reaper.rows(
        "select p.name, n.now, p.paused_at,"
        " (select e.actor from pgreaper.events as e"
        "   where e.policy_id = p.policy_id and e.at = p.paused_at and e.kind = 'pause' limit 1),"
        " (select s.at from (select e.at, e.kind from pgreaper.events as e"
        "                     where e.policy_id = p.policy_id order by e.at desc limit 1000) as s"
        "   where s.kind = 'suspend' limit 1),"
        " c.suspended_until,"
        " (select t.worker from pgreaper.transitions as t where t.policy_id = p.policy_id order by t.at desc limit 1),"
        " (select n.now - p.grace - greatest(min(k.first_deadline), n.now - interval '100 years')"
        "    from pgreaper.claims as k"
        "   where k.policy_id = p.policy_id and k.finished_at is null and k.claim_until <= n.now"
        "  having count(*) > 0),"
        " r.not_before"
        "  from pgreaper.policies as p"
        " cross join lateral (select pgreaper._clock() as now) as n"
        "  left join pgreaper.cursors as c on c.policy_id = p.policy_id"
        " cross join lateral (select min(f.not_before) as not_before from pgreaper.failures as f"
        "                      where f.policy_id = p.policy_id and f.not_before < 'infinity') as r"
        " where p.unregistered_at is null and (%s::text[] is null or p.name = any(%s::text[]))",
        names, names,
    )  # fmt: skip
    return {str(name): Waiting(*row) for name, *row in rows}


def longest(status: PolicyStatus, waiting: Waiting) -> tuple[timedelta | None, str | None]:
    """How long the hold that has waited longest for somebody has been due, and what it waits for."""
    # What a dead worker had leased is nobody's, though it is not free until the next claim takes it back; and a retry
    # whose time has come waits like any other hold.
    left_behind = waiting.lapsed is not None and status.oldest_due is not None and waiting.lapsed >= status.oldest_due
    found = [
        (waited, kind)
        for waited, kind in (
            (status.oldest_due, "lapsed" if left_behind else "free"),
            (status.oldest_retry, "retry"),
        )
        if waited is not None and waited > timedelta(0)
    ]
    return max(found, default=(None, None), key=lambda pair: pair[0])


def _rate(activity: list[Minute], at: datetime) -> float:
    """Transitions a minute, over the last few and the one that is not over."""
    last = activity[-1 - _RECENT :]
    if not last:
        return 0.0
    return 60 * sum(minute.expired for minute in last) / max((at - last[0].minute).total_seconds(), 60.0)


def _sessions(reaper: Reaper) -> list[Session]:
    """Workers, told by their names; commands that only look have names of another form, and we are not counted."""
    rows = reaper.rows(
        "select a.application_name, a.backend_start from pg_stat_activity as a"
        " where a.datname = current_database() and a.pid <> pg_backend_pid()"
        "   and starts_with(a.application_name, 'pgreaper/') order by a.application_name, a.backend_start"
    )
    found = [(str(name), _WORKER.fullmatch(name), since) for name, since in rows]
    return [Session(name, match[1], since) for name, match, since in found if match]


def _kinds(reaper: Reaper, policies: list[str]) -> dict[str, list[Kind]]:
    found: dict[str, list[Kind]] = {}
    for name, *kind in reaper.rows(
        "select p.name, d.error_class, d.sqlstate, d.constraint_name, count(*), min(d.failed_at)"
        "  from pgreaper.policies as p"
        " cross join lateral (select f.error_class, f.sqlstate, f.constraint_name, f.failed_at"
        "    from pgreaper.failures as f"
        "   where f.policy_id = p.policy_id and f.not_before = 'infinity' and f.discarded_at is null limit 10000) as d"
        " where p.name = any(%s::text[]) and p.unregistered_at is null"
        " group by 1, 2, 3, 4 order by 5 desc, 2, 3, 4", policies,
    ) if policies else []:  # fmt: skip
        found.setdefault(name, []).append(Kind(*kind))
    return found


# -- judging


def _judged(view: View, at: datetime, workers: list[Session], relays: list[RelayStatus]) -> View:
    """The view with its state and what is to be said about it, the worst first."""
    from dataclasses import replace

    s = view.status
    notices = []
    if s.state == "broken":
        notices.append(Notice("broken", "the target cannot be read", s.reason or "", None, command("doctor", s.policy)))
    if s.state == "suspended":
        notices.append(_suspended(view, at))
    if s.state == "paused":
        notices.append(_paused(view))
    elif view.late and s.state == "active":
        notices.append(_late(view, at, workers))
    if s.dead:
        notices.append(_dead(view))
    if s.clock_skew is not None and abs(s.clock_skew) > SKEW_TOLERATED:
        notices.append(Notice("clock", skew(s.clock_skew), "nothing is decided by it, its own log has wrong times",
                              None, None))  # fmt: skip
    notices += [notice for relay in relays for notice in _relay(relay, at)]
    if notices and notices[0].state in STATES:
        state = notices[0].state
    elif s.state == "passive":
        state = "passive"
    else:
        state = "on time" if s.due or s.leased or s.retrying or any(m.expired for m in view.activity) else "idle"
    return replace(view, state=state, notices=notices)


def _badness(view: View) -> tuple[int, float, str]:
    """Sorts the worst first: by state, then by how many times the objective a hold has waited."""
    waited = view.waited.total_seconds() if view.waited else 0.0
    return STATES.index(view.state), -waited / max(view.status.objective.total_seconds(), 1.0), view.status.policy


def _suspended(view: View, at: datetime) -> Notice:
    s = view.status
    again = ""
    if view.suspended_until is not None:
        left = (view.suspended_until - at).total_seconds()
        again = f"; tried again in {duration(max(left, 0.0))}" if left > 0 else "; the next worker tries again"
    late = f", and the oldest has waited {duration(view.waited)}" if view.late else ""
    return Notice(
        "suspended",
        f"no hold can be expired{late}",
        f"{s.reason}; no hold is charged, and it goes on by itself when the cause is gone{again}",
        view.suspended_since,
        command("doctor", s.policy),
    )


def _paused(view: View) -> Notice:
    who = f"by {view.paused_by}" if view.paused_by else "by somebody"
    reason = f": {view.status.reason}" if view.status.reason else ", who gave no reason"
    late = f"; the oldest hold has waited {duration(view.waited)}" if view.late else ""
    return Notice("paused", f"nothing is claimed{late}", who + reason, view.paused_at,
                  command("resume", view.status.policy))  # fmt: skip


def _late(view: View, at: datetime, workers: list[Session]) -> Notice:
    s = view.status
    assert view.waited is not None  # noqa: S101
    due = f"{count(s.due, capped=s.due_capped)} due, " if s.due else ""
    what = f"{due}{_WAITS[view.waited_for or 'free']} {duration(view.waited)}; promised is {duration(s.objective)}"
    why, next_ = _reason(view, at, workers)
    # The excess may reach back beyond what Python can tell; the view stops at 100 years.
    return Notice("late", what, why, at - (view.waited - s.objective), next_)


_WAITS = {
    "free": "the oldest for",
    "lapsed": "and a worker left holds behind that are overdue for",
    "retry": "and a retry is overdue for",
}


def _reason(view: View, at: datetime, workers: list[Session]) -> tuple[str, str]:
    """Why a policy is late, as far as the data tells, and what to do."""
    s = view.status
    running = [lease for lease in view.leases if not lease.lapsed]
    last = f"the last transition was {duration(_since(s.last_success, at))} ago" if s.last_success else \
        "nothing has ever been expired"  # fmt: skip
    if s.last_success and view.last_worker:
        last += f", by {visible(view.last_worker, 60)}"
    if view.per_minute >= 1 and _since(s.last_success, at) < _LATELY:
        worked = f"it is worked on: {view.per_minute:,.0f} a minute"
        if s.due_capped or s.due is None or s.due > view.per_minute:
            left = "" if s.due_capped or not s.due else f", {duration(60 * s.due / view.per_minute)} to go"
            return worked + left, command("work", s.policy)
        return f"{worked}; what stays all the same is locked by another transaction", command("doctor", s.policy)
    if running:
        oldest = min(running, key=lambda lease: lease.claimed_at)
        who = visible(oldest.worker or "somebody", 60)
        held = f"{plural(oldest.holds, 'hold')} since {duration(_since(oldest.claimed_at, at))}"
        return f"{who} has {held} and settles none; {last}", command("doctor", s.policy)
    if workers:
        return f"{plural(len(workers), 'worker')} connected, but {last}", command("doctor", s.policy)
    return f"nobody works: no worker is connected, and {last}", command("work", s.policy)


def _since(moment: datetime | None, at: datetime) -> float:
    return max((at - moment).total_seconds(), 0.0) if moment is not None else 0.0


def _dead(view: View) -> Notice:
    s = view.status
    shown = view.dead_letters[:3]
    why = ", ".join(f"{k.holds:,} {named(k)}" for k in shown)
    if len(view.dead_letters) > len(shown):
        why += f" and {plural(len(view.dead_letters) - len(shown), 'other kind')}"
    if s.dead >= CAP:
        why = f"of the {CAP:,} that were looked at: {why}"
    since = min((k.since for k in view.dead_letters), default=None)
    what = f"{count(s.dead, capped=s.dead >= CAP)} {'hold was' if s.dead == 1 else 'holds were'} given up"
    return Notice("dead letters", what, why, since, command("dead list", s.policy))


def _relay(relay: RelayStatus, at: datetime) -> list[Notice]:
    """Events that do not reach their queue, and those that it would not have."""
    name, found = visible(relay.relay, 60), []
    waiting = count(relay.waiting, capped=relay.waiting_capped) + (" event" if relay.waiting == 1 else " events")
    waited = relay.oldest_waiting or timedelta(0)
    last = f"it last took one {duration(_since(relay.last_delivered_at, at))} ago" if relay.last_delivered_at else \
        "it has never taken one"  # fmt: skip
    if relay.waiting and relay.trouble is not None:
        what = f"{waiting} of relay {name} cannot be delivered, the oldest for {duration(waited)}"
        found.append(Notice("relay", what, f"its queue: {visible(relay.trouble, 60)}; {last}",
                            relay.trouble_since, command("relays list", relay.relay)))  # fmt: skip
    elif relay.waiting and waited > RELAY_LAG:
        what = f"{waiting} of relay {name} are not delivered, the oldest for {duration(waited)}"
        found.append(Notice("relay", what, f"nobody runs it, or not often enough; {last}",
                            at - (waited - RELAY_LAG), command("relays list", relay.relay)))  # fmt: skip
    if relay.dead:
        events = f"{relay.dead:,} event was" if relay.dead == 1 else f"{count(relay.dead)} events were"
        found.append(Notice("relay", f"{events} given up by relay {name}", "its queue would not have them", None,
                            command("relays dead", relay.relay)))  # fmt: skip
    return found


def named(kind: Kind) -> str:
    """How it failed: class, SQLSTATE, constraint."""
    return visible(" ".join(p for p in (kind.error_class, kind.sqlstate, kind.constraint_name) if p), 80)


def skew(value: timedelta) -> str:
    """A worker's clock against the database's."""
    return (
        f"a worker's clock is {duration(abs(value))} {'ahead of' if value > timedelta(0) else 'behind'} the database's"
    )


def sentence(notice: Notice) -> str:
    """A notice as text without its command."""
    since = f" since {instant(notice.since)}" if notice.since is not None else ""
    return f"{notice.state}{since}: {notice.what}. {notice.why}"

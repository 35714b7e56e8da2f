"""``pgreaper check``: one line and an exit code, for probes and for monitors of cron jobs."""

from dataclasses import dataclass
from typing import Any

import click

from pgreaper.api import Reaper
from pgreaper.cli.common import common_options, database, emit, unknown_policy
from pgreaper.overview import CAP, Waiting, longest, wait
from pgreaper.records import PolicyStatus, RelayStatus
from pgreaper.render import show_line
from pgreaper.text import count, duration, visible

_NAME = "pgreaper/check"


@dataclass(frozen=True, slots=True)
class Finding:
    """
    A limit that a policy crosses, or that cannot be judged.

    ``kind``: unreadable, late, dead, backlog or relay.  ``value`` and ``limit`` are seconds for late and for relay,
    else holds; ``value`` is a floor when ``capped``.  ``times``: by how many times the limit is crossed, to tell which
    is worst.
    """

    policy: str
    owner: str
    kind: str
    value: float | None
    limit: float | None
    capped: bool
    state: str
    reason: str | None
    waited_for: str | None
    relay: str | None = None

    @property
    def times(self) -> float:
        """How bad it is; what cannot be judged is the worst."""
        if self.value is None or self.limit is None:
            return float("inf")
        return self.value / max(self.limit, 1e-3)


@click.command()
@click.argument("policy", nargs=-1)
@click.option("--max-lateness", metavar="INTERVAL",
              help="The longest that a hold may wait beyond its deadline: '5 min'.  [default: each policy's objective]",
              )  # fmt: skip
@click.option("--max-dead", type=click.IntRange(0, CAP - 1), metavar="N", help="The most dead letters; 0: none.")
@click.option("--max-backlog", type=click.IntRange(0, CAP), metavar="N", help="The most due holds that nobody has.")
@click.option("--max-relay-lag", metavar="INTERVAL", help="The longest that an event may wait for its queue: '10 min'.")
@common_options
@click.pass_context
def check(
    ctx: click.Context,
    *,
    policy: tuple[str, ...],
    max_lateness: str | None,
    max_dead: int | None,
    max_backlog: int | None,
    max_relay_lag: str | None,
    database_url: str | None,
    as_json: bool,
) -> None:
    """
    Say in one line whether all is well: every policy, or those named.

    Judges from the data alone: how long a hold has waited, however the workers are run and whether or not one is
    alive. Holds that a dead worker had leased count once the lease has run out, retries once their time has come. A
    paused policy is judged like any other; a passive one is not, because its publisher expires the holds. That no
    policy is registered is not well either: a probe must not stay green in the wrong database.

    Dead letters, the size of the backlog and the events that relays have yet to deliver are judged only where a limit
    is given, by what is counted: up to 10,000.

    Exit codes: 0 all is well; 3 it is not; 2 usage; 75 the database is unreachable.
    """
    with database(database_url, name=_NAME) as reaper:
        most = None if max_lateness is None else _seconds(reaper, max_lateness)
        found = reaper.status(list(policy) if policy else None)
        known = {s.policy for s in found}
        missing = [name for name in policy if name not in known]
        if missing:
            raise unknown_policy(missing[0], list(reaper.registered()))
        waiting = wait(reaper, list(policy) if policy else None)
        lag = None if max_relay_lag is None else _seconds(reaper, max_relay_lag, "--max-relay-lag")
        relays = [] if lag is None else [r for r in reaper.relays() if r.policy in known]
    judged = [s for s in found if s.state != "passive"]
    crossed = [
        finding
        for s in judged
        if s.policy in waiting
        for finding in _findings(s, waiting[s.policy], most, max_dead, max_backlog)
    ]
    of_policy = {s.policy: s for s in found}
    crossed += [_behind(r, of_policy[r.policy], lag) for r in relays if lag is not None and _waited(r) > lag]
    crossed.sort(key=lambda finding: -finding.times)
    well = bool(found) and not crossed
    line = _line(crossed, judged, found, waiting)
    if as_json:
        emit(
            "check",
            ok=well,
            line=line,
            policies=len(found),
            judged=len(judged),
            findings=[_content(finding) for finding in crossed],
            exit_code=0 if well else 3,
        )
    else:
        show_line(line, "green" if well else "bold red")
    ctx.exit(0 if well else 3)


def _seconds(reaper: Reaper, interval: str, option: str = "--max-lateness") -> float:
    ((seconds, right),) = reaper.rows(
        "select extract(epoch from i.given)::double precision, i.given >= '0'"
        " from (select %s::interval as given) as i", interval,
    )  # fmt: skip
    if not right:
        raise click.BadParameter("the lateness cannot be negative", param_hint=option)
    return float(seconds)


def _findings(
    s: PolicyStatus, waiting: Waiting, most: float | None, max_dead: int | None, max_backlog: int | None
) -> list[Finding]:
    def finding(kind: str, value: float | None, limit: float | None, *, capped: bool = False) -> Finding:
        return Finding(s.policy, s.owner, kind, value, limit, capped, s.state, s.reason, waited_for)

    waited, waited_for = longest(s, waiting)
    late = waited.total_seconds() if waited is not None else 0.0
    limit = s.objective.total_seconds() if most is None else most
    found = []
    if s.due is None:
        found.append(finding("unreadable", None, None))
    if late > limit:
        found.append(finding("late", late, limit))
    if max_dead is not None and s.dead > max_dead:
        found.append(finding("dead", s.dead, max_dead, capped=s.dead >= CAP))
    if max_backlog is not None and s.due is not None and (s.due > max_backlog or (s.due_capped and s.due >= CAP)):
        found.append(finding("backlog", s.due, max_backlog, capped=s.due_capped))
    return found


def _waited(relay: RelayStatus) -> float:
    return relay.oldest_waiting.total_seconds() if relay.oldest_waiting is not None else 0.0


def _behind(relay: RelayStatus, s: PolicyStatus, limit: float) -> Finding:
    return Finding(
        policy=s.policy,
        owner=s.owner,
        kind="relay",
        value=_waited(relay),
        limit=limit,
        capped=False,
        state=s.state,
        reason=relay.trouble,
        waited_for=None,
        relay=relay.relay,
    )


def _line(
    crossed: list[Finding], judged: list[PolicyStatus], found: list[PolicyStatus], waiting: dict[str, Waiting]
) -> str:
    """The worst first and alone, with its figure and its limit; of the others only how many there are."""
    if not found:
        return "not well: no policy is registered in this database"
    if crossed:
        others = len({f.policy for f in crossed} - {crossed[0].policy})
        more = f"; {others:,} other {'policy' if others == 1 else 'policies'} not well" if others else ""
        return f"not well: {_told(crossed[0])}{more}"
    number = f"{len(judged):,} {'policy' if len(judged) == 1 else 'policies'}"
    passive = len(found) - len(judged)
    waits = [(longest(s, waiting[s.policy])[0], s) for s in judged if s.policy in waiting]
    some = [(waited.total_seconds(), s) for waited, s in waits if waited is not None]
    worst = max(some, default=None, key=lambda pair: pair[0] / max(pair[1].objective.total_seconds(), 1e-3))
    parts = [
        f"{visible(worst[1].policy, 60)} has waited longest, {duration(worst[0])}" if worst else "nothing waits",
        f"{passive:,} passive" if passive else "",
        f"{sum(s.dead for s in judged):,} dead letters" if any(s.dead for s in judged) else "",
    ]
    return f"well: {number}, {', '.join(part for part in parts if part)}"


_WAITS = {"free": "the oldest hold", "lapsed": "a hold that a worker left behind", "retry": "a retry"}


def _told(finding: Finding) -> str:
    name = visible(finding.policy, 60)
    state = f", {finding.state}" if finding.state in ("paused", "suspended") else ""
    owner = f" (owner: {visible(finding.owner, 40)}{state})"
    if finding.kind == "unreadable":
        return f"{name} cannot be judged: {visible(finding.reason or finding.state, 160)}{owner}"
    assert finding.value is not None  # noqa: S101
    assert finding.limit is not None  # noqa: S101
    if finding.kind == "late":
        what = _WAITS[finding.waited_for or "free"]
        return (
            f"{name} is late: {what} waits for {duration(finding.value)}, allowed is {duration(finding.limit)}{owner}"
        )
    if finding.kind == "relay":
        waits = f"an event of relay {visible(finding.relay or '', 60)} waits for {duration(finding.value)}"
        trouble = f"; its queue: {visible(finding.reason, 60)}" if finding.reason else ""
        return f"{waits}, allowed is {duration(finding.limit)}{trouble}{owner}"
    what = "dead letters" if finding.kind == "dead" else "due holds"
    number = count(int(finding.value), capped=finding.capped)
    return f"{name} has {number} {what}, allowed are {finding.limit:,.0f}{owner}"


def _content(finding: Finding) -> dict[str, Any]:
    late = finding.kind in ("late", "relay")
    return {
        "policy": finding.policy,
        "owner": finding.owner,
        "kind": finding.kind,
        "state": finding.state,
        "reason": finding.reason,
        "relay": finding.relay,
        "waited_for": finding.waited_for if late else None,
        "lateness_seconds": finding.value if late else None,
        "max_lateness_seconds": finding.limit if late else None,
        "holds": int(finding.value) if finding.value is not None and not late else None,
        "max_holds": int(finding.limit) if finding.limit is not None and not late else None,
        "capped": finding.capped,
    }

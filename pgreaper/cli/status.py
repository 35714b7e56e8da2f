"""``pgreaper status``: how the policies are doing."""

import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pgreaper.api import Reaper
from pgreaper.cli.common import SECONDS, common_options, database, document, emit, unknown_policy
from pgreaper.errors import DatabaseUnavailable
from pgreaper.overview import SKEW_TOLERATED, Notice, Overview, View, look, named
from pgreaper.overview import skew as skew_in_words
from pgreaper.records import PolicyStatus
from pgreaper.render import (
    BLOCKS,
    Glyphs,
    Line,
    bar,
    cells,
    clip,
    console,
    cropped,
    glyphs,
    is_terminal,
    padded,
    rich_lines,
    screen_width,
    show_lines,
    sparkline,
    wrapped,
)
from pgreaper.text import count, duration, instant, plural, visible

if TYPE_CHECKING:
    from types import FrameType

    from rich.console import Console, ConsoleOptions, RenderResult

_STYLES = {
    "broken": "bold red",
    "suspended": "bold red",
    "late": "bold red",
    "paused": "yellow",
    "dead letters": "yellow",
    "clock": "yellow",
    "relay": "yellow",
    "on time": "green",
    "passive": "cyan",
    "idle": "dim",
}
_NAME = "pgreaper/status"
_COMMAND = "bold cyan"
# Policies about which a screen says what is wrong; the table has all of them.
_TOLD = 12
_WIDEST = 200
# Of a policy's name so much is to be seen, and what makes room for it, the first first.
_NAMED = 24
_DROPPED = ("target", "expired", "last", "/min", "retry", "leased", "owner", "per min", "last 15 min", "by age")


@click.command()
@click.argument("policy", required=False)
@click.option("--watch", is_flag=True, help="Look again and again until Ctrl-C.")
@click.option("--interval", type=SECONDS, default=2, show_default=True, metavar="SECONDS",
              help="How often --watch looks.")  # fmt: skip
@click.option("--svg", type=click.Path(dir_okay=False, writable=True, path_type=Path), metavar="FILE",
              help="Also draw the screen into FILE.")  # fmt: skip
@common_options
def status(
    policy: str | None, *, watch: bool, interval: float, svg: Path | None, database_url: str | None, as_json: bool
) -> None:
    """
    How the policies are doing, the worst first, or everything about one POLICY.

    A policy is late when a hold has waited for longer than its objective; what is wrong is said below the table:
    since when, why, whose it is, and the command that comes next.

    \b
    waits/goal  how long the oldest hold has waited, and the objective
    by age      due holds: under 1 min, to 5 min, to 1 h, to 1 d, older
    per min     transitions in each of the last minutes
    p50/p99     how late holds expired in the last 5 minutes

    Counts stop at a bound ("10,000+"), so this may be polled. In a pipe it is plain text, 80 columns wide or as wide
    as COLUMNS says.

    With --watch --json, one document a line. The fields: docs/status.md.
    """  # noqa: D301  click reads the \\b
    if watch:
        if svg is not None:
            raise click.UsageError("--svg draws one screen: leave --watch out")
        _watch(policy, interval, database_url, as_json=as_json)
        return
    with database(database_url, name=_NAME) as reaper:
        found = _read(reaper, policy)
    if svg is not None:
        _paint(found, policy, svg)
    if as_json:
        emit("status", **contents(found))
    else:
        show_lines(lines(found, policy, screen_width(), glyphs()))


def _read(reaper: Reaper, policy: str | None) -> Overview:
    found = look(reaper, None if policy is None else [policy])
    if policy is not None and not found.policies:
        raise unknown_policy(policy, list(reaper.registered()))
    return found


def contents(found: Overview) -> dict[str, Any]:
    """What the JSON document says; the names are a contract: docs/status.md."""
    return {
        "at": found.at,
        "database": found.database,
        "workers": [document(session) for session in found.workers],
        "policies": [_content(view) for view in found.policies],
    }


def _content(view: View) -> dict[str, Any]:
    s: dict[str, Any] = document(view.status)
    return s | {
        "condition": view.state,
        "late": view.late,
        "waited_seconds": view.waited.total_seconds() if view.waited is not None else None,
        "waited_for": view.waited_for,
        "notices": [document(notice) for notice in view.notices],
        "backlog": [document(age) for age in view.backlog],
        "activity": [document(minute) for minute in view.activity],
        "per_minute": view.per_minute,
        "dead_by_class": [document(kind) for kind in view.dead_letters],
        "leases": [document(lease) for lease in view.leases],
        "next_retry": document(view.next_retry),
        "paused_at": document(view.paused_at),
        "paused_by": view.paused_by,
        "suspended_since": document(view.suspended_since),
        "suspended_until": document(view.suspended_until),
        "last_worker": view.last_worker,
    }


# -- the screen


def lines(found: Overview, policy: str | None, width: int, signs: Glyphs, height: int | None = None) -> list[Line]:
    """The whole screen, at most ``width`` columns wide and, if it is told, ``height`` lines high."""
    width = min(width, _WIDEST)
    if policy is not None:
        screen = _one(found.policies[0], found, width, signs) if found.policies else []
    elif not found.policies:
        screen = wrapped([("No policy is registered yet: `pgreaper register` adds one.", "")], width, signs)
    else:
        screen = _all(found, width, signs, height)
    if height is not None and len(screen) > height:
        screen = [*screen[: max(height - 1, 1)], [(f"{signs.ellipsis} the terminal is too low for the rest", "dim")]]
    return [line if _is_command(line) else cropped(line, width) for line in screen]


def _is_command(line: Line) -> bool:
    return bool(line) and line[-1][1] == _COMMAND


def _all(found: Overview, width: int, signs: Glyphs, height: int | None) -> list[Line]:
    bad = [view for view in found.policies if view.needs_somebody]
    head = [*_headline(found, bad, width, signs), []]
    told: list[list[Line]] = [_told(view, width, signs) for view in bad]
    shown = len(told) if height is None else 0
    shown = min(shown, _TOLD)
    rows = _table(found, width, signs)
    if height is not None:
        # What is wrong comes first; the table gives up the policies about which there is nothing to say.
        room = height - len(head) - min(len(rows), max(height // 2, 4)) - 2
        while shown < min(len(told), _TOLD) and room >= len(told[shown]):
            room -= len(told[shown])
            shown += 1
        space = height - len(head) - sum(map(len, told[:shown])) - (2 if told else 0)
        if len(rows) > space:
            hidden = len(rows) - max(space - 1, 2)
            if hidden > 0:
                rows = [*rows[: max(space - 1, 2)], [(f"{signs.ellipsis} and {hidden:,} more", "dim")]]
    screen = [*head, *rows]
    if told:
        screen.append([])
        for part in told[:shown]:
            # A gap where there is room for it.
            screen += [*part, []] if height is None else part
        if height is None and shown == len(told):
            screen.pop()
        if shown < len(told):
            rest = len(told) - shown
            screen.append(
                [(f"{rest:,} more {'needs' if rest == 1 else 'need'} somebody: pgreaper status POLICY", "yellow")]
            )
    return screen


def _headline(found: Overview, bad: Sequence[View], width: int, signs: Glyphs) -> list[Line]:
    number = len(found.policies)
    what = f"{number:,} {'policy' if number == 1 else 'policies'}"
    late = sum(view.late for view in found.policies)
    if not bad:
        verdict = (f"{what}, all is well", "bold green")
    else:
        parts = [f"{late:,} late"] if late else []
        parts.append(f"{len(bad):,} of {what} {'needs' if len(bad) == 1 else 'need'} somebody")
        verdict = (", ".join(parts), "bold red" if any(_red(view) for view in bad) else "bold yellow")
    place = clip(_place(found), max(width - cells(verdict[0]) - 2, 0), signs)
    head: Line = [verdict]
    if cells(verdict[0]) + 2 + cells(place) <= width and len(place) > 12:
        # No wider than the table may become.
        head += [(" " * (min(width, 120) - cells(verdict[0]) - cells(place)), ""), (place, "dim")]
    return [head, *wrapped([(_hosts(found), "")], width, signs, indent="  ")]


def _place(found: Overview) -> str:
    return f"{visible(found.database, 40)}, {found.at.astimezone(UTC):%H:%M:%SZ}"


def _red(view: View) -> bool:
    return view.late or view.state in ("broken", "suspended")


def _hosts(found: Overview) -> str:
    """Who is connected, host by host."""
    if not found.workers:
        return "no worker is connected"
    hosts: dict[str, int] = {}
    for session in found.workers:
        hosts[session.host] = hosts.get(session.host, 0) + 1
    named_ = [f"{visible(host, 30)}{f' ({n})' if n > 1 else ''}" for host, n in list(hosts.items())[:4]]
    rest = f" and {plural(len(hosts) - 4, 'other host')}" if len(hosts) > 4 else ""
    return f"{plural(len(found.workers), 'worker')} connected: {', '.join(named_)}{rest}"


def _table(found: Overview, width: int, signs: Glyphs) -> list[Line]:
    """One line a policy.  Columns are left out where there is no room; the policy's name takes what is left."""
    minutes = 15 if width >= 110 else 10
    columns: list[tuple[str, bool, int, list[tuple[str, str]]]] = [
        # title, to the right, from which width on, cells
        ("state", False, 0, [(view.state, _STYLES[view.state]) for view in found.policies]),
        ("due", True, 0, [_short_count(view) for view in found.policies]),
        ("waits/goal", True, 0, [_oldest(view) for view in found.policies]),
        ("by age", False, 72, [_ages(view, signs) for view in found.policies]),
        ("per min" if minutes < 15 else "last 15 min", False, 80,
         [(sparkline([m.expired for m in view.activity[-minutes:]], signs), "cyan") for view in found.policies]),
        ("/min", True, 110, [(brief_count(round(view.per_minute)), "") for view in found.policies]),
        ("p50/p99", True, 64, [_late(view) for view in found.policies]),
        ("leased", True, 110, [(brief_count(view.status.leased), "") for view in found.policies]),
        ("retry", True, 110, [(brief_count(view.status.retrying), "") for view in found.policies]),
        ("dead", True, 46, [(brief_count(view.status.dead), "yellow" if view.status.dead else "")
                            for view in found.policies]),
        ("last", True, 120, [(_ago(view.status.last_success, found.at), "") for view in found.policies]),
        ("expired", True, 160, [(brief_count(view.status.expired), "") for view in found.policies]),
        ("owner", False, 100, [(clip(view.status.owner, 12 if width < 160 else 24, signs), "")
                               for view in found.policies]),
        ("target", False, 180, [(clip(view.status.target, 30, signs), "dim") for view in found.policies]),
    ]  # fmt: skip
    kept = [column for column in columns if width >= column[2]]
    room = [max([cells(title), *(cells(text) for text, _ in found_)]) for title, _, _, found_ in kept]
    left = width - sum(room) - 2 * len(room)
    wanted = min(max(cells(visible(view.status.policy)) for view in found.policies), _NAMED)
    for title in _DROPPED:
        # A policy that nobody can tell from another is of no use; the figures are told with POLICY.
        index = next((i for i, column in enumerate(kept) if column[0] == title), None)
        if left < wanted and index is not None:
            left += room.pop(index) + 2
            kept.pop(index)
    names = [clip(view.status.policy, max(left, 8), signs) for view in found.policies]
    first = max([len("policy"), *map(cells, names)])
    header: Line = [(padded("policy", first), "bold")]
    for (title, right, _, _), size in zip(kept, room, strict=True):
        header += [("  ", ""), (padded(title, size, right=right), "bold")]
    table = [header]
    for row, name in enumerate(names):
        line: Line = [(padded(name, first), "bold" if found.policies[row].needs_somebody else "")]
        for (_, right, _, values), size in zip(kept, room, strict=True):
            text, style = values[row]
            line += [("  ", ""), (padded(text, size, right=right), style)]
        table.append(line)
    return table


def brief(value: timedelta | None) -> str:
    """A length of time in one unit, for a table: ``250ms``, ``3.2s``, ``4m``, ``2h``, ``3d``, ``100y``."""
    if value is None:
        return "-"
    seconds = max(value.total_seconds(), 0.0)
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 9.95:
        return f"{seconds:.1f}".removesuffix(".0") + "s"
    if seconds < 99.5 and seconds != 60:
        return f"{seconds:.0f}s"
    for size, unit, most in ((60, "m", 99), (3600, "h", 48), (86400, "d", 999)):
        # Rounded down: "2h" has been two hours.
        if seconds // size <= most and (size == 86400 or seconds % (size * (60 if size == 60 else 24))):
            return f"{seconds // size:.0f}{unit}"
    return f"{seconds // (365 * 86400):,.0f}y"


def brief_count(number: int | None) -> str:
    """At most five characters: ``9,999``, ``12k``, ``3.4M``."""
    if number is None:
        return "-"
    if number < 10_000:
        return f"{number:,}"
    for size, unit in ((1_000, "k"), (1_000_000, "M"), (1_000_000_000, "G")):
        if number < 1000 * size:
            # Rounded down, so that it never says more than there is.
            return f"{number // size}{unit}" if number >= 10 * size else f"{number * 10 // size / 10:.1f}{unit}"
    return f"{number // 10**12}T"


def _short_count(view: View) -> tuple[str, str]:
    s = view.status
    text = brief_count(s.due) + ("+" if s.due_capped else "")
    return text, "bold red" if view.late and s.due else ""


def _oldest(view: View) -> tuple[str, str]:
    text = f"{brief(view.waited)}/{brief(view.status.objective)}"
    return text, "bold red" if view.late else "green" if view.waited else "dim"


def _ages(view: View, signs: Glyphs) -> tuple[str, str]:
    """Youngest to oldest."""
    if not view.backlog:
        return "-", ""
    return sparkline([age.due for age in view.backlog], signs), "red" if view.late else ""


def _late(view: View) -> tuple[str, str]:
    s = view.status
    if s.lateness_p50 is None:
        return "-", "dim"
    late = s.lateness_p99 is not None and s.lateness_p99 > s.objective
    return f"{brief(s.lateness_p50)}/{brief(s.lateness_p99)}", "red" if late else ""


def _ago(moment: datetime | None, at: datetime) -> str:
    return brief(at - moment) if moment is not None else "-"


def _told(view: View, width: int, signs: Glyphs) -> list[Line]:
    """What is wrong with a policy: a line for the fact, one for the reason, one for the command."""
    told: list[Line] = []
    for notice in view.notices:
        name = clip(view.status.policy, max(width // 3, 12), signs)
        told += _notice(notice, name, view.status.owner, width, signs)
    return told


def _notice(notice: Notice, name: str, owner: str, width: int, signs: Glyphs) -> list[Line]:
    since = f" since {instant(notice.since)}" if notice.since is not None else ""
    told = wrapped(
        [
            *([(f"{name} ", "bold")] if name else []),
            (f"{notice.state}{since}", _STYLES[notice.state]),
            (f": {notice.what}", ""),
            (f" (owner: {clip(owner, 40, signs)})", ""),
        ],
        width,
        signs,
        indent="    ",
    )
    told += [[("    ", ""), *line] for line in wrapped([(notice.why, "")], width - 4, signs)] if notice.why else []
    if notice.next:
        # Never broken or escaped: it is there to be copied.
        told.append([("    ", ""), (f"{signs.arrow} ", "dim"), (notice.next, _COMMAND)])
    return told


def _one(view: View, found: Overview, width: int, signs: Glyphs) -> list[Line]:
    """One policy in depth."""
    s = view.status
    at = found.at
    screen: list[Line] = wrapped(
        [
            (clip(s.policy, max(width - 20, 8), signs), "bold"),
            (f"  {view.state}", _STYLES[view.state]),
            (f"  {_place(found)}", "dim"),
        ],
        width,
        signs,
        indent="  ",
    )
    screen += [[]] if view.notices else []
    for notice in view.notices:
        screen += _notice(notice, "", s.owner, width, signs)
    facts: list[tuple[str, str, str] | None] = [
        None,
        ("target", s.target, ""),
        ("owner", s.owner, ""),
        ("promised", f"{duration(s.objective)} after the deadline at most", ""),
    ]
    if s.state == "passive":
        facts.append(("passive", s.reason or "", "cyan"))
    facts += [
        None,
        ("due", _due(view), "bold red" if view.late else ""),
        ("leased", count(s.leased), ""),
        ("retrying", _retrying(view, at), ""),
        ("dead letters", _dead(view), "yellow" if s.dead else ""),
    ]
    screen += _facts(facts, width, signs)
    if any(age.due for age in view.backlog):
        screen += [[], *_bars(view, width, signs)]
    screen += _facts(
        [
            None,
            ("lateness", _quantiles(s.lateness_p50, s.lateness_p99, s.lateness_max), ""),
            ("claim to start", _quantiles(s.start_p50, s.start_p99), ""),
            ("claim to finish", _quantiles(s.finish_p50, s.finish_p99), ""),
        ],
        width,
        signs,
    )
    screen += _pulse(view, width, signs)
    facts = [
        None,
        ("expired", _expired(view, at), ""),
        ("conflicts", _conflicts(s), ""),
        ("duplicate rate", f"{s.duplicate_rate:.2%}" if s.duplicate_rate is not None else "-", ""),
        ("failures", f"{s.retries:,} led to a retry, {s.dead_letters:,} to a dead letter", ""),
        ("taken back", plural(s.taken_back, "lease"), ""),
        ("workers", _hosts(found), ""),
        ("clock skew", _skew(s.clock_skew), "yellow" if s.clock_skew and abs(s.clock_skew) > SKEW_TOLERATED else ""),
    ]  # fmt: skip
    screen += _facts(facts, width, signs)
    screen += _listed(view, at, width, signs)
    return screen


_LABEL = 17


def _facts(facts: Sequence[tuple[str, str, str] | None], width: int, signs: Glyphs) -> list[Line]:
    shown: list[Line] = []
    for fact in facts:
        if fact is None:
            shown.append([])
            continue
        label, value, style = fact
        text = wrapped([(visible(value, 400), style)], max(width - _LABEL - 2, 16), signs)
        for number, line in enumerate(text):
            shown.append([("  " + padded(label if number == 0 else "", _LABEL), "dim"), *line])
    return shown


def _due(view: View) -> str:
    s = view.status
    if s.due is None:
        return "-"
    text = count(s.due, capped=s.due_capped)
    if s.oldest_due is not None:
        text += f", the oldest for {duration(s.oldest_due)} (deadline {instant(s.oldest_deadline)})"
    if view.waited_for == "lapsed":
        text += f"; of a lease that lapsed, for {duration(view.waited)}"
    return text


def _retrying(view: View, at: datetime) -> str:
    text = count(view.status.retrying, capped=view.status.retrying >= 10_000)
    if view.next_retry is None:
        return text
    left = (view.next_retry - at).total_seconds()
    return f"{text}, the next " + (f"in {duration(left)}" if left >= 0 else f"overdue for {duration(-left)}")


def _dead(view: View) -> str:
    return count(view.status.dead, capped=view.status.dead >= 10_000)


def _quantiles(p50: timedelta | None, p99: timedelta | None, most: timedelta | None = None) -> str:
    if p50 is None:
        return "- (nothing in the last 5 minutes)"
    text = f"p50 {duration(p50)}, p99 {duration(p99)}"
    return text + f", max {duration(most)}" if most is not None else text


def _bars(view: View, width: int, signs: Glyphs) -> list[Line]:
    most = max(age.due for age in view.backlog)
    numbers = [count(age.due, capped=age.capped) for age in view.backlog]
    room = max(min(width - _LABEL - 16 - max(map(len, numbers)) - 4, 60), 4)
    shown: list[Line] = []
    for index, (age, number) in enumerate(zip(view.backlog, numbers, strict=True)):
        shown.append(
            [
                ("  " + padded("backlog" if index == 0 else "", _LABEL), "dim"),
                (padded(age.age, 16), ""),
                (padded(bar(age.due, most, room, signs), room), "red" if view.late else "cyan"),
                ("  " + padded(number, max(map(len, numbers)), right=True), "" if age.due else "dim"),
            ]
        )
    return shown


def _pulse(view: View, width: int, signs: Glyphs) -> list[Line]:
    line = sparkline([minute.expired for minute in view.activity], signs)
    whole = sum(minute.expired for minute in view.activity)
    text = f"{line} {whole:,} in 15 minutes, {view.per_minute:,.0f} a minute now"
    return _facts([("transitions", text, "")], width, signs)


def _expired(view: View, at: datetime) -> str:
    s = view.status
    if s.last_success is None:
        return count(s.expired)
    by = f" by {visible(view.last_worker, 63)}" if view.last_worker else ""
    ago = duration(float(max(round((at - s.last_success).total_seconds()), 0)))
    return f"{count(s.expired)}, the last {ago} ago{by}"


def _conflicts(s: PolicyStatus) -> str:
    both = s.already_done + s.not_eligible
    return f"{both:,}: {s.already_done:,} already done, {s.not_eligible:,} consumed, extended or gone"


def _skew(value: timedelta | None) -> str:
    within = f"tolerated is {duration(SKEW_TOLERATED)}; nothing is decided by it"
    if value is None:
        return f"- (no worker said so in the last 5 minutes; {within})"
    return f"{skew_in_words(value)}; {within}" + (
        ", but the times in that worker's own log are wrong" if abs(value) > SKEW_TOLERATED else ""
    )


_LISTED = 8


def _listed(view: View, at: datetime, width: int, signs: Glyphs) -> list[Line]:
    """Leases and dead letters, one a line."""
    shown: list[Line] = []
    for index, lease in enumerate(view.leases[:_LISTED]):
        left = (lease.claim_until - at).total_seconds()
        end = f"lapsed {duration(-left)} ago" if left <= 0 else f"until {duration(left)} from now"
        text = (
            f"{plural(lease.holds, 'hold')} for {duration(max((at - lease.claimed_at).total_seconds(), 0.0))}, {end}, "
            f"attempt {lease.attempt}: {visible(lease.worker or 'somebody', 63)}"
        )
        shown += _facts([("leases" if index == 0 else "", text, "yellow" if left <= 0 else "")], width, signs)
    if len(view.leases) > _LISTED:
        shown += _facts([("", f"and {plural(len(view.leases) - _LISTED, 'other lease')}", "dim")], width, signs)
    for index, kind in enumerate(view.dead_letters[:_LISTED]):
        text = f"{plural(kind.holds, 'hold')} {named(kind)}, the first {instant(kind.since)}"
        shown += _facts([("dead by class" if index == 0 else "", text, "yellow")], width, signs)
    if len(view.dead_letters) > _LISTED:
        shown += _facts([("", f"and {plural(len(view.dead_letters) - _LISTED, 'other kind')}", "dim")], width, signs)
    return [[], *shown] if shown else []


_PICTURE_WIDTH = 100


def _paint(found: Overview, policy: str | None, path: Path) -> None:
    """Draw the screen as an SVG."""
    import io

    from rich.console import Console

    paper: Console = Console(
        record=True, file=io.StringIO(), width=_PICTURE_WIDTH, force_terminal=True, color_system="truecolor",
        highlight=False, legacy_windows=False,
    )  # fmt: skip
    paper.print(rich_lines(lines(found, policy, _PICTURE_WIDTH, BLOCKS)), soft_wrap=True)
    path.write_text(paper.export_svg(title="pgreaper status", unique_id="pgreaper-status"), encoding="utf-8")


# -- watching


class _Ended(KeyboardInterrupt):
    """A signal ended the watch.  Of this kind, so that psycopg cancels a statement that it interrupts."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.code = 0 if number == signal.SIGINT else 128 + number


class _Look:
    """What the watch shows: the last picture, and whether it is of now."""

    def __init__(self, policy: str | None) -> None:
        self.policy = policy
        self.signs = glyphs()
        self.found: Overview | None = None
        self.lost: str | None = None
        self.lost_at = 0.0

    def __rich_console__(self, screen: "Console", options: "ConsoleOptions") -> "RenderResult":
        # Asked for at each drawing, so that a terminal that was resized is drawn anew.
        yield rich_lines(self.lines(options.max_width, screen.height))

    def lines(self, width: int, height: int | None) -> list[Line]:
        signs = self.signs
        room = None if height is None else max(height - 2, 3)
        body = lines(self.found, self.policy, width, signs, room) if self.found else []
        if self.lost is None:
            return [*body, [], [("Ctrl-C ends", "dim")]]
        ago = f"no answer for {duration(float(round(time.monotonic() - self.lost_at)))}: "
        return [*body, [], *wrapped([(ago + self.lost, "bold red")], width, signs)[:1]]


def _watch(policy: str | None, interval: float, url: str | None, *, as_json: bool) -> None:
    """Look every ``interval`` seconds on one connection; a lost one is made again.  Ctrl-C is its ordinary end."""
    with _signals() as wait:
        picture = _Look(policy)
        try:
            if as_json or not is_terminal() or console().is_dumb_terminal:
                for found in _looks(policy, url, lambda: wait(interval)):
                    _say(picture, found, policy, as_json=as_json)
                return
            _draw(picture, policy, url, wait, interval)
        except _Ended as end:
            code = end.code
    click.get_current_context().exit(code)


def _say(picture: _Look, found: "Overview | DatabaseUnavailable", policy: str | None, *, as_json: bool) -> None:
    if isinstance(found, Overview):
        if as_json:
            emit("status", compact=True, **contents(found), error=None)
        else:
            show_lines([*lines(found, policy, screen_width(), glyphs()), []])
            sys.stdout.flush()
    elif as_json:
        failure = {"code": found.code, "message": found.message, "hint": found.hint, "sqlstate": found.sqlstate}
        emit("status", compact=True, at=None, database=None, workers=[], policies=[], error=failure)
    elif picture.lost is None:
        click.echo(f"error: {found.message}; trying again", err=True)
    picture.lost = None if isinstance(found, Overview) else found.message


def _draw(picture: _Look, policy: str | None, url: str | None, wait: Any, interval: float) -> None:
    from rich.live import Live

    screen = console()
    looks = _looks(policy, url, lambda: rest())
    # Before the screen is another one: an error of the first look is seen where errors are.
    first = next(looks)
    picture.found = first if isinstance(first, Overview) else None
    try:
        with Live(
            picture, console=screen, auto_refresh=False, screen=True, redirect_stdout=False, redirect_stderr=False
        ) as live:

            def rest() -> None:
                end = time.monotonic() + interval
                while (left := end - time.monotonic()) > 0:
                    # Woken early: the terminal has another size.
                    wait(left)
                    live.refresh()

            for found in looks:
                if isinstance(found, Overview):
                    picture.found, picture.lost = found, None
                elif picture.lost is None:
                    picture.lost, picture.lost_at = found.message, time.monotonic()
                else:
                    picture.lost = found.message
                live.refresh()
    finally:
        if screen.is_alt_screen:
            # A signal came while rich was still beginning.
            screen.set_alt_screen(enable=False)
            screen.show_cursor(show=True)
        # The picture went with the screen; what was seen last stays.
        if picture.found is not None:
            show_lines(lines(picture.found, policy, screen_width(), glyphs()))


def _looks(policy: str | None, url: str | None, rest: Any) -> "Iterator[Overview | DatabaseUnavailable]":
    """Endless; an error stands for a look that found no database.  The first one must find it."""
    first = True
    while True:
        try:
            with database(url, name=_NAME) as reaper:
                while True:
                    yield _read(reaper, policy)
                    first = False
                    rest()
        except DatabaseUnavailable as error:
            if first:
                raise
            yield error
            rest()


@contextmanager
def _signals() -> Iterator[Any]:
    """
    A function that waits so many seconds, or until the terminal is resized.

    What ends the program raises :class:`_Ended` in the block, so that the terminal is put right again.
    """
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)

    def end(number: int, _frame: "FrameType | None") -> None:
        raise _Ended(number)

    def woken(_number: int, _frame: "FrameType | None") -> None:
        pass

    handlers = {signal.SIGINT: end, signal.SIGTERM: end, signal.SIGHUP: end, signal.SIGWINCH: woken}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    waking = signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def wait(seconds: float) -> None:
        if select.select([read], [], [], max(seconds, 0.0))[0]:
            with suppress(BlockingIOError):
                os.read(read, 4096)

    try:
        yield wait
    finally:
        signal.set_wakeup_fd(waking)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(read)
        os.close(write)

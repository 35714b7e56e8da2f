"""``pgreaper status``: how the policies are doing."""

import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from pgreaper.api import Reaper
from pgreaper.cli.common import SECONDS, common_options, database, document, emit, unknown_policy
from pgreaper.errors import DatabaseUnavailable
from pgreaper.records import PolicyStatus
from pgreaper.render import STATE_STYLES, Column, console, is_terminal, rich_table, show_facts, show_line, show_table
from pgreaper.text import count, duration, instant, visible

if TYPE_CHECKING:
    from rich.console import RenderableType

_COLUMNS = [
    Column("policy"),
    Column("state", styles=STATE_STYLES),
    Column("due", right=True),
    Column("oldest", right=True),
    Column("leased", right=True),
    Column("retrying", right=True, priority=2),
    Column("dead", right=True),
    Column("expired", right=True),
    Column("late p50", right=True, priority=4),
    Column("late p99", right=True, priority=3),
    Column("last success", priority=1),
]


@click.command()
@click.argument("policy", required=False)
@click.option("--watch", is_flag=True, help="Look again and again until Ctrl-C.")
@click.option("--interval", type=SECONDS, default=2, show_default=True, metavar="SECONDS",
              help="How often --watch looks.")  # fmt: skip
@common_options
def status(policy: str | None, *, watch: bool, interval: float, database_url: str | None, as_json: bool) -> None:
    """
    How the policies are doing, or everything about one POLICY.

    Counts stop at a bound ("10,000+"), so this may be polled. With --watch --json, one document a line.
    """
    if watch:
        _watch(policy, interval, database_url, as_json=as_json)
        return
    with database(database_url) as reaper:
        found = _read(reaper, policy)
    if as_json:
        emit("status", policies=[document(s) for s in found])
    elif policy is not None:
        _show_one(found[0])
    elif not found:
        show_line("No policy is registered yet: `pgreaper register` adds one.")
    else:
        show_table(_COLUMNS, [_row(s) for s in found], _notes(found))


def _read(reaper: Reaper, policy: str | None) -> list[PolicyStatus]:
    found = reaper.status(None if policy is None else [policy])
    if policy is not None and not found:
        raise unknown_policy(policy, list(reaper.batches()))
    return found


def _row(s: PolicyStatus) -> list[str]:
    return [
        visible(s.policy, 30),
        s.state,
        count(s.due, capped=s.due_capped),
        duration(s.oldest_due),
        count(s.leased),
        count(s.retrying),
        count(s.dead),
        count(s.expired),
        duration(s.lateness_p50),
        duration(s.lateness_p99),
        _ago(s.last_success),
    ]


def _ago(moment: datetime | None) -> str:
    """How long ago; the clocks of client and server may differ a little, so never negative."""
    if moment is None:
        return "-"
    return duration(float(max(0, round((datetime.now(UTC) - moment).total_seconds())))) + " ago"


def _notes(found: Sequence[PolicyStatus]) -> list[str]:
    return [f"{visible(s.policy, 30)}: {s.state}, {visible(s.reason, 120)}" for s in found if s.reason]


def _show_one(s: PolicyStatus) -> None:
    facts: list[tuple[str, str] | None] = [
        ("target", visible(s.target, 100)),
        ("owner", visible(s.owner, 100)),
        ("state", s.state + (f", {visible(s.reason, 100)}" if s.reason else "")),
        None,
        (
            "due",
            count(s.due, capped=s.due_capped) + (f", the oldest for {duration(s.oldest_due)}" if s.oldest_due else ""),
        ),
        ("leased", count(s.leased)),
        ("retrying", count(s.retrying)),
        ("dead letters", count(s.dead)),
        None,
        ("expired", count(s.expired)),
        ("already done", count(s.already_done)),
        ("not eligible", count(s.not_eligible)),
        ("last success", f"{instant(s.last_success)} ({_ago(s.last_success)})" if s.last_success else "-"),
        None,
        ("objective", duration(s.objective)),
        ("lateness", _quantiles(s)),
        (
            "claim to finish",
            f"p50 {duration(s.finish_p50)}, p99 {duration(s.finish_p99)}" if s.finish_p50 is not None else "-",
        ),
    ]
    show_facts(f"policy {visible(s.policy)}", facts)


def _quantiles(s: PolicyStatus) -> str:
    if s.lateness_p50 is None:
        return "- (nothing expired in the last minutes)"
    return f"p50 {duration(s.lateness_p50)}, p99 {duration(s.lateness_p99)}, max {duration(s.lateness_max)}"


def _watch(policy: str | None, interval: float, url: str | None, *, as_json: bool) -> None:
    """Look every ``interval`` seconds on one connection; a lost one is made again."""
    if as_json or not is_terminal():
        for found in _looks(policy, interval, url):
            if as_json:
                emit("status", compact=True, at=datetime.now(UTC), policies=[document(s) for s in found or []])
            elif found is not None:
                show_table(_COLUMNS, [_row(s) for s in found], _notes(found))
                sys.stdout.write("\n")
                sys.stdout.flush()
        return

    from rich.live import Live

    screen = console()
    with Live(console=screen, auto_refresh=False, screen=False, transient=False) as live:
        shown: list[PolicyStatus] | None = None
        for found in _looks(policy, interval, url):
            shown = shown if found is None else found
            live.update(_frame(shown, lost=found is None, width=screen.width), refresh=True)


def _looks(policy: str | None, interval: float, url: str | None) -> "Iterator[list[PolicyStatus] | None]":
    """Endless; None stands for a look that found no database.  The first one must find it."""
    first = True
    while True:
        try:
            with database(url) as reaper:
                while True:
                    yield _read(reaper, policy)
                    first = False
                    time.sleep(interval)
        except DatabaseUnavailable:
            if first:
                raise
            yield None
            time.sleep(interval)


def _frame(found: list[PolicyStatus] | None, *, lost: bool, width: int) -> "RenderableType":
    from rich.console import Group
    from rich.text import Text

    rows = [_row(s) for s in found or []]
    parts: list[RenderableType] = [rich_table(_COLUMNS, rows, width)]
    parts += [Text(note, style="yellow") for note in _notes(found or [])]
    now = datetime.now(UTC).strftime("%H:%M:%SZ")
    parts.append(
        Text(f"{now}  the database does not answer; trying again", style="red")
        if lost
        else Text(f"{now}  Ctrl-C ends", style="dim")
    )
    return Group(*parts)


if TYPE_CHECKING:
    from collections.abc import Iterator

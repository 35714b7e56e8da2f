"""``pgreaper dead``: what was given up, and what a person does about it."""

from collections.abc import Callable
from typing import Any

import click

from pgreaper.api import Reaper
from pgreaper.cli.common import COUNT, common_options, database, document, emit, unknown_policy
from pgreaper.errors import ReaperError
from pgreaper.records import DeadLetter
from pgreaper.render import Column, show_facts, show_line, show_table
from pgreaper.text import instant, plural, visible
from pgreaper.text import key as shown_key

_LISTED = 100


class NoDeadLetter(ReaperError):
    """The hold that was named is no dead letter: nothing was done."""

    code = "no-dead-letter"


@click.group(invoke_without_command=True)
@click.pass_context
def dead(ctx: click.Context) -> None:
    """
    Dead letters: holds whose retry budget is spent.

    They stay as they are, excluded from claims, until somebody replays or discards them. One whose hold is due no
    longer, because the application consumed, deleted or extended it, is closed by the next run.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def _filters(function: Callable[..., None]) -> Callable[..., None]:
    for option in (
        click.option("--older-than", metavar="INTERVAL", help="Only those that died at least that long ago: '2 days'."),
        click.option("--error-class", metavar="CLASS", help="Only those that failed like this: ConstraintViolation."),
        click.option("--key", metavar="KEY", help="Only this hold."),
    ):
        function = option(function)
    return function


def _choose(*, everything: bool, **filters: str | None) -> None:
    # A key may be the empty string.
    if not everything and all(value is None for value in filters.values()):
        raise click.UsageError("name the dead letters: --key, --error-class, --older-than, or --all")


@dead.command("list")
@click.argument("policy", required=False)
@_filters
@click.option("--limit", type=COUNT, default=_LISTED, show_default=True, help="Show at most so many.")
@common_options
def list_(*, policy: str | None, limit: int, database_url: str | None, as_json: bool, **filters: Any) -> None:
    """List dead letters, the newest first; of all policies unless one is named."""
    with database(database_url) as reaper:
        _known(reaper, policy)
        found = reaper.dead_letters(policy, limit=limit + 1, **filters)
    more, found = len(found) > limit, found[:limit]
    if as_json:
        emit("dead list", more=more, dead_letters=[document(letter) for letter in found])
        return
    if not found:
        show_line("there is no dead letter" + (f" of policy {visible(policy)}" if policy else ""))
        return
    columns = [
        Column("policy"),
        Column("key"),
        Column("owner", priority=1),
        Column("died"),
        Column("attempts", right=True, priority=2),
        Column("failed with"),
    ]
    rows = [
        [visible(d.policy), shown_key(d.key), visible(d.owner, 30), instant(d.died_at), str(d.attempts), _error(d)]
        for d in found
    ]
    notes = [f"only the newest {limit} are shown: --limit shows more"] if more else []
    show_table(columns, rows, [*notes, f"try one again: {found[0].replay_command}"])


@dead.command()
@click.argument("policy")
@click.argument("key")
@common_options
def show(*, policy: str, key: str, database_url: str | None, as_json: bool) -> None:
    """
    Show one dead letter; `pgreaper history` tells what led to it.

    Exit codes: 0 shown; 1 the hold is no dead letter; 2 usage; 75 the database is unreachable.
    """
    with database(database_url) as reaper:
        _known(reaper, policy)
        d = _named(reaper, policy, key)
    if as_json:
        emit("dead show", policy=policy, key=key, dead_letter=document(d))
        return
    show_facts(
        f"{visible(d.policy)} {shown_key(d.key)}",
        [
            ("owner", visible(d.owner)),
            ("deadline", instant(d.deadline)),
            ("failed with", _error(d)),
            ("attempts", str(d.attempts)),
            ("failed first", instant(d.first_seen_at)),
            ("died", instant(d.died_at)),
            None,
            ("try again", d.replay_command),
        ],
    )


@dead.command()
@click.argument("policy")
@_filters
@click.option("--all", "everything", is_flag=True, help="All dead letters of the policy.")
@click.option("--reason", metavar="TEXT", help="Why; goes to the history.")
@click.option("--dry-run", is_flag=True, help="Say which ones, change nothing.")
@common_options
def replay(
    *,
    policy: str,
    everything: bool,
    reason: str | None,
    dry_run: bool,
    database_url: str | None,
    as_json: bool,
    **filters: Any,
) -> None:
    """
    Give dead letters a fresh retry budget.

    However many people press it, each is replayed once. A hold that was consumed or extended meanwhile is
    not touched; its dead letter is closed as moot.

    Exit codes: 0 done, also when the filters match none; 1 the hold that --key names is no dead letter;
    2 usage; 75 the database is unreachable or read-only.
    """
    _choose(everything=everything, **filters)
    with database(database_url, writes=not dry_run) as reaper:
        _known(reaper, policy)
        if filters["key"] is not None:
            _named(reaper, policy, filters["key"])
        if dry_run:
            _dry("dead replay", "would be replayed", reaper.dead_letters(policy, **filters), as_json=as_json)
            return
        outcomes = reaper.replay(policy, reason=reason, **filters)
    replayed = [o.key for o in outcomes if o.outcome == "replay"]
    moot = [o.key for o in outcomes if o.outcome == "moot"]
    if as_json:
        emit("dead replay", dry_run=False, replayed=replayed, moot=moot)
        return
    note = f"; {plural(len(moot), 'hold')} had moved on, closed as moot" if moot else ""
    show_line(f"{plural(len(replayed), 'dead letter')} replayed{note}")


@dead.command()
@click.argument("policy")
@_filters
@click.option("--all", "everything", is_flag=True, help="All dead letters of the policy.")
@click.option("--reason", metavar="TEXT", required=True, help="Why; goes to the history.")
@click.option("--dry-run", is_flag=True, help="Say which ones, change nothing.")
@common_options
def discard(
    *,
    policy: str,
    everything: bool,
    reason: str,
    dry_run: bool,
    database_url: str | None,
    as_json: bool,
    **filters: Any,
) -> None:
    """
    Leave dead letters be: no longer listed, never tried again.

    The holds stay as they are. One whose deadline changes is a new incarnation and expires as usual.

    Exit codes: 0 done, also when the filters match none; 1 the hold that --key names is no dead letter;
    2 usage; 75 the database is unreachable or read-only.
    """
    _choose(everything=everything, **filters)
    with database(database_url, writes=not dry_run) as reaper:
        _known(reaper, policy)
        if filters["key"] is not None:
            _named(reaper, policy, filters["key"])
        if dry_run:
            _dry("dead discard", "would be discarded", reaper.dead_letters(policy, **filters), as_json=as_json)
            return
        keys = reaper.discard(policy, reason=reason, **filters)
    if as_json:
        emit("dead discard", dry_run=False, discarded=keys)
        return
    show_line(f"{plural(len(keys), 'dead letter')} discarded")


def _known(reaper: Reaper, policy: str | None) -> None:
    if policy is not None:
        registered = list(reaper.registered())
        if policy not in registered:
            raise unknown_policy(policy, registered)


def _named(reaper: Reaper, policy: str, key: str) -> DeadLetter:
    # A typo must not look like a thing that is done.
    found = reaper.dead_letters(policy, key=key)
    if not found:
        raise NoDeadLetter(
            f"policy {visible(policy)}: {shown_key(key)} is no dead letter",
            hint="`pgreaper dead list` shows which ones are, `pgreaper history` what became of a hold.",
        )
    return found[0]


def _dry(command: str, what: str, found: list[DeadLetter], *, as_json: bool) -> None:
    if as_json:
        emit(command, dry_run=True, dead_letters=[document(letter) for letter in found])
        return
    for letter in found[:_LISTED]:
        show_line(f"{shown_key(letter.key)}  {_error(letter)}, died {instant(letter.died_at)}")
    show_line(f"{plural(len(found), 'dead letter')} {what}")


def _error(letter: DeadLetter) -> str:
    parts = (letter.error_class, letter.sqlstate, letter.constraint_name)
    return visible(", ".join(part for part in parts if part), 80)

"""``pgreaper prune``: remove what the books have kept long enough."""

import time
from contextlib import nullcontext, suppress
from typing import Any

import click
from psycopg import IsolationLevel

from pgreaper.api import Reaper
from pgreaper.cli.common import SECONDS, common_options, database, emit, read_only_error
from pgreaper.errors import DatabaseBusy, InvalidInput, QueryCancelled
from pgreaper.render import Column, is_terminal, show_line, show_table
from pgreaper.text import count, duration, plural, visible

_KINDS = ("claims", "transitions", "events")
_NAME = "pgreaper/prune"
# What a dry run counts to.
_BOUND = 100_000
# So often a busy table is tried again before it is told.
_PATIENCE = 5


@click.command()
@click.option("--keep", default="90 days", show_default=True, metavar="INTERVAL",
              help="How long the trail of transitions is kept.")  # fmt: skip
@click.option("--keep-events", metavar="INTERVAL",
              help="How long events are kept: conflicts, failures, what people did.  [default: as --keep]",
              )  # fmt: skip
@click.option("--keep-claims", default="7 days", show_default=True, metavar="INTERVAL",
              help="How long finished claims are kept.")  # fmt: skip
@click.option("--max-rows", type=click.IntRange(1, 1_000_000), default=2000, show_default=True, metavar="N",
              help="Remove at most so many rows of a kind and policy in a transaction.")  # fmt: skip
@click.option("--max-seconds", type=SECONDS, metavar="SECONDS", help="Begin nothing more after that.")
@click.option("--dry-run", is_flag=True, help=f"Count what would go, up to {_BOUND:,} of each; change nothing.")
@common_options
@click.pass_context
def prune(
    ctx: click.Context,
    *,
    keep: str,
    keep_events: str | None,
    keep_claims: str,
    max_rows: int,
    max_seconds: float | None,
    dry_run: bool,
    database_url: str | None,
    as_json: bool,
) -> None:
    """
    Remove what pgreaper's own tables have kept long enough, in short transactions, until nothing is left.

    Safe beside running workers, and to be broken off at any time: what is done stays done, and the next run goes
    on. Counters, retries and dead letters are not touched, and your tables are not looked at. Nothing younger than
    an hour can be removed.

    Exit codes: 0 done, or the time was up; 2 usage; 75 the database is unreachable, read-only or busy; 130 Ctrl-C.
    """
    kept = {"keep": keep, "keep_events": keep_events, "keep_claims": keep_claims}
    run = _Run(max_rows)
    with database(database_url, name=_NAME) as reaper:
        if dry_run:
            _preview(reaper, kept, as_json=as_json)
            return
        server = reaper.server()
        if server.read_only:
            raise read_only_error(standby=server.standby)
        if server.repeats_reads:
            # Each call a transaction of its own all the same.
            reaper.connection.isolation_level = IsolationLevel.READ_COMMITTED
        with suppress(KeyboardInterrupt):
            run.through(reaper, kept, max_seconds, own=server.repeats_reads)
    seconds = time.monotonic() - run.began
    if as_json:
        emit(
            "prune",
            dry_run=False,
            ended=run.ended,
            seconds=round(seconds, 3),
            calls=run.calls,
            removed=run.totals(),
            policies=run.removed,
        )
    else:
        _tell(run, seconds)
    if run.ended == "interrupted":
        ctx.exit(130)


class _Run:
    """What has been removed so far.  ``ended``: done, time, or interrupted."""

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.removed: dict[str, dict[str, int]] = {}
        self.calls = 0
        self.ended = "interrupted"
        self.began = time.monotonic()

    def totals(self) -> dict[str, int]:
        return {kind: sum(books[kind] for books in self.removed.values()) for kind in _KINDS}

    def through(self, reaper: Reaper, kept: dict[str, Any], max_seconds: float | None, *, own: bool) -> None:
        """Call reaper_prune() until nothing is left; each call is a transaction."""
        busy = 0
        while True:
            if max_seconds is not None and time.monotonic() - self.began >= max_seconds:
                self.ended = "time"
                return
            try:
                with reaper.connection.transaction() if own else nullcontext():
                    found = reaper.prune(**kept, max_rows=self.max_rows)
            except QueryCancelled:
                # A statement_timeout: nothing of this call is done.  A smaller one takes less time.
                if self.max_rows == 1:
                    raise
                self.max_rows = max(self.max_rows // 4, 1)
                continue
            except DatabaseBusy:
                busy += 1
                if busy > _PATIENCE:
                    raise
                continue
            busy = 0
            self.calls += 1
            more = False
            for row in found:
                books = self.removed.setdefault(row.policy, dict.fromkeys(_KINDS, 0))
                books[row.kind] += row.removed
                more = more or row.more
            self._progress()
            if not more:
                self.ended = "done"
                return

    def _progress(self) -> None:
        if self.calls > 1 and is_terminal():
            # On stderr, where it does not become part of what is printed.
            click.echo(f"\r{_rows(self.totals())} so far", nl=False, err=True)


def _rows(totals: dict[str, int]) -> str:
    return ", ".join(plural(number, kind[:-1]) for kind, number in totals.items())


def _tell(run: _Run, seconds: float) -> None:
    if run.calls > 1 and is_terminal():
        click.echo("\r\x1b[K", nl=False, err=True)
    what = "nothing was old enough" if not any(run.totals().values()) else f"{_rows(run.totals())} removed"
    how = {
        "done": "",
        "time": "; the time was up, there may be more",
        "interrupted": "; broken off, the next run goes on",
    }[run.ended]
    show_line(f"{what} in {duration(seconds)}{how}")


def _preview(reaper: Reaper, kept: dict[str, Any], *, as_json: bool) -> None:
    rows = _prunable(reaper, kept)
    if as_json:
        emit(
            "prune",
            dry_run=True,
            policies={
                policy: {kind: {"rows": n, "capped": capped} for kind, (n, capped) in books.items()}
                for policy, books in rows.items()
            },
        )
        return
    if not rows:
        show_line("nothing is old enough")
        return
    columns = [Column("policy"), *(Column(kind, right=True) for kind in _KINDS)]
    show_table(
        columns,
        [
            [visible(policy, 40), *(count(books[kind][0], capped=books[kind][1]) for kind in _KINDS)]
            for policy, books in rows.items()
        ],
        ["would be removed; nothing was changed"],
    )


def _prunable(reaper: Reaper, kept: dict[str, Any]) -> dict[str, dict[str, tuple[int, bool]]]:
    """What reaper_prune() would remove, called until nothing is left: policies that have something, and how much."""
    ((right,),) = reaper.rows(
        "select least(%s::interval, coalesce(%s::interval, '1 hour'), %s::interval) >= '1 hour'",
        kept["keep"], kept["keep_events"], kept["keep_claims"],
    )  # fmt: skip
    if not right:
        raise InvalidInput(
            "the books must be kept for an hour at least",
            hint="A repeated reaper_expire() is answered from them. Pass for example --keep '30 days'.",
            sqlstate="22023",
        )
    # A claim goes before what happened under it, so what is of a claim that stays, stays.
    rows = reaper.rows(
        "select p.name, c.n, t.n, e.n"
        "  from pgreaper.policies as p"
        " cross join lateral (select pgreaper._clock() as now, %s::interval as keep,"
        "                            coalesce(%s::interval, %s::interval) as keep_events,"
        "                            %s::interval as keep_claims, %s::integer as bound) as k"
        " cross join lateral (select k.now - least(k.keep_claims, k.keep, k.keep_events) as claims) as l"
        " cross join lateral (select count(*) as n from (select from pgreaper.claims as o"
        "    where o.policy_id = p.policy_id and o.finished_at < l.claims limit k.bound + 1) as o) as c"
        " cross join lateral (select count(*) as n from (select from pgreaper.transitions as o"
        "    where o.policy_id = p.policy_id and o.at < (k.now - k.keep) and not exists (select"
        "      from pgreaper.claims as q where q.token = o.token and (q.finished_at >= l.claims) is not false)"
        "    limit k.bound + 1) as o) as t"
        " cross join lateral (select count(*) as n from (select from pgreaper.events as o"
        "    where o.policy_id = p.policy_id and o.at < (k.now - k.keep_events) and not exists (select"
        "      from pgreaper.claims as q where q.token = o.token and (q.finished_at >= l.claims) is not false)"
        "    limit k.bound + 1) as o) as e"
        " order by p.name",
        kept["keep"], kept["keep_events"], kept["keep"], kept["keep_claims"], _BOUND,
    )  # fmt: skip
    return {
        str(policy): {kind: (min(int(n), _BOUND), n > _BOUND) for kind, n in zip(_KINDS, numbers, strict=True)}
        for policy, *numbers in rows
        if any(numbers)
    }

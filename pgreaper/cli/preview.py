"""``pgreaper preview``: what a run would meet now."""

from contextlib import suppress

import click

from pgreaper.api import Reaper
from pgreaper.cli.common import common_options, database, document, emit, unknown_policy
from pgreaper.errors import DatabaseBusy, ReaperError, TableLocked, UnknownPolicy
from pgreaper.overview import CAP
from pgreaper.records import Preview
from pgreaper.render import show_facts
from pgreaper.text import count, instant, visible


@click.command()
@click.argument("policy")
@common_options
def preview(*, policy: str, database_url: str | None, as_json: bool) -> None:
    """
    Count what a run would meet now; change nothing.

    Due are holds that a run could take: those leased, waiting for a retry or given up are told apart. Counts stop at
    10,000, and in a large table rows without a deadline or a state are looked for in a part of it.
    """
    with database(database_url) as reaper:
        try:
            found = reaper.preview(policy)
            resting = reaper.resting([policy]).get(policy)
            suspended = reaper.suspended([policy]).get(policy)
        except UnknownPolicy:
            raise unknown_policy(policy, list(reaper.registered())) from None
        except DatabaseBusy as error:
            raise _whose_lock(reaper, policy, error) from None
    if as_json:
        emit("preview", **document(found))
    else:
        show_facts(f"policy {visible(policy)}, as of now", _facts(found, resting, suspended))


def _whose_lock(reaper: Reaper, policy: str, error: DatabaseBusy) -> ReaperError:
    """Nothing waits for a row here, so it is the table."""
    with suppress(ReaperError):
        if (who := reaper.table_lock(policy)) is not None:
            hint = "Its rows can be counted when that transaction is over."
            return TableLocked(who, hint=hint, sqlstate=error.sqlstate, original=error.original)
    return error


def _facts(p: Preview, resting: str | None, suspended: str | None) -> list[tuple[str, str] | None]:
    facts: list[tuple[str, str] | None] = [
        *([("nothing is claimed", resting)] if resting is not None else []),
        *([("suspended", suspended)] if suspended is not None else []),
        (
            "due",
            count(p.due, capped=p.due_capped) + (f", the oldest since {instant(p.oldest_deadline)}" if p.due else ""),
        ),
        ("locked by others", "not known" if p.locked is None else count(p.locked) + (" of these" if p.locked else "")),
        ("leased to workers", count(p.leased)),
        ("waiting for a retry", count(p.retrying, capped=p.retrying >= CAP)),
        ("dead letters", count(p.dead, capped=p.dead >= CAP)),
    ]
    among = f" among {count(p.looked_at)} rows that were looked at" if p.looked_at is not None else ""
    if p.no_deadline:
        facts.append(("held, never due", f"{count(p.no_deadline)}{among} (the deadline is NULL)"))
    if p.no_state:
        facts.append(("not held", f"{count(p.no_state)}{among} (the state is NULL)"))
    return facts

"""``pgreaper preview``: what a run would meet now."""

import click

from pgreaper.cli.common import common_options, database, document, emit, unknown_policy
from pgreaper.errors import UnknownPolicy
from pgreaper.records import Preview
from pgreaper.render import show_facts
from pgreaper.text import count, instant, visible


@click.command()
@click.argument("policy")
@common_options
def preview(*, policy: str, database_url: str | None, as_json: bool) -> None:
    """
    Count what a run would meet now; change nothing.

    Counts exactly, so on a large backlog it takes a moment; `pgreaper status` is the one to poll.
    """
    with database(database_url) as reaper:
        try:
            found = reaper.preview(policy)
        except UnknownPolicy:
            raise unknown_policy(policy, list(reaper.batches())) from None
    if as_json:
        emit("preview", **document(found))
    else:
        show_facts(f"policy {visible(policy)}, as of now", _facts(found))


def _facts(p: Preview) -> list[tuple[str, str] | None]:
    facts: list[tuple[str, str] | None] = [
        ("due", count(p.due) + (f", the oldest since {instant(p.oldest_deadline)}" if p.due else "")),
        ("locked by others", count(p.locked)),
        ("leased to workers", count(p.leased)),
        ("waiting for a retry", count(p.retrying)),
        ("dead letters", count(p.dead)),
    ]
    if p.no_deadline:
        facts.append(("held, never due", f"{count(p.no_deadline)} (the deadline is NULL)"))
    if p.no_state:
        facts.append(("not held", f"{count(p.no_state)} (the state is NULL)"))
    return facts

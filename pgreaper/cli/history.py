"""``pgreaper history``: one hold's life."""

import click

from pgreaper.cli.common import common_options, database, document, emit, unknown_policy
from pgreaper.errors import UnknownPolicy
from pgreaper.render import OUTCOME_STYLES, Column, show_line, show_table
from pgreaper.text import instant, visible
from pgreaper.text import key as shown_key


@click.command(context_settings={"ignore_unknown_options": True})  # -7 is a key
@click.argument("policy")
@click.argument("key")
@common_options
def history(*, policy: str, key: str, database_url: str | None, as_json: bool) -> None:
    """
    Everything that happened to one hold, oldest first.

    KEY is the primary key as text; of several columns, a JSON array of strings: '["a", "7"]'.
    """
    with database(database_url) as reaper:
        try:
            entries = reaper.history(policy, key)
        except UnknownPolicy:
            raise unknown_policy(policy, list(reaper.registered())) from None
    if as_json:
        emit("history", policy=policy, key=key, entries=[document(entry) for entry in entries])
        return
    if not entries:
        show_line(f"policy {visible(policy)}: nothing is recorded of {shown_key(key)}")
        return
    rows = []
    for e in entries:
        error = ", ".join(x for x in (e.error_class, e.sqlstate, e.constraint_name) if x)
        person = ": ".join(x for x in (e.actor, e.reason) if x)
        attempt = f"attempt {e.attempts}" if e.attempts else ""
        rows.append(
            [
                instant(e.at),
                e.outcome,
                visible(e.state, 30) if e.state is not None else "-",
                instant(e.deadline),
                visible(e.worker or "-", 40),
                visible("; ".join(x for x in (attempt, error, person) if x) or "-", 80),
            ]
        )
    columns = [
        Column("at"),
        Column("outcome", styles=OUTCOME_STYLES),
        Column("state"),
        Column("deadline", priority=1),
        Column("worker", priority=2),
        Column("note"),
    ]
    if all(row[-1] == "-" for row in rows):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    show_table(columns, rows)

"""``pgreaper discover``: tables that look like holds."""

import click

from pgreaper import discover as search
from pgreaper.cli.common import common_options, document, emit
from pgreaper.connection import connect, resolve
from pgreaper.discover import Candidate, Discovery
from pgreaper.errors import InvalidInput
from pgreaper.render import show_line, show_text
from pgreaper.text import count, duration, plural, visible

_SHOWN_STATES = 8


@click.command()
@click.option(
    "--schema", "schemas", metavar="NAME", multiple=True, help="Only this schema; may be given several times."
)
@common_options
def discover(*, schemas: tuple[str, ...], database_url: str | None, as_json: bool) -> None:
    """
    Find tables that look like holds: how much is overdue there, and the `register` command for each.

    Goes by the names and types of columns and by their states, reads at most a sample of a large table, and
    changes nothing. pgreaper need not be installed. Read each command before you run it: what it says about
    your application is a guess.
    """
    connection = connect(resolve(database_url), name="pgreaper/discover")
    try:
        for schema in schemas:
            query = "select pg_catalog.to_regnamespace(pg_catalog.quote_ident(%s::pg_catalog.text))::pg_catalog.text"
            if connection.execute(query, [schema]).fetchone() == (None,):
                raise InvalidInput(f"there is no schema {visible(schema)}")
        result = search.discover(connection, schemas)
    finally:
        connection.close()
    if as_json:
        emit(
            "discover", tables=result.tables, candidates=list(map(document, result.candidates)), skipped=result.skipped
        )
    else:
        _show(result)


def _show(result: Discovery) -> None:
    for candidate in result.candidates:
        if candidate.policies:
            show_line(
                f"{visible(candidate.table)}: registered as {', '.join(map(visible, candidate.policies))}", "green"
            )
        else:
            _show_candidate(candidate)
        show_line("")
    for table in result.skipped:
        show_line(f"{visible(table)}: not looked into: it took too long, is locked, or cannot be read", "yellow")
    new = [c for c in result.candidates if not c.policies]
    overdue = sum(1 for c in new if c.overdue)
    show_line(
        f"{plural(result.tables, 'table')}: {len(new):,} {'looks' if len(new) == 1 else 'look'} like holds"
        + (f", {overdue:,} of them with overdue rows" if new else "")
        + (f"; {len(result.candidates) - len(new):,} registered" if len(new) < len(result.candidates) else "")
    )


def _show_candidate(c: Candidate) -> None:
    about = "about " if c.estimated else ""
    if c.overdue is None:
        head = "looks like holds"
    elif c.overdue:
        head = f"{about}{count(c.overdue)} overdue, the oldest for {duration(c.oldest_overdue)}"
    else:
        head = "nothing overdue"
    show_line(f"{visible(c.table, 100)}: {head}", "bold")
    show_text(f"{visible(c.deadline)} has passed, by {visible(c.status or c.stamp or '')}: {_states(c)}")
    for assumption in c.assumptions:
        show_text(assumption, "yellow")
    if c.command:
        show_line(f"      {c.command}")
    elif c.obstacle:
        show_text(c.obstacle, "yellow")
        if c.obstacle.endswith(":"):
            zone = f" --zone {c.zone}" if c.zone else ""
            show_line(
                f"      pgreaper register POLICY {c.table} --deadline {c.deadline} --status {c.status}"
                f" --held HELD --expired EXPIRED --owner WHO{zone}"
            )


def _states(c: Candidate) -> str:
    shown = [
        f"{'NULL' if s.state is None else visible(s.state)} {count(s.overdue)} of {count(s.rows)}"
        for s in c.states[:_SHOWN_STATES]
    ]
    more = len(c.states) - len(shown)
    return ", ".join(shown) + (f", and {more} more" if more > 0 else "") if shown else "no row yet"

"""``pgreaper verify``: the invariants, checked on what is there."""

import click

from pgreaper.cli.common import common_options, database, document, emit, unknown_policy
from pgreaper.errors import UnknownPolicy
from pgreaper.render import Column, show_line, show_table
from pgreaper.text import count, visible
from pgreaper.text import key as shown_key

_MEANING = {
    "once": "no hold expired twice for one deadline",
    "held anew": "the application held these again with the same deadline",
    "not early": "no hold expired before its deadline",
    "kept": "what expired is not held again with the same deadline",
    "accounted": "nothing is due beyond the objective and in nobody's hands",
    "closed": "no failure speaks of a hold that has expired",
    "consistent": "each claim expired as many holds as the trail says",
    "readable": "the target can be read; pgreaper status says why not",
}


@click.command()
@click.argument("policy", required=False)
@common_options
@click.pass_context
def verify(ctx: click.Context, *, policy: str | None, database_url: str | None, as_json: bool) -> None:
    """
    Check from the books and the rows that the invariants hold; all policies unless one is named.

    Reads the whole trail and the due rows; changes nothing. That nothing is due beyond the objective speaks
    of now: a backlog that is being worked on violates it until it is gone.

    Exit codes: 0 everything holds; 3 something does not; 2 usage; 75 the database is unreachable.
    """
    with database(database_url) as reaper:
        try:
            found = reaper.verify(policy)
        except UnknownPolicy:
            raise unknown_policy(policy or "", list(reaper.registered())) from None
    broken = [v for v in found if not v.holds]
    if as_json:
        emit("verify", holds=not broken, checks=[document(v) for v in found], exit_code=3 if broken else 0)
    elif not found:
        show_line("no policy is registered, so there is nothing to check")
    else:
        columns = [
            Column("policy"),
            Column("", styles={"ok": "green", "broken": "bold red"}),
            Column("invariant"),
            Column("violations", right=True),
            Column("for example"),
        ]
        rows = [
            [
                visible(v.policy),
                "ok" if v.holds else "broken",
                _MEANING.get(v.invariant, v.invariant),
                count(v.found),
                "-" if v.example is None else shown_key(v.example),
            ]
            for v in found
        ]
        show_table(columns, rows)
    ctx.exit(3 if broken else 0)

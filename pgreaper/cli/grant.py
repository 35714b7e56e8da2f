"""``pgreaper grant`` and ``pgreaper revoke``: who may do what with pgreaper."""

import click

from pgreaper.cli.common import common_options, database, document, emit
from pgreaper.errors import InvalidInput
from pgreaper.records import Granted
from pgreaper.render import show_line
from pgreaper.text import visible

KINDS = ("worker", "operator", "reader", "registrar", "application")


@click.command()
@click.argument("role")
@click.option("--as", "kind", type=click.Choice(KINDS), required=True, help="What the role is for.")
@click.option("--dry-run", is_flag=True, help="Print the statements, change nothing.")
@common_options
@click.pass_context
def grant(ctx: click.Context, *, role: str, kind: str, dry_run: bool, database_url: str | None, as_json: bool) -> None:
    """
    Give ROLE, which exists, what its work needs, and no more.

    \b
      worker       expires holds: SELECT on tables, UPDATE of what it writes
      operator     and may replay, discard, pause, resume, prune, verify
      reader       sees views and history; of a table key, deadline, state
      registrar    registers and withdraws policies on tables that it owns
      application  consumes, extends and restores holds: UPDATE of what that
                   writes

    Only what is missing is given: run it again after a table was registered. What you may not give away is
    printed for the owner of that table. A worker runs the triggers of the tables that it writes to, so it should
    be a role that trusts their owners.

    Exit codes: 0 the role has all that it needs; 1 a statement is left for somebody else; 2 usage.
    """  # noqa: D301  click reads the \\b
    with database(database_url, writes=not dry_run) as reaper:
        statements = reaper.grant(role, kind, dry_run=dry_run)
    left = [] if dry_run else [one for one in statements if not one.done]
    if as_json:
        emit(
            "grant",
            role=role,
            kind=kind,
            dry_run=dry_run,
            statements=[document(one) for one in statements],
            exit_code=1 if left else 0,
        )
    elif dry_run:
        _print(statements)
        if not statements:
            click.echo(f"role {visible(role)} has all that {_a(kind)} needs", err=True)
    else:
        done = len(statements) - len(left)
        show_line(
            f"role {visible(role)} {'has got' if done else 'has'} what {_a(kind)} needs" + (", except:" if left else "")
        )
        _print(left)
        if left:
            click.echo("hint: Let the owner of these tables say the statements above.", err=True)
    ctx.exit(1 if left else 0)


@click.command()
@click.argument("role")
@common_options
def revoke(*, role: str, database_url: str | None, as_json: bool) -> None:
    """
    Take back what `pgreaper grant` gave ROLE on pgreaper's own objects.

    What the role may do with your tables it may have been given for another reason: the statements that would
    take that are printed and not carried out.
    """
    with database(database_url, writes=True) as reaper:
        statements = reaper.revoke(role)
    if not statements:
        raise InvalidInput(f"role {visible(role)} has no rights on pgreaper", hint="`\\du` in psql lists the roles.")
    left = [one for one in statements if not one.done]
    if as_json:
        emit("revoke", role=role, statements=[document(one) for one in statements])
        return
    show_line(f"role {visible(role)} has no more rights on pgreaper" + ("; on your tables it keeps:" if left else ""))
    _print(left)


def _a(kind: str) -> str:
    return f"an {kind}" if kind in ("operator", "application") else f"a {kind}"


def _print(statements: list[Granted]) -> None:
    for one in statements:
        click.echo(one.statement)

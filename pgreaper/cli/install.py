"""
``pgreaper install`` and ``pgreaper uninstall``.

Owns their words and exit codes; the work is done by :mod:`pgreaper.schema`.
"""

from typing import TYPE_CHECKING

import click

from pgreaper.cli.common import common_options, emit
from pgreaper.text import plural

if TYPE_CHECKING:
    from pgreaper.schema import Check, Difference


@click.command()
@click.option("--sql", is_flag=True, help="Print the SQL for psql instead of connecting.")
@click.option(
    "--check", is_flag=True, help="Change nothing; exit 3 unless the database is as this version installs it."
)
@click.option("--repair", is_flag=True, help="Put back functions and views that are not as this version installs them.")
@common_options
def install(*, sql: bool, check: bool, repair: bool, database_url: str | None, as_json: bool) -> int:
    """
    Install pgreaper in a database, or upgrade it to this version.

    Everything goes into schema pgreaper, in one transaction; no other object is
    touched or locked. Run again, it does nothing.
    """
    # Alembic and SQLAlchemy take half a second to import: only here.
    from pgreaper import schema

    if sql + check + repair > 1:
        raise click.UsageError("--sql, --check and --repair exclude each other.")
    if sql:
        return _print("install", schema.install_sql(), as_json=as_json)
    if check:
        return _report(schema.check(database_url), as_json=as_json)
    if repair:
        return _repaired(schema.repair(database_url), as_json=as_json)

    change = schema.install(database_url)
    if as_json:
        emit("install", changed=change.changed, before=change.before, revision=change.after)
    elif not change.changed:
        click.echo(f"pgreaper is installed already (revision {change.after})")
    elif change.before:
        click.echo(f"pgreaper was upgraded from revision {change.before} to {change.after}")
    else:
        click.echo(f"pgreaper is installed (revision {change.after})")
    return 0


@click.command()
@click.option("--sql", is_flag=True, help="Print the SQL for psql instead of connecting.")
@click.option("--force", is_flag=True, help="Also with dead letters or active leases: what they say is lost.")
@common_options
def uninstall(*, sql: bool, force: bool, database_url: str | None, as_json: bool) -> int:
    """
    Remove pgreaper from a database; your tables and rows stay as they are.

    Refuses while there are dead letters or active leases, and while an object of
    yours depends on one of pgreaper's. What `pgreaper grant` gave roles on your tables
    they keep: the statements that take it are printed (not with --sql), for you to choose from.
    """
    from pgreaper import schema

    if sql:
        return _print("uninstall", schema.uninstall_sql(force=force), as_json=as_json)

    change = schema.uninstall(database_url, force=force)
    if as_json:
        emit("uninstall", changed=change.changed, before=change.before, revision=change.after, kept=change.kept)
    elif not change.changed:
        click.echo("pgreaper is not installed here")
    else:
        click.echo("pgreaper is uninstalled" + ("; on your tables roles keep rights:" if change.kept else ""))
        for statement in change.kept:
            click.echo(statement)
        if change.kept:
            click.echo("hint: Run those of the statements above whose rights nobody needs for anything else.", err=True)
    return 0


def _print(command: str, text: str, *, as_json: bool) -> int:
    if as_json:
        emit(command, sql=text)
    else:
        click.echo(text, nl=False)
    return 0


def _repaired(found: "tuple[Difference, ...]", *, as_json: bool) -> int:
    """Tell what was put back, and what is left for a person to decide; 3 when something is."""
    mended = [difference for difference in found if difference.state != "unexpected"]
    left = [difference for difference in found if difference.state == "unexpected"]
    if as_json:
        emit("install", repaired=mended, unexpected=left, exit_code=3 if left else 0)
    else:
        click.echo(f"{plural(len(mended), 'object')} put back as shipped" if mended else "everything is as shipped")
        for difference in mended:
            click.echo(f"  {difference.state:<10}  {difference.object}")
        for difference in left:
            click.echo(f"  not pgreaper's own: {difference.object}; drop it if nobody needs it")
    return 3 if left else 0


def _report(result: "Check", *, as_json: bool) -> int:
    """Tell what a check has found; 0 when everything is as it should be, else 3."""
    if as_json:
        emit(
            "install",
            ok=result.ok,
            revision=result.revision,
            expected=result.expected,
            differences=result.differences,
        )
    elif result.ok:
        click.echo(f"pgreaper is installed (revision {result.revision}), every function and view as shipped")
    elif not result.installed:
        click.echo("pgreaper is not installed here")
    elif result.differences:
        found = plural(len(result.differences), "object")
        click.echo(f"pgreaper is installed (revision {result.revision}), but not as shipped: {found}")
        for difference in result.differences:
            click.echo(f"  {difference.state:<10}  {difference.object}")
    else:
        click.echo(f"pgreaper is installed in revision {result.revision}; this version wants {result.expected}")
    return 0 if result.ok else 3

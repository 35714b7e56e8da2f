"""``pgreaper doctor``: what keeps holds from expiring, and what repairs it."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from pgreaper import doctor as checks
from pgreaper.cli.common import common_options, debugging, document, emit, unknown_policy
from pgreaper.connection import connect, resolve
from pgreaper.doctor import Finding, Report
from pgreaper.errors import UnknownPolicy
from pgreaper.render import show_line, show_text
from pgreaper.text import one_line, plural, visible

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}


@click.command()
@click.argument("policy", nargs=-1)
@common_options
@click.pass_context
def doctor(ctx: click.Context, *, policy: tuple[str, ...], database_url: str | None, as_json: bool) -> None:
    """
    Look for what keeps holds from expiring, or will; of each policy, or of those named.

    Every finding comes with the statement or command that repairs it, ready to be pasted. Changes nothing and
    takes no transaction id, so it may be run at any time, best as the role that the workers have.

    Exit codes: 0 nothing is wrong (there may be notes); 3 an error or a warning was found; 2 usage; 75 the
    database is unreachable.
    """
    connection = connect(resolve(database_url), name="pgreaper/doctor")
    try:
        report = checks.examine(connection, policy, open_database=_opener(database_url))
    except UnknownPolicy:
        from pgreaper.api import Reaper

        known = list(Reaper(connection).registered())
        raise unknown_policy(next(name for name in policy if name not in known), known) from None
    finally:
        connection.close()
    code = 0 if report.healthy else 3
    if debugging(ctx):
        _repeat(report)
    if as_json:
        emit(
            "doctor",
            healthy=report.healthy,
            database=report.database,
            role=report.role,
            server=report.server,
            policies=[{"policy": name, "target": target} for name, target in report.policies.items()],
            checks=report.checks,
            findings=[document(finding) for finding in report.findings],
            exit_code=code,
        )
    else:
        _show(report)
    ctx.exit(code)


def _opener(url: str | None) -> "Callable[[str], psycopg.Connection[Any]]":
    """A function that opens another database at the same address."""
    address = resolve(url)

    def open_database(database: str) -> "psycopg.Connection[Any]":
        elsewhere = replace(address, parameters={**address.parameters, "dbname": database})
        return connect(elsewhere, name="pgreaper/doctor")

    return open_database


def _repeat(report: Report) -> None:
    """The server's own words behind the findings, for whoever asks: they may contain values of rows."""
    for finding, error in report.heard:
        policy = f"policy {visible(finding.policy)}, " if finding.policy else ""
        click.echo(f"{policy}{finding.code}: the server said (SQLSTATE {error.sqlstate}):", err=True)
        click.echo("\n".join(f"  {one_line(line)}" for line in str(error).splitlines()), err=True)


def _show(report: Report) -> None:
    groups: list[tuple[str, str | None]] = [
        (
            f"database {visible(report.database)}, PostgreSQL {report.server.split(' ')[0]}, as {visible(report.role)}",
            None,
        )
    ]
    groups += [(f"policy {visible(name)} on {visible(target)}", name) for name, target in report.policies.items()]
    for title, policy in groups:
        found = [finding for finding in report.findings if finding.policy == policy]
        if found:
            show_line(title, "bold")
            for finding in sorted(found, key=lambda finding: checks.LEVELS.index(finding.level)):
                _show_finding(finding)
            show_line("")
    looked = f"{plural(report.checks, 'check')}, {_number(len(report.policies), 'policy', 'policies')}"
    if not report.findings:
        show_line(f"nothing found: {looked}")
        return
    numbers = [(level, sum(f.level == level for f in report.findings)) for level in checks.LEVELS]
    show_line(f"found {', '.join(plural(number, level) for level, number in numbers if number)}: {looked}")


def _show_finding(finding: Finding) -> None:
    """The fact is wrapped on a terminal; what is to be copied is a line of its own, whatever its length."""
    show_line(f"  {finding.level}: {finding.code}", _STYLES[finding.level])
    for text in filter(None, (finding.fact, finding.advice if not _pasteable(finding) else None)):
        show_text(text)
    if finding.database:
        show_text(f"in database {visible(finding.database)}:")
    for line in _pasteable(finding):
        show_line(f"      {line}")
    if finding.advice and _pasteable(finding):
        show_text(finding.advice)


def _pasteable(finding: Finding) -> tuple[str, ...]:
    return (*finding.sql, *finding.commands)


def _number(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"

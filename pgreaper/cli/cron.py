"""``pgreaper cron``: let pg_cron call pgreaper, inside the database and without Python."""

import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, LiteralString

import click
import psycopg
from psycopg.rows import tuple_row

from pgreaper import cron as pg_cron
from pgreaper.api import Reaper
from pgreaper.cli.common import (
    BATCH,
    COUNT,
    SECONDS,
    common_options,
    database,
    document,
    emit,
    read_only_error,
    unknown_policy,
)
from pgreaper.commands import name
from pgreaper.connection import connect, resolve
from pgreaper.cron import Absent, Finding, Home, Job, Survey, Wanted
from pgreaper.errors import InvalidInput, ReaperError, translate
from pgreaper.records import PolicyStatus
from pgreaper.render import Column, is_terminal, show_facts, show_line, show_table, width
from pgreaper.schedule import Schedule, ScheduleError, parse
from pgreaper.text import count, duration, instant, plural, visible

_STATE_STYLES = {
    "works": "green",
    "runs": "green",
    "waits": "cyan",
    "off": "yellow",
    "fails": "bold red",
    "stalled": "bold red",
    "broken": "bold red",
}
_LEVEL_STYLES = {"error": "red", "warning": "yellow", "note": "dim"}


@click.group(invoke_without_command=True)
@click.pass_context
def cron(ctx: click.Context) -> None:
    """
    Jobs of pg_cron that call pgreaper: the sweep, and what looks after the books and the log.

    WHAT is sweep (expire what is due), prune (remove old books) or log (remove what pg_cron logged of its runs).
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def opener(url: str | None) -> "Callable[[str], psycopg.Connection[Any]]":
    """A function that opens another database at the same address."""
    address = resolve(url)

    def open_database(database: str) -> "psycopg.Connection[Any]":
        return connect(replace(address, parameters={**address.parameters, "dbname": database}))

    return open_database


_WHAT = click.argument("what", type=click.Choice(list(pg_cron.KINDS)), default=pg_cron.SWEEP)
_CRON_DATABASE = click.option(
    "--cron-database", metavar="NAME", help="Database that pg_cron lives in, where this role cannot see it."
)


def _job_options(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        _CRON_DATABASE,
        click.option("--role", metavar="ROLE", help="Role that the job runs as.  [default: the one connected]"),
        click.option("--max-seconds", type=SECONDS, metavar="N", help="End a sweep after so long."),
        click.option("--max-rows", type=COUNT, metavar="N", help="End a sweep after so many holds."),
        click.option("--batch", type=BATCH, metavar="N", help="Holds a transaction takes; default: the policy's."),
        click.option("--policy", metavar="POLICY", help="Sweep this policy only, in a job of its own."),
        click.option("--schedule", metavar="TEXT", help="When, as pg_cron writes it: '*/5 * * * *', or '10 seconds'"
                     " from pg_cron 1.5 on.  [default: every minute; prune hourly, log daily]"),
        _WHAT,
    ):  # fmt: skip
        function = option(function)
    return function


@cron.command("print")
@_job_options
@common_options
def print_(
    *, what: str, schedule: str | None, policy: str | None, role: str | None, cron_database: str | None,
    database_url: str | None, as_json: bool, **limits: Any,
) -> None:  # fmt: skip
    """
    Print the statements that a superuser runs; change nothing.

    They begin where this server is: with installing pg_cron, or with scheduling the job.
    """
    with _both(database_url, cron_database) as (reaper, place):
        wanted = _wanted(reaper, place, what, schedule, policy, role, limits)
        if isinstance(place, Home):
            _fits_version(place, parse(wanted.schedule))
        lines = pg_cron.script(place, wanted, wanted.role or _role(reaper))
    if as_json:
        emit("cron print", job=wanted.name, database=place.database, statements=lines, ready=isinstance(place, Home))
        return
    _print(lines)


@cron.command()
@_job_options
@click.option("--dry-run", is_flag=True, help="Say what would be scheduled, change nothing.")
@common_options
def enable(
    *, what: str, schedule: str | None, policy: str | None, role: str | None, cron_database: str | None, dry_run: bool,
    database_url: str | None, as_json: bool, **limits: Any,
) -> int:  # fmt: skip
    """
    Schedule a job, or change it.

    The same call again changes nothing. When this role may not schedule it, the statements for a superuser are
    printed and the exit code is 1.
    """
    with _both(database_url, cron_database, writes=not dry_run) as (reaper, place):
        wanted = _wanted(reaper, place, what, schedule, policy, role, limits)
        when = parse(wanted.schedule)
        if isinstance(place, Absent):
            return _refuse(reaper, place, wanted, place.fact, place.hint, as_json=as_json)
        _fits_version(place, when)
        lacking = pg_cron.lacking(place, wanted)
        if lacking is not None:
            where = f"in database {visible(place.database)}"
            hint = f"A superuser runs the statements above {where}, or grants what is missing: {_grant(place, wanted)}"
            return _refuse(reaper, place, wanted, lacking, hint, as_json=as_json)
        if dry_run:
            _tell_dry(place, wanted, as_json=as_json)
            return 0
        try:
            done = pg_cron.schedule(place, wanted)
        except psycopg.Error as error:
            raise _explained(error, wanted) from None
        seen = pg_cron.survey(place, reaper.connection)
        job = next((job for job in seen.jobs or [] if job.job_id == done.job_id), None)
        about = [f for f in seen.findings if job is not None and f.subject == job.label and f.level != "note"]
    if as_json:
        emit(
            "cron enable", dry_run=False, change=done.change, job=document(job), replaced=list(done.replaced),
            findings=[document(finding) for finding in about],
        )  # fmt: skip
        return 0
    changed = {"created": "is scheduled", "updated": "has changed", "unchanged": "is scheduled already"}[done.change]
    if job is not None:
        show_facts(f"job {job.label} {changed}", _facts(job))
    if done.replaced:
        show_line(f"it takes the place of {plural(len(done.replaced), 'job')}: {', '.join(map(str, done.replaced))}")
    _show_findings(about)
    return 0


@cron.command()
@_WHAT
@click.option("--policy", metavar="POLICY", help="The job that sweeps this policy only.")
@click.option("--job", type=COUNT, metavar="ID", help="The job with this number, also one that was scheduled by hand.")
@click.option("--all", "everything", is_flag=True, help="Every job of this database that `pgreaper cron` scheduled.")
@click.option("--dry-run", is_flag=True, help="Say which ones, change nothing.")
@_CRON_DATABASE
@common_options
def disable(
    *, what: str, policy: str | None, job: int | None, everything: bool, dry_run: bool, cron_database: str | None,
    database_url: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Remove a job; a run that has begun goes on to its end."""
    with _both(database_url, cron_database, writes=not dry_run) as (reaper, place):
        if isinstance(place, Absent):
            raise ReaperError(place.fact, hint=place.hint)
        seen = pg_cron.survey(place, reaper.connection)
        if seen.jobs is None:
            raise ReaperError(seen.findings[0].fact, hint=f"A superuser says: {seen.findings[0].sql[0]}")
        here = _database(reaper)
        if job is not None:
            gone = [j for j in seen.jobs if j.job_id == job]
        elif everything:
            gone = [j for j in seen.jobs if j.kind is not None and (j.database == here or j.kind == pg_cron.LOG)]
        else:
            wanted = pg_cron.job_name(what, place.database if what == pg_cron.LOG else here, policy)
            gone = [j for j in seen.jobs if j.name == wanted]
        if not dry_run:
            try:
                pg_cron.unschedule(place, [j.job_id for j in gone])
            except psycopg.Error as error:
                raise translate(error) from None
    if as_json:
        emit("cron disable", dry_run=dry_run, removed=[document(j) for j in gone])
        return
    for j in gone:
        show_line(f"job {j.job_id} ({visible(j.name or j.command)}) {'would be' if dry_run else 'is'} removed")
    if not gone:
        show_line("there is no such job" + ("" if place.superuser else f" of role {visible(place.role)}"))


@cron.command()
@_CRON_DATABASE
@common_options
@click.pass_context
def status(ctx: click.Context, *, cron_database: str | None, database_url: str | None, as_json: bool) -> None:
    """
    Say whether pg_cron does its work.

    Shows the jobs that call pgreaper, their last runs, and what is late, whatever the runs say.

    Exit codes: 0 it works; 3 a job does not work, no job sweeps this database, or holds are overdue by more than
    their policy's objective and the time between two sweeps; 75 the database is unreachable.
    """
    with _both(database_url, cron_database) as (reaper, place):
        seen = None if isinstance(place, Absent) else pg_cron.survey(place, reaper.connection)
        here = _database(reaper)
        statuses = reaper.status()
    jobs = seen.jobs or [] if seen else []
    sweeps = [j for j in jobs if j.database == here and "reaper_sweep" in j.command and j.active]
    late = [s for s in statuses if _late(s, sweeps)]
    blind = seen is not None and seen.jobs is None
    bad = [f for f in seen.findings if f.level != "note"] if seen else []
    works = bool(sweeps or blind) and not late and not bad and seen is not None
    if as_json:
        emit(
            "cron status",
            works=works,
            pg_cron=_where(place),
            jobs=None if blind or seen is None else [document(j) for j in jobs],
            findings=[document(f) for f in seen.findings] if seen else [],
            late=[{"policy": s.policy, "due": s.due, "oldest_due_seconds": document(s.oldest_due),
                   "objective_seconds": document(s.objective)} for s in late],
            exit_code=0 if works else 3,
        )  # fmt: skip
    else:
        _show_status(place, seen, jobs, late, swept=bool(sweeps), here=here)
    ctx.exit(0 if works else 3)


# -- what they share


@contextmanager
def _both(url: str | None, named: str | None, *, writes: bool = False) -> "Iterator[tuple[Reaper, Home | Absent]]":
    """pgreaper's database, and the one that pg_cron lives in."""
    with database(url) as reaper, pg_cron.at_home(reaper.connection, opener(url), named) as place:
        if isinstance(place, Home):
            if writes and place.standby:
                raise read_only_error(standby=True)
            if place.release < pg_cron.OLDEST:
                raise ReaperError(
                    f"pg_cron {visible(place.version)} is too old: pgreaper needs 1.4",
                    hint="Install a newer one, then: alter extension pg_cron update;",
                )
        yield reaper, place


def _wanted(
    reaper: Reaper, place: Home | Absent, what: str, schedule: str | None, policy: str | None, role: str | None,
    limits: dict[str, Any],
) -> Wanted:  # fmt: skip
    """The job that the options describe.  Raises when it could never work."""
    kind = pg_cron.KINDS[what]
    if what != pg_cron.SWEEP and (policy is not None or any(value is not None for value in limits.values())):
        raise click.UsageError("--policy, --batch, --max-rows and --max-seconds are for the sweep")
    if policy is not None:
        registered = list(reaper.registered())
        if policy not in registered:
            raise unknown_policy(policy, registered)
    text = kind.schedule if schedule is None else schedule.strip()
    try:
        parse(text)
    except ScheduleError as error:
        raise InvalidInput(
            f"--schedule {visible(text)} is no schedule: {error}",
            hint="Examples: '* * * * *', '*/5 * * * *', '10 seconds'.",
        ) from None
    if kind.function is not None and not _has_function(reaper, kind.function):
        raise ReaperError(
            f"pgreaper in database {visible(_database(reaper))} has no {kind.function}",
            hint="Run `pgreaper install` to upgrade it.",
        )
    if role is not None:
        _check_role(reaper, role)
    return Wanted(what, place.database if what == pg_cron.LOG else _database(reaper), text, role, policy, **limits)


def _check_role(reaper: Reaper, role: str) -> None:
    found = _ask(reaper, "select r.rolcanlogin from pg_catalog.pg_roles as r where r.rolname = %s::text", role)
    if not found:
        raise InvalidInput(f"there is no role {visible(role)}", hint="--role names the role that the job runs as.")
    if not found[0][0]:
        raise InvalidInput(
            f"role {visible(role)} may not log in, and pg_cron runs jobs only as roles that may",
            hint=f"A superuser says: alter role {name(role)} login;",
        )


def _has_function(reaper: Reaper, function: str) -> bool:
    return bool(_ask(
        reaper,
        "select from pg_catalog.pg_proc as p join pg_catalog.pg_namespace as n on n.oid = p.pronamespace"
        " where n.nspname = 'pgreaper' and p.proname = %s::text",
        function,
    ))  # fmt: skip


def _database(reaper: Reaper) -> str:
    return str(_ask(reaper, "select pg_catalog.current_database()::text")[0][0])


def _role(reaper: Reaper) -> str:
    return str(_ask(reaper, "select current_user::text")[0][0])


def _ask(reaper: Reaper, query: LiteralString, *parameters: str) -> list[tuple[Any, ...]]:
    with reaper.connection.cursor(row_factory=tuple_row) as cursor:
        try:
            return cursor.execute(query, parameters or None).fetchall()
        except psycopg.Error as error:
            raise translate(error) from None


def _fits_version(home: Home, schedule: Schedule) -> None:
    if schedule.since is not None and home.release < schedule.since:
        raise InvalidInput(
            f"--schedule {visible(schedule.text)} needs pg_cron {'.'.join(map(str, schedule.since))},"
            f" and database {visible(home.database)} has {visible(home.version)}",
            hint="A minute is the shortest before 1.5. After installing a newer one: alter extension pg_cron update;",
        )


def _explained(error: psycopg.Error, wanted: Wanted) -> ReaperError:
    """What pg_cron's own functions refuse: their messages name roles, databases and schedules, and no row."""
    if error.sqlstate is None or error.sqlstate.startswith(("08", "25", "57", "53", "40", "55")):
        return translate(error)
    message = visible(error.diag.message_primary or "it does not say why", 200)
    said = error.diag.message_hint or error.diag.message_detail
    return ReaperError(
        f"pg_cron does not take job {visible(wanted.name, 63)}: {message}",
        hint=visible(said, 300) if said else None,
        sqlstate=error.sqlstate,
        original=error,
    )


def _refuse(
    reaper: Reaper, place: Home | Absent, wanted: Wanted, fact: str, hint: str, *, as_json: bool
) -> int:  # fmt: skip
    """Say what is missing, and print what a superuser runs instead."""
    lines = pg_cron.script(place, wanted, wanted.role or _role(reaper))
    if as_json:
        failure = {"code": "access-denied" if isinstance(place, Home) else "no-pg-cron", "message": fact, "hint": hint,
                   "sqlstate": None}  # fmt: skip
        emit("cron enable", change=None, job=wanted.name, statements=lines, error=failure, exit_code=1)
    else:
        _print(lines)
    click.echo(f"error: {fact}", err=True)
    click.echo(f"hint: {hint}", err=True)
    return 1


def _grant(home: Home, wanted: Wanted) -> str:
    """The statement that lets this role schedule the job itself."""
    role = name(home.role)
    if not home.may_use:
        return f"grant usage on schema cron to {role};"
    if wanted.role not in (None, home.role):
        return f"connect as {visible(str(wanted.role))} instead"
    return f"grant execute on function cron.schedule_in_database(text, text, text, text, text, boolean) to {role};"


# -- what is shown


def _print(lines: list[str]) -> None:
    for line in lines:
        show_line(line, "dim" if line.startswith("--") else "")


def _tell_dry(home: Home, wanted: Wanted, *, as_json: bool) -> None:
    statement = pg_cron.statement(home, wanted)
    if as_json:
        emit("cron enable", dry_run=True, job=wanted.name, database=home.database, statements=[statement])
    else:
        show_line(f"-- In database {visible(home.database)}, this would make the job be as it is asked for:", "dim")
        show_line(statement)


def _facts(job: Job) -> list[tuple[str, str] | None]:
    return [
        ("number", str(job.job_id)),
        ("runs", visible(job.command, 200)),
        ("when", _when(job.schedule)),
        ("in database", visible(job.database)),
        ("as role", visible(job.role)),
        ("next start", instant(job.next_start)),
    ]


def _when(schedule: str) -> str:
    return "every minute" if schedule == "* * * * *" else visible(schedule)


def _late(s: PolicyStatus, sweeps: list[Job]) -> bool:
    """Whether holds wait for longer than was promised and the schedule explains: from the rows, not from any log."""
    if s.oldest_due is None or s.state not in ("active", "broken"):
        return False
    gaps = [gap for gap in (_gap(j) for j in sweeps) if gap is not None]
    return s.oldest_due > s.objective + min(gaps, default=timedelta(minutes=1))


def _gap(job: Job) -> timedelta | None:
    try:
        return None if job.next_start is None else parse(job.schedule).gap(job.next_start)
    except ScheduleError:
        return None


def _where(place: Home | Absent) -> dict[str, Any]:
    if isinstance(place, Absent):
        return {"database": None, "version": None, "all_jobs": False, "reason": place.fact}
    return {"database": place.database, "version": place.version, "all_jobs": place.superuser, "reason": None}


def _show_status(
    place: Home | Absent, seen: Survey | None, jobs: list[Job], late: list[PolicyStatus], *, swept: bool, here: str
) -> None:
    if isinstance(place, Absent):
        show_line(place.fact, "yellow")
        show_line(f"  {place.hint}")
    elif jobs:
        columns = [
            Column("job"),
            Column("state", styles=_STATE_STYLES),
            Column("when", priority=1),
            Column("last run"),
            Column("took", right=True, priority=2),
            Column("failed", right=True),
            Column("role", priority=3),
            Column("database", priority=4),
            Column("command", priority=5),
        ]
        show_table(columns, [_row(job) for job in jobs])
    if seen is not None:
        if seen.jobs is not None and not swept:
            show_line(f"no job sweeps database {visible(here)}: `pgreaper cron enable` schedules one", "yellow")
        if seen.jobs is not None and not seen.home.superuser:
            show_line(f"role {visible(seen.home.role)} sees its own jobs only", "dim")
    for s in late:
        _say(
            f"error: policy {visible(s.policy)}: {count(s.due, capped=s.due_capped)} due, the oldest for"
            f" {duration(s.oldest_due)} (promised: {duration(s.objective)}): nobody expires them",
            "red",
        )
    _show_findings(seen.findings if seen else [])


def _say(text: str, style: str = "") -> None:
    """Prose, which a terminal gets in lines that end at a word; what is meant for copying is shown by show_line."""
    if not is_terminal():
        show_line(text, style)
        return
    indent = text[: len(text) - len(text.lstrip())]
    for line in textwrap.wrap(text, width(), subsequent_indent=indent or "  ", break_on_hyphens=False):
        show_line(line, style)


def _row(job: Job) -> list[str]:
    run = job.last_run
    last = "-" if run is None else instant(run.start) if run.start else run.status
    return [
        job.label,
        job.state,
        _when(job.schedule),
        last,
        duration(run.took) if run else "-",
        f"{job.failures} of {job.runs}" if job.runs else "-",
        visible(job.role, 30),
        visible(job.database, 30),
        visible(job.command, 60),
    ]


def _show_findings(findings: list[Finding]) -> None:
    for finding in findings:
        _say(f"{finding.level}: {finding.fact}", _LEVEL_STYLES[finding.level])
        where = f"In database {visible(finding.database)}:" if finding.sql and finding.database else None
        told = " ".join(filter(None, [where, finding.advice]))
        if told:
            _say(f"  {told}")
        for line in (*finding.sql, *finding.commands):
            show_line(f"  {line}")

"""
Whether the jobs of pg_cron that call pgreaper work, judged from the tables that pg_cron keeps.

What it keeps of a run is the server's own message, which may carry values of rows.  It is recognised here and
told in words of our own; a message that is not recognised is not repeated.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from pgreaper.commands import literal, name, shell
from pgreaper.cron.home import Absent, Connection, Home, Opener, at_home, reading, rows
from pgreaper.cron.jobs import KINDS, LOG, PRUNE, SWEEP, Wanted, statement
from pgreaper.schedule import Schedule, ScheduleError, parse
from pgreaper.text import instant, plural, visible

ERROR: Final = "error"
WARNING: Final = "warning"
NOTE: Final = "note"

_RUNS: Final = 20
"""A job is judged by so many of its last runs."""
_LOG_ROWS: Final = 10_000
"""So many of the newest runs of all jobs are looked at."""
_LOG_BYTES: Final = 64 * 2**20
"""A log of this size that nobody cleans is a warning."""
_SLACK: Final = timedelta(minutes=2)
"""A start may be late by this much before it counts as missed."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run as pg_cron has logged it; ``cause`` is what ended it, in our words.  A failed connection has no times."""

    run_id: int
    status: str
    start: datetime | None
    end: datetime | None
    cause: str | None

    @property
    def took(self) -> timedelta | None:
        """How long it ran."""
        return self.end - self.start if self.start and self.end else None


@dataclass(frozen=True, slots=True)
class Finding:
    """
    Something about a job that is not as it should be.

    ``sql`` is to be run in ``database`` (None: the one that was asked), ``commands`` in a shell; ``advice`` is for
    a person.
    """

    code: str
    level: str
    subject: str
    fact: str
    database: str | None = None
    sql: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    advice: str | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """A job that calls pgreaper.  ``state`` in words; ``kind`` None: a person scheduled it by hand."""

    job_id: int
    name: str | None
    kind: str | None
    schedule: str
    command: str
    database: str
    role: str
    active: bool
    state: str
    next_start: datetime | None
    last_run: Run | None
    runs: int
    failures: int

    @property
    def label(self) -> str:
        """How people call it."""
        return visible(self.name, 63) if self.name else f"job {self.job_id}"


@dataclass(frozen=True, slots=True)
class Survey:
    """What pg_cron has for pgreaper; ``jobs`` is None when this role may not look."""

    home: Home
    jobs: list[Job] | None
    findings: list[Finding]


WORKS: Final = "works"
WAITS: Final = "waits"
RUNS: Final = "runs"
OFF: Final = "off"
FAILS: Final = "fails"
STALLED: Final = "stalled"
BROKEN: Final = "broken"

_JOBS: Final = """
select j.jobid as job_id, j.jobname::text as name, j.schedule, j.command, j.nodename as node, j.nodeport as port,
  j.database, j.username as role, j.active,
  r.rolname is not null as role_exists, coalesce(r.rolcanlogin, false) as role_logs_in,
  coalesce(r.rolsuper, false) as role_super,
  d.datname is not null as database_exists,
  coalesce(d.datallowconn, true) as database_open,
  coalesce(r.oid is null or has_database_privilege(r.oid, d.oid, 'connect'), true) as may_connect
  from cron.job as j
  left join pg_roles as r on r.rolname = j.username
  left join pg_database as d on d.datname = j.database
 order by j.jobid
 limit 10000
"""
_LAST_RUNS: Final = """
with newest as materialized (
  select d.jobid, d.runid, d.status, d.return_message, d.start_time, d.end_time
    from cron.job_run_details as d order by d.runid desc limit %(newest)s::integer),
numbered as (
  select n.*, row_number() over (partition by n.jobid order by n.runid desc) as nth
    from newest as n where n.jobid = any (%(jobs)s::bigint[]))
select n.jobid as job_id, n.runid as run_id, n.status, n.return_message as message,
  n.start_time as start, n.end_time as end
  from numbered as n where n.nth <= %(most)s::integer order by n.runid desc
"""
_LOG: Final = """
select pg_total_relation_size(c.oid) as bytes
  from pg_class as c join pg_namespace as n on n.oid = c.relnamespace
 where n.nspname = 'cron' and c.relname = 'job_run_details'
"""
_SCHEDULERS: Final = """
select count(*) as running from pg_stat_activity as a
 where a.application_name = 'pg_cron scheduler' or a.backend_type = 'pg_cron launcher'
"""
_OURS: Final = re.compile(r'\bpgreaper"?\s*\.|\breaper_[a-z_]+\s*\(', re.IGNORECASE)
_QUOTED: Final = re.compile(r"\$(\w*)\$.*?\$\1\$|[eE]?'(?:[^']|'')*'|--[^\n]*|/\*.*?\*/", re.DOTALL)


def survey(home: Home, connection: Connection, *, now: datetime | None = None) -> Survey:
    """Look at the jobs and judge them; ``connection`` leads to pgreaper's database."""
    if not home.may_use:
        grant = f"grant usage on schema cron to {name(home.role)};"
        unseen = Finding(
            "cron-unreadable", NOTE, "pg_cron", f"role {visible(home.role)} may not look at pg_cron's jobs",
            home.database, (grant,), advice=home.by_superuser,
        )  # fmt: skip
        return Survey(home, None, [unseen])
    with reading(home.connection):
        moment = now or rows(home.connection, "select clock_timestamp() as now")[0]["now"]
        listed = rows(home.connection, _JOBS)
        ours = [row for row in listed if _OURS.search(row["command"]) or kind_of(row) is not None]
        runs = rows(home.connection, _LAST_RUNS, jobs=[row["job_id"] for row in ours], newest=_LOG_ROWS, most=_RUNS)
        (log,) = rows(home.connection, _LOG) or [{"bytes": 0}]
        running = rows(home.connection, _SCHEDULERS)[0]["running"] if home.sees_activity else None
    found = list(_of_pg_cron(home, listed, running))
    jobs = []
    for row in ours:
        mine = [run for run in runs if run["job_id"] == row["job_id"]]
        job, about = _judge(home, row, mine, moment)
        jobs.append(job)
        found += about
    if jobs:
        found += _of_the_log(home, listed, log)
        found += _of_twins(home, jobs)
        found += _of_superusers(ours)
    found += _of_rights(connection, jobs)
    found.sort(key=lambda finding: (ERROR, WARNING, NOTE).index(finding.level))
    return Survey(home, jobs, found)


def findings(connection: Connection, *, open_database: Opener | None = None) -> list[Finding]:
    """
    What is wrong with the jobs of pg_cron that call pgreaper; nothing when there is no pg_cron.

    The connection is one in autocommit to pgreaper's database.  ``open_database`` opens another database of the
    server, in autocommit; without it only a pg_cron in this database is looked at.  Only reads.
    """
    with at_home(connection, open_database) as home:
        return [] if isinstance(home, Absent) else survey(home, connection).findings


def kind_of(row: Mapping[str, Any]) -> str | None:
    """Which of our jobs this is, by its name."""
    words = (row["name"] or "").split(" ", 2)
    return words[1] if len(words) == 3 and words[0] == "pgreaper" and words[1] in KINDS else None


def _judge(
    home: Home, row: Mapping[str, Any], logged: Sequence[Mapping[str, Any]], now: datetime
) -> tuple[Job, list[Finding]]:
    runs = [
        Run(run["run_id"], run["status"], run["start"], run["end"],
            _cause(run["message"]) if run["status"] == "failed" else None)
        for run in logged
    ]  # fmt: skip
    try:
        schedule = parse(row["schedule"])
    except ScheduleError:
        schedule = None
    finished = [run for run in runs if run.status in ("succeeded", "failed")]
    about = list(_of_one(home, row, runs, schedule, now))
    broken = {finding.code for finding in about if finding.level == ERROR}
    if not row["active"]:
        state = OFF
    elif not row["role_exists"] or broken - {"cron-job-fails", "cron-job-stalled"}:
        state = BROKEN
    elif "cron-job-stalled" in broken:
        state = STALLED
    elif "cron-job-fails" in broken:
        state = FAILS
    elif runs and runs[0] not in finished:
        state = RUNS
    else:
        state = WORKS if finished else WAITS
    job = Job(
        row["job_id"], row["name"], kind_of(row), row["schedule"], row["command"], row["database"], row["role"],
        row["active"], state, schedule.after(now, home.zone) if schedule and row["active"] else None,
        runs[0] if runs else None, len(finished), sum(run.status == "failed" for run in finished),
    )  # fmt: skip
    return job, about


def _of_one(
    home: Home, row: Mapping[str, Any], runs: Sequence[Run], schedule: Schedule | None, now: datetime
) -> Iterator[Finding]:
    """What is wrong with one job."""
    subject = visible(row["name"], 63) if row["name"] else f"job {row['job_id']}"
    drop = f"select cron.unschedule({row['job_id']});"
    again = (shell("pgreaper", "cron", "enable", *_words(row, home.role)),) if kind_of(row) else ()
    often = (
        (shell("pgreaper", "cron", "enable", *_words({**row, "schedule": None}, home.role)),) if kind_of(row) else ()
    )

    def finding(code: str, level: str, fact: str, *sql: str, **more: Any) -> Finding:
        return Finding(code, level, subject, f"job {row['job_id']} {fact}", home.database if sql else None, sql, **more)

    role, database = visible(row["role"]), visible(row["database"])
    if not row["active"]:
        yield finding("cron-job-off", NOTE, "is switched off",
                      f"select cron.alter_job(job_id => {row['job_id']}, active => true);",
                      advice=home.by_superuser)  # fmt: skip
        return
    # A role that is missing is told by _of_pg_cron, for every job.
    if row["role_exists"] and not row["role_logs_in"]:
        yield finding("cron-job-role", ERROR, f"runs as role {role}, which may not log in",
                      f"alter role {name(row['role'])} login;", advice=home.by_superuser)  # fmt: skip
    if not row["database_exists"]:
        yield finding("cron-job-database", ERROR, f"runs in database {database}, which does not exist", drop,
                      commands=again, advice="Then schedule it again in the database that is meant.")  # fmt: skip
    elif not row["database_open"]:
        yield finding("cron-job-database", ERROR, f"runs in database {database}, which takes no connections",
                      f"alter database {name(row['database'])} allow_connections on;",
                      advice=home.by_superuser)  # fmt: skip
    elif not row["may_connect"]:
        yield finding("cron-job-database", ERROR, f"runs in database {database}, which role {role} may not connect to",
                      f"grant connect on database {name(row['database'])} to {name(row['role'])};",
                      advice=home.by_superuser)  # fmt: skip
    if home.uses_libpq and row["port"] != home.port:
        yield finding("cron-job-address", ERROR,
                      f"connects to port {row['port']}, and this server listens on {home.port}: it was copied from"
                      " another server, and may run there", drop, commands=again)  # fmt: skip
    wrong = misuse(row["command"])
    if wrong is not None:
        command = literal(mended(row["command"]))
        alter = f"select cron.alter_job(job_id => {row['job_id']}, command => {command});"
        yield finding("cron-job-command", ERROR, wrong, alter, advice=home.by_superuser)
    if schedule is None or schedule.after(now, home.zone) is None:
        fact = (
            "starts when the server starts, and then no more"
            if schedule and schedule.at_start_only
            else (
                "has a schedule that never comes"
                if schedule
                else f"has the schedule {visible(row['schedule'])}: " + _complaint(row["schedule"])
            )
        )
        yield finding("cron-job-schedule", WARNING, fact, commands=often)
    # Where the cause is known already, what its runs say adds nothing.
    if wrong is None and row["role_exists"] and row["role_logs_in"] and row["database_exists"]:
        yield from _of_its_runs(home, row, finding, runs, schedule, now)


def _of_its_runs(
    home: Home, row: Mapping[str, Any], finding: Callable[..., Finding], runs: Sequence[Run], schedule: Schedule | None,
    now: datetime,
) -> Iterator[Finding]:  # fmt: skip
    finished = [run for run in runs if run.status in ("succeeded", "failed")]
    failed = [run for run in finished if run.status == "failed"]
    if finished and finished[0].status == "failed":
        cause = finished[0].cause or ""
        when = f" at {instant(finished[0].end)}" if finished[0].end else ""
        often = (
            f"{len(failed)} of its last {len(finished)} runs, the last one"
            if len(finished) > 1
            else "its only run so far,"
        )
        fact = f"failed in {often}{when}: {cause}"
        # A restart ends what runs; the next run is the proof that nothing else is wrong.
        yield finding("cron-job-fails", WARNING if cause == _RESTARTED else ERROR, fact,
                      **_advice(row, cause, finished[0].run_id))  # fmt: skip
    elif failed:
        yield finding("cron-job-failed", NOTE, f"failed in {len(failed)} of its last {plural(len(finished), 'run')},"
                      f" and works again; it was: {failed[0].cause}")  # fmt: skip
    last = runs[0].start if runs else None
    if last is not None and schedule is not None and runs[0] in finished:
        due = schedule.after(max(last, home.started), home.zone)
        if due is not None and now - due > _SLACK and not home.standby:
            yield finding(
                "cron-job-stalled", ERROR,
                f"last started at {instant(last)}, and should have started again at {instant(due)}:"
                " pg_cron starts it no more",
                advice="Look at the server's log for pg_cron; all its places may be taken (cron.max_running_jobs,"
                " max_worker_processes), or its scheduler does not run. A restart of the server starts it again.",
            )  # fmt: skip


def _of_pg_cron(home: Home, listed: Sequence[Mapping[str, Any]], running: int | None) -> Iterator[Finding]:
    """What stops every job."""
    for row in listed:
        if not row["role_exists"]:
            subject = visible(row["name"], 63) if row["name"] else f"job {row['job_id']}"
            yield Finding(
                "cron-job-role", ERROR, subject,
                f"job {row['job_id']} belongs to role {visible(row['role'])}, which does not exist: pg_cron's"
                " scheduler ends when it comes to such a job, so that none starts any more",
                home.database, (f"select cron.unschedule({row['job_id']});",), advice=home.by_superuser,
            )  # fmt: skip
    if home.standby:
        yield Finding(
            "cron-standby", NOTE, "pg_cron", "the server is a standby: pg_cron starts jobs on the primary only"
        )
    elif running == 0:
        yield Finding(
            "cron-scheduler", ERROR, "pg_cron", "pg_cron's scheduler does not run, so no job starts",
            advice="The server's log says why it ended; a restart of the server starts it again.",
        )  # fmt: skip
    if home.settings.get("cron.launch_active_jobs") == "off":
        yield Finding(
            "cron-launch-off", ERROR, "pg_cron", "cron.launch_active_jobs is off, so no job starts", home.database,
            ("alter system set cron.launch_active_jobs = on;", "select pg_reload_conf();"), advice=home.by_superuser,
        )  # fmt: skip
    if home.settings.get("cron.log_run") == "off":
        yield Finding(
            "cron-log-off", NOTE, "pg_cron", "cron.log_run is off: pg_cron does not record whether its runs work",
            home.database, ("alter system set cron.log_run = on;",),
            advice="As a superuser; it takes effect with the next start of the server.",
        )  # fmt: skip


def _of_the_log(home: Home, listed: Sequence[Mapping[str, Any]], log: Mapping[str, Any]) -> Iterator[Finding]:
    """A run a minute is half a million rows a year, and pg_cron removes none."""
    if any(row["active"] and "job_run_details" in row["command"] for row in listed):
        return
    large = log["bytes"] >= _LOG_BYTES
    size = f"{log['bytes'] / 2**20:,.0f} MB" if log["bytes"] >= 2**20 else f"{log['bytes'] / 1024:,.0f} kB"
    clean = Wanted(LOG, home.database, KINDS[LOG].schedule)
    yield Finding(
        "cron-log-grows", WARNING if large else NOTE, "pg_cron",
        f"no job cleans cron.job_run_details, to which each run adds a row; it has {size}", home.database,
        (statement(home, clean),), (shell("pgreaper", "cron", "enable", LOG),),
        None if home.superuser else "A role sees its own jobs and runs only; a superuser's job cleans for all.",
    )  # fmt: skip


def _of_superusers(ours: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Triggers of the targets' owners run in a sweep: as a superuser they may do anything."""
    # A log is cleaned for all roles by a superuser only.
    mighty = [row for row in ours if row["role_super"] and row["active"] and kind_of(row) != LOG]
    for role in sorted({row["role"] for row in mighty}):
        numbers = [str(row["job_id"]) for row in mighty if row["role"] == role]
        what = f"job {numbers[0]} runs" if len(numbers) == 1 else f"jobs {', '.join(numbers[:20])} run"
        yield Finding(
            "cron-job-superuser", NOTE, "pg_cron",
            f"{what} as superuser {visible(role)}, and so do the triggers that they fire; a worker's rights are enough",
            advice="`pgreaper cron enable --role ROLE` gives a job to another role.",
        )  # fmt: skip


def _of_twins(home: Home, jobs: Sequence[Job]) -> Iterator[Finding]:
    """Two roles, or a person and `pgreaper cron`, scheduled the same: safe, and a waste."""
    first: dict[tuple[str, str], Job] = {}
    for job in jobs:
        other = first.setdefault((job.database, job.command.strip().rstrip(";").lower()), job)
        if job.active and other.active and other is not job:
            yield Finding(
                "cron-job-twice", NOTE, job.label, f"job {job.job_id} does the same as job {other.job_id}",
                home.database, (f"select cron.unschedule({job.job_id});",), advice=home.by_superuser,
            )  # fmt: skip


_RIGHTS: Final = """
select current_database()::text as database,
  j.role, has_schema_privilege(r.oid, n.oid, 'usage') as may_use,
  coalesce((select bool_and(has_function_privilege(r.oid, p.oid, 'execute')) from pg_proc as p
             where p.pronamespace = n.oid and p.proname = j.function), false) as may_execute
  from unnest(%(roles)s::text[], %(functions)s::text[]) as j (role, function)
  join pg_roles as r on r.rolname = j.role
  join pg_namespace as n on n.nspname = 'pgreaper'
"""


def _of_rights(connection: Connection, jobs: Sequence[Job]) -> Iterator[Finding]:
    """What the roles of the jobs lack in pgreaper's database, before a run fails for it."""
    with reading(connection):
        (here,) = rows(connection, "select current_database()::text as database")
        concerned = [(job, kind.function) for job in jobs if job.active and job.database == here["database"]
                     for kind in KINDS.values() if kind.function and kind.function in job.command]  # fmt: skip
        rights = rows(
            connection,
            _RIGHTS,
            roles=[job.role for job, _ in concerned],
            functions=[function for _, function in concerned],
        )
    lacking = {row["role"] for row in rights if not (row["may_use"] and row["may_execute"])}
    for role in sorted(lacking):
        job = next(job for job, _ in concerned if job.role == role)
        kind = "operator" if job.kind == PRUNE else "worker"
        yield Finding(
            "cron-job-rights", ERROR, job.label,
            f"job {job.job_id} runs as role {visible(role)}, which lacks rights on schema pgreaper",
            None, (f"select pgreaper.reaper_grant({literal(role)}, '{kind}');",),
        )  # fmt: skip


def misuse(command: str) -> str | None:
    """Why a call of the sweep cannot work, from its text alone."""
    # Semicolons and names in literals and comments mean nothing.
    bare = _QUOTED.sub(lambda m: " " if m[0].startswith(("--", "/*")) else "'x'", command).strip().rstrip("; \t\r\n")
    if "reaper_sweep" not in bare:
        return None
    if ";" in bare:
        return "sends several statements: a sweep commits, so it must be the only one"
    if re.match(r"select\b", bare, re.IGNORECASE):
        return "selects reaper_sweep, which is a procedure: CALL it"
    if re.match(r"call\s+reaper_sweep\b", bare, re.IGNORECASE):
        return "calls reaper_sweep without its schema: whether it is found depends on a search_path"
    return None


_ARGUMENTS: Final = re.compile(r"\breaper_sweep\s*(\((?:[^()']|'(?:[^']|'')*')*\))")


def mended(command: str) -> str:
    """The one statement that it should be, with the arguments that it has."""
    match = _ARGUMENTS.search(command)
    return f"call pgreaper.reaper_sweep{match[1] if match else '()'}"


def _complaint(schedule: str) -> str:
    try:
        parse(schedule)
    except ScheduleError as error:
        return str(error)
    return ""


_GIVEN: Final = re.compile(r"\b(policy|batch|max_rows|max_seconds) => (E?'(?:[^']|'')*'|[0-9.e+]+)")


def _words(row: Mapping[str, Any], role: str) -> list[str]:
    """The arguments of `pgreaper cron enable` that make a job of ours as it is; others have none."""
    kind = kind_of(row)
    words = [kind] if kind and kind != SWEEP else []
    for option, value in _GIVEN.findall(row["command"]):
        plain = value[1:-1].replace("''", "'") if value.startswith("'") else value
        if not plain.startswith("E'"):
            words += [f"--{option.replace('_', '-')}", plain]
    if kind and row["schedule"] not in (None, KINDS[kind].schedule):
        words += ["--schedule", row["schedule"]]
    # Whoever mends it is not who it should run as.
    if row["role"] != role:
        words += ["--role", row["role"]]
    return words


_RESTARTED: Final = "the server restarted during the run"
_UNCONNECTED: Final = "pg_cron could not connect"
_NO_WORKER: Final = "no background worker was free for it"
_NOT_ALONE: Final = "it is not the only statement, so it could not commit"
_NOT_INSTALLED: Final = "pgreaper is not in its database"
_TIMED_OUT: Final = "a statement_timeout cancelled it"
# The message as pg_cron and Postgres write it, and what is told of it; None: the part that matched, which is safe.
_CAUSES: Final = tuple(
    (re.compile(pattern), told)
    for pattern, told in (
        (r"^connection failed", _UNCONNECTED),
        (r"job startup timeout|background (?:worker|process)", _NO_WORKER),
        (r"^server restarted", _RESTARTED),
        (r"^job cancell?ed|due to user request", "somebody cancelled it"),
        (r"is not permitted to log in", "its role may not log in"),
        (
            r'^FATAL: +database "[^"]*" (?:does not exist|is not currently accepting)',
            "its database takes no connection",
        ),
        (r"^FATAL: +permission denied for database", "its role may not connect to its database"),
        (r"reaper_sweep commits after each batch|invalid transaction termination|transaction control", _NOT_ALONE),
        (r"is a procedure$", "it selects a procedure instead of calling it"),
        (r'schema "pgreaper" does not exist|pgreaper\.\w+\(.*\) does not exist', _NOT_INSTALLED),
        (r"permission denied for (?:schema|table|view|function|procedure|sequence) \w+", None),
        (r"policies that could not be swept: .*", None),
        (r"there is no policy .*", None),
        (r"due to statement timeout", _TIMED_OUT),
        (r"due to administrator command", "its session was ended"),
        (r"in a read-only transaction|transaction is read-only", "it could not write: read-only"),
    )
)


def _cause(message: str | None) -> str:
    """What ended a run, without repeating what may be private."""
    first = (message or "").strip().partition("\n")[0]
    for pattern, told in _CAUSES:
        if match := pattern.search(first):
            return told or visible(match[0], 200)
    return "an error that may carry values of rows"


def _advice(row: Mapping[str, Any], cause: str, run_id: int) -> dict[str, Any]:
    """What to do about the cause of a failed run."""
    if cause == _UNCONNECTED:
        where = f"{visible(row['node'])}, port {row['port']}, as {visible(row['role'])}"
        return {
            "advice": f"It connects to {where}, with no password but that in .pgpass of the server's user: let"
            " pg_hba.conf trust it, or set cron.use_background_workers = on and restart the server."
        }
    if cause == _NO_WORKER:
        return {"advice": "Raise max_worker_processes or cron.max_running_jobs and restart the server."}
    if cause == _NOT_INSTALLED:
        return {"advice": f"Install pgreaper in database {visible(row['database'])}, or remove the job."}
    if cause == _TIMED_OUT:
        return {
            "advice": "A sweep counts as one statement: schedule it with --max-seconds, or give its role more time."
        }
    if cause.startswith("permission denied"):
        return {"commands": (shell("pgreaper", "grant", row["role"], "--as", "worker"),)}
    if cause.startswith("policies that could not be swept"):
        return {"commands": (shell("pgreaper", "status"),)}
    if cause.startswith("an error"):
        return {"advice": f"Its text is the return_message of run {run_id} in cron.job_run_details."}
    return {}

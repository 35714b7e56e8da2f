"""The jobs that pgreaper has pg_cron run: what they are called, what they do, how they come and go."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pgreaper.commands import literal, name
from pgreaper.cron.home import Absent, Home, pin, rows
from pgreaper.schedule import EVERY_MINUTE
from pgreaper.text import visible

SWEEP: Final = "sweep"
PRUNE: Final = "prune"
LOG: Final = "log"

_NAME_BYTES: Final = 63
"""Before 1.5 pg_cron cut the name of a job here, and two long names became one job."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What a job of ours is for, and when it runs unless somebody says otherwise."""

    name: str
    schedule: str
    what: str
    function: str | None
    """The function of pgreaper that it calls; None: it only looks after pg_cron's own log."""


KINDS: Final[Mapping[str, Kind]] = {
    kind.name: kind
    for kind in (
        Kind(SWEEP, EVERY_MINUTE, "expires what is due", "reaper_sweep"),
        Kind(PRUNE, "17 * * * *", "removes what the books have kept long enough", "reaper_prune"),
        Kind(LOG, "41 3 * * *", "removes what pg_cron has logged of runs, after a week", None),
    )
}
"""The jobs that ``pgreaper cron`` knows.  A new one is a line here and its command in :func:`command`."""

# Also without times, as failed connections are logged; a week back is the run of this job itself, at the least.
_CLEAN_LOG: Final = (
    "delete from cron.job_run_details where runid < (select min(runid) from cron.job_run_details"
    " where start_time > now() - interval '7 days')"
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A job as it should be.  ``role`` None: whoever schedules it.  Limits are those of reaper_sweep."""

    kind: str
    database: str
    schedule: str
    role: str | None = None
    policy: str | None = None
    batch: int | None = None
    max_rows: int | None = None
    max_seconds: float | None = None

    @property
    def name(self) -> str:
        """The name under which pg_cron knows it."""
        return job_name(self.kind, self.database, self.policy)

    @property
    def command(self) -> str:
        """The one statement that it runs."""
        if self.kind == LOG:
            return _CLEAN_LOG
        if self.kind == PRUNE:
            return "select * from pgreaper.reaper_prune()"
        given = {
            "policy": None if self.policy is None else literal(self.policy),
            "batch": self.batch,
            "max_rows": self.max_rows,
            "max_seconds": None if self.max_seconds is None else f"{self.max_seconds:.15g}",
        }
        arguments = ", ".join(f"{parameter} => {value}" for parameter, value in given.items() if value is not None)
        return f"call pgreaper.reaper_sweep({arguments})"


def job_name(kind: str, database: str, policy: str | None = None) -> str:
    """
    ``pgreaper sweep shop``, ``pgreaper sweep shop: bookings``; what would be too long ends in a checksum.

    The database is part of it: pg_cron keeps the jobs of all databases of a server, and scheduling a name again
    replaces the job that has it.
    """
    full = f"pgreaper {kind} {name(database)}" + (f": {policy}" if policy is not None else "")
    if full.isprintable() and len(full.encode()) <= _NAME_BYTES:
        return full
    checksum = hashlib.sha256(full.encode()).hexdigest()[:8]
    shown = "".join(c if c.isprintable() else "?" for c in full)
    return shown.encode()[: _NAME_BYTES - 9].decode(errors="ignore") + "#" + checksum


@dataclass(frozen=True, slots=True)
class Scheduled:
    """What became of a job: ``created``, ``updated`` or ``unchanged``; ``replaced`` are those that gave way to it."""

    job_id: int
    change: str
    replaced: tuple[int, ...] = ()


def statement(home: Home, wanted: Wanted) -> str:
    """The statement that schedules a job, for whoever is connected to pg_cron's database."""
    words = [literal(wanted.name), literal(wanted.schedule), literal(wanted.command)]
    if wanted.database == home.database and wanted.role in (None, home.role):
        return f"select cron.schedule({', '.join(words)});"
    words.append(literal(wanted.database))
    if wanted.role not in (None, home.role):
        words.append(literal(str(wanted.role)))
    return f"select cron.schedule_in_database({', '.join(words)});"


def lacking(home: Home, wanted: Wanted) -> str | None:
    """What keeps this role from scheduling the job, or None."""
    if home.superuser:
        return None
    role = visible(home.role)
    if not home.may_use:
        return f"role {role} may not use schema cron of database {visible(home.database)}"
    if wanted.role not in (None, home.role):
        return f"role {role} may not schedule a job for role {visible(str(wanted.role))}"
    if wanted.database != home.database and not home.may_schedule_elsewhere:
        return f"role {role} may not schedule a job in another database than {visible(home.database)}"
    return None


def script(place: "Home | Absent", wanted: Wanted, role: str) -> list[str]:
    """
    The statements with which a superuser schedules the job for ``role``, from what is there on.

    They are for pg_cron's database.  Lines that begin with ``--`` are for a person.
    """
    job = [
        literal(wanted.name),
        literal(wanted.schedule),
        literal(wanted.command),
        literal(wanted.database),
        literal(role),
    ]
    schedule = f"select cron.schedule_in_database({', '.join(job)});"
    head = f"-- In database {visible(place.database)}, as a superuser:"
    if isinstance(place, Absent):
        *server, last = place.setup or ("",)
        return [*(line for line in server if line), head, *([last] if last else []), schedule]
    return [head, schedule]


def schedule(home: Home, wanted: Wanted) -> Scheduled:
    """
    Make the job be as it is wanted, and be there once; the same call again changes nothing.

    cron.schedule() leaves the database, the address and a switched-off job as they are when the name is known:
    what was read back decides, and a job that is not as wanted is removed and made anew.  A superuser's call also
    takes the place of the same job of other roles; other roles do not see them.  Raises ReaperError.
    """
    role = wanted.role or home.role
    with home.connection.transaction():
        pin(home.connection)
        # Two at once would both find nothing.
        rows(home.connection, "select pg_advisory_xact_lock(hashtext('pgreaper cron'))")
        before = _named(home, wanted.name)
        mine = next((row for row in before if row["role"] == role), None)
        others = [row for row in before if row["role"] != role]
        for row in others:
            rows(home.connection, "select cron.unschedule(%(id)s::bigint)", id=row["job_id"])
        replaced = tuple(row["job_id"] for row in others)
        if mine is not None and _fits(home, mine, wanted):
            return Scheduled(mine["job_id"], "unchanged", replaced)
        made = _make(home, wanted, role)
        if not _fits(home, made, wanted):
            rows(home.connection, "select cron.unschedule(%(id)s::bigint)", id=made["job_id"])
            replaced = (*replaced, made["job_id"])
            made = _make(home, wanted, role)
        return Scheduled(made["job_id"], "created" if mine is None else "updated", replaced)


def unschedule(home: Home, job_ids: Sequence[int]) -> None:
    """Remove jobs.  Raises psycopg.Error when they are not this role's."""
    with home.connection.transaction():
        pin(home.connection)
        for job_id in job_ids:
            rows(home.connection, "select cron.unschedule(%(id)s::bigint)", id=job_id)


def _make(home: Home, wanted: Wanted, role: str) -> Mapping[str, Any]:
    values = {"name": wanted.name, "schedule": wanted.schedule, "command": wanted.command}
    if wanted.database == home.database and role == home.role:
        rows(home.connection, "select cron.schedule(%(name)s::text, %(schedule)s::text, %(command)s::text)", **values)
    elif role == home.role:
        rows(
            home.connection,
            "select cron.schedule_in_database(%(name)s::text, %(schedule)s::text, %(command)s::text,"
            " %(database)s::text)",
            database=wanted.database,
            **values,
        )
    else:
        rows(
            home.connection,
            "select cron.schedule_in_database(%(name)s::text, %(schedule)s::text, %(command)s::text,"
            " %(database)s::text, %(role)s::text)",
            database=wanted.database,
            role=role,
            **values,
        )
    return next(row for row in _named(home, wanted.name) if row["role"] == role)


def _named(home: Home, job: str) -> list[dict[str, Any]]:
    return rows(
        home.connection,
        "select j.jobid as job_id, j.schedule, j.command, j.database, j.username as role, j.active, j.nodename as node,"
        " j.nodeport as port from cron.job as j where j.jobname::text = %(name)s::text order by j.jobid",
        name=job,
    )


def _fits(home: Home, row: Mapping[str, Any], wanted: Wanted) -> bool:
    asked = (wanted.schedule, wanted.command, wanted.database, True, home.port)
    node = home.settings.get("cron.host", row["node"])
    return (row["schedule"], row["command"], row["database"], row["active"], row["port"], row["node"]) == (*asked, node)

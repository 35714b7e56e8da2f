"""
Where pg_cron is: in one database of a server, while it starts jobs in any.

Owns finding that database, what this role may do there, and why there is none to speak to.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from typing import Any, Final, LiteralString
from zoneinfo import ZoneInfo

import psycopg
from psycopg.rows import dict_row

from pgreaper.commands import literal, name
from pgreaper.errors import ReaperError
from pgreaper.text import visible

Connection = psycopg.Connection[Any]
Opener = Callable[[str], Connection]
"""Opens another database of the same server, in autocommit; raises ReaperError."""

OLDEST: Final = (1, 4)
"""The first version of pg_cron with schedule_in_database and alter_job."""
_DEFAULT: Final = "postgres"
"""pg_cron's own default for cron.database_name."""


@dataclass(frozen=True, slots=True)
class Home:
    """The database that pg_cron lives in, on a connection to it, and what this role may there."""

    database: str
    version: str
    role: str
    superuser: bool
    may_use: bool
    may_schedule_elsewhere: bool
    sees_activity: bool
    standby: bool
    port: int
    started: datetime
    settings: Mapping[str, str]
    """Those of pg_cron that the role may see."""
    connection: Connection

    @property
    def release(self) -> tuple[int, int]:
        """The version as two numbers."""
        return release(self.version)

    @property
    def by_superuser(self) -> str | None:
        """Whose statement it has to be, when this role's will not do."""
        return None if self.superuser else "As a superuser."

    @property
    def zone(self) -> tzinfo:
        """The time zone of the schedules."""
        try:
            return ZoneInfo(self.settings.get("cron.timezone", "GMT"))
        except (KeyError, ValueError):  # a name that only Postgres knows
            return UTC

    @property
    def uses_libpq(self) -> bool | None:
        """Whether a run is a connection and not a background worker; None: this role cannot see that."""
        mode = self.settings.get("cron.use_background_workers")
        return None if mode is None else mode == "off"


@dataclass(frozen=True, slots=True)
class Absent:
    """Why there is no pg_cron to speak to.  ``setup`` are the steps that a superuser takes before anything else."""

    fact: str
    hint: str
    setup: tuple[str, ...] = ()
    database: str = _DEFAULT


def release(version: str) -> tuple[int, int]:
    """``1.4-1`` as ``(1, 4)``."""
    numbers = re.findall(r"\d+", version)[:2]
    return (int(numbers[0]) if numbers else 0, int(numbers[1]) if len(numbers) > 1 else 0)


@contextmanager
def at_home(connection: Connection, open_database: Opener | None, named: str | None = None) -> Iterator[Home | Absent]:
    """Find the database that pg_cron lives in; ``named`` says it where this role cannot see it."""
    with reading(connection):
        (seen,) = rows(connection, _SERVER)
    elsewhere = named or seen["database_name"] or _DEFAULT
    # An extension that is here while the setting names another database is one that nobody looks at.
    if seen["version"] is not None and seen["database"] == (named or seen["database_name"] or seen["database"]):
        yield _home(connection)
        return
    if elsewhere != seen["database"] and open_database is not None:
        try:
            opened = open_database(elsewhere)
        except ReaperError as error:
            if named is not None:
                raise
            yield _absent(seen, unreachable=error.message)
            return
        with closing(opened):
            with reading(opened):
                found = rows(opened, "select 1 from pg_extension where extname = 'pg_cron'")
            if found:
                yield _home(opened)
                return
    yield _absent(seen, asked=named)


_SERVER: Final = """
select current_database()::text as database, current_user::text as role,
  current_setting('server_version_num')::integer / 10000 as major,
  (select e.extversion from pg_extension as e where e.extname = 'pg_cron') as version,
  exists (select from pg_available_extensions as a where a.name = 'pg_cron') as available,
  (select s.setting from pg_settings as s where s.name = 'cron.database_name') as database_name,
  (select s.setting from pg_settings as s where s.name = 'shared_preload_libraries') as libraries
"""
_HOME: Final = """
select current_database()::text as database, current_user::text as role,
  (select e.extversion from pg_extension as e where e.extname = 'pg_cron') as version,
  (select r.rolsuper from pg_roles as r where r.rolname = current_user) as superuser,
  has_schema_privilege('cron', 'usage') as may_use,
  coalesce((select bool_or(has_function_privilege(p.oid, 'execute')) from pg_proc as p
             join pg_namespace as n on n.oid = p.pronamespace
            where n.nspname = 'cron' and p.proname = 'schedule_in_database'), false) as may_schedule_elsewhere,
  pg_has_role('pg_read_all_stats', 'usage') as sees_activity,
  pg_is_in_recovery() as standby, current_setting('port')::integer as port, pg_postmaster_start_time() as started,
  coalesce((select jsonb_object_agg(s.name, s.setting) from pg_settings as s where s.name like 'cron.%'), '{}')
    as settings
"""


def _home(connection: Connection) -> Home:
    with reading(connection):
        (row,) = rows(connection, _HOME)
    return Home(connection=connection, **row)


def _absent(seen: Mapping[str, Any], *, asked: str | None = None, unreachable: str | None = None) -> Absent:
    package = (
        f"-- On the database server: install pg_cron for PostgreSQL {seen['major']};"
        f" Debian and Ubuntu: apt-get install postgresql-{seen['major']}-cron"
    )
    create = "create extension pg_cron;"
    if asked is not None:
        return Absent(
            f"pg_cron is not in database {visible(asked)}",
            "Leave --cron-database away to look where the server says that it is.",
            (create,),
            asked,
        )
    if unreachable is not None and seen["database_name"]:
        home = str(seen["database_name"])
        return Absent(
            f"pg_cron is in database {visible(home)}, which this role cannot open: {unreachable}",
            f"Let the role connect to it: grant connect on database {name(home)} to {name(seen['role'])};",
            (),
            home,
        )
    if seen["database_name"]:
        home = str(seen["database_name"])
        return Absent(
            f"pg_cron is loaded, but its extension is not in database {visible(home)}",
            f"A superuser creates it there: {create}",
            (create,),
            home,
        )
    if not seen["available"]:
        return Absent(
            "pg_cron is not installed on this server",
            "`pgreaper cron print` shows each step; without pg_cron, `pgreaper work` does the same from cron.",
            (package, _preload(seen), "-- Restart the server.", create),
        )
    if seen["libraries"] is not None and "pg_cron" not in re.split(r"[\s,\"]+", seen["libraries"]):
        return Absent(
            "pg_cron is not loaded: it is not in shared_preload_libraries",
            "A superuser adds it and restarts the server: `pgreaper cron print` shows the statements.",
            (_preload(seen), "-- Restart the server.", create),
        )
    return Absent(
        f"pg_cron is not in database {visible(seen['database'])}, and role {visible(seen['role'])} cannot see"
        " where it is",
        "Name its database with --cron-database; superusers see it in `show cron.database_name`.",
        ("-- Only if it is not there yet, with pg_cron in shared_preload_libraries:", create),
    )


def _preload(seen: Mapping[str, Any]) -> str:
    if seen["libraries"] is None:
        return (
            "-- Add pg_cron to shared_preload_libraries (alter system, postgresql.conf, or the provider's parameters)."
        )
    # One quoted word each: in a list within one pair of quotes the server would look for one library of that name.
    libraries = [word.strip(' "') for word in seen["libraries"].split(",") if word.strip()]
    return f"alter system set shared_preload_libraries = {', '.join(map(literal, [*libraries, 'pg_cron']))};"


@contextmanager
def reading(connection: Connection) -> Iterator[None]:
    """A transaction that only reads, finds what it names, and ends in bounded time; leaves no setting behind."""
    with connection.transaction():
        connection.execute("set transaction read only")
        pin(connection)
        yield


def pin(connection: Connection) -> None:
    """Find what is named where it is meant, and end in bounded time, until the transaction ends."""
    connection.execute(
        "select pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true),"
        " pg_catalog.set_config('statement_timeout', '10s', true), pg_catalog.set_config('lock_timeout', '2s', true)"
    )


def rows(connection: Connection, query: LiteralString, **values: object) -> list[dict[str, Any]]:
    """The rows of a query, whose parameters are ``%(name)s``."""
    with connection.cursor(row_factory=dict_row) as cursor:
        cursor.execute(query, values or None)
        return cursor.fetchall()

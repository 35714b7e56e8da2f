"""
Putting pgreaper's schema into a database, comparing it, and taking it out again.

Owns everything about ``sql/`` and ``migrations/``: where the two folders are,
how a revision applies their files, and the one transaction in which that
happens.  Owns no SQL interface of the reaper and no host application's
migrations; the call from a host's own revision is :mod:`pgreaper.alembic`.
Besides that module nothing in the package imports Alembic or SQLAlchemy.

Every path, online and as text for ``psql``, goes through :func:`run`: settings
and advisory lock, then Alembic's steps, then the settings the caller had.
"""

import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, Final

import psycopg
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import create_engine
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from pgreaper import __version__, trust
from pgreaper.connection import connect, resolve
from pgreaper.errors import AccessDenied, ReaperError, VersionMismatch, translate
from pgreaper.statement import qualified

Database = str | Connection | Engine | None
"""A connection string, something of SQLAlchemy's, or None: what the environment names."""


class Refused(ReaperError):
    """The database is not in the state that the change asks for; nothing was changed."""

    exit_code: ClassVar[int] = 3
    code: ClassVar[str] = "refused"


# --------------------------------------------------------------------------
# The files


@dataclass(frozen=True, slots=True)
class Source:
    """The folder of migrations and its neighbour, the folder of SQL."""

    migrations: Path

    @property
    def sql(self) -> Path:
        """The database as it is now, one object per file."""
        return self.migrations.with_name(self.migrations.name.replace("migrations", "sql"))

    @property
    def scripts(self) -> ScriptDirectory:
        """Alembic's view of the revisions."""
        return ScriptDirectory(str(self.migrations))

    def manifest(self) -> tuple[str, ...]:
        r"""Paths below ``sql/`` in the order of ``install.sql`` (its ``\ir`` lines)."""
        text = (self.sql / "install.sql").read_text(encoding="utf-8")
        return tuple(re.findall(r"^\\ir\s+(\S+)", text, re.MULTILINE))

    def path(self, revision: str, name: str) -> Path:
        """
        Where the text is that this revision installs under this name.

        A text is retired in the folder of the last revision that installs it; the
        earlier ones, which install the same text, find it there too.
        """
        for folder in sorted((self.migrations / "retired").glob("[0-9]*")):
            if folder.name >= revision and (folder / name).is_file():
                return folder / name
        return self.sql / name

    def read(self, revision: str, name: str) -> str:
        """The text that this revision installs under this name."""
        return self.path(revision, name).read_text(encoding="utf-8")


@cache
def source() -> Source:
    """The files of this package: inside a wheel, else beside it in the checkout."""
    package = Path(__file__).resolve().parent
    places = (package / "_migrations", package.parent / "migrations")
    for place in places:
        found = Source(place)
        if (found.migrations / "env.py").is_file() and (found.sql / "install.sql").is_file():
            return found
    raise ReaperError(
        f"the SQL of pgreaper is missing: neither {places[0]} nor {places[1]} holds it",
        hint="Reinstall the package; a build has left out its data files.",
    )


_TOKEN = re.compile(
    r"""--[^\n]*
      | /\*.*?\*/
      | '(?:[^']|'')*'
      | "(?:[^"]|"")*"
      | (?P<tag>\$(?:[A-Za-z_]\w*)?\$) .*? (?P=tag)
      | ;""",
    re.DOTALL | re.VERBOSE,
)
_COMMENT = re.compile(r"\s*(?:--[^\n]*(?:\n|$)\s*)*")
_CREATES = re.compile(
    r"create (?:or replace )?(?:(table|view|type|domain|sequence|function|procedure) pgreaper\.(\w+)"
    r"|(trigger) (\w+) [\w\s]+? (on pgreaper\.\w+))"
)


def statements(text: str) -> Iterator[str]:
    """
    One statement at a time, unchanged except for the comments before it.

    Drivers that prepare every statement (asyncpg) refuse more than one at once.
    """
    start = 0
    for token in _TOKEN.finditer(text):
        if token[0] == ";":
            yield _COMMENT.sub("", text[start : token.end()], count=1)
            start = token.end()
    rest = _COMMENT.sub("", text[start:], count=1)
    if rest:
        yield rest


def objects(text: str) -> Iterator[tuple[str, str, str]]:
    """What a file of ``sql/`` creates: kind, name (of a trigger: where it is, too), and the statement."""
    for statement in statements(text):
        if found := _CREATES.match(statement):
            kind, name, trigger, called, on = found.groups()
            yield (kind, name, statement) if kind else (trigger, f"{called} {on}", statement)


# --------------------------------------------------------------------------
# One transaction around Alembic

# Installs take turns on an advisory lock: the letters "pgreaper" as a bigint.  For
# everything else DDL waits two seconds at most.  The second block sees whether the
# settings of the first have survived it, which they do in a transaction only.
_OPENING = """\
do $opening$
begin
  perform pg_catalog.set_config('pgreaper.lock_timeout', pg_catalog.current_setting('lock_timeout'), true),
          pg_catalog.set_config('pgreaper.search_path', pg_catalog.current_setting('search_path'), true),
          pg_catalog.set_config('pgreaper.client_min_messages',
                                pg_catalog.current_setting('client_min_messages'), true);

  perform pg_catalog.set_config('lock_timeout', '1min', true);
  perform pg_catalog.pg_advisory_xact_lock(8099568234601145714);

  perform pg_catalog.set_config('lock_timeout', '2s', true),
          pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true),
          pg_catalog.set_config('client_min_messages', 'warning', true);
end
$opening$;

do $opening$
begin
  if coalesce(pg_catalog.current_setting('pgreaper.lock_timeout', true), '') operator(pg_catalog.=) '' then
    raise exception 'pgreaper is installed and removed inside one transaction only'
      using errcode = 'no_active_sql_transaction',
            hint = 'Run the script with psql -1, or take the call out of autocommit.';
  end if;
end
$opening$;
"""

_CLOSING = """\
do $closing$
begin
  perform pg_catalog.set_config('lock_timeout', pg_catalog.current_setting('pgreaper.lock_timeout'), true),
          pg_catalog.set_config('search_path', pg_catalog.current_setting('pgreaper.search_path'), true),
          pg_catalog.set_config('client_min_messages',
                                pg_catalog.current_setting('pgreaper.client_min_messages'), true);
end
$closing$;
"""

# Before anything of a schema that is there already is read: its version table may be a view of somebody's.
_TRUST = f"""\
do $trust$
declare
  v_stranger record;
begin
  {qualified(trust.OBJECTS.replace("from (", "into v_stranger from (", 1))};
  if found then
    raise exception '{trust.FACT.format(what="%", owner="%", caller="%")}',
      v_stranger.what, pg_catalog.quote_ident(v_stranger.owner), pg_catalog.quote_ident(v_stranger.caller)
      using errcode = 'duplicate_schema',
            hint = pg_catalog.format('{trust.HINT.format(owner="%I")}', v_stranger.owner);
  end if;
end
$trust$;
"""

# Before Alembic's first write, because its version table lives in this schema.
_ARRIVE = """\
do $arrive$
declare
  v_revision text;
begin
  if current_setting('server_version_num')::integer < 140000 then
    raise exception 'pgreaper needs PostgreSQL 14 or newer, this is %', current_setting('server_version')
      using errcode = 'feature_not_supported';
  end if;

  if to_regclass('pgreaper.schema_version') is not null then
    select v.version_num into v_revision from pgreaper.schema_version as v;
    raise exception 'pgreaper is installed already (revision %)', coalesce(v_revision, 'unknown')
      using errcode = 'duplicate_schema',
            hint = 'Nothing was changed. "pgreaper install --check" compares it with the files.';
  end if;

  if to_regnamespace('pgreaper') is not null then
    raise exception 'schema pgreaper exists already, and not from an installation of pgreaper'
      using errcode = 'duplicate_schema',
            hint = 'Nothing was changed. If it may go: drop schema pgreaper cascade.';
  end if;
end
$arrive$;

create schema pgreaper;
"""

# After Alembic's last write.  No cascade: an object of the user's that was put
# into our schema stops this, with its name, and the transaction goes back.
_LEAVE = """\
drop table pgreaper.schema_version;

drop schema pgreaper;
"""


# Only in a text for psql: Alembic itself reads the revision when it is online.
_EXPECT = """\
do $expect$
declare
  v_revision text;
begin
  if to_regclass('pgreaper.schema_version') is not null then
    select v.version_num into v_revision from pgreaper.schema_version as v;
  end if;

  if v_revision is distinct from '{revision}' then
    raise exception 'this script starts from revision {revision} of pgreaper, the database has %',
                    coalesce(v_revision, 'none')
      using errcode = 'object_not_in_prerequisite_state', hint = 'Nothing was changed.';
  end if;
end
$expect$;
"""


def execute(op: Operations, text: str) -> None:
    """
    Send SQL to the database as it is written, or print it.

    ``op.execute(text)`` would take ``:name`` in a function body for a parameter
    and double every ``%`` of an offline script.  ``no_parameters`` is given per
    statement: ``execution_options()`` would change the host's connection for good.
    """
    context = op.get_context()
    if context.as_sql:
        context.impl.static_output(text.rstrip("\n"))
        return
    connection = op.get_bind()
    for statement in statements(text):
        connection.exec_driver_sql(statement, execution_options={"no_parameters": True})


def apply(op: Operations, revision: str, files: Iterable[str]) -> None:
    """Install these files of ``sql/``, each as this revision knows it."""
    for name in files:
        execute(op, _source(op).read(revision, name))


def drop(op: Operations, revision: str, files: Sequence[str]) -> None:
    """
    Drop what :func:`apply` created from these files, last first, nothing else.

    Without ``cascade``, so Postgres itself refuses while an object of the
    user's depends on one of ours.
    """
    for name in reversed(files):
        for kind, created, _ in reversed(list(objects(_source(op).read(revision, name)))):
            execute(op, f"drop trigger {created};" if kind == "trigger" else f"drop {kind} pgreaper.{created};")


# A function that is made anew belongs to nobody's grants; those on the old one go on to it.
_KEEP_GRANTS = """\
do $keep$
begin
  perform pg_catalog.set_config('pgreaper.grants', coalesce((
    select string_agg(format('grant execute on routine pgreaper.{name} to %s%s', a.grantee::regrole,
                             case when a.is_grantable then ' with grant option' end), '; ')
      from pg_catalog.pg_proc as p
     cross join lateral pg_catalog.aclexplode(p.proacl) as a
     where p.pronamespace = 'pgreaper'::regnamespace
       and p.proname = '{name}'
       and a.grantee not in (0, p.proowner)), ''), true);
end
$keep$;
"""
_GIVE_GRANTS = """\
do $give$
declare
  v_grants constant text := pg_catalog.current_setting('pgreaper.grants');
begin
  if v_grants <> '' then
    execute v_grants;
  end if;
end
$give$;
"""


def replace(op: Operations, old: str, new: str, files: Iterable[str]) -> None:
    """
    Put the functions of these files, as revision ``new`` knows them, in the place of those of ``old``.

    Where the signature stays, the function stays the same object: calls that run meanwhile
    find it, and so do grants.  Where it changes, the old one is dropped, so that no overload
    is left behind, and the new one gets its grants.  Functions and their triggers only.
    """
    for name in files:
        before = {created: statement for _, created, statement in objects(_source(op).read(old, name))}
        for statement in statements(_source(op).read(new, name)):
            kind, created = next(((kind, created) for kind, created, _ in objects(statement)), ("", ""))
            if created not in before:
                execute(op, statement)
            elif statement == before[created]:
                pass  # To make a trigger anew would lock its table for everybody who writes.
            elif _signature(statement) == _signature(before[created]):
                execute(op, statement.replace("create ", "create or replace ", 1))
            else:
                execute(op, _KEEP_GRANTS.format(name=created))
                execute(op, f"drop {kind} pgreaper.{created};")
                execute(op, statement)
                execute(op, _GIVE_GRANTS)


def _signature(statement: str) -> str:
    """A function's name, arguments and result as they are written: what CREATE OR REPLACE does not change."""
    head = re.split(r"\blanguage\s", re.sub(r"--[^\n]*", "", statement), maxsplit=1)[0]
    return " ".join(head.split())


def _source(op: Operations) -> Source:
    scripts = op.get_context().script
    return Source(Path(scripts.dir)) if scripts else source()


def _leave_at_base(*, ctx: MigrationContext, heads: set[str], **_: object) -> None:
    if not heads:
        execute(Operations(ctx), _LEAVE)


OPTIONS: dict[str, Any] = {
    "version_table": "schema_version",
    "version_table_schema": "pgreaper",
    "on_version_apply": (_leave_at_base,),
}
"""What every Alembic context of pgreaper is configured with."""

FORCE: Final = "pgreaper_force"
"""The option that lets a downgrade throw unfinished work away."""


def run(context: MigrationContext) -> str | None:
    """
    Run the steps of a configured Alembic context, beside other installs and inside the caller's transaction.

    Returns the revision that was found once the lock was there.  The revisions get
    their operations as an argument: Alembic's global ``op`` may be in use by the
    host's revision that called us.
    """
    if context.opts.get("dont_mutate"):  # `alembic current`, `alembic check`
        if not context.as_sql:
            execute(Operations(context), _TRUST)
        context.run_migrations()
        return context.get_current_revision()

    op = Operations(context)
    execute(op, _OPENING)
    execute(op, _TRUST)
    before = context.get_current_revision()
    if before is None:
        execute(op, _ARRIVE)
    elif context.as_sql:
        execute(op, _EXPECT.format(revision=before))
    try:
        context.run_migrations(op=op)
    except CommandError as error:
        raise VersionMismatch(
            f"revision {before} of pgreaper is installed, and this version of the package does not know it",
            hint="Use the version that installed it, or a newer one.",
        ) from error
    if before is None and not context.as_sql and context.get_current_revision() is None:
        execute(op, _LEAVE)
    execute(op, _CLOSING)
    return before


def upgrade_steps(scripts: ScriptDirectory, to: str) -> Callable[..., Iterable[Any]]:
    """Alembic's work function for an upgrade; no steps when the database is there or beyond."""

    def steps(heads: tuple[str, ...], _context: object) -> Iterable[Any]:
        return scripts._upgrade_revs(to, heads)  # type: ignore[arg-type]  # noqa: SLF001 - as in Alembic's cookbook

    return steps


def downgrade_steps(scripts: ScriptDirectory, to: str) -> Callable[..., Iterable[Any]]:
    """Alembic's work function for a downgrade."""

    def steps(heads: tuple[str, ...], _context: object) -> Iterable[Any]:
        return scripts._downgrade_revs(to, heads)  # type: ignore[arg-type]  # noqa: SLF001 - as in Alembic's cookbook

    return steps


# --------------------------------------------------------------------------
# Install, uninstall


@dataclass(frozen=True, slots=True)
class Change:
    """What an install or uninstall found and left: revisions, None for not installed."""

    before: str | None
    after: str | None
    kept: tuple[str, ...] = ()
    """Statements that would take from roles what they keep on the user's tables, where pgreaper goes."""

    @property
    def changed(self) -> bool:
        """False when everything was as asked for already."""
        return self.before != self.after


def install(database: Database = None) -> Change:
    """
    Install pgreaper, or upgrade it to this package's revision.

    Does nothing when it is there already.  Racing calls take turns; the first one
    installs.  A SQLAlchemy connection is used inside its transaction, which the
    caller commits.

    Raises Refused when schema ``pgreaper`` exists and is somebody else's,
    VersionMismatch when the database is newer than the package, DatabaseBusy when
    a lock did not come in time.
    """
    scripts = source().scripts
    with transaction(database) as connection:
        context = _configure(scripts, upgrade_steps(scripts, "head"), connection)
        before = run(context)
        return Change(before, context.get_current_revision())


def install_sql() -> str:
    """The same as text for ``psql``: installs everything or, over an installation, fails before a change."""
    scripts = source().scripts
    return _script(scripts, upgrade_steps(scripts, "head"), start=None)


def uninstall(database: Database = None, *, force: bool = False) -> Change:
    """
    Remove the schema and leave the catalog as it was before.

    Rights on the user's tables stay with the roles that were granted them, because they may have other reasons:
    the statements that take them are returned, and nobody else knows them afterwards.

    ``force``: also with dead letters or active leases; what they say is lost.

    Raises Refused while there are some, or while an object of the user's depends
    on one of ours.
    """
    scripts = source().scripts
    with transaction(database) as connection:
        context = _configure(scripts, downgrade_steps(scripts, "base"), connection, {FORCE: force})
        execute(Operations(context), _TRUST)
        if context.get_current_revision() is None:
            return Change(None, None)
        kept = _kept(connection)
        return Change(run(context), context.get_current_revision(), kept)


def _kept(connection: Connection) -> tuple[str, ...]:
    """What _kept_rights() says of each role that is known; of an installation in pieces nothing."""
    try:
        with connection.begin_nested():
            rows = connection.exec_driver_sql(
                "select distinct k.statement from pgreaper.grants as g"
                " cross join lateral pgreaper._kept_rights(g.role, g.kind) as k (statement) order by 1"
            )
            return tuple(str(statement) for (statement,) in rows)
    except DBAPIError as error:
        if isinstance(error.orig, psycopg.Error) and str(error.orig.sqlstate).startswith("42"):
            return ()
        raise


def uninstall_sql(*, force: bool = False) -> str:
    """The same as text for ``psql``, for a database at this package's revision."""
    scripts = source().scripts
    return _script(scripts, downgrade_steps(scripts, "base"), start=scripts.get_current_head(), options={FORCE: force})


def _configure(
    scripts: ScriptDirectory,
    steps: Callable[..., Iterable[Any]],
    connection: Connection | None,
    options: Mapping[str, object] | None = None,
) -> MigrationContext:
    return MigrationContext.configure(
        connection=connection,
        dialect_name=None if connection else "postgresql+psycopg",
        opts={**OPTIONS, "script": scripts, "fn": steps, **(options or {})},
    )


def _script(
    scripts: ScriptDirectory,
    steps: Callable[..., Iterable[Any]],
    *,
    start: str | None,
    options: Mapping[str, object] | None = None,
) -> str:
    text = io.StringIO()
    offline = {"as_sql": True, "output_buffer": text, "starting_rev": start}
    context = _configure(scripts, steps, None, {**offline, **(options or {})})
    text.write(f"-- pgreaper {__version__}: psql --set ON_ERROR_STOP=1 --file THIS\n\n")
    with context.begin_transaction():
        # A database may default to a stricter level, whose snapshot would be older than the lock.
        context.impl.static_output("set transaction isolation level read committed;")
        run(context)
    return text.getvalue()


@contextmanager
def transaction(database: Database = None) -> Iterator[Connection]:
    """
    A SQLAlchemy connection in a transaction that is committed at the end.

    A connection that is given stays the caller's: nothing is committed, and its
    errors arrive as they are.  Everything else speaks pgreaper's errors.
    """
    if isinstance(database, Connection):
        yield database
        return
    engine = database if isinstance(database, Engine) else _engine(database)
    try:
        with engine.begin() as connection:
            # What a pooler kept back of the address's options, a role to install as for example.
            for setting in getattr(connection.connection.dbapi_connection, "local_settings", {}).items():
                connection.exec_driver_sql("select pg_catalog.set_config(%s, %s, true)", setting)
            yield connection
    except DBAPIError as error:
        if isinstance(error.orig, psycopg.Error):
            raise _translate(error.orig) from error
        raise


def _engine(url: str | None) -> Engine:
    # The URL stays with libpq: SQLAlchemy never sees it, so no repr of its shows a password.
    opened = partial(connect, resolve(url), name="pgreaper/install")
    return create_engine(
        "postgresql+psycopg://",
        creator=opened,
        poolclass=NullPool,
        isolation_level="READ COMMITTED",
        use_native_hstore=False,
    )


_REFUSALS: Final = frozenset(
    {
        "0A000",  # feature_not_supported: an old server
        "42P06",  # duplicate_schema: the schema is there already
        "55000",  # object_not_in_prerequisite_state: a script for another revision
        "55006",  # object_in_use: a revision that will not throw unfinished work away
    }
)


def _translate(error: psycopg.Error) -> ReaperError:
    """As everywhere, but DDL's own words may be repeated: they name objects, never a row's values."""
    state, diag = error.sqlstate, error.diag
    message = diag.message_primary or str(state)
    if state in _REFUSALS:
        return Refused(message, hint=diag.message_hint, sqlstate=state, original=error)
    if state == "2BP01":  # dependent_objects_still_exist, whose detail names them a line each
        names = "; ".join((diag.message_detail or message).splitlines())
        return Refused(
            f"pgreaper stays installed: {names}",
            hint="Nothing was changed. Drop or change what is named, then try again.",
            sqlstate=state,
            original=error,
        )
    if state == "42501":
        return AccessDenied(
            message,
            hint="Installing takes CREATE on the database, uninstalling the role that installed, checking TEMPORARY.",
            sqlstate=state,
            original=error,
        )
    return translate(error)


# --------------------------------------------------------------------------
# Check


@dataclass(frozen=True, slots=True)
class Difference:
    """An object that is not as the files say: missing, changed, unexpected or broken."""

    object: str
    state: str


@dataclass(frozen=True, slots=True)
class Check:
    """What is installed, against what this package installs."""

    revision: str | None
    expected: str
    differences: tuple[Difference, ...] = ()

    @property
    def installed(self) -> bool:
        """Whether any revision is installed."""
        return self.revision is not None

    @property
    def ok(self) -> bool:
        """Whether the database is exactly what this package installs."""
        return self.revision == self.expected and not self.differences


# One row per routine and view of a schema: what it is called, and everything
# that makes it behave as it does.
_DEFINITIONS = """\
select format('%s %s(%s)',
              case p.prokind when 'p' then 'procedure' else 'function' end,
              p.proname,
              pg_catalog.pg_get_function_identity_arguments(p.oid)),
       pg_catalog.jsonb_build_array(
         p.prosrc, l.lanname, p.provolatile, p.prosecdef, p.proisstrict, p.proparallel, p.proleakproof,
         p.procost, p.prorows, p.proconfig,
         pg_catalog.pg_get_function_arguments(p.oid), pg_catalog.pg_get_function_result(p.oid))::text
  from pg_catalog.pg_proc as p
  join pg_catalog.pg_language as l on l.oid = p.prolang
 where p.pronamespace = {schema}
union all
select format('view %s', c.relname),
       pg_catalog.jsonb_build_array(
         pg_catalog.pg_get_viewdef(c.oid), c.reloptions,
         (select pg_catalog.jsonb_agg(
                   pg_catalog.jsonb_build_array(a.attname, pg_catalog.format_type(a.atttypid, a.atttypmod))
                   order by a.attnum)
            from pg_catalog.pg_attribute as a
           where a.attrelid = c.oid and a.attnum > 0))::text
  from pg_catalog.pg_class as c
 where c.relnamespace = {schema}
   and c.relkind = 'v'
"""
_INSTALLED = _DEFINITIONS.format(schema="'pgreaper'::pg_catalog.regnamespace")
_FROM_FILES = _DEFINITIONS.format(schema="pg_catalog.pg_my_temp_schema()")
_TEMPORARY = {
    "function": "create function pg_temp.",
    "procedure": "create procedure pg_temp.",
    "view": "create temporary view ",
}


def check(database: Database = None) -> Check:
    """
    Compare the database with the files: its revision, then every function and view.

    The files' objects are created as temporary ones, read back from the catalog as
    Postgres understood them, and rolled away.  Nothing stays, but it takes a node
    that can be written and the right to create temporary objects.
    """
    scripts = source().scripts
    expected = str(scripts.get_current_head())
    with transaction(database) as connection:
        context = _configure(scripts, upgrade_steps(scripts, "head"), connection)
        execute(Operations(context), _TRUST)
        revision = context.get_current_revision()
        if revision != expected:
            return Check(revision, expected)
        return Check(revision, expected, tuple(_differences(connection)))


def repair(database: Database = None) -> tuple[Difference, ...]:
    """
    Put back every function and view that is not as this package installs it; returns what was found.

    Books and policies stay as they are, and so does what somebody has added.  Rights that were granted survive,
    unless a function has to be dropped because its result or the names of its parameters are other ones.

    Raises Refused when another revision is installed, or when an object of the user's is in the way.
    """
    scripts = source().scripts
    expected = str(scripts.get_current_head())
    with transaction(database) as connection:
        context = _configure(scripts, upgrade_steps(scripts, "head"), connection)
        op = Operations(context)
        execute(op, _OPENING)
        execute(op, _TRUST)
        revision = context.get_current_revision()
        if revision != expected:
            raise Refused(
                f"revision {revision or 'none'} of pgreaper is installed, and this version repairs revision {expected}",
                hint="Run `pgreaper install` first.",
            )
        found = tuple(_differences(connection))
        wanted = {difference.object.split("(")[0] for difference in found if difference.state != "unexpected"}
        for name in source().manifest():
            text = source().read(expected, name)
            if any(f"{kind} {created}" in wanted for kind, created, _ in objects(text)):
                for statement in statements(text):
                    _put_back(op, statement)
        if wanted:
            execute(op, source().read(expected, "rights.sql"))
        execute(op, _CLOSING)
        return found


def _put_back(op: Operations, statement: str) -> None:
    """Run one statement of a file over what is there; what holds no rows is dropped when it cannot be replaced."""
    creates = _CREATES.match(statement)
    if creates is None:
        if statement.startswith("comment on "):
            execute(op, statement)
        return
    kind, created = creates[1], creates[2]
    if kind not in _TEMPORARY:
        return
    try:
        with op.get_bind().begin_nested():
            execute(op, statement.replace("create ", "create or replace ", 1))
    except DBAPIError as error:
        # 42P13, 42P16: another result, other parameters, other columns.
        if not isinstance(error.orig, psycopg.Error) or error.orig.sqlstate not in {"42P13", "42P16"}:
            raise
        execute(op, f"drop {kind} pgreaper.{created};")
        execute(op, statement)


def _differences(connection: Connection) -> Iterator[Difference]:
    savepoint = connection.begin_nested()
    try:
        connection.exec_driver_sql("set local search_path = ''")
        connection.exec_driver_sql("set local lock_timeout = '2s'")
        broken = list(_create_temporary(connection))
        there = _definitions(connection, _INSTALLED)
        wanted = _definitions(connection, _FROM_FILES)
    finally:
        savepoint.rollback()
    yield from broken
    for name in sorted(there.keys() | wanted.keys()):
        if name not in there:
            yield Difference(name, "missing")
        elif name not in wanted:
            if not any(name.split("(")[0] == lost.object for lost in broken):
                yield Difference(name, "unexpected")
        elif there[name] != wanted[name]:
            yield Difference(name, "changed")


def _create_temporary(connection: Connection) -> Iterator[Difference]:
    files = source()
    for name in files.manifest():
        for kind, created, statement in objects((files.sql / name).read_text(encoding="utf-8")):
            if kind not in _TEMPORARY:
                continue
            temporary = _TEMPORARY[kind] + created + statement.partition(f"pgreaper.{created}")[2]
            try:
                with connection.begin_nested():
                    connection.exec_driver_sql(temporary, execution_options={"no_parameters": True})
            except DBAPIError as error:
                if not isinstance(error.orig, psycopg.Error) or error.orig.sqlstate in {"42501", "25006"}:
                    raise
                yield Difference(f"{kind} {created}", "broken")


def _definitions(connection: Connection, query: str) -> dict[str, str]:
    rows = connection.exec_driver_sql(query, execution_options={"no_parameters": True})
    return {str(name): str(definition) for name, definition in rows}

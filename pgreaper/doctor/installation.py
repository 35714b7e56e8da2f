"""
pgreaper's own schema: its version, and whether its objects are as this package installs them.

The comparison reads only.  A function is compared by the text that Postgres keeps of it and by its attributes.
A view keeps no text: the planner is asked for the plan of the view and of the query in its file, which are the
same when the two mean the same.  ``pgreaper install --check`` compares more (defaults of parameters, return
types) but has to create temporary objects for that.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Final

import psycopg
from psycopg import sql

from pgreaper import trust
from pgreaper.api import SQL_VERSION, Reaper
from pgreaper.commands import literal, name
from pgreaper.doctor.finding import ERROR, WARNING, Finding, Look, listed
from pgreaper.errors import VersionMismatch
from pgreaper.text import plural, visible

REPAIR: Final = "pgreaper install --repair"


def presence(look: Look) -> Iterator[Finding]:
    """Is there anything, may this role see it, and do the two versions fit?  A finding here ends the look."""
    with look.reading():
        there = look.row(
            "select to_regnamespace('pgreaper') is not null as installed,"
            " coalesce(has_schema_privilege(to_regnamespace('pgreaper'), 'usage'), false) as usable"
        )
        if not there.installed:
            yield Finding(
                "not-installed", ERROR, None, look.facts.database,
                f"pgreaper is not installed in database {visible(look.facts.database)}",
                commands=("pgreaper install",),
            )  # fmt: skip
            return
        if not there.usable:
            yield Finding(
                "grants", ERROR, None, look.facts.role, f"role {visible(look.facts.role)} may not use schema pgreaper",
                sql=(grant(look.facts.role),),
            )  # fmt: skip
            return
        for stranger in look.rows(trust.OBJECTS):
            owner = visible(stranger.owner)
            yield Finding(
                "owner", ERROR, None, stranger.owner,
                trust.FACT.format(what=visible(stranger.what), owner=owner, caller=visible(stranger.caller)),
                advice=trust.HINT.format(owner=owner),
            )  # fmt: skip
            return
        version = str(look.row("select pgreaper.reaper_version()::text as version").version)
    older = _parts(version) < _parts(SQL_VERSION)
    try:
        Reaper(look.connection).require_version(version)
    except VersionMismatch as error:
        yield Finding(
            "version", ERROR, None, "pgreaper", error.message,
            commands=("pgreaper install",) if older else (),
            advice=None if older else "Use the version of the package that installed it, or a newer one.",
        )  # fmt: skip


def grant(role: str, kind: str = "worker") -> str:
    """The statement that gives a role what a worker needs, on every registered target."""
    return f"select pgreaper.reaper_grant({literal(role)}, {literal(kind)});"


def _parts(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


# -- drift


@dataclass(frozen=True, slots=True)
class _Routine:
    source: str
    language: str
    volatility: str
    definer: bool
    strict: bool
    settings: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Shipped:
    """What the files of ``sql/`` create, as far as it can be read from their text."""

    routines: dict[str, _Routine]
    views: dict[str, tuple[str, bool]]
    tables: dict[str, frozenset[str]]
    indexes: frozenset[str]
    triggers: dict[tuple[str, str], str]


@cache
def shipped() -> _Shipped:
    """The files of this package, read once."""
    from pgreaper.schema import objects, source  # Alembic takes half a second: only where it is needed.

    routines: dict[str, _Routine] = {}
    views: dict[str, tuple[str, bool]] = {}
    tables: dict[str, frozenset[str]] = {}
    indexes: set[str] = set()
    triggers: dict[tuple[str, str], str] = {}
    files = source()
    for file in files.manifest():
        text = (files.sql / file).read_text(encoding="utf-8")
        indexes |= set(re.findall(r"^create (?:unique )?index (\w+)", text, re.MULTILINE))
        for kind, created, statement in objects(text):
            if kind in ("function", "procedure"):
                routines[created] = _routine(statement)
            elif kind == "view":
                head, _, query = statement.partition(" as\n")
                views[created] = (query.rstrip().rstrip(";"), "with (" in head)
            elif kind == "table":
                columns = re.findall(r"^  (\w+) (?!check|unique|primary|exclude)", statement, re.MULTILINE)
                tables[created] = frozenset(columns) - {"constraint", "primary", "unique", "check"}
            elif kind == "trigger":
                trigger, _, table = created.partition(" on pgreaper.")
                triggers[table, trigger] = " ".join(statement.split())
    return _Shipped(routines, views, tables, frozenset(indexes), triggers)


def head() -> str:
    """The revision that this package installs."""
    from pgreaper.schema import source

    return str(source().scripts.get_current_head())


def _routine(statement: str) -> _Routine:
    found = re.search(r"\bas (\$\w*\$)(.*)\1", statement, re.DOTALL)
    source = found[2] if found else ""
    head = statement[: found.start()] if found else statement
    words = {line.strip() for line in head.splitlines()}
    language = re.search(r"^language (\w+)", head, re.MULTILINE)
    return _Routine(
        source=source,
        language=language[1] if language else "",
        volatility=next((word for word in ("immutable", "stable") if word in words), "volatile"),
        definer="security definer" in words,
        strict=bool(words & {"strict", "returns null on null input"}),
        settings=frozenset(
            f"{setting}={_plain(value)}"
            for setting, value in re.findall(r"^set (\w+) (?:=|to) (.+)$", head, re.MULTILINE)
        ),
    )


def _plain(value: str) -> str:
    return re.sub(r"[\s'\"]", "", value)


def drift(look: Look) -> Iterator[Finding]:
    """Functions, views, tables and indexes of schema pgreaper against this package."""
    with look.reading():
        version = str(look.row("select pgreaper.reaper_version()::text as version").version)
        readable = look.row(
            "select coalesce(has_table_privilege(to_regclass('pgreaper.schema_version'), 'select'), false) as it"
        ).it
        revision = look.rows("select v.version_num as it from pgreaper.schema_version as v") if readable else []
    if version != SQL_VERSION or (revision and revision[0].it != head()):
        if _parts(version) <= _parts(SQL_VERSION):
            yield Finding(
                "upgrade", WARNING, None, "pgreaper",
                f"the database has version {visible(version)} of pgreaper"
                + (f" (revision {visible(revision[0].it)})" if revision else "")
                + f", this package brings {SQL_VERSION} (revision {head()})",
                commands=("pgreaper install",),
            )  # fmt: skip
        return
    wanted = shipped()
    with look.reading():
        silent = _triggers(look, wanted)
        changed, extra = _routines(look, wanted)
        missing_tables = _tables(look, wanted)
        absent, invalid = _indexes(look, wanted)
    changed += [view for view in wanted.views if not _same_view(look, view, *wanted.views[view])]
    if changed:
        yield Finding(
            "drift", ERROR, None, "pgreaper",
            f"{plural(len(changed), 'object')} of schema pgreaper {'is' if len(changed) == 1 else 'are'} not as this"
            f" package installs {'it' if len(changed) == 1 else 'them'}: {listed(sorted(changed))}",
            commands=(REPAIR,),
        )  # fmt: skip
    for routine in extra:
        yield Finding(
            "drift", WARNING, None, routine,
            f"{visible(routine)} does not come from this package and may be called in place of pgreaper's own",
            sql=(f"drop routine {routine};",),
        )  # fmt: skip
    for trigger, table, statement in silent:
        yield Finding(
            "drift", ERROR, None, table, f"trigger {trigger} on pgreaper.{table} does not fire: nothing is counted",
            sql=(statement,),
        )  # fmt: skip
    if missing_tables:
        yield Finding(
            "drift", ERROR, None, "pgreaper", f"missing in schema pgreaper: {listed(missing_tables)}",
            advice="Restore it from a backup: what it recorded cannot be made again.",
        )  # fmt: skip
    for index, statement in absent:
        yield Finding(
            "books-index", WARNING, None, index, f"index {index} of pgreaper's own tables is missing: {_SLOW}",
            sql=(statement,),
        )  # fmt: skip
    for index in invalid:
        yield Finding(
            "books-index", WARNING, None, index, f"index {index} of pgreaper's own tables is not valid: {_SLOW}",
            sql=(f"reindex index concurrently pgreaper.{name(index)};",),
        )  # fmt: skip


_SLOW = "claims and status become slow"


def _routines(look: Look, wanted: _Shipped) -> tuple[list[str], list[str]]:
    """Names of routines that are missing or other than shipped; signatures of those that nobody shipped."""
    found = look.rows(
        "select p.proname::text as name, p.oid::regprocedure::text as signature, p.prosrc as source,"
        " l.lanname::text as language, p.provolatile::text as volatility, p.prosecdef as definer,"
        " p.proisstrict as strict, coalesce(p.proconfig, '{}') as settings"
        "  from pg_catalog.pg_proc as p join pg_catalog.pg_language as l on l.oid = p.prolang"
        " where p.pronamespace = 'pgreaper'::regnamespace order by p.oid"
    )
    kinds = {"v": "volatile", "s": "stable", "i": "immutable"}
    same: set[str] = set()
    extra: list[str] = []
    seen: set[str] = set()
    for f in found:
        there = _Routine(
            f.source, f.language, kinds[f.volatility], f.definer, f.strict,
            frozenset(f"{key}={_plain(value)}" for key, _, value in (s.partition("=") for s in f.settings)),
        )  # fmt: skip
        if f.name not in wanted.routines or (f.name in seen and wanted.routines[f.name] != there):
            extra.append(f.signature)
            continue
        seen.add(f.name)
        if wanted.routines[f.name] == there:
            same.add(f.name)
    return sorted(wanted.routines.keys() - same), extra


def _tables(look: Look, wanted: _Shipped) -> list[str]:
    """Tables and columns that are gone."""
    there = {
        row.table: set(row.columns)
        for row in look.rows(
            "select c.relname::text as table, array_agg(a.attname::text) as columns from pg_catalog.pg_class as c"
            "  join pg_catalog.pg_attribute as a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped"
            " where c.relnamespace = 'pgreaper'::regnamespace and c.relkind in ('r', 'p') group by 1"
        )
    }
    gone = sorted(wanted.tables.keys() - there.keys())
    for table, columns in sorted(wanted.tables.items()):
        gone += [f"{table}.{column}" for column in sorted(columns - there.get(table, columns))]
    return gone


def _triggers(look: Look, wanted: _Shipped) -> list[tuple[str, str, str]]:
    """Triggers of the books that are missing or disabled, with the statement that brings them back."""
    there = {
        (row.table, row.name): row.enabled
        for row in look.rows(
            "select c.relname::text as table, t.tgname::text as name, t.tgenabled in ('O', 'A') as enabled"
            "  from pg_catalog.pg_trigger as t join pg_catalog.pg_class as c on c.oid = t.tgrelid"
            " where c.relnamespace = 'pgreaper'::regnamespace and not t.tgisinternal"
        )
    }
    silent = []
    for (table, trigger), statement in wanted.triggers.items():
        if (table, trigger) not in there:
            silent.append((trigger, table, statement))
        elif not there[table, trigger]:
            silent.append((trigger, table, f"alter table pgreaper.{name(table)} enable trigger {name(trigger)};"))
    return silent


def _indexes(look: Look, wanted: _Shipped) -> tuple[list[tuple[str, str]], list[str]]:
    """Indexes of the books that are gone, with the statement that makes them; and those that are not valid."""
    there = {
        row.name: row.valid
        for row in look.rows(
            "select c.relname::text as name, i.indisvalid as valid from pg_catalog.pg_index as i"
            "  join pg_catalog.pg_class as c on c.oid = i.indexrelid"
            " where c.relnamespace = 'pgreaper'::regnamespace"
        )
    }
    absent = [(index, _create(index)) for index in sorted(wanted.indexes - there.keys())]
    return absent, sorted(index for index, valid in there.items() if not valid)


def _create(index: str) -> str:
    from pgreaper.schema import source, statements

    files = source()
    for file in files.manifest():
        for statement in statements((files.sql / file).read_text(encoding="utf-8")):
            if re.match(rf"create (unique )?index {index}\b", statement):
                return " ".join(statement.replace(" index ", " index concurrently ", 1).split())
    raise AssertionError(index)


def _same_view(look: Look, view: str, query: str, options: bool) -> bool:  # noqa: FBT001
    """Whether the view has the columns, the types and the plan of the query in its file."""
    try:
        with look.reading():
            found = look.rows(
                "select c.reloptions is not null as options from pg_catalog.pg_class as c"
                " where c.relnamespace = 'pgreaper'::regnamespace and c.relname = %(view)s and c.relkind = 'v'",
                view=view,
            )
            return (
                bool(found)
                and found[0].options is options
                and _meaning(look, query) == _meaning(look, f"select * from pgreaper.{view}")  # noqa: S608  our own name
            )
    except psycopg.Error as error:
        # Class 42: one of the two does not fit the schema, or the view selects from itself.
        if error.sqlstate and error.sqlstate.startswith("42") and error.sqlstate != "42501":
            return False
        raise


def _meaning(look: Look, query: str) -> tuple[list[tuple[str, int]], list[str]]:
    """Columns and plan; runs nothing (a LIMIT of zero calls no function)."""
    text = sql.SQL(query)
    with look.connection.cursor() as cursor:
        cursor.execute(sql.SQL("select v.* from ({}) as v limit 0").format(text))
        columns = [(column.name, column.type_code) for column in cursor.description or ()]
        cursor.execute(sql.SQL("explain (verbose, costs off) {}").format(text))
        return columns, [str(line) for (line,) in cursor.fetchall()]


# -- rights


def public(look: Look) -> Iterator[Finding]:
    """PUBLIC has nothing; a function that somebody creates anew is PUBLIC's until the right is taken away."""
    with look.reading():
        found = look.rows(
            "select r.kind, r.name, pg_catalog.string_agg(distinct a.privilege_type, ', ') as rights"
            "  from (select 'schema' as kind, n.nspname::text as name,"
            "               coalesce(n.nspacl, acldefault('n', n.nspowner)) as acl"
            "          from pg_catalog.pg_namespace as n where n.oid = 'pgreaper'::regnamespace"
            "        union all"
            "        select 'relation', c.relname::text,"
            "               coalesce(c.relacl,"
            "                 acldefault((case c.relkind when 'S' then 's' else 'r' end)::\"char\", c.relowner))"
            "          from pg_catalog.pg_class as c"
            "         where c.relnamespace = 'pgreaper'::regnamespace and c.relkind in ('r', 'p', 'v', 'm', 'S')"
            "        union all"
            "        select 'routine', p.proname::text, coalesce(p.proacl, acldefault('f', p.proowner))"
            "          from pg_catalog.pg_proc as p where p.pronamespace = 'pgreaper'::regnamespace) as r"
            " cross join lateral pg_catalog.aclexplode(r.acl) as a where a.grantee = 0"
            " group by r.kind, r.name order by r.kind, r.name"
        )
    if found:
        what = [f"{row.rights} on {row.name}" for row in found]
        yield Finding(
            "public", ERROR, None, "public",
            f"PUBLIC, so every role, has {plural(len(what), 'right')} in schema pgreaper: {listed(what, 3)}",
            sql=(
                "revoke all on schema pgreaper from public;",
                "revoke all on all tables in schema pgreaper from public;",
                "revoke all on all sequences in schema pgreaper from public;",
                "revoke all on all routines in schema pgreaper from public;",
            ),
        )  # fmt: skip


def grants(look: Look) -> Iterator[Finding]:
    """The roles that reaper_grant() knows, and the one that looks if it may claim, can do what their kind does."""
    with look.reading():
        readable = look.row("select has_table_privilege('pgreaper.grants', 'select') as it").it
        known = look.rows("select g.role, g.kind from pgreaper.grants as g order by 1, 2") if readable else []
        roles = [(row.role, row.kind) for row in known]
        claims = look.row(
            "select exists (select from pg_catalog.pg_proc as p where p.pronamespace = 'pgreaper'::regnamespace"
            " and p.proname = 'reaper_claim' and has_function_privilege(p.oid, 'execute')) as it"
        ).it
        if claims and look.facts.role not in [role for role, _ in roles]:
            roles.append((look.facts.role, "worker"))
        for role, kind in roles:
            missing = look.rows(
                "select m.statement || ';' as statement from pgreaper._missing_rights(%(role)s, %(kind)s) as m"
                " where m.ours",
                role=role, kind=kind,
            )  # fmt: skip
            if missing:
                yield Finding(
                    "grants", ERROR, None, role,
                    f"role {visible(role)} is to be a {kind}, but lacks {plural(len(missing), 'right')} on objects of"
                    " pgreaper",
                    sql=(grant(role, kind),),
                )  # fmt: skip


CHECKS = (drift, public, grants)

"""
Finds tables that look like holds: a deadline-like and a status-like column.

Owns the guesses: which names mean a deadline, which words mean held and expired.  A guess is told as one, and
where the states say nothing to an outsider (numbers, single letters) no command is made up: a wrong one would
change rows.  Reads only, under a timeout for each table and one for the whole: the catalog first, then of
each promising table how many rows of each state are past their deadline, from a sample where it is large.

Needs no pgreaper in the database.  Of the rows it reads states, which are categories, and nothing else.
"""

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

import psycopg
from psycopg import sql

from pgreaper import commands, trust
from pgreaper.commands import relation
from pgreaper.errors import DatabaseUnavailable, translate
from pgreaper.reading import Reader, Row

SAMPLE: Final = 32 * 2**20
"""Bytes of a table that are read; of a larger one, a random part of that size."""
STATES: Final = 20
"""A column with more different values is no state."""


@dataclass(frozen=True, slots=True)
class State:
    """How many rows have a state, and how many of them are past their deadline."""

    state: str | None
    rows: int
    overdue: int
    oldest_overdue: timedelta | None


@dataclass(frozen=True, slots=True)
class Candidate:
    """
    A table that looks like holds.

    ``held`` is empty and ``command`` None where the states could not be told apart; ``obstacle`` then says why.
    ``overdue`` counts the held rows past their deadline, from a sample when ``estimated``.
    """

    table: str
    deadline: str
    status: str | None
    stamp: str | None
    zone: str | None
    states: list[State]
    estimated: bool
    held: list[str]
    expired: str | None
    overdue: int | None
    oldest_overdue: timedelta | None
    policies: list[str]
    command: str | None
    obstacle: str | None
    assumptions: list[str]


@dataclass(frozen=True, slots=True)
class Discovery:
    """What was looked through and found, the most overdue first; ``skipped`` tables took too long."""

    tables: int
    candidates: list[Candidate]
    skipped: list[str]


# -- names and words

_DEADLINE = re.compile(r"expir(?!ed)|deadline|timeout|until|validity|valid_?(?:to|thru|through)|(?:^|_)due(?:_|$)")
_END = re.compile(r"^(?:end|ends|close|closes|finish)(?:_(?:at|on|date|dt|time))?$")
# About the deadline, but when something else happened.
_PAST = re.compile(r"sent|notified|remind|warned|created|updated|modified|changed|checked|extended|processed|last_")
_STAMP = re.compile(r"^(?:expired|released|lapsed|voided)_(?:at|on|time|date)$")
_STATUS = re.compile(r"^(?:\w*_)?(?:status|state|phase)(?:_?(?:id|code|name))?$")

# The more telling first.
_HELD: Final = (
    frozenset("held hold onhold reserved pending offered invited requested draft tentative provisional awaiting sent "
              "deferred blocked unpaid unconfirmed".split()),
    frozenset("waiting open active processing queued new started locked booked initiated created".split()),
)  # fmt: skip
_EXPIRED: Final = (
    frozenset("expired expire lapsed timedout timeout overdue".split()),
    frozenset("abandoned released stale forfeited void voided".split()),
    frozenset("cancelled canceled cancel".split()),
    frozenset("failed terminated ended inactive closed".split()),
)
_SWITCHES: Final = frozenset(
    "banned blocked locked reserved held suspended muted active enabled open pending frozen silenced restricted".split()
)


def _snake(text: str) -> str:
    """``offerExpiresAt`` and ``OFFER_EXPIRES_AT`` as ``offer_expires_at``."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", text)
    return re.sub(r"[^a-z0-9]+", "_", spaced.lower()).strip("_")


def _tokens(text: str) -> set[str]:
    snake = _snake(text)
    return {*snake.split("_"), snake.replace("_", "")} - {""}


def _deadline_rank(column: str) -> int:
    """2: the name says so; 1: it may be; 0: no deadline."""
    snake = _snake(column)
    if _PAST.search(snake) or _STAMP.match(snake):
        return 0
    if _DEADLINE.search(snake):
        return 2
    return 1 if _END.match(snake) else 0


def _related(first: str, second: str) -> bool:
    """Whether two names share a stem: ``ban_expires`` and ``banned``, ``reserved_until`` and ``RESERVED``."""
    ignored = re.compile(r"^(?:at|on|is|dt|date|time|until|valid\w*|due|expir\w*|deadline|timeout|status|state)$")
    return any(
        len(a) > 2 and len(b) > 2 and (a.startswith(b) or b.startswith(a))
        for a in _snake(first).split("_")
        for b in _snake(second).split("_")
        if not ignored.match(a) and not ignored.match(b)
    )


# -- the catalog

_TABLES: Final = """
select c.oid::bigint as oid, n.nspname::text as schema, c.relname::text as table, c.relkind::text as kind,
       pg_get_userbyid(c.relowner)::text as owner, pg_has_role(c.relowner, 'usage') as owned,
       row_security_active(c.oid) as secured,
       c.relkind = 'r' and exists (select from pg_inherits as i where i.inhparent = c.oid) as parent,
       (select jsonb_agg(jsonb_build_object(
                 'name', a.attname, 'number', a.attnum, 'not_null', a.attnotnull, 'size', a.atttypmod - 4,
                 'writable', a.attgenerated = '' and a.attidentity <> 'a',
                 'type', format_type(coalesce(nullif(t.typbasetype, 0), t.oid), null),
                 'enum', t.typtype = 'e') order by a.attnum)
          from pg_attribute as a join pg_type as t on t.oid = a.atttypid
         where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
           and has_column_privilege(c.oid, a.attnum, 'select')) as columns
  from pg_class as c
  join pg_namespace as n on n.oid = c.relnamespace
 where c.relkind in ('r', 'p') and not c.relispartition and c.relpersistence <> 't'
   and n.nspname !~ '^pg_' and n.nspname not in ('information_schema', 'pgreaper')
   and has_schema_privilege(n.oid, 'usage')
   and (%(schemas)s::text[] is null or n.nspname = any (%(schemas)s::text[]))
   and exists (select from pg_attribute as a
                where a.attrelid = c.oid and a.attnum > 0 and has_column_privilege(c.oid, a.attnum, 'select'))
   and not exists (select from pg_depend as d
                    where d.classid = 'pg_class'::regclass and d.objid = c.oid and d.deptype = 'e')
 order by 2, 3
"""

_DETAILS: Final = """
with recursive domain as (
  select a.attname, a.atttypid as type from pg_attribute as a
   where a.attrelid = %(oid)s::bigint::oid and a.attnum > 0 and not a.attisdropped
   union all
  select d.attname, t.typbasetype from domain as d join pg_type as t on t.oid = d.type and t.typtype = 'd'
), known as (
  -- Whether the server's own operators and functions are all that it has; those that it is made of leave no trace.
  select k.oid, k.conname, k.conrelid, k.contypid, k.conkey, pg_get_expr(k.conbin, k.conrelid) as definition,
         not exists (
           select from pg_depend as d
             left join pg_type as t on d.refclassid = 'pg_type'::regclass and t.oid = d.refobjid
            where d.classid = 'pg_constraint'::regclass and d.objid = k.oid
              and (d.refclassid in ('pg_proc'::regclass, 'pg_operator'::regclass) or t.typtype = 'b')) as plain
    from pg_constraint as k
   where k.contype = 'c' and (k.conrelid = %(oid)s::bigint::oid or k.contypid in (select type from domain))
)
select (select jsonb_object_agg(d.attname, d.checks)
          from (select d.attname, jsonb_agg(jsonb_build_array(k.definition, k.plain) order by k.conname) as checks
                  from domain as d join known as k on k.contypid = d.type group by 1) as d) as domains,
       (select jsonb_object_agg(a.attname, jsonb_build_array(format_type(a.atttypid, a.atttypmod),
                                                             format_type(d.type, null), t.typtype = 'e' or
                                                             t.typnamespace = 'pg_catalog'::regnamespace))
          from pg_attribute as a join domain as d on d.attname = a.attname
          join pg_type as t on t.oid = d.type and t.typtype <> 'd'
         where a.attrelid = c.oid) as types,
       (select jsonb_object_agg(a.attname, a.attnum) from pg_attribute as a
         where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped) as numbers,
       (select jsonb_object_agg(a.attname, pg_get_expr(d.adbin, d.adrelid))
          from pg_attrdef as d join pg_attribute as a on a.attrelid = d.adrelid and a.attnum = d.adnum
         where d.adrelid = c.oid) as defaults,
       (select jsonb_object_agg(a.attname, (select jsonb_agg(e.enumlabel order by e.enumsortorder)
                                              from pg_enum as e where e.enumtypid = a.atttypid))
          from pg_attribute as a join pg_type as t on t.oid = a.atttypid and t.typtype = 'e'
         where a.attrelid = c.oid and not a.attisdropped) as labels,
       (select jsonb_agg(jsonb_build_array(k.conkey, k.definition, k.plain) order by k.conname)
          from known as k where k.conrelid = c.oid) as checks,
       (select k.columns
          from pg_index as i
         cross join lateral (
            select jsonb_agg(a.attname order by x.position) as columns, bool_and(a.attnotnull) as not_null
              from unnest(i.indkey::smallint[]) with ordinality as x (attnum, position)
              left join pg_attribute as a on a.attrelid = i.indrelid and a.attnum = x.attnum
             where x.position <= i.indnkeyatts) as k
         where i.indrelid = c.oid and i.indisunique and i.indisvalid and i.indimmediate
           and i.indpred is null and i.indexprs is null and k.not_null
         order by i.indisprimary desc, i.indexrelid limit 1) as key,
       exists (select from pg_index as i where i.indrelid = c.oid and i.indisprimary) as has_primary,
       (select coalesce(sum(pg_relation_size(t.relid)), 0)::bigint from pg_partition_tree(c.oid) as t where t.isleaf)
         + case when c.relkind = 'r' then pg_relation_size(c.oid) else 0 end as bytes
  from pg_class as c
 where c.oid = %(oid)s::bigint::oid
"""

_TEXTS: Final = frozenset({"text", "character varying", "character"})
_NUMBERS: Final = frozenset({"smallint", "integer", "bigint"})
_MOMENTS: Final = {"timestamp with time zone": "{}", "timestamp without time zone": "({} at time zone 'UTC')",
                   "date": "case when {0} < '9999-01-01' then ({0} + 1)::timestamp at time zone 'UTC' end"}  # fmt: skip


@dataclass(slots=True)
class _Guess:
    """A table and the columns that its names suggest."""

    table: Row
    deadline: dict[str, Any]
    rank: int
    status: list[dict[str, Any]]
    stamp: dict[str, Any] | None
    details: Row = field(default_factory=lambda: Row({}))

    @property
    def written(self) -> str:
        return relation(self.table.schema, self.table.table)


def _guess(table: Row) -> _Guess | None:
    columns: list[dict[str, Any]] = table.columns or []
    deadlines = sorted(
        ((_deadline_rank(c["name"]), c) for c in columns if c["type"] in _MOMENTS), key=lambda d: -d[0]
    )  # the first of those that are equally good
    if not deadlines or deadlines[0][0] == 0:
        return None
    rank, deadline = deadlines[0]
    status = sorted(
        (c for c in columns if c["writable"] and _status_rank(c, deadline["name"])),
        key=lambda c: -_status_rank(c, deadline["name"]),
    )
    stamp = next((c for c in columns if c["type"] in _MOMENTS and c["writable"] and not c["not_null"]
                  and _STAMP.match(_snake(c["name"]))), None)  # fmt: skip
    if not status and stamp is None:
        return None
    return _Guess(table, deadline, rank, status[:2], stamp)


def _status_rank(column: dict[str, Any], deadline: str) -> int:
    snake = _snake(column["name"])
    if column["type"] == "boolean":
        tokens = _tokens(column["name"]) - {"is", "was"}
        if "expired" in tokens:
            return 3
        return 2 if tokens & _SWITCHES and (_related(deadline, column["name"]) or tokens <= _SWITCHES) else 0
    if column["enum"] or column["type"] in _TEXTS or column["type"] in _NUMBERS:
        if not _STATUS.match(snake):
            return 0
        return 5 if snake == "status" else 4 if snake == "state" else 3
    return 0


# -- looking


def discover(
    connection: "psycopg.Connection[Any]",
    schemas: Sequence[str] = (),
    *,
    seconds_per_table: float = 2,
    seconds: float = 60,
) -> Discovery:
    """
    Look through the tables that this role may read; of these schemas, or of all but the system's.

    The connection is in autocommit and outside a transaction.  Raises DatabaseUnavailable when it is lost.
    """
    reader = Reader(connection, seconds_per_table)
    end = time.monotonic() + seconds
    catalog = Reader(connection, max(seconds_per_table, 10))
    with catalog.reading():
        tables = catalog.rows(_TABLES, schemas=list(schemas) or None)
        guesses = [guess for guess in map(_guess, tables) if guess is not None]
    policies = _registered(catalog)
    taken = {policy for names in policies.values() for policy in names}
    found: list[Candidate] = []
    skipped: list[str] = []
    for guess in guesses:
        if time.monotonic() > end:
            skipped.append(guess.written)
            continue
        try:
            with reader.reading():
                guess.details = reader.row(_DETAILS, oid=guess.table.oid)
            found += _look(reader, guess, policies.get((guess.table.schema, guess.table.table), []), taken)
        except psycopg.Error as error:
            if isinstance(translate(error), DatabaseUnavailable) and error.sqlstate != "55P03":
                raise translate(error) from None
            skipped.append(guess.written)
    found.sort(key=lambda c: (bool(c.policies), -(c.overdue or 0), c.table))
    return Discovery(len(tables), found, skipped)


def _registered(reader: Reader) -> dict[tuple[str, str], list[str]]:
    """Policies by their target; none where pgreaper is not installed or hidden from this role."""
    found: dict[tuple[str, str], list[str]] = {}
    with reader.reading():
        there = reader.row(
            "select coalesce(has_schema_privilege(to_regnamespace('pgreaper'), 'usage')"
            " and has_table_privilege(to_regclass('pgreaper.policies'), 'select'), false) as readable"
        )
        if there.readable and not reader.rows(trust.OBJECTS):
            for row in reader.rows(
                "select p.name, p.target_schema, p.target_table from pgreaper.policies as p"
                " where p.unregistered_at is null order by 1"
            ):
                found.setdefault((row.target_schema, row.target_table), []).append(row.name)
    return found


def _look(reader: Reader, guess: _Guess, policies: list[str], taken: set[str]) -> Iterator[Candidate]:
    """The candidate that a guess turns out to be, if it does."""
    estimated = guess.details.bytes > SAMPLE
    for status in guess.status:
        states = _states(reader, guess, sql.SQL("{}::text").format(_column(status["name"])))
        if len(states) > STATES or any(len(state.state or "") > 40 for state in states):
            continue
        held, expired, assumptions = _meaning(guess, status, states)
        if held and expired is not None and not _allowed(reader, guess, status, held[0], expired):
            expired, assumptions = None, []
        certain = bool(held) and expired is not None
        if not certain and (guess.rank < 2 or not _STATUS.match(_snake(status["name"]))):
            continue
        # The end of anything, unless a state of the table itself says that it expires.
        if guess.rank < 2 and (assumptions or not _tokens(expired or "") & (_EXPIRED[0] | _EXPIRED[1])):
            continue
        yield _candidate(guess, status["name"], None, states, held, expired, assumptions, policies, taken, estimated)
        return
    if guess.stamp is not None and guess.rank == 2:
        stamp = _column(guess.stamp["name"])
        states = _states(reader, guess, sql.SQL("case when {} is null then 'held' else 'expired' end").format(stamp))
        yield _candidate(
            guess, None, guess.stamp["name"], states, ["held"], "expired", [], policies, taken, estimated
        )  # fmt: skip


def _states(reader: Reader, guess: _Guess, state: sql.Composable) -> list[State]:
    """Rows by state, at most one state more than a status has."""
    size = guess.details.bytes
    sample: sql.Composable = sql.SQL("")
    factor = 1.0
    if size > SAMPLE:
        percent = max(100 * SAMPLE / size, 0.001)
        factor = 100 / percent
        sample = sql.SQL(" tablesample system ({})").format(sql.Literal(round(percent, 4)))
    moment = sql.SQL(_MOMENTS[guess.deadline["type"]]).format(_column(guess.deadline["name"]))
    with reader.reading():
        rows = reader.rows(
            sql.SQL(
                "select s.state, count(*) as rows, count(*) filter (where s.deadline <= now()) as overdue,"
                " extract(epoch from now() - greatest(min(s.deadline) filter (where s.deadline <= now()),"
                "   now() - interval '100 years'))::float8 as oldest"
                " from (select {state} as state, {moment} as deadline from {table} as h{sample}) as s"
                " group by s.state order by 2 desc, 1 limit {limit}"
            ).format(
                state=state, moment=moment, table=sql.Identifier(guess.table.schema, guess.table.table),
                sample=sample, limit=sql.Literal(STATES + 1),
            )
        )  # fmt: skip
    return [
        State(r.state, round(r.rows * factor), round(r.overdue * factor),
              timedelta(seconds=r.oldest) if r.overdue else None)
        for r in rows
    ]  # fmt: skip


def _column(column: str) -> sql.Composable:
    return sql.SQL("h.{}").format(sql.Identifier(column))


def _meaning(guess: _Guess, status: dict[str, Any], states: list[State]) -> tuple[list[str], str | None, list[str]]:
    """Which states are held, which one is expired, and what of that is a guess; no held ones: unknown."""
    if status["type"] == "boolean":
        return (["false"], "true", []) if "expired" in _tokens(status["name"]) else (["true"], "false", [])
    if status["type"] in _NUMBERS:
        return [], None, []
    closed, known = _known(guess, status)
    values = list(dict.fromkeys([*known, *(s.state for s in states if s.state is not None)]))
    held = _held(guess.deadline["name"], values)
    expired = _expired([value for value in values if value not in held])
    if expired is not None and not _tokens(expired) & (_EXPIRED[0] | _EXPIRED[1]):
        return held, expired, [f"no state means expired: is {expired} what becomes of an overdue row?"]
    if not held or expired is not None or closed:
        return held, expired, []
    if status["type"] != "text" and 0 < status["size"] < len("expired"):
        return held, None, []
    word = "EXPIRED" if held[0].isupper() else "Expired" if held[0][:1].isupper() else "expired"
    return held, word, [f"no row has state {word} yet: does the application know it?"]


def _known(guess: _Guess, status: dict[str, Any]) -> tuple[bool, list[str]]:
    """The values that the table allows or begins with, and whether they are all of them."""
    labels = (guess.details.labels or {}).get(status["name"])
    if labels:
        return True, list(labels)
    allowed: list[str] = []
    checks = [check[1:] for check in guess.details.checks or () if check[0] == [status["number"]]]
    checks += (guess.details.domains or {}).get(status["name"], ())
    for definition, plain in checks:
        # A list of what may be; a pattern, a function, or what may not be, is none.
        if _harmless(definition, plain) and not _OTHER.search(_TEXT.sub("", definition)):
            allowed += [found.replace("''", "'") for found in _LITERAL.findall(definition)]
    if allowed:
        return True, allowed
    default = re.match(r"^'((?:[^']|'')*)'::", (guess.details.defaults or {}).get(status["name"]) or "")
    return False, [default[1].replace("''", "'")] if default else []


_LITERAL: Final = re.compile(r"'((?:[^']|'')*)'::(?![\w ]*\[)")
_TEXT: Final = re.compile(r"'(?:[^']|'')*'")
_OTHER: Final = re.compile(r"[<>~]|\b(?:ALL|NOT)\b")
# What looks like a call in a CHECK and may be tried: the owner of a table must not make us run anything else.
_HARMLESS: Final = frozenset("lower upper length char_length btrim varying character numeric COALESCE NULLIF".split())


def _allowed(reader: Reader, guess: _Guess, status: dict[str, Any], held: str, expired: str) -> bool:
    """
    Whether the column's type and the table's CHECKs let a held row become expired; yes, where that cannot be known.

    A CHECK is tried on a row in which all else is NULL, and says nothing where the held state fails in it too.
    """
    if status["type"] not in _TEXTS:
        return True
    types, column = guess.details.types, status["name"]
    tests: list[tuple[str, str]] = []
    if all(_harmless(*check) for check in (guess.details.domains or {}).get(column, ())):
        tests.append((
            f"select (h.state::{types[column][0]})::text = h.state as allowed from (select ",  # noqa: S608  by format_type
            "::text as state) as h",
        ))  # fmt: skip
    names = {number: name for name, number in guess.details.numbers.items()}
    for numbers, condition, plain in guess.details.checks or ():
        columns = [names.get(number) for number in numbers or ()]
        if (
            column not in columns
            or not _harmless(condition, plain)
            or any(c is None or not types[c][2] for c in columns)
        ):
            continue
        others = "".join(f", null::{types[c][1]} as {commands.name(c)}" for c in columns if c and c != column)
        tests.append((
            f"select ({condition}) is not false as allowed from (select ",  # noqa: S608  by pg_get_expr, and harmless
            f"::{types[column][1]} as {commands.name(column)}{others}) as h",
        ))  # fmt: skip
    return all(
        _answer(reader, before + commands.literal(expired) + after)
        or not _answer(reader, before + commands.literal(held) + after)
        for before, after in tests
    )


def _harmless(condition: str, plain: bool) -> bool:  # noqa: FBT001
    return plain and set(re.findall(r'([\w"$]+)\(', _TEXT.sub("", condition))) <= _HARMLESS


def _answer(reader: Reader, query: str) -> bool:
    """What the server says; no, where it refuses."""
    try:
        with reader.reading():
            return bool(reader.row(sql.SQL(query)).allowed)
    except (psycopg.DataError, psycopg.IntegrityError, psycopg.ProgrammingError):
        return False


def _held(deadline: str, values: list[str]) -> list[str]:
    """The states that the deadline is named after; else those with the most telling word."""
    ended = frozenset().union(*_EXPIRED)
    possible = [value for value in values if not _tokens(value) & ended]
    related = [value for value in possible if _related(deadline, value)]
    words = frozenset().union(*_HELD)
    if named := [value for value in related if _tokens(value) & words]:
        return named
    for rank in _HELD:
        if exact := [value for value in possible if _snake(value).replace("_", "") in rank]:
            return exact
    for rank in _HELD:
        if partly := [value for value in possible if _tokens(value) & rank]:
            return partly
    return []


def _expired(values: list[str]) -> str | None:
    for rank in _EXPIRED:
        for value in values:
            if _snake(value).replace("_", "") in rank:
                return value
        for value in values:
            if _tokens(value) & rank:
                return value
    return None


def _candidate(
    guess: _Guess,
    status: str | None,
    stamp: str | None,
    states: list[State],
    held: list[str],
    expired: str | None,
    assumptions: list[str],
    policies: list[str],
    taken: set[str],
    estimated: bool,  # noqa: FBT001
) -> Candidate:
    zone = None if guess.deadline["type"] == "timestamp with time zone" else "UTC"
    stamp_type = guess.stamp["type"] if guess.stamp and stamp else None
    if zone:
        assumptions = [*assumptions, f"{guess.deadline['name']} says no time zone: UTC is assumed"]
    overdue = [s for s in states if s.state in held]
    certain = bool(held) and expired is not None
    obstacle = _obstacle(guess, certain=certain)
    command = None
    if obstacle is None and not policies:
        policy = _policy_name(guess.table, taken)
        key = [] if guess.details.has_primary else list(guess.details.key)
        command = commands.register(
            policy, guess.written, deadline=guess.deadline["name"], status=status,
            held=held if status else (), expired=expired if status else None, owner=guess.table.owner,
            key=key, stamp=stamp, zone=zone,
            stamp_zone="UTC" if zone is None and stamp_type not in (None, "timestamp with time zone") else None,
        )  # fmt: skip
    return Candidate(
        table=guess.written,
        deadline=guess.deadline["name"],
        status=status,
        stamp=stamp,
        zone=zone,
        states=states,
        estimated=estimated,
        held=held if certain else [],
        expired=expired if certain else None,
        overdue=sum(s.overdue for s in overdue) if certain else None,
        oldest_overdue=max((s.oldest_overdue for s in overdue if s.oldest_overdue), default=None) if certain else None,
        policies=policies,
        command=command,
        obstacle=None if policies else obstacle,
        assumptions=[] if policies else assumptions,
    )


def _obstacle(guess: _Guess, *, certain: bool) -> str | None:
    """Why no command can be given."""
    if guess.details.key is None:
        return (
            "it has neither a primary key nor a unique index over NOT NULL columns, so no row can be told from another"
        )
    if guess.table.parent:
        return "other tables inherit from it: each of them would be registered by itself"
    if guess.table.secured:
        return "row level security may hide rows from this role: look as a role with BYPASSRLS, or as the owner"
    if not certain:
        return "its states do not say which of them is held and which one expired; if you know:"
    if not guess.table.owned:
        return f"only its owner, {guess.table.owner}, may register it"
    return None


def _policy_name(table: Row, taken: set[str]) -> str:
    """The table's name, with its schema or a number where that is taken."""
    names = [_snake(table.table) or "holds", _snake(f"{table.schema}_{table.table}") or "holds"]
    names += [f"{names[1]}_{number}" for number in range(2, 1000)]
    policy = next(candidate for candidate in names if candidate not in taken)
    taken.add(policy)
    return policy

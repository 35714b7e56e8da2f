"""
What the planner thinks of a policy's target.

Tells which index serves a policy, which one to create when none does, and about how
many holds are due.  It explains queries and executes none, so the size of the table
does not matter.  Whether an index serves is the planner's word, not a guess from the
catalog: partial predicates, partitions and views need no rules of our own.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import tuple_row

from pgreaper.records import Policy
from pgreaper.statement import qualified
from pgreaper.text import quoted


@dataclass(frozen=True, slots=True)
class IndexAdvice:
    """The indexes that serve a policy, or the statements that create one (``None`` serves, and nothing is known)."""

    serving: list[str]
    create: list[str]
    partitioned: bool = False
    view: bool = False


def index_advice(connection: "psycopg.Connection[Any]", policy: Policy) -> IndexAdvice:
    """Ask the planner for an index on the deadline; otherwise write the statement that creates it."""
    with connection.cursor(row_factory=tuple_row) as cursor:
        relation = _regclass(policy)
        cursor.execute(
            qualified("select c.relkind::text from pg_catalog.pg_class as c where c.oid = %s::text::regclass"),
            [relation],
        )
        (kind,) = cursor.fetchone() or ("r",)
        used = _indexes_in_order(connection, policy)
        if used:
            return IndexAdvice(used, [], partitioned=kind == "p", view=kind == "v")
        if kind == "v":
            base = _base_table(cursor, relation, policy)
            return IndexAdvice([], [_create(base, policy)] if base else [], view=True)
        if kind == "p":
            cursor.execute(
                qualified(
                    "select t.relid::regclass::text from pg_catalog.pg_partition_tree(%s::text::regclass) as t"
                    " where t.isleaf"
                ),
                [relation],
            )
            leaves = [_create(leaf, policy) for (leaf,) in cursor.fetchall()]
            # The parent's index takes over what the partitions have by then, without building anything.
            return IndexAdvice([], [*leaves, _create(relation, policy, concurrently=False)], partitioned=True)
        return IndexAdvice([], [_create(relation, policy)])


def estimated_due(connection: "psycopg.Connection[Any]", policy: Policy) -> int:
    """About how many holds are due, as far as the table's statistics know."""
    plan = _explain(connection, policy, sql.SQL(""))
    return int(plan.get("Plan Rows", 0))


def _indexes_in_order(connection: "psycopg.Connection[Any]", policy: Policy) -> list[str]:
    """Indexes that return due holds in the order of their deadlines; none, when a sort or a scan would be needed."""
    plan = _explain(
        connection,
        policy,
        sql.SQL(" order by h.{} limit 500").format(sql.Identifier(policy.deadline_column)),
        prefer_index=True,
    )
    nodes = list(_nodes(plan))
    if any("Sort" in node["Node Type"] or node["Node Type"] == "Seq Scan" for node in nodes):
        return []
    return list(
        dict.fromkeys(
            node["Index Name"] for node in nodes if "Index Name" in node and "Bitmap" not in node["Node Type"]
        )
    )


def _explain(
    connection: "psycopg.Connection[Any]", policy: Policy, rest: sql.Composable, *, prefer_index: bool = False
) -> dict[str, Any]:
    with connection.transaction(force_rollback=True), connection.cursor(row_factory=tuple_row) as cursor:
        if prefer_index:
            # A small table would be scanned whatever indexes it has.  Ends with this transaction.
            for name in ("enable_seqscan", "enable_bitmapscan", "enable_sort"):
                cursor.execute("select pg_catalog.set_config(%s, 'off', true)", [name])
        cursor.execute(
            sql.SQL("explain (format json) select h.{} from {} as h where {} and {}{}").format(
                sql.Identifier(policy.deadline_column),
                sql.Identifier(policy.target_schema, policy.target_table),
                _held(cursor, policy),
                _due(cursor, policy),
                rest,
            ),
            prepare=False,
        )
        ((document,),) = cursor.fetchall()
        plan = document[0]["Plan"]
        assert isinstance(plan, dict)  # noqa: S101
        return plan


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", []):
        yield from _nodes(child)


def _held(cursor: "psycopg.Cursor[Any]", policy: Policy) -> sql.Composable:
    if policy.status_column is None or policy.held is None:
        columns = [policy.stamp_column or "", *filter(None, [policy.consumed_stamp_column])]
        return sql.SQL(" and ").join(sql.SQL("h.{} is null").format(sql.Identifier(column)) for column in columns)
    cursor.execute(
        qualified(
            "select pgreaper._equals(a.atttypid) from pg_catalog.pg_attribute as a"
            " where a.attrelid = %s::text::regclass and a.attname = %s::text"
        ),
        [_regclass(policy), policy.status_column],
    )
    (equals,) = cursor.fetchone() or ("=",)
    quoted_states = ",".join('"' + re.sub(r'(["\\])', r"\\\1", state) + '"' for state in policy.held)
    return sql.SQL("h.{} {} {}").format(
        sql.Identifier(policy.status_column),
        sql.SQL(equals),  # ours: quoted where it comes from
        sql.Literal(policy.held[0])
        if len(policy.held) == 1
        else sql.SQL("any ({})").format(sql.Literal(f"{{{quoted_states}}}")),
    )


def _due(cursor: "psycopg.Cursor[Any]", policy: Policy) -> sql.Composable:
    cursor.execute(
        qualified(
            "select a.atttypid::regtype::text from pg_catalog.pg_attribute as a"
            " where a.attrelid = %s::text::regclass and a.attname = %s::text"
        ),
        [_regclass(policy), policy.deadline_column],
    )
    (kind,) = cursor.fetchone() or ("",)
    column, zone = sql.Identifier(policy.deadline_column), sql.Literal(policy.zone)
    if kind == "timestamp with time zone":
        return sql.SQL("h.{} operator(pg_catalog.<=) pg_catalog.now()").format(column)
    if kind == "date":
        return sql.SQL("h.{} operator(pg_catalog.<) (pg_catalog.now() at time zone {})::pg_catalog.date").format(
            column, zone
        )
    return sql.SQL("h.{} operator(pg_catalog.<=) (pg_catalog.now() at time zone {})").format(column, zone)


def _base_table(cursor: "psycopg.Cursor[Any]", view: str, policy: Policy) -> str | None:
    """The table that a simple view takes its deadline from, when only one can be meant."""
    cursor.execute(
        qualified(
            "select distinct d.refobjid::regclass::text"
            "  from pg_catalog.pg_rewrite as w"
            "  join pg_catalog.pg_depend as d on d.classid = 'pg_catalog.pg_rewrite'::regclass and d.objid = w.oid"
            "   and d.refclassid = 'pg_catalog.pg_class'::regclass and d.refobjsubid > 0"
            "  join pg_catalog.pg_class as c on c.oid = d.refobjid and c.relkind = 'r'"
            "  join pg_catalog.pg_attribute as a on a.attrelid = c.oid and a.attnum = d.refobjsubid"
            " where w.ev_class = %s::text::regclass and (a.attname = %s::text or a.attname = %s::text)"
            " group by d.refobjid having count(distinct a.attname) = %s::integer"
        ),
        [view, policy.deadline_column, policy.status_column or policy.stamp_column,
         1 if policy.deadline_column == (policy.status_column or policy.stamp_column) else 2],
    )  # fmt: skip
    found = cursor.fetchall()
    return str(found[0][0]) if len(found) == 1 else None


def _create(relation: str, policy: Policy, *, concurrently: bool = True) -> str:
    if policy.status_column is None or policy.held is None:
        columns = [policy.stamp_column or "", *filter(None, [policy.consumed_stamp_column])]
        held = " and ".join(f"{quoted(column)} is null" for column in columns)
    elif len(policy.held) == 1:
        held = f"{quoted(policy.status_column)} = {_literal(policy.held[0])}"
    else:
        held = f"{quoted(policy.status_column)} in ({', '.join(map(_literal, policy.held))})"
    how = "create index concurrently on" if concurrently else "create index on"
    return f"{how} {relation} ({quoted(policy.deadline_column)}) where {held};"


def _literal(text: str) -> str:
    escaped = text.replace("'", "''")
    return "E'" + escaped.replace("\\", "\\\\") + "'" if "\\" in text else f"'{escaped}'"


def _regclass(policy: Policy) -> str:
    return f"{quoted(policy.target_schema)}.{quoted(policy.target_table)}"

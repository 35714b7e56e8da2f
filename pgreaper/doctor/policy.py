"""One policy and its target: whether holds can expire, do expire, and at what cost."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import psycopg
from psycopg import sql

from pgreaper import commands
from pgreaper.commands import command, literal, name, relation
from pgreaper.doctor.finding import ERROR, NOTE, WARNING, Finding, Limits, Look, listed
from pgreaper.errors import translate
from pgreaper.reading import Row
from pgreaper.records import Policy
from pgreaper.statement import filled
from pgreaper.targets import index_advice
from pgreaper.text import count, duration, plural, visible

# From so many partitions on planning takes longer than a usual batch.
_MANY_PARTITIONS: Final = 100
# So many of the due holds are looked at for who has them locked.
_LOCKS: Final = 1000
_POLICIES: Final = """
select p.name, p.policy_id, p.target_schema, p.target_table, p.key_columns, p.deadline_column, p.status_column, p.held,
       p.expired, p.stamp_column, p.consumed, p.consumed_stamp_column, p.restored,
       p.restore_within::text as restore_within, p.payload_columns, p.zone, p.stamp_zone, p.owner, p.batch,
       p.max_attempts, p.permanent_attempts, p.rate_limit, p.max_claims, p.pause_reason,
       p.paused_at is not null as paused,
       p.grace::text as grace, p.lease::text as lease, p.backoff_base::text as backoff_base,
       p.backoff_cap::text as backoff_cap, p.objective::text as objective,
       extract(epoch from p.lease)::float8 as lease_seconds,
       extract(epoch from p.objective)::float8 as objective_seconds,
       extract(epoch from clock_timestamp() - p.paused_at)::float8 as paused_for,
       (select jsonb_object_agg(s.key, s.value) from jsonb_each_text(p.set_values) as s) as assignments,
       -- Not to_regclass(), which asks for USAGE on the schema: one closed target would hide every policy.
       (select c.oid::bigint from pg_class as c join pg_namespace as n on n.oid = c.relnamespace
         where n.nspname = p.target_schema and c.relname = p.target_table) as oid
  from pgreaper.policies as p
 where p.unregistered_at is null
 order by p.name
"""


def registered(look: Look) -> tuple[Row, ...]:
    """The registered policies by name, with ``oid`` None where the target is missing."""
    with look.reading():
        return tuple(look.rows(_POLICIES))


@dataclass(slots=True)
class Target:
    """The policy under examination and what the catalog says of its target."""

    look: Look
    policy: Row
    oid: int = 0
    kind: str = "r"
    bytes: int = 0
    fragments: Row | None = None
    passive: bool = False
    denied: psycopg.Error | None = None

    @property
    def limits(self) -> Limits:
        """From when on something is worth a finding."""
        return self.look.limits

    @property
    def table(self) -> str:
        """The target as SQL writes it."""
        return name(self.policy.target_schema, self.policy.target_table)

    @property
    def written(self) -> list[str]:
        """Columns that the transition writes."""
        columns = [self.policy.status_column, self.policy.stamp_column, *(self.policy.assignments or {})]
        return [column for column in columns if column is not None]

    @property
    def read(self) -> list[str]:
        """Every column that a claim or the transition reads."""
        p = self.policy
        stamps = [p.consumed_stamp_column] if p.consumed_stamp_column else []
        return list(dict.fromkeys([*p.key_columns, p.deadline_column, *self.written, *stamps, *p.payload_columns]))

    def finding(self, code: str, level: str, fact: str, subject: str | None = None, **remedy: Any) -> Finding:
        """A finding about this policy; the subject is the target unless told otherwise."""
        return Finding(code, level, self.policy.name, subject or self.table, fact, **remedy)

    def register(self, **changes: Any) -> str:
        """The command that registers the policy as it is, but for the changes."""
        p = self.policy
        arguments: dict[str, Any] = {
            "deadline": p.deadline_column, "status": p.status_column, "held": p.held or (), "expired": p.expired,
            "owner": p.owner, "key": p.key_columns, "stamp": p.stamp_column, "assignments": p.assignments,
            "payload": p.payload_columns, "zone": p.zone, "stamp_zone": p.stamp_zone, "consumed": p.consumed,
            "consumed_stamp": p.consumed_stamp_column, "restore_within": p.restore_within, "restored": p.restored,
        }  # fmt: skip
        for setting in ("grace", "lease", "backoff_base", "backoff_cap", "objective", "batch", "max_attempts",
                        "permanent_attempts", "rate_limit", "max_claims"):  # fmt: skip
            arguments[setting] = None if p[setting] is None else str(p[setting])
        return commands.register(p.name, relation(p.target_schema, p.target_table), **(arguments | changes))

    def statement(self, template: str, **values: object) -> sql.SQL:
        """A query made of the fragments that claims are made of, with the clock as a constant, as they have it."""
        assert self.fragments is not None  # noqa: S101
        clock = f"{literal(self.fragments.cutoff)}::timestamptz"
        return sql.SQL(filled(template.format(**self.fragments, **values), clock))


# -- the target as it is now


def prepare(target: Target) -> Iterator[Finding]:
    """Learn what the other checks need; where this finds an error, nothing else about the target can be said."""
    look, policy = target.look, target.policy
    if policy.oid is None:
        yield target.finding(
            "target-missing", ERROR, f"{target.table} does not exist",
            commands=(command("unregister", policy.name),),
            advice="Or bring the table back under that name: nothing has to be registered again.",
        )  # fmt: skip
        return
    target.oid = policy.oid
    with look.reading():
        relation = look.row(
            "select c.relkind::text as kind,"
            " (select coalesce(sum(pg_relation_size(t.relid)), 0)::bigint"
            "    from pg_partition_tree(c.oid) as t where t.isleaf)"
            " + case when c.relkind = 'r' and not c.relispartition then pg_relation_size(c.oid) else 0 end as bytes"
            "  from pg_class as c where c.oid = %(oid)s::bigint::oid",
            oid=target.oid,
        )
        target.kind, target.bytes = relation.kind, relation.bytes
    broken = list(_columns(target))
    yield from broken
    if any(finding.level == ERROR for finding in broken):
        return
    try:
        with look.reading():
            target.fragments = look.row(
                "select t.*, (pgreaper._clock() - p.grace)::text as cutoff, c.position"
                "  from pgreaper.policies as p cross join lateral pgreaper._target(p, %(path)s) as t"
                "  left join pgreaper.cursors as c on c.policy_id = p.policy_id"
                " where p.policy_id = %(id)s",
                id=policy.policy_id,
                path=look.facts.search_path,
            )
        with look.reading(look.facts.search_path):
            look.connection.execute(target.statement("explain select from {relation} as h where {held} and {due}"))
            look.connection.execute(target.statement("explain select from {relation} as h where {ended}"))
    except (
        psycopg.errors.InvalidTextRepresentation,
        psycopg.errors.UndefinedFunction,
        psycopg.errors.DatatypeMismatch,
    ):
        target.fragments = None
        states = listed([*map(literal, policy.held or ()), literal(policy.expired or "")])
        yield target.finding(
            "states", ERROR,
            f"the type of column {visible(policy.status_column or '')} does not know all of the states {states}",
            advice="Bring the value back (alter type … add value), or register the policy with the states as they are"
            " now.",
        )  # fmt: skip
    except psycopg.errors.InsufficientPrivilege as error:
        # Row level security speaks in pgreaper's own words; a missing right is told by its own check.
        target.fragments = None
        if "row level security" in (error.diag.message_primary or ""):
            with look.reading():
                for hidden in look.rows(_HIDING, oid=target.oid):
                    yield _hidden(target, name(hidden.schema, hidden.table), hidden.role)
        else:
            target.denied = error
    except psycopg.Error as error:
        if translate(error).exit_code == 75:
            raise
        finding = target.finding(
            "target-broken", ERROR, f"claims on {target.table} fail: {translate(error).message}",
            advice=translate(error).hint,
        )  # fmt: skip
        look.heard.append((finding, error))
        yield finding


def _columns(target: Target) -> Iterator[Finding]:
    """Columns that went away, and a deadline that has changed its type since it was registered."""
    p = target.policy
    with target.look.reading():
        found = {
            row.name: row
            for row in target.look.rows(
                "select a.attname::text as name, format_type(a.atttypid, a.atttypmod) as type,"
                " format_type(coalesce(nullif(t.typbasetype, 0), t.oid), null) as base"
                "  from pg_attribute as a join pg_type as t on t.oid = a.atttypid"
                " where a.attrelid = %(oid)s::bigint::oid and a.attnum > 0 and not a.attisdropped",
                oid=target.oid,
            )
        }
    if gone := [column for column in target.read if column not in found]:
        yield target.finding(
            "column-missing", ERROR, f"{target.table} has no column {listed(list(map(visible, gone)))} any more",
            advice="Bring it back, or register the policy again with the columns as they are now.",
        )  # fmt: skip
        return
    deadline = found[p.deadline_column]
    zoned, unzoned = "timestamp with time zone", ("timestamp without time zone", "date")
    if deadline.base != zoned and deadline.base not in unzoned:
        yield target.finding(
            "deadline-type", ERROR,
            f"deadline column {visible(p.deadline_column)} has type {visible(deadline.type)} now, which is no deadline",
            advice="Give it back a type of date or timestamp, or register another column.",
        )  # fmt: skip
    elif deadline.base in unzoned and p.zone is None:
        yield target.finding(
            "zone", ERROR,
            f"deadline column {visible(p.deadline_column)} has type {visible(deadline.type)} now, and the policy says"
            " no time zone for it: nothing can be due",
            commands=(target.register(zone="UTC"),),
            advice="Put in place of UTC the zone that its values are meant in.",
        )  # fmt: skip
    elif deadline.base == zoned and p.zone is not None and not _needs_zone(p, found):
        yield target.finding(
            "zone", WARNING,
            f"deadline column {visible(p.deadline_column)} has type {visible(deadline.type)} now, and the policy still"
            f" says zone {visible(p.zone)}, which means nothing any more",
            commands=(target.register(zone=None),),
        )  # fmt: skip


def _needs_zone(policy: Row, columns: dict[str, Row]) -> bool:
    """Whether a stamp without a zone of its own takes the policy's."""
    stamps = [column for column in (policy.stamp_column, policy.consumed_stamp_column) if column is not None]
    return policy.stamp_zone is None and any(columns[column].base != "timestamp with time zone" for column in stamps)


# -- rights

# Roles that somebody has let claim, and the one that is looking, if it may.
_WORKERS: Final = """
with workers as (
  select distinct a.grantee as oid
    from pg_proc as p cross join lateral aclexplode(p.proacl) as a
   where p.pronamespace = 'pgreaper'::regnamespace and p.proname in ('reaper_claim', 'reaper_sweep')
     and a.grantee <> 0 and a.privilege_type = 'EXECUTE'
  union
  select r.oid from pg_roles as r
   where r.rolname = current_user
     and exists (select from pg_proc as p
                  where p.pronamespace = 'pgreaper'::regnamespace and p.proname in ('reaper_claim', 'reaper_sweep')
                    and has_function_privilege(p.oid, 'execute'))
), used as (
  -- What a view of its caller's own rights (security_invoker) reads, and with it the caller.
  select t.relation as oid, count(*) over () as number,
         array(select distinct d.refobjsubid
                 from pg_rewrite as w join pg_depend as d
                   on d.classid = 'pg_rewrite'::regclass and d.objid = w.oid
                  and d.refclassid = 'pg_class'::regclass and d.refobjid = t.relation and d.refobjsubid > 0
                where w.ev_class in (select v.relation from pgreaper._target_rights(p, 'worker') as v)) as columns,
         (select n.columns from pgreaper._target_rights(p, 'worker') as n
           where n.relation = t.relation and n.privilege = 'update') as written
    from pgreaper.policies as p
   cross join lateral pgreaper._target_rights(p, 'worker') as t
   where p.policy_id = %(id)s and t.privilege = 'select' and t.relation <> %(oid)s::bigint::oid
)
select r.rolname::text as role,
       n.nspname::text as schema,
       has_schema_privilege(r.oid, n.oid, 'usage') as usage,
       array(select x from unnest(%(read)s::text[]) as x
              where not has_column_privilege(r.oid, c.oid, x, 'select')) as unread,
       array(select x from unnest(%(written)s::text[]) as x
              where not has_column_privilege(r.oid, c.oid, x, 'update')) as unwritten,
       coalesce((select jsonb_agg(jsonb_build_object('schema', b.schema, 'table', b.name, 'unread', b.unread,
                                                     'unwritten', b.unwritten) order by b.schema, b.name)
          from (select x.oid, xn.nspname::text as schema, x.relname::text as name,
                       array(select a.attname::text from pg_attribute as a
                              where a.attrelid = x.oid and a.attnum = any (u.columns)
                                and not has_column_privilege(r.oid, x.oid, a.attnum, 'select')
                              order by a.attname) as unread,
                       -- Of several relations the catalog does not say which one the view writes to.
                       array(select v from unnest(u.written) as v
                              where u.number = 1 and not has_column_privilege(r.oid, x.oid, v, 'update')) as unwritten
                  from used as u
                  join pg_class as x on x.oid = u.oid
                  join pg_namespace as xn on xn.oid = x.relnamespace) as b
         where b.unread <> '{}' or b.unwritten <> '{}'), '[]') as beneath,
       (select jsonb_agg(jsonb_build_array(s.nspname, t.relname, a.rolname))
          from pgreaper._hiding(c.oid, r.oid) as h
          join pg_class as t on t.oid = h.hiding
          join pg_namespace as s on s.oid = t.relnamespace
          join pg_roles as a on a.oid = h.role) as hiding
  from workers as w
  join pg_roles as r on r.oid = w.oid and not r.rolsuper
  join pg_class as c on c.oid = %(oid)s::bigint::oid
  join pg_namespace as n on n.oid = c.relnamespace
 order by 1
"""


_HIDING: Final = """
select s.nspname::text as schema, t.relname::text as table, a.rolname::text as role
  from pgreaper._hiding(%(oid)s::bigint::oid, (select r.oid from pg_roles as r where r.rolname = current_user)) as h
  join pg_class as t on t.oid = h.hiding
  join pg_namespace as s on s.oid = t.relnamespace
  join pg_roles as a on a.oid = h.role
"""


def rights(target: Target) -> Iterator[Finding]:
    """Every role that works may read and write what the policy needs, and sees all rows."""
    with target.look.reading():
        roles = target.look.rows(
            _WORKERS, oid=target.oid, id=target.policy.policy_id, read=target.read, written=target.written
        )
    lacking: set[str] = set()
    for r in roles:
        statements: list[str] = []
        if not r.usage:
            statements.append(f"grant usage on schema {name(r.schema)} to {name(r.role)};")
        wanted = []
        if r.unread:
            wanted.append("select")
        if r.unwritten:
            wanted.append(f"update ({', '.join(name(column) for column in r.unwritten)})")
        if wanted:
            statements.append(f"grant {', '.join(wanted)} on {target.table} to {name(r.role)};")
        lacks = ["usage of schema " + visible(r.schema)] if not r.usage else []
        lacks += _lacks(r.unread, r.unwritten)
        for b in r.beneath:
            table = name(b["schema"], b["table"])
            lacks += [f"{right} on {table}" for right in _lacks(b["unread"], b["unwritten"])]
            wanted = ["select"] if b["unread"] else []
            if b["unwritten"]:
                wanted.append(f"update ({', '.join(name(column) for column in b['unwritten'])})")
            statements.append(f"grant {', '.join(wanted)} on {table} to {name(r.role)};")
        if statements:
            lacking.add(r.role)
            yield target.finding(
                "grants", ERROR, f"role {visible(r.role)} works, but lacks {listed(lacks)}",
                subject=r.role, sql=tuple(statements),
            )  # fmt: skip
    hiding = {(name(schema, table), role): None for r in roles for schema, table, role in r.hiding or ()}
    for table, role in hiding:
        yield _hidden(target, table, role)
    if target.denied is not None and lacking.isdisjoint({target.look.facts.role}):
        works = target.look.facts.role in {r.role for r in roles}
        # A view reads with the rights of its owner, unless it says otherwise.
        remedy = "Grant it to the role, or to the owner of the view." if target.kind == "v" else "Grant it to the role."
        finding = target.finding(
            "target-broken" if works else "unchecked", ERROR if works else NOTE,
            f"{target.table} cannot be read as {visible(target.look.facts.role)}: {translate(target.denied).message}",
            advice=remedy if works else "Look again as a role with more rights to know.",
        )  # fmt: skip
        target.look.heard.append((finding, target.denied))
        yield finding


def _lacks(unread: list[str], unwritten: list[str]) -> list[str]:
    """The rights on columns in words."""
    rights = (("select", unread), ("update", unwritten))
    return [f"{right} ({', '.join(map(visible, columns))})" for right, columns in rights if columns]


def _hidden(target: Target, table: str, role: str) -> Finding:
    read = "" if table == target.table else f", which view {target.table} reads,"
    return target.finding(
        "row-security", ERROR,
        f"row level security of {table}{read} would hide holds from role {visible(role)}, so workers are refused"
        if read
        else f"row level security of {table} would hide holds from role {visible(role)}, so it is refused",
        subject=role, sql=(f"alter role {name(role)} bypassrls;",),
        advice=f"Or let the owner of {table} " + ("own the view." if read else "do the work."),
    )  # fmt: skip


# -- plans and indexes


def index(target: Target) -> Iterator[Finding]:
    """Due holds come from an index, in the order of their deadlines."""
    if target.fragments is None:
        return
    policy = _record(target.policy)
    with target.look.reading(target.look.facts.search_path):
        advice = index_advice(target.look.connection, policy)
    if not advice.serving:
        yield target.finding(
            "index-missing", WARNING,
            f"no index serves: each look reads all of {target.table} ({size(target.bytes)})"
            if target.kind != "v"
            else f"no index serves view {target.table}: each look reads all of the table behind it",
            sql=tuple(advice.create),
            advice=None if advice.create else "The table behind the view needs one that begins with the deadline.",
        )  # fmt: skip
    invalid: list[Row] = []
    unused: list[Row] = []
    with target.look.reading(target.look.facts.search_path):
        plan = _plan(target)
    with target.look.reading():
        scanned = [
            str(node.get("Relation Name")) for node in _nodes(plan)
            if node["Node Type"] == "Seq Scan" and node.get("Schema") != "pgreaper"
        ]  # fmt: skip
        off = target.look.rows(
            "select s.name from pg_settings as s where s.name in ('enable_indexscan', 'enable_indexonlyscan')"
            " and s.setting = 'off' order by 1"
        )
        invalid = target.look.rows(
            "select n.nspname::text as schema, x.relname::text as name"
            "  from pg_index as i join pg_class as x on x.oid = i.indexrelid and x.relkind = 'i'"
            "  join pg_namespace as n on n.oid = x.relnamespace"
            " where not i.indisvalid and (i.indrelid = %(oid)s::bigint::oid or i.indrelid in ("
            "   select t.relid from pg_partition_tree(%(oid)s::bigint::oid::regclass) as t))"
            "   and not exists (select from pg_stat_progress_create_index as r where r.index_relid = x.oid)"
            " order by 1, 2",
            oid=target.oid,
        )
        unused = target.look.rows(
            "select n.nspname::text as schema, x.relname::text as name, pg_relation_size(x.oid) as bytes,"
            " (select d.stats_reset::date::text from pg_stat_database as d"
            "   where d.datname = current_database()) as since"
            "  from pg_index as i join pg_class as x on x.oid = i.indexrelid and x.relkind = 'i'"
            "  join pg_namespace as n on n.oid = x.relnamespace"
            "  join pg_stat_all_indexes as s on s.indexrelid = i.indexrelid and s.idx_scan = 0"
            "  join pg_attribute as a on a.attrelid = i.indrelid and a.attnum = i.indkey[0]"
            " where i.indrelid = %(oid)s::bigint::oid and i.indisvalid and not i.indisunique"
            "   and a.attname = %(deadline)s"
            "   and exists (select from pg_index as j join pg_stat_all_indexes as u on u.indexrelid = j.indexrelid"
            "                where j.indrelid = i.indrelid and j.indkey[0] = i.indkey[0]"
            "                  and j.indexrelid <> i.indexrelid and j.indisvalid and u.idx_scan > 0)"
            " order by 1, 2",
            oid=target.oid, deadline=target.policy.deadline_column,
        )  # fmt: skip
    if scanned and advice.serving and target.bytes > target.limits.scan:
        yield from _scan(target, [row.name for row in off])
    for i in invalid:
        full = name(i.schema, i.name)
        left_over = re.search(r"_cc(new|old)\d*$", i.name)
        yield target.finding(
            "index-invalid", WARNING,
            f"index {full} is not valid: building it was interrupted, and every write pays for it",
            subject=full,
            sql=(f"drop index concurrently {full};" if left_over else f"reindex index concurrently {full};",),
        )  # fmt: skip
    for i in unused:
        full = name(i.schema, i.name)
        yield target.finding(
            "index-unused", NOTE,
            f"index {full} ({size(i.bytes)}) begins with the deadline and was never used"
            + (f" since {i.since}" if i.since else "")
            + ", while another one that does was",
            subject=full, sql=(f"drop index concurrently {full};",), advice="Unless a replica uses it.",
        )  # fmt: skip


def _scan(target: Target, off: list[str]) -> Iterator[Finding]:
    role, database = target.look.facts.role, target.look.facts.database
    if off:
        where = f"alter role {name(role)} in database {name(database)}"
        statements = tuple(f"{where} set {setting} = 'on';" for setting in off)
        why = f"because {listed(off)} is off"
    elif create := _partial(target):
        statements = (create,)
        why = "because the index holds all rows of the past as well"
    else:
        statements = (f"analyze {target.table};",)
        why = "although an index serves: the planner's statistics mislead it"
    yield target.finding(
        "claim-scan", WARNING,
        f"a claim that looks from the start reads all of {target.table} ({size(target.bytes)}), {why}", sql=statements,
    )  # fmt: skip


def _partial(target: Target) -> str | None:
    """The statement for a partial index, when there is none yet on the deadline."""
    with target.look.reading():
        found = target.look.rows(
            "select from pg_index as i join pg_attribute as a on a.attrelid = i.indrelid and a.attnum = i.indkey[0]"
            " where i.indrelid = %(oid)s::bigint::oid and i.indpred is not null and i.indisvalid"
            "   and a.attname = %(deadline)s",
            oid=target.oid, deadline=target.policy.deadline_column,
        )  # fmt: skip
    if found or target.kind != "r":
        return None
    p = target.policy
    if p.status_column is None:
        held = " and ".join(f"{name(column)} is null" for column in (p.stamp_column, p.consumed_stamp_column) if column)
    elif len(p.held) == 1:
        held = f"{name(p.status_column)} = {literal(p.held[0])}"
    else:
        held = f"{name(p.status_column)} in ({', '.join(map(literal, p.held))})"
    return f"create index concurrently on {target.table} ({name(p.deadline_column)}) where {held};"


def _plan(target: Target) -> dict[str, Any]:
    """The plan of the claim's own read of the target, looking from the oldest deadline as a rescan does."""
    with target.look.connection.cursor() as cursor:
        cursor.execute(
            target.statement(
                "explain (format json, verbose) select {key} as key, {deadline} as deadline from {relation} as h"
                " where {held} and {due} order by {deadline_order} limit {batch}",
                batch=target.policy.batch,
            )
        )
        ((document,),) = cursor.fetchall()
    plan = document[0]["Plan"]
    assert isinstance(plan, dict)  # noqa: S101
    return plan


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", []):
        yield from _nodes(child)


def _record(p: Row) -> Policy:
    """What :mod:`pgreaper.targets` needs to know of the policy; the budgets play no part there."""
    unused: Any = None
    return Policy(
        policy=p.name, target_schema=p.target_schema, target_table=p.target_table, key_columns=p.key_columns,
        deadline_column=p.deadline_column, status_column=p.status_column, held=p.held, expired=p.expired,
        stamp_column=p.stamp_column, set_values={}, zone=p.zone, stamp_zone=p.stamp_zone, grace=unused,
        payload_columns=p.payload_columns, lease=unused, batch=p.batch, max_attempts=p.max_attempts,
        permanent_attempts=p.permanent_attempts, backoff_base=unused, backoff_cap=unused, rate_limit=p.rate_limit,
        max_claims=p.max_claims, owner=p.owner, objective=unused, paused_at=None, pause_reason=p.pause_reason,
        registered_at=unused, consumed_stamp_column=p.consumed_stamp_column,
    )  # fmt: skip


def size(number: int) -> str:
    """Bytes as a person reads them: ``8,192 bytes``, ``12 MB``."""
    for unit in ("bytes", "kB", "MB"):
        if number < 10_000:
            return f"{number:,} {unit}"
        number = round(number / 1024)
    return f"{number:,} GB"


# -- what an expiry sets off


def partitions(target: Target) -> Iterator[Finding]:
    """A statement is planned for every partition that the deadline does not rule out."""
    if target.kind != "p":
        return
    with target.look.reading():
        row = target.look.row(
            "select count(*) filter (where t.isleaf) as leaves,"
            "       coalesce(bool_or(a.attnum = any (p.partattrs)), false) as ruled"
            "  from pg_partition_tree(%(oid)s::bigint::oid::regclass) as t"
            "  left join pg_partitioned_table as p on p.partrelid = t.relid"
            "  left join pg_attribute as a on a.attrelid = t.relid and a.attname = %(deadline)s and a.attnum > 0",
            oid=target.oid, deadline=target.policy.deadline_column,
        )  # fmt: skip
    if row.leaves >= _MANY_PARTITIONS and not row.ruled:
        yield target.finding(
            "partitions", NOTE,
            f"{target.table} has {count(row.leaves)} partitions, and none is ruled out by the deadline: every batch is"
            " planned for all of them",
            advice="A sweep with large batches is cheapest there:"
            f" call pgreaper.reaper_sweep({literal(target.policy.name)}, batch => 10000);",
        )  # fmt: skip


def triggers(target: Target) -> Iterator[Finding]:
    """Triggers run inside the transition: their time and their errors are the hold's."""
    with target.look.reading():
        found = target.look.rows(
            "select t.tgname::text as name, t.tgfoid::regprocedure::text as function, t.tgenabled::text as enabled,"
            " case when t.tgtype & 2 > 0 then 'before' when t.tgtype & 64 > 0 then 'instead of' else 'after' end"
            "   as timing,"
            " t.tgtype & 1 > 0 as each_row, t.tgdeferrable and t.tginitdeferred as deferred"
            "  from pg_trigger as t"
            " where t.tgrelid = %(oid)s::bigint::oid and not t.tgisinternal and t.tgtype & 16 > 0"
            "   and (t.tgattr::text = '' or exists ("
            "     select from unnest(t.tgattr::smallint[]) as k (attnum)"
            "       join pg_attribute as a on a.attrelid = t.tgrelid and a.attnum = k.attnum"
            "      where a.attname = any (%(written)s::text[])))"
            " order by 1",
            oid=target.oid, written=target.written,
        )  # fmt: skip
    if firing := [t for t in found if t.enabled in ("O", "A")]:
        what = [
            f"{visible(t.name)} ({'at commit' if t.deferred else t.timing} each {'row' if t.each_row else 'statement'},"
            f" {visible(t.function)})"
            for t in firing
        ]
        yield target.finding(
            "triggers", NOTE,
            f"{plural(len(firing), 'trigger')} will fire in the transition's transaction: {listed(what)}",
        )  # fmt: skip
    for t in found:
        if t.enabled == "D":
            yield target.finding(
                "trigger-disabled", NOTE, f"trigger {visible(t.name)} is disabled and will not fire when holds expire",
                subject=t.name, sql=(f"alter table {target.table} enable trigger {name(t.name)};",),
            )  # fmt: skip


def replication(target: Target) -> Iterator[Finding]:
    """Rows that another node writes are left to it; updates that cannot be published fail."""
    if target.denied is not None:
        return  # the missing right is told
    with target.look.reading():
        row = target.look.row(
            "select pgreaper._subscription(p) as subscription from pgreaper.policies as p where p.policy_id = %(id)s",
            id=target.policy.policy_id,
        )
    if row.subscription is not None:
        target.passive = True
        yield target.finding(
            "subscriber", NOTE,
            f"the rows of {target.table} come through subscription {visible(row.subscription)}: nothing is expired"
            " here, the publisher does it",
            sql=(f"alter subscription {name(row.subscription)} disable;",),
            advice="Only to take over from the publisher.",
        )  # fmt: skip
    with target.look.reading():
        row = target.look.row(
            "select u.reason is not null as refused, u.remedy"
            "  from pgreaper._unpublishable(%(oid)s::bigint::oid::regclass, %(column)s::text) as u",
            oid=target.oid, column=target.written[0],
        )  # fmt: skip
    if row.refused:
        yield target.finding(
            "replica-identity", ERROR,
            f"updates of {target.table} are published, and its replica identity does not allow them: every transition"
            " fails",
            sql=(row.remedy,) if row.remedy else (),
            advice=None if row.remedy else "Change the publication's row filter or column list.",
        )  # fmt: skip


# -- housekeeping of the target


def vacuum(target: Target) -> Iterator[Finding]:
    """Each expiry leaves a dead row version in the target."""
    with target.look.reading():
        found = target.look.rows(
            "select n.nspname::text as schema, c.relname::text as name, s.n_dead_tup as dead, s.n_live_tup as live,"
            " exists (select from pg_options_to_table(c.reloptions) as o"
            "          where o.option_name = 'autovacuum_enabled' and not o.option_value::boolean) as disabled"
            "  from pg_class as c join pg_namespace as n on n.oid = c.relnamespace"
            "  left join pg_stat_all_tables as s on s.relid = c.oid"
            " where c.relkind = 'r' and (c.oid = %(oid)s::bigint::oid or c.oid in ("
            "   select t.relid from pg_partition_tree(%(oid)s::bigint::oid::regclass) as t where t.isleaf))"
            " order by s.n_dead_tup desc nulls last limit 10000",
            oid=target.oid,
        )
    yield from (f for row in found for f in disabled(row, target.policy.name))
    yield from (f for row in found[:3] for f in bloated(row, target.limits, target.policy.name))


def disabled(row: Row, policy: str | None) -> Iterator[Finding]:
    """Autovacuum is switched off for a table."""
    if row.disabled:
        table = name(row.schema, row.name)
        yield Finding(
            "autovacuum", WARNING, policy, table,
            f"autovacuum is switched off for {table}: what expiring leaves behind is never cleaned up",
            sql=(f"alter table {table} reset (autovacuum_enabled);",),
        )  # fmt: skip


def bloated(row: Row, limits: Limits, policy: str | None) -> Iterator[Finding]:
    """A table has many dead row versions, also in comparison with the living."""
    if (row.dead or 0) >= limits.dead_rows and row.dead * 5 > row.live:
        table = name(row.schema, row.name)
        yield Finding(
            "dead-rows", WARNING, policy, table,
            f"{table} has {row.dead:,} dead row versions beside {plural(row.live, 'living one')}: reads become slower",
            sql=(f"vacuum (analyze) {table};",),
        )  # fmt: skip


def nulls(target: Target) -> Iterator[Finding]:
    """Rows that a NULL keeps from ever being due, or from being held."""
    p = target.policy
    if target.fragments is None:
        return
    deadline = f"h.{name(p.deadline_column)} is null"
    number = _some(target, f"{target.fragments.held} and {deadline}")
    if number:
        yield target.finding(
            "null-deadline", NOTE,
            f"{count(min(number, target.limits.count), capped=number > target.limits.count)} held"
            f" {'row has' if number == 1 else 'rows have'} no deadline and will never be due",
        )  # fmt: skip
    if p.status_column is None:
        return
    number = _some(target, f"h.{name(p.status_column)} is null and {target.fragments.due}")
    if number:
        yield target.finding(
            "null-state", NOTE,
            f"{count(min(number, target.limits.count), capped=number > target.limits.count)}"
            f" {'row' if number == 1 else 'rows'} past the deadline {'has' if number == 1 else 'have'} no state, and"
            " what has no state is never held",
        )  # fmt: skip


def _some(target: Target, condition: str) -> int:
    """How many rows, at most one more than the limit; 0 where the statistics of a large table know of no NULL."""
    with target.look.reading():
        if target.bytes > target.limits.scan and not target.look.rows(
            "select from pg_stats as s where s.schemaname = %(schema)s and s.tablename = %(table)s and s.null_frac > 0"
            " and s.attname in (%(deadline)s, %(status)s)",
            schema=target.policy.target_schema, table=target.policy.target_table,
            deadline=target.policy.deadline_column, status=target.policy.status_column,
        ):  # fmt: skip
            return 0
    query = target.statement(
        "select pg_catalog.count(*) as number from (select from {relation} as h where {condition} limit {most}) as h",
        condition=condition,
        most=target.limits.count + 1,
    )
    try:
        with target.look.reading(target.look.facts.search_path):
            return int(target.look.row(query).number)
    except psycopg.errors.QueryCanceled:
        return 0


# -- whether holds do expire


def service(target: Target) -> Iterator[Finding]:
    """Due holds that nobody takes, and why."""
    p, look = target.policy, target.look
    if target.fragments is None or target.passive:
        return
    with look.reading():
        s = look.row(
            "select cardinality(b.keys) as due,"
            " case when b.deadlines[1] is not null then"
            "   extract(epoch from pgreaper._clock() - p.grace"
            "     - greatest(b.deadlines[1], pgreaper._clock() - interval '100 years'))::float8 end as oldest,"
            " extract(epoch from pgreaper._clock() - greatest("
            "   (select max(t.at) from pgreaper.transitions as t where t.policy_id = p.policy_id),"
            "   (select max(c.claimed_at) from pgreaper.claims as c where c.policy_id = p.policy_id)))::float8 as idle,"
            " extract(epoch from pgreaper._clock()"
            "   - (select max(t.at) from pgreaper.transitions as t where t.policy_id = p.policy_id))::float8"
            "   as success,"
            " b.hints[1:%(locks)s::int]::text[] as places,"
            " array(select extract(epoch from pgreaper._clock() - p.grace"
            "         - greatest(d.deadline, pgreaper._clock() - interval '100 years'))::float8"
            "         from unnest(b.deadlines[1:%(locks)s::int]) with ordinality as d (deadline, number)"
            "        order by d.number) as ages,"
            " (pgreaper._suspicion(p, u)).suspect, u.failing_sqlstate as sqlstate"
            "  from pgreaper.policies as p"
            "  left join pgreaper.cursors as u on u.policy_id = p.policy_id"
            " cross join lateral pgreaper._due("
            "   p, pgreaper._target(p, %(path)s), pgreaper._clock(), null, %(limit)s) as b"
            " where p.policy_id = %(id)s",
            id=p.policy_id, limit=target.limits.count + 1, path=look.facts.search_path, locks=_LOCKS,
        )  # fmt: skip
    due = count(min(s.due, target.limits.count), capped=s.due > target.limits.count)
    due += " hold is due" if s.due == 1 else " holds are due"
    bound = max(p.objective_seconds, target.limits.late.total_seconds())
    late = s.oldest is not None and s.oldest > bound
    waiting = f"; {due}, the oldest for {duration(s.oldest)}" if s.due else ""
    if p.paused:
        reason = f" ({visible(p.pause_reason, 100)})" if p.pause_reason else ""
        yield target.finding(
            "paused", WARNING if late else NOTE, f"paused for {duration(p.paused_for)}{reason}{waiting}",
            subject=p.name, commands=(command("resume", p.name),),
        )  # fmt: skip
        return
    if s.suspect:
        yield target.finding(
            "suspended", ERROR, f"every hold fails alike (SQLSTATE {s.sqlstate}), so the policy rests{waiting}",
            subject=p.name,
            advice="Mend what refuses them, a constraint, a trigger or a right; the policy then goes on by itself.",
        )  # fmt: skip
        return
    locks = _locks(target, s.places)
    keepers = list(_keepers(target, locks))
    yield from keepers
    if not late:
        return
    # What somebody has locked is passed over, by however many workers.
    oldest = max((age for place, age in zip(s.places, s.ages, strict=True) if place not in locks), default=0)
    if locks and oldest <= bound:
        if not keepers:
            pids = sorted({f"pid {lock.pid}" if lock.pid else "a prepared transaction" for lock in locks.values()})
            yield target.finding(
                "locked", WARNING,
                f"{due}, the oldest for {duration(s.oldest)}, but open transactions have those locked that are late:"
                f" {listed(pids)}",
                subject=p.name, advice="They expire when these transactions have ended.",
            )  # fmt: skip
        return
    oldest = oldest or s.oldest
    last = f"nothing has expired for {duration(s.success)}" if s.success is not None else "nothing has ever expired"
    if s.idle is None or s.idle >= oldest:
        yield target.finding(
            "unserved", ERROR, f"{due}, the oldest for {duration(oldest)}, and nobody takes them: {last}",
            subject=p.name, commands=(command("work", p.name),),
            advice="With its --handler, if it has one; and from now on by cron, pg_cron, or pgreaper work --daemon.",
        )  # fmt: skip
    else:
        yield target.finding(
            "late", WARNING,
            f"{due}, the oldest for {duration(oldest)}, which is more than the objective of"
            f" {duration(p.objective_seconds)}; {last}",
            subject=p.name, commands=(command("work", p.name),),
            advice="With its --handler, if it has one. For good: more workers, or a larger batch.",
        )  # fmt: skip


def _locks(target: Target, places: list[str | None]) -> dict[str, Row]:
    """Who has which of these due holds locked, by their places; they are skipped without waiting."""
    assert target.fragments is not None  # noqa: S101
    if not target.fragments.plain or not places:
        return {}
    with target.look.reading():
        found = target.look.rows(
            target.statement(
                "select h.ctid::text as place, l.pid, a.usename::text as role, a.application_name as application,"
                " a.state, extract(epoch from clock_timestamp() - a.xact_start)::float8 as age"
                "  from {relation} as h"
                "  join pg_locks as l on l.locktype = 'transactionid' and l.mode = 'ExclusiveLock' and l.granted"
                "   and l.transactionid = h.xmax"
                "  left join pg_stat_activity as a on a.pid = l.pid"
                " where h.ctid = any ({places}::tid[]) and {held} and {due}",
                places=literal("{" + ",".join(f'"{place}"' for place in places) + "}"),
            )
        )
    return {row.place: row for row in found}


def _keepers(target: Target, locks: dict[str, Row]) -> Iterator[Finding]:
    """Transactions that have had due holds locked for long, so that nobody else notices; none of a worker's."""
    found: dict[int, list[Row]] = {}
    for lock in locks.values():
        if lock.age is not None and lock.age >= target.limits.lock.total_seconds() and not _ours(lock):
            found.setdefault(lock.pid, []).append(lock)
    for pid, holds in sorted(found.items(), key=lambda one: -len(one[1]))[:5]:
        s = holds[0]
        yield target.finding(
            "locked", WARNING,
            f"{plural(len(holds), 'due hold')} {'is' if len(holds) == 1 else 'are'} locked by pid {pid} of"
            f" {visible(s.role or '?')} ({visible(s.application or 'no name')}, {s.state}) for {duration(s.age)}",
            subject=f"pid {pid}", sql=(f"select pg_terminate_backend({pid});",),
        )  # fmt: skip


def _ours(lock: Row) -> bool:
    return str(lock.application or "").startswith("pgreaper/")


def lease(target: Target) -> Iterator[Finding]:
    """A lease is longer than a batch takes, and not so long that a killed worker's holds wait for ages."""
    p = target.policy
    with target.look.reading():
        observed = target.look.row(
            "select count(*) as batches, percentile_cont(0.99) within group (order by c.took) as took from ("
            "  select extract(epoch from c.finished_at - c.claimed_at)::float8 as took from pgreaper.claims as c"
            "   where c.policy_id = %(id)s and c.finished_at is not null and c.ending = 'expired'"
            "   order by c.finished_at desc limit 2000) as c",
            id=p.policy_id,
        )
        beyond = target.look.rows(
            "select c.token::text as token, c.holds, coalesce(c.worker, '?') as worker,"
            " extract(epoch from c.claim_until - pgreaper._clock())::float8 as ahead from pgreaper.claims as c"
            "  join pgreaper.policies as p on p.policy_id = c.policy_id"
            " where c.policy_id = %(id)s and c.finished_at is null"
            "   and c.claim_until - pgreaper._clock() > 2 * p.lease + interval '1 hour'"
            " order by c.claim_until desc limit 5",
            id=p.policy_id,
        )
    if observed.batches and p.lease_seconds < 4 * observed.took:
        good = max(round(8 * observed.took), 1)
        yield target.finding(
            "lease-short", WARNING,
            f"the lease is {duration(p.lease_seconds)}, and the 99th percentile from claim to finish is"
            f" {duration(observed.took)}: less than four times that, so a slow batch is"
            " taken back while it is worked on",
            subject=p.name, commands=(target.register(lease=f"{good} seconds"),) if good <= 86400 else (),
            advice=None if good <= 86400 else "Take smaller batches.",
        )  # fmt: skip
    elif p.lease_seconds > 3600 and p.lease_seconds > 100 * (observed.took or 0):
        good = max(60, round(8 * (observed.took or 0)))
        took = f", while a batch takes {duration(observed.took)}" if observed.batches else ""
        yield target.finding(
            "lease-long", WARNING,
            f"the lease is {duration(p.lease_seconds)}{took}: so long do the holds of a killed"
            " worker wait behind a pooler",
            subject=p.name, commands=(target.register(lease=f"{good} seconds"),),
        )  # fmt: skip
    for c in beyond:
        yield target.finding(
            "lease-beyond", WARNING,
            f"worker {visible(c.worker)} has {plural(c.holds, 'hold')} leased for another"
            f" {duration(c.ahead)}, far beyond the policy's lease of {duration(p.lease_seconds)}:"
            " a restored database, or a lease from before",
            subject=c.token, sql=(f"select pgreaper.reaper_release({literal(c.token)});",),
        )  # fmt: skip


def dead_letters(target: Target) -> Iterator[Finding]:
    """Dead letters that nobody has looked at."""
    p = target.policy
    with target.look.reading():
        d = target.look.row(
            "select count(*) as dead, count(*) filter (where f.age >= %(old)s) as old, max(f.age) as oldest,"
            " array_agg(distinct f.error_class) as classes from ("
            "  select f.error_class, extract(epoch from pgreaper._clock() - f.failed_at)::float8 as age"
            "    from pgreaper.failures as f"
            "   where f.policy_id = %(id)s and f.not_before = 'infinity' and f.discarded_at is null"
            "   limit %(limit)s) as f",
            id=p.policy_id, old=target.limits.dead_letter.total_seconds(), limit=target.limits.count + 1,
        )  # fmt: skip
    if d.dead:
        number = count(min(d.dead, target.limits.count), capped=d.dead > target.limits.count)
        yield target.finding(
            "dead-letters", WARNING if d.old else NOTE,
            f"{number} dead {'letter' if d.dead == 1 else 'letters'}, the oldest for {duration(d.oldest)}, wait for"
            f" {visible(p.owner)}: {listed([visible(c) for c in d.classes])}",
            subject=p.name,
            commands=(command("dead replay", p.name, "--all", "--reason", "the cause is mended"),),
            advice="Mend the cause first; `pgreaper dead list` shows them, `dead discard` lets them be.",
        )  # fmt: skip


CHECKS = (rights, index, partitions, triggers, replication, vacuum, nulls, service, lease, dead_letters)

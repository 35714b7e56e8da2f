"""The server and the session: what the whole installation depends on."""

import time
from collections.abc import Iterator
from typing import Final, TypedDict

from pgreaper.commands import literal, name
from pgreaper.doctor.finding import ERROR, NOTE, WARNING, Finding, Look
from pgreaper.reading import Row
from pgreaper.text import duration, plural, visible

_SETTINGS: Final = (
    "default_transaction_isolation",
    "default_transaction_read_only",
    "statement_timeout",
    "lock_timeout",
    "transaction_timeout",
    "idle_in_transaction_session_timeout",
    "deadlock_timeout",
    "autovacuum",
    "track_counts",
)
# What every function of pgreaper that touches a target sets for itself, in seconds.
_OWN_LOCK_TIMEOUT: Final = 0.2


class _Remedy(TypedDict, total=False):
    sql: tuple[str, ...]
    advice: str


def learn(look: Look) -> Row:
    """Role, database and settings of the session, as they are before any check sets its own."""
    return look.row(
        "select current_user::pg_catalog.text as role, pg_catalog.current_database()::pg_catalog.text as database,"
        " pg_catalog.pg_backend_pid() as pid, pg_catalog.pg_is_in_recovery() as standby,"
        " pg_catalog.current_setting('search_path') as search_path, r.rolsuper as superuser,"
        " pg_catalog.current_setting('server_version') as version,"
        " r.rolsuper or pg_catalog.pg_has_role('pg_read_all_stats', 'usage') as sees_sessions,"
        " (select pg_catalog.jsonb_object_agg(s.name, pg_catalog.jsonb_build_array(s.setting, s.unit, s.source))"
        "    from pg_catalog.pg_settings as s where s.name operator(pg_catalog.=) any (%(names)s)) as settings"
        " from pg_catalog.pg_roles as r where r.rolname operator(pg_catalog.=) current_user",
        names=list(_SETTINGS),
    )


def node(look: Look) -> Iterator[Finding]:
    """A standby and a read-only node cannot expire anything."""
    if look.facts.standby:
        yield Finding(
            "standby", ERROR, None, look.facts.database, "the server is a standby: nothing can be expired here",
            advice="Connect to the primary; target_session_attrs=read-write in the URL finds it.",
        )  # fmt: skip
    elif look.facts.settings["default_transaction_read_only"][0] == "on":
        yield Finding(
            "read-only", ERROR, None, look.facts.role,
            "default_transaction_read_only is on for this role, so nothing can be expired",
            **_writable(_set(look, "default_transaction_read_only", "off")),
        )  # fmt: skip


def isolation(look: Look) -> Iterator[Finding]:
    """The guard needs READ COMMITTED; pgreaper's own program sets it, other callers do not."""
    level = look.facts.settings["default_transaction_isolation"][0]
    if level != "read committed":
        yield Finding(
            "isolation", WARNING, None, look.facts.role,
            f"default_transaction_isolation is {level}: claims from psql or a program of yours are refused (RP004);"
            " `pgreaper work` and reaper_sweep() take READ COMMITTED themselves",
            **_set(look, "default_transaction_isolation", "read committed"),
        )  # fmt: skip


def timeouts(look: Look) -> Iterator[Finding]:
    """Timeouts that are shorter than what they would interrupt."""
    needed, policy = 1.0, None
    with look.reading():
        for row in look.rows(
            "select p.name, (select pg_catalog.percentile_cont(0.99) within group (order by c.took) from ("
            "   select extract(epoch from c.finished_at - c.claimed_at)::pg_catalog.float8 as took"
            "     from pgreaper.claims as c"
            "    where c.policy_id = p.policy_id and c.finished_at is not null and c.ending = 'expired'"
            "    order by c.finished_at desc limit 2000) as c) as took"
            "  from pgreaper.policies as p where p.unregistered_at is null"
        ):
            if row.took is not None and 4 * row.took > needed:
                needed, policy = 4 * row.took, row.name
    why = (
        f"four times the 99th percentile of a batch of {visible(policy)} is {duration(needed)}"
        if policy
        else "a batch may take a second"
    )
    for setting in ("statement_timeout", "transaction_timeout"):
        value = _seconds(look, setting)
        if 0 < value < needed:
            good = max(60, round(4 * needed))
            yield Finding(
                "timeout", WARNING, None, setting,
                f"{setting} is {duration(value)}, and {why}: batches are cancelled and done again in smaller ones",
                **_set(look, setting, f"{good}s"),
            )  # fmt: skip
    for setting, least, what in (
        ("lock_timeout", _OWN_LOCK_TIMEOUT, "registering, pausing and replaying give up sooner than a claim does"),
        ("idle_in_transaction_session_timeout", 1.0, "a slow network between two statements ends the session"),
    ):
        value = _seconds(look, setting)
        if 0 < value < least:
            yield Finding(
                "timeout", WARNING, None, setting,
                f"{setting} is {duration(value)}: {what}", **_set(look, setting, "10s"),
            )  # fmt: skip
    value = _seconds(look, "deadlock_timeout")
    if value <= _OWN_LOCK_TIMEOUT:
        yield Finding(
            "deadlock-timeout", WARNING, None, "deadlock_timeout",
            f"deadlock_timeout is {duration(value)}, and pgreaper gives way after {duration(_OWN_LOCK_TIMEOUT)}:"
            " in a deadlock it may be the application that loses",
            sql=("alter system set deadlock_timeout = '1s';", "select pg_reload_conf();"),
        )  # fmt: skip


def superuser(look: Look) -> Iterator[Finding]:
    """No right is ever checked for a superuser: a mistake in a policy or a trigger may do anything."""
    with look.reading():
        workers = look.rows(
            "select a.usename::pg_catalog.text as role, pg_catalog.count(*) as sessions"
            "  from pg_catalog.pg_stat_activity as a"
            "  join pg_catalog.pg_roles as r on r.rolname = a.usename and r.rolsuper"
            " where a.application_name like 'pgreaper/%%' and a.application_name <> 'pgreaper/doctor'"
            "   and a.datname = pg_catalog.current_database() and a.pid <> %(pid)s group by 1 order by 1",
            pid=look.facts.pid,
        )
    remedy = (
        "create role pgreaper_worker login;",
        "select pgreaper.reaper_grant('pgreaper_worker', 'worker');",
    )
    for worker in workers:
        yield Finding(
            "superuser", WARNING, None, worker.role,
            f"{plural(worker.sessions, 'session')} of pgreaper {'runs' if worker.sessions == 1 else 'run'} as superuser"
            f" {visible(worker.role)}: no right protects anything from a mistake",
            sql=remedy, advice="Then let the workers connect as that role.",
        )  # fmt: skip
    if look.facts.superuser and not workers:
        yield Finding(
            "superuser", NOTE, None, look.facts.role,
            f"this look is a superuser's ({visible(look.facts.role)}): what holds for a worker's own role, only a look"
            " as that role tells",
            advice="Run the doctor with the database URL that the workers have.",
        )  # fmt: skip


def pooler(look: Look) -> Iterator[Finding]:
    """Behind a pooler the backend that libpq knows is not the one that answers."""
    if look.connection.info.backend_pid != look.facts.pid:
        yield Finding(
            "pooler", NOTE, None, look.facts.database,
            "there is a pooler in between: the holds of a killed worker come back when its lease has ended, not"
            " within seconds",
            advice="Transaction and session pooling are fine; for a quicker takeover shorten the lease.",
        )  # fmt: skip


def clock(look: Look) -> Iterator[Finding]:
    """The database's clock decides; a host that disagrees writes misleading logs."""
    before = time.time()
    row = look.row("select extract(epoch from pg_catalog.clock_timestamp())::pg_catalog.float8 as clock")
    after = time.time()
    ahead = before - row.clock if before > row.clock else after - row.clock if after < row.clock else 0.0
    limit = look.limits.clock.total_seconds()
    with look.reading():
        workers = look.rows(
            "select coalesce(c.worker, '?') as worker, max(extract(epoch from c.skew)::float8) as skew"
            "  from pgreaper.claims as c where c.claimed_at > pgreaper._clock() - interval '1 hour'"
            "   and abs(extract(epoch from c.skew)) > %(limit)s group by 1 order by 1 limit 5",
            limit=limit,
        )
    for worker in workers:
        yield Finding(
            "clock", WARNING, None, worker.worker,
            f"the clock of worker {visible(worker.worker)} is {duration(abs(worker.skew))}"
            f" {'ahead of' if worker.skew > 0 else 'behind'} the database's: its logs do not fit together with the"
            " trail",
            advice="Let both follow the same time servers.",
        )  # fmt: skip
    if abs(ahead) > limit:
        yield Finding(
            "clock", WARNING, None, "clock",
            f"the clock of this host is {duration(abs(ahead))} {'ahead of' if ahead > 0 else 'behind'} the database's:"
            " holds expire by the database's, and logs of the two do not fit together",
            advice="Let both follow the same time servers.",
        )  # fmt: skip


def autovacuum(look: Look) -> Iterator[Finding]:
    """Each expiry leaves a dead row version behind; only vacuum removes it."""
    for setting in ("autovacuum", "track_counts"):
        if look.facts.settings[setting][0] == "off":
            yield Finding(
                "autovacuum", WARNING, None, setting,
                f"{setting} is off for the whole server: what expiring leaves behind is never cleaned up, and claims"
                " become slower and slower",
                sql=(f"alter system set {setting} = on;", "select pg_reload_conf();"),
            )  # fmt: skip


def snapshots(look: Look) -> Iterator[Finding]:
    """Whatever holds an old snapshot keeps vacuum from removing what died since."""
    if not look.facts.sees_sessions:
        yield Finding(
            "unseen", NOTE, None, look.facts.role,
            "other roles' sessions are hidden from this role, so old snapshots and lock holders cannot be named",
            sql=(f"grant pg_read_all_stats to {name(look.facts.role)};",),
        )  # fmt: skip
    limit = look.limits.snapshot.total_seconds()
    with look.reading():
        for s in look.rows(
            "select a.pid, a.usename::pg_catalog.text as role, a.application_name as application, a.state,"
            " extract(epoch from pg_catalog.clock_timestamp() - a.xact_start)::pg_catalog.float8 as age"
            "  from pg_catalog.pg_stat_activity as a"
            " where (a.backend_xmin is not null or a.backend_xid is not null) and a.pid <> pg_catalog.pg_backend_pid()"
            "   and a.backend_type = 'client backend'"
            "   and pg_catalog.clock_timestamp() - a.xact_start >= pg_catalog.make_interval(secs => %(limit)s)"
            "   and (a.datname = pg_catalog.current_database() or a.datname is null)"
            " order by a.xact_start limit 10",
            limit=limit,
        ):
            yield Finding(
                "snapshot", WARNING, None, f"pid {s.pid}",
                f"a transaction of {visible(s.role or '?')} ({visible(s.application or 'no name')}, pid {s.pid},"
                f" {s.state}) is open for {duration(s.age)}: vacuum can remove nothing that died since",
                sql=(f"select pg_terminate_backend({s.pid});",),
            )  # fmt: skip
        for p in look.rows(
            "select p.gid, p.owner::pg_catalog.text as role,"
            " extract(epoch from pg_catalog.clock_timestamp() - p.prepared)::pg_catalog.float8 as age"
            "  from pg_catalog.pg_prepared_xacts as p where p.database = pg_catalog.current_database()"
            "   and pg_catalog.clock_timestamp() - p.prepared >= pg_catalog.make_interval(secs => %(limit)s)"
            " order by p.prepared limit 10",
            limit=limit,
        ):
            yield Finding(
                "prepared-transaction", WARNING, None, visible(p.gid),
                f"the prepared transaction {visible(p.gid)} of {visible(p.role)} waits for {duration(p.age)}: it keeps"
                " its locks, and vacuum can remove nothing that died since",
                sql=(f"rollback prepared {literal(p.gid)};",), advice="Or commit it: only its owner knows which.",
            )  # fmt: skip
        for r in look.rows(
            "select s.slot_name::pg_catalog.text as slot, pg_catalog.age(s.xmin) as age"
            "  from pg_catalog.pg_replication_slots as s where s.xmin is not null and not s.active"
            " order by 2 desc limit 10"
        ):
            yield Finding(
                "replication-slot", WARNING, None, r.slot,
                f"nobody reads from replication slot {visible(r.slot)}, and it holds back vacuum by {r.age:,}"
                " transactions",
                sql=(f"select pg_drop_replication_slot({literal(r.slot)});",),
                advice="Only if its standby does not come back.",
            )  # fmt: skip


def scheduled(look: Look) -> Iterator[Finding]:
    """Jobs of pg_cron that call pgreaper."""
    from pgreaper import cron

    for f in cron.findings(look.connection, open_database=look.open_database):
        yield Finding(f.code, f.level, None, f.subject, f.fact, tuple(f.sql), tuple(f.commands), f.advice, f.database)


def _seconds(look: Look, setting: str) -> float:
    """A timeout in seconds; 0: none, or a server that does not know it."""
    value, unit, _ = look.facts.settings.get(setting, ("0", "ms", ""))
    return float(value) * {"ms": 0.001, "s": 1.0, "min": 60.0}[unit]


def _set(look: Look, setting: str, value: str) -> "_Remedy":
    """The statement that wins over every other place where the setting may come from, but for the connection's own."""
    if look.facts.settings[setting][2] in ("client", "session"):
        return {
            "advice": f"It comes with the connection (PGOPTIONS, or options= in the URL): leave {setting} out there."
        }
    where = f"alter role {name(look.facts.role)} in database {name(look.facts.database)}"
    return {"sql": (f"{where} set {setting} = {literal(value)};",)}


def _writable(remedy: _Remedy) -> _Remedy:
    """The same where the session that runs it may be read-only as well."""
    if "sql" in remedy:
        remedy["sql"] = ("set default_transaction_read_only = off;", *remedy["sql"])
    return remedy


CHECKS = (node, isolation, timeouts, superuser, pooler, clock, autovacuum, snapshots, scheduled)

"""
Whoever may create objects in a schema of the caller's path gets none of them into pgreaper's statements.

pgreaper runs as its caller.  A function, operator, type or temporary table that lies where the caller's path is
searched first would otherwise be called instead of the server's own, with the caller's rights.  The user's
triggers, views and domains on the other hand must find what the caller's path finds.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pgreaper import Reaper, schema
from pgreaper.cli import main
from pgreaper.connection import resolve
from pgreaper.errors import ReaperError
from pgreaper.statement import qualified
from pgreaper.worker import Settings, Worker

if TYPE_CHECKING:
    from collections.abc import Callable

    Connection = psycopg.Connection[Any]

SQL = Path(__file__).parents[2] / "sql"

# A trap counts in a sequence, which no rollback undoes: one that is sprung inside a handler is told, too.
TRAPS = (Path(__file__).parent / "hostile.sql").read_text()

# The same for types of the user's own: an exact match before the server's polymorphic or coerced one.
OWN_TRAPS = (Path(__file__).parent / "hostile_types.sql").read_text()

# Relations and types are looked for among the temporary ones first of all, unless the path says otherwise.
TEMPORARY = [
    "policies", "claims", "failures", "transitions", "events", "cursors", "totals", "locked", "done",
    "pg_class", "pg_attribute", "pg_type", "pg_index", "pg_locks", "pg_proc", "pg_constraint", "pg_namespace",
    "text", "uuid", "tid", "oid", "name", "date", "timestamptz", "json", "jsonb", "bytea", "regclass", "regtype",
    "plain", "labelled", "zoned", "parted", "seen_through", "enumerated", "domained", "composed", "stamped", "cited",
]  # fmt: skip

MOST = "id bigint generated always as identity primary key, expires_at timestamptz, note text"
TARGETS = {
    "plain": f"create table shop.plain ({MOST}, status text default 'held')",
    "labelled": f"create table shop.labelled ({MOST}, status varchar(9) default 'held')",
    "padded": f"create table shop.padded ({MOST}, status char(9) default 'held')",
    "enumerated": f"create table shop.enumerated ({MOST}, status mood default 'held')",
    "domained": f"create table shop.domained ({MOST}, status short_text default 'held')",
    "cited": f"create table shop.cited ({MOST}, status word default 'held')",
    "composed": "create table shop.composed (seat varchar(9) default gen_random_uuid()::text::varchar(9),"
    " day date default '2026-01-01', at numeric default 1.50, status text default 'held', expires_at timestamptz,"
    " note text,"
    " primary key (seat, day, at))",
    "mooded": "create table shop.mooded (id mood primary key default 'held', status text default 'held',"
    " expires_at timestamptz, note text)",
    "named": "create table shop.named (id short_text primary key default gen_random_uuid()::text, status text"
    " default 'held', expires_at timestamptz, note text)",
    "instant": "create table shop.instant (id timestamptz primary key"
    " default clock_timestamp() + random() * interval '1 day',"
    " status text"
    " default 'held', expires_at timestamptz, note text)",
    "zoned": "create table shop.zoned (id uuid primary key default gen_random_uuid(), status text default 'held',"
    " expires_at timestamp, expired_at timestamp, note text)",
    "daily": "create table shop.daily (id bytea primary key default gen_random_uuid()::text::bytea, status boolean"
    " default false, expires_at date, note text)",
    "stamped": f"create table shop.stamped ({MOST}, expired_at timestamptz)",
    "parted": "create table shop.parted (id integer generated always as identity, status text default 'held',"
    " expires_at timestamptz, note text, primary key (id, status)) partition by list (status);"
    " create table shop.parted_held partition of shop.parted for values in ('held');"
    " create table shop.parted_rest partition of shop.parted default",
    "seen_through": f"create table shop.behind ({MOST}, status text default 'held');"
    " create view shop.seen_through as select id, expires_at, note, status from shop.behind where note is not null",
}  # fmt: skip
SPECIAL: dict[str, dict[str, Any]] = {
    "zoned": {"zone": "Europe/Brussels", "stamp_column": "expired_at"},
    "daily": {"zone": "UTC", "held": ["false"], "expired": "true"},
    "stamped": {"status_column": None, "held": None, "expired": None, "stamp_column": "expired_at"},
    "labelled": {"held": ["held", "reserved"], "set": {"note": "gone"}},
    "enumerated": {"held": ["held", "reserved"]},
    "plain": {"payload_columns": ["note"], "grace": "1 second"},
}


@pytest.fixture
def hostile(committed: Any, core: Any, dsn: str) -> Callable[..., Connection]:
    """Lay the traps, and hand out connections whose path leads into them before anything else."""
    core.do(
        "create schema shop",
        "create type mood as enum ('held', 'reserved', 'expired', 'consumed')",
        "create domain short_text as varchar(40) check (value <> '')",
        # A type of the user's own, with operators of its own, in a schema of its own: as citext.
        "create schema words",
        "create type words.word",
        "create function words.word_in(cstring) returns words.word immutable strict language internal as 'textin'",
        "create function words.word_out(words.word) returns cstring immutable strict language internal as 'textout'",
        "create type words.word (input = words.word_in, output = words.word_out, like = text, category = 'S')",
        "create cast (words.word as text) without function as implicit",
        "create cast (text as words.word) without function as assignment",
        *(
            f"create function words.{name}(words.word, words.word) returns boolean immutable strict language sql"
            f" set search_path = pg_catalog, pg_temp as $$ select lower($1::text) {sign} lower($2::text) $$"
            for name, sign in (("lt", "<"), ("le", "<="), ("eq", "="), ("ge", ">="), ("gt", ">"))
        ),
        "create function words.cmp(words.word, words.word) returns integer immutable strict language sql"
        " set search_path = pg_catalog, pg_temp as $$ select bttextcmp(lower($1::text), lower($2::text)) $$",
        *(
            f"create operator words.{sign} (leftarg = words.word, rightarg = words.word, function = words.{name})"
            for name, sign in (("lt", "<"), ("le", "<="), ("eq", "="), ("ge", ">="), ("gt", ">"))
        ),
        "create operator class words.word_ops default for type words.word using btree as operator 1 words.<,"
        " operator 2 words.<=, operator 3 words.=, operator 4 words.>=, operator 5 words.>,"
        " function 1 words.cmp(words.word, words.word)",
        "set search_path = public, words",
        *(statement for text in TARGETS.values() for statement in text.split(";")),
        TRAPS,
        OWN_TRAPS,
        "reset search_path",
    )

    def connect(**arguments: Any) -> Connection:
        connection: Connection = committed(
            options="-c search_path=hostile,public,pg_catalog -c statement_timeout=20s", **arguments
        )
        for name in TEMPORARY:
            connection.execute(f"create temporary table {name} ()")
        return connection

    return connect


def sprung(core: Any) -> bool:
    return bool(core.value("select is_called from hostile.sprung"))


def test_the_traps_are_set(hostile, core):
    """What this file says is worth something: plain statements of the session do fall into them."""
    victim = hostile()
    for statement in (
        "select 'a'::pg_catalog.varchar = 'b'::pg_catalog.varchar",
        "select 1 <= 2",
        "select 'a' || 'b'",
        "select cardinality(array['a'])",
        "select * from unnest(array['a'])",
        "select array_agg(c.v) from (values ('a'), ('b')) as c (v)",
        "select format('%s', 'a')",
        "select 'held'::public.mood = 'held'::public.mood",
        "select oid from pg_attribute",
        "select pg_catalog.clock_timestamp() - pg_catalog.clock_timestamp()",
        "select min(c.v) from (values (1)) as c (v)",
        "select 'a' in ('a', 'b')",
        "select 'a'::pg_catalog.text like 'b'",
    ):
        core.do("select setval('hostile.sprung', 1, false)")
        with pytest.raises(psycopg.Error):
            victim.execute(statement)
        assert sprung(core) or "min" in statement or "pg_attribute" in statement or "array_agg" in statement, statement
    with pytest.raises(psycopg.Error):
        victim.execute("select 'a'::text")  # a composite type, of a temporary table
    functions, operators = core.rows(
        "select (select count(*) from pg_proc where pronamespace = 'hostile'::regnamespace),"
        "       (select count(*) from pg_operator where oprnamespace = 'hostile'::regnamespace)"
    )[0]
    assert functions > 1500
    assert operators > 450


FETCH = "select token, event, payload from pgreaper.reaper_fetch('p', payload => '{note}')"


def relay(victim: Connection, events: int, *, moved: bool) -> None:
    """Everything that a relay does; ``moved``: the state is part of the key, so the key of then is nobody's now."""
    victim.execute("select pgreaper.reaper_relay('p', backfill => true)")
    ack = "select pgreaper.reaper_ack(%s, '{}', array[%s::pg_catalog.text], '{E}', array[%s::pg_catalog.bool])"
    for transient in ("t", "f"):
        batch = victim.execute(FETCH).fetchall()
        assert len(batch) == events
        if not batch:
            break
        assert {payload is None for _, _, payload in batch} == {moved}
        victim.execute("select pgreaper.reaper_keep(%s)", [batch[0][0]])
        victim.execute(ack, [batch[0][0], batch[0][1], transient])
        events -= 1
    victim.execute("select pgreaper.reaper_resend('p')")
    victim.execute("table pgreaper.relay_status")
    for token, _, _ in victim.execute(FETCH).fetchall()[:1]:
        victim.execute("select pgreaper.reaper_ack(%s)", [token])
    victim.execute("select pgreaper.reaper_unrelay('p')")


@pytest.mark.parametrize("kind", TARGETS)
def test_c060_nothing_is_hijacked(hostile, core, dsn, kind):
    """Every function and view, through the driver and in plain SQL, over every kind of target: no trap springs."""
    victim = hostile()
    reaper = Reaper(victim)
    target = f"shop.{kind}"
    wanted = {
        "deadline_column": "expires_at",
        "status_column": "status",
        "held": ["held"],
        "expired": "expired",
        "owner": "x",
    }
    few = 1 if kind == "mooded" else 12
    late = "now() - interval '3 days'" if kind in ("zoned", "daily") else "now() - interval '1 hour'"

    def lay(note: str = "good") -> None:
        core.do(
            f"insert into {target} (expires_at, note) select {late} + g * interval '1 second', '{note}'"
            f" from generate_series(1, {few}) as g"
        )

    def refuse() -> None:
        table = "shop.behind" if kind == "seen_through" else target
        core.do(
            "create function shop.refuses() returns trigger language plpgsql set search_path = pg_catalog, pg_temp as"
            " $$ begin raise check_violation; end $$",
            f"create trigger refuses before update on {table} for each row when (old.note = 'bad')"
            " execute function shop.refuses()",
        )

    def look() -> None:
        reaper.status()
        reaper.policies()
        reaper.registered()
        reaper.dead_letters()
        reaper.dead_letters("p", key="1", error_class="X", older_than="1 hour")
        reaper.dead(["p"])
        reaper.suspended(["p"])
        reaper.next_due()
        reaper.next_due(["p"])
        reaper.preview("p")
        reaper.verify("p")
        reaper.server()
        for view in core.column(
            "select c.relname from pg_class as c"
            " where c.relnamespace = 'pgreaper'::regnamespace and c.relkind = 'v' order by 1"
        ):
            victim.execute(f"table pgreaper.{view}")

    try:
        reaper.register("p", target, **(wanted | SPECIAL.get(kind, {})))
        look()
        # Sweep.
        lay()
        assert reaper.sweep("p", batch=5) == few
        # The trail passed on: payload, refusal, retry, dead, tried again, kept, given back, removed.
        relay(victim, few, moved=kind == "parted")
        # Claim, payload, keys apart, renewal, release, expiry, and the same answer again.
        core.do(f"delete from {target}")
        lay()
        look()
        got = reaper.claim("p", batch=9, worker="w", rescan=True, session=True)
        assert got
        look()
        reaper.renew(got[0].token)
        reaper.time_left(got[0].token)
        reaper.release(got[0].token)
        got = reaper.claim("p", batch=9, worker="w")
        assert {o.outcome for o in reaper.expire(got[0].token, keys=[got[0].key])} == {"expired"}
        assert {o.outcome for o in reaper.expire(got[0].token)} == {"expired"}
        assert {o.outcome for o in reaper.expire(got[0].token)} == {"expired"}
        assert reaper.failures(got[0].token) == []
        batch = reaper.claim_batch("p", batch=9)
        if batch:
            assert reaper.expire_batch(batch.token).keys() == {"expired"}
        assert [e.outcome for e in reaper.history("p", got[0].key)][-1] == "expired"
        # A handler's failure, then a retry, and what moved on meanwhile.
        core.do(f"delete from {target}")
        lay()
        got = reaper.claim("p", rescan=True)
        reaper.fail(got[0].token, got[0].key, error_class="E", transient=True, retry_in="0 seconds")
        if few > 1:
            reaper.fail(got[0].token, got[1].key, error_class="E", final=True)
        reaper.expire(got[0].token)
        look()
        assert reaper.sweep("p") == 1
        core.do("update pgreaper.failures set failed_at = failed_at - interval '1 day'")
        assert len(reaper.replay("p", error_class="E", older_than="1 hour", reason="r")) == (few > 1)
        assert reaper.sweep("p") == (few > 1)
        # A bad hold among good ones is found by halving; a discard.
        if few > 1:
            core.do(f"delete from {target}")
            refuse()
            lay()
            core.do(f"insert into {target} (expires_at, note) select {late}, 'bad' from generate_series(1, 2)")
            got = reaper.claim("p", rescan=True)
            assert {o.outcome for o in reaper.expire(got[0].token)} == {"expired", "dead-letter"}
            assert len(reaper.discard("p", reason="r", error_class="ConstraintViolation")) == 2
            # All fail: suspended, then tried with the youngest.
            core.do(f"delete from {target}")
            lay("bad")
            with pytest.raises(ReaperError) as caught:
                reaper.sweep("p")
            assert "suspended" in str(caught.value)
            look()
            core.do("update pgreaper.cursors set suspended_until = now()")
            with pytest.raises(ReaperError):
                reaper.sweep("p")
            core.do(
                f"delete from {target}",
                "delete from pgreaper.failures",
                "update pgreaper.cursors set suspended_until = now()",
            )
            lay()
            assert reaper.sweep("p") == few
        # A lease that lapsed is taken back.
        core.do(f"delete from {target}", "delete from pgreaper.failures")
        lay()
        got = reaper.claim("p", rescan=True)
        core.do("update pgreaper.claims set claim_until = now() - interval '1 hour' where finished_at is null")
        reaper.claim("p", rescan=True)
        assert core.value("select count(*) from pgreaper.events where kind = 'taken-back'") == 1
        core.do("update pgreaper.claims set claim_until = now() - interval '1 hour' where finished_at is null")
        reaper.sweep()
        reaper.pause("p", reason="r")
        look()
        reaper.resume("p")
        victim.execute("select pgreaper.reaper_prune()")
        # Commands: a key as it is, one that no hold has, one that none could have, and once more.
        core.do(f"delete from {target}", "delete from pgreaper.failures")
        lay()
        got = reaper.claim("p", rescan=True)
        reaper.release(got[0].token)
        keys = [hold.key for hold in got]
        core.do(f"update {target} set expires_at = expires_at + interval '9 days'")
        assert {c.outcome for c in reaper.expire_keys("p", keys)} == {"not-due"}
        core.do(f"update {target} set expires_at = expires_at - interval '9 days'")
        assert "expired" in {c.outcome for c in reaper.expire_keys("p", [keys[0], "none", "[1"])}
        # Where the state is part of the key, the one that has expired has another by now.
        before = "not-eligible" if kind == "parted" else "already-done"
        assert {c.outcome for c in reaper.expire_keys("p", keys)} == {before, *["expired"][: few - 1]}
        # The worker, in a session of its own.
        core.do(f"delete from {target}", "delete from pgreaper.failures")
        lay()
        hostile_url = f"{dsn}&options=-c%20search_path%3Dhostile,public,pg_catalog"
        assert Worker(resolve(hostile_url), Settings(batch=5), log=lambda line: None).run().exit_code == 0
        assert main(["status", "--json", "--database-url", hostile_url]) == 0
        core.do("update pgreaper.claims set claim_until = now() - interval '1 hour' where finished_at is null")
        reaper.unregister("p")
        assert reaper.history("p", "1") is not None
    except (psycopg.Error, ReaperError) as error:
        if sprung(core):
            pytest.fail(f"{error}: {getattr(error, 'original', None)}")
        raise
    assert not sprung(core)


@pytest.mark.parametrize("kind", TARGETS)
def test_c060_the_applications_side_is_not_hijacked(hostile, core, kind):
    """Consume, extend and restore, over every kind of target: no trap springs."""
    victim = hostile()
    reaper = Reaper(victim)
    target = f"shop.{kind}"
    settings: dict[str, Any] = {"deadline_column": "expires_at", "status_column": "status", "held": ["held"],
                                "expired": "expired", "owner": "x", "restore_within": "9 days"}  # fmt: skip
    settings |= SPECIAL.get(kind, {})
    if kind == "stamped":
        core.do("alter table shop.stamped add used_at timestamptz")
        settings["consumed_stamp_column"] = "used_at"
    elif kind != "daily":
        settings["consumed"] = "consumed"
    if len(settings["held"] or ()) > 1:
        settings["restored"] = "held"
    until = datetime.now(UTC) + timedelta(days=9)
    try:
        reaper.register("p", target, **settings)
        spelled = core.value("select (pgreaper._target(p)).key from pgreaper.policies as p")

        def lay(deadline: str) -> str:
            core.do(
                f"delete from {target}", f"insert into {target} (expires_at, note) values (now() {deadline}, 'good')"
            )
            return str(core.value(f"select {spelled} from {target} as h"))

        key = lay("+ interval '3 days'")
        assert reaper.extend("p", key, until).outcome == "extended"
        assert reaper.extend("p", key, until).outcome == "already-done"
        if kind != "daily":
            assert reaper.consume("p", key).outcome == "consumed"
        lay("- interval '3 days'")
        assert reaper.sweep("p") == 1
        key = str(core.value(f"select {spelled} from {target} as h"))
        assert reaper.extend("p", key, until).outcome == "not-eligible"
        assert reaper.restore("p", key, until, reason="r").outcome == "restored"
    except (psycopg.Error, ReaperError) as error:
        if sprung(core):
            pytest.fail(f"{error}: {getattr(error, 'original', None)}")
        raise
    assert not sprung(core)


def test_the_register_command_is_not_hijacked(hostile, core, dsn):
    """The command that looks at indexes and the planner as well."""
    hostile()
    url = f"{dsn}&options=-c%20search_path%3Dhostile,public,pg_catalog"
    for kind in ("plain", "enumerated", "zoned", "seen_through", "parted"):
        arguments = [
            "register",
            kind,
            f"shop.{kind}",
            "--deadline",
            "expires_at",
            "--status",
            "status",
            "--held",
            "held",
        ]
        arguments += ["--held", "reserved"] if kind == "enumerated" else []
        arguments += ["--zone", "UTC"] if kind == "zoned" else []
        assert main([*arguments, "--expired", "expired", "--owner", "x", "--database-url", url]) == 0
    assert not sprung(core)


def test_what_is_installed_means_the_servers_own(empty_dsn):
    """Views, defaults and constraints keep what they were resolved to: the path of who installs does not count."""
    path = "options=-c%20search_path%3Dhostile,public"
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        connection.execute(TRAPS)
        schema.install(f"{empty_dsn}&{path}")
        taken = connection.execute(
            "select pg_describe_object(d.classid, d.objid, d.objsubid) from pg_depend as d join pg_proc as p"
            " on d.refclassid = 'pg_proc'::regclass and p.oid = d.refobjid"
            " where p.pronamespace = 'hostile'::regnamespace"
            " and d.classid in ('pg_rewrite'::regclass, 'pg_constraint'::regclass, 'pg_attrdef'::regclass)"
            " and pg_describe_object(d.classid, d.objid, d.objsubid) ~ 'pgreaper'"
        ).fetchall()
        assert taken == []
        assert connection.execute("select is_called from hostile.sprung").fetchone() == (False,)


@pytest.mark.parametrize("way", ["claim", "sweep"])
def test_triggers_views_and_domains_find_what_the_path_of_the_caller_finds(core, committed, way):
    """Nothing of pgreaper's path is seen by them: immediate and deferred triggers, view conditions, planner, checks."""
    core.do(
        "create schema app",
        "set search_path = app, public",
        "create table app.log (what text)",
        "create table app.paid (id bigint)",
        "create function app.is_paid(bigint) returns boolean stable language plpgsql as"
        " $$ begin return exists (select from paid where id = $1); end $$",
        # Asked by the planner already, for its estimate.
        "create function app.longest() returns integer stable language plpgsql as"
        " $$ begin return (select 40 + count(*) from paid); end $$",
        "create function app.is_state(text) returns boolean stable language plpgsql as"
        " $$ begin perform from log; return $1 <> ''; end $$",
        "create domain app.state as text check (app.is_state(value))",
        "create table app.kept (id bigint primary key, status app.state, expires_at timestamptz, n integer default 1)",
        "create view app.due as select id, status, expires_at from app.kept"
        " where not app.is_paid(id) and n < app.longest()",
        "create sequence app.calls",
        "create function app.note() returns trigger language plpgsql as"
        " $$ begin perform nextval('calls'); insert into log values (tg_name || ' ' || current_setting('search_path'));"
        " return new; end $$",
        "create trigger before_it before update on app.kept for each row execute function app.note()",
        "create trigger of_statement before update on app.kept for each statement execute function app.note()",
        "create constraint trigger at_commit after update on app.kept deferrable initially deferred"
        " for each row execute function app.note()",
        "insert into app.kept select g, 'held', now() - interval '1 hour' from generate_series(1, 3) as g",
        "insert into app.paid values (2)",
    )
    core.register(target="app.due")
    core.do("truncate log")
    if way == "claim":
        got = core.claim()
        assert set(core.expire(got[0].token).values()) == {("expired", "expired")}
    else:
        assert core.value("call pgreaper.reaper_sweep()") == 2
    assert core.value("select current_setting('search_path')") == "app, public"
    logged = set(core.column("select what from log"))
    assert logged == {f"{name} app, public" for name in ("before_it", "of_statement", "at_commit")}
    assert core.column("select id from kept where status = 'expired' order by 1") == [1, 3]
    assert core.preview()["due"] == 0
    assert core.status()["state"] == "active"
    if way == "sweep":
        # One statement, and nothing of it was undone and done again.
        assert core.value("select last_value from calls") == 2 + 1 + 2
    # With a hold that is refused the others are expired the careful way, and what is deferred runs in the commit.
    core.do(
        "create function app.refuse() returns trigger language plpgsql as $$ begin raise 'no'; end $$",
        "create trigger refuse before update on app.kept for each row when (old.id = 4) execute function app.refuse()",
        "truncate log",
        "insert into app.kept select g, 'held', now() - interval '1 hour' from generate_series(4, 6) as g",
    )
    if way == "claim":
        assert len(core.run()) == 3
    else:
        assert core.value("call pgreaper.reaper_sweep()") == 2
    assert set(core.column("select what from log")) == logged
    assert core.column("select key from pgreaper.dead_letters") == ["4"]


def test_triggers_and_views_of_the_applications_side(core, committed):
    """What consume, extend and restore write finds the caller's path too: triggers, view conditions, deferred ones."""
    core.do(
        "create schema app",
        "set search_path = app, public",
        "create table app.log (what text)",
        "create table app.blocked (id bigint)",
        "create function app.is_blocked(bigint) returns boolean stable language plpgsql as"
        " $$ begin return exists (select from blocked where id = $1); end $$",
        "create table app.kept (id bigint primary key, status text, expires_at timestamptz)",
        "create view app.open as select id, status, expires_at from app.kept where not app.is_blocked(id)",
        "create function app.note() returns trigger language plpgsql as"
        " $$ begin insert into log values (tg_name || ' ' || current_setting('search_path')); return new; end $$",
        "create trigger before_it before update on app.kept for each row execute function app.note()",
        "create constraint trigger at_commit after update on app.kept deferrable initially deferred"
        " for each row execute function app.note()",
        "insert into app.kept select g, 'held', now() + g * interval '1 hour' from generate_series(1, 3) as g",
        "insert into app.kept values (4, 'expired', now())",
        "insert into app.blocked values (2)",
    )
    core.register(target="app.open", consumed="consumed", restore_within="1 hour")
    far = {"policy": "p", "until": "2100-01-01Z"}
    assert core.call("reaper_consume", "outcome", policy="p", key="1") == [("consumed",)]
    assert core.call("reaper_consume", "outcome", policy="p", key="2") == [("not-eligible",)]
    assert core.call("reaper_extend", "outcome", key="3", **far) == [("extended",)]
    assert core.call("reaper_restore", "outcome", key="4", reason="r", **far) == [("restored",)]
    assert core.value("select current_setting('search_path')") == "app, public"
    assert sorted(core.column("select what from log")) == ["at_commit app, public"] * 3 + ["before_it app, public"] * 3


@pytest.mark.parametrize("change", ["set search_path = nowhere", "set local search_path = nowhere"])
def test_a_trigger_that_changes_the_path_changes_it_for_nobody_else(core, committed, holds, change):
    """The next batch of the same call is made as the first was, and the caller's path is what it was."""
    core.do(
        "create table log (path text)",
        "create function turns() returns trigger language plpgsql as"
        f" $$ begin insert into public.log values (current_setting('search_path')); {change}; return new; end $$",
        "create trigger turns before update on holds for each row execute function turns()",
    )
    holds.due(4)
    core.register(target="public.holds")
    before = core.value("select current_setting('search_path')")
    got = core.claim(batch=2)
    with core.connection.transaction():
        assert set(core.expire(got[0].token).values()) == {("expired", "expired")}
        assert core.value("select current_setting('search_path')") == before
    after = core.value("select current_setting('search_path')")
    assert after == ("nowhere" if "local" not in change else before), "as after any statement with that trigger"


def test_what_is_called_from_outside_pins_its_path(core):
    """Every public function, and every function that a view calls, says which names it means."""
    open_ones = core.column("""
        select p.oid::regprocedure::text from pg_proc as p
         where p.pronamespace = 'pgreaper'::regnamespace
           and p.prokind = 'f'
           and (starts_with(p.proname, 'reaper_')
                or exists (select from pg_depend as d join pg_rewrite as r on r.oid = d.objid
                            where d.classid = 'pg_rewrite'::regclass and d.refobjid = p.oid))
           and not coalesce('search_path=pg_catalog, pg_temp' = any (p.proconfig), false)
         order by 1""")
    # They consist of one constant, or of what names its schema.
    assert open_ones == [
        "pgreaper._clock()",
        "pgreaper._event_name(bigint)",
        "pgreaper._lateness_bounds()",
        "pgreaper.reaper_version()",
    ]


def test_every_look_at_a_target_is_given_the_callers_path():
    """`_target` would take the pinned path for the caller's where a function forgets to hand it on."""
    calls = {
        path.stem: re.findall(r"pgreaper[.]_target[(]([^()]*)[)]", path.read_text())
        for path in SQL.glob("functions/*.sql")
        if path.stem != "_target"
    }
    assert sum(map(len, calls.values())) >= 10
    assert [name for name, found in calls.items() if not all("search_path" in arguments for arguments in found)] == []


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("select %s::text[], x::jsonb, 1::integer", "select %s::pg_catalog.text[], x::pg_catalog.jsonb, 1::integer"),
        ("select count(*) from pgreaper.f(a => 1)", "select pg_catalog.count(*) from pgreaper.f(a => 1)"),
        (
            "where a = any(%s) and b <> 'a = b'",
            "where a operator(pg_catalog.=) any(%s) and b operator(pg_catalog.<>) 'a = b'",
        ),
        ("extract(epoch from a - b)", "extract(epoch from a operator(pg_catalog.-) b)"),
        ('"set" => %s', '"set" => %s'),
        (
            "from pg_stat_activity as a join pg_class as c on true",
            "from pg_catalog.pg_stat_activity as a join pg_catalog.pg_class as c on true",
        ),
        ("from pg_catalog.pg_locks, pgreaper.pg_x", "from pg_catalog.pg_locks, pgreaper.pg_x"),
    ],
)
def test_qualified(statement, expected):
    """Names of the server's get their schema; literals, named arguments and grammar are left alone."""
    assert qualified(statement) == expected


@pytest.mark.parametrize(
    "text", ["a in (1)", "a not in (1)", "join b using (c)", "a like 'b'", "a between 1 and 2", "a is distinct from b"]
)
def test_what_cannot_be_qualified_is_refused(text):
    """Such a statement would look an operator up in the path without a sign of it."""
    with pytest.raises(ValueError, match="looks up an operator"):
        qualified(f"select {text}")

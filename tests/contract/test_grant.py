"""reaper_grant: least rights, that they suffice, that each is needed, and that nobody else has any."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from pgreaper import Reaper, schema
from pgreaper.cli import main
from pgreaper.errors import AccessDenied, InvalidInput, ReaperError, RegistrationRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Connection = psycopg.Connection[Any]

KINDS = ("worker", "operator", "reader", "registrar", "application")
SHOP = """
create schema shop;
create table shop.bookings (id bigint generated always as identity primary key, status text not null default 'held',
  expires_at timestamptz not null, expired_at timestamptz, token text, card text);
create index on shop.bookings (expires_at) where status = 'held';
"""
SETTINGS: dict[str, Any] = {
    "deadline_column": "expires_at",
    "status_column": "status",
    "held": ["held"],
    "expired": "expired",
    "owner": "shop-team",
    "stamp_column": "expired_at",
    "set": {"token": None},
    "payload_columns": ["token"],
}
NUMBERS = count(1)


class Roles:
    """Roles of this test's own, which belong to the cluster and so go at its end."""

    def __init__(self, db: Connection, dsn: str, worker_id: str, stack: ExitStack) -> None:
        self.db, self.dsn, self.worker_id, self.stack = db, dsn, worker_id, stack

    def create(self, what: str = "role", attributes: str = "login") -> str:
        name = f"pgreaper_{what}_{self.worker_id}_{next(NUMBERS)}"
        role = sql.Identifier(name)
        self.db.execute(sql.SQL("create role {} " + attributes).format(role))
        self.stack.callback(self._drop, role)
        return name

    def granted(self, kind: str) -> str:
        name = self.create(kind)
        assert all(done for _, done in self.db.execute("select * from pgreaper.reaper_grant(%s, %s)", (name, kind)))
        return name

    def _drop(self, role: sql.Identifier) -> None:
        self.db.execute(sql.SQL("reset role; drop owned by {} cascade; drop role {}").format(role, role))

    def url(self, role: str) -> str:
        given = conninfo_to_dict(self.dsn)
        return f"postgresql://{role}@/{given['dbname']}?host={given['host']}&port={given['port']}"

    def connect(self, role: str) -> Connection:
        connection = psycopg.connect(self.url(role), autocommit=True)
        self.stack.callback(connection.close)
        return connection


@pytest.fixture
def roles(committed: Any, db: Connection, dsn: str, worker_id: str) -> Iterator[Roles]:
    with ExitStack() as stack:
        yield Roles(db, dsn, worker_id, stack)


@pytest.fixture
def shop(core: Any, roles: Roles) -> Callable[..., None]:
    """The table, policy ``p`` on it; the value inserts overdue bookings."""
    core.do(SHOP)
    Reaper(core.connection).register("p", "shop.bookings", **SETTINGS)

    def lay(n: int = 6) -> None:
        core.do(
            "insert into shop.bookings (expires_at, card, token)"
            f" select now() - interval '1 hour' + g * interval '1 s', '4711', 't' from generate_series(1, {n}) as g"
        )

    return lay


def work_through(reaper: Reaper, core: Any, lay: Callable[..., None]) -> None:
    """All that a worker does, without Python's worker around it."""
    reaper.server()
    reaper.registered()
    (status,) = reaper.status()
    if status.state == "broken":
        raise AccessDenied(status.reason or status.state, sqlstate="42501")
    for view in ("backlog", "leases", "retries", "dead_letters", "history", "activity", "metrics"):
        reaper.connection.execute(f"table pgreaper.{view}")
    lay()
    reaper.preview("p")
    got = reaper.claim("p", batch=4, worker="w", rescan=True)
    assert got
    assert reaper.next_due(["p"]) is not None
    reaper.renew(got[0].token)
    reaper.release(got[0].token)
    got = reaper.claim("p", batch=4, worker="w", rescan=True)
    reaper.fail(got[0].token, got[0].key, error_class="E", transient=True, retry_in="0 seconds")
    reaper.fail(got[0].token, got[1].key, error_class="E", final=True)
    assert {o.outcome for o in reaper.expire(got[0].token)} == {"retry", "dead-letter", "expired"}
    reaper.failures(got[0].token)
    assert reaper.history("p", got[2].key)[-1].outcome == "expired"
    assert reaper.sweep("p") >= 3
    lay()
    batch = reaper.claim_batch("p", rescan=True)
    assert batch is not None
    assert reaper.expire_batch(batch.token).total() == batch.holds
    # A lease that lapsed, and what moved on meanwhile.
    lay()
    got = reaper.claim("p", batch=6, rescan=True)
    core.do("update shop.bookings set status = 'consumed' where id = (select max(id) from shop.bookings)",
            "update pgreaper.claims set claim_until = now() - interval '1 h' where finished_at is null")  # fmt: skip
    reaper.claim("p", rescan=True)
    core.do("update pgreaper.failures set not_before = now() - interval '1 s' where not_before < 'infinity'")
    reaper.sweep()
    got = reaper.claim("p", rescan=True)
    if got:
        reaper.expire(got[0].token)
    # Commands from outside.
    lay()
    keys = core.column("select id::text from shop.bookings where status = 'held'")
    assert "expired" in {c.outcome for c in reaper.expire_keys("p", keys)}
    # Events out: one is refused, a lease lapses, the rest is delivered.
    core.do("delete from pgreaper.relays", "delete from pgreaper.deliveries", "delete from pgreaper.undelivered")
    connection = reaper.connection
    connection.execute("select pgreaper.reaper_relay('p', backfill => true)")
    fetch = "select token, event from pgreaper.reaper_fetch('p', payload => '{token}')"
    token, event = connection.execute(fetch).fetchall()[0]
    connection.execute("select pgreaper.reaper_keep(%s)", [token])
    core.do("update pgreaper.deliveries set lease_until = now() - interval '1 h'")
    token, event = connection.execute(fetch).fetchall()[0]
    connection.execute("select pgreaper.reaper_ack(%s, refused => %s, error_classes => '{E}', transient => '{t}')",
                       [token, [event]])  # fmt: skip
    connection.execute("select * from pgreaper.relay_status")
    connection.execute("select * from pgreaper.dead_events")


def test_every_function_table_and_view_is_listed(core):
    """`_rights` has a line for each public function, for nobody but the owner too, and for each table and view."""
    unlisted = core.column("""
        select p.proname::text from pg_proc as p
         where p.pronamespace = 'pgreaper'::regnamespace and not starts_with(p.proname, '_')
           and p.proname not in (select r.name from pgreaper._rights() as r where r.object = 'routine')
        union all
        select c.relname from pg_class as c
         where c.relnamespace = 'pgreaper'::regnamespace and c.relkind in ('r', 'v')
           and c.relname not in (select r.name from pgreaper._rights() as r where r.object = 'table')
         order by 1""")
    assert unlisted == [], "give it a line in sql/functions/_rights.sql"
    gone = core.column("""
        select r.name from pgreaper._rights() as r
         where r.name not in (select p.proname from pg_proc as p where p.pronamespace = 'pgreaper'::regnamespace)
           and r.name not in (select c.relname from pg_class as c where c.relnamespace = 'pgreaper'::regnamespace)""")
    assert set(gone) == {"_*", "pgreaper", "schema_version"}
    assert set(core.column("select distinct kind from pgreaper._rights() where kind is not null")) == set(KINDS)


def test_c061_a_worker_does_all_its_work_with_exactly_these_rights(core, roles, shop):
    """Claim, expire, fail, renew, release, sweep, take back, retry; and nothing that is not a worker's."""
    worker = Reaper(roles.connect(roles.granted("worker")))
    work_through(worker, core, shop)
    assert core.value("select count(*) from pgreaper.transitions") > 0
    refused = [
        "insert into pgreaper.policies overriding system value select * from pgreaper.policies",
        "update pgreaper.policies set expired = 'paid'",
        "update pgreaper.policies set target_table = 'pg_authid'",
        "delete from pgreaper.policies",
        "delete from pgreaper.claims",
        "delete from pgreaper.transitions",
        "update pgreaper.transitions set holds = 0",
        "delete from pgreaper.events",
        "select pgreaper.reaper_register('q', 'shop.bookings', 'expires_at')",
        "select pgreaper.reaper_unregister('p')",
        "select pgreaper.reaper_replay('p')",
        "select pgreaper.reaper_discard('p', null, 'r')",
        "select pgreaper.reaper_resend('p')",
        "select pgreaper.reaper_unrelay('p')",
        "delete from pgreaper.relays",
        "select pgreaper.reaper_pause('p')",
        "select pgreaper.reaper_resume('p')",
        "select pgreaper.reaper_prune()",
        "select pgreaper.reaper_verify()",
        "select pgreaper.reaper_grant('x', 'worker')",
        "select pgreaper.reaper_revoke('x')",
        "update shop.bookings set card = ''",
        "update shop.bookings set expires_at = now()",
        "insert into shop.bookings (expires_at) values (now())",
        "delete from shop.bookings",
    ]
    for statement in refused:
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="permission denied"):
            worker.connection.execute(statement)


def test_an_operator_mends_and_does_not_register(core, roles, shop):
    """A worker that replays, discards, pauses, resumes, prunes and verifies."""
    operator = Reaper(roles.connect(roles.granted("operator")))
    work_through(operator, core, shop)
    shop(3)
    got = operator.claim("p", rescan=True)
    for hold in got:
        operator.fail(hold.token, hold.key, error_class="E", final=True)
    operator.expire(got[0].token)
    assert len(operator.replay("p", key=got[0].key)) == 1
    assert operator.discard("p", key=got[1].key, reason="r") == [got[1].key]
    assert operator.pause("p", reason="r")
    assert operator.resume("p")
    assert operator.verify("p")
    core.do("update pgreaper.undelivered set not_before = 'infinity'")
    assert operator.connection.execute("select pgreaper.reaper_resend('p')").fetchone() == (1,)
    operator.connection.execute("select pgreaper.reaper_unrelay('p')")
    core.do("update pgreaper.claims set finished_at = now() - interval '100 days' where finished_at is not null",
            "update pgreaper.transitions set at = now() - interval '100 days'",
            "update pgreaper.events set at = now() - interval '100 days'")  # fmt: skip
    removed = operator.connection.execute("select sum(removed) from pgreaper.reaper_prune()").fetchone()
    assert removed is not None
    assert removed[0] > 5
    for statement in (
        "select pgreaper.reaper_register('q', 'shop.bookings', 'expires_at')",
        "select pgreaper.reaper_unregister('p')",
        "update pgreaper.policies set expired = 'paid'",
        "select pgreaper.reaper_grant('x', 'worker')",
        "update shop.bookings set card = ''",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            operator.connection.execute(statement)


def test_a_reader_sees_the_views_and_no_value_of_a_row(core, roles, shop):
    """Every view and the history, live; of the table only key, deadline and state; no work."""
    worker, reader = Reaper(roles.connect(roles.granted("worker"))), Reaper(roles.connect(roles.granted("reader")))
    shop()
    worker.sweep("p", max_rows=2, batch=1)
    shop(2)
    for view in core.column(
        "select relname::text from pg_class where relnamespace = 'pgreaper'::regnamespace and relkind = 'v'"
    ):
        reader.connection.execute(f"table pgreaper.{view}")
    (status,) = reader.status()
    assert (status.state, status.due) == ("active", 6)
    assert reader.connection.execute("select sum(due) from pgreaper.backlog").fetchone() == (6,)
    assert reader.history("p", "1")[-1].outcome == "expired"
    for statement in (
        "select card from shop.bookings",
        "select * from shop.bookings",
        "update shop.bookings set status = 'expired'",
        "select * from pgreaper.reaper_claim('p')",
        "call pgreaper.reaper_sweep()",
        "select pgreaper.reaper_pause('p')",
        "delete from pgreaper.claims",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            reader.connection.execute(statement)


def be_an_application(reaper: Reaper, core: Any) -> None:
    """All that an application does: consume, extend, restore."""
    core.do("delete from shop.bookings",
            "insert into shop.bookings overriding system value"
            " select g, 'held', now() + g * interval '1 hour' from generate_series(-1, 2) as g")  # fmt: skip
    until = datetime.now(UTC) + timedelta(days=9)
    assert reaper.consume("p", "1").outcome == "consumed"
    assert reaper.extend("p", "2", until).outcome == "extended"
    core.do("update shop.bookings set status = 'expired', expired_at = now() where id = 0")
    assert reaper.restore("p", "0", until, reason="paid late").outcome == "restored"


def test_c061_an_application_has_the_rights_of_its_side_and_each_is_needed(core, roles, shop):
    """It consumes, extends and restores; it reads no book, writes no other column, and without one right it cannot."""
    core.do("alter table shop.bookings add paid_at timestamptz")
    Reaper(core.connection).register(
        "p", "shop.bookings", **SETTINGS, consumed="consumed", consumed_stamp_column="paid_at", restore_within="3 hours"
    )
    name = roles.granted("application")
    application = Reaper(roles.connect(name))
    be_an_application(application, core)
    for statement in (
        "select token from shop.bookings",
        "update shop.bookings set card = ''",
        "update shop.bookings set token = null",
        "insert into shop.bookings (expires_at) values (now())",
        "delete from shop.bookings",
        "select * from pgreaper.reaper_claim('p')",
        "call pgreaper.reaper_sweep()",
        "select pgreaper.reaper_history('p', '1')",
        "select * from pgreaper.events",
        "select * from pgreaper.transitions",
        "select * from pgreaper.failures",
        "update pgreaper.policies set consumed = 'expired'",
        # What is counted cannot be forged either.
        "insert into pgreaper.events (policy_id, kind, at) values (1, 'not-eligible', now())",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            application.connection.execute(statement)
    rights = [
        *core.rows("select r.object, r.name,"
                   " r.privilege || coalesce(' (' || array_to_string(r.columns, ', ') || ')', '')"
                   " from pgreaper._rights() as r where r.kind = 'application'"
                   " and r.name not in ('_*', 'schema_version', 'reaper_version')"),
        ("target", "shop", "usage"),
        *(("target", "shop.bookings", f"select ({c})") for c in ("id", "status", "expires_at")),
        *(("target", "shop.bookings", f"update ({c})") for c in ("status", "expires_at", "expired_at", "paid_at")),
    ]  # fmt: skip
    assert len(rights) == 14
    needless = []
    for kind, thing, privilege in rights:
        where = thing if kind in ("schema", "target") else f"pgreaper.{thing}"
        what = {"target": "schema" if privilege == "usage" else "table"}.get(kind, kind)
        core.do(f"revoke {privilege} on {what} {where} from {name}")
        if refusal(lambda: be_an_application(application, core)) is None:
            needless.append((thing, privilege))
        granted = core.rows("select * from pgreaper.reaper_grant(%s, 'application')", name)
        assert len(granted) == 1
        assert core.rows("select * from pgreaper.reaper_grant(%s, 'application')", name) == []
    assert needless == []


@pytest.mark.parametrize("kind", ["partitioned", "view", "invoker"])
def test_kinds_of_targets(core, roles, kind):
    """A partitioned table answers for its partitions, a view for its table, an invoker's view does not."""
    columns = "id bigint generated always as identity, status text default 'held', expires_at timestamptz, card text"
    if kind == "partitioned":
        core.do("create schema shop",
                f"create table shop.bookings ({columns}, primary key (id, expires_at)) partition by range (expires_at)",
                "create table shop.all_of_them partition of shop.bookings default")  # fmt: skip
        target = "shop.bookings"
    else:
        if kind == "invoker" and core.connection.info.server_version < 150000:
            pytest.skip("security_invoker came with PostgreSQL 15")
        options = "with (security_invoker = on)" if kind == "invoker" else ""
        core.do(
            "create schema shop",
            "create schema below",
            f"create table below.bookings ({columns}, primary key (id))",
            f"create view shop.bookings {options} as select * from below.bookings where card is null",
        )
        target = "shop.bookings"
    core.register(target=target)
    core.do(f"insert into {target} (expires_at) select now() - g * interval '1 hour' from generate_series(1, 4) as g")
    name = roles.granted("worker")
    worker = Reaper(roles.connect(name))
    assert worker.sweep("p", max_rows=1, batch=1) == 1
    got = worker.claim("p", rescan=True)
    assert {o.outcome for o in worker.expire(got[0].token)} == {"expired"}
    reader = Reaper(roles.connect(roles.granted("reader")))
    assert reader.status()[0].state == "active"
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        reader.connection.execute(f"select card from {target}")
    assert core.rows("select * from pgreaper.reaper_grant(%s, 'worker')", name) == []


def refusal(action: Callable[[], None]) -> tuple[str, str | None] | None:
    """What is said when a right is missing, and the hint; None: none is."""
    try:
        action()
    except ReaperError as error:
        assert error.sqlstate == "42501", error.original  # noqa: PT017  any other error is none that is expected
        return str(error), error.hint
    except psycopg.errors.InsufficientPrivilege as error:
        return str(error), None
    return None


def test_c061_each_right_is_needed_and_a_missing_one_is_named(core, roles, shop):
    """Without any single one of them something fails with 42501; reaper_grant says which, and gives it back."""
    name = roles.granted("worker")
    worker = Reaper(roles.connect(name))
    rights = [
        *core.rows(
            "select r.object, r.name, r.privilege from pgreaper._rights() as r"
            " where r.kind = 'worker' and r.name not in ('_*', 'schema_version') order by 1, 2, 3"
        ),
        ("routine", "_write", "execute"),
        ("target", "shop", "usage"),
        ("target", "shop.bookings", "select"),
        *(("target", "shop.bookings", f"update ({column})") for column in ("status", "expired_at", "token")),
    ]
    needless = []
    for kind, thing, privilege in rights:
        where = thing if kind in ("schema", "target") else f"pgreaper.{thing}"
        what = {"target": "schema" if privilege == "usage" else "table"}.get(kind, kind)
        core.do(f"revoke {privilege} on {what} {where} from {name}")
        core.do(
            "delete from pgreaper.failures",
            "delete from pgreaper.totals",
            "delete from shop.bookings",
            "update pgreaper.cursors set position = null",
        )
        refused = refusal(lambda: work_through(worker, core, shop))
        word = rf"\b{thing.rpartition('.')[2]}\b"
        if refused is None:
            needless.append((kind, thing, privilege))
        else:
            message, hint = refused
            assert re.search(word, message), (thing, message)
            assert hint is None or "grant" in hint
        found = core.rows("select * from pgreaper.reaper_grant(%s, 'worker', dry_run => true)", name)
        assert len(found) == 1, (thing, privilege, found)
        assert re.search(word, found[0][0])
        assert core.rows("select * from pgreaper.reaper_grant(%s, 'worker')", name) == [(found[0][0], True)]
        core.do(
            "update pgreaper.claims set finished_at = now(), ending = 'released', keys = null where finished_at is null"
        )
    # Of these something else is said first, or another right says the same.
    assert needless == []


@pytest.mark.parametrize("column", ["status", "expired_at", "token"])
def test_c061_what_cannot_be_written_is_not_leased_and_burns_no_attempt(core, roles, shop, column):
    """Neither a claim nor a sweep takes holds that the role could never expire; an expire charges nobody."""
    name = roles.granted("worker")
    worker = Reaper(roles.connect(name))
    shop()
    got = worker.claim("p", batch=3)
    core.do(f"revoke update ({column}) on shop.bookings from {name}")
    with pytest.raises(AccessDenied) as caught:
        worker.claim("p")
    assert str(caught.value) == f"role {name} may not update column {column} of shop.bookings"
    assert caught.value.hint == (
        f"Nothing was taken. As the owner of that table: select * from pgreaper.reaper_grant('{name}', 'worker');"
    )
    with pytest.raises(ReaperError, match=f"may not update column {column}") as swept:
        worker.sweep("p")
    assert swept.value.sqlstate == "42501"
    with pytest.raises(AccessDenied):
        worker.expire(got[0].token)
    assert worker.release(got[0].token) == 3
    assert core.rows("select * from pgreaper.failures") == []
    assert core.column("select kind from pgreaper.events where kind <> 'register'") == []
    assert core.value("select max(suspensions) from pgreaper.cursors") == 0
    core.do(f"select pgreaper.reaper_grant('{name}', 'worker')")
    assert worker.sweep("p") == 6


def test_c061_the_commands_say_what_is_missing_and_which_command_mends_it(core, roles, shop, dsn, capsys):
    """`pgreaper work` as a role without the right: exit 1, the column, the remedy; nothing charged; then it works."""
    name = roles.create("worker")
    assert main(["grant", name, "--as", "worker", "--database-url", dsn]) == 0
    url = roles.url(name)
    shop(3)
    core.do(f"revoke update (token) on shop.bookings from {name}")
    assert main(["work", "--database-url", url]) == 1
    told = capsys.readouterr().err
    assert f"role {name} may not update column token of shop.bookings" in told
    assert f"pgreaper.reaper_grant('{name}', 'worker')" in told
    core.do(f"revoke execute on function pgreaper.reaper_claim_batch from {name}")
    assert main(["work", "--database-url", url]) == 1
    told = capsys.readouterr().err
    assert "permission denied for function reaper_claim_batch" in told
    assert f"pgreaper grant {name} --as worker" in told
    assert core.rows("select * from pgreaper.failures") == []
    assert main(["grant", name, "--as", "worker", "--dry-run", "--database-url", dsn]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"grant execute on routine pgreaper.reaper_claim_batch to {name};",
        f"grant update (token) on table shop.bookings to {name};",
    ]
    assert main(["grant", name, "--as", "worker", "--database-url", dsn]) == 0
    assert main(["work", "--database-url", url]) == 0
    assert core.value("select count(*) from shop.bookings where status = 'expired'") == 3


def test_c061_a_daemon_with_a_handler_needs_no_more(core, roles, shop, tmp_path):
    """The process as people run it: leases, renewal, a handler that fails, a retry, the end by SIGTERM."""
    name = roles.granted("worker")
    (tmp_path / "shop_expiry.py").write_text(
        "from pgreaper.handlers import DeadLetter\n"
        "def release(hold):\n"
        "    if hold.key == '2':\n"
        "        raise DeadLetter('Gone')\n"
        "    if hold.key == '3' and hold.attempt == 1:\n"
        "        raise ConnectionError\n"
    )
    core.do("update pgreaper.policies set backoff_base = '0.01 seconds'")
    shop(5)
    command = [sys.executable, "-m", "pgreaper", "work", "--daemon", "--poll", "1", "--handler", "shop_expiry:release"]
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    with subprocess.Popen(
        command,
        env=os.environ | {"PGREAPER_DATABASE_URL": roles.url(name), "PYTHONPATH": paths},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            end = time.monotonic() + 30
            while core.value("select count(*) from shop.bookings where status = 'expired'") < 4:
                assert time.monotonic() < end
                assert process.poll() is None
                time.sleep(0.02)
            shop(1)
            while core.value("select count(*) from shop.bookings where status = 'expired'") < 5:
                assert time.monotonic() < end
                time.sleep(0.02)
        finally:
            process.terminate()
            _, told = process.communicate(timeout=30)
    assert process.returncode == 0, told
    assert "permission denied" not in told
    assert core.rows("select key, error_class from pgreaper.dead_letters") == [("2", "DeadLetter")]


def test_a_target_that_is_registered_later_and_columns_that_change(core, roles, shop, dsn, capsys):
    """Registering says which roles lack rights now; granting again gives just those."""
    name = roles.granted("worker")
    core.do("create table shop.carts (id int primary key, status text, expires_at timestamptz, note text)")
    register = ["register", "carts", "shop.carts", "--deadline", "expires_at", "--status", "status", "--held", "held",
                "--expired", "expired", "--owner", "x", "--database-url", dsn]  # fmt: skip
    assert main(register) == 0
    assert f"role {name} lacks rights: pgreaper grant {name} --as worker" in capsys.readouterr().out
    assert core.column("select statement from pgreaper.reaper_grant(%s, 'worker')", name) == [
        f"grant select, update (status) on table shop.carts to {name};"
    ]
    assert main([*register, "--set", "note=gone"]) == 0
    assert f"role {name} lacks rights" in capsys.readouterr().out
    assert core.column("select statement from pgreaper.reaper_grant(%s, 'worker')", name) == [
        f"grant update (note) on table shop.carts to {name};"
    ]
    assert main([*register, "--set", "note=gone"]) == 0
    assert "lacks rights" not in capsys.readouterr().out


def test_row_level_security_is_refused_under_grants(core, roles, shop):
    """A worker that would see half of the holds takes none, and says why."""
    worker = Reaper(roles.connect(roles.granted("worker")))
    shop()
    core.do(
        "alter table shop.bookings enable row level security", "create policy half on shop.bookings using (id % 2 = 0)"
    )
    with pytest.raises(AccessDenied, match=r"row level security of shop\.bookings would hide holds from role"):
        worker.claim("p")
    assert worker.status()[0].state == "broken"
    core.do("alter table shop.bookings disable row level security")
    assert worker.sweep("p") == 6


def test_c060_a_registrar_registers_its_own_tables_only(core, roles, shop):
    """By the function and by hand: no policy on a table of somebody else's, none taken over, none withdrawn."""
    name = roles.granted("registrar")
    registrar = Reaper(roles.connect(name))
    core.do(f"create schema theirs authorization {name}")
    registrar.connection.execute(
        "create table theirs.carts (id int primary key, status text, expires_at timestamptz, note text)"
    )
    own = {**SETTINGS, "stamp_column": None, "set": None, "payload_columns": None}
    assert registrar.register("carts", "theirs.carts", **own)
    assert registrar.register("carts", "theirs.carts", **{**own, "set": {"note": "gone"}})
    assert registrar.preview("carts").due == 0
    registrar.status()
    with pytest.raises((RegistrationRefused, AccessDenied)) as caught:
        registrar.register("mine", "shop.bookings", **SETTINGS)
    assert "permission denied for schema shop" in str(caught.value) or "does not own" in str(caught.value)
    core.do(f"grant usage on schema shop to {name}", f"grant all on shop.bookings to {name}")
    with pytest.raises(RegistrationRefused, match=f"role {name} does not own shop.bookings"):
        registrar.register("mine", "shop.bookings", **SETTINGS)
    copied = ("insert into pgreaper.policies (name, target_schema, target_table, {0}) select 'q', {1}, {0}"
              " from pgreaper.policies where name = 'p'")  # fmt: skip
    rest = core.value(
        "select string_agg(quote_ident(attname), ', ' order by attnum) from pg_attribute where attrelid ="
        " 'pgreaper.policies'::regclass and attnum > 0"
        " and attname not in ('policy_id', 'name', 'target_schema', 'target_table')"
    )
    for statement in (
        copied.format(rest, "'shop', 'bookings'"),
        copied.format(rest, "'pg_catalog', 'pg_authid'"),
        copied.format(rest, "'nowhere', 'yet'"),
        "update pgreaper.policies set expired = 'paid' where name = 'p'",
        "update pgreaper.policies set unregistered_at = now() where name = 'p'",
        "select pgreaper.reaper_unregister('p')",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="does not own"):
            registrar.connection.execute(statement)
    for statement in (
        "update pgreaper.policies set target_schema = 'theirs', target_table = 'carts' where name = 'p'",
        "update pgreaper.policies set paused_at = now()",
        "delete from pgreaper.policies",
        "select pgreaper.reaper_claim('carts')",
        "select pgreaper.reaper_pause('p')",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="permission denied"):
            registrar.connection.execute(statement)
    # Whoever may write all of the table still takes over no policy of somebody else's.
    core.do(f"grant update on pgreaper.policies to {name}")
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match=r"does not own shop\.bookings"):
        registrar.connection.execute(
            "update pgreaper.policies set target_schema = 'theirs', target_table = 'carts' where name = 'p'"
        )
    registrar.unregister("carts")
    assert core.column("select name from pgreaper.policies where unregistered_at is null") == ["p"]


def test_c060_no_text_of_a_policy_is_executed(core, roles, shop):
    """Names and values that look like SQL stay names and values, wherever they are stored."""
    evil = "'; drop table shop.bookings; --"
    core.do(f'create table shop."{evil}" ("{evil}" bigint primary key, "st""at" text, "wh en" timestamp, "$$" text)')
    Reaper(core.connection).register(
        "evil", f'shop."{evil}"', deadline_column="wh en", status_column='st"at', held=[evil, "\\"],
                  expired="$1 %s", zone="UTC", set={"$$": evil}, owner=evil)  # fmt: skip
    core.connection.execute(f"insert into shop.\"{evil}\" values (1, %s, now() - interval '2 days', null)", (evil,))
    worker = Reaper(roles.connect(roles.granted("worker")))
    assert worker.sweep("evil") == 1
    assert core.rows(f'select "st""at", "$$" from shop."{evil}"') == [("$1 %s", evil)]
    assert core.value("select count(*) from shop.bookings") == 0


def test_the_owner_of_a_table_gives_its_rights(core, roles, shop, capsys):
    """Who owns pgreaper and not the table is told what is left; the registrar that owns it does the rest."""
    owner, keeper = roles.granted("registrar"), roles.create("keeper")
    core.do(f"create schema theirs authorization {owner}")
    connection = roles.connect(owner)
    connection.execute("create table theirs.carts (id int primary key, status text, expires_at timestamptz)")
    Reaper(connection).register(
        "carts", "theirs.carts", **{**SETTINGS, "stamp_column": None, "set": None, "payload_columns": None}
    )
    worker = roles.create("worker")
    core.do(f"grant all on all tables in schema pgreaper to {keeper} with grant option",
            f"grant all on all routines in schema pgreaper to {keeper} with grant option",
            f"grant all on all sequences in schema pgreaper to {keeper} with grant option",
            f"grant all on schema pgreaper to {keeper} with grant option",
            f"grant all on schema shop to {keeper} with grant option",
            f"grant all on shop.bookings to {keeper} with grant option")  # fmt: skip
    left = [
        f"grant usage on schema theirs to {worker};",
        f"grant select, update (status) on table theirs.carts to {worker};",
    ]
    code = main(["grant", worker, "--as", "worker", "--database-url", roles.url(keeper)])
    out, err = capsys.readouterr()
    assert code == 1, err
    assert out.splitlines() == [f"role {worker} has got what a worker needs, except:", *left]
    assert err == "hint: Let the owner of these tables say the statements above.\n"
    assert main(["grant", worker, "--as", "worker", "--database-url", roles.url(owner)]) == 0
    assert main(["grant", worker, "--as", "worker", "--database-url", roles.url(keeper)]) == 0
    assert core.rows("select * from pgreaper.reaper_grant(%s, 'worker')", worker) == []
    stranger = roles.create("stranger")
    with pytest.raises(AccessDenied, match=f"role {owner} may not give away rights on pgreaper"):
        Reaper(connection).grant(stranger, "worker")
    core.do("drop schema pgreaper, shop, theirs cascade")  # with what the keeper has given away, so that it can go


def test_refusals(core, roles, shop):
    """No such kind, no such role: said, with the remedy; nothing is remembered."""
    reaper = Reaper(core.connection)
    name = roles.create()
    with pytest.raises(InvalidInput, match="there is no kind of role 'admin'") as caught:
        reaper.grant(name, "admin")
    assert caught.value.hint == "Kinds are worker, operator, reader, registrar and application."
    with pytest.raises(ReaperError, match="there is no role 'nobody at all'") as unknown:
        reaper.grant("nobody at all", "worker")
    assert unknown.value.hint == "Rights are given to a role that exists: create role … login."
    assert reaper.grant(name, "worker", dry_run=True)
    assert core.rows("select * from pgreaper.grants") == []
    assert core.value(f"select has_schema_privilege('{name}', 'pgreaper', 'usage')") is False


def test_a_role_of_any_name(core, roles, shop):
    """Quotes, blanks and semicolons in a role's name, from SQL and from the command."""
    odd = f'pgreaper "x"; drop {next(NUMBERS)} {roles.worker_id}'
    role = sql.Identifier(odd)
    core.connection.execute(sql.SQL("create role {} login").format(role))
    roles.stack.callback(roles._drop, role)
    assert all(one.done for one in Reaper(core.connection).grant(odd, "worker"))
    assert Reaper(core.connection).grant(odd, "worker") == []
    shop()
    core.connection.execute(sql.SQL("set role {}").format(role))
    assert Reaper(core.connection).sweep("p") == 6
    core.do("reset role")
    assert Reaper(core.connection).revoke(odd)


def test_revoke(core, roles, shop, dsn, capsys):
    """Nothing of pgreaper's is left to the role; what it may do with a target is told, not touched."""
    name = roles.granted("operator")
    assert main(["revoke", name, "--database-url", dsn]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"role {name} has no more rights on pgreaper; on your tables it keeps:",
        f"revoke select, update (expired_at, status, token) on shop.bookings from {name};",
        f"revoke usage on schema shop from {name};",
    ]
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        roles.connect(name).execute("select pgreaper.reaper_version()")
    assert core.value(f"select has_table_privilege('{name}', 'shop.bookings', 'select')")
    assert core.rows("select * from pgreaper.grants") == []
    assert main(["revoke", name, "--database-url", dsn]) == 2
    assert f"error: role {name} has no rights on pgreaper" in capsys.readouterr().err
    core.do("select pgreaper._grant_again()")
    assert core.value(f"select has_schema_privilege('{name}', 'pgreaper', 'usage')") is False


def test_uninstall_tells_what_roles_keep_on_tables(roles, empty_dsn, capsys):
    """Afterwards nobody knows it; pasted, the statements leave the access lists as they were before the grants."""
    acls = (
        "select n.nspacl::text, c.relacl::text, array(select a.attacl::text from pg_attribute as a"
        " where a.attrelid = c.oid and a.attnum > 0 order by a.attnum) from pg_class as c join pg_namespace as n"
        " on n.oid = c.relnamespace where c.oid = 'shop.bookings'::regclass"
    )
    worker, reader, neighbour, member = map(roles.create, ("worker", "reader", "neighbour", "member"))
    with psycopg.connect(empty_dsn, autocommit=True) as connection, ExitStack() as stack:
        for role in (worker, reader, neighbour, member):
            stack.callback(connection.execute, f"drop owned by {role} cascade")
        connection.execute(SHOP)
        # The lists exist, and an entry of somebody else's stays.
        connection.execute(
            f"grant all on schema shop to {neighbour}; grant all on shop.bookings to {neighbour};"
            f" grant update (status, expired_at, token), select (id, expires_at, status, expired_at, ctid)"
            f" on shop.bookings to {neighbour}"
        )
        schema.install(empty_dsn)
        Reaper(connection).register("p", "shop.bookings", **SETTINGS)
        before = connection.execute(acls).fetchall()
        connection.execute("select pgreaper.reaper_grant(%s, 'worker')", [worker])
        # Has all of it by being a member, so there is nothing to take from it.
        connection.execute(f"grant {worker} to {member}")
        connection.execute("select pgreaper.reaper_grant(%s, 'worker')", [member])
        connection.execute("select pgreaper.reaper_grant(%s, 'reader')", [reader])
        connection.execute("select pgreaper.reaper_unregister('p')")
        assert connection.execute(acls).fetchall() != before

        assert main(["uninstall", "--database-url", empty_dsn]) == 0
        said, *statements = capsys.readouterr().out.splitlines()
        assert said == "pgreaper is uninstalled; on your tables roles keep rights:"
        assert statements == [
            f"revoke select (ctid, expired_at, expires_at, id, status) on shop.bookings from {reader};",
            f"revoke select, update (expired_at, status, token) on shop.bookings from {worker};",
            f"revoke usage on schema shop from {reader};",
            f"revoke usage on schema shop from {worker};",
        ]
        for statement in statements:
            connection.execute(statement)
        assert connection.execute(acls).fetchall() == before
        assert main(["uninstall", "--database-url", empty_dsn]) == 0
        assert capsys.readouterr().out == "pgreaper is not installed here\n"


def may_call(connection: Connection, role: str) -> list[str]:
    return [
        row[0]
        for row in connection.execute(
            """
            select p.oid::regprocedure::text from pg_proc as p
             where p.pronamespace = 'pgreaper'::regnamespace and has_function_privilege(%(role)s, p.oid, 'execute')
            union all
            select c.relname from pg_class as c
             where c.relnamespace = 'pgreaper'::regnamespace and c.relkind in ('r', 'v', 'S')
               and case c.relkind when 'S' then has_sequence_privilege(%(role)s, c.oid, 'usage')
                                  else has_table_privilege(%(role)s, c.oid, 'select, insert, update, delete') end
            """,
            {"role": role},
        )
    ]


def test_c059_nobody_gets_anything_by_default_nor_by_an_upgrade(roles, empty_dsn):
    """PUBLIC and the roles of default privileges have nothing before and after; a worker keeps what it has."""
    anon, nobody, worker = roles.create("anon"), roles.create("nobody"), roles.create("worker")
    with psycopg.connect(empty_dsn, autocommit=True) as connection, ExitStack() as stack:
        for role in (anon, nobody, worker):
            stack.callback(connection.execute, f"drop owned by {role} cascade")
        for thing in ("functions", "tables", "sequences", "schemas"):
            # To the worker as well: such a grant must not be all that it has.
            connection.execute(f"alter default privileges grant all on {thing} to {anon}, {worker}")
            stack.callback(connection.execute, f"alter default privileges revoke all on {thing} from {anon}, {worker}")
        schema.install(empty_dsn)
        assert [may_call(connection, role) for role in (anon, nobody, worker)] == [[], [], []]
        assert not connection.execute(f"select has_schema_privilege('{anon}', 'pgreaper', 'usage')").fetchone()[0]  # type: ignore[index]

        connection.execute("select * from pgreaper.reaper_grant(%s, 'worker')", (worker,))
        before = may_call(connection, worker)
        assert "pgreaper.reaper_renew(uuid,interval)" in before

        # What an upgrade does: a function is dropped and made anew, another is new; then the file of rights.
        files = schema.source()
        text = files.read("0001", "functions/reaper_renew.sql")
        connection.execute("drop function pgreaper.reaper_renew")
        connection.execute(text.encode())
        connection.execute("create function pgreaper._newer() returns int language sql as 'select 1'")
        assert set(may_call(connection, anon)) == {"pgreaper.reaper_renew(uuid,interval)", "pgreaper._newer()"}
        for statement in schema.statements(files.read("0001", "rights.sql")):
            connection.execute(statement.encode())

        assert [may_call(connection, role) for role in (anon, nobody)] == [[], []]
        assert sorted(may_call(connection, worker)) == sorted([*before, "pgreaper._newer()"])

"""``Reaper``: one method per SQL function, on whatever connection it is given."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import psycopg
import pytest
from psycopg.rows import dict_row

import pgreaper
from pgreaper import api
from pgreaper.api import SQL_VERSION, Batch, Reaper
from pgreaper.errors import (
    DatabaseBusy,
    InvalidInput,
    LeaseLost,
    NotInstalled,
    RegistrationRefused,
    UnknownPolicy,
    VersionMismatch,
    WrongTransaction,
    translate,
)

TARGET = {"deadline_column": "expires_at", "status_column": "status", "held": ["held"], "expired": "expired"}


def claimed(reaper: Reaper, batch: int | None = None) -> Batch:
    """A batch of policy holds."""
    found = reaper.claim_batch("holds", batch=batch)
    assert found is not None
    return found


@pytest.fixture
def registered(reaper, holds):
    reaper.register("holds", "holds", **TARGET, owner="tests")
    return reaper


def test_the_straight_line(registered, holds):
    """Register, claim, renew, expire, history, status: what goes in comes out."""
    due = holds.due(3)

    leased = registered.claim("holds", batch=2, worker="me")
    assert [hold.key for hold in leased] == [str(due[0]), str(due[1])]
    token = leased[0].token
    assert registered.renew(token, lease=timedelta(minutes=5)) > leased[0].claim_until
    outcomes = registered.expire(token)
    assert {(o.key, o.outcome, o.state) for o in outcomes} == {(str(k), "expired", "expired") for k in due[:2]}

    (entry,) = registered.history("holds", str(due[0]))
    assert (entry.outcome, entry.worker, entry.token, entry.deadline) == ("expired", "me", token, leased[0].deadline)
    (status,) = registered.status()
    assert (status.policy, status.due, status.expired, status.state) == ("holds", 1, 2, "active")
    assert registered.preview("holds").due == 1


def test_counts_instead_of_rows(registered, holds):
    """claim_batch and expire_batch: one row a call, whatever the batch."""
    holds.due(500)

    batch = registered.claim_batch("holds")
    assert batch is not None
    assert batch.holds == 500
    assert registered.expire_batch(batch.token) == {"expired": 500}
    assert registered.expire_batch(batch.token) == {"expired": 500}  # asked again, it answers
    assert registered.claim_batch("holds") is None


def test_register_is_declarative(reaper, holds):
    """All settings, then none, then the one that changed."""
    first = reaper.register("holds", "holds", **TARGET, owner="tests", set={"customer_email": None})
    assert {c.setting for c in first} >= {"held", "expired", "owner", "lease"}
    assert all(c.old_value is None for c in first)
    assert reaper.register("holds", "holds", **TARGET, owner="tests", set={"customer_email": None}) == []
    (change,) = reaper.register(
        "holds", "holds", **TARGET, owner="tests", set={"customer_email": None}, grace=timedelta(seconds=5)
    )
    assert (change.setting, change.new_value) == ("grace", "00:00:05")
    (policy,) = reaper.policies()
    assert (policy.policy, policy.grace, policy.set_values) == ("holds", timedelta(seconds=5), {"customer_email": None})


def test_pause_resume_unregister(registered, holds):
    holds.due(1)
    assert registered.pause("holds", reason="maintenance")
    assert not registered.pause("holds")
    assert registered.claim("holds") == []
    assert registered.status()[0].state == "paused"
    assert registered.resume("holds")
    assert not registered.resume("holds")
    registered.unregister("holds")
    assert registered.policies() == []
    with pytest.raises(UnknownPolicy):
        registered.claim("holds")


def test_next_due(registered, holds):
    """Seconds; None when nothing lies ahead; zero when something is due."""
    assert registered.next_due() is None
    holds.ahead(1, within="1 hour")
    assert 3590 < registered.next_due(["holds"]) < 3602
    holds.due(1)
    assert registered.next_due() == 0


def test_sweep(registered, holds):
    holds.due(30)
    assert registered.sweep("holds", batch=7, max_rows=20) == 20
    assert registered.sweep() == 10


def test_a_sweep_needs_a_connection_of_its_own(connect, registered):
    """It commits: never what somebody else has begun."""
    with pytest.raises(WrongTransaction):
        Reaper(connect(autocommit=False)).sweep()
    connection = connect()
    with connection.transaction(), pytest.raises(WrongTransaction):
        Reaper(connection).sweep()


def test_it_never_commits_what_it_did_not_begin(connect, registered, holds):
    """In the caller's transaction everything is the caller's, also the end."""
    holds.due(1)
    connection = connect(autocommit=False)
    reaper = Reaper(connection)
    batch = claimed(reaper)
    reaper.expire(batch.token)

    assert connection.info.transaction_status is psycopg.pq.TransactionStatus.INTRANS
    connection.rollback()
    assert holds.states() == {1: "held"}
    with pytest.raises(LeaseLost):
        registered.expire(batch.token)


@pytest.mark.parametrize(
    "setting",
    [
        "datestyle = 'German, DMY'",
        "timezone = 'Asia/Tokyo'",
        "intervalstyle = 'iso_8601'",
        "bytea_output = 'escape'",
        "extra_float_digits = -15",
    ],
)
def test_no_session_setting_changes_an_answer(connect, registered, holds, setting):
    """The same objects, whatever the session's formats are."""
    holds.due(2)
    connection = connect()
    connection.execute(f"set {setting}")

    assert Reaper(connection).policies() == registered.policies()
    (hold, *_) = Reaper(connection).claim("holds")
    assert hold.deadline.tzinfo is UTC
    ((deadline,),) = holds.connection.execute("select expires_at from holds where id = 1").fetchall()
    assert hold.deadline == deadline


def test_the_callers_connection_is_left_as_it_was(connect, registered, holds):
    """Row factory, adapters and cursors are the caller's; ours are ours."""

    class Loud(psycopg.adapt.Loader):
        format = psycopg.pq.Format.BINARY

        def load(self, data):
            return "loud"

    holds.due(1)
    connection = connect(row_factory=dict_row, cursor_factory=psycopg.ClientCursor)
    for name in ("text", "uuid", "timestamptz", "int8"):
        connection.adapters.register_loader(name, Loud)

    batch = claimed(Reaper(connection))

    assert batch.holds == 1
    assert isinstance(batch.claim_until, datetime)
    cursor = psycopg.Cursor(connection, row_factory=dict_row)
    assert cursor.execute("select now() as x", binary=True).fetchone() == {"x": "loud"}
    with pytest.raises(psycopg.DataError):
        registered.connection.execute("select 'infinity'::timestamptz").fetchone()


def test_c063_nothing_is_prepared(connect, registered, holds):
    """Not even on a connection that would prepare after the first use."""
    holds.due(20)
    connection = connect(prepare_threshold=0)
    for _ in range(3):
        Reaper(connection).expire_batch(claimed(Reaper(connection), batch=1).token)
    assert psycopg.Cursor(connection).execute(
        "select count(*) from pg_prepared_statements", prepare=False
    ).fetchone() == (0,)


def test_c066_nothing_stays_on_the_session(connect, registered, holds):
    """What an application that shares the backend would find."""
    settings = (
        "select name, setting from pg_settings where source = 'session' and name !~ '^transaction_' order by name"
    )
    connection = connect()
    before = connection.execute(settings).fetchall()
    holds.due(5)
    reaper = Reaper(connection)
    reaper.expire_batch(claimed(reaper).token)
    reaper.sweep()
    reaper.status()
    assert connection.execute(settings).fetchall() == before
    assert connection.execute("select count(*) from pg_locks where locktype = 'advisory'").fetchone() == (0,)
    assert connection.execute("select count(*) from pg_listening_channels()").fetchone() == (0,)


def test_c039_deadlines_that_python_cannot_tell(registered, holds, db):
    """-infinity and BC are due and clamped; infinity and the far future are never due."""
    for deadline in ("infinity", "-infinity", "275760-09-13", "0044-03-15 BC", "2020-01-01"):
        db.execute("insert into holds (expires_at) values (%s::timestamptz)", [deadline])

    assert registered.preview("holds").oldest_deadline == datetime.min.replace(tzinfo=UTC)
    leased = registered.claim("holds")
    assert sorted(h.key for h in leased) == ["2", "4", "5"]
    assert sorted(h.deadline for h in leased)[0] == datetime.min.replace(tzinfo=UTC)
    (status,) = registered.status()
    assert status.oldest_due is None or status.oldest_due >= timedelta(0)
    registered.expire(leased[0].token)
    assert {registered.history("holds", key)[0].deadline.year for key in ("2", "4")} == {1}
    assert holds.states() == {1: "held", 2: "expired", 3: "held", 4: "expired", 5: "expired"}


def test_errors_have_a_class_each(connect, registered, reaper, holds, empty_dsn):
    """One per SQLSTATE; the exit code and the hint travel with them."""
    with pytest.raises(UnknownPolicy) as unknown:
        reaper.claim("nope")
    assert (unknown.value.sqlstate, unknown.value.exit_code) == ("RP002", 2)
    with pytest.raises(LeaseLost):
        reaper.expire(uuid4())
    with pytest.raises(RegistrationRefused, match="no column nope"):
        reaper.register("x", "holds", **{**TARGET, "deadline_column": "nope"}, owner="o")
    with pytest.raises(RegistrationRefused):
        reaper.register("x", "no.table", **TARGET, owner="o")
    with pytest.raises(InvalidInput):
        reaper.register("x", "holds", **TARGET, owner="o", lease="2 days")
    with pytest.raises(InvalidInput):
        reaper.register("x", "holds", **TARGET, owner="o", lease="a while")
    with pytest.raises(InvalidInput):
        reaper.claim("a\x00b")
    with psycopg.connect(empty_dsn, autocommit=True) as empty, pytest.raises(NotInstalled):
        Reaper(empty).claim("holds")
    repeatable = connect(autocommit=False)
    repeatable.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    with pytest.raises(WrongTransaction):
        Reaper(repeatable).claim("holds")
    assert [p.policy for p in reaper.policies()] == ["holds"]  # nothing half-registered


def test_a_lock_that_does_not_come_is_the_environments(connect, registered, holds):
    """55P03: to be tried again, nobody's fault."""
    holds.due(1)
    other = connect(autocommit=False)
    other.execute("select from pgreaper.cursors for update")
    with pytest.raises(DatabaseBusy) as busy:
        registered.claim("holds")
    assert (busy.value.sqlstate, busy.value.exit_code) == ("55P03", 75)


def test_versions(registered):
    """The database and the driver that came with it are of one version."""
    registered.require_version()
    assert registered.version() == SQL_VERSION == registered.server().version


@pytest.mark.parametrize(
    ("found", "fits"),
    [
        ("3.3", False),  # older than it can work on
        ("3.4", True),
        ("3.10", True),  # as numbers, not as text
        ("4.0", True),
        ("4.1", True),
        ("4.12", True),  # newer, and minor steps only add
        ("5.0", False),
        ("5", False),
        ("", False),
        ("4.1b", False),
    ],
)
def test_c105_which_versions_fit(registered, db, monkeypatch, found, fits):
    """RP005 unless the database is between the oldest that the driver knows and the end of its own major version."""
    monkeypatch.setattr(api, "SQL_OLDEST", "3.4")
    monkeypatch.setattr(api, "SQL_VERSION", "4.1")
    db.execute(
        f"create or replace function pgreaper.reaper_version() returns text language sql as $$ select '{found}' $$"
    )
    if fits:
        registered.require_version()
        return
    with pytest.raises(VersionMismatch) as error:
        registered.require_version()
    assert str(error.value) == (
        f"the database has schema version {found} of pgreaper, this driver needs 3.4 or newer, below 5.0"
    )
    assert (error.value.exit_code, error.value.sqlstate) == (75, "RP005")
    assert ("was upgraded" in str(error.value.hint)) == (found == "5.0")


def test_a_missing_function_is_another_version(registered, db):
    """The schema is there, what the driver calls is not."""
    db.execute("drop function pgreaper.reaper_renew(uuid, interval)")
    with pytest.raises(VersionMismatch):
        registered.renew(uuid4())


def test_a_users_function_cannot_pass_for_pgreaper(db):
    """A function of theirs that misses something is no missing pgreaper, and their wording is not ours."""
    db.execute("""
        create function calls_nothing() returns void language plpgsql as $$ begin perform gone.away(); end $$;
        create schema theirs;
        create function theirs.talks() returns void language plpgsql as
          $$ begin raise exception 'secret of alice@example.com' using errcode = '42501'; end $$;
    """)
    for call in ("calls_nothing()", "theirs.talks()"):
        with pytest.raises(psycopg.Error) as error:
            db.execute(f"select {call}")
        shown = translate(error.value)
        assert not isinstance(shown, (NotInstalled, InvalidInput))
        assert "alice" not in str(shown) + str(shown.hint) + str(shown.detail)


def test_records_are_frozen(registered, holds):
    holds.due(1)
    (hold,) = registered.claim("holds")
    with pytest.raises(dataclasses.FrozenInstanceError):
        hold.key = "x"


def test_the_public_name():
    assert pgreaper.Reaper is Reaper

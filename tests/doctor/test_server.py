"""
What ``pgreaper doctor`` finds about the installation, the server and the session, each provoked for real; and how it
behaves: it changes nothing, it ends, and what it may not see stops nothing.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest

from pgreaper import schema
from pgreaper.doctor import Limits, examine
from pgreaper.embedded import Cluster
from tests.conftest import Holds
from tests.doctor.conftest import Doctor, grant_worker, make_url

ROOT = Path(__file__).parents[2]


@pytest.fixture
def registered(holds, db, worker):
    """The policy holds, and a role that may work on it."""
    holds.ahead(3)
    holds.register()
    grant_worker(db, worker[0])
    return holds


def found(connection, code, **limits):
    return [f for f in examine(connection, limits=Limits(**limits)).findings if f.code == code]


# -- the installation


def test_c055_a_fresh_installation_has_no_finding(doctor, installed):
    assert doctor.codes(url=installed) == []


def test_nothing_is_installed(doctor, empty_dsn):
    doctor.heal("not-installed", level="error", url=empty_dsn)


def test_another_version(doctor, installed):
    """Older: the remedy upgrades.  Newer: nothing here can help.  Nothing else is judged then."""
    with psycopg.connect(installed, autocommit=True) as db:
        replace = "create or replace function pgreaper.reaper_version() returns text language sql as $$select '{}'$$"
        db.execute(replace.format("0.0"))
        finding = doctor.only("version", level="error", url=installed)
        assert finding["commands"] == ["pgreaper install"]
        assert doctor.codes(url=installed) == ["version"]
        db.execute(replace.format("7.0"))
        finding = doctor.only("version", level="error", url=installed)
        assert (finding["commands"], finding["sql"]) == ([], [])
        db.execute(replace.format("0.1"))
        db.execute("update pgreaper.schema_version set version_num = '0000'")
        assert doctor.only("upgrade", level="warning", url=installed)["commands"] == ["pgreaper install"]


DAMAGE = {
    "_clock": "create or replace function pgreaper._clock() returns timestamptz language sql as 'select now()'",
    "reaper_claim": "alter function pgreaper.reaper_claim set lock_timeout = '1h'",
    "_settings": "alter function pgreaper._settings security definer",
    "_lateness_bounds": "alter function pgreaper._lateness_bounds volatile",
    "_error_class": "alter function pgreaper._error_class strict",
    "reaper_renew": "drop function pgreaper.reaper_renew(uuid, interval)",
    "retries": "create or replace view pgreaper.retries as select * from pgreaper.retries where attempts < 3",
    "leases": "create or replace view pgreaper.leases as select l.*, 1 as more from pgreaper.leases as l",
    "dead_letters": "alter view pgreaper.dead_letters set (security_barrier)",
    "backlog": "drop view pgreaper.backlog",
}


def test_functions_and_views_that_are_not_as_shipped(doctor, installed):
    """Text, attributes, settings; plans and columns of views; told by name, and mended."""
    with psycopg.connect(installed, autocommit=True) as db:
        for name, damage in DAMAGE.items():
            db.execute(re.sub(r"(as select) \* (from pgreaper\.retries)", retries(db), damage))
            finding = doctor.heal("drift", level="error", url=installed)
            assert finding["commands"] == ["pgreaper install --repair"]
            assert finding["fact"].startswith("1 object ")
            assert finding["fact"].endswith(f": {name}")
    assert schema.check(installed).ok


def retries(db):
    """The view's own text, since a view cannot be made from itself."""
    [(text,)] = db.execute("select pg_get_viewdef('pgreaper.retries'::regclass)").fetchall()
    return "as select * from (" + text.strip().rstrip(";").replace("\\", "\\\\") + ") as r"


def test_a_function_that_nobody_shipped(doctor, installed):
    """A second signature may be called in place of the first."""
    with psycopg.connect(installed, autocommit=True) as db:
        db.execute(
            "create function pgreaper.reaper_pause(policy varchar) returns boolean language sql as 'select true';"
            "revoke all on function pgreaper.reaper_pause(varchar) from public"
        )
    finding = doctor.heal("drift", level="warning", url=installed)
    assert finding["sql"] == ["drop routine pgreaper.reaper_pause(character varying);"]
    assert schema.check(installed).ok


def test_a_trigger_of_the_books_that_does_not_fire(doctor, installed):
    with psycopg.connect(installed, autocommit=True) as db:
        for damage in (
            "alter table pgreaper.events disable trigger counted",
            "drop trigger counted on pgreaper.transitions",
        ):
            db.execute(damage)
            doctor.heal("drift", level="error", url=installed)


def test_tables_of_the_books_that_are_not_whole(doctor, installed):
    with psycopg.connect(installed, autocommit=True) as db:
        db.execute("alter table pgreaper.totals drop column taken_back cascade")
    facts = [f["fact"] for f in doctor.look(url=installed) if f["code"] == "drift"]
    assert any("totals.taken_back" in fact for fact in facts)


def test_indexes_of_the_books(doctor, installed):
    """Gone, or not valid."""
    with psycopg.connect(installed, autocommit=True) as db, psycopg.connect(installed) as holder:
        db.execute("drop index pgreaper.failures_not_before")
        doctor.heal("books-index", level="warning", url=installed)
        holder.execute("lock table pgreaper.claims in row exclusive mode")
        db.execute("set lock_timeout = '50ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            db.execute("reindex index concurrently pgreaper.claims_active")
        holder.rollback()
        db.execute(
            "drop index pgreaper.claims_active; alter index pgreaper.claims_active_ccnew rename to claims_active"
        )
        doctor.heal("books-index", level="warning", url=installed)


def test_c059_what_public_has(doctor, installed):
    """Also what a function that was created anew has by default."""
    with psycopg.connect(installed, autocommit=True) as db:
        for grant in (
            "grant usage on schema pgreaper to public",
            "grant select on pgreaper.policies to public",
            "grant execute on function pgreaper.reaper_version() to public",
            "create function pgreaper.anew() returns boolean language sql as 'select true'",
        ):
            db.execute(grant)
            doctor.heal("public", level="error", url=installed)


def test_a_relay_that_nobody_runs(doctor, db, registered, run):
    """Its events wait, and keep the trail from being pruned; delivered, or removed, all is well."""
    registered.due(3)
    db.execute("select pgreaper.reaper_relay('holds', 'audit')")
    db.execute("call pgreaper.reaper_sweep('holds')")
    assert found(db, "relay") == []
    db.execute("update pgreaper.transitions set at = at - interval '2 hours'")
    (finding,) = found(db, "relay")
    assert finding.fact.startswith("relay audit has not delivered ")
    assert "the oldest for 2 h" in finding.fact
    assert finding.commands == ("pgreaper relays list audit",)
    run("relays", "remove", "audit", "--yes")
    assert found(db, "relay") == []


def test_c084_nobody_prunes_the_books(doctor, db, registered, run):
    """By the age of what is in them; the remedy removes it.  And by their size, whoever prunes."""
    registered.due(3)
    run("work")
    assert found(db, "books") == []
    db.execute("update pgreaper.claims set finished_at = finished_at - interval '30 days'")
    finding = doctor.heal("books", level="warning")
    assert "claims of 30 days ago" in finding["fact"]
    assert finding["commands"] == ["pgreaper prune"]
    [finding] = found(db, "books", books=1)
    assert finding.fact.startswith("pgreaper's own tables have become large")


def test_autovacuum_is_off_for_the_books(doctor, db):
    db.execute("alter table pgreaper.failures set (autovacuum_enabled = off)")
    assert doctor.heal("autovacuum", level="warning")["subject"] == "pgreaper.failures"


# -- the role and its settings


@pytest.mark.parametrize(
    ("setting", "value", "code", "level"),
    [
        ("default_transaction_isolation", "serializable", "isolation", "warning"),
        ("default_transaction_read_only", "on", "read-only", "error"),
        ("statement_timeout", "500ms", "timeout", "warning"),
        ("lock_timeout", "50ms", "timeout", "warning"),
        ("idle_in_transaction_session_timeout", "300ms", "timeout", "warning"),
        ("transaction_timeout", "500ms", "timeout", "warning"),
    ],
)
def test_settings_of_the_role(doctor, db, registered, worker, setting, value, code, level):
    """The remedy is a statement that the role itself may run."""
    if setting == "transaction_timeout" and db.info.server_version < 170000:
        return  # it came with 17
    role, url = worker
    db.execute(f"alter role {role} set {setting} = '{value}'")
    finding = doctor.heal(code, level=level, url=url)
    assert setting in finding["fact"] + finding["subject"]


def test_wherever_a_setting_comes_from_the_remedy_wins(doctor, db, registered, worker):
    role, url = worker
    name = db.info.dbname
    for where in (f"database {name}", f"role {role} in database {name}"):
        db.execute(f"alter {where} set default_transaction_read_only = on")
        doctor.heal("read-only", level="error", url=url)


def test_a_setting_of_the_connection_is_told_as_such(doctor, registered, worker):
    """No statement wins over the URL's own options."""
    finding = doctor.only("timeout", level="warning", url=f"{worker[1]}&options=-c%20statement_timeout%3D300ms")
    assert finding["sql"] == []
    assert "options=" in finding["advice"]


def test_c006_a_timeout_is_judged_by_what_batches_take(doctor, db, registered, worker, run):
    """Five seconds are plenty, but not where a batch takes two."""
    role, url = worker
    db.execute(f"alter role {role} set statement_timeout = '1200ms'")
    assert "timeout" not in doctor.codes(url=url)
    db.execute(
        "create function slow() returns trigger language plpgsql as 'begin perform pg_sleep(0.4); return new; end';"
        "create trigger slow before update on holds for each row execute function slow()"
    )
    registered.due(1)
    assert run("work").code == 0
    assert "99th percentile" in doctor.heal("timeout", level="warning", url=url)["fact"]


def test_a_role_that_may_not_even_use_the_schema(doctor, db, worker, dsn):
    role, url = worker
    assert [f["code"] for f in doctor.look(url=url)] == ["grants"]
    finding = doctor.heal("grants", level="error", url=url, admin=dsn)
    assert finding["sql"] == [f"select pgreaper.reaper_grant('{role}', 'worker');"]


def test_rights_on_the_books(doctor, db, registered, worker, dsn):
    """Something was taken from a role since; told to an administrator and to the role itself."""
    role, url = worker
    for taken in ("execute on function pgreaper._due from", "insert on pgreaper.claims from"):
        db.execute(f"revoke {taken} {role}")
        assert doctor.only("grants", level="error", url=url)["subject"] == role
        doctor.heal("grants", level="error", url=url, admin=dsn)
        db.execute(f"revoke {taken} {role}")
        doctor.heal("grants", level="error")


def test_superusers(doctor, db, registered, connect, dsn):
    """Somebody who looks as superuser is told; a worker that is one is a fault."""
    assert [(f["code"], f["level"]) for f in doctor.look()] == [("superuser", "note")]
    session = connect(application_name="pgreaper/host/1")
    finding = doctor.only("superuser", level="warning")
    assert finding["subject"] == db.info.user
    try:
        for statement in finding["sql"]:
            db.execute(statement)
        assert doctor.codes(url=make_url(dsn, "pgreaper_worker")) == ["superuser", "unseen"]
    finally:
        db.execute("drop owned by pgreaper_worker; drop role pgreaper_worker")
    session.close()
    wait(db, "select count(*) = 0 from pg_stat_activity where application_name = 'pgreaper/host/1'")
    assert doctor.codes() == []


def wait(db, condition):
    end = time.monotonic() + 15
    while db.execute(condition).fetchone() != (True,):
        assert time.monotonic() < end, condition
        time.sleep(0.02)


# -- the server


def test_c086_an_old_snapshot(db, registered, connect):
    """By pid, role and age; below the limit nothing is said; the remedy ends it."""
    holder = connect(autocommit=False, application_name="a report")
    holder.execute("set transaction isolation level repeatable read")
    holder.execute("select 1 from holds")
    who = f"pid {holder.info.backend_pid}"
    assert found(db, "snapshot") == []
    [finding] = [f for f in found(db, "snapshot", snapshot=timedelta(0)) if f.subject == who]
    assert "a report" in finding.fact
    db.execute(finding.sql[0])
    wait(db, f"select count(*) = 0 from pg_stat_activity where pid = {holder.info.backend_pid}")
    assert who not in [f.subject for f in found(db, "snapshot", snapshot=timedelta(0))]


def test_c041_the_clocks_differ(db, dsn, needs):
    """Measured on a host whose clock is really ahead."""
    faketime = needs("faketime", package="faketime")
    program = [sys.executable, "-m", "pgreaper", "doctor"]
    done = subprocess.run(
        [faketime, "-f", "+10m", *program],
        env={**os.environ, "DATABASE_URL": dsn, "FAKETIME_DONT_FAKE_MONOTONIC": "1"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert "10 min ahead of the database's" in " ".join(done.stdout.split())


def test_the_clock_of_a_worker_differs(db, registered):
    """As its claims tell it."""
    registered.due(1)
    db.execute("select pgreaper.reaper_claim('holds', worker => 'w7')")
    db.execute("update pgreaper.claims set skew = interval '-3 minutes'")
    [finding] = found(db, "clock")
    assert finding.fact.startswith("the clock of worker w7 is 3 min behind")


@pytest.fixture(scope="module")
def own():
    """A server of this file's own, whose settings may be changed."""
    with Cluster(settings={"max_prepared_transactions": 2, "fsync": False}) as started:
        schema.install(started.dsn)
        yield started


def test_settings_of_the_server(own, run, paste):
    """Autovacuum off for everybody; a deadlock_timeout below pgreaper's own patience."""
    doctor = Doctor(run, paste)
    with psycopg.connect(own.dsn, autocommit=True) as db:
        for setting, value, code in (
            ("autovacuum", "off", "autovacuum"),
            ("track_counts", "off", "autovacuum"),
            ("deadlock_timeout", "100ms", "deadlock-timeout"),
        ):
            db.execute(f"alter system set {setting} = '{value}'")
            db.execute("select pg_reload_conf()")
            with psycopg.connect(own.dsn, autocommit=True) as fresh:
                wait(fresh, f"select current_setting('{setting}') = '{value}'")
            finding = doctor.only(code, level="warning", url=own.dsn)
            doctor._paste(finding, url=own.dsn)
            wait(db, f"select current_setting('{setting}') <> '{value}'")
            assert doctor.codes(url=own.dsn) == []


def test_c086_a_prepared_transaction(own):
    with psycopg.connect(own.dsn, autocommit=True) as db, psycopg.connect(own.dsn, autocommit=True) as other:
        for statement in ("begin", "select pg_current_xact_id()", "prepare transaction 'it''s mine'"):
            other.execute(statement)
        assert found(db, "prepared-transaction") == []
        [finding] = found(db, "prepared-transaction", snapshot=timedelta(0))
        assert "it's mine" in finding.fact
        db.execute(finding.sql[0])
        assert found(db, "prepared-transaction", snapshot=timedelta(0)) == []


def test_a_standby(run, paste):
    """A look works on it, and says that nothing can be expired here."""
    with Cluster() as started:
        schema.install(started.dsn)
        with psycopg.connect(started.dsn, autocommit=True) as db:
            holds = Holds(db)
            holds.due(3)
            holds.register()
        started.stop()
        (started.data_dir / "standby.signal").touch()
        started.start()
        doctor = Doctor(run, paste)
        assert doctor.only("standby", level="error", url=started.dsn)["sql"] == []
        assert set(doctor.codes(url=started.dsn)) == {"standby", "unserved"}


# -- how it behaves


def test_nothing_is_written_and_no_setting_stays(db, registered, dsn):
    """No transaction id is taken, whatever there is to find, and the session is as it was."""
    registered.due(5)
    db.execute("drop index holds_due; create view v as select * from holds")
    registered.register("view", target="v")
    next_id = "select pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
    settings = (
        "select string_agg(name || '=' || setting, ',' order by name) from pg_settings where name not like 'plpgsql.%'"
    )
    with psycopg.connect(dsn, autocommit=True) as session:
        before = session.execute(settings).fetchall()
        for _ in range(5):  # autovacuum may take one
            start = session.execute(next_id).fetchone()
            assert len(examine(session).findings) >= 4
            if start == session.execute(next_id).fetchone():
                break
        else:
            pytest.fail("each look takes a transaction id")
        assert session.execute(settings).fetchall() == before
        assert session.info.transaction_status is psycopg.pq.TransactionStatus.IDLE


def test_what_a_role_may_not_see_stops_nothing(doctor, db, registered, worker):
    """Each look that is refused is a note by name; the others are made."""
    role, url = worker
    db.execute(f"revoke all on pgreaper.claims, pgreaper.failures from {role}; grant pg_read_all_stats to {role}")
    look = doctor.look(url=url)
    assert {f["code"] for f in look} == {"unchecked", "grants"}
    look = [f for f in look if f["code"] == "unchecked"]
    assert {f["subject"] for f in look} >= {"lease", "dead letters", "timeouts"}
    assert all(f["level"] == "note" and "permission denied" in f["fact"] for f in look)
    db.execute("drop index holds_due")
    assert "index-missing" in doctor.codes(url=url)


def test_c015_a_locked_target_is_told_and_the_others_are_looked_at(doctor, db, registered, worker, connect):
    db.execute("create table other (like holds including all)")
    registered.register("other", target="other")
    db.execute(f"drop index other_expires_at_idx; grant select, update (status) on other to {worker[0]}")
    holder = connect(autocommit=False)
    holder.execute("lock table holds in access exclusive mode")
    assert set(doctor.codes()) == {"unchecked", "index-missing"}


def test_a_look_that_takes_too_long_ends(db, registered):
    """Every statement is bounded; what did not fit is told."""
    db.execute("insert into holds (status, expires_at) select 'expired', now() from generate_series(1, 200000)")
    db.execute("drop index holds_due")
    late = examine(db, limits=Limits(seconds=0.001)).findings
    assert any(f.code == "unchecked" and "took too long" in f.fact for f in late)


def test_policies_can_be_named(doctor, run, registered, worker, db):
    db.execute("create table other (like holds including all)")
    registered.register("other", target="other")
    db.execute(f"drop index holds_due; grant select, update (status) on other to {worker[0]}")
    assert doctor.codes("other") == []
    assert doctor.codes("holds", "other") == ["index-missing"]
    result = run("doctor", "othr")
    assert result.code == 2
    assert "Did you mean other?" in result.err


def test_the_text_is_for_people(run, db, registered):
    """Grouped by policy, the worst first, remedies on lines of their own, nothing wider than 80 but those."""
    registered.due(2)
    db.execute("drop index holds_due; alter table holds set (autovacuum_enabled = off)")
    report = run("doctor", "--json").json
    result = run("doctor")
    assert result.code == 3
    lines = result.out.splitlines()
    pasteable = [line for f in report["findings"] for line in (*f["sql"], *f["commands"])]
    assert len(pasteable) == 3
    for line in pasteable:
        assert f"      {line}" in lines
    assert max(len(line) for line in lines if line.strip() not in pasteable) <= 80
    assert lines.index("policy holds on public.holds") < lines.index("  error: unserved")
    assert lines.index("  error: unserved") < lines.index("  warning: index-missing")
    assert lines[-1].startswith("found 1 error, 2 warnings, 1 note: ")


def test_no_value_of_a_row_is_told(run, db, holds):
    """Not even through an error message of the server's."""
    db.execute("alter table holds alter expires_at drop not null")
    db.execute("insert into holds (expires_at, customer_email) values (null, 'secret@example.com')")
    db.execute("create function boom(text) returns boolean language plpgsql as 'begin raise exception ''%'', $1; end'")
    db.execute("create view v as select * from holds where boom(customer_email)")
    holds.register("v", target="v")
    for arguments in (["doctor"], ["doctor", "--json"]):
        result = run(*arguments)
        assert result.code == 3
        assert "secret" not in result.out + result.err


def test_the_database_is_unreachable(run, tmp_path):
    assert run("doctor", url=f"postgresql:///x?host={tmp_path}").code == 75


def test_every_finding_is_explained_and_has_a_test():
    """Each code in the source stands in docs/doctor.md with its level, and in a test by name."""
    source = "".join(path.read_text() for path in (ROOT / "pgreaper/doctor").glob("*.py"))
    codes = set(re.findall(r'(?:Finding|finding)\(\s*"([a-z-]+)"', source)) | set("target-broken unchecked".split())
    assert len(codes) > 35
    page = (ROOT / "docs/doctor.md").read_text()
    explained = set(re.findall(r"^\| `([a-z-]+)` \|", page, re.MULTILINE))
    assert explained == codes
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("*/test_*.py"))
    assert {code for code in codes if f'"{code}"' not in tests} == set()

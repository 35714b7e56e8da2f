"""`pgreaper cron status`: what does not work, said in words, with the statement that mends it."""

from __future__ import annotations

import re
import shlex
import time
from contextlib import closing
from datetime import UTC, datetime, timedelta

import pytest

from pgreaper.cron import Home, at_home, findings, survey
from pgreaper.cron.health import mended, misuse
from tests.conftest import Holds

SWEEP = "call pgreaper.reaper_sweep()"


@pytest.fixture
def shop_db(cron, shop):
    """A database with a policy `holds`, nothing due, and the job `pgreaper sweep …` in pg_cron, as role reaper."""
    return made(cron, shop)


def made(server, shop, due=0):
    database = server.new_database()
    shop(server, database, due)
    server.script(
        """
        create role reaper login;
        select pgreaper.reaper_grant('reaper', 'worker');
        """,
        database,
    )
    return database


def later(minutes=(30,)):
    """A schedule that does not start during a test: these minutes from now, every hour."""
    now = datetime.now(UTC).minute
    return ",".join(str((now + minute) % 60) for minute in minutes) + " * * * *"


def found(result):
    """The findings of `status --json` but for the notes, by code."""
    return {f["code"]: f for f in result.json["findings"] if f["level"] != "note"}


def notes(result):
    return {f["code"]: f for f in result.json["findings"] if f["level"] == "note"}


TROUBLE = [
    ("cron-job-role", "alter role reaper nologin", "which may not log in"),
    ("cron-job-database", "revoke connect on database {db} from public", "role reaper may not connect to"),
    ("cron-job-database", "alter database {db}_2 allow_connections off", "takes no connections"),
    ("cron-job-database", "alter database {db}_2 rename to {db}_3", "does not exist"),
    ("cron-job-address", "update cron.job set nodeport = 1", "connects to port 1, and this server listens on 5432"),
    ("cron-job-command", "update cron.job set command = 'call reaper_sweep()'", "without its schema"),
    ("cron-job-command", "update cron.job set command = 'set x.y = 1; call pgreaper.reaper_sweep()'", "several"),
    ("cron-job-command", "update cron.job set command = 'select pgreaper.reaper_sweep(batch => 5)'", "CALL it"),
    ("cron-job-schedule", "update cron.job set schedule = '* * * * * *'", "6 fields and not five"),
    ("cron-job-schedule", "update cron.job set schedule = '0 0 31 2 *'", "never comes"),
    ("cron-job-rights", "revoke usage on schema pgreaper from reaper", "lacks rights on schema pgreaper"),
]


@pytest.mark.parametrize(("code", "trouble", "fact"), TROUBLE, ids=lambda v: v[:60])
def test_c083_what_is_wrong_with_a_job_and_what_mends_it(cron, shop_db, pgreaper, code, trouble, fact):
    """A healthy job has no finding; each trouble is one, before any run; its statements and commands mend it."""
    where = f"{shop_db}_2" if "{db}_2" in trouble else shop_db
    if where != shop_db:
        cron.run(f"create database {where} template {shop_db}")
    asked = shop_db
    assert pgreaper(cron, where, "cron", "enable", "--role", "reaper", "--schedule", later()).code == 0
    healthy = pgreaper(cron, where, "cron", "status", "--json")
    assert (healthy.code, found(healthy)) == (0, {}), healthy.out

    cron.run(trouble.format(db=shop_db), database=shop_db if code == "cron-job-rights" else "postgres")
    result = pgreaper(cron, asked, "cron", "status", "--json")
    finding = found(result)[code]
    assert result.code == result.json["exit_code"] == 3
    assert fact in finding["fact"]
    assert result.json["jobs"][0]["state"] == (
        "waits" if code in ("cron-job-schedule", "cron-job-rights") else "broken"
    )
    text = pgreaper(cron, asked, "cron", "status")
    assert text.code == 3
    assert f"{finding['level']}: {finding['fact']}\n" in text.out
    for line in (*finding["sql"], *finding["commands"]):
        assert f"  {line}\n" in text.out

    for statement in finding["sql"]:
        cron.script(statement, finding["database"] or shop_db)
    for command in finding["commands"]:
        assert pgreaper(cron, asked, *shlex.split(command)[1:]).code == 0
    after = pgreaper(cron, asked, "cron", "status", "--json")
    assert code not in found(after)
    assert {job["role"] for job in after.json["jobs"]} <= {"reaper"}


def test_c083_from_a_dump_into_another_database(cron, shop_db, pgreaper):
    """Scheduled as one role, restored where the database has another name and the role may not log in."""
    assert pgreaper(cron, shop_db, "cron", "enable", "--role", "reaper", "--schedule", later()).code == 0
    dump = cron.cluster.run("pg_dump", "--data-only", database="postgres").stdout
    assert "call pgreaper.reaper_sweep()" in dump
    cron.run("delete from cron.job")
    cron.script(dump)
    cron.run(f"alter database {shop_db} rename to restored")
    cron.run("alter role reaper nologin")

    result = pgreaper(cron, "restored", "cron", "status", "--json")
    assert set(found(result)) == {"cron-job-database", "cron-job-role"}
    assert "no job sweeps database restored" in pgreaper(cron, "restored", "cron", "status").out
    for finding in found(result).values():
        cron.script("\n".join(finding["sql"]), finding["database"])
    assert pgreaper(cron, "restored", "cron", "enable", "--role", "reaper").code == 0
    assert pgreaper(cron, "restored", "cron", "status").code == 0


def test_c081_a_role_that_is_dropped_takes_all_jobs_with_it(cron, shop, pgreaper):
    """
    One job, even a switched-off one, whose role is gone ends pg_cron's scheduler.

    Nothing runs and nothing is logged; the rows tell it, to a plain role too, and the statement that is printed
    brings everything back.
    """
    database = made(cron, shop, due=5)
    cron.run("create role gone login")
    cron.run("select cron.schedule_in_database('of gone', '0 0 1 1 *', 'select 1', 'postgres', 'gone')")
    cron.run("update cron.job set active = false")
    assert pgreaper(cron, database, "cron", "enable", "--role", "reaper", "--schedule", "@reboot").code == 0
    cron.run("drop role gone")
    cron.cluster.restart()
    # It ends within milliseconds, and is started again every second.
    for _ in range(500):
        if 'ERROR:  role "gone" does not exist' in cron.cluster.log(20):
            break
        time.sleep(0.02)
    else:
        pytest.fail(cron.cluster.log(20))

    result = pgreaper(cron, database, "cron", "status", "--json")
    assert result.code == 3
    finding = found(result)["cron-job-role"]
    assert "belongs to role gone, which does not exist" in finding["fact"]
    late = [{"policy": "holds", "due": 5}]
    assert [{key: entry[key] for key in ("policy", "due")} for entry in result.json["late"]] == late
    plain = pgreaper(cron, database, "cron", "status", "--json", role="reaper")
    assert plain.code == 3
    assert [entry["policy"] for entry in plain.json["late"]] == ["holds"]
    assert "nobody expires them" in pgreaper(cron, database, "cron", "status", role="reaper").out

    cron.script("\n".join(finding["sql"]), finding["database"])
    assert cron.start_jobs(1)[0][1] == "succeeded"
    assert cron.run("select distinct status from holds", database=database) == [("expired",)]


def test_c081_a_scheduler_that_does_not_run(cron, shop_db, pgreaper):
    """Its process is looked for where the role may see it."""
    assert pgreaper(cron, shop_db, "cron", "enable", "--role", "reaper", "--schedule", later()).code == 0
    assert "cron-scheduler" not in found(pgreaper(cron, shop_db, "cron", "status", "--json"))
    cron.run("select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'pg_cron scheduler'")
    try:
        cron.wait_until("select count(*) = 0 from pg_stat_activity where application_name = 'pg_cron scheduler'")
        result = pgreaper(cron, shop_db, "cron", "status", "--json")
        assert set(found(result)) == {"cron-scheduler"}
        assert result.code == 3
    finally:
        cron.cluster.restart()


def test_c081_a_job_that_is_started_no_more(cron, shop_db, pgreaper):
    """Its last start is long ago for its schedule, although all its runs were good."""
    assert pgreaper(cron, shop_db, "cron", "enable", "--role", "reaper", "--schedule", later()).code == 0
    run(cron, start="now() - interval '20 seconds'")
    assert found(pgreaper(cron, shop_db, "cron", "status", "--json")) == {}
    cron.run("update cron.job_run_details set start_time = now() - interval '20 minutes'")
    # A server that has just started has had no time yet.
    assert found(pgreaper(cron, shop_db, "cron", "status", "--json")) == {}
    with closing(cron.connect(shop_db)) as connection, at_home(connection, lambda name: cron.connect(name)) as home:
        assert isinstance(home, Home)
        seen = survey(home, connection, now=home.started + timedelta(hours=2))
    assert [job.state for job in seen.jobs or []] == ["stalled"]
    assert "pg_cron starts it no more" in next(f.fact for f in seen.findings if f.code == "cron-job-stalled")


def test_c081_due_rows_and_no_job_at_all(cron, shop, pgreaper):
    database = made(cron, shop, due=3)
    result = pgreaper(cron, database, "cron", "status")
    assert result.code == 3
    assert f"no job sweeps database {database}: `pgreaper cron enable` schedules one" in result.out
    late = r"policy holds: 3 due, the oldest for (1 h 59 min|2 h) \(promised: 1 min\): nobody expires them"
    assert re.search(late, result.out)


def test_holds_that_wait_for_an_hourly_job_are_not_late(cron, shop, pgreaper):
    """The schedule explains them; a paused policy is nobody's fault either."""
    database = made(cron, shop)
    with closing(cron.connect(database)) as connection:
        Holds.due(_of(connection), 3, overdue="30 minutes")
    # Every minute, but not now.
    often = later(range(20, 26))
    assert pgreaper(cron, database, "cron", "enable", "--role", "reaper", "--schedule", often).code == 0
    assert pgreaper(cron, database, "cron", "status").code == 3
    assert pgreaper(cron, database, "cron", "enable", "--role", "reaper", "--schedule", later()).code == 0
    assert pgreaper(cron, database, "cron", "status").code == 0
    assert pgreaper(cron, database, "cron", "enable", "--role", "reaper", "--schedule", often).code == 0
    assert pgreaper(cron, database, "cron", "status").code == 3
    assert pgreaper(cron, database, "pause", "holds").code == 0
    assert pgreaper(cron, database, "cron", "status").code == 0


def _of(connection):
    holds = Holds.__new__(Holds)
    holds.connection = connection
    return holds


def run(server, start="now()", status="succeeded", message="1 row", count=1):
    """Write what pg_cron would have logged."""
    server.run(
        "insert into cron.job_run_details (jobid, database, username, status, return_message, start_time, end_time)"
        f" select j.jobid, j.database, j.username, %s, %s, {start}, {start} + interval '1 second'"
        "  from (select * from cron.job order by jobid desc limit 1) as j, generate_series(1, %s)",
        status, message, count,
    )  # fmt: skip


FAILURES = {
    "no rights": ("call pgreaper.reaper_sweep()", "poor", "{db}", "permission denied for schema pgreaper"),
    "no policy": ("call pgreaper.reaper_sweep(policy => 'nope')", "reaper", "{db}", "there is no policy nope"),
    "no table": ("call pgreaper.reaper_sweep(policy => 'broken')", "reaper", "{db}",
                 "policies that could not be swept: broken"),
    "not there": ("call pgreaper.reaper_sweep()", "reaper", "postgres", "pgreaper is not in its database"),
    "too slow": ("call pgreaper.reaper_sweep(batch => 9)", "slow", "{db}", "a statement_timeout cancelled it"),
    "private": ("do $$ begin perform pgreaper.reaper_version(); raise exception '%', md5('x'); end $$", "postgres",
                "{db}", "an error that may carry values of rows"),
    "function": ("select around()  -- pgreaper.reaper_sweep()", "postgres", "{db}", "it is not the only statement"),
}  # fmt: skip


def test_why_a_run_failed(each_mode, shop, pgreaper):
    """Each cause for real, in the words of both modes; a message that may carry values is not repeated."""
    database = made(each_mode, shop)
    each_mode.script(
        """
        create role poor login;
        create role slow superuser login;
        alter role slow set statement_timeout = '1ms';
        create table broken (like holds including all);
        select pgreaper.reaper_register('broken', 'broken', 'expires_at', 'status', held => array['held'],
                                        expired => 'expired', owner => 'me');
        drop table broken;
        create function around() returns bigint language plpgsql as
          $$ declare n bigint; begin call pgreaper.reaper_sweep(expired => n); return n; end $$;
        insert into holds (expires_at) select now() - interval '1 hour' from generate_series(1, 3000);
        """,
        database,
    )
    for name, (command, role, where, _) in FAILURES.items():
        each_mode.run(
            "select cron.schedule_in_database(%s, '@reboot', %s, %s, %s)",
            name,
            command,
            where.format(db=database),
            role,
        )
    runs = each_mode.start_jobs(len(FAILURES))
    assert {status for _, status, _ in runs} == {"failed"}, runs
    result = pgreaper(each_mode, database, "cron", "status", "--json")
    assert result.code == 3
    causes = {job["name"]: job["last_run"]["cause"] for job in result.json["jobs"]}
    for name, (_, _, _, expected) in FAILURES.items():
        assert causes[name].startswith(expected), (name, causes[name], runs)
    facts = {f["subject"]: f["fact"] for f in result.json["findings"] if f["code"] == "cron-job-fails"}
    assert set(facts) == set(FAILURES)
    (secret,) = each_mode.run("select md5('x')")[0]
    assert any(secret in message for _, _, message in runs)
    assert secret not in result.out + pgreaper(each_mode, database, "cron", "status").out


def test_runs_that_cannot_even_begin(each_mode, shop, pgreaper):
    """A database or a role that takes no connection: as a connection pg_cron knows no more than that it failed."""
    database = made(each_mode, shop)
    for name, role, where in (("role", "reaper", database), ("place", "postgres", "elsewhere")):
        if where == "elsewhere":
            each_mode.run("create database elsewhere")
        each_mode.run("select cron.schedule_in_database(%s, '@reboot', %s, %s, %s)", name, SWEEP, where, role)
    each_mode.run("drop database elsewhere")
    each_mode.run("alter role reaper nologin")
    each_mode.start_jobs(2)
    jobs = pgreaper(each_mode, database, "cron", "status", "--json").json["jobs"]
    causes = [job["last_run"]["cause"] for job in jobs]
    assert causes == (
        ["pg_cron could not connect"] * 2
        if each_mode.mode == "connections"
        else ["its role may not log in", "its database takes no connection"]
    )
    assert [job["state"] for job in jobs] == ["broken", "broken"]


def test_a_job_that_works_again(cron, shop_db, pgreaper):
    """Old failures are a note; the last run decides."""
    assert pgreaper(cron, shop_db, "cron", "enable", "--role", "reaper", "--schedule", later()).code == 0
    run(cron, status="failed", message="connection failed", count=3)
    failing = pgreaper(cron, shop_db, "cron", "status", "--json")
    assert failing.json["jobs"][0]["state"] == "fails"
    assert "failed in 3 of its last 3 runs" in found(failing)["cron-job-fails"]["fact"]
    run(cron)
    result = pgreaper(cron, shop_db, "cron", "status", "--json")
    assert result.code == 0
    assert (result.json["jobs"][0]["state"], result.json["jobs"][0]["failures"]) == ("works", 3)
    assert "works again" in notes(result)["cron-job-failed"]["fact"]
    run(cron, status="failed", message="server restarted")
    restarted = pgreaper(cron, shop_db, "cron", "status", "--json")
    assert found(restarted)["cron-job-fails"]["level"] == "warning"


def test_a_job_that_is_switched_off(cron, shop_db, pgreaper):
    """Is no job of this database; the statement of the note switches it on."""
    assert pgreaper(cron, shop_db, "cron", "enable", "--role", "reaper", "--schedule", later()).code == 0
    cron.run("update cron.job set active = false")
    result = pgreaper(cron, shop_db, "cron", "status", "--json")
    assert (result.code, result.json["jobs"][0]["state"]) == (3, "off")
    cron.script("\n".join(notes(result)["cron-job-off"]["sql"]))
    assert pgreaper(cron, shop_db, "cron", "status").code == 0


def test_a_job_by_hand_is_seen_too(cron, shop_db, pgreaper):
    """Without a name, and the same twice is told."""
    for _ in range(2):
        cron.run(
            "insert into cron.job (schedule, command, nodename, nodeport, database, username)"
            " values (%s, 'CALL pgreaper.reaper_sweep();', 'localhost', 5432, %s, 'reaper')",
            later(),
            shop_db,
        )
    cron.run("select cron.schedule('other', '* * * * *', 'select 1')")
    result = pgreaper(cron, shop_db, "cron", "status", "--json")
    assert result.code == 0
    assert [(job["name"], job["kind"]) for job in result.json["jobs"]] == [(None, None), (None, None)]
    twin = notes(result)["cron-job-twice"]
    cron.script("\n".join(twin["sql"]), twin["database"])
    assert len(pgreaper(cron, shop_db, "cron", "status", "--json").json["jobs"]) == 1


def test_c084_the_log_that_nobody_cleans(cron, shop_db, pgreaper):
    """A note while it is small, a warning when it is large; the statement schedules its cleaning, which works."""
    assert pgreaper(cron, shop_db, "cron", "enable", "--role", "reaper", "--schedule", later()).code == 0
    small = notes(pgreaper(cron, shop_db, "cron", "status", "--json"))["cron-log-grows"]
    assert "no job cleans cron.job_run_details" in small["fact"]
    # Ten weeks of runs by the minute; every tenth could not connect, and so has no times.
    cron.run("""
        insert into cron.job_run_details (jobid, database, username, status, return_message, start_time, end_time)
        select 1, 'shop', 'reaper', 'succeeded', repeat('x', 650),
               case when g % 10 > 0 then now() - g * interval '1 minute' end,
               case when g % 10 > 0 then now() - g * interval '1 minute' end
          from generate_series(100000, 1, -1) as g
        """)
    result = pgreaper(cron, shop_db, "cron", "status", "--json")
    finding = found(result)["cron-log-grows"]
    assert result.code == 3
    assert finding["commands"] == ["pgreaper cron enable log"]
    cron.script("\n".join(finding["sql"]), finding["database"])
    assert [(c,) for c in ("reaper", "postgres")] == cron.run("select username from cron.job order by jobid")
    after = pgreaper(cron, shop_db, "cron", "status", "--json")
    assert "cron-log-grows" not in found(after) | notes(after)

    (command,) = cron.run("select command from cron.job where username = 'postgres'")[0]
    cron.run(command)
    kept, oldest, without = cron.run(
        "select count(*), min(start_time) > now() - interval '7 days', count(*) filter (where start_time is null)"
        " from cron.job_run_details"
    )[0]
    assert 10079 <= kept <= 10081
    assert oldest
    assert without >= 1000


def test_as_a_role_with_few_rights(cron, shop, pgreaper):
    """It sees its own jobs, or none; that is told and is no fault of the jobs."""
    database = made(cron, shop)
    assert pgreaper(cron, database, "cron", "enable", "--role", "reaper", "--schedule", later()).code == 0
    blind = pgreaper(cron, database, "cron", "status", "--json", role="reaper")
    assert (blind.code, blind.json["jobs"]) == (0, None)
    grant = notes(blind)["cron-unreadable"]
    assert "role reaper may not look at pg_cron's jobs" in pgreaper(cron, database, "cron", "status", role="reaper").out
    cron.script("\n".join(grant["sql"]), grant["database"])
    cron.run("select cron.schedule_in_database('of another', %s, %s, %s)", later(), SWEEP, database)
    seen = pgreaper(cron, database, "cron", "status", "--json", role="reaper")
    assert [job["role"] for job in seen.json["jobs"]] == ["reaper"]
    assert seen.json["pg_cron"]["all_jobs"] is False
    assert "role reaper sees its own jobs only" in pgreaper(cron, database, "cron", "status", role="reaper").out


def test_looking_writes_nothing_and_leaves_nothing(cron, shop_db, pgreaper):
    """`findings`, as `doctor` calls it: no transaction id, no setting, under any search_path."""
    assert pgreaper(cron, shop_db, "cron", "enable", "--schedule", later()).code == 0
    with closing(cron.connect(shop_db)) as connection:
        connection.execute("create schema hostile; create function hostile.hostile() returns int language sql return 1")
        connection.execute("create view hostile.pg_roles as select 'x'::name as rolname")
        connection.execute("set search_path = hostile, pg_catalog")
        before = connection.execute("select pg_snapshot_xmax(pg_current_snapshot())::text").fetchone()
        codes = [f.code for f in findings(connection, open_database=cron.connect)]
        assert "cron-job-superuser" in codes
        assert connection.execute("select pg_snapshot_xmax(pg_current_snapshot())::text").fetchone() == before
        assert connection.execute("show search_path").fetchone() == ("hostile, pg_catalog",)
        assert connection.execute("show statement_timeout").fetchone() == ("0",)
        assert findings(connection) == [], "elsewhere, and not allowed to look there"


@pytest.mark.parametrize(
    ("command", "wrong", "right"),
    [
        ("call pgreaper.reaper_sweep()", None, None),
        ("CALL pgreaper.reaper_sweep(policy => 'a;b', batch => 5) ; -- every; minute", None, None),
        ("/* a; b */ call pgreaper.reaper_sweep()", None, None),
        ("do $$ declare n bigint; begin call pgreaper.reaper_sweep(expired => n); end $$", None, None),
        ("select 'call pgreaper.reaper_sweep()'", None, None),
        (
            "select 1; call pgreaper.reaper_sweep('it''s (x)', 5)",
            "several",
            "call pgreaper.reaper_sweep('it''s (x)', 5)",
        ),
        ("call reaper_sweep(null, 7);", "schema", "call pgreaper.reaper_sweep(null, 7)"),
        ("select * from reaper_sweep()", "CALL", "call pgreaper.reaper_sweep()"),
    ],
)
def test_misuse_is_seen_in_the_text(command, wrong, right):
    """Not in literals and comments; the mended command keeps its arguments."""
    found = misuse(command)
    assert (found is None) if wrong is None else (found is not None and wrong in found)
    if right is not None:
        assert mended(command) == right

"""pg_cron starts the sweep and rows expire: in both modes, with few rights, many at once, by the minute."""

from __future__ import annotations

import time
from contextlib import closing

import pytest

from tests.cron.conftest import MODES

WORKER = """
create role reaper login;
select pgreaper.reaper_grant('reaper', 'worker');
"""


def states(server, database):
    return dict(server.run("select status, count(*) from holds group by 1", database=database))


def test_a_scheduled_run_expires_rows(each_mode, shop, pgreaper):
    """The command schedules the documented statement, and pg_cron's run of it expires what is due and no more."""
    database = each_mode.new_database()
    shop(each_mode, database, due=1200)
    each_mode.script(
        """
        insert into holds (expires_at) values (now() + interval '1 day');
        create table batches (xact xid8 default pg_current_xact_id());
        create function note() returns trigger language plpgsql as
          $$ begin insert into public.batches default values; return null; end $$;
        create trigger note after update on holds for each statement execute function note();
        """,
        database,
    )
    result = pgreaper(each_mode, database, "cron", "enable", "--schedule", "@reboot")
    assert result.code == 0, result.err
    assert each_mode.run("select jobname::text, command, database, username from cron.job") == [
        (f"pgreaper sweep {database}", "call pgreaper.reaper_sweep()", database, "postgres")
    ]
    [(_, status, message)] = each_mode.start_jobs(1)
    assert status == "succeeded", message
    assert states(each_mode, database) == {"expired": 1200, "held": 1}
    batches = "select count(*), count(distinct xact) from batches"
    assert each_mode.run(batches, database=database) == [(3, 3)], "500 at a time, each committed"


def test_as_a_role_with_few_rights(each_mode, shop, pgreaper):
    """The job of a role that has a worker's rights and nothing else."""
    database = each_mode.new_database()
    shop(each_mode, database)
    each_mode.script(WORKER, database)
    result = pgreaper(each_mode, database, "cron", "enable", "--schedule", "@reboot", "--role", "reaper")
    assert result.code == 0, result.err
    assert "lacks rights" not in result.out
    assert each_mode.start_jobs(1)[0][1] == "succeeded"
    assert states(each_mode, database) == {"expired": 10}


def test_c082_misuse_in_a_job(each_mode, shop, pgreaper):
    """What pg_cron logs says what to do instead, and `status` knows it from the text before the first run."""
    database = each_mode.new_database()
    shop(each_mode, database)
    wrong = [
        "select 1; call pgreaper.reaper_sweep()",
        "set search_path = public; call pgreaper.reaper_sweep()",
        "select pgreaper.reaper_sweep()",
    ]
    for number, command in enumerate(wrong):
        each_mode.run("select cron.schedule_in_database(%s, '@reboot', %s, %s)", f"wrong {number}", command, database)
    found = pgreaper(each_mode, database, "cron", "status", "--json").json["findings"]
    assert {f["subject"] for f in found if f["code"] == "cron-job-command"} == {"wrong 0", "wrong 1", "wrong 2"}
    runs = each_mode.start_jobs(3)
    assert {status for _, status, _ in runs} == {"failed"}
    for _, _, message in runs[:2]:
        assert "must be the only statement and outside a transaction" in message
    assert "To call a procedure, use CALL" in runs[2][2]
    assert states(each_mode, database) == {"held": 10}

    # The statement that `status` prints mends each of them.
    for finding in found:
        if finding["code"] == "cron-job-command":
            each_mode.script("\n".join(finding["sql"]), finding["database"])
    assert {command for (command,) in each_mode.run("select command from cron.job")} == {"call pgreaper.reaper_sweep()"}
    assert {status for _, status, _ in each_mode.start_jobs(3)} == {"succeeded"}
    assert states(each_mode, database) == {"expired": 10}


def test_c080_ten_runs_at_once(each_mode, shop):
    """5,000 due rows, a slow trigger, ten copies: each expires once, nobody deadlocks, every run ends well."""
    database = each_mode.new_database()
    shop(each_mode, database, due=5000)
    each_mode.script(
        """
        create table seen (id bigint, pid int default pg_backend_pid());
        create function slow() returns trigger language plpgsql as
          $$ begin perform pg_sleep(0.001); insert into public.seen (id) values (new.id); return null; end $$;
        create trigger slow after update on holds for each row when (new.id % 5 = 0) execute function slow();
        """,
        database,
    )
    for number in range(10):
        each_mode.run(
            "select cron.schedule_in_database(%s, '@reboot', 'call pgreaper.reaper_sweep(batch => 100)', %s)",
            f"copy {number}",
            database,
        )
    runs = each_mode.start_jobs(10)
    assert [(status, message) for _, status, message in runs if status != "succeeded"] == []
    # A run that met a locked row left it to the one that had it; nothing is left over when all have ended.
    assert states(each_mode, database) == {"expired": 5000}
    assert each_mode.run("select sum(holds) from pgreaper.transitions", database=database) == [(5000,)]
    assert each_mode.run("select count(*), count(distinct id) from seen", database=database) == [(1000, 1000)]
    assert each_mode.run("select count(distinct pid) > 1 from seen", database=database) == [(True,)], "several at it"
    assert each_mode.run("select deadlocks from pg_stat_database where datname = %s", database) == [(0,)]


def test_c080_sixty_runs_that_pg_cron_has_queued(db, holds, connect):
    """Back to back with nothing due: no transaction id, and of 20,000 holds only the index's first entry is read."""
    holds.ahead(20_000)
    holds.register()
    db.execute("alter table holds set (autovacuum_enabled = off)")
    db.execute("vacuum analyze holds")

    def taken() -> int:
        ((xmax,),) = db.execute("select pg_snapshot_xmax(pg_current_snapshot())::text::bigint").fetchall()
        return int(xmax)

    def read(at_least: int) -> tuple[int, int]:
        """Scans of the table, and rows read in them, as soon as the server has counted that many scans."""
        end = time.monotonic() + 20
        while True:
            ((scans, rows),) = db.execute(
                "select seq_scan + idx_scan, seq_tup_read + idx_tup_fetch from pg_stat_user_tables"
                " where relname = 'holds'"
            ).fetchall()
            if scans >= at_least:
                return scans, rows
            assert time.monotonic() < end, f"{scans} scans of {at_least} were counted"
            time.sleep(0.02)

    def sweep(times: int) -> None:
        # A session has reported all it did when it has ended.
        with closing(connect()) as session:
            for _ in range(times):
                session.execute("call pgreaper.reaper_sweep()")

    sweep(1)
    scans, rows = read(at_least=1)
    for _ in range(5):  # others take transaction ids too, and what was done above may be counted late
        before = taken(), scans, rows
        sweep(60)
        scans, rows = read(at_least=scans + 60)
        spent = [after - before for after, before in zip((taken(), scans, rows), before, strict=True)]
        if all(n <= most for n, most in zip(spent, (0, 2 * 60, 60), strict=True)):
            break
    else:
        pytest.fail("{} transaction ids, {} scans, {} rows".format(*spent))


def test_by_the_minute(servers, shop, pgreaper):
    """The schedule that people use, on both servers at once; the only test that waits for a minute to come."""
    found = [servers(mode) for mode in MODES]
    databases = []
    for server in found:
        server.clean()
        databases.append(server.new_database())
        shop(server, databases[-1])
    # Not near the turn of a minute, where a job has run before it is looked at.
    while not 3 < time.time() % 60 < 40:
        time.sleep(0.2)
    for server, database in zip(found, databases, strict=True):
        assert pgreaper(server, database, "cron", "enable", "--max-seconds", "50").code == 0
        status = pgreaper(server, database, "cron", "status", "--json").json
        assert [job["state"] for job in status["jobs"]] == ["waits"]
        assert [late["policy"] for late in status["late"]] == ["holds"], "due for an hour: seen from the rows alone"
    for server, database in zip(found, databases, strict=True):
        [(name, outcome, message)] = server.wait_for_runs(1, seconds=100)
        assert (name, outcome) == (f"pgreaper sweep {database}", "succeeded"), message
        assert states(server, database) == {"expired": 10}
        status = pgreaper(server, database, "cron", "status", "--json")
        assert status.code == 0
        assert [(job["state"], job["runs"], job["failures"]) for job in status.json["jobs"]] == [("works", 1, 0)]
        assert pgreaper(server, database, "cron", "disable").code == 0
        assert server.run("select count(*) from cron.job") == [(0,)]

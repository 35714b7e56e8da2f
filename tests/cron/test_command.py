"""`pgreaper cron print|enable|disable`: one job a name, whoever may schedules it, whoever may not is told how."""

from __future__ import annotations

from contextlib import closing

import pytest

from pgreaper.cron import job_name
from pgreaper.cron.home import release
from pgreaper.embedded import Cluster
from tests.conftest import install_sql
from tests.cron.conftest import BINDIR, TEMPLATE, CronServer

JOB = "select jobid, jobname::text, schedule, command, database, username, active from cron.job order by jobid"


@pytest.fixture
def shop_db(cron, shop):
    """A database with a policy `holds`."""
    database = cron.new_database()
    shop(cron, database)
    return database


def sweep(database, command="call pgreaper.reaper_sweep()", schedule="* * * * *", role="postgres"):
    return f"pgreaper sweep {database}", schedule, command, database, role, True


def test_scheduling_twice_is_one_job(cron, shop_db, pgreaper):
    """The same call changes nothing, another one changes the job in place."""
    first = pgreaper(cron, shop_db, "cron", "enable", "--json").json
    assert first["change"] == "created"
    again = pgreaper(cron, shop_db, "cron", "enable", "--json").json
    assert (again["change"], again["job"]["job_id"]) == ("unchanged", first["job"]["job_id"])
    other = pgreaper(cron, shop_db, "cron", "enable", "--schedule", "*/5 * * * *", "--max-seconds", "50", "--json").json
    assert (other["change"], other["job"]["job_id"]) == ("updated", first["job"]["job_id"])
    assert cron.run(JOB) == [
        (first["job"]["job_id"], *sweep(shop_db, "call pgreaper.reaper_sweep(max_seconds => 50)", "*/5 * * * *"))
    ]


def test_each_database_of_a_server_has_its_own(cron, shop_db, pgreaper):
    """pg_cron keeps the jobs of all of them: enabling in one leaves another's alone, and so does disabling all."""
    other = cron.new_database()
    assert pgreaper(cron, shop_db, "cron", "enable").code == 0
    assert pgreaper(cron, other, "cron", "enable").code == 0
    assert [row[1:] for row in cron.run(JOB)] == [sweep(shop_db), sweep(other)]
    assert pgreaper(cron, other, "cron", "disable", "--all").code == 0
    assert [row[1:] for row in cron.run(JOB)] == [sweep(shop_db)]


def test_names_that_pg_cron_would_cut(cron, pgreaper, shop):
    """Before 1.5 it keeps 63 bytes of a name; two policies with a long common beginning stay two jobs."""
    database = cron.new_database()
    with closing(cron.connect(database)) as connection:
        connection.execute("create table t (id int primary key, status text, expires_at timestamptz)")
        for end in "ab":
            connection.execute(
                "select pgreaper.reaper_register(%s, 't', 'expires_at', 'status',"
                " held => array['held'], expired => 'x', owner => 'me')",
                ["p" * 90 + end],
            )
    for end in "ab":
        assert pgreaper(cron, database, "cron", "enable", "--policy", "p" * 90 + end).code == 0
    commands = [row[3] for row in cron.run(JOB)]
    assert commands == [f"call pgreaper.reaper_sweep(policy => '{'p' * 90 + end}')" for end in "ab"]
    assert pgreaper(cron, database, "cron", "disable", "--policy", "p" * 90 + "a").code == 0
    assert [row[3] for row in cron.run(JOB)] == commands[1:]


def test_names_cannot_be_mistaken_for_each_other():
    names = [
        job_name("sweep", "shop", "x"), job_name("sweep", "shop: x"),
        job_name("sweep", "shop"), job_name("prune", "shop"),
        job_name("sweep", "ü" * 40, "x"), job_name("sweep", "ü" * 40, "y"), job_name("sweep", "shop", "a\nb"),
        job_name("sweep", "shop", "a?b"),
    ]  # fmt: skip
    assert len(set(names)) == len(names)
    assert all(len(name.encode()) <= 63 and name.isprintable() for name in names)


def test_a_policy_whose_name_needs_quotes(cron, pgreaper):
    """Goes into the call as a literal, and the call finds it."""
    database, policy = cron.new_database(), """o'hara "x"; \\drop $$ %s"""
    with closing(cron.connect(database)) as connection:
        connection.execute("create table t (id int primary key, status text, expires_at timestamptz)")
        connection.execute("insert into t values (1, 'held', now() - interval '1 hour')")
        connection.execute(
            "select pgreaper.reaper_register(%s, 't', 'expires_at', 'status',"
            " held => array['held'], expired => 'expired', owner => 'me')",
            [policy],
        )
    result = pgreaper(cron, database, "cron", "enable", "--policy", policy, "--batch", "3", "--max-rows", "9",
                      "--schedule", "@reboot")  # fmt: skip
    assert result.code == 0, result.err
    [(_, status, message)] = cron.start_jobs(1)
    assert status == "succeeded", message
    assert cron.run("select status from t", database=database) == [("expired",)]


def test_c083_a_job_that_came_with_a_dump_is_made_right(cron, shop_db, pgreaper):
    """cron.schedule() alone keeps another server's address, another database, and a job switched off."""
    assert pgreaper(cron, shop_db, "cron", "enable").code == 0
    whole = "select nodename, nodeport, database, active from cron.job"
    right = cron.run(whole)
    for change in ("nodeport = 1", "nodename = 'elsewhere'", "database = 'postgres'", "active = false"):
        cron.run(f"update cron.job set {change}")
        done = pgreaper(cron, shop_db, "cron", "enable", "--json").json
        assert done["change"] == "updated", change
        assert cron.run(whole) == right, change
        assert [job["job_id"] for job in [done["job"]]] == [row[0] for row in cron.run(JOB)]


def test_a_superuser_gives_the_job_to_another_role(cron, shop_db, pgreaper):
    """It moves; it is not there twice."""
    cron.run("create role reaper login")
    assert pgreaper(cron, shop_db, "cron", "enable").code == 0
    done = pgreaper(cron, shop_db, "cron", "enable", "--role", "reaper", "--json").json
    assert done["replaced"]
    assert [row[1:] for row in cron.run(JOB)] == [sweep(shop_db, role="reaper")]
    assert [f["code"] for f in done["findings"]] == ["cron-job-rights"], "told before the first run fails"


@pytest.mark.parametrize(
    ("granted", "arguments", "fact"),
    [
        ([], [], "role app may not use schema cron of database postgres"),
        (["usage on schema cron"], [], "role app may not schedule a job in another database than postgres"),
        (["usage on schema cron"], ["log", "--role", "other"], "role app may not schedule a job for role other"),
    ],
)
def test_whoever_may_not_gets_the_statements(cron, shop_db, pgreaper, granted, arguments, fact):
    """They are exact: a superuser runs them, and the job is there for the role that asked."""
    cron.run("create role app login")
    cron.run("create role other login")
    cron.script("grant usage on schema pgreaper to app; grant execute on all routines in schema pgreaper to app;"
                " grant select on all tables in schema pgreaper to app;", shop_db)  # fmt: skip
    for right in granted:
        cron.run(f"grant {right} to app")
    result = pgreaper(cron, shop_db, "cron", "enable", *arguments, role="app")
    assert result.code == 1
    assert result.err.startswith(f"error: {fact}\nhint: A superuser runs the statements above in database postgres")
    assert cron.run(JOB) == []

    same = pgreaper(cron, shop_db, "cron", "enable", *arguments, "--json", role="app")
    assert same.code == same.json["exit_code"] == 1
    assert same.json["error"]["message"] == fact
    assert "\n".join(same.json["statements"]) + "\n" == result.out
    assert pgreaper(cron, shop_db, "cron", "print", *arguments, role="app").out == result.out

    cron.script(result.out)
    [(_, _, _, _, _, role, active)] = cron.run(JOB)
    assert (role, active) == ("other" if arguments else "app", True)


def test_whoever_may_not_is_told_which_right(cron, shop_db, pgreaper):
    """The grants in the hints, one after the other, are enough."""
    cron.run("create role app login")
    cron.script("grant usage on schema pgreaper to app; grant execute on all routines in schema pgreaper to app;"
                " grant select on all tables in schema pgreaper to app;", shop_db)  # fmt: skip
    for _ in range(2):
        result = pgreaper(cron, shop_db, "cron", "enable", role="app")
        assert result.code == 1
        cron.script(result.err.rpartition("grants what is missing: ")[2])
    result = pgreaper(cron, shop_db, "cron", "enable", role="app")
    assert result.code == 0, result.err
    assert [row[1:] for row in cron.run(JOB)] == [sweep(shop_db, role="app")]
    assert pgreaper(cron, shop_db, "cron", "enable", "--json", role="app").json["change"] == "unchanged"
    assert pgreaper(cron, shop_db, "cron", "disable", role="app").code == 0
    assert cron.run(JOB) == []


def test_disable(cron, shop_db, pgreaper):
    """By what it does, by number for those of other people, all of this database; a dry run removes nothing."""
    for what in ("sweep", "prune", "log"):
        assert pgreaper(cron, shop_db, "cron", "enable", what).code == 0
    cron.run("select cron.schedule('select 1', '* * * * *', 'select 1')")
    (hand,) = cron.run("select cron.schedule('by hand', '* * * * *', 'call pgreaper.reaper_sweep(batch => 3)')")[0]
    dry = pgreaper(cron, shop_db, "cron", "disable", "--all", "--dry-run", "--json").json
    assert [job["kind"] for job in dry["removed"]] == ["sweep", "prune", "log"]
    assert len(cron.run(JOB)) == 5
    assert [job["kind"] for job in pgreaper(cron, shop_db, "cron", "disable", "prune", "--json").json["removed"]] == [
        "prune"
    ]
    assert pgreaper(cron, shop_db, "cron", "disable", "--json").json["removed"][0]["kind"] == "sweep"
    nothing = pgreaper(cron, shop_db, "cron", "disable")
    assert (nothing.code, nothing.out) == (0, "there is no such job\n")
    assert pgreaper(cron, shop_db, "cron", "disable", "--job", str(hand)).code == 0
    assert pgreaper(cron, shop_db, "cron", "disable", "--all").code == 0
    assert [row[1] for row in cron.run(JOB)] == ["select 1"]
    (mine,) = [row[0] for row in cron.run(JOB)]
    assert "no such job" in pgreaper(cron, shop_db, "cron", "disable", "--job", str(mine)).out, "it calls no pgreaper"


def test_a_dry_run_says_the_statement(cron, shop_db, pgreaper):
    result = pgreaper(cron, shop_db, "cron", "enable", "--dry-run", "--batch", "50")
    assert result.code == 0
    assert cron.run(JOB) == []
    cron.script(result.out)
    assert [row[1:] for row in cron.run(JOB)] == [sweep(shop_db, "call pgreaper.reaper_sweep(batch => 50)")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--schedule", "* * * *"], "is no schedule: it has 4 fields"),
        (["--schedule", "5/15 * * * *"], "write 5-59/15"),
        (["--schedule", "10 seconds"], "needs pg_cron 1.5, and database postgres has 1.4-1"),
        (["--schedule", "0 0 $ * *"], "needs pg_cron 1.6"),
        (["--policy", "nope"], "there is no policy nope"),
        (["--role", "nobody_there"], "there is no role nobody_there"),
        (["--role", "tired"], "role tired may not log in"),
        (["--batch", "0"], "0 is not a whole number above 0"),
        (["--max-seconds", "-1"], "--max-seconds"),
        (["prune", "--batch", "5"], "are for the sweep"),
        (["expire"], "'expire' is not one of"),
    ],
)
def test_refused(cron, shop_db, pgreaper, arguments, message):
    """Exit code 2, one error line, nothing scheduled; the same for printing."""
    cron.run("create role tired")
    for command in ("enable", "print"):
        result = pgreaper(cron, shop_db, "cron", command, *arguments)
        assert (result.code, result.out) == (2, ""), result
        assert message in result.err.splitlines()[0]
    assert cron.run(JOB) == []


@pytest.fixture
def bare(needs):
    """A server of this test's own whose pg_cron is installed and not loaded."""
    needs("/usr/lib/postgresql/15/lib/pg_cron.so", package="postgresql-15-cron")
    with Cluster(bindir=BINDIR, settings={"fsync": False}) as cluster:
        server = CronServer(cluster, "connections")
        server.run(f"create database {TEMPLATE}")
        install_sql(conninfo=server.url(TEMPLATE))
        yield server


def test_from_nothing(bare, pgreaper):
    """Each step that is missing is told with its statements, which work, one after the other, to a job that runs."""
    database = bare.new_database()
    bare.run("alter system set shared_preload_libraries = 'auto_explain'")
    bare.cluster.restart()
    result = pgreaper(bare, database, "cron", "enable")
    assert result.code == 1
    assert result.err.startswith("error: pg_cron is not loaded")
    preload, restart, head, create, schedule = result.out.splitlines()
    assert preload == "alter system set shared_preload_libraries = 'auto_explain', 'pg_cron';"
    assert restart == "-- Restart the server."
    assert head == "-- In database postgres, as a superuser:"
    assert pgreaper(bare, database, "cron", "status").code == 3
    bare.script(preload)
    bare.cluster.restart()

    result = pgreaper(bare, database, "cron", "enable")
    assert (result.code, result.out.splitlines()) == (1, [head, create, schedule])
    assert "its extension is not in database postgres" in result.err
    bare.script(create.replace(";", " version '1.3';"))

    result = pgreaper(bare, database, "cron", "enable")
    assert (result.code, result.out) == (1, "")
    assert "pg_cron 1.3 is too old" in result.err
    bare.script(result.err.rpartition("then: ")[2])

    bare.script(schedule)
    assert pgreaper(bare, database, "cron", "enable", "--json").json["change"] in ("unchanged", "updated")
    assert [row[1:] for row in bare.run(JOB)] == [sweep(database)]


def test_a_server_without_pg_cron(dsn, db, monkeypatch, capsys):
    """Says so with the way out, whether its files are missing or only not loaded; `doctor` finds no fault."""
    from pgreaper.cli import main
    from pgreaper.cron import findings

    monkeypatch.setenv("DATABASE_URL", dsn)
    there = db.execute("select exists (select from pg_available_extensions where name = 'pg_cron')").fetchone()[0]
    assert main(["cron", "enable"]) == 1
    out, err = capsys.readouterr()
    assert ("pg_cron is not loaded" if there else "pg_cron is not installed on this server") in err
    assert ("apt-get install postgresql-" in out) is not there
    assert "create extension pg_cron;" in out
    assert main(["cron", "disable"]) == 1
    assert findings(db) == []


def test_pg_cron_in_this_very_database(cron, pgreaper):
    """Then any role that may use schema cron schedules with cron.schedule()."""
    install_sql(conninfo=cron.url())
    try:
        cron.script("create role app login; grant usage on schema cron, pgreaper to app; grant select on all tables in"
                    " schema pgreaper to app; grant execute on all routines in schema pgreaper to app;")  # fmt: skip
        result = pgreaper(cron, "postgres", "cron", "enable", role="app")
        assert result.code == 0, result.err
        assert [row[1:] for row in cron.run(JOB)] == [sweep("postgres", role="app")]
        assert "cron.schedule(" in pgreaper(cron, "postgres", "cron", "enable", "--dry-run", role="app").out
    finally:
        cron.run("drop schema pgreaper cascade")


def test_a_database_that_does_not_have_it(cron, shop_db, pgreaper):
    """`--cron-database` is taken at its word."""
    result = pgreaper(cron, shop_db, "cron", "enable", "--cron-database", "template1")
    assert (result.code, result.err.splitlines()[0]) == (1, "error: pg_cron is not in database template1")
    assert pgreaper(cron, shop_db, "cron", "enable", "--cron-database", "nowhere").code == 75
    assert pgreaper(cron, shop_db, "cron", "enable", "--cron-database", "postgres").code == 0


def test_the_extension_where_nobody_looks(bare, pgreaper):
    """The scheduler reads the database that cron.database_name names, whatever is in others."""
    database = bare.new_database()
    install_sql(conninfo=bare.url())
    bare.run("alter system set shared_preload_libraries = 'pg_cron'")
    bare.cluster.restart()
    bare.run("create extension pg_cron")
    assert pgreaper(bare, "postgres", "cron", "enable").code == 0
    bare.run(f"alter system set cron.database_name = '{database}'")
    bare.cluster.restart()
    for place in ("postgres", database):
        result = pgreaper(bare, place, "cron", "status", "--json")
        assert result.code == 3
        assert result.json["pg_cron"]["reason"] == (
            f"pg_cron is loaded, but its extension is not in database {database}"
        )


@pytest.mark.parametrize(
    ("version", "expected"), [("1.4-1", (1, 4)), ("1.6", (1, 6)), ("1.10", (1, 10)), ("2", (2, 0))]
)
def test_versions_are_numbers(version, expected):
    assert release(version) == expected


def test_what_pg_cron_refuses_is_told_in_its_words(cron, shop_db, pgreaper):
    """Here: an extension that says 1.6 over a library of 1.4, which does not know seconds."""
    cron.run("update pg_extension set extversion = '1.6' where extname = 'pg_cron'")
    try:
        result = pgreaper(cron, shop_db, "cron", "enable", "--schedule", "10 seconds")
    finally:
        cron.run("update pg_extension set extversion = '1.4-1' where extname = 'pg_cron'")
    assert result.code == 1
    assert result.err == f"error: pg_cron does not take job pgreaper sweep {shop_db}: invalid schedule: 10 seconds\n"
    assert cron.run(JOB) == []

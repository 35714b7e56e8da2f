"""`pgreaper check`: one line and an exit code, from the data alone; each limit is crossed by one."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.cli.conftest import Result
    from tests.conftest import Holds

    Check = Callable[..., Result]


@pytest.fixture
def check(in_process: Callable[..., Result]) -> Check:
    """A function that runs the command twice, with and without --json, and finds one line and the same verdict."""

    def check(*arguments: str) -> Result:
        for _ in range(3):  # a second may lie between the two, and an hour be full in it
            result, machine = in_process("check", *arguments), in_process("check", *arguments, "--json")
            lines = [re.sub(r"\d+ s\b", "N s", line) for line in (machine.json["line"] + "\n", result.out)]
            if lines[0] == lines[1]:
                break
        assert result.err == ""
        assert len(result.out.splitlines()) == 1
        assert (machine.code, machine.json["exit_code"], lines[0]) == (result.code, result.code, lines[1])
        assert machine.json["ok"] == (result.code == 0)
        assert (result.code == 0) == result.out.startswith("well: ")
        return result

    return check


def test_all_is_well(check, holds):
    """What waited longest is told all the same."""
    holds.register()
    assert check().out == "well: 1 policy, nothing waits\n"
    holds.due(2, overdue="30 seconds")
    result = check()
    assert result.code == 0
    assert re.fullmatch(r"well: 1 policy, holds has waited longest, (29|3\d) s\n", result.out)


def test_c081_the_objective_is_the_limit(check, holds, set_clock):
    """Crossed by a microsecond, without any worker: each policy by its own."""
    holds.connection.execute("insert into holds (expires_at) values ('2040-01-01 00:00Z')")
    holds.register(objective="5 minutes", owner="box-office")
    holds.register("patient", objective="1 hour")
    set_clock("2040-01-01 00:05Z")
    assert check().code == 0
    set_clock("2040-01-01 00:05:00.000001Z")
    result = check()
    assert result.code == 3
    assert result.out == (
        "not well: holds is late: the oldest hold waits for 5 min, allowed is 5 min (owner: box-office)\n"
    )
    assert check("patient").code == 0


def test_c081_another_limit_than_the_objective(check, holds, set_clock):
    """As Postgres writes intervals; for all policies."""
    holds.connection.execute("insert into holds (expires_at) values ('2040-01-01 00:00Z')")
    holds.register()
    set_clock("2040-01-01 00:10Z")
    assert check().code == 3
    assert check("--max-lateness", "10 min").code == 0
    assert check("--max-lateness", "600").code == 0
    assert check("--max-lateness", "599.999999s").code == 3
    assert check("--max-lateness", "0").code == 3


def test_c081_what_a_killed_worker_had(check, db, holds, set_clock):
    """Leased by somebody who is gone: nothing is free, nobody is there, and the probe tells."""
    holds.due(3, overdue="10 seconds")
    holds.register(objective="2 minutes")
    db.execute("select pgreaper.reaper_claim('holds', 3, 'w')")
    assert check().code == 0
    set_clock(timedelta(minutes=3))
    result = check()
    assert result.code == 3
    assert re.match(
        r"not well: holds is late: a hold that a worker left behind waits for 3 min \d+ s, allowed", result.out
    )


def test_c081_a_retry_that_nobody_makes(check, db, holds, set_clock):
    """All that is due has failed once; then the workers are gone."""
    holds.due(1, overdue="10 seconds")
    holds.register()
    db.execute(
        "select pgreaper.reaper_fail(c.token, c.key, 'TimeoutError', true, '1 minute')"
        " from pgreaper.reaper_claim('holds', 1, 'w') as c"
    )
    db.execute("select pgreaper.reaper_expire(token) from pgreaper.claims")
    assert check().code == 0
    set_clock(timedelta(minutes=4))
    result = check()
    assert result.code == 3
    assert "holds is late: a retry waits for 3 min" in result.out


def dead(db: psycopg.Connection[Any], holds: Holds, n: int) -> None:
    """So many dead letters."""
    holds.due(n, overdue="10 seconds")
    holds.register()
    db.execute(
        "select pgreaper.reaper_fail(c.token, c.key, 'X', false) from pgreaper.reaper_claim('holds', 9999, 'w') as c"
    )
    db.execute("select pgreaper.reaper_expire(token) from pgreaper.claims where finished_at is null")


def test_dead_letters(check, db, holds):
    """Judged only where a limit is given; crossed by one."""
    dead(db, holds, 3)
    assert check().out == "well: 1 policy, nothing waits, 3 dead letters\n"
    assert check("--max-dead", "3").code == 0
    result = check("--max-dead", "2")
    assert (result.code, result.out) == (3, "not well: holds has 3 dead letters, allowed are 2 (owner: tests)\n")
    assert check("--max-dead", "0").code == 3


def test_the_backlog(check, holds):
    """Free due holds; crossed by one, also where counting stops."""
    holds.due(4, overdue="30 seconds")
    holds.register()
    assert check("--max-backlog", "4").code == 0
    result = check("--max-backlog", "3")
    assert (result.code, result.out) == (3, "not well: holds has 4 due holds, allowed are 3 (owner: tests)\n")
    holds.connection.execute(
        "insert into holds (expires_at) select clock_timestamp() - interval '10 s' from generate_series(1, 9996)"
    )
    assert check("--max-backlog", "10000").code == 0
    holds.connection.execute("insert into holds (expires_at) values (clock_timestamp() - interval '10 s')")
    result = check("--max-backlog", "10000")
    assert (result.code, result.out) == (
        3,
        "not well: holds has 10,000+ due holds, allowed are 10,000 (owner: tests)\n",
    )


def test_the_worst_policy_is_named(check, in_process, db, holds):
    """By how many times its limit it is over; the others are counted, a policy once."""
    db.execute("create table others (like holds including all)")
    holds.due(5, overdue="2 minutes")
    db.execute("insert into others (expires_at) select now() - interval '1 hour' from generate_series(1, 3)")
    holds.register()
    holds.register("others", target="others", owner="them")
    holds.register("well", target="others", objective="1 day")
    result = check("--max-backlog", "4")
    assert re.fullmatch(
        r"not well: others is late: the oldest hold waits for 1 h, allowed is 1 min \(owner: them\);"
        r" 1 other policy not well\n",
        result.out,
    )
    findings = in_process("check", "--max-backlog", "4", "--json").json["findings"]
    assert [(f["policy"], f["kind"]) for f in findings] == [("others", "late"), ("holds", "late"), ("holds", "backlog")]
    assert findings[0]["max_lateness_seconds"] == 60
    assert (findings[2]["holds"], findings[2]["max_holds"]) == (5, 4)
    assert check("well", "--max-backlog", "4").code == 0


def test_what_cannot_be_judged_is_not_well(check, db, holds):
    """A missing target is worse than any number."""
    db.execute("create table others (like holds including all)")
    holds.due(1)
    holds.register()
    holds.register("others", target="others")
    db.execute("drop table others")
    result = check()
    assert (result.code, "not well: others cannot be judged: public.others, the target of policy" in result.out) == (
        3,
        True,
    )


def test_a_paused_policy_is_judged_and_named(check, db, holds):
    """A pause that somebody forgot makes holds late."""
    holds.due(1)
    holds.register()
    db.execute("select pgreaper.reaper_pause('holds', 'stock-taking')")
    result = check()
    assert (result.code, result.out.endswith("(owner: tests, paused)\n")) == (3, True)


def test_a_suspended_policy_is_named_so(check, db, holds):
    db.execute("alter table holds add constraint never check (status <> 'expired')")
    holds.due(20)
    holds.register()
    with pytest.raises(psycopg.Error):
        db.execute("call pgreaper.reaper_sweep('holds')")
    result = check()
    assert (result.code, result.out.endswith("(owner: tests, suspended)\n")) == (3, True)


def test_no_policy_is_not_well(check, in_process):
    """A probe on the wrong database must not stay green."""
    assert (check().code, check().out) == (3, "not well: no policy is registered in this database\n")
    result = in_process("check", "holds")
    assert (result.code, result.err.splitlines()[0]) == (2, "error: there is no policy holds")


def test_a_name_cannot_forge_a_line(check, holds):
    holds.due(1)
    holds.register("x\nwell: all", owner="\x1b[31m")
    result = check()
    assert result.out.startswith("not well: x\\nwell: all is late")
    assert "\x1b" not in result.out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--max-dead", "-1"], "0<=x<=9999"),
        (["--max-dead", "10000"], "0<=x<=9999"),  # counting stops there: it could not be told
        (["--max-backlog", "10001"], "0<=x<=10000"),
        (["--max-lateness=-1s"], "the lateness cannot be negative"),
        (["--max-lateness", "soon"], "not of the type"),
    ],
)
def test_nonsense_is_refused(in_process, arguments, told):
    result = in_process("check", *arguments)
    assert (result.code, result.out) == (2, "")
    assert told in result.err


def test_c113_the_fields_are_a_contract(in_process, holds):
    holds.due(1)
    holds.register()
    document = in_process("check", "--json").json
    (finding,) = document["findings"]
    assert set(document) == set("schema_version command ok line policies judged findings exit_code".split())
    assert set(finding) == set(
        "policy owner kind state reason relay waited_for lateness_seconds max_lateness_seconds holds max_holds"
        " capped".split()
    )


def test_it_needs_a_reader_and_no_more(db, holds, in_process, server):
    """A probe has a role of its own, which may look and nothing else."""
    holds.due(1)
    holds.register()
    role = f"pgreaper_probe_{db.info.dbname}"
    db.execute(f"create role {role} login")
    try:
        db.execute("select pgreaper.reaper_grant(%s, 'reader')", [role])
        url = server.url(db.info.dbname) + f"&options=-c%20role%3D{role}"
        for command in ("check", "status"):
            result = in_process(command, "--database-url", url)
            assert (result.code, result.err) == (3 if command == "check" else 0, "")
            assert "cannot be" not in result.out
    finally:
        db.execute(f"drop owned by {role}; drop role {role}")

"""The commands as people and scripts use them."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys

import pytest

from tests.cli.conftest import PGREAPER, environment

OVERDUE = ["--deadline", "expires_at", "--status", "status", "--held", "held", "--expired", "expired", "--owner", "me"]


def test_without_arguments_it_helps(pgreaper):
    """The commands by section, exit 0; the same as --help."""
    bare, asked = pgreaper(), pgreaper("--help")
    assert (bare.code, bare.out, bare.err) == (0, asked.out, "")
    assert bare.out.index("Try it:") < bare.out.index("demo ") < bare.out.index("Run:") < bare.out.index("work ")
    assert pgreaper("--version").out.startswith("pgreaper ")


def test_from_table_to_history(pgreaper, holds):
    """Register, preview, work, status, history: what a newcomer types."""
    due, ahead = holds.due(12), holds.ahead(3)

    result = pgreaper("register", "bookings", "holds", *OVERDUE)
    assert (result.code, result.err) == (0, "")
    assert "policy bookings is registered on public.holds" in result.out
    assert "index: holds_due serves" in result.out
    assert pgreaper("register", "bookings", "holds", *OVERDUE).out.startswith("policy bookings: nothing to change")

    assert "12, the oldest since" in pgreaper("preview", "bookings").out
    result = pgreaper("work")
    assert re.fullmatch(r"bookings: 12 expired in [\d.]+ m?s\n", result.out)
    assert (result.code, result.err) == (0, "")
    result = pgreaper("work")
    assert (result.code, result.out, result.err) == (0, "", "")  # cron mails whatever is printed

    history = pgreaper("history", "bookings", str(due[0])).out
    assert "expired" in history
    assert "pgreaper/" in history
    assert "nothing is recorded" in pgreaper("history", "bookings", str(ahead[0])).out
    assert re.search(r"bookings +on time +0 .*█", pgreaper("status", LANG="C.UTF-8").out)
    assert "me" in pgreaper("policies").out


def test_pause_and_resume(in_process, holds):
    holds.due(1)
    holds.register()
    assert in_process("pause", "holds", "--reason", "stock-taking").out == "policy holds: paused\n"
    assert in_process("pause", "holds", "--json").json["changed"] is False
    assert in_process("work").code == 0
    assert holds.states() == {1: "held"}
    assert "by postgres: stock-taking\n" in in_process("status").out
    assert in_process("resume", "holds").out == "policy holds: goes on\n"
    in_process("work")
    assert holds.states() == {1: "expired"}
    assert in_process("unregister", "holds").code == 0
    assert in_process("policies").out.startswith("No policy is registered yet")


def test_a_dry_run_stores_nothing(in_process, db, holds):
    result = in_process("register", "bookings", "holds", *OVERDUE, "--dry-run")
    assert result.code == 0
    assert "would be registered" in result.out
    assert "index: holds_due serves" in result.out
    assert db.execute("select count(*) from pgreaper.policies").fetchone() == (0,)
    assert db.execute("select count(*) from pgreaper.events").fetchone() == (0,)


@pytest.mark.parametrize(
    ("index", "serves"),
    [
        (None, False),
        ("(expires_at)", True),
        ("(expires_at, id) where status in ('held', 'consumed')", True),
        ("(status, expires_at)", True),  # with one held state this is an order by the deadline, too
        ("(customer_email, expires_at)", False),
        ("(expires_at) where status = 'consumed'", False),
        ("using hash (expires_at)", False),
    ],
)
def test_which_index_serves(in_process, db, holds, index, serves):
    """The planner's word decides; the statement that is printed makes it serve, and is never run for you."""
    db.execute("drop index holds_due")
    if index:
        db.execute(f"create index mine on holds {index}")
    result = in_process("register", "holds", "holds", *OVERDUE)
    if serves:
        assert "index: mine serves" in result.out
        return
    statement = "create index concurrently on public.holds (expires_at) where status = 'held';"
    assert statement in result.out.splitlines()[-1]
    assert db.execute("select count(*) from pg_index where indrelid = 'holds'::regclass").fetchone() == (
        1 + bool(index),
    )
    db.execute(statement)
    assert "holds_expires_at_idx serves" in in_process("register", "holds", "holds", *OVERDUE).out


def test_which_index_serves_a_partitioned_table_and_a_view(in_process, db):
    """Per partition, then the parent, so that nothing is locked for long; for a view, its table's."""
    db.execute("""
        create table parts (id bigint, status text, expires_at timestamptz not null, primary key (id, expires_at))
          partition by range (expires_at);
        create table parts_old partition of parts for values from (minvalue) to ('2026-01-01');
        create table parts_new partition of parts for values from ('2026-01-01') to (maxvalue);
        create table plain (id bigint primary key, status text, expires_at timestamptz, paid boolean);
        create view unpaid as select id, status, expires_at from plain where not paid;
    """)
    result = in_process("register", "parts", "parts", *OVERDUE, "--json").json
    assert [s.split(" (")[0] for s in result["index"]["create"]] == [
        "create index concurrently on parts_old",
        "create index concurrently on parts_new",
        "create index on public.parts",
    ]
    for statement in result["index"]["create"]:
        db.execute(statement)
    assert in_process("register", "parts", "parts", *OVERDUE, "--json").json["index"]["serving"]

    result = in_process("register", "unpaid", "unpaid", *OVERDUE, "--json").json
    (statement,) = result["index"]["create"]
    assert statement.startswith("create index concurrently on plain (expires_at)")
    db.execute(statement)
    assert in_process("register", "unpaid", "unpaid", *OVERDUE, "--json").json["index"]["serving"]


def test_set_constants(in_process, db, holds):
    """null is NULL, 'null' the word, and the rest what it says."""
    holds.due(1)
    in_process("register", "holds", "holds", *OVERDUE, "--set", "customer_email=null")
    in_process("work")
    assert db.execute("select customer_email from holds").fetchone() == (None,)
    for given, stored in (("'null'", "null"), ("a=b", "a=b"), ("", "")):
        result = in_process("register", "holds", "holds", *OVERDUE, "--set", f"customer_email={given}")
        assert result.code == 0
        assert db.execute("select set_values from pgreaper.policies").fetchone() == ({"customer_email": stored},)


def test_c048_hostile_names(in_process, db):
    """Quotes, percent signs, another alphabet, a reserved word, an injection: names round-trip unchanged."""
    db.execute("""
        create schema "Tenant-B";
        create table "Tenant-B"."Hold""s; DROP TABLE x;--" (
          "select" int primary key, "stat%s" text, "Expires At" timestamptz, "żółć%I" timestamptz);
        create table x ();
        insert into "Tenant-B"."Hold""s; DROP TABLE x;--" values (1, '%s', now() - interval '1 hour');
    """)
    target = '"Tenant-B"."Hold""s; DROP TABLE x;--"'
    name = "p'; drop table x;-- %s ż"
    result = in_process(
        "register", name, target, "--deadline", "Expires At", "--status", "stat%s", "--held", "%s", "--expired", "E'x",
        "--stamp", "żółć%I", "--owner", "me", "--json",
    )  # fmt: skip
    assert (result.code, result.json["target"], result.json["policy"]) == (0, target, name)
    (statement,) = result.json["index"]["create"]
    db.execute(statement.encode())
    assert in_process("work", name).code == 0
    assert db.execute(f'select "stat%s", "żółć%I" is not null from {target}'.encode()).fetchone() == ("E'x", True)
    (status,) = in_process("status", name, "--json").json["policies"]
    assert (status["policy"], status["target"], status["expired"]) == (name, target, 1)
    assert in_process("history", name, "1", "--json").json["entries"][0]["state"] == "E'x"
    assert db.execute("select to_regclass('x') is not null").fetchone() == (True,)


@pytest.mark.parametrize("key", ["", "a\nERROR fake", "x'); drop table holds;--", "żółć%I%s", "-7", "k" * 100_000])
def test_c050_hostile_keys(in_process, db, key):
    """They expire once; text shows each on one line, JSON as it is."""
    db.execute("create table t (id text primary key, status text, expires_at timestamptz)")
    db.execute("insert into t values (%s, 'held', now() - interval '1 hour')", [key])
    in_process("register", "t", "t", *OVERDUE)
    result = in_process("work", "--json")
    assert result.json["outcomes"]["expired"] == 1
    assert result.err == ""

    entries = in_process("history", "t", key, "--json").json["entries"]
    assert [(e["key"], e["outcome"]) for e in entries] == [(key, "expired")]
    shown = in_process("history", "t", key)
    assert shown.code == 0
    assert len(shown.out.splitlines()) == 2
    missing = in_process("history", "t", key + "\x1b[2J\n!")
    assert len(missing.out.splitlines()) == 1
    assert len(missing.out) < 200
    assert "\x1b" not in missing.out


@pytest.mark.parametrize(
    ("type_", "value", "key"),
    [
        ("bigint", "9007199254740993", "9007199254740993"),
        ("uuid", "0f8fad5b-d9cb-469f-a165-70867728950e", "0f8fad5b-d9cb-469f-a165-70867728950e"),
        ("numeric", "10.50", "10.5"),
        ("bytea", r"\x00ff", r"\x00ff"),
        ("timestamptz", "2026-01-02 03:04:05+01", "2026-01-02T02:04:05"),
    ],
)
def test_c113_json_for_machines(in_process, db, type_, value, key):
    """One document on stdout, keys are strings, no NaN, diagnostics elsewhere: also when a hold fails."""
    db.execute(
        f"create table t (id {type_} primary key, status text, expires_at timestamptz, check (status <> 'expired'))"
    )
    db.execute("insert into t values (%s, 'held', '-infinity')", [value])
    in_process("register", "t", "t", *OVERDUE)

    failed = in_process("work", "--json")
    assert failed.code == failed.json["exit_code"] == 1
    (reason,) = failed.json["policies"][0]["failed"]
    assert (reason["sqlstate"], reason["constraint"], reason["holds"]) == ("23514", "t_status_check", 1)
    assert failed.err.startswith("pgreaper: policy t: 1 hold failed")
    (entry,) = in_process("history", "t", key, "--json").json["entries"]
    assert (entry["key"], entry["outcome"], entry["constraint_name"]) == (key, "dead-letter", "t_status_check")
    for command in (["status"], ["policies"], ["preview", "t"], ["pause", "t"], ["resume", "t"], ["unregister", "t"]):
        result = in_process(*command, "--json")
        assert (result.code, result.err, result.json["schema_version"]) == (0, "", 1)
        assert result.json["command"] == command[0]


def test_status_names_units(in_process, holds):
    """Field names are a contract: seconds are called seconds."""
    holds.due(1)
    holds.register()
    (status,) = in_process("status", "--json").json["policies"]
    assert 3500 < status["oldest_due_seconds"] < 3700
    assert status["objective_seconds"] == 60
    assert status["oldest_deadline"].endswith("Z")
    assert status["lateness_p50_seconds"] is None
    assert status["due_capped"] is False


def test_watch_json_is_a_document_a_line(start, holds):
    holds.register()
    watching = start("status", "--watch", "--json", "--interval", "0.05")
    lines = [json.loads(watching.popen.stdout.readline()) for _ in range(3)]
    assert [line["policies"][0]["policy"] for line in lines] == ["holds"] * 3


def test_a_reader_that_leaves(dsn, holds):
    """`pgreaper policies | head -1`: no complaint."""
    holds.register()
    done = subprocess.run(
        f"{sys.executable} -m pgreaper status --watch --interval 0.01 --json | head -n 1",
        shell=True, env=environment(dsn), capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.stderr == ""
    assert json.loads(done.stdout)["command"] == "status"


def on_terminal(dsn: str, *arguments: str, **variables: str) -> str:
    """What a command shows on a terminal of 80 columns."""
    main, side = pty.openpty()
    popen = subprocess.Popen(
        [*PGREAPER, *arguments], env=environment(dsn, TERM="xterm-256color", COLUMNS="80", **variables),
        stdin=side, stdout=side, stderr=side, close_fds=True,
    )  # fmt: skip
    os.close(side)
    shown = b""
    while True:
        try:
            data = os.read(main, 65536)
        except OSError:
            break
        if not data:
            break
        shown += data
    popen.wait(30)
    os.close(main)
    return shown.decode()


def test_colour_only_where_it_is_wanted(dsn, holds, pgreaper):
    """On a terminal, unless NO_COLOR is set; never in a pipe."""
    holds.register()
    assert "\x1b[" in on_terminal(dsn, "status")
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", on_terminal(dsn, "status", NO_COLOR="1"))
    assert "\x1b" not in pgreaper("status").out


def test_no_line_is_wider_than_the_terminal(dsn, holds):
    """Columns are left out rather than broken."""
    holds.due(3)
    holds.register("a-policy-with-quite-a-long-name")
    for command in (["status"], ["policies"], ["history", "a-policy-with-quite-a-long-name", "1"]):
        for line in on_terminal(dsn, *command, NO_COLOR="1").splitlines():
            assert len(re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line)) <= 80


def test_progress_on_a_long_drain(dsn, db, holds):
    """On a terminal: how many, how fast, how many are left, how long it takes; then one line that stays."""
    holds.due(400)
    holds.register(batch=5)
    db.execute("""
        create function slow() returns trigger language plpgsql as $$ begin perform pg_sleep(0.005); return new; end $$;
        create trigger slow before update on holds for each row execute function slow();
    """)
    shown = on_terminal(dsn, "work")
    assert re.search(r"\d+ expired  \d+/s  about \d+ left  ready in \d+ s", shown)
    assert re.search(r"holds: 400 expired in [\d.]+ s\s*$", shown)

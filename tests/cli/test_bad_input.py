"""
Bad input: one line that names the thing, a remedy, the exit code of the contract, nothing half-registered.

No case may show a traceback, and none may print to stdout.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

OVERDUE = ["--deadline", "expires_at", "--status", "status", "--held", "held", "--expired", "expired", "--owner", "me"]
REGISTER = ["register", "p", "holds", *OVERDUE]


def change(*changes: str) -> list[str]:
    """The good registration with some options changed."""
    arguments = list(REGISTER)
    for name, value in zip(changes[::2], changes[1::2], strict=True):
        if name == "TABLE":
            arguments[2] = value
        elif name in arguments:
            arguments[arguments.index(name) + 1] = value
        else:
            arguments += [name, value]
    return arguments


@pytest.fixture
def shop(db: Any, holds: Any) -> None:
    """Tables that a registration trips over."""
    db.execute("""
        create type mood as enum ('held', 'sad');
        create table "PaymentRequests" ("Id" text primary key, "Status" text, "Expiry" timestamptz);
        create schema shop;
        create table shop.orders (like holds including all);
        create table enums (id int primary key, status mood, expires_at timestamptz);
        create table numbers (id int primary key, status smallint, expires_at timestamptz);
        create table zoneless (id int primary key, status text, expires_at timestamp);
        create table generated (id int primary key, s text, expires_at timestamptz,
                                status text generated always as (upper(s)) stored);
        create table keyless (id int, status text, expires_at timestamptz);
        create table nullable_key (id int unique, status text, expires_at timestamptz);
        create materialized view matview as select * from holds;
        create view joined as select h.* from holds as h join numbers as n on n.id = h.id;
    """)


CASES = [
    (change("TABLE", "hold"), "there is no table hold", "Did you mean public.holds?"),
    (change("TABLE", "orders"), "there is no table orders", "Did you mean shop.orders?"),
    (
        change("TABLE", "PaymentRequests"),
        "there is no table PaymentRequests",
        r"""Did you mean '"PaymentRequests"'.*quotes""",
    ),
    (change("TABLE", "a.b.c.d"), "not the name of a table", "schema.table"),
    (change("TABLE", ""), "not the name of a table", "schema.table"),
    (change("--deadline", "expires"), "holds has no column expires", "expires_at"),
    (change("--status", "Status"), 'has no column "Status"', "status"),
    (change("--deadline", "status"), "has type text", "timestamp"),
    (
        change("TABLE", "enums"),
        "column public.enums.status of type public.mood does not take the value 'expired'",
        "'held', 'sad'",
    ),
    (change("TABLE", "numbers"), "numbers.status.* does not take the value 'held'", None),
    (change("TABLE", "zoneless"), "zoneless.expires_at .*no time zone", "--zone UTC"),
    (change("TABLE", "zoneless", "--zone", "Mars/Base"), "no time zone 'Mars/Base'", None),
    (change("TABLE", "generated"), "generated.status is generated", None),
    (change("TABLE", "keyless"), "keyless has no primary key", "key"),
    (change("TABLE", "nullable_key", "--key", "id"), r"\(id\) do not identify a row", "NOT NULL"),
    (change("--key", "nope"), "nope", None),
    (change("TABLE", "matview"), "matview is a materialized view", "table behind"),
    (change("TABLE", "joined"), "view public.joined cannot be updated", "join"),
    (change("--expired", "held"), "both held and expired", None),
    (change("--owner", " "), "needs an owner", None),
    (change("--stamp", "nope"), "has no column nope", None),
    (change("--set", "status"), "--set status is not COLUMN=VALUE", "--set"),
    (change("--set", "nope=1"), "has no column nope", None),
    (change("--payload", "nope"), "nope", None),
    (change("--grace", "a while"), "--grace a while is not an interval", "5 min"),
    (change("--objective", "1 parsec"), "--objective 1 parsec is not an interval", "5 min"),
    (change("--lease", "2 days"), "lease must be between", None),
    (change("--batch", "0"), "0 is not a whole number above 0 and at most 10,000", "--help"),
    (change("--batch", "many"), "many is not a whole number", "--help"),
    (change("--batch", "99999999999999"), "99999999999999", None),
    (change("--rate-limit", "nan"), "rate_limit", None),
    (REGISTER[:-2], "missing option '--owner'", "--help"),
    (["register", "x" * 201, *REGISTER[2:]], "name of 1 to 200 characters", None),
    (["work", "nope"], "there is no policy nope", "register"),
    (["work", "--batch", "0"], "--batch.*0 is not a whole number above 0 and at most 10,000", "--help"),
    (["work", "--max-seconds", "nan"], "--max-seconds", "--help"),
    (["work", "--max-rows", "-1"], "--max-rows", "--help"),
    (["work", "--once", "--daemon"], "exclude each other", "--help"),
    (["preview", "nope"], "there is no policy nope", None),
    (["status", "nope"], "there is no policy nope", None),
    (["pause", "nope"], "there is no policy nope", None),
    (["resume", "no\npe"], r"there is no policy no\\npe", None),
    (["unregister", "nope"], "there is no policy nope", None),
    (["history", "nope", "1"], "there is no policy nope", None),
    (["history", "nope"], "missing argument 'KEY'", "--help"),
    (["stauts"], "no command 'stauts'", "pgreaper status"),
    (["status", "--jsno"], "no such option", "--help"),
]


def described(case: tuple[list[str], str, str | None]) -> str:
    """What is wrong in this case: the number, the command, and what the message says."""
    words = re.sub(r"[^a-zA-Z0-9_-]+", "-", case[1]).strip("-").lower()
    return f"{case[0][0]}-{words[:40]}-{CASES.index(case)}"


@pytest.mark.parametrize(("arguments", "message", "hint"), CASES, ids=map(described, CASES))
def test_refused(in_process, shop, db, arguments, message, hint):
    result = in_process(*arguments)

    assert result.code == 2, result.err
    assert result.out == ""
    first, *rest = result.err.splitlines()
    assert re.search(message, first), result.err
    assert first.startswith("error: ")
    assert len(rest) <= 1
    assert all(line.startswith("hint: ") for line in rest)
    if hint is not None:
        assert re.search(hint, rest[0]), result.err
    assert db.execute("select count(*) from pgreaper.policies").fetchone() == (0,)


def test_the_same_in_json(pgreaper, holds):
    """The document tells it too, the exit code is the same."""
    result = pgreaper("status", "nope", "--json")
    assert result.code == result.json["exit_code"] == 2
    assert result.json["error"]["code"] == "unknown-policy"
    assert result.json["error"]["sqlstate"] == "RP002"
    assert result.json["schema_version"] == 1


@pytest.mark.parametrize(
    "command", [["work"], ["status"], ["policies"], ["pause", "p"], ["preview", "p"], ["history", "p", "1"]]
)
def test_not_installed(pgreaper, empty_dsn, command):
    result = pgreaper(*command, url=empty_dsn)
    assert result.code == 1
    assert re.fullmatch(
        r"error: pgreaper is not installed in database pgreaper_empty_\w+\nhint: Run `pgreaper install`.*\n", result.err
    )


@pytest.mark.parametrize("command", [["work"], ["status"], ["pause", "p"]])
def test_another_version(pgreaper, db, command):
    db.execute("create or replace function pgreaper.reaper_version() returns text language sql as $$ select '7.7' $$")
    result = pgreaper(*command)
    assert result.code == 75
    assert re.fullmatch(
        r"error: the database has schema version 7\.7 .*\nhint: .*use a pgreaper that fits.*\n", result.err
    )


@pytest.mark.parametrize("command", [["work"], ["status"], ["policies", "--json"], ["register", "p", "t", *OVERDUE]])
def test_database_down(pgreaper, command):
    result = pgreaper(*command, url="postgresql://u:s3cret@127.0.0.1:1/d")
    assert result.code == 75
    assert result.err.startswith("error: the database cannot be reached: ")
    assert result.err.endswith("hint: The address came from DATABASE_URL.\n")
    assert "s3cret" not in result.err + result.out


def test_read_only(pgreaper, db, holds):
    """Writing commands are refused for now; looking is allowed."""
    holds.register()
    db.execute(f"alter database {db.info.dbname} set default_transaction_read_only = on")
    for command in (["work"], ["pause", "holds"], REGISTER):
        result = pgreaper(*command)
        assert result.code == 75
        assert "read-only" in result.err
    for command in (["status"], ["policies"], ["preview", "holds"], ["history", "holds", "1"]):
        assert pgreaper(*command).code == 0


def test_no_right_to_update(pgreaper, db, holds, dsn):
    """Registering needs the owner; the message names the role and the table."""
    db.execute("""
        create role pgreaper_clerk login;
        grant usage on schema pgreaper to pgreaper_clerk;
        grant execute on all routines in schema pgreaper to pgreaper_clerk;
        grant all on all tables in schema pgreaper to pgreaper_clerk;
        grant select on holds to pgreaper_clerk;
    """)
    try:
        result = pgreaper(*REGISTER, url=re.sub(r"//[^@]*@", "//pgreaper_clerk@", dsn))
        assert result.code == 2
        assert "pgreaper_clerk" in result.err
        assert "holds" in result.err
    finally:
        db.execute("drop owned by pgreaper_clerk")
        db.execute("drop role pgreaper_clerk")


def test_no_traceback_unless_asked_for(pgreaper, db, holds):
    """An error that nobody foresaw is one line; --debug shows where."""
    db.execute("alter table pgreaper.policies rename column owner to possessor")
    short, long = pgreaper("policies"), pgreaper("policies", "--debug")
    assert short.code == long.code == 75
    assert "Traceback" not in short.err
    assert len(short.err.splitlines()) == 2
    assert "Traceback" in long.err
    assert long.err.endswith(short.err)
    assert "Traceback" in pgreaper("policies", PGREAPER_DEBUG="1").err

"""``pgreaper discover``: what is found and what left alone, commands to paste, and that nothing is changed."""

from __future__ import annotations

import re
import subprocess
import time

import psycopg
import pytest
from psycopg import sql

from pgreaper import commands
from pgreaper.discover import discover

BOOKINGS = """
create table bookings (id bigint generated always as identity primary key, status text not null default 'held',
                       hold_until timestamptz not null, customer_email text);
insert into bookings (status, hold_until, customer_email)
select case when g % 4 = 0 then 'consumed' else 'held' end, now() - interval '2 days' + g * interval '12 hours',
       'secret' || g || '@example.com' from generate_series(1, 8) as g;
"""


def by_table(result):
    return {c["table"]: c for c in result.json["candidates"]}


def test_it_needs_no_installation_and_tells_how_overdue(run, empty_dsn):
    """The first thing that somebody runs, before pgreaper is installed."""
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        connection.execute(BOOKINGS)
    result = run("discover", "--json", url=empty_dsn)
    assert result.code == 0
    [found] = result.json["candidates"]
    assert found["table"] == "public.bookings"
    assert (found["held"], found["expired"]) == (["held"], "expired")
    assert found["overdue"] == 3
    assert 35 * 3600 < found["oldest_overdue_seconds"] < 37 * 3600
    assert any("expired" in assumption for assumption in found["assumptions"])
    assert "secret" not in result.out
    assert {s["state"]: (s["overdue"], s["rows"]) for s in found["states"]} == {"held": (3, 6), "consumed": (1, 2)}


def test_text_is_for_people_and_the_command_is_one_line(run, db):
    db.execute(BOOKINGS)
    result = run("discover")
    assert "public.bookings: 3 overdue, the oldest for 1 d 12 h" in result.out
    [command] = [line.strip() for line in result.out.splitlines() if line.strip().startswith("pgreaper register")]
    assert command == run("discover", "--json").json["candidates"][0]["command"]
    assert max(len(line) for line in result.out.splitlines() if command not in line) <= 80
    assert "1 table: 1 looks like holds, 1 of them with overdue rows" in result.out


HOLDS = {
    "status text, expires_at timestamptz": "expired",
    "state varchar(20), deadline timestamp": "expired",
    "order_status text, valid_until date": "expired",
    '"Status" text, "validUntil" timestamptz': "expired",
    "status text check (status in ('held', 'done', 'lapsed')), expires timestamptz": "lapsed",
    "status text default 'held', due_at timestamptz": "expired",
    "status char(8), hold_timeout timestamptz": "expired",
    "phase text, reservation_expiry timestamptz": "expired",
}


def test_names_and_types_that_are_holds(run, db, paste):
    """Each of them is found, and its command registers."""
    for number, columns in enumerate(HOLDS):
        state = next(c.split()[0] for c in columns.split(", ") if re.match(r'"?\w*(status|state|phase)', c, re.I))
        db.execute(f"create table t{number} (id int primary key, {columns})")
        db.execute(f"insert into t{number} (id, {state}) values (1, 'held')")
    found = by_table(run("discover", "--json"))
    assert {t: (c["held"], c["expired"]) for t, c in found.items()} == {
        f"public.t{number}": (["held"], expired) for number, expired in enumerate(HOLDS.values())
    }
    for c in found.values():
        paste({"sql": [], "commands": [c["command"]]})
    assert all(c["policies"] for c in by_table(run("discover", "--json")).values())


def test_the_state_that_the_deadline_is_named_after(run, db):
    """``reserved_until`` is about what is reserved, not about all that waits for something."""
    db.execute(
        "create table t (id int primary key, status text, reserved_until timestamptz);"
        "insert into t values (1, 'reserved', now()), (2, 'pending', now()), (3, 'lapsed', now())"
    )
    found = by_table(run("discover", "--json"))["public.t"]
    assert (found["held"], found["expired"]) == (["reserved"], "lapsed")


NONE = [
    "status text, created_at timestamptz, updated_at timestamptz",  # no deadline
    "expires_at timestamptz, name text",  # no state: a cache, a session
    "status text, expires_at text",  # no moment
    "status text, expiry_reminder_sent_at timestamptz",  # about a deadline, but past
    "status text, expired_at timestamptz",  # a stamp
    "title text, status text, start_date date, end_date date",  # a project: held means nothing
    "state text, card_expiry date",  # fifty states of a country
    "active boolean, end_date date",
    "status jsonb, expires_at timestamptz",
    "expires_at timestamptz, status text generated always as ('held') stored",  # cannot be written
]


def test_what_is_left_alone(run, db):
    """No false alarm for everyday tables."""
    for number, columns in enumerate(NONE):
        db.execute(f"create table t{number} (id int primary key, {columns})")
    db.execute("insert into t5 values (1, 'x', 'open', current_date - 2, current_date - 1)")
    db.execute("insert into t6 select g, 'S' || g, current_date - 1 from generate_series(1, 30) as g")
    result = run("discover", "--json").json
    assert result["tables"] == len(NONE)
    assert result["candidates"] == []


def test_a_stamp_alone_is_enough(run, db, paste):
    """Held means that the stamp is null."""
    db.execute(
        "create table locks (name text primary key, valid_until timestamptz not null, released_at timestamptz);"
        "insert into locks values ('a', now() - interval '1 hour'), ('b', now() + interval '1 hour')"
    )
    found = by_table(run("discover", "--json"))["public.locks"]
    assert (found["status"], found["stamp"], found["overdue"]) == (None, "released_at", 1)
    paste({"sql": [], "commands": [found["command"]]})
    assert db.execute("select stamp_column, status_column from pgreaper.policies").fetchall() == [("released_at", None)]


AWKWARD = ["Über \"Größe\" 'x' $HOME `id`", "-rf", "a\nb\\c", "select", "100%", "schön!"]


def test_awkward_names_survive_the_shell(run, db, paste):
    """Quotes, dashes, line breaks and dollars in names and states: what is printed can be pasted."""
    states = ("on \"hold\" '$x'", "it expired\\")
    for table in AWKWARD:
        db.execute(
            sql.SQL(
                "create schema {s}; create table {t} (k int not null unique, {st} text, {d} timestamptz not null);"
                "insert into {t} values (1, {held}, now() - interval '1 day'), (2, {expired}, now())"
            ).format(
                s=sql.Identifier(f"s {table}"),
                t=sql.Identifier(f"s {table}", table),
                st=sql.Identifier("the Status"),
                d=sql.Identifier("it's valid_until"),
                held=sql.Literal(states[0]),
                expired=sql.Literal(states[1]),
            )
        )
    candidates = run("discover", "--json").json["candidates"]
    text = [line.strip() for line in run("discover").out.splitlines()]
    assert [(c["held"], c["expired"]) for c in candidates] == [([states[0]], states[1])] * len(AWKWARD)
    for c in candidates:
        assert c["command"] in text
        paste({"sql": [], "commands": [c["command"]]})
    rows = db.execute(
        "select target_schema, target_table, held, expired, key_columns from pgreaper.policies"
    ).fetchall()
    assert sorted(rows) == sorted((f"s {table}", table, [states[0]], states[1], ["k"]) for table in AWKWARD)


def test_two_tables_of_one_name_get_two_policies(run, db, paste):
    db.execute("create schema shop; create schema club")
    for schema in ("shop", "club"):
        db.execute(f"set search_path = {schema}")
        db.execute(BOOKINGS)
    found = by_table(run("discover", "--json"))
    assert len({c["command"].split()[2] for c in found.values()}) == 2
    for c in found.values():
        paste({"sql": [], "commands": [c["command"]]})
    assert list(by_table(run("discover", "--schema", "club", "--json"))) == ["club.bookings"]
    assert run("discover", "--schema", "clab").code == 2


@pytest.mark.parametrize(
    ("prepare", "obstacle"),
    [
        ("alter table bookings drop constraint bookings_pkey", "primary key"),
        ("create table kid () inherits (bookings)", "inherit"),
        (
            "alter table bookings alter status drop default; alter table bookings alter status type int using 1",
            "states do not say",
        ),
        (
            ("create type st as enum ('held', 'used'); alter table bookings alter status drop default;"
            "update bookings set status = 'used' where status = 'consumed';"
            "alter table bookings alter status type st using status::st"),
            "states do not say",
        ),
    ],
)  # fmt: skip
def test_where_no_command_can_be_given_it_says_why(run, db, prepare, obstacle):
    """A wrong command would change rows; none is made up."""
    db.execute(BOOKINGS)
    db.execute(prepare)
    result = run("discover", "--json")
    found = by_table(result)["public.bookings"]
    assert found["command"] is None
    assert obstacle in found["obstacle"]
    assert obstacle.split()[0] in run("discover").out


@pytest.fixture
def stranger(db, server, dsn):
    """A role that may read some tables and owns none; its URL."""
    role = f"stranger_{db.info.dbname}"
    db.execute(f"create role {role} login")
    yield role, server.url(db.info.dbname).replace(f"//{server.user}", f"//{role}")
    db.execute(f"drop owned by {role}; drop role {role}")


def test_somebody_elses_tables(run, db, stranger):
    """What the role may not read is passed over; what it does not own it may not register; RLS is told."""
    role, url = stranger
    db.execute(BOOKINGS)
    db.execute("create table hidden (like bookings including all)")
    db.execute(f"grant select on bookings to {role}")
    [found] = run("discover", "--json", url=url).json["candidates"]
    assert (found["command"], found["overdue"]) == (None, 3)
    assert "owner" in found["obstacle"]
    db.execute("alter table bookings enable row level security")
    [found] = run("discover", "--json", url=url).json["candidates"]
    assert "row level security" in found["obstacle"]


def test_partitions_are_seen_as_one_table(run, db, paste):
    db.execute(
        "create table bookings (id bigint primary key, status text, hold_until timestamptz) partition by hash (id);"
        "create table b0 partition of bookings for values with (modulus 2, remainder 0);"
        "create table b1 partition of bookings for values with (modulus 2, remainder 1);"
        "insert into bookings select g, 'held', now() - interval '1 h' from generate_series(1, 10) as g"
    )
    found = by_table(run("discover", "--json"))
    assert list(found) == ["public.bookings"]
    assert found["public.bookings"]["overdue"] == 10
    paste({"sql": [], "commands": [found["public.bookings"]["command"]]})


def test_odd_deadlines_do_no_harm(run, db):
    """Infinities, dates far away and before Christ."""
    db.execute("create table a (id int primary key, status text, expires_at timestamptz)")
    db.execute("create table b (id int primary key, status text, valid_until date)")
    for table in ("a", "b"):
        db.execute(
            f"insert into {table} values (1, 'held', 'infinity'), (2, 'held', '-infinity'), (3, 'held', '5000-01-01'),"
            "(4, 'held', '0044-03-15 BC'), (5, 'held', null), (6, null, '2001-01-01')"
        )
    db.execute("insert into b values (7, 'held', '5874897-12-31')")
    found = by_table(run("discover", "--json"))
    assert {table: c["overdue"] for table, c in found.items()} == {"public.a": 2, "public.b": 2}
    assert all(99 * 365 < c["oldest_overdue_seconds"] / 86400 < 101 * 366 for c in found.values())
    assert "100 y" in run("discover").out


def test_a_large_table_is_sampled(db, monkeypatch):
    """Of more than the bound only a part is read, and the numbers are told as estimates."""
    db.execute(BOOKINGS)
    db.execute("alter table bookings set (autovacuum_enabled = off)")
    db.execute(
        "insert into bookings (hold_until, customer_email) select now() - interval '1 day', repeat('x', 500)"
        " from generate_series(1, 20000)"
    )
    [exact] = discover(db).candidates
    assert (exact.estimated, exact.overdue) == (False, 20003)
    monkeypatch.setattr("pgreaper.discover.SAMPLE", 2**20)
    db.execute("select pg_stat_force_next_flush()") if db.info.server_version >= 150000 else None
    [sampled] = discover(db).candidates
    assert sampled.estimated
    assert sampled.overdue is not None
    assert 5000 < sampled.overdue < 60000


def test_a_locked_table_is_passed_over(run, db, connect):
    """It waits a second for a lock at most, and goes on with the others."""
    db.execute(BOOKINGS)
    db.execute("create table claims (id int primary key, state text default 'pending', deadline date)")
    holder = connect(autocommit=False)
    holder.execute("lock table bookings in access exclusive mode")
    result = run("discover", "--json")
    assert result.code == 0
    assert result.json["skipped"] == ["public.bookings"]
    assert list(by_table(result)) == ["public.claims"]
    assert "public.bookings: not looked into" in run("discover").out


def test_a_table_that_takes_too_long_is_passed_over(db):
    """The time for a table is bounded, and so is the whole."""
    db.execute(BOOKINGS)
    db.execute("insert into bookings (hold_until) select now() from generate_series(1, 100000)")
    started = time.monotonic()
    found = discover(db, seconds_per_table=0.001)
    assert (found.candidates, found.skipped) == ([], ["public.bookings"])
    found = discover(db, seconds=0)
    assert (found.candidates, found.skipped) == ([], ["public.bookings"])
    assert time.monotonic() - started < 20


def test_nothing_is_written_and_no_setting_stays(run, db, dsn):
    """Not a transaction id, not a row; the session is as it was."""
    db.execute(BOOKINGS)
    settings = "select string_agg(name || '=' || setting, ',' order by name) from pg_settings where name <> 'xxx'"
    with psycopg.connect(dsn, autocommit=True) as session:
        before = session.execute(settings).fetchone()
        next_id = "select pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
        db.execute("select pg_current_xact_id()")
        for _ in range(2):
            start = session.execute(next_id).fetchone()
            discover(session)
            end = session.execute(next_id).fetchone()
            if start == end:  # autovacuum may take one
                break
        assert start == end
        assert session.execute(settings).fetchone() == before


def test_a_thousand_tables_take_seconds(db, dsn):
    """A hundred of them look like holds.  On a busy machine: as long as it takes to make them, a few times."""
    started = time.monotonic()
    db.execute(
        "do $$ begin for n in 1 .. 1000 loop execute format('create table t%s (id int, status text default ''held'', %s"
        " timestamptz)', n, case when n % 10 = 0 then 'hold_until' else 'created_at' end); end loop; end $$"
    )
    made = time.monotonic()
    found = discover(db)
    assert (found.tables, len(found.candidates)) == (1000, 100)
    assert time.monotonic() - made < max(10, 4 * (made - started))


NOT_ALLOWED = {
    "a domain": "create domain st as text check (value in ('held', 'used')); {t} status st)",
    "a short domain": "create domain st as varchar(5); {t} status st)",
    "a list": "{t} status text check (status in ('held', 'used')))",
    "what may not be": "{t} status text check (status <> 'expired'))",
    "a pattern": "{t} status text check (status ~ '^[a-z]{{1,5}}$'))",
    "a length": "{t} status varchar(40) check (length(status) < 6))",
    "two columns": "{t} status text, n int, check (status in ('held', 'used') and (n is null or n > 7)))",
    "a list in an array": "{t} status text check (status = any ('{{held,used}}'::text[])))",
    "not valid": "{t} status text); alter table t add check (status in ('held', 'used')) not valid",
    "another column that must follow": "{t} status text, d timestamptz, check (status <> 'expired' or d is not null))",
}


@pytest.mark.parametrize("case", NOT_ALLOWED)
def test_a_state_that_the_table_does_not_allow_is_not_proposed(run, db, case):
    """The command would be refused, or each expiry would fail: a template instead."""
    db.execute(NOT_ALLOWED[case].format(t="create table t (id int primary key, expires_at timestamptz,"))
    db.execute(
        "insert into t (id, expires_at, status) values (1, now() - interval '1 day', 'held'), (2, now(), 'used')"
    )
    found = by_table(run("discover", "--json"))["public.t"]
    assert (found["command"], found["expired"], found["assumptions"]) == (None, None, [])
    assert "states do not say" in found["obstacle"]


ALLOWED = {
    "a domain": "create domain st as text check (value in ('held', 'expired')); {t} status st)",
    "a wide domain": "create domain st as varchar(7) check (value ~ '^[a-z]+$'); {t} status st)",
    "a check on something else": "{t} status text, n int, check (n is not null and status <> ''))",
    "a function of somebody's": (
        "create function never(text) returns boolean language plpgsql immutable as"
        " $$ begin raise exception 'called'; end $$; {t} status text, check (status = 'held' or never(status)))"
    ),
    "a query in a check": (
        "{t} status text, check (status = 'held' or query_to_xml('select 1/0', 't', 't', 't') is null))"
    ),
}


@pytest.mark.parametrize("case", ALLOWED)
def test_a_state_that_may_be_allowed_is_proposed(run, db, paste, case):
    """Also where nothing can be known, because a function would have to be run to know it; none is."""
    db.execute(ALLOWED[case].format(t="create table t (id int primary key, expires_at timestamptz,"))
    db.execute("alter table t alter status set default 'held'")
    found = by_table(run("discover", "--json"))["public.t"]
    assert (found["held"], found["expired"]) == (["held"], "expired")
    paste({"sql": [], "commands": [found["command"]]})


WORDS = ["plain", "two words", "it's", 'a"b', "$HOME", "`id`", "a\nb", "tab\t", "\\n", "ü", "'\n'"]


def test_words_survive_the_shell_and_sql(db):
    """What commands writes, bash and Postgres read back as it was."""
    done = subprocess.run(["bash", "-c", commands.shell("printf", r"%s\0", *WORDS)], capture_output=True, check=True)
    assert done.stdout.decode().split("\0")[:-1] == WORDS
    for word in WORDS:
        assert db.execute(f"select {commands.literal(word)}").fetchone() == (word,)
        db.execute(f"create temporary table {commands.name('x' + word)} ()")
        assert db.execute("select 1 from pg_class where relname = %s", ["x" + word]).fetchone() == (1,)

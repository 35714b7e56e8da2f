"""Keys: every hold is found again by the text that the books keep of it, whatever the settings of a session are."""

from __future__ import annotations

import json

import pytest

ENUM = "create type app.colour as enum ('red', 'it''s, \"green\"', E'new\\nline')"

# type, values, their texts
SINGLE = [
    ("smallint", ["-32768", "7"], ["-32768", "7"]),
    ("integer", ["0", "2147483647"], ["0", "2147483647"]),
    ("bigint", ["-1", "9223372036854775807"], ["-1", "9223372036854775807"]),
    ("uuid", ["A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11"], ["a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"]),
    ("text", ["", " ", "a,b", "it's", '"q"', "\\x", "{1,2}", "NULL", "żółć%I%s", "a\nERROR fake"], None),
    ("varchar(20)", ["a,b", "NULL"], None),
    ("char(36)", ["short", "with space"], ["short", "with space"]),
    ("numeric", ["1.00", "2.50", "-0.0", "1e30", "NaN"], ["1", "2.5", "0", "1" + "0" * 30, "NaN"]),
    ("numeric(10,2)", ["1.00", "2.50"], ["1", "2.5"]),
    ("boolean", ["t", "f"], ["true", "false"]),
    ("date", ["2026-11-01", "0044-03-15 BC", "infinity"], ["2026-11-01", "0044-03-15 BC", "infinity"]),
    ("timestamp", ["2026-11-01 01:30", "2026-11-01 01:30:00.000001"],
     ["2026-11-01T01:30:00", "2026-11-01T01:30:00.000001"]),
    ("timestamptz", ["2026-11-01 01:30-04", "2026-11-01 01:30-05", "infinity", "0044-03-15 00:00:00Z BC"],
     ["2026-11-01T05:30:00", "2026-11-01T06:30:00", "infinity", "0044-03-15T00:00:00 BC"]),
    ("bytea", ["\\x00ff", "\\x"], ["\\x00ff", "\\x"]),
    ("app.colour", ["red", 'it\'s, "green"', "new\nline"], None),
    ("app.code", ["x", "y"], None),
    ("app.moment", ["2026-11-01 01:30-04"], ["2026-11-01T05:30:00"]),
    ("inet", ["10.0.0.1", "10.0.0.1/8"], ["10.0.0.1/32", "10.0.0.1/8"]),
]  # fmt: skip

FOREIGN = (
    "set local timezone = 'Asia/Tokyo'",
    "set local datestyle = 'German, DMY'",
    "set local bytea_output = 'escape'",
    "set local extra_float_digits = -10",
    "set local intervalstyle = 'iso_8601'",
    "set local standard_conforming_strings = off",
    "set local search_path = pg_catalog",
)


def prepare(core, column_type):
    core.do(
        "create schema app",
        ENUM,
        "create domain app.code as text check (value <> '')",
        "create domain app.moment as timestamptz",
        f"create table public.keyed (id {column_type} primary key, status text not null, expires_at"
        " timestamptz not null)",
        "set local timezone = 'America/New_York'",
        "set local datestyle = 'ISO, MDY'",
    )


@pytest.mark.parametrize(("column_type", "values", "texts"), SINGLE, ids=[case[0] for case in SINGLE])
def test_c046_a_key_is_the_same_under_other_settings(core, column_type, values, texts):
    """One session claims, another with other TimeZone, DateStyle, search_path expires: exactly those rows."""
    prepare(core, column_type)
    for value in values:
        core.rows("insert into keyed values (%s, 'held', now() - interval '1 hour') returning 1", value)
    core.register(target="public.keyed")
    batch = core.claim()
    assert sorted(hold.key for hold in batch) == sorted(texts or values)
    core.do(*FOREIGN)
    assert core.expire(batch[0].token) == {hold.key: ("expired", "expired") for hold in batch}
    assert core.column("select distinct status from public.keyed") == ["expired"]
    for hold in batch:
        assert core.column("select outcome from pgreaper.reaper_history('p', %s)", hold.key) == ["expired"]


@pytest.mark.parametrize(("column_type", "values", "texts"), SINGLE, ids=[case[0] for case in SINGLE])
def test_c046_a_failure_and_a_lapsed_lease_find_their_row(core, set_clock, column_type, values, texts):
    """The way through the books (taken back, waiting, retried) leads to the same row under other settings."""
    prepare(core, column_type)
    for value in values:
        core.rows("insert into keyed values (%s, 'held', '2030-01-01Z') returning 1", value)
    core.register(target="public.keyed", batch=1)
    set_clock("2030-02-01Z")
    key = core.claim()[0].key
    core.do(*FOREIGN)
    set_clock("2030-02-01 01:00Z")
    core.claim(rescan=True, batch=1)
    set_clock("2030-02-01 03:00Z")
    for _ in range(2):
        batch = core.claim(batch=1)
        if batch[0].attempt == 2:
            break
    assert (batch[0].key, batch[0].attempt) == (key, 2)
    assert core.expire(batch[0].token) == {key: ("expired", "expired")}


def test_c046_numbers_that_are_equal_are_one_key(core):
    """1.0 and 1.00 are the same row: rewritten between claim and expire, it is found."""
    prepare(core, "numeric")
    core.do("insert into keyed values (1.0, 'held', now() - interval '1 hour')")
    core.register(target="keyed")
    token = core.claim()[0].token
    core.do("update keyed set id = 1.00")
    assert core.expire(token) == {"1": ("expired", "expired")}


def test_c046_char_padding_does_not_matter(core):
    """char(36) is compared without its blanks, and the key is spelled without them."""
    prepare(core, "char(36)")
    core.do("insert into keyed values ('abc', 'held', now() - interval '1 hour')")
    core.register(target="keyed")
    token = core.claim()[0].token
    assert core.expire(token, ["abc"]) == {"abc": ("expired", "expired")}


COMPOSITE = """
create table keyed (
  a text, b text, moment timestamptz, day date, n numeric, u uuid, flag boolean, code char(4), raw bytea,
  status text not null, expires_at timestamptz not null, primary key (a, b, moment, day, n, u, flag, code, raw))
"""


def test_c046_composite_keys_are_not_confused(core, set_clock):
    """'a,b'+'c' and 'a'+'b,c' are two holds; quotes, newlines and words like null are only text."""
    core.do("create table keyed (a text, b text, status text, expires_at timestamptz, primary key (a, b))")
    pairs = [
        ("a,b", "c"),
        ("a", "b,c"),
        ('["x"', "]"),
        ("", ""),
        ("null", "NULL"),
        ("it's", '"'),
        ("x\ny", "\t"),
        ("\\", "/"),
    ]
    for number, (a, b) in enumerate(pairs):
        core.rows(
            "insert into keyed values (%s, %s, 'held', '2030-01-01Z'::timestamptz + %s * interval '1 s') returning 1",
            a,
            b,
            number,
        )
    core.register(target="keyed", key_columns=["b", "a"])
    set_clock("2030-02-01Z")
    first = core.claim(batch=1)
    assert [json.loads(hold.key) for hold in first] == [list(pairs[0])]
    core.do("update keyed set status = 'consumed' where a = 'a'")
    rest = core.claim()
    assert [json.loads(hold.key) for hold in rest] == [list(pair) for pair in pairs if pair[0] not in ("a,b", "a")]
    assert set(core.expire(rest[0].token).values()) == {("expired", "expired")}
    assert core.rows("select a, status from keyed where status <> 'expired' order by a") == [
        ("a", "consumed"),
        ("a,b", "held"),
    ]
    assert set(core.expire(first[0].token).values()) == {("expired", "expired")}


def test_c046_a_composite_key_of_many_types_under_other_settings(core):
    """The order of the columns is that of the primary key, each part is spelled free of settings."""
    core.do(COMPOSITE, "set local timezone = 'America/New_York'")
    core.do(
        "insert into keyed values ('x', E'y\\n\"z\"', '2026-11-01 01:30-04', '2026-11-01', 1.50,"
        " 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', true, 'ab', '\\x00ff', 'held', now() - interval '1 hour'),"
        " ('x', E'y\\n\"z\"', '2026-11-01 01:30-05', '2026-11-01', 1.50,"
        " 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', true, 'ab', '\\x00ff', 'held', now() + interval '1 hour')"
    )
    core.register(target="keyed")
    batch = core.claim()
    assert [json.loads(hold.key) for hold in batch] == [
        [
            "x",
            'y\n"z"',
            "2026-11-01T05:30:00",
            "2026-11-01",
            "1.5",
            "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",
            "true",
            "ab",
            "\\x00ff",
        ]
    ]
    core.do(
        "set local timezone = 'Asia/Tokyo'", "set local datestyle = 'SQL, DMY'", "set local bytea_output = 'escape'"
    )
    assert core.expire(batch[0].token) == {batch[0].key: ("expired", "expired")}
    assert core.rows("select extract(hour from moment at time zone 'UTC')::int, status from keyed order by 1") == [
        (5, "expired"), (6, "held"),
    ]  # fmt: skip


def test_c050_hostile_and_huge_keys(core, holds):
    """Empty, with control characters, like SQL, and a megabyte: each expires once, and nothing else happens."""
    values = ["", "a\nERROR fake", "x'); drop table holds;--", "żółć%I%s", "$1", "\x01\x7f"]
    core.do("create table named (id text primary key, status text, expires_at timestamptz)")
    for value in values:
        core.rows("insert into named values (%s, 'held', now() - interval '1 hour') returning 1", value)
    core.register(target="named")
    assert core.run() == dict.fromkeys(values, "expired")
    assert core.value("select to_regclass('holds') is not null")


def test_c050_a_megabyte_as_a_key(core):
    """A btree takes it because it compresses well; an error message shows little of it."""
    core.do("create table named (id text primary key, status text, expires_at timestamptz)")
    core.do(
        "insert into named select repeat(k, 200000), 'held', now() - interval '1 hour' from"
        " unnest('{a,b}'::text[]) as k"
    )
    core.register(target="named")
    token = core.claim(batch=1)[0].token
    error = core.refused("select pgreaper.reaper_expire(%s, array[repeat('b', 200000)])", token)
    assert error.sqlstate == "22023"
    assert len(error.diag.message_primary) < 400
    assert [(len(key), outcome) for key, outcome in core.expire(token).items()] == [(200000, ("expired", "expired"))]
    assert core.rows("select left(id, 1), status from named order by 1") == [("a", "expired"), ("b", "held")]


def test_a_unique_index_can_be_the_key(core, holds):
    """Named columns in another order than the index: the key follows the index."""
    core.do(
        "alter table holds add tenant int not null default 1, add seat int not null default 7",
        "create unique index on holds (seat, tenant)",
    )
    holds.due(1)
    core.register(key_columns=["tenant", "seat"])
    assert core.column("select key_columns from pgreaper.policies") == [["seat", "tenant"]]
    assert core.run() == {'["7", "1"]': "expired"}


def test_the_key_uses_its_index(core):
    """`id = any(…)` in the type of the column: no scan of the table for one hold."""
    for column_type, value in (
        ("bigint", "g"),
        ("uuid", "md5(g::text)::uuid"),
        ("char(36)", "g::text"),
        ("timestamptz", "'2020-01-01Z'::timestamptz + g * interval '1 s'"),
        ("numeric", "g + 0.10"),
    ):
        core.do(
            "drop table if exists keyed",
            f"create table keyed (id {column_type} primary key, status text, expires_at timestamptz)",
        )
        core.do(
            f"insert into keyed select {value}, 'held', now() - g * interval '1 second' from"
            " generate_series(1, 5000) as g",
            "analyze keyed",
        )
        core.register(column_type, target="keyed")
        key = core.claim(column_type, batch=1)[0].key
        target = core.record(
            "select to_jsonb(pgreaper._target(p)) from pgreaper.policies as p where name = %s",
            column_type,
        )
        query = f"explain select from {target['relation']} as h where {target['matches']}".replace("$3", "%s::text[]")
        plan = "\n".join(core.column(query, [key]))
        assert "keyed_pkey" in plan, plan
        assert "Seq Scan" not in plan, plan

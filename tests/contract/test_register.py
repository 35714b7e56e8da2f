"""reaper_register: what it stores, what it returns, and everything that it refuses."""

# ruff: noqa: E501  a table of cases is read line by line
from __future__ import annotations

import re

import psycopg
import pytest

DEFAULTS = {
    "backoff_base": "00:00:01",
    "backoff_cap": "01:00:00",
    "batch": "500",
    "deadline_column": "expires_at",
    "expired": "expired",
    "grace": "00:00:00",
    "held": '["held"]',
    "key_columns": '["id"]',
    "lease": "00:01:00",
    "max_attempts": "5",
    "objective": "00:01:00",
    "owner": "tests",
    "payload_columns": "[]",
    "permanent_attempts": "1",
    "set_values": "{}",
    "status_column": "status",
    "target_schema": "public",
    "target_table": "holds",
}


def books(core):
    """What a registration writes."""
    return (
        core.column("select to_jsonb(p) from pgreaper.policies as p order by 1"),
        core.column("select to_jsonb(c) from pgreaper.cursors as c order by 1"),
        core.column("select to_jsonb(e) from pgreaper.events as e order by 1"),
    )


def test_a_new_policy_returns_all_of_its_settings(core, holds):
    """Promise: all settings of a new policy, without an old value."""
    changes = core.register()
    assert {setting: new for setting, _, new in changes} == DEFAULTS
    assert {old for _, old, _ in changes} == {None}
    assert core.rows("select kind, actor, reason from pgreaper.events") == [
        ("register", core.value("select session_user::text"), ", ".join(DEFAULTS))
    ]


def test_the_same_call_again_changes_nothing(core, holds):
    """Promise: declarative; no row, no event, no other row version."""
    core.register(grace="5 minutes", set='{"customer_email": null}')
    before = books(core)
    assert core.register(grace="300 seconds", set='{"customer_email":null}') == []
    assert books(core) == before


def test_another_call_changes_the_policy_to_what_it_says(core, holds):
    """Promise: what the call omits has its default again; old and new value are returned."""
    core.register(grace="5 minutes", rate_limit=7.5, batch=10)
    assert core.register(batch=20, held=["held", "cancelled"]) == [
        ("batch", "10", "20"),
        ("grace", "00:05:00", "00:00:00"),
        ("held", '["held"]', '["cancelled", "held"]'),
        ("rate_limit", "7.5", None),
    ]
    assert core.rows("select batch, grace::text, held, rate_limit from pgreaper.policies") == [
        (20, "00:00:00", ["cancelled", "held"], None)
    ]
    assert core.column("select reason from pgreaper.events order by event_id")[1:] == ["batch, grace, held, rate_limit"]


def test_a_change_looks_for_holds_from_the_start(core, holds):
    """Other states make other holds due, behind the cursor too."""
    holds.due(2)
    core.do("update holds set status = 'cancelled' where id = 1")
    core.register()
    assert [hold.key for hold in core.claim()] == ["2"]
    core.register(held=["held", "cancelled"])
    assert [hold.key for hold in core.claim()] == ["1"]


def test_a_change_keeps_a_policy_paused(core, holds):
    core.register()
    core.call("reaper_pause", policy="p", reason="tests")
    core.register(batch=7)
    assert core.rows("select paused_at is not null, pause_reason, batch from pgreaper.policies") == [(True, "tests", 7)]


def test_a_dry_run_checks_everything_and_stores_nothing(core, holds):
    """Promise: with dry_run everything is checked and nothing is stored."""
    assert {setting: new for setting, _, new in core.register(dry_run=True)} == DEFAULTS
    assert books(core) == ([], [], [])
    core.register()
    before = books(core)
    assert core.register(batch=7, dry_run=True) == [("batch", "500", "7")]
    assert books(core) == before
    with pytest.raises(psycopg.Error, match="has no column"):
        core.register(deadline_column="nope", dry_run=True)


def test_the_target_is_not_changed_and_only_read(committed, core, holds):
    """Promise: not locked beyond reading its definition; its catalog rows are the same afterwards."""
    catalog = """
        select c.xmin::text, c.relhastriggers, (select array_agg(a.xmin::text) from pg_attribute as a where a.attrelid = c.oid)
          from pg_class as c where c.oid = 'holds'::regclass"""
    before = core.rows(catalog)
    with core.connection.transaction():
        core.register()
        modes = core.column("select mode from pg_locks where relation = 'holds'::regclass and pid = pg_backend_pid()")
    assert set(modes) <= {"AccessShareLock"}
    assert core.rows(catalog) == before


def test_a_withdrawn_policy_is_taken_up_again(core, holds):
    core.register()
    core.call("reaper_unregister", policy="p")
    changes = core.register()
    assert [(setting, new) for setting, _, new in changes] == [("unregistered_at", None)]
    assert core.value("select unregistered_at is null from pgreaper.policies")


@pytest.mark.parametrize("change", [{"target": "others"}, {"key_columns": ["code"]}])
def test_a_policy_never_changes_the_rows_that_it_speaks_of(core, holds, change):
    """Raises RP003: the books are about those rows."""
    core.do("create table others (like holds including all)", "alter table holds add code text not null unique")
    core.register()
    error = refuse(core, **change)
    assert error.sqlstate == "RP003"
    assert error.diag.message_primary == "policy p speaks of public.holds, by the key (id)"
    assert error.diag.message_hint == (
        "Its books are about those rows: register the new target or key under another name."
    )


def test_values_are_stored_as_the_column_spells_them(core, holds):
    """A boolean given as `t` and a number as ` 1` are what the column's text will be."""
    core.do("alter table holds add flag boolean, add level smallint, add letter char(3)")
    core.register("flag", status_column="flag", held=["t"], expired="no")
    core.register("level", status_column="level", held=[" 1", "01"], expired="2")
    core.register("letter", status_column="letter", held=["a  "], expired="b")
    assert core.rows("select name, held, expired from pgreaper.policies order by name") == [
        ("flag", ["true"], "false"),
        ("letter", ["a"], "b"),
        ("level", ["1"], "2"),
    ]


def test_a_zone_is_stored_in_its_own_spelling(core, holds):
    core.do("alter table holds add until timestamp")
    core.register(deadline_column="until", zone="europe/brussels")
    assert core.value("select zone from pgreaper.policies") == "Europe/Brussels"


def refuse(core, policy="p", **arguments):
    with pytest.raises(psycopg.Error) as caught, core.connection.transaction():
        core.register(policy, **arguments)
    return caught.value


# What the refused registrations are tried on.
SHOP = """
create type st as enum ('held', 'consumed', 'expired');
create domain mood as text check (value in ('held', 'expired'));
create table shop (
  id bigint generated always as identity primary key,
  status text not null default 'held', short varchar(3), level smallint, flag boolean, label st, mood mood,
  is_expired boolean generated always as (status = 'expired') stored,
  serial_status integer generated always as identity,
  until timestamptz, local timestamp, day date, notes text, amount numeric not null default 0, doc jsonb,
  stamped timestamptz, stamped_local timestamp, stamped_always timestamptz not null default now(),
  code text not null unique, maybe text unique, "half" text not null, late text not null unique deferrable, lower text not null);
create unique index on shop (half) where status = 'held';
create unique index on shop (lower(lower));
create materialized view shop_mat as select * from shop;
create sequence shop_seq;
create type shop_type as (id int, status text, until timestamptz);
create view shop_join as select s.* from shop as s join shop as t using (id);
create view shop_left as select s.* from shop as s left join shop as t using (id);
create view shop_group as select id, status, until from shop group by id;
create view shop_distinct as select distinct id, status, until from shop;
create view shop_limit as select id, status, until from shop limit 10;
create view shop_union as select id, status, until from shop union all select id, status, until from shop;
create view shop_checked as select * from shop where status = 'held' with check option;
create view shop_local as select * from shop where status = 'held' with local check option;
create view shop_upper as select id, upper(status) as status, until from shop;
create view shop_no_key as select status, until from shop;
create view shop_renamed as select id as hold_id, status, until from shop;
create table shop_keyless (status text, until timestamptz);
create table shop_parent (id int primary key, status text, until timestamptz);
create table shop_child () inherits (shop_parent);
create temporary table shop_temp (id int primary key, status text, until timestamptz);
create foreign data wrapper shop_wrapper;
create server shop_server foreign data wrapper shop_wrapper;
create foreign table shop_foreign (id int, status text, until timestamptz) server shop_server;
create table shop_secret (id int primary key, status text, until timestamptz);
alter table shop_secret enable row level security;
"""

NAME = "a policy needs a name of 1 to 200 characters"
READ_COMMITTED = "Begin the transaction with ISOLATION LEVEL READ COMMITTED, or change default_transaction_isolation"
VIEW_HINT = "A target view selects from one table, without join, group by, distinct, limit or union"
UNCHECKED = "Create it without WITH CHECK OPTION."
KEY_HINT = (
    "A key needs a unique index over exactly these columns: valid, without WHERE or expressions, not deferrable, "
    "every column NOT NULL."
)

# what is wrong, arguments, message, hint (None: no hint)
REFUSED = [
    ("no name", {"policy": None}, NAME, None),
    ("empty name", {"policy": ""}, NAME, None),
    ("blank name", {"policy": " \t"}, NAME, None),
    ("long name", {"policy": "p" * 201}, NAME, None),
    ("no owner", {"owner": None}, "policy p needs an owner", "Name who looks after its dead letters"),
    ("blank owner", {"owner": "  "}, "policy p needs an owner", "Name who looks after its dead letters"),
    ("no target", {"target": None}, "the target of policy p does not exist", None),
    ("dropped target", {"target": "4294967294"}, "the target of policy p does not exist", None),
    # Targets.
    ("materialized view", {"target": "shop_mat"},
     "shop_mat is a materialized view, and only a table or a simple view can hold holds", "Register the table behind it."),
    ("sequence", {"target": "shop_seq"}, "shop_seq is a sequence, and only", "Register the table behind it."),
    ("composite type", {"target": "shop_type"}, "shop_type is a composite type, and only", "Register the table behind it."),
    ("index", {"target": "shop_pkey"}, "shop_pkey is an index, and only", "Register the table behind it."),
    ("foreign table", {"target": "shop_foreign"}, "shop_foreign is a foreign table, and only", "Register the table"),
    ("temporary table", {"target": "shop_temp"}, "shop_temp is a temporary table", "No other session can see its rows"),
    ("a catalog", {"target": "pg_class"}, "pg_class belongs to the system", "Register a table of your own."),
    ("pgreaper's own", {"target": "pgreaper.claims"}, "pgreaper.claims belongs to the system", "Register a table of your"),
    ("information_schema", {"target": "information_schema.sql_features"}, "belongs to the system", "Register a table of"),
    ("join view", {"target": "shop_join"}, "view public.shop_join cannot be updated", VIEW_HINT),
    ("left join view", {"target": "shop_left"}, "view public.shop_left cannot be updated", VIEW_HINT),
    ("group by view", {"target": "shop_group"}, "view public.shop_group cannot be updated", VIEW_HINT),
    ("distinct view", {"target": "shop_distinct"}, "view public.shop_distinct cannot be updated", VIEW_HINT),
    ("limit view", {"target": "shop_limit"}, "view public.shop_limit cannot be updated", VIEW_HINT),
    ("union view", {"target": "shop_union"}, "view public.shop_union cannot be updated", VIEW_HINT),
    ("check option", {"target": "shop_checked"}, "view public.shop_checked has a check option", UNCHECKED),
    ("local check option", {"target": "shop_local"}, "view public.shop_local has a check option", UNCHECKED),
    ("inheritance parent", {"target": "shop_parent"}, "shop_parent has child tables, whose keys are not unique together",
     "Register each table of the inheritance tree, or use a partitioned table."),
    # Deadlines.
    ("no deadline", {"deadline_column": None}, "policy p needs a deadline column", None),
    ("unknown deadline", {"deadline_column": "untill"}, "shop has no column untill", "Its columns are id, status, short,"),
    ("hidden column", {"deadline_column": "xmin"}, "shop has no column xmin", "Its columns are"),
    ("deadline of text", {"deadline_column": "notes"}, "deadline column public.shop.notes has type text",
     "A deadline is a timestamp with or without time zone, or a date."),
    ("timestamp without zone", {"deadline_column": "local"},
     "deadline column public.shop.local has type timestamp without time zone, which says no time zone",
     "Declare the zone that its values are meant in, such as zone => 'UTC'."),
    ("date without zone", {"deadline_column": "day"}, "deadline column public.shop.day has type date, which says no time zone",
     "Declare the zone"),
    ("unknown zone", {"deadline_column": "local", "zone": "Mars/Phobos"}, "there is no time zone 'Mars/Phobos'",
     "Use a name of pg_timezone_names, such as UTC or Europe/Brussels."),
    ("zone that is an offset", {"deadline_column": "local", "zone": "UTC+5"}, "there is no time zone 'UTC+5'", "Use a name"),
    ("useless zone", {"zone": "UTC"}, "zone 'UTC' is of no use: the columns of public.shop say their own", "Leave out zone."),
    # Stamps.
    ("unknown stamp", {"stamp_column": "nope"}, "shop has no column nope", "Its columns are"),
    ("stamp of text", {"stamp_column": "notes"}, "stamp column public.shop.notes has type text", "A stamp is a timestamp"),
    ("stamp without zone", {"stamp_column": "stamped_local"},
     "stamp column public.shop.stamped_local has type timestamp without time zone, which says no time zone",
     "Declare the zone that it is written in, such as stamp_zone => 'UTC'."),
    ("stamp zone of a stamp with zone", {"stamp_column": "stamped", "stamp_zone": "UTC"},
     "stamp column public.shop.stamped has type timestamp with time zone, which needs no zone", "Leave out stamp_zone."),
    ("unknown stamp zone", {"stamp_column": "stamped_local", "stamp_zone": "X"}, "there is no time zone 'X'", "Use a name"),
    ("stamp zone without stamp", {"stamp_zone": "UTC"}, "stamp_zone 'UTC' is of no use: policy p has no stamp column",
     "Leave out stamp_zone."),
    ("stamp that is never null", {"status_column": None, "held": None, "expired": None, "stamp_column": "stamped_always"},
     "stamp column public.shop.stamped_always is NOT NULL, so no row is held",
     "Without a status column, held means that the stamp is NULL."),
    # States.
    ("unknown status", {"status_column": "nope"}, "shop has no column nope", "Its columns are"),
    ("generated status", {"status_column": "is_expired", "held": ["f"], "expired": "t"},
     "status column public.shop.is_expired is generated and cannot be written", "Name the column that it is generated from."),
    ("identity status", {"status_column": "serial_status", "held": ["1"], "expired": "2"},
     "status column public.shop.serial_status is an identity column", None),
    ("expression in a view", {"target": "shop_upper"}, "status column public.shop_upper.status cannot be updated through the view",
     "Let the view show the table's own column, not an expression."),
    ("no status, no stamp", {"status_column": None, "held": None, "expired": None},
     "policy p has neither a status column nor a stamp column", "Name the column that tells a held row from an expired"),
    ("held without a status", {"status_column": None, "expired": None, "stamp_column": "stamped"},
     "held and expired are states of a status column, and policy p names none", "Name the status_column, or leave out both"),
    ("no held", {"held": None}, "policy p needs at least one held state and the expired state", "A NULL state is never"),
    ("empty held", {"held": []}, "policy p needs at least one held state and the expired state", "A NULL state is never"),
    ("null held", {"held": ["held", None]}, "policy p needs at least one held state and the expired state", "A NULL state"),
    ("no expired", {"expired": None}, "policy p needs at least one held state and the expired state", "A NULL state is"),
    ("held and expired", {"expired": "held"}, "state 'held' is both held and expired", "A hold that stays held would be"),
    ("held and expired in two spellings", {"status_column": "flag", "held": ["t"], "expired": "true"},
     "state 'true' is both held and expired", "A hold that stays held"),
    ("unknown label", {"status_column": "label", "held": ["Held"]}, "column public.shop.label of type public.st does not take the value 'Held'",
     "Allowed are 'held', 'consumed', 'expired'."),
    ("unknown label for expired", {"status_column": "label", "expired": "gone"},
     "column public.shop.label of type public.st does not take the value 'gone'", "Allowed are 'held', 'consumed', 'expired'."),
    ("too long", {"status_column": "short", "held": ["abc"], "expired": "abcd"},
     "column public.shop.short of type character varying(3) does not take the value 'abcd'", "Give the value as the column would"),
    ("outside of the domain", {"status_column": "mood", "expired": "gone"}, "column public.shop.mood of type public.mood does not take", "Give"),
    ("too large", {"status_column": "level", "held": ["0"], "expired": "32768"},
     "column public.shop.level of type smallint does not take the value '32768'", "Give the value as the column would store it."),
    ("no number", {"status_column": "level", "held": ["held"]}, "of type smallint does not take the value 'held'", "Give"),
    ("no boolean", {"status_column": "flag", "held": ["maybe"], "expired": "f"},
     "column public.shop.flag of type boolean does not take the value 'maybe'", "Give the value as the column would store it."),
    # Keys.
    ("no primary key", {"target": "shop_keyless"}, "shop_keyless has no primary key that could identify a hold",
     "Add a primary key, or name the columns of a unique index over NOT NULL columns as key_columns."),
    ("view without the key", {"target": "shop_no_key"}, "shop_no_key has no primary key that could identify a hold",
     "Let the view show the primary key of its table, under the same name."),
    ("view with a renamed key", {"target": "shop_renamed"}, "shop_renamed has no primary key", "Let the view show the primary"),
    ("renamed key by name", {"target": "shop_renamed", "key_columns": ["hold_id"]},
     "the columns (hold_id) do not identify a row of public.shop_renamed", KEY_HINT),
    ("unknown key", {"key_columns": ["nope"]}, "shop has no column nope", "Its columns are"),
    ("null key", {"key_columns": ["id", None]}, "shop has no column NULL", "Its columns are"),
    ("empty key", {"key_columns": []}, "the columns () do not identify a row of public.shop", KEY_HINT),
    ("not unique", {"key_columns": ["status"]}, "the columns (status) do not identify a row of public.shop", KEY_HINT),
    ("part of a key", {"key_columns": ["id", "status"]}, "the columns (id, status) do not identify a row of public.shop", KEY_HINT),
    ("nullable key", {"key_columns": ["maybe"]}, "the columns (maybe) do not identify a row of public.shop", KEY_HINT),
    ("partial unique index", {"key_columns": ["half"]}, "the columns (half) do not identify a row of public.shop", KEY_HINT),
    ("deferrable key", {"key_columns": ["late"]}, "the columns (late) do not identify a row of public.shop", KEY_HINT),
    ("unique expression", {"key_columns": ["lower"]}, "the columns (lower) do not identify a row of public.shop", KEY_HINT),
    # Constants.
    ("set that is a list", {"set": "[1]"}, "set must be a JSON object of column and constant, not array", "Such as"),
    ("set that is a word", {"set": '"x"'}, "set must be a JSON object of column and constant, not string", "Such as"),
    ("set that is null", {"set": "null"}, "set must be a JSON object of column and constant, not null", "Such as"),
    ("set of an unknown column", {"set": '{"nope": 1}'}, "shop has no column nope", "Its columns are"),
    ("set of the key", {"set": '{"id": 1}'}, "set column public.shop.id is an identity column", None),
    ("set of a named key", {"key_columns": ["code"], "set": '{"code": 1}'}, "set names a column of the key (code)", "A hold must keep"),
    ("set of the found key", {"target": "shop_secret", "set": '{"id": 1}'}, "set names a column of the key (id)", "A hold must keep"),
    ("set of the status", {"set": '{"status": "x"}'}, "set names the column status, which the transition writes already",
     "Leave it out of set."),
    ("set of the stamp", {"stamp_column": "stamped", "set": '{"stamped": null}'}, "set names the column stamped", "Leave it"),
    ("set of a wrong type", {"set": '{"level": "x"}'}, "column public.shop.level of type smallint does not take the value 'x'", "Give"),
    ("set null of not null", {"set": '{"amount": null}'}, "set would make the NOT NULL column public.shop.amount null", None),
    ("set of a generated column", {"set": '{"is_expired": true}'}, "set column public.shop.is_expired is generated", "Name the"),
    ("unknown payload", {"payload_columns": ["nope"]}, "shop has no column nope", "Its columns are"),
    ("null payload", {"payload_columns": [None]}, "shop has no column NULL", "Its columns are"),
]  # fmt: skip


def try_shop(core, arguments):
    core.do(SHOP)
    return refuse(core, **({"policy": "p", "target": "shop", "deadline_column": "until"} | arguments))


@pytest.mark.parametrize(
    ("arguments", "message", "hint"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_refused(core, arguments, message, hint):
    """Raises RP003: the message names the thing, the hint says what to do, and nothing is stored."""
    error = try_shop(core, arguments)
    assert error.sqlstate == "RP003", error
    assert error.diag.message_primary.startswith(message) or message in error.diag.message_primary
    assert "\n" not in error.diag.message_primary
    if hint is None:
        assert error.diag.message_hint is None
    else:
        assert error.diag.message_hint.startswith(hint)
    assert books(core) == ([], [], [])


# what is wrong, arguments, message
MISUSE = [
    ("no lease", {"lease": None}, "lease must be between 1 second and 1 day, not NULL"),
    ("short lease", {"lease": "0.5 seconds"}, "lease must be between 1 second and 1 day, not 00:00:00.5"),
    ("long lease", {"lease": "25 hours"}, "lease must be between 1 second and 1 day, not 25:00:00"),
    ("no grace", {"grace": None}, "grace must be between 0 and 10 years, not NULL"),
    ("negative grace", {"grace": "-1 second"}, "grace must be between 0 and 10 years, not -00:00:01"),
    ("long grace", {"grace": "11 years"}, "grace must be between 0 and 10 years, not 11 years"),
    ("no batch", {"batch": None}, "batch must be between 1 and 10000, not NULL"),
    ("batch of 0", {"batch": 0}, "batch must be between 1 and 10000, not 0"),
    ("huge batch", {"batch": 10001}, "batch must be between 1 and 10000, not 10001"),
    ("no max_attempts", {"max_attempts": None}, "max_attempts and permanent_attempts must be at least 1"),
    ("no attempts", {"max_attempts": 0}, "max_attempts and permanent_attempts must be at least 1"),
    ("no permanent_attempts", {"permanent_attempts": None}, "max_attempts and permanent_attempts must be at least 1"),
    ("no permanent attempts", {"permanent_attempts": 0}, "max_attempts and permanent_attempts must be at least 1"),
    ("no backoff_base", {"backoff_base": None}, "backoff_base and backoff_cap must be at least 0, in this order"),
    ("negative base", {"backoff_base": "-1 second"}, "backoff_base and backoff_cap must be at least 0, in this order"),
    ("cap below base", {"backoff_base": "1 h", "backoff_cap": "1 s"}, "backoff_base and backoff_cap must be at least 0"),
    ("no backoff_cap", {"backoff_cap": None}, "backoff_base and backoff_cap must be at least 0, in this order"),
    ("endless cap", {"backoff_cap": "2 years"}, "backoff_base and backoff_cap must be at least 0, in this order"),
    ("rate of 0", {"rate_limit": 0}, "rate_limit must be between 0.001 and 1e9 holds per second, not 0"),
    ("negative rate", {"rate_limit": -1}, "rate_limit must be between 0.001 and 1e9 holds per second, not -1"),
    ("no number as rate", {"rate_limit": float("nan")}, "rate_limit must be between 0.001 and 1e9 holds per second, not NaN"),
    ("endless rate", {"rate_limit": float("inf")}, "rate_limit must be between 0.001 and 1e9 holds per second, not Infinity"),
    ("no claims", {"max_claims": 0}, "max_claims must be at least 1"),
    ("no objective", {"objective": None}, "objective must be positive, not NULL"),
    ("objective of 0", {"objective": "0"}, "objective must be positive, not 00:00:00"),
    ("dry or not", {"dry_run": None}, "dry_run must be true or false, not NULL"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), [case[1:] for case in MISUSE], ids=[case[0] for case in MISUSE])
def test_misuse(core, arguments, message):
    """Raises 22023: a budget or an interval that makes no sense, NULL among them."""
    error = try_shop(core, arguments)
    assert (error.sqlstate, error.diag.message_primary[: len(message)]) == ("22023", message)
    assert books(core) == ([], [], [])


def test_a_name_that_is_no_relation_is_the_servers_own_error(core):
    """`target` is a regclass: the server names what is not there."""
    error = refuse(core, target="nothere.holds")
    assert re.search('schema "nothere" does not exist|relation "nothere.holds" does not exist', str(error))


@pytest.mark.parametrize(
    "column_type",
    [
        "double precision", "real", "money", "interval", "time", "timetz", "jsonb", "integer[]", "int4range", "regclass",
    ],
)  # fmt: skip
def test_a_key_without_an_unambiguous_text_is_refused(core, column_type):
    """Raises RP003: one session writes the text of a key and another reads it."""
    core.do(f"create table odd (id {column_type} primary key, status text, expires_at timestamptz)")
    error = refuse(core, target="odd")
    spelled = core.value(
        "select format_type(atttypid, atttypmod) from pg_attribute where attrelid = 'odd'::regclass and attname = 'id'"
    )
    assert error.sqlstate == "RP003"
    assert (
        error.diag.message_primary == f"key column public.odd.id has type {spelled}, whose text form is not unambiguous"
    )
    assert error.diag.message_hint.startswith("Keys may be integers, numeric, text, uuid, bytea")


def test_row_level_security_that_hides_rows_is_refused(core):
    """Raises RP003: hidden holds would never expire and nobody would know."""
    core.do(
        SHOP,
        "create role pgreaper_clerk",
        "grant create on schema public to pgreaper_clerk",
        "grant usage on schema pgreaper to pgreaper_clerk",
        "grant execute on all functions in schema pgreaper to pgreaper_clerk",
        "grant all on all tables in schema pgreaper to pgreaper_clerk",
        "grant all on all sequences in schema pgreaper to pgreaper_clerk",
        "grant select, update on shop_secret to pgreaper_clerk",
        "set local role pgreaper_clerk",
    )
    error = refuse(core, target="shop_secret", deadline_column="until")
    assert error.sqlstate == "RP003"
    assert (
        error.diag.message_primary
        == "row level security of public.shop_secret would hide holds from role pgreaper_clerk"
    )
    assert error.diag.message_hint.startswith("Register and run as a role with BYPASSRLS, or as the owner of a table")

    core.do("reset role", "alter table shop_secret force row level security, owner to pgreaper_clerk")
    core.do("set local role pgreaper_clerk")
    assert "row level security of public.shop_secret" in str(
        refuse(core, target="shop_secret", deadline_column="until")
    )

    core.do("alter table shop_secret no force row level security")
    assert core.register(target="shop_secret", deadline_column="until")


def test_row_level_security_under_a_view_is_refused(core):
    """Raises RP003 also for a superuser: the view reads with its owner's rights, or with those of whoever asks."""
    core.do(
        "create role pgreaper_clerk",
        "create table things (id int primary key, status text, until timestamptz)",
        "create table secrets (thing_id int)",
        "create view plain as select * from things as t where not exists (select from secrets as s where s.thing_id = t.id)",
        "create view above as select * from plain",
        "alter table secrets enable row level security",
        "grant select on secrets, things, plain to pgreaper_clerk",
    )
    views = ["plain", "above"]
    if core.connection.info.server_version >= 150000:  # before, every view reads with its owner's rights
        core.do("create view invoked with (security_invoker = on) as select * from plain")
        views.append("invoked")
    core.do('create role "Odd; Role" superuser', 'set local role "Odd; Role"')
    for view in views:
        assert core.register(target=view, deadline_column="until", dry_run=True), "read as superuser"
    core.do("reset role")
    core.do("alter view plain owner to pgreaper_clerk")
    for view in views:
        error = refuse(core, target=view, deadline_column="until")
        assert error.sqlstate == "RP003"
        assert error.diag.message_primary == (
            f"row level security of public.secrets, which view public.{view} reads, would hide rows from role pgreaper_clerk"
        )
        assert error.diag.message_hint.startswith("Give the view to a role with BYPASSRLS")
    core.do("alter table secrets owner to pgreaper_clerk")
    assert core.register(target="plain", deadline_column="until", dry_run=True), "the owner is not under it"
    core.do("alter table secrets force row level security")
    assert "would hide rows" in str(refuse(core, target="plain", deadline_column="until"))


def test_only_the_owner_registers_and_only_what_he_may_update(core):
    """Raises RP003: a policy makes other roles write to the table; the hint is the missing grant."""
    core.do(
        SHOP,
        "create role pgreaper_clerk",
        "grant usage on schema pgreaper to pgreaper_clerk",
        "grant execute on all functions in schema pgreaper to pgreaper_clerk",
        "grant all on all tables in schema pgreaper to pgreaper_clerk",
        "grant all on all sequences in schema pgreaper to pgreaper_clerk",
        "grant select, update on shop to pgreaper_clerk",
        "set local role pgreaper_clerk",
    )
    error = refuse(core, target="shop", deadline_column="until")
    assert (error.sqlstate, error.diag.message_primary) == ("RP003", "role pgreaper_clerk does not own public.shop")
    assert error.diag.message_hint == ("A policy makes other roles write to the table: let its owner register it.")

    core.do("reset role", "alter table shop_secret disable row level security, owner to pgreaper_clerk")
    core.do("revoke update on shop_secret from pgreaper_clerk", "set local role pgreaper_clerk")
    error = refuse(core, target="shop_secret", deadline_column="until")
    assert error.sqlstate == "RP003"
    assert error.diag.message_primary == "role pgreaper_clerk may not update column public.shop_secret.status"
    assert error.diag.message_hint == "grant update (status) on public.shop_secret to pgreaper_clerk"


def test_where_it_cannot_write_it_says_so(committed, core, holds):
    """Raises RP004 under another isolation level and in a read-only transaction."""
    call = "select pgreaper.reaper_register('p', 'holds', 'expires_at', 'status', '{held}', 'expired', 'tests')"
    for mode, message, hint in (
        ("isolation level repeatable read", "pgreaper works under READ COMMITTED, not REPEATABLE READ", READ_COMMITTED),
        ("isolation level serializable", "pgreaper works under READ COMMITTED, not SERIALIZABLE", READ_COMMITTED),
        ("read only", "this node or transaction is read-only", "Connect to the primary"),
    ):
        with core.connection.transaction(force_rollback=True):
            core.do(f"set transaction {mode}")
            error = core.refused(call)
        assert (error.sqlstate, error.diag.message_primary) == ("RP004", message)
        assert error.diag.message_hint.startswith(hint)
    assert books(core) == ([], [], [])


def test_c047_an_identity_key_is_fine_and_only_named_columns_are_written(core, holds):
    """Only status and stamp are written: a generated column beside them does not get in the way."""
    core.do(
        "alter table holds add is_expired boolean generated always as (status = 'expired') stored, add stamped timestamptz"
    )
    holds.due(1)
    core.register(stamp_column="stamped")
    assert core.run() == {"1": "expired"}
    assert core.rows("select status, is_expired, stamped is not null from holds") == [("expired", True, True)]


def test_c055_the_users_index_is_left_alone(core, holds):
    """Registering and withdrawing neither creates nor drops an index."""
    indexes = "select indexdef from pg_indexes where tablename = 'holds' order by 1"
    before = core.column(indexes)
    core.register()
    core.call("reaper_unregister", policy="p")
    assert core.column(indexes) == before

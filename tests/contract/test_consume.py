"""reaper_consume: the application takes a hold that is alive, under the reaper's own guard, mirrored."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest

MOMENT = "2030-06-01 12:00:00+00"
STAMPED = {"status_column": None, "held": None, "expired": None, "stamp_column": "stamp"}


def answer(core: Any, function: str = "reaper_consume", policy: str = "p", **arguments: Any) -> tuple[Any, ...]:
    """Outcome and state of a call."""
    ((outcome, state),) = core.call(function, "outcome", "state", policy=policy, **arguments)
    return outcome, state


@pytest.fixture
def one(core: Any, holds: Any) -> Any:
    """One hold, due in an hour, and a policy that knows the consumed state."""
    holds.ahead(1)
    core.register(consumed="consumed")
    return holds


# -- what is alive


@pytest.mark.parametrize(
    ("deadline", "grace", "outcome"),
    [
        ("timestamptz '2030-06-01 12:00:00.000001+00'", "0", ("consumed", "consumed")),
        ("timestamptz '2030-06-01 12:00:00+00'", "0", ("not-eligible", "held")),
        ("timestamptz '2030-06-01 11:59:59.999999+00'", "0", ("not-eligible", "held")),
        ("timestamptz '2030-06-01 11:50:00.000001+00'", "10 minutes", ("consumed", "consumed")),
        ("timestamptz '2030-06-01 11:50:00+00'", "10 minutes", ("not-eligible", "held")),
        ("timestamptz '2030-05-01 12:00:00+00'", "1 month", ("not-eligible", "held")),
        ("'infinity'", "0", ("consumed", "consumed")),
        ("'-infinity'", "0", ("not-eligible", "held")),
    ],
)
def test_alive_is_exactly_what_is_not_due(core, one, set_clock, deadline, grace, outcome):
    """At the boundary one side wins: what a claim takes is not consumed, and what is consumed no claim takes."""
    core.register(consumed="consumed", grace=grace)
    core.do(f"update holds set expires_at = {deadline}")
    set_clock(MOMENT)
    assert answer(core, key="1") == outcome
    assert (core.run() == {"1": "expired"}) == (outcome[0] == "not-eligible")


def test_a_deadline_of_null_never_comes(core, one):
    """Such a hold is alive, as it is never due."""
    core.do("alter table holds alter expires_at drop not null", "update holds set expires_at = null")
    assert core.call("reaper_consume", policy="p", key="1") == [("1", "consumed", "consumed", None, None)]


@pytest.mark.parametrize("state", ["expired", "cancelled", "odd"])
def test_c063_late_success_does_not_resurrect(core, one, state):
    """Whatever ended the hold stays, and the caller is told what it was."""
    core.do(f"update holds set status = '{state}'")
    assert answer(core, key="1") == ("not-eligible", state)
    assert one.states() == {1: state}


def test_what_was_consumed_is_already_done(core, one):
    """A call that is repeated, as a webhook is, says so and writes nothing."""
    assert answer(core, key="1") == ("consumed", "consumed")
    before = core.value("select xmin::text || ctid::text from holds")
    assert answer(core, key="1") == ("already-done", "consumed")
    assert core.value("select xmin::text || ctid::text from holds") == before


def test_a_hold_that_is_not_there(core, one):
    """An unknown key is no error: not-eligible without a state."""
    for key in ("2", "-7"):
        assert core.call("reaper_consume", policy="p", key=key) == [(key, "not-eligible", None, None, None)]


def test_the_clock_is_not_that_of_the_transaction(core, one):
    """A transaction that began before the deadline cannot consume after it."""
    core.do("update holds set expires_at = clock_timestamp() + interval '30 ms'")
    core.do("do $$ begin while (select expires_at > clock_timestamp() from holds) loop end loop; end $$")
    assert core.value("select expires_at > now() from holds"), "the transaction is older than the deadline"
    assert answer(core, key="1") == ("not-eligible", "held")
    assert answer(core, "reaper_extend", key="1", until="2100-01-01Z") == ("not-eligible", "held")


# -- what is written


def test_one_update_and_nothing_else(committed, core, one):
    """The row gets one version; no book is written, no event, no row lock is left behind by another transaction id."""
    core.do(
        "alter table holds add consumed_at timestamptz, add n int not null default 0",
        "create function counts() returns trigger language plpgsql as $$ begin new.n := old.n + 1; return new; end $$",
        "create trigger counts before update on holds for each row execute function counts()",
    )
    core.register(consumed="consumed", consumed_stamp_column="consumed_at")
    books = "claims transitions failures events totals cursors grants".split()
    before = [core.rows(f"select * from pgreaper.{book} order by 1") for book in books]
    assert answer(core, key="1") == ("consumed", "consumed")
    assert core.rows("select n, consumed_at between now() - interval '1 minute' and clock_timestamp() from holds") == [
        (1, True)
    ]
    assert [core.rows(f"select * from pgreaper.{book} order by 1") for book in books] == before


def test_it_belongs_to_the_callers_transaction(committed, core, one):
    """What is rolled back was not consumed."""
    with core.connection.transaction(force_rollback=True):
        assert answer(core, key="1") == ("consumed", "consumed")
        assert one.states() == {1: "consumed"}
    assert one.states() == {1: "held"}


def test_a_trigger_that_refuses_or_decides_otherwise(core, one):
    """What the trigger made of it is told; what it raises is raised."""
    core.do(
        "create function decides() returns trigger language plpgsql as $$ begin"
        " if old.customer_email = 'veto' then return null; end if;"
        " if old.customer_email = 'other' then new.status := 'review'; end if;"
        " if old.customer_email = 'raise' then raise 'no' using errcode = 'P0001'; end if;"
        " return new; end $$",
        "create trigger decides before update of status on holds for each row execute function decides()",
        "update holds set customer_email = 'veto'",
    )
    assert answer(core, key="1") == ("not-eligible", "held")
    core.do("update holds set customer_email = 'raise'")
    error = core.refused("select pgreaper.reaper_consume('p', '1')")
    assert error.sqlstate == "P0001"
    core.do("update holds set customer_email = 'other'")
    assert answer(core, key="1") == ("not-eligible", "review")


# -- kinds of targets


def test_c046_keys_are_those_of_the_books(core):
    """The text that a claim gives, and any other text of the same value, under any settings."""
    core.do("create table keyed (id timestamptz primary key, status text, expires_at timestamptz)")
    core.do("insert into keyed select '2026-11-01 01:30-04', 'held', now() + interval '1 hour'")
    core.do("set local timezone = 'Asia/Tokyo'", "set local datestyle = 'German, DMY'")
    core.register(target="keyed", consumed="consumed")
    assert core.call("reaper_consume", "key", "outcome", policy="p", key="2026-11-01T05:30:00") == [
        ("2026-11-01T05:30:00", "consumed")
    ]
    core.do("create table numbered (id numeric primary key, status text, expires_at timestamptz)")
    core.do("insert into numbered values (1.50, 'held', now() + interval '1 hour')")
    core.register("q", "numbered", consumed="consumed")
    assert core.call("reaper_consume", "key", "outcome", policy="q", key="001.500") == [("1.5", "consumed")]
    assert core.refused("select pgreaper.reaper_consume('q', 'none')").sqlstate == "22P02"


def test_c046_a_composite_key_names_one_row(core):
    """'a,b'+'c' and 'a'+'b,c' are two holds."""
    core.do("create table keyed (a text, b text, status text, expires_at timestamptz, primary key (a, b))")
    core.do(
        "insert into keyed select a, b, 'held', now() + interval '1 h'"
        " from (values ('a,b', 'c'), ('a', 'b,c')) as v (a, b)"
    )
    core.register(target="keyed", consumed="consumed")
    assert answer(core, key=json.dumps(["a", "b,c"])) == ("consumed", "consumed")
    assert core.column("select a from keyed where status = 'held'") == ["a,b"]
    assert answer(core, key='["a"]') == ("not-eligible", None)


STATES = {
    "enum": ("mood", "held", "expired", "consumed"),
    "integer": ("integer", "0", "2", "1"),
    "varchar": ("varchar(8)", "held", "expired", "consumed"),
    "char": ("char(12)", "held", "expired", "consumed"),
    "domain": ("short", "held", "expired", "consumed"),
}


@pytest.mark.parametrize("kind", STATES)
def test_types_of_states(core, kind):
    """Each that can be registered can be consumed."""
    column, held, expired, consumed = STATES[kind]
    core.do(
        "create schema elsewhere",
        "create type elsewhere.mood as enum ('held', 'expired', 'consumed')",
        "create domain elsewhere.short as varchar(10) check (value <> '')",
        f"create table things (id int primary key, expires_at timestamptz,"
        f" status {'elsewhere.' if column in ('mood', 'short') else ''}{column})",
        f"insert into things values (1, now() + interval '1 h', '{held}'), (2, now() - interval '1 h', '{held}'),"
        " (3, now() + interval '1 h', null)",
    )
    core.register(target="things", held=[held], expired=expired, consumed=consumed)
    assert answer(core, key="1") == ("consumed", consumed)
    assert answer(core, key="1") == ("already-done", consumed)
    assert answer(core, key="2") == ("not-eligible", held)
    assert answer(core, key="3") == ("not-eligible", None)
    assert answer(core, "reaper_extend", key="3", until="2100-01-01Z") == ("not-eligible", None)


def test_a_boolean_state_and_several_held_ones(core, holds):
    """A boolean has no third value: such a policy knows no consumed state; every held state can be consumed."""
    core.do("create table flags (id int primary key, over boolean, expires_at timestamptz)")
    error = core.refused(
        "select pgreaper.reaper_register('f', 'flags', 'expires_at', 'over', held => '{false}', expired => 'true',"
        " owner => 'o', consumed => 'true')"
    )
    assert "both consumed and expired" in str(error)
    holds.ahead(2)
    core.do("update holds set status = 'reserved' where id = 2")
    core.register(held=["held", "reserved"], consumed="consumed")
    assert [answer(core, key=key) for key in "12"] == [("consumed", "consumed")] * 2


def test_a_target_without_a_status(core):
    """Two stamps: held means both are null, and what was consumed never expires."""
    core.do(
        "create table things (id int primary key, until timestamptz, lapsed_at timestamptz, used_at timestamp)",
        "insert into things select g, now() + g * interval '1 hour' from generate_series(-1, 2) as g",
    )
    core.register(target="things", deadline_column="until", status_column=None, held=None, expired=None,
                  stamp_column="lapsed_at", consumed_stamp_column="used_at", stamp_zone="UTC")  # fmt: skip
    assert answer(core, key="1") == ("consumed", "consumed")
    assert answer(core, key="1") == ("already-done", "consumed")
    assert core.column(
        "select used_at at time zone 'UTC' between now() and clock_timestamp() from things where id = 1"
    ) == [True]
    assert answer(core, key="0") == ("not-eligible", "held")
    core.do("update things set until = now() - interval '1 hour'")
    assert core.run() == dict.fromkeys(["-1", "0", "2"], "expired")
    assert answer(core, key="2") == ("not-eligible", "expired")
    assert answer(core, key="1") == ("already-done", "consumed")


@pytest.mark.parametrize("kind", ["view", "by list", "by range"])
def test_views_and_partitions(core, kind):
    """A view's condition is part of the guard; a row may move to another partition with its new state or deadline."""
    columns = "id int, status text, expires_at timestamptz, paid boolean default false"
    rows = (
        "insert into {} (id, status, expires_at) select g, 'held', now() + g * interval '1 hour'"
        " from generate_series(0, 3) as g"
    )
    if kind == "view":
        core.do(f"create table below ({columns}, primary key (id))", rows.format("below"),
                "update below set paid = true where id = 3",
                "create view things as select * from below where not paid and status <> 'consumed'")  # fmt: skip
    elif kind == "by list":
        core.do(f"create table things ({columns}, primary key (id, status)) partition by list (status)",
                "create table h partition of things for values in ('held')",
                "create table r partition of things default", rows.format("things"))  # fmt: skip
    else:
        core.do(f"create table things ({columns}, primary key (id, expires_at)) partition by range (expires_at)",
                "create table n partition of things for values from (minvalue) to ('2099-01-01')",
                "create table r partition of things default", rows.format("things"))  # fmt: skip
    keyed = {} if kind == "view" else {"key_columns": ["id", "status" if kind == "by list" else "expires_at"]}
    core.register(target="things", consumed="consumed", **keyed)

    def key(number: int) -> str:
        if kind == "view":
            return str(number)
        second = "to_jsonb(expires_at at time zone 'UTC') #>> '{}'" if kind == "by range" else "status"
        return str(core.value(f"select json_build_array(id::text, {second})::text from things where id = %s", number))

    assert answer(core, key=key(0)) == ("not-eligible", "held")
    assert answer(core, key=key(1)) == ("consumed", "consumed")
    assert answer(core, "reaper_extend", key=key(2), until="2100-01-01Z") == ("extended", "held")
    if kind == "view":
        assert answer(core, key="3") == ("not-eligible", None)
        assert answer(core, key="1") == ("not-eligible", None), "the view does not show it any more"
    relation = "below" if kind == "view" else "things"
    assert core.rows(f"select id, status, expires_at > '2099-01-01' from {relation} where id in (1, 2) order by 1") == [
        (1, "consumed", False), (2, "held", True)
    ]  # fmt: skip


# -- misuse


def test_misuse(core, one):
    """Each is refused with what to do instead; nothing happens."""
    core.register("silent")
    refused = [
        ("select pgreaper.reaper_consume('nope', '1')", "RP002", "there is no policy nope"),
        ("select pgreaper.reaper_consume('p', null)", "22023", "key must not be NULL"),
        ("select pgreaper.reaper_consume('silent', '1')", "22023", "does not say what a consumed hold looks like"),
    ]
    for statement, code, message in refused:
        error = core.refused(statement)
        assert (error.sqlstate, message in str(error)) == (code, True), error
    core.do("set local transaction_read_only = on")
    assert core.refused("select pgreaper.reaper_consume('p', '1')").sqlstate == "RP004"


def test_a_paused_policy_stops_the_reaper_and_not_the_application(core, one):
    """Pausing is about claims."""
    core.call("reaper_pause", policy="p")
    assert answer(core, key="1") == ("consumed", "consumed")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"consumed": "held"}, "both consumed and held"),
        ({"consumed": "expired"}, "both consumed and expired"),
        ({"consumed_stamp_column": "stamp"}, "does not say which state they have"),
        ({"consumed": "consumed", "consumed_stamp_column": "customer_email"},
         "consumed stamp column .*customer_email has type text"),
        ({"consumed": "consumed", "consumed_stamp_column": "nope"}, "holds has no column nope"),
        ({"consumed": "consumed", "consumed_stamp_column": "local"}, "which says no time zone"),
        ({"consumed": "consumed", "consumed_stamp_column": "stamp", "stamp_zone": "UTC"}, "needs no zone"),
        ({"consumed": "consumed", "consumed_stamp_column": "stamp", "stamp_column": "stamp"}, "cannot be the stamp"),
        ({"consumed": "consumed", "consumed_stamp_column": "stamp", "set": '{"stamp": null}'},
         "set names the column stamp"),
        ({"restored": "held"}, "restored is of no use"),
        ({"restored": "odd", "restore_within": "1 h"}, "is not a held one"),
        ({"held": ["held", "odd"], "restore_within": "1 h"}, "which of its held states"),
        ({"restore_within": "-1 s"}, "restore_within must be positive"),
        ({"restore_within": "1 h", "set": '{"expires_at": "infinity"}'}, "set clears the deadline"),
        (STAMPED | {"consumed": "x"}, "names none"),
        (STAMPED | {"consumed_stamp_column": "always"},
         "is NOT NULL, so no row is held"),
    ],
)  # fmt: skip
def test_what_is_not_registered(core, holds, arguments, message):
    """Everything about it is checked at registration."""
    core.do(
        "alter table holds add stamp timestamptz, add local timestamp, add always timestamptz not null default now()"
    )
    with pytest.raises(psycopg.Error, match=message), core.connection.transaction():
        core.register(**arguments)


def test_a_stamp_zone_serves_either_stamp(core, holds):
    """One stamp with a zone and one without: the zone is of use."""
    core.do("alter table holds add stamp timestamptz, add local timestamp")
    core.register(stamp_column="stamp", consumed="consumed", consumed_stamp_column="local", stamp_zone="Asia/Tokyo")
    holds.ahead(1)
    assert answer(core, key="1") == ("consumed", "consumed")
    assert core.value("select local at time zone 'Asia/Tokyo' between now() and clock_timestamp() from holds")


def test_registering_again_changes_what_is_consumed(core, one):
    """Declarative here too: left out means none."""
    assert core.register() == [("consumed", "consumed", None)]
    assert core.register(restore_within="1 h") == [("restore_within", None, "01:00:00"), ("restored", None, "held")]


# -- row level security: the application may be one that sees its own rows only


def test_a_role_under_row_level_security(committed, core, one, worker_id):
    """It consumes its own; what it does not see is none of its holds."""
    one.ahead(1)
    role = f"pgreaper_tenant_{worker_id}"
    core.do(
        "alter table holds enable row level security",
        "create policy own on holds using (id = 1)",
        f"create role {role}",
    )
    try:
        core.rows(f"select * from pgreaper.reaper_grant('{role}', 'application')")
        core.do(f"set role {role}")
        assert answer(core, key="1") == ("consumed", "consumed")
        assert answer(core, key="2") == ("not-eligible", None)
    finally:
        core.do("reset role", f"drop owned by {role} cascade", f"drop role {role}")
    assert one.states() == {1: "consumed", 2: "held"}

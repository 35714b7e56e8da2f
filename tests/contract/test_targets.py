"""Targets: plain and partitioned tables, inheritance, simple views, names of every kind, and who is meant by a name."""

from __future__ import annotations

import pytest


def states(core, table="things"):
    return dict(core.rows(f"select id, status from {table} order by id"))


@pytest.fixture
def by_deadline(core):
    """Partitioned by range of the deadline; each partition's first row is at (0,1)."""
    core.do(
        "create table things (id int, status text not null default 'held', expires_at timestamptz not null, note text,"
        " primary key (id, expires_at)) partition by range (expires_at)",
        "create table things_2020 partition of things for values from ('2020-01-01Z') to ('2021-01-01Z')",
        "create table things_2021 partition of things for values from ('2021-01-01Z') to ('2022-01-01Z')",
        "create table things_rest partition of things default",
        "create index on things (expires_at) where status = 'held'",
    )


def test_c052_a_place_is_not_taken_for_a_row_in_another_partition(core, by_deadline):
    """The same ctid in every partition: only the due row changes."""
    core.do(
        "insert into things values (1, 'held', '2020-06-01Z'), (2, 'held', '2999-01-01Z'), (3,"
        " 'consumed', '2021-06-01Z')"
    )
    assert core.column("select distinct ctid::text from things") == ["(0,1)"]
    core.register(target="things")
    assert set(core.run().values()) == {"expired"}
    assert states(core) == {1: "expired", 2: "held", 3: "consumed"}


def test_range_partitions_with_claim_sweep_and_conflicts(committed, core, by_deadline):
    """Both ways in, with holds that moved on between claim and expire."""
    core.do(
        "insert into things select g, 'held', '2020-12-31 23:59Z'::timestamptz + g * interval '10 seconds'"
        " from generate_series(1, 20) as g"
    )
    core.register(target="things")
    token = core.claim(batch=10)[0].token
    core.do("update things set status = 'consumed' where id = 1", "delete from things where id = 2")
    core.do("update things set expires_at = '2999-01-01Z' where id = 3")
    outcomes = core.expire(token)
    assert sorted(outcome for outcome, _ in outcomes.values()) == ["expired"] * 7 + ["not-eligible"] * 3
    assert core.value("call pgreaper.reaper_sweep('p')") == 10
    assert states(core) == {1: "consumed", 3: "held"} | dict.fromkeys(range(4, 21), "expired")


@pytest.mark.parametrize("way", ["claim", "sweep"])
@pytest.mark.parametrize("table", ["things", "things_2020"])
def test_a_trigger_that_brings_a_hold_back_is_found_on_a_partition_too(committed, core, by_deadline, table, way):
    """Of the parent's or of one partition's own: its hold fails alone, the others expire, and nothing goes round."""
    core.do(
        "insert into things values (1, 'held', '2020-06-01Z'), (2, 'held', '2020-06-02Z'), (3, 'held', '2021-06-01Z')",
        "create function again() returns trigger language plpgsql as"
        " $$ begin update public.things set status = 'held' where id = new.id; return null; end $$",
        f"create trigger again after update on {table} for each row"
        " when (new.id = 2 and new.status = 'expired') execute function again()",
    )
    core.register(target="things")
    second = '["2", "2020-06-02T00:00:00"]'
    if way == "claim":
        outcomes = core.expire(core.claim()[0].token)
        assert [key for key, (outcome, _) in outcomes.items() if outcome == "dead-letter"] == [second]
    else:
        core.do("call pgreaper.reaper_sweep()")
    assert states(core) == {1: "expired", 2: "held", 3: "expired"}
    assert core.column("select key from pgreaper.dead_letters") == [second]


def test_c056_a_partition_is_detached_and_dropped_while_rows_are_leased(committed, core, by_deadline):
    """DETACH is not kept waiting; the rows are reported gone and nothing stays behind in the books."""
    core.do(
        "insert into things select g, 'held', '2020-06-01Z'::timestamptz + g * interval '1 s' from"
        " generate_series(1, 50) as g",
        "insert into things values (99, 'held', '2021-06-01Z')",
    )
    core.register(target="things", lease="1 minute")
    token = core.claim(batch=51)[0].token
    core.do(
        "set lock_timeout = '2s'",
        "alter table things detach partition things_2020",
        "drop table things_2020",
        "reset lock_timeout",
    )
    outcomes = core.expire(token)
    assert sorted(set(outcomes.values())) == [("expired", "expired"), ("not-eligible", None)]
    assert len(outcomes) == 51
    assert core.rows("select ending, expired, not_eligible from pgreaper.claims") == [("expired", 1, 50)]
    assert core.run() == {}
    assert core.value("select count(*) from pgreaper.failures") == 0


def test_a_row_that_moves_to_another_partition_with_its_status(core):
    """List partitions by status: the transition is a move, and it is one transition."""
    core.do(
        "create table things (id int, status text not null, expires_at timestamptz, primary key (id,"
        " status)) partition by list (status)",
        "create table things_held partition of things for values in ('held')",
        "create table things_done partition of things for values in ('expired', 'consumed')",
        "insert into things select g, case when g = 3 then 'consumed' else 'held' end, now() -"
        " interval '1 hour' from generate_series(1, 5) as g",
    )
    core.register(target="things")
    batch = core.claim()
    assert core.expire(batch[0].token) == {f'["{id_}", "held"]': ("expired", "expired") for id_ in (1, 2, 4, 5)}
    assert core.column("select count(*) from things_held") == [0]
    assert states(core) == {1: "expired", 2: "expired", 3: "consumed", 4: "expired", 5: "expired"}
    assert core.value("select sum(holds) from pgreaper.transitions") == 4
    assert core.run() == {}


def test_a_partition_alone_may_be_a_target(core, by_deadline):
    core.do("insert into things values (1, 'held', '2020-06-01Z'), (2, 'held', '2021-06-01Z')")
    core.register(target="things_2020")
    assert len(core.run()) == 1
    assert states(core) == {1: "expired", 2: "held"}


def test_c053_a_parent_of_tables_is_refused_and_a_child_that_comes_later_does_no_harm(core):
    """The key of a parent is not unique over its children: ONLY the parent's own rows are meant."""
    core.do(
        "create table things (id int primary key, status text, expires_at timestamptz)",
        "insert into things values (1, 'held', '2020-01-01Z')",
    )
    core.register(target="things")
    core.do(
        "create table child () inherits (things)",
        "insert into child values (1, 'held', '2020-01-01Z'), (2, 'held', '2020-01-01Z')",
    )
    assert core.run() == {"1": "expired"}
    assert core.column("select status from only things") == ["expired"]
    assert core.column("select distinct status from child") == ["held"]
    assert core.preview()["due"] == 0


VIEW = """
create table things (id int primary key, status text, expires_at timestamptz, paid boolean default false, note text);
create table payments (thing_id int, ok boolean);
create view open_things as
  select id, status, expires_at, note from things as t
   where not paid and not exists (select from payments as p where p.thing_id = t.id and p.ok);
insert into things select g, 'held', now() - interval '1 hour' from generate_series(1, 6) as g;
"""


def test_c054_a_condition_in_a_view_holds_at_the_write_too(core):
    """Columns and other tables: what was paid between claim and expire survives, and is reported."""
    core.do(VIEW, "update things set paid = true where id = 1", "insert into payments values (2, true), (3, false)")
    core.register(target="open_things")
    batch = core.claim()
    assert {hold.key for hold in batch} == {"3", "4", "5", "6"}
    core.do("update things set paid = true where id = 4", "insert into payments values (5, true)")
    assert core.expire(batch[0].token) == {
        "3": ("expired", "expired"), "4": ("not-eligible", None),
        "5": ("not-eligible", None), "6": ("expired", "expired"),
    }  # fmt: skip
    assert [id_ for id_, status in states(core).items() if status == "expired"] == [3, 6]
    assert core.run() == {}


def test_c054_a_view_with_renamed_columns_works_when_it_shows_the_key(core):
    """Deadline and status may have other names in the view; the key keeps its own."""
    core.do(
        VIEW, "create view renamed as select id, status as state, expires_at as until, note from things where not paid"
    )
    core.register(target="renamed", status_column="state", deadline_column="until", payload_columns=["note"])
    assert len(core.run()) == 6
    assert set(states(core).values()) == {"expired"}


def test_c054_a_view_that_shows_held_rows_only(core):
    """The row leaves the view with its transition: expired all the same, not a veto."""
    core.do(VIEW, "create view held_things as select * from things where status = 'held'")
    core.register(target="held_things")
    core.do("update things set expires_at = expires_at + id * interval '1 second'")
    token = core.claim(batch=3)[0].token
    core.do("update things set status = 'consumed' where id = 1")
    assert core.expire(token) == {"1": ("not-eligible", None), "2": ("expired", "expired"), "3": ("expired", "expired")}
    assert core.run() == {"4": "expired", "5": "expired", "6": "expired"}
    assert core.value("select sum(holds) from pgreaper.transitions") == 5


def test_c054_a_view_over_a_view(core):
    core.do(
        VIEW,
        "create view noted as select * from open_things where note is null",
        "update things set note = 'x' where id < 4",
    )
    core.register(target="noted")
    assert core.run() == dict.fromkeys("456", "expired")


def test_c054_the_key_is_that_of_the_table_which_the_view_updates(core):
    """Not that of another table in a subquery, whose key would name several holds."""
    core.do(
        "create table marks (id int primary key)",
        "create table things (tenant int, id int, status text, expires_at timestamptz, primary key (tenant, id))",
        "create view open_things as select * from things as t where not exists (select m.id from"
        " marks as m where m.id = t.id)",
        "insert into things values (1, 1, 'held', now() - interval '1 hour'), (2, 1, 'held', now() +"
        " interval '1 hour')",
    )
    core.register(target="open_things")
    assert core.column("select key_columns from pgreaper.policies") == [["tenant", "id"]]
    assert core.run() == {'["1", "1"]': "expired"}


def test_c054_another_column_under_the_name_of_the_key_is_no_key(core):
    """Also a view further down; a column with an odd name is followed all the same."""
    core.do(
        'create table things (id int, "odd \\ (id)" int primary key, code int, status text, expires_at timestamptz)',
        'create view swapped as select code as "odd \\ (id)", status, expires_at, id from things',
        "create view over_swapped as select * from swapped",
        'create view fine as select id, status, expires_at, "odd \\ (id)" from things',
        "create view over_fine as select * from fine",
    )
    for view in ("swapped", "over_swapped"):
        error = core.refused(
            "select pgreaper.reaper_register('p', %s, 'expires_at', 'status', '{held}', 'expired', 't')", view
        )
        assert error.diag.message_primary == f"public.{view} has no primary key that could identify a hold"
    core.register(target="over_fine")
    assert core.column("select key_columns from pgreaper.policies") == [["odd \\ (id)"]]


def test_c054_nothing_is_half_registered(core):
    core.do(VIEW, "create view bad as select t.* from things as t left join payments as p on p.thing_id = t.id")
    assert (
        core.refused(
            "select pgreaper.reaper_register('p', 'bad', 'expires_at', 'status', '{held}', 'expired', 't')"
        ).sqlstate
        == "RP003"
    )
    assert core.value("select count(*) from pgreaper.policies") == 0


def test_c048_hostile_names_round_trip(core):
    """Quotes, %, non-ASCII, words and SQL in schema, table and column names; nothing else is executed."""
    table = '"Tenant-B"."Hold""s; DROP TABLE x;--"'
    core.do(
        'create schema "Tenant-B"',
        "create table x (id int)",
        f'create table {table} ("żółć" int primary key, "stat%s" text, "Expires At" timestamptz, "select" text,'
        ' "$1" timestamptz, "%I" text)',
        f"insert into {table} values (1, 'held', now() - interval '1 hour', 'x', null, 'y')",
        f'create index on {table} ("Expires At") where "stat%s" = \'held\'',
    )
    changes = core.register(
        'Pol"icy %s', target=table, deadline_column="Expires At", status_column="stat%s", stamp_column="$1",
        set='{"select": null, "%I": "%L"}', payload_columns=["select", "stat%s", "żółć"],
    )  # fmt: skip
    assert ("target_table", None, 'Hold"s; DROP TABLE x;--') in changes
    batch = core.claim('Pol"icy %s', worker="w'--%s")
    assert batch[0].payload == {"select": "x", "stat%s": "held", "żółć": 1}
    assert core.expire(batch[0].token) == {"1": ("expired", "expired")}
    assert core.rows(f'select "stat%s", "select", "$1" is not null, "%I" from {table}') == [
        ("expired", None, True, "%L")
    ]
    assert core.value("select to_regclass('x') is not null")
    assert core.value("select target from pgreaper.status") == table
    assert core.preview('Pol"icy %s')["due"] == 0
    assert core.value("select pgreaper.reaper_next_due()") is None
    assert core.column("select worker from pgreaper.reaper_history(%s, '1')", 'Pol"icy %s') == ["w'--%s"]


def test_c049_names_that_share_their_first_63_bytes_do_not_collide(core):
    """No name is derived from another: two long names are two targets."""
    long = "a_table_with_a_name_that_is_so_long_that_others_begin_with_i"
    for suffix in ("1", "2"):
        core.do(f"create table {long}{suffix} (id int primary key, status text, expires_at timestamptz)")
        core.do(f"insert into {long}{suffix} values ({suffix}, 'held', now() - interval '1 hour')")
        core.register(f"{long}{suffix}{'x' * 50}", target=f"{long}{suffix}")
    assert core.run(f"{long}1{'x' * 50}") == {"1": "expired"}
    assert core.rows(f"select status from {long}2") == [("held",)]


def test_c109_the_name_at_registration_is_the_table_for_ever(core):
    """Schema and name are stored: another search_path does not lead to another table."""
    for schema in ('"Tenant-B"', "other"):
        core.do(
            f"create schema {schema}",
            f'create table {schema}."Holds" (id int primary key, status text, expires_at timestamptz)',
        )
        core.do(f"insert into {schema}.\"Holds\" values (1, 'held', now() - interval '1 hour')")
    core.do('set local search_path = "Tenant-B", public')
    core.register(target='"Holds"')
    assert core.rows("select target_schema, target_table from pgreaper.policies") == [("Tenant-B", "Holds")]
    core.do("set local search_path = other, public")
    assert core.run() == {"1": "expired"}
    assert core.rows('select status from "Holds"') == [("held",)]
    assert core.rows('select status from "Tenant-B"."Holds"') == [("expired",)]


def test_c109_a_renamed_table_is_reported_and_never_another_one_taken(core):
    core.do("create schema old", "create table things (id int primary key, status text, expires_at timestamptz)")
    core.register(target="things")
    core.do("alter table things set schema old")
    error = core.refused("select pgreaper.reaper_claim('p')")
    assert (error.sqlstate, error.diag.message_primary) == (
        "42P01",
        "public.things, the target of policy p, does not exist",
    )
    assert core.value("select state from pgreaper.status") == "broken"


def test_a_table_that_is_swapped_under_its_name_needs_no_registering(core):
    """Also when the type of a column has changed: statements are built from the catalog as it is."""
    core.do("create table things (id int primary key, status text, expires_at timestamptz)")
    core.register(target="things")
    core.claim()
    core.do(
        "drop table things", "create type st as enum ('held', 'expired')",
        "create table things (note text, expires_at timestamptz, id bigint primary key, status st)",
        "insert into things values ('x', now() - interval '1 hour', 5000000000, 'held')",
    )  # fmt: skip
    assert core.run() == {"5000000000": "expired"}


def test_row_level_security_that_came_later_is_refused(core):
    """42501: rows that are hidden would look as if nothing were due."""
    core.do(
        "create table things (id int primary key, status text, expires_at timestamptz)",
        "insert into things values (1, 'held', now() - interval '1 hour')",
    )
    core.register(target="things")
    core.do(
        "create role pgreaper_clerk",
        "grant usage on schema pgreaper to pgreaper_clerk",
        "grant execute on all functions in schema pgreaper to pgreaper_clerk",
        "grant all on all tables in schema pgreaper to pgreaper_clerk",
        "grant all on all sequences in schema pgreaper to pgreaper_clerk",
        "grant select, update on things to pgreaper_clerk",
        "alter table things enable row level security",
        "set local role pgreaper_clerk",
    )
    error = core.refused("select pgreaper.reaper_claim('p')")
    assert error.sqlstate == "42501"
    assert error.diag.message_primary == "row level security of public.things would hide holds from role pgreaper_clerk"
    assert error.diag.message_hint.startswith("Run as a role with BYPASSRLS")
    core.do("reset role", "alter table things disable row level security", "set local role pgreaper_clerk")
    assert core.run() == {"1": "expired"}, "with the rights of a plain role"


CLERK = (
    "create role pgreaper_clerk",
    "grant usage on schema pgreaper to pgreaper_clerk",
    "grant execute on all functions in schema pgreaper to pgreaper_clerk",
    "grant all on all tables in schema pgreaper to pgreaper_clerk",
    "grant all on all sequences in schema pgreaper to pgreaper_clerk",
)


@pytest.mark.parametrize("reads_as", ["its owner", "whoever asks", "its owner, in a condition"])
def test_row_level_security_behind_a_view_that_came_later_is_refused(core, reads_as):
    """42501 for every way in: half of the holds would never expire, and nothing would say so."""
    if reads_as == "whoever asks" and core.connection.info.server_version < 150000:
        pytest.skip("views with security_invoker came with PostgreSQL 15")
    core.do(
        *CLERK,
        "create role pgreaper_maker",
        "create table things (id int primary key, status text, expires_at timestamptz)",
        "create table shops (thing_id int)",
        "insert into things select g, 'held', now() - interval '1 hour' from generate_series(1, 10) as g",
        "insert into shops select g from generate_series(1, 10) as g",
        {
            "its owner": "create view open_things as select * from things",
            "whoever asks": "create view open_things with (security_invoker) as select * from things",
            "its owner, in a condition": "create view open_things as select * from things as t"
            " where exists (select from shops as s where s.thing_id = t.id)",
        }[reads_as],
        "alter view open_things owner to pgreaper_maker",
        "grant all on things, shops to pgreaper_clerk, pgreaper_maker",
        "grant all on open_things to pgreaper_clerk",
    )
    core.register(target="open_things", key_columns=["id"])
    hidden = "shops" if "condition" in reads_as else "things"
    core.do(
        f"create policy half on {hidden} using ({'thing_' if 'condition' in reads_as else ''}id % 2 = 0)",
        f"alter table {hidden} enable row level security",
        "set local role pgreaper_clerk",
    )
    from_whom = "pgreaper_clerk" if reads_as == "whoever asks" else "pgreaper_maker"
    which = f"public.{hidden}, which view public.open_things reads,"
    fact = f"row level security of {which} would hide holds from role {from_whom}"
    for call in (
        "pgreaper.reaper_claim('p')",
        "pgreaper._sweep_step('p', 10, 10, 'w', pgreaper._clock(), pgreaper._clock())",
        "pgreaper.reaper_preview('p')",
    ):
        error = core.refused(f"select {call}")
        assert (error.sqlstate, error.diag.message_primary) == ("42501", fact)
        assert error.diag.message_hint.startswith("Give that role BYPASSRLS")
    assert core.rows("select state, reason from pgreaper.status") == [("broken", fact)]
    core.do("reset role", f"alter role {from_whom} bypassrls", "set local role pgreaper_clerk")
    assert core.run() == {str(n): "expired" for n in range(1, 11)}


TIMELESS = {
    "deadline": ("expires_at", "timestamp"),
    "deadline that is a day": ("expires_at", "date"),
    "deadline that is no time": ("expires_at", "text"),
    "stamp": ("expired_at", "timestamp"),
    "stamp that is no time": ("expired_at", "text"),
    "consumed stamp": ("used_at", "timestamp"),
}


@pytest.mark.parametrize("what", TIMELESS)
def test_a_time_that_has_lost_its_zone_is_named(core, what):
    """42804: to convert to no zone would be a syntax error for a deadline, and for a stamp a silent NULL."""
    column, type_ = TIMELESS[what]
    core.do(
        "create table things (id int primary key, expires_at timestamptz, expired_at timestamptz, used_at timestamptz)",
        "insert into things values (1, now() - interval '3 days')",
    )
    core.register(target="things", status_column=None, held=None, expired=None, stamp_column="expired_at",
                  consumed_stamp_column="used_at")  # fmt: skip
    core.do(f"alter table things alter {column} type {type_}")
    error = core.refused("select pgreaper.reaper_claim('p')")
    assert error.sqlstate == "42804"
    shown = "timestamp without time zone" if type_ == "timestamp" else type_
    why, remedy = "and policy p tells no time zone for it", "Register the policy again with the zone"
    if type_ == "text":
        why, remedy = "which is no time that policy p could work with", "Give the column back a type"
    assert error.diag.message_primary == f"column {column} of public.things has type {shown} now, {why}"
    assert error.diag.message_hint.startswith(remedy)
    ((state, reason),) = core.rows("select state, reason from pgreaper.status")
    assert (state, reason) == ("broken", error.diag.message_primary)
    if type_ != "text":
        core.register(target="things", status_column=None, held=None, expired=None, stamp_column="expired_at",
                      consumed_stamp_column="used_at", zone="UTC")  # fmt: skip
        assert core.claim()


def test_a_foreign_key_on_the_key_and_statement_triggers_are_no_obstacle(core):
    """One statement: a statement trigger fires once a batch."""
    core.do(
        "create table things (id int primary key, status text, expires_at timestamptz)",
        "create table child (thing_id int references things on delete cascade on update cascade)",
        "create table log (n int)",
        "create function note() returns trigger language plpgsql as $$ begin insert into log select"
        " count(*) from changed; return null; end $$",
        "create trigger note after update on things referencing new table as changed for each"
        " statement execute function note()",
        "insert into things select g, 'held', now() - interval '1 hour' from generate_series(1, 10) as g",
        "insert into child select id from things",
    )
    core.register(target="things")
    core.run()
    assert core.column("select n from log") == [10]

"""reaper_expire_keys: holds that somebody names expire under the same guard as all others, and nothing else does."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

MOMENT = "2030-06-01 12:00:00+00"
NOW = datetime(2030, 6, 1, 12, tzinfo=UTC)


def command(core: Any, *keys: str, policy: str = "p", **arguments: Any) -> dict[str, tuple[str, str | None]]:
    """Outcome and state by key, each of which must come back once."""
    found = core.call("reaper_expire_keys", "key", "outcome", "state", policy=policy, keys=list(keys), **arguments)
    answers = {key: (outcome, state) for key, outcome, state in found}
    assert len(answers) == len(found), f"a key came back twice: {found}"
    return answers


def due_at(core: Any, *keys: str, policy: str = "p") -> dict[str, datetime | None]:
    """When to ask again, by key."""
    return dict(core.call("reaper_expire_keys", "key", "due_at", policy=policy, keys=list(keys)))


def trail(core: Any) -> dict[str, int]:
    """How often each key is in the trail."""
    return dict(
        core.rows("select k.key, count(*) from pgreaper.transitions as t, unnest(t.keys) as k (key) group by k.key")
    )


def events(core: Any) -> list[tuple[Any, ...]]:
    return list(core.rows("select key, kind, state from pgreaper.events where key is not null order by event_id"))


def refusing(core: Any, when: str, what: str = "raise check_violation") -> None:
    """A trigger that refuses the holds of which `when` is true."""
    core.do(
        f"create function refuses() returns trigger language plpgsql as $$ begin {what}; end $$",
        f"create trigger refuses before update on holds for each row when ({when}) execute function refuses()",
    )


# -- the guard


@pytest.mark.parametrize(
    ("deadline", "grace", "outcome"),
    [
        ("timestamptz '2030-06-01 12:00:00+00'", "0", "expired"),
        ("timestamptz '2030-06-01 12:00:00.000001+00'", "0", "not-due"),
        ("timestamptz '2030-06-01 11:50:00+00'", "10 minutes", "expired"),
        ("timestamptz '2030-06-01 11:50:00.000001+00'", "10 minutes", "not-due"),
        ("'-infinity'", "0", "expired"),
        ("'infinity'", "0", "not-eligible"),
        ("null", "0", "not-eligible"),
        ("timestamptz '200001-01-01 00:00:00+00'", "10 minutes", "not-eligible"),
    ],
)
def test_a_command_decides_nothing(core, holds, set_clock, deadline, grace, outcome):
    """What is due expires and what is not stays held, to the microsecond; what never is due is not waited for."""
    holds.ahead(1)
    core.register(grace=grace)
    core.do("alter table holds alter expires_at drop not null", f"update holds set expires_at = {deadline}")
    set_clock(MOMENT)
    state = "expired" if outcome == "expired" else "held"
    assert command(core, "1") == {"1": (outcome, state)}
    assert holds.states() == {1: state}
    assert trail(core) == ({"1": 1} if outcome == "expired" else {})


def test_an_early_command_learns_when_to_come_again(core, holds, set_clock):
    """`due_at` is deadline + grace, whatever the deadline's type makes of it, and nothing is written."""
    holds.ahead(2)
    core.register(grace="90 seconds")
    core.do(f"update holds set expires_at = timestamptz '{MOMENT}' + interval '1 hour' * id")
    set_clock(MOMENT)
    assert due_at(core, "1", "2") == {str(n): NOW + timedelta(hours=n, seconds=90) for n in (1, 2)}
    assert events(core) == []
    core.do("alter table holds alter expires_at type date using date '2030-06-02'")
    core.register(zone="Asia/Tokyo")
    assert due_at(core, "1") == {"1": datetime(2030, 6, 2, 15, tzinfo=UTC)}


@pytest.mark.parametrize("state", ["consumed", "cancelled"])
def test_what_the_application_ended_stays(core, holds, state):
    """Not eligible, with the state that was found, and on record like the conflict of a claim."""
    holds.due(1)
    core.register()
    core.do(f"update holds set status = '{state}'")
    assert command(core, "1", worker="w") == {"1": ("not-eligible", state)}
    assert holds.states() == {1: state}
    assert events(core) == [("1", "not-eligible", state)]
    assert core.column("select worker from pgreaper.events where key = '1'") == ["w"]


def test_a_command_that_is_repeated(core, holds):
    """One transition; what comes later is told so, and counted as what it is."""
    holds.due(1)
    core.register()
    assert command(core, "1") == {"1": ("expired", "expired")}
    assert command(core, "1") == {"1": ("already-done", "expired")}
    assert trail(core) == {"1": 1}
    assert core.rows("select expired, already_done from pgreaper.totals") == [(1, 1)]


def test_duplicates_and_order_in_one_call(core, holds):
    """The same key twice, or in two spellings, is one transition; each spelling is answered once."""
    holds.due(3)
    core.register()
    assert command(core, "3", "1", "01", "3", " 2") == dict.fromkeys(("1", "01", "3", " 2"), ("expired", "expired"))
    assert trail(core) == {"1": 1, "2": 1, "3": 1}


def test_two_spellings_are_one_hold_to_the_rate_limit(core, holds):
    """What is given twice is spent once."""
    holds.due(2)
    core.register(rate_limit=2)
    assert command(core, "1", "01", "001", "2") == dict.fromkeys(("1", "01", "001", "2"), ("expired", "expired"))


def test_only_what_is_named(core, holds):
    """Others that are due are not touched."""
    holds.due(3)
    core.register()
    command(core, "2")
    assert holds.states() == {1: "held", 2: "expired", 3: "held"}


def test_a_key_that_no_hold_has(core, holds):
    """It is no error, and nobody can fill the books with such keys."""
    core.register()
    assert command(core, "77") == {"77": ("not-eligible", None)}
    assert core.column("select kind from pgreaper.events") == ["register"]


@pytest.mark.parametrize("wrong", ["x", "", "1.5", "99999999999999999999", '["1"]'])
def test_a_key_that_no_hold_could_have(core, holds, wrong):
    """It says so for itself: the others of the call expire."""
    holds.due(2)
    core.register()
    assert command(core, "1", wrong, "2") == {
        "1": ("expired", "expired"), wrong: ("wrong-key", None), "2": ("expired", "expired"),
    }  # fmt: skip


def test_a_view_that_fails_makes_no_key_wrong(core, holds):
    """Whatever a row raises is raised, and nothing happened: good commands must not end among the poison."""
    holds.due(2)
    core.do("create view seen as select id, status, expires_at from holds where 1 / (2 - id) is not null")
    core.register(target="seen")
    assert core.refused("select pgreaper.reaper_expire_keys('p', '{2}')").sqlstate == "22012"
    assert command(core, "1", "x") == {"1": ("expired", "expired"), "x": ("wrong-key", None)}


@pytest.mark.parametrize(
    ("columns", "given"),
    [
        ("a int, b date, primary key (a, b)", '["1", "2026-13-01"]'),
        ("a int, b date, primary key (a, b)", "1"),
        ("a int, b date, primary key (a, b)", '["1"'),
        ("id uuid primary key", "7"),
        ("id positive primary key", "-7"),
        ("id mood primary key", "glad"),
    ],
)
def test_keys_that_their_types_refuse(core, columns, given):
    """Of any kind, in each of their columns."""
    core.do("create domain positive as int check (value > 0)", "create type mood as enum ('sad')")
    core.do(f"create table t ({columns}, status text default 'held', expires_at timestamptz default '-infinity')")
    core.register(target="t")
    assert command(core, given) == {given: ("wrong-key", None)}


@pytest.mark.parametrize(
    ("columns", "values", "given"),
    [
        ("id uuid primary key", "'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'", "{A0EEBC999C0B4EF8BB6D6BB9BD380A11}"),
        ("a int, b text, primary key (a, b)", "7, 'x \"y'", '["7","x \\"y"]'),
        ("id timestamptz primary key", "'2030-01-01 00:00+00'", "2030-01-01 00:00:00"),
        ("id numeric primary key", "1.50", "1.500"),
    ],
)
def test_keys_spelled_otherwise(core, columns, values, given):
    """A key is found however its type reads it, and the trail has it as pgreaper spells it."""
    core.do(f"create table t ({columns}, status text default 'held', expires_at timestamptz default '-infinity')")
    core.do(f"insert into t values ({values})")
    core.register(target="t")
    assert command(core, given) == {given: ("expired", "expired")}
    (key,) = trail(core)
    assert command(core, key, given) == {key: ("already-done", "expired"), given: ("already-done", "expired")}


@pytest.mark.parametrize("kind", ["view", "partitioned"])
def test_kinds_of_targets(core, kind):
    """Where rows have no place that a hint could name, they are found by their keys."""
    columns = "id bigint primary key, status text default 'held', expires_at timestamptz default '-infinity'"
    if kind == "view":
        core.do(f"create table t_all ({columns}, paid boolean default false)")
        core.do("create view t as select id, status, expires_at from t_all where not paid")
        core.do("insert into t_all (id, paid) values (1, false), (2, true)")
    else:
        core.do(f"create table t ({columns}) partition by range (id)",
                "create table t_1 partition of t for values from (1) to (2)",
                "create table t_2 partition of t for values from (2) to (3)")  # fmt: skip
        core.do("insert into t (id) values (1)")
    core.register(target="t")
    assert command(core, "1", "2") == {"1": ("expired", "expired"), "2": ("not-eligible", None)}


# -- others that have a hand in it


def test_a_locked_hold_is_not_waited_for(committed, core, holds):
    """It is `locked`, unrecorded and uncharged; the others expire."""
    holds.due(2)
    core.register()
    other = committed()
    with other.transaction():
        other.execute("select from holds where id = 1 for update")
        assert command(core, "1", "2") == {"1": ("locked", "held"), "2": ("expired", "expired")}
    assert events(core) == []
    assert command(core, "1") == {"1": ("expired", "expired")}


def test_a_locked_table_changes_nothing(committed, core, holds):
    """55P03, in less time than the application would notice."""
    holds.due(1)
    core.register()
    other = committed()
    with other.transaction():
        other.execute("lock table holds in access exclusive mode")
        assert core.refused("select pgreaper.reaper_expire_keys('p', '{1}')").sqlstate == "55P03"
    assert command(core, "1") == {"1": ("expired", "expired")}


def test_a_lease_keeps_nobody_from_it(core, holds):
    """Correctness never rests on leases: the command wins, and the worker is told."""
    holds.due(2)
    core.register()
    claim = core.claim()
    assert command(core, "1") == {"1": ("expired", "expired")}
    assert core.expire(claim[0].token) == {"1": ("already-done", "expired"), "2": ("expired", "expired")}
    assert trail(core) == {"1": 1, "2": 1}


@pytest.mark.parametrize(
    ("change", "answer"),
    [
        ("update public.holds_all set expires_at = '2100-01-01+00'", ("not-due", "held")),
        ("update public.holds_all set status = 'consumed'", ("not-eligible", "consumed")),
        ("delete from public.holds_all", ("not-eligible", None)),
    ],
)
def test_it_moves_on_between_the_look_and_the_lock(committed, core, holds, change, answer):
    """What was extended is a hold whose command came early, not one that is over; the others are over."""
    if not core.value("select exists (select from pg_available_extensions where name = 'dblink')"):
        pytest.skip("this server has no dblink: apt-get install postgresql-contrib")
    holds.due(1)
    core.register()
    # The target is looked at through a view, so that the application gets in between the look and the transition.
    core.do(
        "create extension dblink",
        "create sequence looks",
        "alter table holds rename to holds_all",
        "create function moves_on() returns boolean language plpgsql as $f$ begin"
        " if nextval('public.looks') = 2 then"
        "   perform public.dblink_exec(format('dbname=%s host=%s port=%s user=%s', current_database(),"
        "     split_part(current_setting('unix_socket_directories'), ',', 1), current_setting('port'), current_user),"
        f"     $sql${change}$sql$);"
        " end if; return true; end $f$",
        "create view holds as select * from holds_all where moves_on()",
    )
    assert command(core, "1") == {"1": answer}
    assert core.value("select last_value from looks") >= 2
    assert trail(core) == {}


def test_row_level_security_that_would_hide_holds(core, holds):
    """Whoever would not see all holds is refused, and not told that there are none."""
    holds.due(1)
    core.register()
    core.do("create role l_half", "alter table holds enable row level security")
    core.rows("select * from pgreaper.reaper_grant('l_half', 'worker')")
    with core.connection.transaction(force_rollback=True):
        core.do("set local role l_half")
        assert core.refused("select pgreaper.reaper_expire_keys('p', '{1}')").sqlstate == "42501"


def test_a_right_that_is_missing(core, holds):
    """The message names the column, and nobody is charged."""
    holds.due(1)
    core.register()
    core.do("create role l_less")
    core.rows("select * from pgreaper.reaper_grant('l_less', 'worker')")
    core.do("revoke update (status) on holds from l_less", "set local role l_less")
    error = core.refused("select pgreaper.reaper_expire_keys('p', '{1}')")
    core.do("reset role")
    assert error.sqlstate == "42501"
    assert "status" in str(error)
    assert events(core) == []


# -- policies that rest


def test_a_paused_policy(core, holds):
    """What would expire must come again, nobody knows when; what is over or early is answered as ever."""
    holds.due(2)
    holds.ahead(1)
    core.register()
    command(core, "2")
    core.call("reaper_pause", policy="p", reason="stop")
    assert command(core, "1", "2", "3", "x") == {
        "1": ("resting", "held"), "2": ("already-done", "expired"), "3": ("not-due", "held"), "x": ("wrong-key", None),
    }  # fmt: skip
    assert due_at(core, "1") == {"1": None}
    assert holds.states()[1] == "held"
    core.call("reaper_resume", policy="p")
    assert command(core, "1") == {"1": ("expired", "expired")}


def test_the_rate_limit(core, holds, set_clock):
    """Commands spend from it like claims; what it does not let go comes again one after the other, oldest first."""
    set_clock(MOMENT)
    core.do("insert into holds (expires_at) select timestamptz '2030-05-01+00' + g * interval '1 s'"
            " from generate_series(1, 5) as g")  # fmt: skip
    core.register(rate_limit=2)
    found = {key: (outcome, at) for key, outcome, at in
             core.call("reaper_expire_keys", "key", "outcome", "due_at", policy="p", keys=list("54321"))}  # fmt: skip
    assert found == {
        "1": ("expired", None), "2": ("expired", None),
        **{str(2 + n): ("resting", NOW + timedelta(seconds=n / 2)) for n in (1, 2, 3)},
    }  # fmt: skip
    assert core.claim(rescan=True) == []
    set_clock(NOW + timedelta(seconds=1))
    assert {outcome for outcome, _ in command(core, "3", "4").values()} == {"expired"}
    assert core.claim(rescan=True) == []


def test_holds_that_fail_alike_suspend_the_policy(core, holds, set_clock):
    """As in a sweep: nobody is charged, the policy rests, and is then tried with a few."""
    set_clock(MOMENT)
    core.do("insert into holds (expires_at) select timestamptz '2030-05-01+00' from generate_series(1, 20)")
    core.register()
    refusing(core, "true")
    keys = [str(n) for n in range(1, 21)]
    assert set(command(core, *keys).values()) == {("retry", "held")}
    assert core.value("select count(*) from pgreaper.failures") == 0
    until = core.value("select suspended_until from pgreaper.cursors")
    assert set(command(core, *keys).values()) == {("resting", "held")}
    assert set(due_at(core, *keys).values()) == {max(until, NOW + timedelta(seconds=1))}
    set_clock(until)
    outcomes = [outcome for outcome, _ in command(core, *keys).values()]
    assert sorted(outcomes) == ["resting"] * 12 + ["retry"] * 8
    assert core.value("select suspended_until from pgreaper.cursors") > until
    set_clock(core.value("select suspended_until from pgreaper.cursors"))
    core.do("drop trigger refuses on holds")
    assert sorted(outcome for outcome, _ in command(core, *keys).values()) == ["expired"] * 8 + ["resting"] * 12
    assert sorted(outcome for outcome, _ in command(core, *keys).values()) == ["already-done"] * 8 + ["expired"] * 12


# -- failures


def test_a_hold_that_fails_alone(core, holds):
    """Among good ones it becomes a dead letter, with a command to replay it, and no further command tries it."""
    holds.due(3)
    core.register()
    refusing(core, "old.id = 2")
    assert command(core, "1", "2", "3") == {
        "1": ("expired", "expired"), "2": ("dead-letter", "held"), "3": ("expired", "expired"),
    }  # fmt: skip
    assert core.column("select key from pgreaper.dead_letters") == ["2"]
    core.do("drop trigger refuses on holds")
    assert command(core, "2") == {"2": ("dead-letter", "held")}
    assert core.column("select attempts from pgreaper.failures") == [1]
    core.call("reaper_replay", policy="p", key="2")
    assert command(core, "2") == {"2": ("expired", "expired")}
    assert core.value("select count(*) from pgreaper.failures") == 0


def test_a_retry_waits_for_its_time(core, holds, set_clock):
    """A command neither shortens the backoff nor charges anybody; `due_at` is when it is worth to come again."""
    holds.due(2)
    core.register(backoff_base="1 minute")
    set_clock(MOMENT)
    refusing(core, "old.id = 2", "raise 'no' using errcode = '40001'")
    assert command(core, "1", "2") == {"1": ("expired", "expired"), "2": ("retry", "held")}
    (again,) = core.column("select not_before from pgreaper.failures")
    assert due_at(core, "2") == {"2": again}
    assert again > NOW + timedelta(minutes=1)
    core.do("drop trigger refuses on holds")
    assert command(core, "2") == {"2": ("retry", "held")}
    assert core.column("select attempts from pgreaper.failures") == [1]
    set_clock(again)
    assert command(core, "2") == {"2": ("expired", "expired")}


def test_a_failure_of_another_incarnation_is_no_obstacle(core, holds):
    """A dead letter speaks of one deadline; the hold as it is now is tried."""
    holds.due(1)
    core.register()
    refusing(core, "true")
    assert command(core, "1") == {"1": ("dead-letter", "held")}
    core.do("drop trigger refuses on holds", "update holds set expires_at = expires_at + interval '1 s'")
    assert command(core, "1") == {"1": ("expired", "expired")}


def test_a_hold_that_takes_longer_than_a_statement_may(committed, core, holds):
    """Together with others nobody is charged, alone it is; and it never blocks its queue for ever."""
    holds.due(2)
    core.register(max_attempts=2, backoff_base="1 ms", backoff_cap="1 ms")
    refusing(core, "old.id = 2", "perform pg_sleep(30)")
    core.do("set statement_timeout = '400ms'")
    assert core.refused("select pgreaper.reaper_expire_keys('p', '{1,2}')").sqlstate == "57014"
    assert holds.states() == {1: "held", 2: "held"}
    assert core.value("select count(*) from pgreaper.failures") == 0
    assert command(core, "1") == {"1": ("expired", "expired")}
    assert command(core, "2") == {"2": ("retry", "held")}
    assert core.rows("select error_class, attempts from pgreaper.failures") == [("StatementTimeout", 1)]
    core.do("update pgreaper.failures set not_before = now()")
    assert command(core, "2") == {"2": ("dead-letter", "held")}


# -- the call itself


def test_nothing_to_do_writes_nothing(committed, core, holds):
    """Early commands, keys that nobody has, a paused policy: no transaction id is taken."""
    holds.ahead(1)
    holds.due(1)
    core.register()
    core.call("reaper_pause", policy="p")
    with core.connection.transaction():
        assert command(core, "1", "2", "77", "x") == {
            "1": ("not-due", "held"), "2": ("resting", "held"), "77": ("not-eligible", None), "x": ("wrong-key", None),
        }  # fmt: skip
        assert core.changed_nothing()


def test_no_keys(core, holds):
    """An empty list is a call with nothing to do."""
    core.register()
    assert command(core) == {}


@pytest.mark.parametrize("keys", ["null", "array['1', null]", "array_fill('1'::text, array[10001])"])
def test_keys_that_make_no_sense(core, holds, keys):
    """22023, and nothing happened."""
    holds.due(1)
    core.register()
    assert core.refused(f"select pgreaper.reaper_expire_keys('p', {keys})").sqlstate == "22023"
    assert holds.states() == {1: "held"}


def test_an_unknown_policy(core):
    """RP002, as everywhere."""
    assert core.refused("select pgreaper.reaper_expire_keys('nobody', '{1}')").sqlstate == "RP002"


@pytest.mark.parametrize("setting", ["isolation level repeatable read", "read only"])
def test_where_the_guard_cannot_hold(committed, core, holds, setting):
    """RP004 under another isolation level and on a read-only node."""
    holds.due(1)
    core.register()
    core.do(f"begin {setting}")
    with pytest.raises(psycopg.Error) as caught:
        command(core, "1")
    core.do("rollback")
    assert caught.value.sqlstate == "RP004"
    assert holds.states() == {1: "held"}


def test_the_trail_says_who(core, holds):
    """A worker's name as it is given, otherwise the session's; no claim."""
    holds.due(2)
    core.register()
    name = f"listener-{uuid.uuid4().hex[:6]}"
    core.do(f"set local application_name = '{name}'")
    command(core, "1")
    command(core, "2", worker="somebody")
    assert core.rows("select worker, token from pgreaper.transitions order by transition_id") == [
        (name, None), ("somebody", None),
    ]  # fmt: skip
    assert {row[0] for row in core.rows("select holds from pgreaper.reaper_verify('p') where not holds")} == set()


def test_what_is_deferred_to_the_commit_is_told_by_hold(committed, core, holds):
    """A constraint that is checked at the commit fails its hold, not the call and everything in it."""
    holds.due(3)
    core.register()
    core.do(
        "create function late() returns trigger language plpgsql as $$ begin raise check_violation; end $$",
        "create constraint trigger late after update on holds deferrable initially deferred"
        " for each row when (old.id = 2) execute function late()",
    )
    assert command(core, "1", "2", "3") == {
        "1": ("expired", "expired"),
        "2": ("dead-letter", "held"),
        "3": ("expired", "expired"),
    }
    assert holds.states() == {1: "expired", 2: "held", 3: "expired"}

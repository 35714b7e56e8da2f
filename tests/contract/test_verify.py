"""reaper_verify: the invariants, checked on the books and the rows; each check is seen to fail."""

from __future__ import annotations

from datetime import timedelta

import pytest

INVARIANTS = ["once", "not early", "kept", "accounted", "closed", "consistent"]


def verify(core, policy: str | None = None) -> dict[str, tuple[bool, int, str | None]]:
    found = core.call("reaper_verify", policy=policy)
    assert [row[1] for row in found if row[0] == "p"] == INVARIANTS
    return {row[1]: row[2:] for row in found if row[0] == "p"}


def broken(core) -> dict[str, tuple[int, str | None]]:
    return {invariant: (found, key) for invariant, (holds, found, key) in verify(core).items() if not holds}


@pytest.fixture
def shop(core, holds):
    """Five holds that expired, one that is dead, one that waits for its retry, one leased, one ahead, one fresh."""
    holds.due(5)
    core.register(objective="1 minute", max_attempts=5)
    core.run()
    holds.due(3)
    dead, waiting, _ = core.claim(rescan=True)
    core.call("reaper_fail", "outcome", token=dead.token, key=dead.key, error_class="T", final=True)
    core.call("reaper_fail", "outcome", token=dead.token, key=waiting.key, error_class="T", transient=True)
    holds.ahead(1)
    holds.due(1, overdue="30 seconds")
    return core


def test_what_is_sound_is_called_sound(shop):
    """A row per policy and invariant, none broken, no example."""
    assert verify(shop) == dict.fromkeys(INVARIANTS, (True, 0, None))


VIOLATIONS: dict[str, dict[str, tuple[int, str | None]]] = {
    # planted: what is found
    "update pgreaper.transitions set keys = keys || keys[1], deadlines = deadlines || deadlines[1], holds = holds + 1":
        {"once": (1, "1"), "consistent": (1, None)},
    "insert into pgreaper.transitions (policy_id, at, holds, keys, deadlines, first_deadline, last_deadline, lateness)"
    " select policy_id, at, 2, keys[2:3], deadlines[2:3], deadlines[2], deadlines[3], '{}' from pgreaper.transitions":
        {"once": (2, "2")},
    "update pgreaper.transitions set at = deadlines[2] - interval '1 millisecond'": {"not early": (4, "2")},
    "update pgreaper.transitions set at = deadlines[1]": {"not early": (4, "2")},
    "update holds set status = 'held' where id in (2, 3)": {"kept": (2, "2"), "accounted": (2, "2")},
    "insert into holds (expires_at) values (now() - interval '90 seconds')": {"accounted": (1, "11")},
    "delete from pgreaper.failures": {"accounted": (0, None)},  # still leased
    "update pgreaper.claims set keys = null, finished_at = now(), ending = 'released' where finished_at is null":
        {"accounted": (1, "8")},
    "insert into pgreaper.failures select policy_id, keys[4], deadlines[4], 1, at, at, 'infinity', 'T'"
    " from pgreaper.transitions": {"closed": (1, "4")},
    "update pgreaper.claims set expired = 4 where ending = 'expired'": {"consistent": (1, None)},
    "delete from pgreaper.transitions": {"consistent": (1, None)},
}  # fmt: skip


@pytest.mark.parametrize("violation", VIOLATIONS)
def test_a_planted_violation_is_found(shop, violation):
    """How many and one of them; the other invariants stay sound."""
    shop.do(violation)
    found = broken(shop)
    expected = {name: what for name, what in VIOLATIONS[violation].items() if what[0]}
    assert {name: number for name, (number, _) in found.items()} == {
        name: number for name, (number, _) in expected.items()
    }
    for name, (_, example) in expected.items():
        assert example is None or found[name][1] == example


@pytest.mark.parametrize(
    "harmless",
    [
        # The application does with its rows what it wants.
        """update holds set status = 'held', expires_at = expires_at + interval '20 minutes' where id = 1;
        insert into pgreaper.failures select p.policy_id, '1', h.expires_at, 1, now(), now(), 'infinity', 'T'
        from holds as h, pgreaper.policies as p where h.id = 1""",
        "delete from holds where id = 2",
        "update holds set status = 'consumed' where id = 3",
        "truncate holds",
        # Due, but within the objective.
        "insert into holds (expires_at) values (now() - interval '30 seconds')",
        "insert into holds (status, expires_at) values ('consumed', now() - interval '1 day'), ('held', 'infinity')",
    ],
)
def test_what_is_harmless_is_not_called_a_violation(shop, harmless):
    shop.do(harmless)
    assert broken(shop) == {}


def test_a_hold_that_somebody_has_locked_is_accounted_for(committed, core, holds, connect):
    """It waits for the lock's end, and nobody has lost it."""
    holds.due(2)
    core.register(objective="1 second")
    other = connect()
    with other.transaction():
        other.execute("update holds set customer_email = 'x' where id = 1")
        assert broken(core) == {"accounted": (1, "2")}
    assert broken(core) == {"accounted": (2, "1")}


def test_grace_and_objective_are_part_of_accounted(core, holds, set_clock):
    holds.due(1, overdue="1 minute")
    core.register(grace="1 hour", objective="10 minutes")
    set_clock(timedelta(minutes=69))
    assert broken(core) == {}
    set_clock(timedelta(minutes=71))
    assert broken(core) == {"accounted": (1, "1")}


def test_all_policies_or_one(core, holds):
    """By name, withdrawn ones left out."""
    core.do("create table other (like holds including all)")
    core.register("p")
    core.register("q", target="other")
    core.register("r")
    core.call("reaper_unregister", policy="r")
    assert sorted(set(core.call("reaper_verify", "policy"))) == [("p",), ("q",)]
    assert set(core.call("reaper_verify", "policy", policy="q")) == {("q",)}


def test_nothing_is_written(committed, core, holds):
    """Promise; it runs in a read-only transaction."""
    holds.due(3)
    core.register()
    core.run()
    core.do("set default_transaction_read_only = on")
    assert broken(core) == {}


@pytest.mark.parametrize("policy", ["nope", ""])
def test_a_policy_that_is_not_there(core, policy):
    """Raises RP002."""
    assert core.refused("select pgreaper.reaper_verify(%s)", policy).sqlstate == "RP002"


def test_without_any_policy(core):
    assert core.call("reaper_verify") == []


@pytest.mark.parametrize("kind", ["view", "partitioned", "stamp only", "composite key"])
def test_every_kind_of_target(core, kind):
    """The checks are made of the same fragments as the transition."""
    arguments = {}
    if kind == "partitioned":
        core.do(
            "create table t (id int, status text default 'held', expires_at timestamptz, primary key (id, expires_at))"
            " partition by range (expires_at)",
            "create table t1 partition of t default",
        )
    elif kind == "composite key":
        core.do("create table t (id int, shop text default 'a\"b', status text default 'held', expires_at timestamptz,"
                " primary key (shop, id))")  # fmt: skip
    else:
        core.do("create table b (id int primary key, status text default 'held', expires_at timestamptz,"
                " expired_at timestamptz)", "create view t as select * from b where id > 0")  # fmt: skip
    if kind == "stamp only":
        arguments = {"status_column": None, "held": None, "expired": None, "stamp_column": "expired_at"}
    core.do("insert into t (id, expires_at) select g, now() - interval '1 hour' from generate_series(1, 4) as g")
    core.register(target="t", **arguments)
    assert broken(core)["accounted"][0] == 4
    core.run()
    assert broken(core) == {}
    core.do("update t set expired_at = null" if kind == "stamp only" else "update t set status = 'held'")
    assert {name: found for name, (found, _) in broken(core).items()} == {"kept": 4, "accounted": 4}


@pytest.mark.parametrize("lock", ["for share", "for key share", "for update"])
def test_a_hold_that_two_have_locked_is_accounted_for(committed, core, holds, connect, lock):
    """Two that share a row's lock mark it with the number of a list; so did two whose locks have ended."""
    holds.due(2)
    core.register(objective="1 second")
    gone, gone_too = connect(), connect()
    with gone.transaction(), gone_too.transaction():
        for session in (gone, gone_too):
            session.execute("select from holds for key share")
    assert broken(core) == {"accounted": (2, "1")}
    one, two = connect(), connect()
    with one.transaction(), two.transaction():
        one.execute(f"select from holds where id = 1 {lock}")
        if lock != "for update":
            two.execute(f"select from holds where id = 1 {lock}")
        assert broken(core) == {"accounted": (1, "2")}
        assert core.preview()["locked"] == 1
    assert broken(core) == {"accounted": (2, "1")}
    assert core.preview()["locked"] == 0


@pytest.mark.parametrize("way", ["sweep", "expire"])
def test_a_hold_that_the_application_held_anew_has_not_expired_twice(committed, core, holds, way):
    """The README exempts it from "once": it is told, by a line of its own that breaks nothing."""
    ids = holds.due(3)
    core.register()
    for _ in range(3):
        if way == "sweep":
            core.value("call pgreaper.reaper_sweep()")
        else:
            core.run()
        assert broken_at_all(core) == []
        held_anew = [row[1:] for row in core.call("reaper_verify") if row[1] == "held anew"]
        core.do(f"update holds set status = 'held' where id = {ids[1]}")
    assert held_anew == [("held anew", True, 1, str(ids[1]))]


def broken_at_all(core):
    return core.column("select invariant from pgreaper.reaper_verify() where not holds")


def test_two_that_had_one_hold_in_hand_are_still_a_violation(core, holds, set_clock):
    """A transition whose claim began before the other transition has read the hold before it expired."""
    holds.due(1)
    core.register()
    [hold] = core.claim()
    set_clock(timedelta(seconds=1))
    core.do(
        "insert into pgreaper.transitions (policy_id, at, holds, keys, deadlines, first_deadline, last_deadline,"
        " lateness) select policy_id, pgreaper._clock(), 1, keys, deadlines, first_deadline, last_deadline, '{}'"
        " from pgreaper.claims"
    )
    set_clock(timedelta(seconds=2))
    core.expire(hold.token)
    assert broken(core) == {"once": (1, hold.key)}

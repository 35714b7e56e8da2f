"""reaper_replay: a fresh budget for dead letters."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

import pytest

from tests.concurrency.sessions import at_once, rows

BROKEN = "create trigger broken before update on holds for each row when (new.status = 'expired') execute function no()"
NO = "create function no() returns trigger language plpgsql as $$ begin raise exception 'no'; end $$"


def die(core, *holds, error_class="Refused"):
    """Let these holds of one claim die."""
    for hold in holds:
        core.call("reaper_fail", "outcome", token=hold.token, key=hold.key, error_class=error_class, final=True)


def replay(core, **arguments):
    return core.call("reaper_replay", **({"policy": "p"} | arguments))


@pytest.fixture
def dead(core, holds):
    """A function that makes n holds and lets them die; their keys."""

    def dead(n: int, error_class: str = "Refused") -> list[str]:
        ids = holds.due(n)
        claim = core.claim(rescan=True)
        assert [int(hold.key) for hold in claim] == ids
        die(core, *claim, error_class=error_class)
        core.expire(claim[0].token)
        return [hold.key for hold in claim]

    core.register(max_attempts=3, backoff_base="0", backoff_cap="0")
    return dead


def test_a_dead_letter_gets_a_fresh_budget_and_expires(core, holds, dead):
    """It is claimable at once, as if it had never failed; its past stays in the history."""
    [key] = dead(1)
    assert core.claim(rescan=True) == []
    assert replay(core, key=key, reason="fixed") == [(key, "replay", "held")]
    assert core.rows("select * from pgreaper.dead_letters") == []
    [hold] = core.claim()
    assert (hold.key, hold.attempt) == (key, 1)
    core.expire(hold.token)
    assert holds.states() == {int(key): "expired"}
    who = core.value("select session_user::text")
    assert core.rows(
        "select outcome, actor, reason, attempts from pgreaper.reaper_history('p', %s) order by at", key
    ) == [
        ("dead-letter", None, None, 1),
        ("replay", who, "fixed", 0),
        ("expired", None, None, None),
    ]


def test_c091_the_whole_budget_and_one_dead_letter_again(core, holds, dead, set_clock):
    """Dead, replayed, and again as many attempts as at first; then it is in the list once, and the history has both."""
    [key] = dead(1)
    replay(core)
    for attempt in (1, 2, 3):
        set_clock(timedelta(days=attempt))
        [hold] = core.claim(rescan=True)
        assert hold.attempt == attempt
        [(outcome, attempts)] = core.call(
            "reaper_fail", "outcome", "attempts", token=hold.token, key=key, error_class="T", transient=True
        )
        assert (outcome, attempts) == ("dead-letter" if attempt == 3 else "retry", attempt)
        core.expire(hold.token)
    assert core.column("select key from pgreaper.dead_letters") == [key]
    assert core.column("select outcome from pgreaper.reaper_history('p', %s) order by at", key) == [
        "dead-letter", "replay", "retry", "retry", "dead-letter",
    ]  # fmt: skip


def test_c091_pressed_twice_it_is_replayed_once(core, dead):
    [key] = dead(1)
    assert len(replay(core)) == 1
    assert replay(core) == []
    assert replay(core, key=key) == []
    assert core.value("select count(*) from pgreaper.history where outcome = 'replay'") == 1


def test_c091_pressed_by_many_at_once_it_is_replayed_once(committed, core, holds, dead, connect):
    """Promise: eight sessions at the same instant; each of 100 dead letters is replayed by exactly one of them."""
    keys = dead(100)
    sessions = [connect() for _ in range(8)]
    press = "select key, outcome from pgreaper.reaper_replay('p')"
    found = at_once([partial(rows, session, press) for session in sessions])
    assert sorted(row["key"] for answer in found for row in answer) == sorted(keys)
    assert core.value("select count(*) from pgreaper.history where outcome = 'replay'") == 100
    assert core.column("select distinct attempts from pgreaper.failures") == [0]


def test_c091_a_hold_that_moved_on_is_closed_as_moot(core, holds, dead):
    """Consumed, deleted, extended, held again: the row is not touched, the dead letter is closed, the state is told."""
    keys = dead(5)
    core.connection.execute("update holds set status = 'consumed' where id = %s", (keys[0],))
    core.connection.execute("delete from holds where id = %s", (keys[1],))
    core.connection.execute("update holds set expires_at = expires_at + interval '1 day' where id = %s", (keys[2],))
    core.connection.execute("update holds set expires_at = expires_at - interval '1 day' where id = %s", (keys[3],))
    before = core.rows("select ctid::text, xmax::text, * from holds order by id")
    assert sorted(replay(core)) == [
        (keys[0], "moot", "consumed"),
        (keys[1], "moot", None),
        (keys[2], "moot", "held"),
        (keys[3], "moot", "held"),
        (keys[4], "replay", "held"),
    ]
    assert core.rows("select ctid::text, xmax::text, * from holds order by id") == before
    assert core.column("select key from pgreaper.failures") == [keys[4]]
    assert core.value("select count(*) from pgreaper.history where outcome = 'moot'") == 4
    assert core.run() == {keys[3]: "expired", keys[4]: "expired"}, "held anew with an old deadline, it is due anew"


def test_only_those_of_a_kind_an_age_or_a_key(core, dead, set_clock):
    """The filters are combined; what does not match stays dead."""
    old = dead(2, "Refused")
    set_clock(timedelta(hours=3))
    new, odd = dead(2, "Refused"), dead(1, "Odd")
    assert replay(core, key="nope") == []
    assert replay(core, error_class="refused") == []
    assert replay(core, key=odd[0], error_class="Refused") == []
    assert replay(core, older_than="4 hours") == []
    assert [row[0] for row in replay(core, error_class="Refused", older_than="2 hours")] == old
    assert [row[0] for row in replay(core, key=new[1])] == [new[1]]
    assert sorted(row[0] for row in replay(core, older_than="0")) == sorted([new[0], *odd])


def test_what_is_not_dead_is_not_replayed(core, holds, dead):
    """A hold that waits for its retry, one that is leased, one that never failed, and one that was discarded."""
    discarded = dead(1)
    core.call("reaper_discard", policy="p", key=discarded[0], reason="tests")
    holds.due(2)
    first, second = core.claim(rescan=True)
    core.call("reaper_fail", "outcome", token=first.token, key=first.key, error_class="T", transient=True)
    assert replay(core) == []
    assert replay(core, key=discarded[0]) == []
    assert replay(core, key=second.key) == []
    assert core.column("select attempts from pgreaper.failures order by key::int") == [1, 1]


def test_other_policies_keep_theirs(core, holds, dead):
    dead(1)
    core.do("create table other (like holds including all)")
    core.register("q", target="other")
    core.do("insert into other (expires_at) values (now() - interval '1 hour')")
    [hold] = core.claim("q")
    die(core, hold)
    assert [row[1] for row in replay(core, policy="q")] == ["replay"]
    assert core.column("select policy from pgreaper.dead_letters") == ["p"]


def test_a_replay_that_fails_again_is_charged_again(core, holds, dead):
    """Nothing of the old budget is left over: not more, not less."""
    [key] = dead(1)
    core.do(NO, BROKEN)
    replay(core)
    assert core.run() == {key: "dead-letter"}
    assert core.rows("select key, attempts, error_class from pgreaper.dead_letters") == [(key, 1, "TriggerException")]


@pytest.mark.parametrize("policy", ["nope", "", None, "P"])
def test_a_policy_that_is_not_there(core, dead, policy):
    """Raises RP002."""
    dead(1)
    assert core.refused("select pgreaper.reaper_replay(%s)", policy).sqlstate == "RP002"


def test_on_a_read_only_node(committed, core, dead):
    dead(1)
    core.do("set default_transaction_read_only = on")
    assert core.refused("select pgreaper.reaper_replay('p')").sqlstate == "RP004"


def test_a_target_that_is_gone_is_told(core, dead):
    """Without the table nobody knows whether a hold is still held; nothing changes."""
    dead(1)
    core.do("drop table holds")
    assert core.refused("select pgreaper.reaper_replay('p')").sqlstate == "42P01"
    assert core.value("select count(*) from pgreaper.dead_letters") == 1

"""reaper_discard: a person decides that a dead letter may rest."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

import pytest

from tests.concurrency.sessions import at_once, rows


@pytest.fixture
def dead(core, holds):
    """A function that makes n holds and lets them die; their keys."""

    def dead(n: int, error_class: str = "Refused") -> list[str]:
        holds.due(n)
        claim = core.claim(rescan=True)
        for hold in claim:
            core.call("reaper_fail", "outcome", token=hold.token, key=hold.key, error_class=error_class, final=True)
        core.expire(claim[0].token)
        return [hold.key for hold in claim]

    core.register()
    return dead


def discard(core, **arguments) -> list[str]:
    arguments = {"policy": "p", "key": None, "reason": "agreed with sales"} | arguments
    return sorted(row[0] for row in core.call("reaper_discard", **arguments))


def test_it_is_no_longer_listed_and_never_tried_again(core, holds, dead, set_clock):
    """The hold stays as it is; who and why go to the history."""
    first, second = dead(2)
    before = core.rows("select ctid::text, * from holds order by id")
    assert discard(core, key=first) == [first]
    assert core.rows("select ctid::text, * from holds order by id") == before
    assert core.column("select key from pgreaper.dead_letters") == [second]
    assert core.status()["dead"] == core.preview()["dead"] == 1
    set_clock(timedelta(days=5000))
    assert core.claim(rescan=True) == []
    assert core.call("reaper_replay", policy="p", key=first) == []
    who = core.value("select session_user::text")
    assert core.rows(
        "select outcome, actor, reason, attempts from pgreaper.reaper_history('p', %s) where outcome = 'discard'", first
    ) == [("discard", who, "agreed with sales", 1)]


def test_a_new_deadline_ends_it(core, holds, dead):
    """It is excluded from claims until its deadline changes; then it expires as any."""
    [key] = dead(1)
    discard(core, key=key)
    core.do("update holds set expires_at = expires_at + interval '1 minute'")
    assert core.run() == {key: "expired"}


def test_it_may_die_again_with_a_new_deadline(core, holds, dead):
    """And is listed again then."""
    [key] = dead(1)
    discard(core)
    core.do("update holds set expires_at = expires_at + interval '1 minute'")
    [hold] = core.claim(rescan=True)
    core.call("reaper_fail", "outcome", token=hold.token, key=key, error_class="Again")
    assert core.rows("select key, error_class from pgreaper.dead_letters") == [(key, "Again")]
    assert discard(core) == [key]


def test_discarded_once(core, dead):
    """Promise: the keys that were discarded; no rows: nothing was dead."""
    keys = dead(3)
    assert discard(core) == sorted(keys)
    assert discard(core) == []
    assert discard(core, key=keys[0]) == []
    assert core.value("select count(*) from pgreaper.history where outcome = 'discard'") == 3


def test_by_many_at_once_discarded_once(committed, core, dead, connect):
    keys = dead(50)
    sessions = [connect() for _ in range(6)]
    press = "select k from pgreaper.reaper_discard('p', null, 'x') as k"
    found = at_once([partial(rows, session, press) for session in sessions])
    assert sorted(row["k"] for answer in found for row in answer) == sorted(keys)
    assert core.value("select count(*) from pgreaper.history where outcome = 'discard'") == 50


def test_replay_and_discard_at_once_agree(committed, core, dead, connect):
    """Of each dead letter one of them has it, never both."""
    keys = dead(60)
    one, two = connect(), connect()
    replayed, discarded = at_once(
        [
            lambda: [row["key"] for row in rows(one, "select key from pgreaper.reaper_replay('p')")],
            lambda: [row["k"] for row in rows(two, "select k from pgreaper.reaper_discard('p', null, 'x') as k")],
        ]
    )
    assert sorted(replayed + discarded) == sorted(keys)
    assert sorted(core.column("select key from pgreaper.retries")) == sorted(replayed)


def test_only_those_of_a_kind_an_age_or_a_key(core, dead, set_clock):
    old = dead(2, "Refused")
    set_clock(timedelta(hours=3))
    new, odd = dead(2, "Refused"), dead(1, "Odd")
    assert discard(core, key="nope") == []
    assert discard(core, key=odd[0], error_class="Refused") == []
    assert discard(core, older_than="4 hours") == []
    assert discard(core, error_class="Refused", older_than="2 hours") == sorted(old)
    assert discard(core, key=new[1]) == [new[1]]
    assert discard(core, older_than="0") == sorted([new[0], *odd])


def test_what_is_not_dead_is_not_discarded(core, holds):
    """A hold that waits for its retry goes on."""
    holds.due(1)
    core.register(backoff_base="0", backoff_cap="0")
    [hold] = core.claim()
    core.call("reaper_fail", "outcome", token=hold.token, key=hold.key, error_class="T", transient=True)
    core.expire(hold.token)
    assert discard(core) == []
    assert core.run() == {hold.key: "expired"}


@pytest.mark.parametrize("reason", [None, "", "   ", "\t\n"])
def test_without_a_reason(core, dead, reason):
    """Raises 22023."""
    dead(1)
    error = core.refused("select pgreaper.reaper_discard('p', null, %s)", reason)
    assert error.sqlstate == "22023"
    assert "reason" in (error.diag.message_primary or "")
    assert core.value("select count(*) from pgreaper.dead_letters") == 1


@pytest.mark.parametrize("policy", ["nope", "", None])
def test_a_policy_that_is_not_there(core, dead, policy):
    """Raises RP002."""
    dead(1)
    assert core.refused("select pgreaper.reaper_discard(%s, null, 'x')", policy).sqlstate == "RP002"


def test_on_a_read_only_node(committed, core, dead):
    dead(1)
    core.do("set default_transaction_read_only = on")
    assert core.refused("select pgreaper.reaper_discard('p', null, 'x')").sqlstate == "RP004"


def test_a_target_that_is_gone_may_still_be_cleared_up(core, dead):
    """C093: its dead letters need no table to be discarded."""
    keys = dead(2)
    core.do("drop table holds")
    assert discard(core) == sorted(keys)

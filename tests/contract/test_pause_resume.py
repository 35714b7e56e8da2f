"""reaper_pause and reaper_resume."""

from __future__ import annotations

import pytest


def test_pausing_and_resuming_say_whether_that_changed_anything(core, holds):
    """Promise: true once, false when it was so already; who and why goes to the events."""
    core.register()
    assert core.call("reaper_pause", policy="p", reason="stock-taking") == [(True,)]
    assert core.call("reaper_pause", policy="p", reason="another") == [(False,)]
    assert core.rows("select paused_at is not null, pause_reason from pgreaper.policies") == [(True, "stock-taking")]
    assert core.call("reaper_resume", policy="p") == [(True,)]
    assert core.call("reaper_resume", policy="p") == [(False,)]
    assert core.rows("select paused_at, pause_reason from pgreaper.policies") == [(None, None)]
    who = core.value("select session_user::text")
    assert core.rows("select kind, actor, reason from pgreaper.events where kind <> 'register' order by event_id") == [
        ("pause", who, "stock-taking"),
        ("resume", who, None),
    ]


def test_leases_that_run_may_be_finished(core, holds):
    holds.due(2)
    core.register()
    first, second = core.claim(batch=1)[0].token, core.claim(batch=1)[0].token
    core.call("reaper_pause", policy="p")
    assert core.expire(first) == {"1": ("expired", "expired")}
    core.call("reaper_renew", token=second)
    assert core.call("reaper_release", token=second) == [(1,)]
    assert core.claim(rescan=True) == []


def test_a_sweep_leaves_it_alone(committed, core, holds):
    holds.due(1)
    core.register()
    core.call("reaper_pause", policy="p")
    for call in ("call pgreaper.reaper_sweep()", "call pgreaper.reaper_sweep('p')"):
        assert core.rows(call) == [(0,)]
    assert holds.states() == {1: "held"}


@pytest.mark.parametrize("function", ["reaper_pause", "reaper_resume"])
def test_a_policy_that_is_not_there(core, function):
    """Raises RP002."""
    error = core.refused(f"select pgreaper.{function}('nope')")
    assert (error.sqlstate, error.diag.message_primary) == ("RP002", "there is no policy nope")

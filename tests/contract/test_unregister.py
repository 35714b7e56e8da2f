"""reaper_unregister: a policy withdrawn."""

from __future__ import annotations

from datetime import timedelta


def test_nothing_is_claimed_and_the_books_stay(committed, core, holds):
    """The history still answers, the policy is no longer listed, and the target is as it was."""
    holds.due(2)
    core.register()
    core.expire(core.claim(batch=1)[0].token)
    assert core.call("reaper_unregister", policy="p") == [("",)]
    assert core.refused("select pgreaper.reaper_claim('p')").sqlstate == "RP002"
    assert core.rows("call pgreaper.reaper_sweep()") == [(0,)]
    assert holds.states() == {1: "expired", 2: "held"}
    for view in ("status", "backlog", "leases"):
        assert core.rows(f"select * from pgreaper.{view}") == []
    assert core.rows("select key, outcome from pgreaper.reaper_history('p', '1')") == [("1", "expired")]
    assert core.column("select outcome from pgreaper.history order by at")[-1] == "unregister"
    assert core.column("select actor from pgreaper.events where kind = 'unregister'") == [
        core.value("select session_user::text")
    ]


def test_registering_takes_it_up_again(core, holds):
    """The same name goes on with the same books, and looks from the start."""
    holds.due(2)
    core.register()
    core.expire(core.claim(batch=1)[0].token)
    core.call("reaper_unregister", policy="p")
    core.register()
    assert core.run() == {"2": "expired"}
    assert core.status()["expired"] == 2


def test_a_policy_with_active_leases_is_not_withdrawn(core, holds, set_clock):
    """Raises 55006; lapsed leases are no reason."""
    holds.due(2)
    core.register()
    core.claim(batch=1)
    core.claim(batch=1)
    error = core.refused("select pgreaper.reaper_unregister('p')")
    assert (error.sqlstate, error.diag.message_primary) == ("55006", "policy p has 2 active lease(s)")
    assert error.diag.message_hint == "Pause it with reaper_pause() and withdraw it when pgreaper.leases is empty."
    set_clock(timedelta(hours=1))
    core.call("reaper_unregister", policy="p")
    assert core.column("select distinct ending from pgreaper.claims") == ["released"]


def test_a_policy_that_is_not_there(core, holds):
    """Raises RP002, the second time too."""
    assert core.refused("select pgreaper.reaper_unregister('p')").sqlstate == "RP002"
    core.register()
    core.call("reaper_unregister", policy="p")
    assert core.refused("select pgreaper.reaper_unregister('p')").sqlstate == "RP002"

"""A hot standby: what reads works on it, what writes says what it is and exits 75."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pgreaper.api import Reaper
from pgreaper.errors import DatabaseUnavailable, WrongTransaction
from tests.conftest import Holds
from tests.replication.conftest import connect, in_step

if TYPE_CHECKING:
    from pgreaper.embedded import Cluster
    from tests.replication.conftest import Standby


@pytest.fixture(scope="module")
def standby(pair: tuple[Cluster, Standby]) -> Standby:
    """The standby of a primary on which holds have expired, wait, and are dead."""
    primary, standby = pair
    with connect(primary) as db, connect(standby) as replica:
        holds = Holds(db)
        holds.due(3, overdue="10 seconds")
        holds.register(max_attempts=1)
        reaper = Reaper(db)
        dead, *_ = reaper.claim("holds", batch=1, worker="w")
        reaper.fail(dead.token, dead.key, error_class="CardDeclined", transient=False)
        done = reaper.claim_batch("holds", batch=1)
        assert done is not None
        reaper.expire_batch(done.token)
        in_step(db, replica)
    return standby


@pytest.mark.parametrize("arguments", [["work"], ["work", "--once"], ["work", "holds", "--json"]])
def test_c072_work_on_a_standby_says_so_and_exits_75(standby, pgreaper, arguments):
    """At once, in words that name what it is and what to do; nothing is tried first."""
    result = pgreaper(*arguments, url=standby.dsn)

    assert result.code == 75
    assert "the server is a standby: it is read-only" in result.err
    assert "target_session_attrs=read-write" in result.err
    if "--json" in arguments:
        assert (result.json["exit_code"], result.json["error"]["sqlstate"]) == (75, "25006")


@pytest.mark.parametrize(
    ("arguments", "shows"),
    [
        (["status"], "holds"),
        (["status", "holds"], "1"),
        (["policies"], "holds"),
        (["preview", "holds"], "due"),
        (["history", "holds", "2"], "expired"),
        (["history", "holds", "1"], "CardDeclined"),
        (["verify"], "twice"),
        (["dead", "list"], "CardDeclined"),
        (["dead", "show", "holds", "1"], "CardDeclined"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_only_reads_works_on_a_standby(standby, pgreaper, arguments, shows):
    """Looking at the books is what a replica is for."""
    result = pgreaper(*arguments, url=standby.dsn)

    assert (result.code, result.err) == (0, ""), result
    assert shows in result.out


@pytest.mark.parametrize(
    "arguments",
    [
        ["register", "other", "holds", "--deadline", "expires_at", "--status", "status", "--held", "held",
         "--expired", "expired", "--owner", "o"],
        ["unregister", "holds"],
        ["pause", "holds"],
        ["resume", "holds"],
        ["dead", "replay", "holds", "--all"],
        ["dead", "discard", "holds", "--key", "1", "--reason", "x"],
        ["install", "--check"],
        ["uninstall"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)  # fmt: skip
def test_what_writes_says_why_not(standby, pgreaper, arguments):
    """Exit 75, and a sentence that says what the server is and where to go."""
    result = pgreaper(*arguments, url=standby.dsn)

    assert result.code == 75, result
    # Alembic's transaction does not ask first; the server refuses it.
    migrates = arguments[0] in ("install", "uninstall")
    assert ("read-only" if migrates else "the server is a standby: it is read-only") in result.err
    assert "hint: Connect to the primary" in result.err
    assert result.out == ""


def test_install_on_a_standby(standby, pgreaper):
    """Nothing to do is no failure, and what cannot be done there is."""
    there = pgreaper("install", url=standby.dsn)
    assert (there.code, there.err) == (0, "")

    missing = pgreaper("install", url=standby.url("template1"))
    assert missing.code == 75
    assert "read-only" in missing.err


def test_the_driver_on_a_standby(standby):
    """``next_due`` and the looks answer; whatever would write is refused, and charges nobody."""
    with connect(standby) as connection:
        reaper = Reaper(connection)
        state = reaper.server()
        assert (state.standby, state.read_only) == (True, True)
        assert reaper.next_due() == 0
        assert reaper.next_due(["holds"]) == 0
        assert [s.policy for s in reaper.status()] == ["holds"]
        for call in (lambda: reaper.claim("holds"), lambda: reaper.sweep(), lambda: reaper.pause("holds")):
            with pytest.raises((WrongTransaction, DatabaseUnavailable)) as refused:
                call()
            assert refused.value.exit_code == 75

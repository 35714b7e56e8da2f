"""reaper_restore: an expired hold is held again, if the policy's time allows and nobody else has what it held."""

from __future__ import annotations

from typing import Any

import pytest


def restore(core: Any, key: str = "1", until: str = "2030-06-01 13:00Z", reason: str = "paid late") -> tuple[Any, ...]:
    (found,) = core.call(
        "reaper_restore", "outcome", "state", "constraint_name", policy="p", key=key, until=until, reason=reason
    )
    return tuple(found)


@pytest.fixture
def two(core: Any, set_clock: Any) -> None:
    """Two seats; hold 1 expired at noon (stamped, its token cleared), hold 2 lasts; a seat has one holder."""
    core.do(
        "create table holds (id int primary key, seat text, status text, expires_at timestamptz not null,"
        " expired_at timestamptz, token text)",
        "create unique index one_holder on holds (seat) where status in ('held', 'consumed')",
        "insert into holds values (1, 'A1', 'held', '2030-06-01 12:00Z', null, 't'),"
        " (2, 'B2', 'held', '2030-06-01 18:00Z', null, 't')",
    )
    core.register(stamp_column="expired_at", set='{"token": null}', consumed="consumed", restore_within="10 minutes")
    set_clock("2030-06-01 12:00Z")
    assert core.run() == {"1": "expired"}


def test_restored_inside_the_window(core, two, set_clock):
    """Held again with a new deadline and no stamp; it can be consumed, and it expires once more."""
    set_clock("2030-06-01 12:09:59.999999Z")
    assert restore(core) == ("restored", "held", None)
    assert core.rows("select status, expires_at = '2030-06-01 13:00Z', expired_at, token from holds where id = 1") == [
        ("held", True, None, None)
    ]
    set_clock("2030-06-01 13:00Z")
    assert core.run() == {"1": "expired"}
    assert core.column("select outcome from pgreaper.reaper_history('p', '1')") == ["expired", "restore", "expired"]
    assert core.column("select holds from pgreaper.reaper_verify('p')") == [True] * 6
    assert restore(core, until="2030-06-01 14:00Z") == ("restored", "held", None)
    assert core.call("reaper_consume", "outcome", policy="p", key="1") == [("consumed",)]


def test_who_and_why_are_recorded(core, two):
    """The event has the deadline that had passed and the state found; nothing counts as a failure or conflict."""
    counted = core.value("select to_jsonb(m) - 'last_success' from pgreaper.metrics as m")
    restore(core, reason="ticket 4711")
    assert core.rows(
        "select kind, key, deadline = '2030-06-01 12:00Z', state, at = '2030-06-01 12:00Z', actor = session_user,"
        " reason"
        " from pgreaper.events where kind = 'restore'"
    ) == [("restore", "1", True, "expired", True, True, "ticket 4711")]
    after = core.value("select to_jsonb(m) - 'last_success' from pgreaper.metrics as m")
    assert {k for k in counted if counted[k] != after[k]} <= {"next_due", "oldest_due", "taken_at"}


def test_after_the_window(core, two, set_clock):
    """To the microsecond: what became due that long ago is not restored, and nothing is recorded."""
    set_clock("2030-06-01 12:10Z")
    assert restore(core) == ("not-eligible", "expired", None)
    core.register(stamp_column="expired_at", restore_within="10 minutes", grace="1 second")
    assert restore(core) == ("restored", "held", None), "counted from deadline + grace"
    assert core.value("select count(*) from pgreaper.events where kind = 'restore'") == 1


def test_c063_a_seat_that_somebody_else_has(core, two):
    """The constraint decides; the caller's transaction goes on, nothing is written, and the constraint is named."""
    core.do("insert into holds values (3, 'A1', 'held', '2030-06-01 18:00Z')")
    before = core.value("select xmin::text || ctid::text from holds where id = 1")
    assert restore(core) == ("not-eligible", "expired", "one_holder")
    assert core.value("select xmin::text || ctid::text from holds where id = 1") == before
    assert core.value("select count(*) from pgreaper.events where kind = 'restore'") == 0
    core.do("update holds set status = 'cancelled' where id = 3")
    assert restore(core) == ("restored", "held", None)


def test_an_exclusion_constraint_and_what_any_other_says(core, two):
    """Two holders at once is a matter of either kind; a CHECK is the application's own mistake and raised."""
    core.do(
        "update holds set status = 'cancelled' where id = 2",
        "alter table holds add nights int4range not null default '[1,3)'",
        "alter table holds add constraint not_twice exclude using gist (nights with &&) where (status = 'held')",
        "insert into holds values (3, 'C3', 'held', '2030-06-01 18:00Z')",
    )
    assert restore(core) == ("not-eligible", "expired", "not_twice")
    core.do(
        "delete from holds where id = 3",
        "alter table holds add check (status <> 'held' or token is not null) not valid",
    )
    error = core.refused("select pgreaper.reaper_restore('p', '1', '2030-06-01 13:00Z', 'r')")
    assert error.sqlstate == "23514"


def test_a_call_that_is_repeated(core, two):
    """Already done, and recorded once; a hold that is alive but ends sooner is not touched."""
    assert restore(core)[0] == "restored"
    assert restore(core) == ("already-done", "held", None)
    assert core.value("select count(*) from pgreaper.events where kind = 'restore'") == 1
    assert restore(core, until="2030-06-01 15:00Z") == ("not-eligible", "held", None)


def test_what_never_expired(core, two):
    """Consumed, cancelled, unknown: told as found."""
    core.do("update holds set status = 'consumed' where id = 2")
    assert restore(core, key="2") == ("not-eligible", "consumed", None)
    assert restore(core, key="9") == ("not-eligible", None, None)


def test_due_and_not_expired_yet(core, two, set_clock):
    """The answer does not depend on how quick the reaper was; the lease of a worker changes nothing then."""
    set_clock("2030-06-01 18:05Z")
    token = core.claim()[0].token
    assert restore(core, key="2", until="2030-06-01 19:00Z") == ("restored", "held", None)
    assert core.expire(token) == {"2": ("not-eligible", "held")}
    assert core.column("select state from pgreaper.events where kind = 'restore'") == ["held"]
    set_clock("2030-06-01 19:10Z")
    assert restore(core, key="2", until="2030-06-01 20:00Z") == ("not-eligible", "held", None)


def test_several_held_states(core, two):
    """The policy says which of them a restored hold gets."""
    core.register(
        held=["held", "reserved"], restored="reserved", stamp_column="expired_at", restore_within="10 minutes"
    )
    assert restore(core) == ("restored", "reserved", None)


def test_a_target_without_a_status(core, set_clock):
    """The stamp is cleared; that is what held means there."""
    core.do(
        "create table things (id int primary key, expires_at date, ended_at timestamp)",
        "insert into things values (1, '2030-06-01')",
    )
    core.register(target="things", status_column=None, held=None, expired=None, stamp_column="ended_at", zone="UTC",
                  restore_within="1 day")  # fmt: skip
    set_clock("2030-06-02 00:00Z")
    assert core.run() == {"1": "expired"}
    assert restore(core, until="2030-06-03 12:00Z") == ("restored", "held", None)
    assert core.rows("select expires_at::text, ended_at from things") == [("2030-06-03", None)]


def test_misuse(core, two):
    """Each is refused with what to do instead."""
    for arguments, message in (
        ("'1', '2030-06-01 12:00Z', 'r'", "until must be later than now"),
        ("'1', '2030-06-01 13:00Z', ' '", "restoring a hold needs a reason"),
        ("'1', '2030-06-01 13:00Z', null", "restoring a hold needs a reason"),
        ("null, '2030-06-01 13:00Z', 'r'", "key must not be NULL"),
    ):
        error = core.refused(f"select pgreaper.reaper_restore('p', {arguments})")
        assert (error.sqlstate, message in str(error)) == ("22023", True), error
    core.register()
    error = core.refused("select pgreaper.reaper_restore('p', '1', '2030-06-01 13:00Z', 'r')")
    assert (error.sqlstate, "does not allow restoring" in str(error)) == ("22023", True)


def test_a_deadline_that_the_application_has_cleared(core, two):
    """Without it nobody knows how long ago the hold became due."""
    core.do("alter table holds alter expires_at drop not null", "update holds set expires_at = null where id = 1")
    assert restore(core) == ("not-eligible", "expired", None)


def test_a_key_that_the_new_state_is_part_of(core, set_clock):
    """In a table that is partitioned by state the restored row has another key: it is told, and found again by it."""
    core.do(
        "create table things (id int, status text, expires_at timestamptz, primary key (id, status))"
        " partition by list (status)",
        "create table h partition of things for values in ('held')",
        "create table r partition of things default",
        "insert into things values (1, 'expired', '2030-06-01 12:00Z')",
    )
    core.register(target="things", restore_within="10 minutes")
    set_clock("2030-06-01 12:05Z")
    arguments = {"policy": "p", "until": "2030-06-01 13:00Z", "reason": "r"}
    assert core.call("reaper_restore", "key", "outcome", "state", key='["1", "expired"]', **arguments) == [
        ('["1", "held"]', "restored", "held")
    ]
    assert core.column("select key from pgreaper.events where kind = 'restore'") == ['["1", "expired"]']

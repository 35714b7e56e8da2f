"""reaper_fail: the work outside the database failed for one hold of a claim."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import pytest


def fail(core, hold, **arguments):
    """Report a failure; (outcome, attempts, not_before as text)."""
    arguments = {"token": hold.token, "key": hold.key, "error_class": "TimeoutError"} | arguments
    [decision] = core.call("reaper_fail", "outcome", "attempts", "not_before::text", **arguments)
    return decision


def books(core) -> list[str]:
    """Everything that the books hold, a text per row."""
    tables = core.column("select relname from pg_class where relnamespace = 'pgreaper'::regnamespace and relkind = 'r'")
    assert {"failures", "events", "claims", "cursors", "policies", "transitions", "totals"} <= set(tables)
    return [row for table in tables for row in core.column(f"select to_jsonb(t)::text from pgreaper.{table} as t")]


def test_one_hold_is_charged_and_the_others_go_on(core, holds):
    """Promise: one attempt to this hold and none to the others; the claim lives on."""
    holds.due(3)
    core.register(max_attempts=3)
    first, second, third = core.claim(worker="w")
    outcome, attempts, not_before = fail(core, second, transient=True)
    assert (outcome, attempts) == ("retry", 1)
    assert core.rows("select key, attempts, error_class, sqlstate, not_before::text from pgreaper.retries") == [
        (second.key, 1, "TimeoutError", None, not_before)
    ]
    assert core.rows(
        "select key, outcome, worker, token::text, attempts from pgreaper.history where key is not null"
    ) == [(second.key, "retry", "w", second.token, 1)]
    assert core.expire(first.token) == {
        first.key: ("expired", "expired"),
        second.key: ("retry", None),
        third.key: ("expired", "expired"),
    }
    assert core.rows("select expired, retry, dead_letter, ending from pgreaper.claims") == [(2, 1, 0, "expired")]
    assert holds.states()[int(second.key)] == "held"


def test_told_twice_it_charges_once(core, holds):
    """As after a reply that got lost: the same answer, one attempt, one event."""
    holds.due(1)
    core.register(max_attempts=9)
    [hold] = core.claim()
    first = fail(core, hold, transient=True)
    assert fail(core, hold, transient=True) == first
    assert fail(core, hold, error_class="Other", transient=False, final=True) == first
    assert core.column("select attempts from pgreaper.failures") == [1]
    assert core.value("select count(*) from pgreaper.history where outcome = 'retry'") == 1


def test_what_is_expired_already_did_not_fail(core, holds):
    """A hold of the claim that has made the transition is answered as such and charged nothing."""
    holds.due(2)
    core.register()
    first, _ = core.claim()
    core.expire(first.token, [first.key])
    assert fail(core, first) == ("expired", None, None)
    assert core.value("select count(*) from pgreaper.failures") == 0


def test_what_a_sweep_has_expired_meanwhile_did_not_fail(core, holds, committed):
    """A sweep that had the hold in hand when it was claimed commits: no retry and no dead letter of it is left."""
    holds.due(1)
    core.register()
    sweep = committed(autocommit=False)
    sweep.execute("select pgreaper._sweep_step('p', 10, 10, 'sweep', pgreaper._clock(), null::timestamptz)")
    [hold] = core.claim()
    sweep.commit()
    assert fail(core, hold, final=True) == ("already-done", None, None)
    assert fail(core, hold, final=True) == ("already-done", None, None)
    assert core.expire(hold.token) == {hold.key: ("already-done", "expired")}
    assert core.value("select count(*) from pgreaper.failures") == 0
    assert core.column("select invariant from pgreaper.reaper_verify() where not holds") == []


MEANWHILE = {
    "consumed": ("update holds set status = 'consumed' where id = 1", ("not-eligible", "consumed")),
    "extended": ("update holds set expires_at = now() + interval '1 day' where id = 1", ("not-eligible", "held")),
    "held anew, and due": ("update holds set expires_at = expires_at + interval '1 s' where id = 1",
                           ("not-eligible", "held")),
    "never due": ("update holds set expires_at = 'infinity' where id = 1", ("not-eligible", "held")),
    "deleted": ("delete from holds where id = 1", ("not-eligible", None)),
    "c093 truncated": ("truncate holds", ("not-eligible", None)),
    "expired by hand": ("update holds set status = 'expired' where id = 1", ("already-done", "expired")),
}  # fmt: skip


@pytest.mark.parametrize("kind", [{"final": True}, {"transient": True}, {"charged": False}], ids=str)
@pytest.mark.parametrize("what", MEANWHILE)
def test_what_the_application_did_meanwhile_is_a_conflict_and_no_failure(core, holds, what, kind):
    """The handler failed for a hold that is none any more: recorded with the state found, and nobody is charged."""
    statement, (outcome, state) = MEANWHILE[what]
    holds.due(1)
    core.register()
    [hold] = core.claim(worker="w")
    core.do(statement)

    assert fail(core, hold, **kind) == (outcome, None, None)
    assert fail(core, hold, **kind) == (outcome, None, None), "told twice, the same answer"

    assert core.value("select count(*) from pgreaper.failures") == 0
    assert core.rows("select key, outcome, state, worker from pgreaper.history where key is not null") == [
        ("1", outcome, state, "w")
    ]
    assert core.expire(hold.token) == {"1": (outcome, state)}
    core.run()  # held anew and due, it is another incarnation, and expires
    assert core.column("select invariant from pgreaper.reaper_verify() where not holds") == []


@pytest.mark.parametrize(
    "what",
    [
        "drop table holds",
        "alter table holds rename status to state",
        "alter table holds alter id drop identity; alter table holds alter id type text using 'x' || id",
    ],
)
def test_a_failure_is_recorded_whatever_has_become_of_the_table(core, holds, what):
    """Nobody can look whether the hold is still due, and it failed all the same."""
    holds.due(1)
    core.register()
    [hold] = core.claim()
    core.do(what)
    outcome, attempts, _ = fail(core, hold, final=True)
    assert (outcome in ("dead-letter", "not-eligible"), attempts) == (True, 1 if outcome == "dead-letter" else None)


def test_a_failed_hold_is_not_expired_by_its_claim(core, holds):
    """Neither with all keys nor by name: what was recorded is the answer."""
    holds.due(2)
    core.register()
    first, _ = core.claim()
    fail(core, first)
    assert core.expire(first.token, [first.key]) == {first.key: ("dead-letter", None)}
    core.expire(first.token)
    assert holds.states() == {1: "held", 2: "expired"} | {int(first.key): "held"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"transient": True}, ("retry", 1)),
        ({"transient": None}, ("retry", 1)),
        ({}, ("retry", 1)),
        ({"final": True}, ("dead-letter", 1)),
        ({"final": True, "transient": True}, ("dead-letter", 1)),
        ({"final": None, "charged": None}, ("retry", 1)),
        ({"charged": False}, ("retry", 0)),
    ],
)
def test_kinds_of_failure(core, holds, arguments, expected):
    """`final` ends at once, what is not charged costs nothing, NULL is the default."""
    holds.due(1)
    core.register(permanent_attempts=2, max_attempts=2)
    [hold] = core.claim()
    assert fail(core, hold, **arguments)[:2] == expected


def test_the_delay_that_was_asked_for(core, holds, set_clock):
    """Promise: `retry_in` replaces the computed delay: the hold comes back then, neither sooner nor later."""
    holds.due(1)
    core.register(backoff_base="1 hour")
    set_clock("2040-01-01 00:00Z")
    [hold] = core.claim()
    outcome, _, not_before = fail(core, hold, transient=True, retry_in="90 seconds")
    core.expire(hold.token)
    assert (outcome, core.value("select %s::timestamptz = '2040-01-01 00:01:30Z'", not_before)) == ("retry", True)
    set_clock("2040-01-01 00:01:29.9Z")
    assert core.claim(rescan=True) == []
    assert core.call("reaper_next_due", policy="p") == [(timedelta(seconds=0.1),)]
    set_clock("2040-01-01 00:01:30Z")
    [again] = core.claim()
    assert (again.key, again.attempt) == (hold.key, 2)


@pytest.mark.parametrize("wish", ["170000000 years", "-170000000 years", "0"])
def test_c031_no_wish_makes_the_recording_fail(core, holds, wish):
    holds.due(1)
    core.register()
    [hold] = core.claim()
    assert fail(core, hold, transient=True, retry_in=wish)[:2] == ("retry", 1)


HOSTILE = [
    "O'Brien'); drop table holds; --",
    "quote \" and \\ backslash \\' $$ $function$ %s %(x)s %I {}",
    "line\nline\r\n\ttab",
    "\x01\x1b[31mred\x07",
    "\u202eevil \u0000".replace("\u0000", "") + "\U0001f4a3",
    "x" * 300_000,
    "é" * 100_000,
]


@pytest.mark.parametrize("text", HOSTILE)
def test_c031_a_hostile_class_is_a_class(core, holds, text):
    """Promise: stored as it is, cut at 200 characters; recording it never fails."""
    holds.due(1)
    core.register()
    [hold] = core.claim()
    assert fail(core, hold, error_class=text)[0] == "dead-letter"
    assert core.column("select error_class from pgreaper.dead_letters") == [text[:200]]
    assert core.value("select max(length(row)) from unnest(%s::text[]) as row", books(core)) < 3000
    assert holds.states() == {1: "held"} | dict.fromkeys([int(hold.key)], "held")


@pytest.mark.parametrize("text", HOSTILE)
def test_c031_c062_a_hostile_message_is_never_stored(core, holds, text):
    """A trigger's message, detail, hint, and what it passes off as names, are in no table; the failure is recorded."""
    holds.due(3)
    core.do("create table loud (what text)")
    core.connection.execute("insert into loud values (%s)", ("SECRET " + text,))
    core.do(
        "create function bad() returns trigger language plpgsql as $$ declare w text := (select what from public.loud);"
        " begin if new.id % 3 = 0 then raise exception using message = w, detail = w, hint = w, constraint = w,"
        " table = w, column = w, schema = w, datatype = w; end if; return new; end $$",
        "create trigger bad before update on holds for each row execute function bad()",
    )
    core.register()
    outcomes = core.run()
    assert sorted(outcomes.values()) == ["dead-letter", "expired", "expired"]
    assert core.rows("select error_class, sqlstate, constraint_name from pgreaper.dead_letters") == [
        ("TriggerException", "P0001", None)
    ]
    assert not [row for row in books(core) if "SECRET" in row]


def test_c062_nothing_private_is_in_any_table(core, holds):
    """Values, messages and details of every way to fail: what is stored are keys, deadlines, states and codes."""
    holds.due(8)
    core.do(
        "update holds set customer_email = 'SECRET-' || id || '@example.com'",
        "alter table holds add constraint polite check (not (id % 8 = 1 and status = 'expired'))",
        "create unique index one_of_a_kind on holds ((case when status = 'expired' and id % 8 = 2"
        " then replace(customer_email, '-' || id, '-') end))",
        "insert into holds (id, status, expires_at, customer_email) overriding system value"
        " values (1002, 'expired', 'infinity', 'SECRET-@example.com')",
        "create function bad() returns trigger language plpgsql as $$ begin"
        " if new.id % 8 = 3 then perform new.customer_email::int; end if;"
        " if new.id % 8 = 4 then raise exception '%', new.customer_email using detail = new.customer_email; end if;"
        " if new.id % 8 = 5 then return null; end if;"
        " if new.id % 8 = 6 then new.status := 'cancelled'; end if;"
        " if new.id % 8 = 7 then raise exception using message = 'x', constraint = new.customer_email; end if;"
        " return new; end $$",
        "create trigger bad before update on holds for each row execute function bad()",
    )
    core.register(payload_columns=["customer_email"])
    batch = core.claim(worker="w")
    assert any("SECRET" in str(hold.payload) for hold in batch), "the worker gets what the policy says"
    core.expire(batch[0].token)
    core.call("reaper_replay", policy="p")
    core.run()
    core.call("reaper_discard", policy="p", key=None, reason="tests")
    assert core.value("select count(*) from pgreaper.history where outcome = 'dead-letter'") > 4
    assert not [row for row in books(core) if "SECRET" in row or "example.com" in row]


@pytest.mark.parametrize("how", ["never given", "taken back", "released", "settled", "null"])
def test_a_lost_lease(core, holds, set_clock, how):
    """Raises RP001: somebody else is responsible; nothing is charged."""
    holds.due(1)
    core.register(lease="1 minute")
    [hold] = core.claim()
    token: str | None = hold.token
    if how == "never given":
        token = str(uuid4())
    elif how == "null":
        token = None
    elif how == "released":
        core.call("reaper_release", token=token)
    elif how == "settled":
        core.expire(hold.token)
    else:
        set_clock(timedelta(minutes=2))
        core.claim(rescan=True)
        core.claim(rescan=True)
    before = core.rows("select * from pgreaper.retries"), core.rows("select count(*) from pgreaper.events")
    error = core.refused("select pgreaper.reaper_fail(%s, %s, 'TimeoutError')", token, hold.key)
    assert error.sqlstate == "RP001"
    assert error.diag.message_hint
    assert (core.rows("select * from pgreaper.retries"), core.rows("select count(*) from pgreaper.events")) == before


@pytest.mark.parametrize("key", ["2", "", "nope", None, "x" * 10_000])
def test_a_key_of_another_claim(core, holds, key):
    """Raises 22023, and names the key, cut."""
    holds.due(2)
    core.register()
    [hold] = core.claim(batch=1)
    if key == "2":
        key = core.claim(batch=1)[0].key
    error = core.refused("select pgreaper.reaper_fail(%s, %s, 'TimeoutError')", hold.token, key)
    assert error.sqlstate == "22023"
    assert len(error.diag.message_primary or "") < 300
    assert core.value("select count(*) from pgreaper.failures") == 0


@pytest.mark.parametrize("error_class", [None, "", "  ", "\n\t"])
def test_a_failure_without_a_class(core, holds, error_class):
    """Raises 22023."""
    holds.due(1)
    core.register()
    [hold] = core.claim()
    error = core.refused("select pgreaper.reaper_fail(%s, %s, %s)", hold.token, hold.key, error_class)
    assert error.sqlstate == "22023"
    assert "class" in (error.diag.message_primary or "")
    assert core.value("select count(*) from pgreaper.failures") == 0


def test_on_a_read_only_node(committed, core, holds):
    """RP004, like every function that writes."""
    holds.due(1)
    core.register()
    [hold] = core.claim()
    core.do("set default_transaction_read_only = on")
    assert core.refused("select pgreaper.reaper_fail(%s, %s, 'X')", hold.token, hold.key).sqlstate == "RP004"


def test_c093_a_hold_that_was_deleted_after_it_failed(core, holds):
    """The failure stands without a foreign key in the way, and is closed when its time comes."""
    holds.due(2)
    core.register(max_attempts=3, backoff_base="0", backoff_cap="0")
    first, _ = core.claim()
    assert fail(core, first, transient=True)[0] == "retry"
    core.connection.execute("delete from holds where id = %s", (first.key,))
    core.expire(first.token)
    assert core.claim(rescan=True) == []
    assert core.value("select count(*) from pgreaper.failures") == 0, "closed: there is no such hold"


def test_c093_a_table_that_was_truncated(core, holds):
    """Leases, retries and dead letters of it: nothing fails, nothing is left but what people must see."""
    holds.due(6)
    core.register(max_attempts=3, backoff_base="0", backoff_cap="0", batch=2)
    first, second, third = core.claim(), core.claim(), core.claim()
    fail(core, first[0], final=True)
    fail(core, second[0], transient=True)
    core.do("truncate holds")
    assert core.expire(first[0].token) == {first[0].key: ("dead-letter", None), first[1].key: ("not-eligible", None)}
    assert core.expire(second[0].token)[second[1].key] == ("not-eligible", None)
    assert {outcome for outcome, _ in core.expire(third[0].token).values()} == {"not-eligible"}
    assert core.claim(rescan=True) == []
    assert core.column("select key from pgreaper.failures") == [first[0].key]
    assert [row[:2] for row in core.call("reaper_replay", policy="p")] == [(first[0].key, "moot")]
    assert core.value("select count(*) from pgreaper.failures") == 0
    assert core.rows("select invariant from pgreaper.reaper_verify() where not holds") == []


def test_c092_a_dead_hold_that_is_used_again_expires(core, holds, set_clock):
    """The application gives it a new deadline: a new incarnation, which no old dead letter keeps from expiring."""
    [id_] = holds.due(1)
    core.register()
    [hold] = core.claim()
    fail(core, hold)
    core.expire(hold.token)
    assert core.claim(rescan=True) == []
    core.do("update holds set expires_at = expires_at + interval '10 minutes'")
    assert core.run() == {str(id_): "expired"}
    assert core.value("select count(*) from pgreaper.failures") == 0
    assert core.rows("select invariant from pgreaper.reaper_verify() where not holds") == []


def test_c092_and_when_it_dies_again_it_is_one_dead_letter(core, holds):
    """Of the new deadline."""
    [id_] = holds.due(1)
    core.register()
    for _ in range(2):
        [hold] = core.claim(rescan=True)
        fail(core, hold)
        core.expire(hold.token)
        core.do("update holds set expires_at = expires_at + interval '10 minutes'")
    rows = core.rows("select key, attempts, deadline::text from pgreaper.dead_letters")
    assert rows == [(str(id_), 1, hold.deadline)]

"""reaper_expire: the guarded transition, its outcomes, and what repeats of the call answer."""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from uuid import uuid4

import psycopg
import pytest

TRIGGER = """
create function guard() returns trigger language plpgsql as $$
begin
  {body}
  return new;
end $$;
create trigger guard before update on holds for each row execute function guard();
"""


def claimed(core, **arguments):
    return core.claim(**arguments)[0].token


def test_due_holds_are_expired_once_and_recorded(core, holds, set_clock):
    """The target, the trail and the claim tell the same."""
    holds.due(3)
    core.register()
    set_clock(timedelta(0))
    batch = core.claim(worker="w1")
    assert core.expire(batch[0].token) == {str(id_): ("expired", "expired") for id_ in (1, 2, 3)}
    assert set(holds.states().values()) == {"expired"}
    assert core.rows(
        "select token::text, worker, state, holds, keys, deadlines::text[], first_deadline::text, last_deadline::text,"
        " (select sum(n) from unnest(lateness) as n)::int from pgreaper.transitions"
    ) == [
        (batch[0].token, "w1", "expired", 3, ["1", "2", "3"], [hold.deadline for hold in batch],
         batch[0].deadline, batch[2].deadline, 3)
    ]  # fmt: skip
    assert core.rows(
        "select ending, expired, already_done, not_eligible, locked, retry, dead_letter, keys, deadlines, hints"
        " from pgreaper.claims"
    ) == [("expired", 3, 0, 0, 0, 0, 0, None, None, None)]
    assert core.column("select kind from pgreaper.events where kind <> 'register'") == []


def test_target_trail_and_claim_commit_or_roll_back_together(core, holds):
    """Promise: one transaction; after a rollback everything is as it was claimed."""
    holds.due(2)
    core.register()
    token = claimed(core)
    with core.connection.transaction(force_rollback=True):
        assert len(core.expire(token)) == 2
    assert set(holds.states().values()) == {"held"}
    assert core.value("select count(*) from pgreaper.transitions") == 0
    assert core.rows("select ending, cardinality(keys) from pgreaper.claims") == [(None, 2)]
    assert set(core.expire(token).values()) == {("expired", "expired")}


def test_c003_a_hold_that_moved_on_is_left_alone_and_reported(core, holds):
    """Promise: consumed, cancelled, extended or deleted holds are not written; the state found is reported."""
    holds.due(6)
    core.register()
    token = claimed(core, worker="w1")
    core.do(
        "update holds set status = 'consumed' where id = 1",
        "update holds set status = 'cancelled' where id = 2",
        "update holds set expires_at = now() + interval '10 minutes' where id = 3",
        "delete from holds where id = 4",
        "update holds set status = 'expired' where id = 5",
    )
    before = core.rows("select id, xmin::text, ctid::text from holds where id <> 6 order by id")
    assert core.expire(token) == {
        "1": ("not-eligible", "consumed"),
        "2": ("not-eligible", "cancelled"),
        "3": ("not-eligible", "held"),
        "4": ("not-eligible", None),
        "5": ("already-done", "expired"),
        "6": ("expired", "expired"),
    }
    assert core.rows("select id, xmin::text, ctid::text from holds where id <> 6 order by id") == before
    assert core.rows(
        "select key, kind, state, worker, deadline is not null from pgreaper.events where key is not null order by key"
    ) == [
        ("1", "not-eligible", "consumed", "w1", True),
        ("2", "not-eligible", "cancelled", "w1", True),
        ("3", "not-eligible", "held", "w1", True),
        ("4", "not-eligible", None, "w1", True),
        ("5", "already-done", "expired", "w1", True),
    ]
    assert core.rows("select expired, already_done, not_eligible from pgreaper.claims") == [(1, 1, 4)]
    assert core.value("select count(*) from pgreaper.failures") == 0, "a conflict is no failed attempt"


def test_c003_an_extended_hold_expires_after_its_new_deadline_once(core, holds, set_clock):
    """No lease is left behind that would keep the next real expiry waiting."""
    holds.due(1)
    core.register()
    token = claimed(core)
    core.do("update holds set expires_at = now() + interval '10 minutes'")
    assert core.expire(token) == {"1": ("not-eligible", "held")}
    assert core.run() == {}
    set_clock(timedelta(minutes=11))
    assert core.run() == {"1": "expired"}
    assert core.run() == {}
    assert core.column("select cardinality(keys) from pgreaper.transitions") == [1]


def test_c004_consume_and_expire_cannot_both_win(core, holds):
    """The documented pair of statements: whoever comes second changes nothing."""
    consume = (
        "update holds set status = 'consumed'"
        " where id = %s and status = 'held' and expires_at > clock_timestamp() returning id"
    )
    holds.due(1)
    alive = holds.ahead(1)[0]
    core.register()
    assert core.rows(consume, 1) == [], "the deadline has passed, though nobody has swept yet"
    assert core.run() == {"1": "expired"}
    assert core.rows(consume, 1) == []
    assert core.rows(consume, alive) == [(alive,)]
    assert holds.states() == {1: "expired", alive: "consumed"}


def test_a_row_that_somebody_has_locked_is_not_waited_for(committed, core, holds):
    """Promise: never waits; no attempt is charged and the next round takes it."""
    holds.due(3)
    core.register()
    token = claimed(core)
    other = committed(autocommit=False)
    other.execute("update holds set customer_email = 'x' where id = 2")
    start = time.monotonic()
    outcomes = core.expire(token)
    assert time.monotonic() - start < 0.5, "three waits for the lock_timeout would take longer"
    assert outcomes == {"1": ("expired", "expired"), "2": ("locked", "held"), "3": ("expired", "expired")}
    assert core.rows("select expired, locked from pgreaper.claims") == [(2, 1)]
    assert core.value("select count(*) from pgreaper.failures") == 0
    other.rollback()
    assert core.run() == {"2": "expired"}


def test_a_child_row_being_inserted_neither_blocks_nor_is_blocked(committed, core, holds):
    """`for no key update`: a foreign key check of an open transaction goes along with it."""
    holds.due(1)
    core.do("create table child (hold_id bigint references holds)")
    core.register()
    token = claimed(core)
    other = committed(autocommit=False)
    other.execute("insert into child values (1)")
    assert core.expire(token) == {"1": ("expired", "expired")}
    other.commit()


def test_a_status_in_a_unique_index_is_skipped_when_locked(committed, core, holds):
    """Changing it needs the stronger lock; pgreaper asks for that one, so that it skips and does not wait."""
    holds.due(2)
    core.do("alter table holds add unique (id, status)", "create table child (hold_id bigint references holds)")
    core.register()
    token = claimed(core)
    other = committed(autocommit=False)
    other.execute("insert into child values (1)")
    start = time.monotonic()
    assert core.expire(token) == {"1": ("locked", "held"), "2": ("expired", "expired")}
    assert time.monotonic() - start < 0.5
    other.commit()
    assert core.run() == {"1": "expired"}


@pytest.mark.parametrize("how", ["taken back", "released", "never given", "null"])
def test_a_lost_lease_changes_nothing(core, holds, set_clock, how):
    """Promise and RP001: the token is the only proof."""
    holds.due(1)
    core.register()
    token = claimed(core)
    hint, detail = "Stop working on its holds: another worker may have them.", "It was "
    message = f"lease {token} is lost"
    if how == "taken back":
        set_clock(timedelta(minutes=2))
        core.claim(rescan=True)
        detail += "taken back at 2"
    elif how == "released":
        core.call("reaper_release", token=token)
        detail += "released at 2"
    else:
        token = None if how == "null" else str(uuid4())
        message, hint, detail = (
            f"there is no lease {token or 'NULL'}",
            "Claim anew: reaper_claim() gives the token.",
            "",
        )
    error = core.refused("select pgreaper.reaper_expire(%s)", token)
    assert (error.sqlstate, error.diag.message_primary, error.diag.message_hint) == ("RP001", message, hint)
    assert (error.diag.message_detail or "").startswith(detail)
    assert holds.states() == {1: "held"}
    assert core.value("select count(*) from pgreaper.transitions") == 0


def test_a_lapsed_lease_that_nobody_took_back_is_still_good(core, holds, set_clock):
    """Nobody else was given its holds."""
    holds.due(1)
    core.register()
    token = claimed(core)
    set_clock(timedelta(hours=5))
    assert core.expire(token) == {"1": ("expired", "expired")}


def test_the_call_repeated_after_a_lost_reply_answers_the_books(core, holds):
    """The same outcomes, nothing done twice; the target is not even looked at."""
    holds.due(4)
    core.register()
    token = claimed(core)
    core.do("update holds set status = 'consumed' where id = 2")
    first = core.expire(token)
    core.do("update holds set status = 'held' where id in (1, 2)")
    trail = core.rows("select * from pgreaper.transitions")
    assert core.expire(token) == first
    assert core.expire(token, ["2", "3"]) == {"2": first["2"], "3": first["3"]}
    assert core.rows("select * from pgreaper.transitions") == trail
    assert holds.states()[1] == "held"


def test_some_keys_are_settled_and_the_claim_goes_on(core, holds):
    """With keys only those; with none the rest, and each hold comes back once."""
    holds.due(4)
    core.register()
    token = claimed(core)
    assert core.expire(token, ["3", "1"]) == {"1": ("expired", "expired"), "3": ("expired", "expired")}
    assert holds.states() == {1: "expired", 2: "held", 3: "expired", 4: "held"}
    assert core.value("select finished_at is null from pgreaper.claims")
    assert core.expire(token, ["1"]) == {"1": ("expired", "expired")}, "asked again: the books"
    assert core.expire(token, []) == {}
    assert core.expire(token) == {str(id_): ("expired", "expired") for id_ in (1, 2, 3, 4)}
    assert core.rows("select ending, expired from pgreaper.claims") == [("expired", 4)]
    assert core.value("select sum(holds) from pgreaper.transitions") == 4


def test_a_key_given_twice_comes_back_once(core, holds):
    holds.due(2)
    core.register()
    assert core.expire(claimed(core), ["1", "1"]) == {"1": ("expired", "expired")}
    assert core.value("select sum(holds) from pgreaper.transitions") == 1


@pytest.mark.parametrize("key", ["2", "nope", "", None])
def test_a_key_of_another_claim(core, holds, key):
    """Raises 22023, and nothing is expired."""
    holds.due(2)
    core.register()
    token = claimed(core, batch=1)
    error = core.refused("select pgreaper.reaper_expire(%s, %s)", token, ["1", key])
    shown = "NULL" if key is None else f"'{key}'"
    assert (error.sqlstate, error.diag.message_primary) == ("22023", f"claim {token} does not hold the key {shown}")
    assert error.diag.message_hint == "Pass keys exactly as reaper_claim() returned them."
    assert set(holds.states().values()) == {"held"}


@pytest.mark.parametrize("mode", ["isolation level repeatable read", "isolation level serializable", "read only"])
def test_where_the_guard_cannot_hold(committed, core, holds, mode):
    """Raises RP004."""
    holds.due(1)
    core.register()
    token = claimed(core)
    with core.connection.transaction(force_rollback=True):
        core.do(f"set transaction {mode}")
        assert core.refused("select pgreaper.reaper_expire(%s)", token).sqlstate == "RP004"
    assert holds.states() == {1: "held"}


def test_c027_one_raising_trigger_fails_its_own_hold(core, holds, set_clock):
    """The others are expired in the same call; the guilty one is retried within its budget, then dead."""
    holds.due(5)
    core.do(TRIGGER.format(body="if new.id = 3 then raise exception 'secret %', new.customer_email; end if;"))
    core.register(permanent_attempts=3)
    outcomes = core.expire(claimed(core))
    assert {key: outcome for key, (outcome, _) in outcomes.items()} == {
        "1": "expired", "2": "expired", "3": "retry", "4": "expired", "5": "expired",
    }  # fmt: skip
    assert core.rows("select key, attempts, error_class, sqlstate from pgreaper.failures") == [
        ("3", 1, "TriggerException", "P0001")
    ]
    assert core.claim(rescan=True) == [], "it waits"
    for hours, outcome in ((2, "retry"), (4, "dead-letter")):
        set_clock(timedelta(hours=hours))
        batch = core.claim()
        assert core.expire(batch[0].token) == {"3": (outcome, None)}
    set_clock(timedelta(days=900))
    assert core.claim(rescan=True) == []
    assert holds.states()[3] == "held"
    books = core.column("select e::text from pgreaper.events as e union all select f::text from pgreaper.failures as f")
    assert not any("secret" in line or "example.com" in line for line in books), "no message, no value"


def test_a_constraint_is_named_in_the_books(core, holds):
    holds.due(2)
    core.do("alter table holds add constraint one_stays check (not (status = 'expired' and id = 1))")
    core.register()
    assert core.run() == {"1": "dead-letter", "2": "expired"}
    assert core.rows(
        "select error_class, sqlstate, constraint_name, not_before = 'infinity' from pgreaper.failures"
    ) == [("ConstraintViolation", "23514", "one_stays", True)]


def test_many_guilty_are_told_from_many_innocent(core, holds):
    """Halving finds each of them; nobody is lost on the way and none comes back twice."""
    holds.due(200)
    core.do(TRIGGER.format(body="if new.id % 13 = 0 then raise exception 'no'; end if;"))
    core.register()
    outcomes = core.expire(claimed(core))
    assert len(outcomes) == 200
    assert {int(key) for key, (outcome, _) in outcomes.items() if outcome == "dead-letter"} == set(range(13, 201, 13))
    assert {id_ for id_, state in holds.states().items() if state == "held"} == set(range(13, 201, 13))
    assert core.rows("select expired, dead_letter from pgreaper.claims") == [(185, 15)]
    assert core.value("select sum(holds) from pgreaper.transitions") == 185


def test_a_failure_that_all_share_is_charged_to_nobody(core, holds, set_clock):
    """A CHECK that forgot the new status: every hold stays as it was, and goes through when the CHECK is mended."""
    holds.due(40)
    core.do("alter table holds add constraint forgot check (status in ('held', 'consumed'))")
    core.register()
    token = claimed(core)
    with contextlib.suppress(psycopg.errors.CheckViolation), core.connection.transaction():
        assert {outcome for outcome, _ in core.expire(token).values()} == {"retry"}
    assert core.value("select count(*) from pgreaper.failures") == 0
    assert set(holds.states().values()) == {"held"}
    core.do("alter table holds drop constraint forgot")
    core.expire(token)
    set_clock(timedelta(hours=3))
    core.run()
    assert set(holds.states().values()) == {"expired"}


def test_a_missing_right_is_charged_to_nobody(core, holds):
    """Trouble of the environment is raised as it is."""
    holds.due(2)
    core.do(TRIGGER.format(body="raise insufficient_privilege using message = 'no';"))
    core.register()
    assert core.refused("select pgreaper.reaper_expire(%s)", claimed(core)).sqlstate == "42501"
    assert core.value("select count(*) from pgreaper.failures") == 0


def test_c030_a_veto_is_a_failure_and_a_rewrite_a_conflict(core, holds):
    """A trigger that returns NULL must not be an endless loop, one that rewrites the status no success."""
    holds.due(3)
    core.do(
        TRIGGER.format(body="if new.id = 1 then return null; elsif new.id = 2 then new.status := 'cancelled'; end if;")
    )
    core.register(permanent_attempts=1)
    assert core.expire(claimed(core)) == {
        "1": ("dead-letter", None),
        "2": ("not-eligible", "cancelled"),
        "3": ("expired", "expired"),
    }
    assert core.rows("select key, error_class, sqlstate from pgreaper.failures") == [("1", "UpdateVetoed", None)]
    assert core.column("select keys from pgreaper.transitions") == [["3"]]
    assert holds.states() == {1: "held", 2: "cancelled", 3: "expired"}
    assert core.run() == {}


def test_c030_a_trigger_that_keeps_the_hold_is_a_veto(core, holds):
    """Rewritten back to held: an update happened, but the hold is still due."""
    holds.due(2)
    core.do(TRIGGER.format(body="if new.id = 1 then new.status := 'held'; end if;"))
    core.register()
    assert core.run() == {"1": "dead-letter", "2": "expired"}


def test_c030_a_trigger_that_extends_the_hold_is_a_conflict(core, holds):
    holds.due(1)
    core.do(TRIGGER.format(body="new.status := 'held'; new.expires_at := now() + interval '1 day';"))
    core.register()
    assert core.run() == {"1": "not-eligible"}
    assert core.value("select count(*) from pgreaper.failures") == 0


def test_a_success_closes_the_failure(core, holds, set_clock):
    holds.due(1)
    core.do(TRIGGER.format(body="raise exception 'no';"))
    core.register(permanent_attempts=2)
    assert core.expire(claimed(core)) == {"1": ("retry", None)}
    core.do("drop trigger guard on holds")
    set_clock(timedelta(minutes=1))
    assert core.expire(claimed(core)) == {"1": ("expired", "expired")}
    assert core.value("select count(*) from pgreaper.failures") == 0


def test_a_row_that_was_rewritten_elsewhere_is_found_by_its_key(core, holds):
    """A hint is where the row was seen; an update by the application moved it."""
    holds.due(3)
    core.register()
    token = claimed(core)
    core.do("update holds set customer_email = 'moved'")
    assert set(core.expire(token).values()) == {("expired", "expired")}


def test_a_hint_that_leads_to_another_hold_is_not_trusted(committed, core, holds):
    """The place was vacuumed and given to a hold that nobody has claimed."""
    core.do("alter table holds alter id set generated by default")
    holds.due(1)
    core.register()
    token = claimed(core)
    place = core.value("select ctid::text from holds")
    core.do("delete from holds", "vacuum (truncate off) holds")
    core.do("insert into holds (id, expires_at) values (7, now() - interval '1 hour')")
    assert core.rows("select id, ctid::text from holds") == [(7, place)], "the place is taken again"
    assert core.expire(token) == {"1": ("not-eligible", None)}
    assert holds.states() == {7: "held"}


def test_the_deadline_is_judged_by_the_clock_of_the_expiry(core, holds, set_clock):
    """Nothing read earlier is trusted: a hold that is not due any more, by the clock, survives."""
    holds.due(1)
    core.register()
    token = claimed(core)
    set_clock(timedelta(hours=-2))
    assert core.expire(token) == {"1": ("not-eligible", "held")}


def test_grace_is_part_of_the_guard(core, holds):
    """A policy whose grace grew after the claim gives the hold that grace."""
    holds.due(1)
    core.register()
    token = claimed(core)
    core.register(grace="1 day")
    assert core.expire(token) == {"1": ("not-eligible", "held")}


def test_c087_one_row_version_per_expiry_and_none_for_claims(committed, core, holds):
    """Promise: the target sees exactly one update a hold, and HOT is left to the user's indexes."""
    holds.due(50)
    core.do("drop index holds_due", "create index holds_due on holds (expires_at)")
    core.do("alter table holds set (fillfactor = 50, autovacuum_enabled = off)", "vacuum full holds")
    core.register()
    # A transaction knows what it has done so far; each counts from its own start.
    written = (
        "select n_tup_ins, n_tup_upd, n_tup_hot_upd, n_tup_del from pg_stat_xact_user_tables where relname = 'holds'"
    )

    def writes(action):
        with core.connection.transaction():
            before = core.rows(written)[0]
            action()
            return tuple(n - b for n, b in zip(core.rows(written)[0], before, strict=True))

    def lease_and_release():
        core.call("reaper_release", token=claimed(core, batch=20))
        core.claim(batch=5, rescan=True)

    def expire_all():
        for token in core.column("select token from pgreaper.claims where finished_at is null"):
            core.expire(token)
        core.run(batch=10)

    assert writes(lease_and_release) == (0, 0, 0, 0), "claims and releases write nothing"
    assert writes(expire_all) == (0, 50, 50, 0)
    assert set(holds.states().values()) == {"expired"}


def test_c087_the_trail_is_a_row_per_statement(core, holds):
    holds.due(500)
    core.register()
    core.run()
    assert core.rows("select count(*), sum(holds) from pgreaper.transitions") == [(1, 500)]


def test_a_user_without_rights_on_the_books_is_refused_plainly(core, holds):
    """Security invoker: nobody expires with somebody else's rights."""
    holds.due(1)
    core.register()
    token = claimed(core)
    core.do("create role pgreaper_clerk", "grant usage on schema pgreaper to pgreaper_clerk")
    core.do("grant execute on all functions in schema pgreaper to pgreaper_clerk", "set local role pgreaper_clerk")
    error = core.refused("select pgreaper.reaper_expire(%s)", token)
    assert isinstance(error, psycopg.errors.InsufficientPrivilege)


def test_unqualified_names_in_a_users_trigger_still_resolve(core, holds):
    """No pinned search_path: the user's triggers run as they always do."""
    core.do("create schema app", "create table app.log (id bigint)", "set local search_path = app, public")
    core.do(TRIGGER.format(body="insert into log values (new.id);"))
    holds.due(2)
    core.register(target="public.holds")
    assert core.run() == {"1": "expired", "2": "expired"}
    assert core.value("select count(*) from app.log") == 2

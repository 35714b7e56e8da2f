"""One bad hold, whatever is bad about it, does not keep the others from expiring: it is found, and charged alone."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from datetime import timedelta

import psycopg
import pytest

from tests.concurrency.sessions import Session

# `bad` says whether a row is a guilty one; `marker` is 'x' in a guilty row as soon as it has expired.
GUILTY = "new.customer_email = 'guilty' and new.status = 'expired'"
MARKER = (
    "alter table holds add marker text generated always as"
    " (case when customer_email = 'guilty' and status = 'expired' then 'x' end) stored"
)
OCCUPIED = "insert into holds (status, expires_at, customer_email) values ('expired', 'infinity', 'guilty')"


def trigger(body: str, *, when: str = "before", deferred: bool = False) -> list[str]:
    """A row trigger whose body runs for a guilty hold."""
    function = (
        f"function bad() returns trigger language plpgsql as $$ begin if {GUILTY} then {body} end if; return new;"
    )
    kind = "constraint trigger bad after" if deferred else f"trigger bad {when}"
    delay = "deferrable initially deferred" if deferred else ""
    return [
        f"create {function} end $$",
        f"create {kind} update on holds {delay} for each row execute function bad()",
    ]


def raising(sqlstate: str) -> list[str]:
    return trigger(f"raise exception using errcode = '{sqlstate}', message = 'never stored';")


# What is bad, and what the books say of it: class, SQLSTATE, constraint.
CHARGED = {
    "raise": (trigger("raise exception 'no';"), "TriggerException", "P0001", None),
    "raise after": (trigger("raise exception 'no';", when="after"), "TriggerException", "P0001", None),
    "own code": (raising("ZZ999"), "DatabaseError", "ZZ999", None),
    "assert": (trigger("assert false, 'no';"), "DatabaseError", "P0004", None),
    "division": (trigger("perform 1 / 0;"), "DataError", "22012", None),
    "cast": (trigger("perform new.customer_email::int;"), "DataError", "22P02", None),
    "too many rows": (trigger("perform (select g from generate_series(1, 2) g);"), "DatabaseError", "21000", None),
    "typo": (trigger("perform no_such_function();"), "ProgrammingError", "42883", None),
    "commit": (trigger("commit;"), "DatabaseError", "2D000", None),
    "endless recursion": (
        trigger("update public.holds set customer_email = customer_email where id = new.id;", when="after"),
        "DatabaseError", "54001", None),
    "not null": (trigger("new.expires_at := null;"), "ConstraintViolation", "23502", None),
    "check": (
        [f"alter table holds add constraint polite check (not ({GUILTY.replace('new.', '')}))"],
        "ConstraintViolation", "23514", "polite"),
    "foreign key": (
        [MARKER, "create table markers (m text primary key)",
         "alter table holds add constraint known foreign key (marker) references markers"],
        "ConstraintViolation", "23503", "known"),
    "foreign key of a child": (
        ["create table children (m text not null)", "create table markers (m text primary key)",
         "alter table children add constraint parent foreign key (m) references markers",
         *trigger("insert into public.children values ('x');", when="after")],
        "ConstraintViolation", "23503", "parent"),
    "unique": (
        [MARKER, "alter table holds add constraint alone unique (marker)", OCCUPIED],
        "ConstraintViolation", "23505", "alone"),
    "unique index": (
        [MARKER, "create unique index alone on holds ((marker || '!'))", OCCUPIED],
        "ConstraintViolation", "23505", "alone"),
    "exclusion": (
        [MARKER, "alter table holds add constraint apart exclude using btree (marker with =)", OCCUPIED],
        "ConstraintViolation", "23P01", "apart"),
    "domain": (
        ["create domain word as text constraint decent check (value <> 'x')", "alter table holds add word word",
         *trigger("new.word := 'x';")],
        "ConstraintViolation", "23514", "decent"),
    "veto": (trigger("return null;"), "UpdateVetoed", None, None),
    "kept held": (trigger("new.status := 'held';"), "UpdateVetoed", None, None),
    "a right that this hold lacks": (raising("42501"), "ProgrammingError", "42501", None),
}  # fmt: skip
DEFERRED = {
    "trigger": (trigger("raise exception 'no';", deferred=True), "TriggerException", "P0001", None),
    "foreign key": (
        [MARKER, "create table markers (m text primary key)",
         "alter table holds add constraint known foreign key (marker) references markers initially deferred"],
        "ConstraintViolation", "23503", "known"),
    "unique": (
        [MARKER, "alter table holds add constraint alone unique (marker) initially deferred", OCCUPIED],
        "ConstraintViolation", "23505", "alone"),
    "exclusion": (
        [MARKER,
         "alter table holds add constraint apart exclude using btree (marker with =) deferrable initially deferred",
         OCCUPIED],
        "ConstraintViolation", "23P01", "apart"),
}  # fmt: skip


def spoil(core, ids: list[int]) -> None:
    core.connection.execute("update holds set customer_email = 'guilty' where id = any (%s)", (ids,))


def dead(core) -> dict[str, tuple[str, str | None, str | None]]:
    return {
        key: (error_class, sqlstate, name)
        for key, error_class, sqlstate, name in core.rows(
            "select key, error_class, sqlstate, constraint_name from pgreaper.dead_letters"
        )
    }


def check(core, holds, ids: list[int], guilty: list[int], books: tuple[str | None, ...]) -> None:
    """The guilty are dead letters with these books and unchanged; the others are expired; nothing else is left."""
    assert dead(core) == {str(id_): books for id_ in guilty}
    states = holds.states()
    assert {id_ for id_ in ids if states[id_] == "held"} == set(guilty)
    assert {id_ for id_ in ids if states[id_] == "expired"} == set(ids) - set(guilty)
    assert core.value("select count(*) from pgreaper.failures") == len(guilty)
    assert core.rows("select invariant, found from pgreaper.reaper_verify() where not holds") == []


@pytest.mark.parametrize("kind", CHARGED)
def test_c027_a_bad_hold_is_found_and_charged_alone(core, holds, kind):
    """Claim + expire: everything that a trigger or a constraint can do to one row of a batch."""
    statements, *books = CHARGED[kind]
    ids = holds.due(20)
    spoil(core, [ids[0], ids[9], ids[10], ids[19]])
    core.do(*statements)
    core.register()
    claim = core.claim()
    assert len(claim) == 20
    outcomes = core.expire(claim[0].token)
    guilty = [ids[0], ids[9], ids[10], ids[19]]
    assert {int(key) for key, (outcome, _) in outcomes.items() if outcome == "dead-letter"} == set(guilty)
    assert sum(outcome == "expired" for outcome, _ in outcomes.values()) == 16
    check(core, holds, ids, guilty, tuple(books))


@pytest.mark.parametrize("kind", ["raise", "assert", "unique", "veto", "a right that this hold lacks"])
def test_c027_a_sweep_finds_it_too(committed, core, holds, kind):
    """The same failure path, from the fast statement on."""
    statements, *books = CHARGED[kind]
    ids = holds.due(20)
    guilty = [ids[0], ids[9], ids[10], ids[19]]
    spoil(core, guilty)
    core.do(*statements)
    core.register()
    assert core.value("call pgreaper.reaper_sweep()") == 16
    check(core, holds, ids, guilty, tuple(books))


@pytest.mark.parametrize("way", ["expire", "sweep"])
@pytest.mark.parametrize("kind", DEFERRED)
def test_c027_a_failure_that_shows_at_the_commit_only(committed, core, holds, kind, way):
    """Decision 6: found by halving like any other, because the transaction is pgreaper's own."""
    statements, *books = DEFERRED[kind]
    ids = holds.due(20)
    guilty = [ids[0], ids[9], ids[10], ids[19]]
    spoil(core, guilty)
    core.do(*statements)
    core.register()
    if way == "sweep":
        assert core.value("call pgreaper.reaper_sweep()") == 16
    else:
        core.run()
    check(core, holds, ids, guilty, tuple(books))


LAYOUTS = {
    "alone": (1, [0]),
    "first of two": (2, [0]),
    "last of two": (2, [1]),
    "both": (2, [0, 1]),
    "three": (3, [1]),
    "first": (500, [0]),
    "last": (500, [499]),
    "in the middle": (500, [250]),
    "adjacent": (500, [248, 249, 250, 251]),
    "scattered": (500, [0, 7, 8, 63, 100, 255, 256, 257, 400, 499]),
    "every tenth": (500, list(range(0, 500, 10))),
    "all but one, the first": (7, [1, 2, 3, 4, 5, 6]),
    "all but one, the last": (7, [0, 1, 2, 3, 4, 5]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_c027_wherever_in_the_batch_they_are(core, holds, layout):
    """Every innocent is expired in the same call, every guilty one is a dead letter of one attempt."""
    size, places = LAYOUTS[layout]
    ids = holds.due(size)
    guilty = [ids[place] for place in places]
    spoil(core, guilty)
    core.do(*trigger("raise exception 'no';"))
    core.register()
    core.expire(core.claim()[0].token)
    check(core, holds, ids, guilty, ("TriggerException", "P0001", None))
    assert set(core.column("select attempts from pgreaper.failures")) == {1}


@pytest.mark.parametrize("layout", ["first of two", "in the middle", "adjacent", "scattered"])
def test_c027_wherever_when_it_shows_at_the_commit(committed, core, holds, layout):
    size, places = LAYOUTS[layout]
    ids = holds.due(size)
    guilty = [ids[place] for place in places]
    spoil(core, guilty)
    core.do(*trigger("raise exception 'no';", deferred=True))
    core.register()
    core.expire(core.claim()[0].token)
    check(core, holds, ids, guilty, ("TriggerException", "P0001", None))


def test_several_kinds_in_one_batch(core, holds):
    """Each in the books with its own class, SQLSTATE and constraint."""
    ids = holds.due(30)
    core.do(
        "update holds set customer_email = 'kind' || (id / 6) where id % 6 = 3",
        "alter table holds add constraint polite check (not (customer_email = 'kind1' and status = 'expired'))",
        "create function bad() returns trigger language plpgsql as $$ begin"
        " case new.customer_email when 'kind0' then raise exception 'no';"
        " when 'kind2' then return null; when 'kind3' then perform 1 / 0; when 'kind4' then assert false;"
        " else null; end case; return new; end $$",
        "create trigger bad before update on holds for each row execute function bad()",
    )
    core.register()
    core.expire(core.claim()[0].token)
    assert dead(core) == {
        str(ids[2]): ("TriggerException", "P0001", None),
        str(ids[8]): ("ConstraintViolation", "23514", "polite"),
        str(ids[14]): ("UpdateVetoed", None, None),
        str(ids[20]): ("DataError", "22012", None),
        str(ids[26]): ("DatabaseError", "P0004", None),
    }
    assert sum(state == "expired" for state in holds.states().values()) == 25


def test_c030_a_veto_a_rewrite_and_a_good_hold(core, holds):
    """The case as it is told: vetoed: dead letter; rewritten: a conflict, told with its state; and no endless loop."""
    ids = holds.due(3)
    core.do(
        "create function bad() returns trigger language plpgsql as $$ begin"
        f" if new.id = {ids[0]} then return null; end if;"
        f" if new.id = {ids[1]} then new.status := 'cancelled'; end if; return new; end $$",
        "create trigger bad before update on holds for each row execute function bad()",
    )
    core.register(permanent_attempts=1)
    assert core.run() == {str(ids[0]): "dead-letter", str(ids[1]): "not-eligible", str(ids[2]): "expired"}
    assert holds.states() == {ids[0]: "held", ids[1]: "cancelled", ids[2]: "expired"}
    [state] = core.column("select state from pgreaper.history where outcome = 'not-eligible'")
    assert state == "cancelled"


@pytest.mark.parametrize("sqlstate", ["08006", "53100", "53200", "57P03", "58030", "XX000", "XX001"])
def test_c033_trouble_of_the_environment_in_one_hold(core, holds, sqlstate):
    """It is charged to nobody; yet it must not stop the others for ever: they expire, the hold is left for later."""
    ids = holds.due(20)
    spoil(core, [ids[0]])
    core.do(*raising(sqlstate))
    core.register()
    outcomes = core.expire(core.claim()[0].token)
    assert outcomes.pop(str(ids[0])) == ("locked", None)
    assert {outcome for outcome, _ in outcomes.values()} == {"expired"}
    assert core.value("select count(*) from pgreaper.failures") == 0
    # Alone it is told as it is: somebody has to look.
    again = core.claim(rescan=True)
    assert [hold.key for hold in again] == [str(ids[0])]
    assert core.refused("select pgreaper.reaper_expire(%s)", again[0].token).sqlstate == sqlstate
    assert core.value("select count(*) from pgreaper.failures") == 0


@pytest.mark.parametrize("sqlstate", ["08006", "53100", "42501", "XX000"])
def test_c033_trouble_of_the_environment_in_all_of_them(core, holds, sqlstate):
    """Its SQLSTATE is raised after a few tries, in our words: the trigger's may carry values. Nobody is charged."""
    ids = holds.due(100)
    spoil(core, ids)
    core.do("create sequence tries", *raising(sqlstate))
    core.do(
        "create function count_tries() returns trigger language plpgsql as"
        " $$ begin perform nextval('public.tries'); return null; end $$",
        "create trigger a_count before update on holds for each statement execute function count_tries()",
    )
    core.register()
    token = core.claim()[0].token
    error = core.refused("select pgreaper.reaper_expire(%s)", token)
    assert error.sqlstate == sqlstate
    assert error.diag.message_primary == f"a trigger of public.holds raised SQLSTATE {sqlstate}"
    assert core.value("select last_value from tries") <= 20, "down to one, five alone, then ever fewer of the others"
    assert core.value("select count(*) from pgreaper.failures") == 0
    assert core.value("select count(*) from pgreaper.events where kind <> 'register'") == 0
    assert core.status()["state"] == "active"
    core.do("drop trigger bad on holds")
    assert len(core.expire(token)) == 100


def test_a_rule_on_the_target_charges_nobody(core, holds):
    """A conditional rule makes the UPDATE impossible for PostgreSQL: that is the policy's trouble, not a hold's."""
    holds.due(20)
    core.register()
    core.do("create rule bad as on update to holds where old.customer_email = 'x' do instead nothing")
    outcomes = core.expire(core.claim()[0].token)
    assert {outcome for outcome, _ in outcomes.values()} == {"retry"}
    assert core.value("select count(*) from pgreaper.failures") == 0
    assert core.status()["state"] == "suspended"
    assert "0A000" in core.status()["reason"]


def test_pending_work_of_the_caller_is_not_blamed_on_holds(committed, core, holds):
    """Decision 6: in a transaction that the caller has written in, what is deferred stays deferred, ours too."""
    ids = holds.due(10)
    core.do(
        "create table parents (id int primary key)",
        "create table children (parent int references parents initially deferred)",
    )
    core.register()
    token = core.claim()[0].token
    with core.connection.transaction():
        core.do("insert into children values (1)")
        outcomes = core.expire(token)
        core.do("insert into parents values (1)")
    assert {outcome for outcome, _ in outcomes.values()} == {"expired"}
    assert [holds.states()[id_] for id_ in ids] == ["expired"] * 10

    # And when the caller's own work is what is wrong, the commit fails, and it fails whole.
    holds.due(5)
    token = core.claim(rescan=True)[0].token
    core.do("begin", "insert into children values (2)")
    core.expire(token)
    with pytest.raises(psycopg.errors.ForeignKeyViolation):
        core.do("commit")
    assert core.value("select count(*) from pgreaper.failures") == 0
    assert sum(state == "held" for state in holds.states().values()) == 5


def test_what_the_caller_does_afterwards_is_deferred_as_before(committed, core, holds):
    """An expire that comes first in a transaction leaves the constraints of what follows as it found them."""
    holds.due(3)
    core.do(
        "create table parents (id int primary key)",
        "create table children (parent int references parents initially deferred)",
        'create schema "Odd one"',
        'create table "Odd one".numbers (n int constraint "alone, too" unique deferrable initially deferred)',
        'insert into "Odd one".numbers values (1), (2)',
    )
    core.register()
    token = core.claim()[0].token
    with core.connection.transaction():
        assert len(core.expire(token)) == 3
        core.do("insert into children values (1)", "insert into parents values (1)")
        core.do('update "Odd one".numbers set n = 3 - n')
        core.do('insert into "Odd one".numbers values (1)', 'delete from "Odd one".numbers where n = 1')
    assert core.value("select count(*) from children") == 1


def test_c089_a_good_batch_needs_a_handful_of_subtransactions(core, holds):
    """Whoever has more than 64 slows every session of the server."""
    holds.due(500)
    core.do(*trigger("raise exception 'no';"))
    core.register()
    core.expire(core.claim(batch=500)[0].token)
    assert live(core) <= 2


@pytest.mark.parametrize("place", [0, 1, 249, 250, 333, 498, 499])
def test_c089_one_guilty_hold_in_500_stays_far_below_64(core, holds, place):
    """Halving: what was written is written by a dozen or so subtransactions."""
    ids = holds.due(500)
    spoil(core, [ids[place]])
    core.do(*trigger("raise exception 'no';"))
    core.register()
    core.expire(core.claim(batch=500)[0].token)
    assert 2 <= live(core) <= 24
    assert len(dead(core)) == 1


def live(core) -> int:
    """How many subtransactions have written what is expired: a row knows who wrote it."""
    count = core.value("select count(distinct xmin::text) from holds where status = 'expired'")
    assert isinstance(count, int)
    return count


def test_c034_a_retry_of_many_that_fail_together_is_spread(core, holds, set_clock):
    """They failed in the same instant; they do not come back in the same instant."""
    ids = holds.due(200)
    holds.due(20)
    spoil(core, ids)
    core.do(*trigger("raise exception 'no';"))
    core.register(permanent_attempts=5, backoff_base="10 seconds", backoff_cap="1 hour")
    core.do("update holds set expires_at = expires_at - interval '1 day' where customer_email <> 'guilty'")
    core.expire(core.claim()[0].token)
    waits = core.column("select extract(epoch from not_before - failed_at)::float8 from pgreaper.retries")
    assert len(waits) == 200
    assert 20 <= min(waits) < 21.5
    assert 28.5 < max(waits) <= 30
    assert len({round(wait, 3) for wait in waits}) > 150


def test_c090_a_full_batch_of_failing_holds_does_not_spin(committed, core, holds):
    """A run ends although there is no backoff at all: nobody is tried twice in it."""
    ids = holds.due(10)
    spoil(core, ids)
    core.do("create sequence tries", *trigger("perform nextval('public.tries'); raise exception 'no';"))
    core.register(batch=10, permanent_attempts=100, backoff_base="1 microsecond", backoff_cap="1 microsecond")
    sweep = "call pgreaper.reaper_sweep()"
    with pytest.raises(psycopg.errors.RaiseException, match="suspended"):
        core.value(sweep)
    assert core.value("select last_value from tries") < 60
    core.do("update pgreaper.cursors set suspended_until = now() - interval '1 second'")
    with pytest.raises(psycopg.errors.RaiseException, match="suspended"):
        core.value(sweep)
    assert core.value("select last_value from tries") < 120

    # Not many enough to suspend anything, so they are charged and due again at once.
    core.do("delete from holds where id > 5", "update pgreaper.cursors set failing_at = null, suspended_until = null")
    core.value(sweep)
    assert core.column("select distinct attempts from pgreaper.failures") == [1]
    core.value(sweep)
    assert core.column("select distinct attempts from pgreaper.failures") == [2]


def test_c090_claims_of_a_failing_batch_take_turns_with_fresh_holds(core, holds, set_clock):
    """Without any backoff, retries never keep fresh holds from their turn."""
    ids = holds.due(5)
    holds.due(30)
    spoil(core, ids)
    core.do(*trigger("raise exception 'no';"))
    core.register(batch=5, permanent_attempts=1000, backoff_base="1 microsecond", backoff_cap="1 microsecond")
    for _ in range(20):
        claim = core.claim()
        if claim:
            core.expire(claim[0].token)
    assert sum(state == "expired" for state in holds.states().values()) == 30
    assert sum(state == "held" for state in holds.states().values()) == 5


SLOW = "perform pg_sleep(0.05);"


def test_c025_a_batch_holds_its_rows_only_as_long_as_its_triggers_need(committed, core, holds, connect):
    """The lock on a row ends with the step: `batch` bounds it, and an application waits no longer than one step."""
    holds.due(12)
    core.do(
        f"create function slow() returns trigger language plpgsql as $$ begin {SLOW} return new; end $$",
        "create trigger slow before update on holds for each row execute function slow()",
    )
    core.register()
    sweeper, application = Session(connect(), connect()), connect()
    try:
        answer = sweeper.start("call pgreaper.reaper_sweep(batch => 2)")
        waits = []
        while not answer.done():
            [(before,)] = application.execute("select clock_timestamp()").fetchall()
            application.execute("update holds set customer_email = customer_email where id = 1")
            [(after,)] = application.execute("select clock_timestamp()").fetchall()
            waits.append(after - before)
        answer.result()
    finally:
        sweeper.close()
    assert max(waits) < timedelta(seconds=0.6), "a step of two holds took a tenth of a second, twelve would take 0.6"
    core.value("call pgreaper.reaper_sweep()")  # hold 1, in case that it was ours whenever its turn came
    assert set(holds.states().values()) == {"expired"}


def test_c026_a_batch_that_is_too_slow_for_the_timeout_makes_progress_when_smaller(committed, core, holds):
    """C069 too: a canceled call changes nothing and charges nobody; half of it fits."""
    ids = holds.due(16)
    core.do(
        "create table children (hold bigint, seen boolean default false)",
        "insert into children select h.id, false from holds h, generate_series(1, 100)",
        "create function slow() returns trigger language plpgsql as $$ begin"
        " update public.children set seen = true where hold = new.id; perform pg_sleep(0.03); return new; end $$",
        "create trigger slow before update on holds for each row execute function slow()",
    )
    core.register()
    core.do("set statement_timeout = '300ms'")
    size, sizes = 16, []
    while claim := core.claim(batch=size, rescan=True):
        sizes.append(len(claim))
        assert len(sizes) < 20
        try:
            core.expire(claim[0].token)
        except psycopg.errors.QueryCanceled:
            assert core.value("select pgreaper.reaper_release(%s)", claim[0].token) == len(claim)
            size = max(1, size // 2)
    assert sizes[0] == 16
    assert sizes[-1] <= 8
    assert core.value("select count(*) from pgreaper.failures") == 0
    assert [holds.states()[id_] for id_ in ids] == ["expired"] * 16
    assert core.value("select count(*) from children where not seen") == 0


def test_c069_a_sweep_under_a_roles_timeout_keeps_what_it_has_committed(committed, core, holds):
    """The timeout cancels the call; every step before it is done, so each run gets further."""
    holds.due(40)
    core.do(
        "create function slow() returns trigger language plpgsql as"
        " $$ begin perform pg_sleep(0.02); return new; end $$",
        "create trigger slow before update on holds for each row execute function slow()",
        "create role hasty superuser",
        "alter role hasty set statement_timeout = '300ms'",
    )
    core.register()
    try:
        core.do("set role hasty", "set statement_timeout = '300ms'")
        left = [40]
        while left[-1]:
            assert len(left) < 20
            with suppress(psycopg.errors.QueryCanceled):
                core.value("call pgreaper.reaper_sweep(batch => 4)")
            left.append(sum(state == "held" for state in holds.states().values()))
            assert left[-1] < left[-2], "no progress"
        assert len(left) > 2
    finally:
        core.do("reset role", "drop role hasty")
    assert core.value("select count(*) from pgreaper.failures") == 0


@pytest.mark.parametrize("how", ["lock timeout", "deadlock"])
def test_c033_who_waits_for_somebodys_lock_is_not_charged(committed, core, holds, connect, how):
    """40P01 and 55P03, by somebody who really is in the way: nobody is charged."""
    ids = holds.due(6)
    core.do("create table stock (id int primary key, n int)", "insert into stock values (1, 6)")
    body = "update public.stock set n = n + 1 where id = 1;"
    spoil(core, [ids[3]])
    core.do(*trigger(body))
    core.register()
    other = connect()
    with other.transaction():
        other.execute("update stock set n = 0 where id = 1")
        if how == "deadlock":
            core.do("set deadlock_timeout = '10ms'")  # found before lock_timeout would end it
        outcomes = core.expire(core.claim()[0].token)
    assert outcomes.pop(str(ids[3])) == ("locked", None)
    assert {outcome for outcome, _ in outcomes.values()} == {"expired"}
    assert core.value("select count(*) from pgreaper.failures") == 0
    assert core.run() == {str(ids[3]): "expired"}


@pytest.mark.parametrize("sqlstate", ["40001", "40P01", "55P03"])
def test_c033_a_trigger_that_only_says_so_is_charged(core, holds, sqlstate):
    """RAISE with the code of a lock waits for nobody: a transient failure of its hold, with a budget."""
    ids = holds.due(6)
    spoil(core, [ids[3]])
    core.do(*trigger(f"raise exception using errcode = '{sqlstate}';"))
    core.register()
    outcomes = core.expire(core.claim()[0].token)
    assert outcomes.pop(str(ids[3]))[0] == "retry"
    assert {outcome for outcome, _ in outcomes.values()} == {"expired"}
    assert core.rows("select attempts, sqlstate from pgreaper.failures") == [(1, sqlstate)]


@pytest.mark.parametrize("way", ["claim", "sweep"])
@pytest.mark.parametrize("when", ["after", "deferred"])
def test_a_hold_that_a_trigger_brings_back_is_a_veto(committed, core, holds, when, way):
    """With the same deadline it would expire again and again: it is a dead letter after one try, and once at most."""
    ids = holds.due(20)
    deferred = "constraint" if when == "deferred" else ""
    core.do(
        "create function back() returns trigger language plpgsql as $$ begin"
        f" if new.status = 'expired' and new.id = {ids[6]} then"
        "  update public.holds set status = 'held' where id = new.id; end if; return null; end $$",
        f"create {deferred} trigger back after update on holds"
        f" {'deferrable initially deferred' if deferred else ''} for each row execute function back()",
    )
    core.register()
    if way == "sweep":
        assert core.value("call pgreaper.reaper_sweep()") == 19
    else:
        assert core.expire(core.claim()[0].token)[str(ids[6])] == ("dead-letter", None)
    assert core.rows("select key, error_class from pgreaper.failures") == [(str(ids[6]), "UpdateVetoed")]
    assert core.value("select sum(holds) from pgreaper.transitions") == 19


def test_a_trigger_that_moves_the_deadline_and_keeps_the_hold_is_undone(core, holds):
    """Nothing of what it did stays, so the hold is no new incarnation each time."""
    (only,) = holds.due(1)
    core.do(*trigger("new.status := 'held'; new.expires_at := old.expires_at + interval '1 second';"))
    spoil(core, [only])
    core.register()
    before = core.rows("select expires_at from holds")
    assert core.expire(core.claim()[0].token) == {str(only): ("dead-letter", None)}
    assert core.rows("select expires_at from holds") == before
    assert core.claim(rescan=True) == []


@pytest.mark.parametrize("way", ["sweep", "claim"])
def test_c090_a_retry_that_somebody_has_locked_does_not_spin(committed, core, holds, connect, set_clock, way):
    """It is put off for a second, uncharged, whichever way it was tried; the rest goes on and the run ends."""
    holds.due(3)
    core.register(backoff_base="0", backoff_cap="0")
    [hold, *_] = core.claim()
    core.call("reaper_fail", "outcome", token=hold.token, key=hold.key, error_class="T", transient=True)
    core.call("reaper_release", token=hold.token)

    def run() -> int:
        if way == "sweep":
            return int(core.value("call pgreaper.reaper_sweep()"))
        return list(core.run().values()).count("expired")

    other = connect()
    with other.transaction():
        other.execute("update holds set customer_email = 'x' where id = %s", (hold.key,))
        core.do("set statement_timeout = '5s'")
        assert run() == 2
        assert core.rows("select key, attempts from pgreaper.retries") == [(hold.key, 1)]
        assert core.value("select not_before > failed_at from pgreaper.failures")
    set_clock(timedelta(seconds=2))
    assert run() == 1


def test_only_the_retry_itself_is_put_off(committed, core, holds, connect):
    """A locked hold that never failed is not put on record; the failure of an earlier incarnation stays as it is."""
    [id_] = holds.due(1)
    core.register(backoff_base="0", backoff_cap="0")
    [hold] = core.claim()
    core.call("reaper_fail", "outcome", token=hold.token, key=hold.key, error_class="T", transient=True)
    core.call("reaper_release", token=hold.token)
    core.do(
        "update holds set expires_at = expires_at + interval '1 minute'",
        "update pgreaper.failures set not_before = now() + interval '1 hour'",  # or the claim would close it
    )
    [again] = core.claim(rescan=True)
    core.do("update pgreaper.failures set not_before = now()")
    before = core.rows("select * from pgreaper.failures")
    other = connect()
    with other.transaction():
        other.execute("update holds set customer_email = 'x' where id = %s", (id_,))
        assert core.expire(again.token)[str(id_)][0] == "locked"
    assert core.rows("select * from pgreaper.failures") == before != []


CAREFUL = "create trigger own before update on holds for each row execute function suppress_redundant_updates_trigger()"
PIECES = {
    # Of the way that a trigger of the user's makes necessary.
    "function": (f"{CAREFUL}; drop function pgreaper._row_lock", "_row_lock"),
    "function in a statement": (
        "drop function pgreaper._lateness(timestamptz, timestamptz[], timestamptz, timestamptz)", "_lateness"),
    "table": ("alter table pgreaper.transitions rename to moved", "transitions"),
    "column": ("alter table pgreaper.transitions rename column lateness to moved", "lateness"),
}  # fmt: skip


@pytest.mark.parametrize("way", ["expire", "sweep"])
@pytest.mark.parametrize("piece", PIECES)
def test_a_missing_piece_of_pgreaper_is_nobodys_fault(committed, core, holds, piece, way):
    """Half an upgrade: RP005 names what is missing; no hold is charged and the policy is not suspended."""
    statement, name = PIECES[piece]
    holds.due(20)
    core.register()
    core.do("truncate pgreaper.claims")
    token = core.claim()[0].token if way == "expire" else None
    core.do(statement)

    with pytest.raises(psycopg.Error) as refused:
        core.value("call pgreaper.reaper_sweep()") if token is None else core.expire(token)

    error = refused.value
    if piece != "table":  # that one is met before the transition is tried
        assert error.sqlstate == "RP005"
    assert name in (error.diag.message_primary or "")
    assert core.value("select count(*) from pgreaper.failures") == 0
    assert core.rows("select failing_at, suspensions from pgreaper.cursors") == [(None, 0)]
    assert set(holds.states().values()) == {"held"}


@pytest.mark.parametrize(
    "body",
    ["perform no_such_function();", "perform pgreaper.no_such_function();", "perform from pgreaper.no_such_table;",
     "raise undefined_function using message = 'function pgreaper._row_lock() does not exist';"],
)  # fmt: skip
@pytest.mark.parametrize("deferred", [False, True])
def test_what_a_trigger_misses_is_the_policys_trouble(committed, core, holds, body, deferred):
    """42883 too, and another matter: all holds fail alike, so the policy rests, by its own code."""
    ids = holds.due(20)
    spoil(core, ids)
    core.do(*trigger(body, deferred=deferred))
    core.register()
    outcomes = core.expire(core.claim()[0].token)
    assert {outcome for outcome, _ in outcomes.values()} == {"retry"}
    assert core.status()["state"] == "suspended"
    assert core.value("select count(*) from pgreaper.failures") == 0


# A hold that takes longer than any statement may.
ENDLESS = "perform pg_sleep(5);"


def sweep_under_a_timeout(core, *, batch: int = 500) -> str | None:
    """One call of the sweep that may take 400 ms; the SQLSTATE of its error."""
    core.do("set statement_timeout = '400ms'")
    try:
        core.value("call pgreaper.reaper_sweep(batch => %s)", batch)
    except psycopg.Error as error:
        return error.sqlstate
    finally:
        core.do("set statement_timeout = '20s'")
    return None


@pytest.mark.parametrize("place", ["first", "middle"])
def test_a_hold_that_alone_outlasts_the_timeout_is_found_by_sweeps(committed, core, holds, place):
    """Each call is cancelled with its timer, and yet later calls get there: it is a dead letter, alone."""
    ids = holds.due(20)
    guilty = ids[0] if place == "first" else ids[9]
    spoil(core, [guilty])
    core.do(*trigger(ENDLESS))
    core.register(max_attempts=2, backoff_base="0", backoff_cap="0")
    calls: list[str] = []
    while len(calls) < 12 and (state := sweep_under_a_timeout(core)) is not None:
        calls.append(state)
    # 20 together, then 2 or 3 at a time, then alone; with a budget of two.
    assert calls == ["57014"] * len(calls)
    assert 2 <= len(calls) <= 6
    check(core, holds, ids, [guilty], ("StatementTimeout", "57014", None))


def test_a_timeout_that_was_used_up_by_others_blames_nobody(committed, core, holds):
    """The step in hand when a long call ends is innocent: what is committed stays, and nobody is charged."""
    holds.due(100)
    core.do(
        "create function slow() returns trigger language plpgsql as"
        " $$ begin perform pg_sleep(0.02); return new; end $$",
        "create trigger slow before update on holds for each row execute function slow()",
    )
    core.register()
    assert sweep_under_a_timeout(core, batch=4) == "57014"
    assert 4 <= list(holds.states().values()).count("expired") < 100
    assert core.value("select count(*) from pgreaper.failures") == 0


@pytest.mark.parametrize("way", ["sweep", "expire"])
def test_a_persons_cancel_charges_nobody(committed, core, holds, connect, way):
    """pg_cancel_backend while a bad hold is being tried alone, with a timeout that is far away."""
    ids = holds.due(1)
    spoil(core, ids)
    core.do(*trigger(ENDLESS))
    core.register()
    token = core.claim()[0].token if way == "expire" else None
    session = Session(connect(), core.connection)
    try:
        session.run("set statement_timeout = '1min'")
        answer = session.start("call pgreaper.reaper_sweep()" if token is None else
                               f"select pgreaper.reaper_expire('{token}')")  # fmt: skip
        sleeps = "select count(*) from pg_stat_activity where pid = %s and wait_event = 'PgSleep'"
        while core.value(sleeps, session.pid) == 0:
            assert not answer.done()
        core.value("select pg_cancel_backend(%s)", session.pid)
        assert isinstance(answer.exception(timeout=10), psycopg.errors.QueryCanceled)
    finally:
        session.close()
    assert core.value("select count(*) from pgreaper.failures") == 0
    assert set(holds.states().values()) == {"held"}


def test_c023_a_forgotten_transaction_keeps_one_hold_and_is_seen(committed, core, holds, connect):
    """The others expire in the first run, the preview counts what is locked, and the end of the lock ends it."""
    ids = holds.due(3)
    core.register()
    forgotten = connect()
    with forgotten.transaction():
        forgotten.execute("update holds set customer_email = customer_email where id = %s", (ids[0],))
        assert core.value("call pgreaper.reaper_sweep()") == 2
        assert (core.preview()["due"], core.preview()["locked"]) == (1, 1)
        status = core.status()
        assert (status["state"], status["due"], status["dead"], status["retrying"]) == ("active", 1, 0, 0)
        assert status["oldest_due"] > "00:59"
        assert core.rows("select invariant, found from pgreaper.reaper_verify() where not holds") == []
    assert core.value("call pgreaper.reaper_sweep()") == 1


def run(core, way: str) -> None:
    """One turn: a sweep or a claim + expire."""
    if way == "sweep":
        core.value("call pgreaper.reaper_sweep()")
    else:
        core.expire(core.claim(rescan=True)[0].token)


def by_state(holds) -> dict[str, int]:
    states = list(holds.states().values())
    return {state: states.count(state) for state in set(states)}


@pytest.mark.parametrize("way", ["sweep", "expire"])
@pytest.mark.parametrize("sqlstate", ["58030", "42501"])
@pytest.mark.parametrize(
    "bad", [[0], [499], [0, 250, 499], range(0, 500, 25)], ids=["first", "last", "three", "twenty"]
)
def test_trouble_of_one_hold_in_a_large_batch_does_not_stop_the_others(committed, core, holds, bad, sqlstate, way):
    """Halving 500 down to one takes nine failures, and none of them says that the environment is broken."""
    ids = holds.due(500)
    spoil(core, [ids[i] for i in bad])
    core.do(*raising(sqlstate))
    core.register(batch=500)
    # A sweep that meets it alone in a next batch says so; what is committed by then stays.
    with suppress(psycopg.errors.lookup(sqlstate)) if way == "sweep" else nullcontext():
        run(core, way)
    assert by_state(holds) == {"expired": 500 - len(bad), "held": len(bad)}
    assert core.column("select key from pgreaper.failures where sqlstate <> '42501'") == []


@pytest.mark.parametrize("way", ["sweep", "expire"])
def test_a_right_that_thirty_holds_at_the_head_lack_does_not_stop_the_others(committed, core, holds, way):
    """An audit table under row level security refuses one tenant's rows: those are the tenant's failures."""
    ids = holds.due(400)
    spoil(core, ids[:30])
    core.do(
        "create table audit (hold bigint, who text)",
        "alter table audit enable row level security",
        "create policy known on audit with check (who <> 'guilty')",
        "create function note() returns trigger language plpgsql as $$ begin"
        " insert into public.audit values (new.id, new.customer_email); return null; end $$",
        "create trigger note after update on holds for each row execute function note()",
        "create role expiry",
        "grant select, insert on audit to expiry",
    )
    core.register(batch=500)
    try:
        core.call("reaper_grant", role="expiry", kind="worker")
        core.do("set role expiry")
        turns = 0
        while by_state(holds) != {"expired": 370, "held": 30}:
            run(core, way)
            turns += 1
            assert turns <= 6, "each turn charges some of them"
    finally:
        core.do("reset role", "drop owned by expiry", "drop role expiry")
    assert by_state(holds) == {"expired": 370, "held": 30}
    assert {int(key) for key in dead(core)} <= set(ids[:30])
    assert set(dead(core).values()) == {("ProgrammingError", "42501", None)}


@pytest.mark.parametrize("way", ["sweep", "expire"])
def test_an_environment_that_fails_every_hold_is_given_up_soon(committed, core, holds, way):
    """Five holds alone, then ever fewer of the rest: that is not hundreds of tries; nobody is charged."""
    ids = holds.due(500)
    spoil(core, ids)
    core.do("create sequence tries", *trigger("perform nextval('public.tries'); raise sqlstate '53100';"))
    core.register(batch=500)
    with pytest.raises(psycopg.errors.DiskFull):
        run(core, way)
    assert core.value("select last_value from tries") <= 1 + 9 + 5 + 9
    assert core.value("select count(*) from pgreaper.failures") == 0


SHOPS = (
    "create table shops (id text primary key, n int default 0)",
    "insert into shops values ('a'), ('b')",
    """create function tally() returns trigger language plpgsql as $$ begin
       update public.shops set n = n + 1 where id = case when new.customer_email = 'a' then 'a' else 'b' end;
       return new; end $$""",
    "create trigger tally before update on holds for each row execute function tally()",
)


@pytest.mark.parametrize("way", ["sweep", "expire"])
@pytest.mark.parametrize("share", ["alternately", "first", "one"])
def test_a_row_that_a_trigger_wants_and_somebody_has_delays_only_its_own(committed, core, holds, connect, share, way):
    """Shop a is locked for long: all of shop b expires in the same call, for the price of a few waits."""
    ids = holds.due(500)
    of_a = {"alternately": ids[::2], "first": ids[:100], "one": ids[:1]}[share]
    core.do(*SHOPS)
    core.connection.execute("update holds set customer_email = 'a' where id = any (%s)", (of_a,))
    core.register(batch=500)
    other = connect()
    with other.transaction():
        other.execute("update shops set n = 0 where id = 'a'")
        core.do("set statement_timeout = '10s'")  # waiting 200 ms for each would take 20 to 50
        run(core, way)
        states = holds.states()
        assert {id_ for id_ in ids if states[id_] == "held"} == set(of_a)
        assert core.value("select count(*) from pgreaper.failures") == 0
    for _ in range(3):
        run(core, "sweep")
    assert by_state(holds) == {"expired": 500}


def test_a_sweep_reads_past_holds_that_share_a_deadline_and_a_lock(committed, core, holds, connect):
    """A whole batch of them with one deadline is no wall: what is due later expires in the same run."""
    head = holds.due(30, overdue="2 hours")
    core.do(*SHOPS, "update holds set expires_at = date_trunc('day', now()) - interval '1 day', customer_email = 'a'")
    holds.due(30)
    core.register(batch=10)
    other = connect()
    with other.transaction():
        other.execute("update shops set n = 0 where id = 'a'")
        assert core.value("call pgreaper.reaper_sweep()") == 30
        states = holds.states()
        assert {id_ for id_ in states if states[id_] == "held"} == set(head)
    assert core.value("call pgreaper.reaper_sweep()") == 30


CANCELS = {
    "raise": "raise exception 'canceling statement due to user request' using errcode = '57014';",
    "raise in a function": "perform public.stop();",
    "another server": "perform public.dblink_exec("
    "'dbname=' || current_database() || ' port=' || current_setting('port') || ' host=' ||"
    " split_part(current_setting('unix_socket_directories'), ',', 1) ||"
    " ' options=-cstatement_timeout=1 user=' || current_user,"
    " 'do $x$ begin perform pg_catalog.pg_sleep(5); end $x$');",
}


@pytest.mark.parametrize("way", ["sweep", "expire"])
@pytest.mark.parametrize("kind", CANCELS)
def test_a_cancel_that_a_trigger_raises_is_its_holds_failure(committed, core, holds, kind, way):
    """57014 by RAISE or from another server: nobody canceled us.  Transient, and the others expire."""
    if kind == "another server":
        if not core.value("select exists (select from pg_available_extensions where name = 'dblink')"):
            pytest.skip("this server has no dblink: apt-get install postgresql-contrib")
        core.do("create extension dblink")
    core.do("create function stop() returns void language plpgsql as $$ begin raise sqlstate '57014'; end $$")
    ids = holds.due(20)
    spoil(core, [ids[0], ids[9]])
    core.do(*trigger(CANCELS[kind]))
    core.register()
    run(core, way)
    assert by_state(holds) == {"expired": 18, "held": 2}
    assert core.rows("select key, attempts, sqlstate, error_class from pgreaper.retries order by key::int") == [
        (str(ids[0]), 1, "57014", "DatabaseError"), (str(ids[9]), 1, "57014", "DatabaseError"),
    ]  # fmt: skip


def test_a_raised_cancel_stops_no_other_policy(committed, core, holds):
    """The sweep goes on with the others."""
    spoil(core, holds.due(1))
    core.do(*raising("57014"), "create table fine (like holds including all)")
    core.do("insert into fine (expires_at) select now() - interval '1 hour' from generate_series(1, 20)")
    core.register("a")
    core.register("b", target="fine")
    core.value("call pgreaper.reaper_sweep()")
    assert core.column("select distinct status from fine") == ["expired"]

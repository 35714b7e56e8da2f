"""_close_moot: a dead letter whose hold has nothing left to do is closed by what runs anyway."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.contract.conftest import NO_HANG

AT_THE_GATE = "select from pg_stat_activity where query like '%_close_moot%' and wait_event = 'PgSleep'"
MOOT = "select key, deadline, state, attempts, worker, actor from pgreaper.history where outcome = 'moot' order by key"


def bury(core, ids):
    """Make dead letters of these holds, which have failed once."""
    core.connection.execute(
        "insert into pgreaper.failures"
        " (policy_id, key, deadline, attempts, first_seen_at, failed_at, not_before, error_class)"
        " select p.policy_id, h.id::text, h.expires_at, 1, p.registered_at, p.registered_at, 'infinity', 'Refused'"
        "   from holds as h, pgreaper.policies as p where h.id = any(%s)",
        (ids,),
    )


@pytest.fixture
def dead(core, holds):
    """A function that makes n dead letters and returns their ids."""

    def dead(n):
        ids = holds.due(n)
        core.register()
        bury(core, ids)
        return ids

    return dead


def counted(core):
    """What status, metrics and the list say, and whether there is an oldest dead letter."""
    return core.rows(
        "select s.dead, m.dead, (select count(*)::int from pgreaper.dead_letters), m.oldest_dead_letter_seconds > 0"
        "  from pgreaper.status as s join pgreaper.metrics as m using (policy)"
    )[0]


def test_a_claim_that_finds_nothing_closes_what_moved_on(core, dead):
    """Consumed, deleted, extended, expired otherwise: neither listed nor counted, but recorded; the rest stays."""
    ids = dead(5)
    core.connection.execute("update holds set status = 'consumed' where id = %s", (ids[0],))
    core.connection.execute("delete from holds where id = %s", (ids[1],))
    core.connection.execute("update holds set expires_at = now() + interval '1 day' where id = %s", (ids[2],))
    core.connection.execute("update holds set status = 'expired' where id = %s", (ids[3],))
    was = dict(core.rows("select key, deadline from pgreaper.failures"))
    before = core.rows("select ctid::text, xmax::text, * from holds order by id")
    assert counted(core) == (5, 5, 5, True)
    assert core.claim(worker="w") == []
    assert counted(core) == (1, 1, 1, True)
    assert core.rows(MOOT) == [
        (str(key), was[str(key)], state, 1, "w", None)
        for key, state in zip(ids[:4], ["consumed", None, "held", "expired"], strict=True)
    ]
    assert core.rows("select ctid::text, xmax::text, * from holds order by id") == before
    core.connection.execute("update holds set status = 'consumed' where id = %s", (ids[4],))
    core.claim()
    assert counted(core) == (0, 0, 0, False)


def test_one_that_was_held_again_begins_anew(core, dead):
    """Closed, and then back with the old deadline: it is due as if it had never failed."""
    [hold] = dead(1)
    core.do("update holds set status = 'cancelled'")
    core.claim()
    core.do("update holds set status = 'held'")
    [claimed] = core.claim(rescan=True)
    assert (claimed.key, claimed.attempt) == (str(hold), 1)


def test_nothing_to_close_writes_nothing(core, dead, committed):
    """Invariant 13: dead letters that still are dead cost a look and no write, however it is asked."""
    dead(3)
    core.call("reaper_discard", policy="p", key="2", reason="x")
    with core.connection.transaction():
        assert core.claim() == core.claim(rescan=True) == []
        core.rows("select * from pgreaper._agenda(rescan => '{p}')")
        assert core.changed_nothing()
    assert counted(core)[0] == 2


def test_a_discarded_one_goes_too(core, dead):
    """It would be looked at for ever, and excluded for ever from what comes with the same deadline."""
    [hold] = dead(1)
    core.call("reaper_discard", policy="p", key=str(hold), reason="x")
    core.do("delete from holds")
    core.claim()
    assert core.rows("select * from pgreaper.failures") == []
    assert core.column("select outcome from pgreaper.history where key is not null order by at, outcome") == [
        "discard",
        "moot",
    ]


def test_a_policy_that_always_has_work_closes_them_with_a_rescan(core, holds, dead):
    """Only an ordinary claim leaves that to later."""
    ids = dead(1)
    holds.due(9)
    core.connection.execute("delete from holds where id = %s", (ids[0],))
    assert len(core.claim(batch=2)) == 2
    assert core.rows(MOOT) == []
    assert len(core.claim(batch=2, rescan=True)) == 2
    assert len(core.rows(MOOT)) == 1


def test_a_sweep_closes_them(core, dead, committed):
    """Where pg_cron does the work, also in a run that expires nothing."""
    ids = dead(2)
    core.connection.execute("delete from holds where id = %s", (ids[0],))
    core.do("set application_name = 'pg_cron'", "call pgreaper.reaper_sweep()")
    assert [(key, worker) for key, _, _, _, worker, _ in core.rows(MOOT)] == [(str(ids[0]), "pg_cron")]
    assert core.status()["dead"] == 1


def test_an_idle_daemon_is_told_that_there_is_something_to_close(core, dead):
    """A rescan says so, once: what is closed is no work any more, and neither is what stays dead."""
    ids = dead(2)
    agenda = "select wait from pgreaper._agenda(rescan => %s::text[])"
    assert core.value(agenda, ["p"]) is None
    core.connection.execute("update holds set status = 'consumed' where id = %s", (ids[0],))
    assert core.value(agenda, []) is None, "only a rescan looks"
    assert core.value(agenda, ["p"]) == 0
    core.claim(rescan=True)
    assert core.value(agenda, ["p"]) is None


def test_one_that_somebody_has_is_left_and_not_waited_for(core, dead, committed):
    """Somebody replays it, and has not committed: the claim closes the others at once."""
    ids = dead(2)
    core.do("update holds set status = 'consumed'", "set lock_timeout = '1s'")
    other = committed(autocommit=False)
    other.execute(NO_HANG)
    other.execute("select from pgreaper.failures where key = %s for update", (str(ids[0]),))
    core.claim()
    assert core.column("select key from pgreaper.failures") == [str(ids[0])]
    other.rollback()
    core.claim()
    assert core.rows("select * from pgreaper.failures") == []


def test_a_hold_that_is_due_with_another_deadline_is_another_incarnation(core, dead):
    """What failed is over, what is due now is claimed like any other."""
    [hold] = dead(1)
    core.do("update holds set expires_at = expires_at + interval '1 minute'")
    [claimed] = core.claim(rescan=True)
    assert (claimed.key, claimed.attempt) == (str(hold), 1)
    assert core.column("select key from pgreaper.history where outcome = 'moot'") == [str(hold)]


def test_who_charges_a_later_incarnation_meanwhile_keeps_what_it_wrote(core, holds, committed):
    """Between the look at the hold and the closing its failure becomes one of another deadline: that one stays."""
    [hold] = holds.due(1)
    core.do(
        # Not a wait for a lock: lock_timeout would end it.
        "create function gate() returns boolean language plpgsql volatile as $$ begin"
        " while not pg_try_advisory_xact_lock_shared(1) loop perform pg_sleep(0.002); end loop; return true; end $$",
        "create view gated as select id, status, expires_at from holds where gate()",
    )
    core.register(target="gated", key_columns=["id"])
    bury(core, [hold])
    core.do("update holds set expires_at = expires_at + interval '1 minute'")
    gatekeeper = committed()
    gatekeeper.execute("select pg_advisory_lock(1)")
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(core.do, "select pgreaper._close_moot(p, 'w', 'public') from pgreaper.policies as p")
        end = time.monotonic() + 10
        while gatekeeper.execute(AT_THE_GATE).fetchone() is None:
            assert time.monotonic() < end
        gatekeeper.execute("update pgreaper.failures set deadline = (select expires_at from holds)")
        gatekeeper.execute("select pg_advisory_unlock(1)")
        closing.result()
    assert core.column("select key from pgreaper.failures") == [str(hold)]
    assert core.rows(MOOT) == []


def test_a_bounded_number_at_a_time_and_all_of_them_in_the_end(core, dead, committed):
    """Many at once: a look sees no more than 1000, in a stretch of the table; in the end none is left."""
    dead(3000)
    core.do("analyze pgreaper.failures", "delete from holds")
    scans = "select coalesce(seq_scan, 0) from pg_stat_xact_user_tables where relname = 'failures'"
    with core.connection.transaction():
        before = core.value(scans)
        looked = core.value(
            "select cardinality(m.keys) from pgreaper.policies as p,"
            " lateral pgreaper._moot(p, pgreaper._target(p), clock_timestamp()) as m"
        )
        assert (0 < looked <= 1000, core.value(scans)) == (True, before)
    core.do("select pgreaper._close_moot(p, 'w', 'public') from pgreaper.policies as p")
    assert 2000 <= core.value("select count(*) from pgreaper.failures") < 3000
    calls = 0
    while core.value("select exists (select from pgreaper.failures)"):
        core.claim()
        calls += 1
        assert calls < 30
    assert core.value("select count(distinct key) from pgreaper.events where kind = 'moot'") == 3000


def test_who_has_nothing_else_to_do_looks_again_where_most_was_moot(core, holds, dead, committed):
    """An event is called off, a thousand dead letters with it: an idle claim closes more than one look sees."""
    dead(2500)
    # Where it looks is random; two looks at one place would see what one sees.
    core.do("delete from holds", "select setseed(0.3)")
    core.claim()
    assert core.value("select count(*) from pgreaper.events where kind = 'moot'") > 1000


def test_a_claim_that_has_work_looks_once(core, holds, dead, committed):
    """It has the cursor meanwhile."""
    dead(2500)
    core.do("delete from holds")
    holds.due(1)
    assert len(core.claim(rescan=True)) == 1
    assert 0 < core.value("select count(*) from pgreaper.events where kind = 'moot'") <= 1000

"""reaper_claim: what is leased, in which order, and what a claim leaves alone."""

from __future__ import annotations

from datetime import timedelta

import pytest

RAISING = """
create function refuse() returns trigger language plpgsql as $$
begin
  if old.id = any (tg_argv[0]::bigint[]) then raise exception 'no'; end if;
  return new;
end $$;
create trigger refuse before update on holds for each row execute function refuse('{%s}');
"""


def keys(batch):
    return [hold.key for hold in batch]


def test_the_oldest_come_first_and_never_more_than_asked_for(core, holds):
    """Promise of _due: oldest deadline first, at most `wanted` holds."""
    first, second, third = holds.due(3)
    older = holds.due(1, overdue="2 days")[0]
    core.register(batch=3)
    assert keys(core.claim(batch=1)) == [str(older)]
    assert keys(core.claim(batch=2)) == [str(first), str(second)]
    assert keys(core.claim()) == [str(third)]
    assert core.claim() == []


def test_the_batch_of_the_policy_counts_when_the_call_says_none(core, holds):
    holds.due(5)
    core.register(batch=2)
    assert [len(core.claim()) for _ in range(4)] == [2, 2, 1, 0]


def test_a_row_tells_token_key_deadline_attempt_and_end_of_the_lease(core, holds, set_clock):
    """One token a batch; the lease ends `lease` after the claim by the database clock."""
    holds.due(2)
    core.register(lease="90 seconds")
    core.do("set local timezone = 'UTC'")
    set_clock("2040-01-01 12:00:00Z")
    batch = core.claim(worker="w1")
    assert len({hold.token for hold in batch}) == 1
    assert [hold.deadline for hold in batch] == core.column("select expires_at::text from holds order by id")
    assert {(hold.attempt, hold.claim_until, hold.payload) for hold in batch} == {
        (1, "2040-01-01T12:01:30+00:00", None)
    }
    assert core.rows("select policy, token::text, worker, holds, attempt, lapsed from pgreaper.leases") == [
        ("p", batch[0].token, "w1", 2, 1, False)
    ]


def test_consecutive_claims_share_no_hold(core, holds):
    """Promise: no hold is in two active claims, however the rescan reads."""
    holds.due(30)
    core.register()
    got = keys(core.claim(batch=7)) + keys(core.claim(batch=7, rescan=True)) + keys(core.claim(batch=7))
    got += keys(core.claim(batch=100, rescan=True))
    assert sorted(map(int, got)) == list(range(1, 31))


def test_ties_on_the_deadline_are_claimed_once_each(core, holds):
    """Everything expires at midnight: a page full of leased ties does not end the search."""
    core.do("insert into holds (expires_at) select now() - interval '1 hour' from generate_series(1, 100)")
    core.register()
    got = [key for _ in range(12) for key in keys(core.claim(batch=9))]
    assert sorted(map(int, got)) == list(range(1, 101))
    assert core.claim() == []


def test_the_claim_goes_on_behind_the_last_one(core, holds):
    """The cursor: what lies before it is left to a rescan."""
    holds.due(1)
    core.register()
    assert keys(core.claim()) == ["1"]
    late = holds.due(1, overdue="2 hours")[0]
    assert core.claim() == []
    assert keys(core.claim(rescan=True)) == [str(late)]


def test_nothing_of_the_target_is_locked_or_written(committed, core, holds):
    """Promise: no row lock, no row version, and only the lightest lock on the table."""
    holds.due(3)
    core.register()
    before = core.rows("select xmin::text, xmax::text, ctid::text from holds")
    with core.connection.transaction():
        assert len(core.claim()) == 3
        modes = core.column(
            "select distinct mode from pg_locks where pid = pg_backend_pid()"
            " and relation in (select oid from pg_class where relname like 'holds%%')"
        )
    assert modes == ["AccessShareLock"]
    assert core.rows("select xmin::text, xmax::text, ctid::text from holds") == before
    assert {row[1] for row in before} == {"0"}


@pytest.mark.parametrize("arguments", [{}, {"rescan": True}])
def test_a_pass_that_finds_nothing_writes_nothing(committed, core, holds, arguments):
    """Promise: no transaction id, no WAL."""
    holds.ahead(10)
    core.register()
    with core.connection.transaction():
        assert core.claim(**arguments) == []
        assert core.changed_nothing()
    with core.connection.transaction():
        core.do("update holds set status = status where false", "delete from holds where false")
        core.value("select pg_current_xact_id()")
        assert not core.changed_nothing(), "the probe cannot fail"


def test_a_pass_that_finds_nothing_writes_no_wal(committed, core, holds, wal_written):
    """Promise: idle is free."""
    holds.ahead(10)
    core.register()
    core.claim()
    assert wal_written(lambda: core.claim(rescan=True)) == 0
    assert wal_written(core.claim) == 0
    assert wal_written(lambda: holds.ahead(1)) > 0, "the measure cannot fail"


def test_c040_the_lease_counts_from_the_clock_and_not_from_the_transaction(committed, core, holds):
    """In an old transaction now() stands still: a hold would be due late, and its lease would lapse early."""
    core.register(lease="1 minute")
    with core.connection.transaction():
        core.value("select now()")
        holds.connection.execute("insert into holds (expires_at) values (clock_timestamp())")
        assert core.value("select expires_at > now() from holds")
        assert keys(core.claim()) == ["1"]
        assert core.value("select claim_until - interval '1 minute' > expires_at from pgreaper.leases, holds")


def test_payload_is_what_was_registered(core, holds):
    """No column by default; the registered ones as JSON, NULL among them."""
    holds.due(2)
    core.do("update holds set customer_email = null where id = 2")
    core.register(payload_columns=["customer_email", "status"])
    assert [hold.payload for hold in core.claim()] == [
        {"customer_email": "u1@example.com", "status": "held"},
        {"customer_email": None, "status": "held"},
    ]


def test_a_hold_that_is_not_held_or_not_due_is_not_claimed(core, holds):
    holds.due(4)
    holds.ahead(1)
    core.do(
        "update holds set status = 'consumed' where id = 1",
        "update holds set status = 'expired' where id = 2",
        "update holds set status = 'Held' where id = 3",
    )
    core.register()
    assert keys(core.claim()) == ["4"]


def test_grace_counts(core, holds, set_clock):
    """Due when deadline + grace has passed, to the microsecond."""
    core.do("insert into holds (expires_at) values ('2030-01-01 00:00Z')")
    core.register(grace="1 day 00:00:10")
    set_clock("2030-01-02 00:00:09.999999Z")
    assert core.claim() == []
    set_clock("2030-01-02 00:00:10Z")
    assert keys(core.claim()) == ["1"]


def test_a_paused_policy_is_left_alone(core, holds):
    holds.due(1)
    core.register()
    core.call("reaper_pause", policy="p")
    assert core.claim() == []
    assert core.value("select count(*) from pgreaper.claims") == 0
    core.call("reaper_resume", policy="p")
    assert keys(core.claim()) == ["1"]


def test_a_lapsed_lease_is_taken_back_and_its_attempt_counted(core, holds, set_clock):
    """Recovery is part of claiming; a worker that died has used up an attempt."""
    holds.due(2)
    core.register(lease="1 minute")
    lost = core.claim(worker="gone")[0].token
    core.do("update holds set status = 'consumed' where id = 2")
    set_clock(timedelta(seconds=59))
    assert core.claim(rescan=True) == []
    set_clock(timedelta(seconds=61))
    assert core.claim(rescan=True) == [], "the retry has to wait"
    assert core.rows("select key, attempts, error_class from pgreaper.failures") == [("1", 1, "LeaseExpired")]
    assert core.rows("select ending, keys from pgreaper.claims where token::text = %s", lost) == [("taken-back", None)]
    assert core.rows(
        "select kind, key, worker, attempts from pgreaper.events where token::text = %s order by event_id", lost
    ) == [("taken-back", None, "gone", 1), ("retry", "1", "gone", 1)]
    set_clock(timedelta(seconds=70))
    again = core.claim()
    assert [(hold.key, hold.attempt) for hold in again] == [("1", 2)]
    assert again[0].token != lost


def test_a_lapsed_lease_is_a_dead_letter_when_the_budget_is_spent(core, holds, set_clock):
    """Nothing is lost, and nothing is tried for ever."""
    holds.due(1)
    core.register(lease="1 minute", max_attempts=3)
    for turn in range(3):
        set_clock(timedelta(hours=2 * turn))
        assert [(hold.key, hold.attempt) for hold in core.claim(rescan=True)] == [("1", turn + 1)]
        set_clock(timedelta(hours=2 * turn + 1))
        assert core.claim(rescan=True) == []
    assert core.rows("select attempts, not_before = 'infinity' from pgreaper.failures") == [(3, True)]
    assert core.column("select kind from pgreaper.events where key is not null order by event_id") == [
        "retry", "retry", "dead-letter",
    ]  # fmt: skip
    set_clock(timedelta(days=400))
    assert core.claim(rescan=True) == []


def test_an_extended_hold_that_failed_starts_anew(core, holds, set_clock):
    """A failure of an earlier incarnation is ignored: another deadline is another hold."""
    holds.due(1)
    core.register(max_attempts=1)
    core.claim()
    set_clock(timedelta(minutes=2))
    assert core.claim(rescan=True) == []
    assert core.preview()["dead"] == 1
    core.do("update holds set expires_at = expires_at + interval '30 minutes'")
    assert [(hold.key, hold.attempt) for hold in core.claim(rescan=True)] == [("1", 1)]


def test_retries_go_before_fresh_holds_but_not_twice_in_a_row(core, holds, set_clock):
    """Promise: retries whose time has come, unless the last claim took some, else fresh holds."""
    holds.due(20)
    core.register(lease="1 minute")
    core.claim(batch=10)
    set_clock(timedelta(seconds=61))
    fresh = core.claim(batch=1)  # takes the lapsed lease back; no retry is due yet
    assert [(hold.key, hold.attempt) for hold in fresh] == [("11", 1)]
    set_clock(timedelta(seconds=70))
    turns = [core.claim(batch=8) for _ in range(6)]
    assert [turn[0].attempt for turn in turns] == [2, 1, 2, 1, 2, 2]
    assert [len(turn) for turn in turns] == [1, 8, 1, 1, 1, 1], "batches of retries are an eighth"


def test_batches_of_retries_shrink_until_the_guilty_stands_alone(core, holds, set_clock):
    """÷8 with each attempt, down to one, so that innocents do not die with the guilty."""
    holds.due(640)
    core.register(lease="1 minute", batch=640, max_attempts=9)
    sizes = []
    for turn in range(1, 6):
        batch = core.claim(rescan=True)
        assert {hold.attempt for hold in batch} == {turn}
        sizes.append(len(batch))
        core.do(
            "delete from pgreaper.failures where key not in (select unnest(keys) from"
            " pgreaper.claims where keys is not null)"
        )
        core.do(
            "update holds set status = 'consumed' where id::text not in (select unnest(keys) from"
            " pgreaper.claims where keys is not null)"
        )
        set_clock(timedelta(hours=2 * turn - 1))
        core.claim(rescan=True)
        set_clock(timedelta(hours=2 * turn))
    assert sizes == [640, 80, 10, 1, 1]


def test_a_failure_whose_hold_moved_on_is_closed(core, holds, set_clock):
    """Consumed, extended or deleted meanwhile: nothing to retry, and nothing left in the books of failures."""
    holds.due(4)
    core.register(lease="1 minute")
    core.claim()
    set_clock(timedelta(minutes=2))
    core.claim()
    assert core.value("select count(*) from pgreaper.failures") == 4
    core.do(
        "update holds set status = 'consumed' where id = 1",
        "update holds set expires_at = now() + interval '1 day' where id = 2",
        "delete from holds where id = 3",
    )
    set_clock(timedelta(minutes=3))
    got = [key for _ in range(4) for key in keys(core.claim())]
    assert got == ["4"]
    assert core.column("select key from pgreaper.failures") == ["4"]


def test_max_claims_bounds_the_leases(core, holds):
    holds.due(5)
    core.register(max_claims=2)
    first, second = core.claim(batch=1), core.claim(batch=1)
    assert core.claim(batch=1) == []
    core.expire(first[0].token)
    third = core.claim(batch=1)
    assert [keys(batch) for batch in (first, second, third)] == [["1"], ["2"], ["3"]]


def test_the_rate_limit_bounds_the_holds(core, holds, set_clock):
    """A bucket of one second's worth; half a second refills half."""
    holds.due(50)
    core.register(rate_limit=10)
    set_clock("2040-01-01 00:00:00Z")
    assert len(core.claim()) == 10
    assert core.claim() == []
    set_clock("2040-01-01 00:00:00.5Z")
    assert len(core.claim()) == 5
    set_clock("2040-01-01 00:10:00Z")
    core.do("update pgreaper.claims set claim_until = 'infinity'")
    assert len(core.claim()) == 10


def test_the_rate_limit_lets_whole_portions_go(core, holds, set_clock):
    """A portion is a batch or what comes in within half a second: many who ask do not share out less."""
    holds.due(430)
    core.register(rate_limit=100, batch=500)
    set_clock("2040-01-01 00:00:00Z")
    assert [len(core.claim()) for _ in range(2)] == [100, 0]
    set_clock("2040-01-01 00:00:00.49Z")
    assert core.claim() == []
    assert len(core.claim(batch=7)) == 7
    set_clock("2040-01-01 00:00:00.60Z")
    assert len(core.claim()) == 53
    core.register(rate_limit=100, batch=30)
    set_clock("2040-01-01 00:00:00.89Z")
    assert core.claim() == []
    set_clock("2040-01-01 00:00:00.90Z")
    assert len(core.claim()) == 30


def test_fewer_holds_than_a_portion_go_at_once(core, holds, set_clock):
    """Two are due and two may go: they do not wait for a portion that nobody needs."""
    holds.due(101)
    core.register(rate_limit=100)
    set_clock("2040-01-01 00:00:00Z")
    assert len(core.claim()) == 100
    core.do("insert into holds (expires_at) values ('2039-12-31Z')")
    assert core.claim() == []
    set_clock("2040-01-01 00:00:00.02Z")
    assert core.rows("select wait, limited from pgreaper._agenda()") == [(0, False)]
    assert len(core.claim()) == 2


def test_a_rate_limit_that_sweeps_have_overdrawn_is_waited_for(core, holds, set_clock):
    """Two sweeps that met spend the same second's worth: nobody fails, and the debt is paid before more is let go."""
    holds.due(50)
    core.register(rate_limit=10)
    set_clock("2040-01-01 00:00:00Z")
    core.do("update pgreaper.cursors set rate_tokens = 10, rate_at = pgreaper._clock()")
    for _ in range(2):
        core.value("select pgreaper._spend(p, pgreaper._clock(), 10) from pgreaper.policies as p")
    assert core.claim() == []
    step = "select (pgreaper._sweep_step('p', 10, 10, 'sweep', pgreaper._clock(), null::timestamptz)).taken"
    assert core.value(step) == 0
    set_clock("2040-01-01 00:00:01.5Z")
    assert len(core.claim()) == 5


def test_what_has_come_in_is_counted_once(core, holds, set_clock):
    """A step that took its time earlier ends later: it does not put back when the limit was counted."""
    holds.due(50)
    core.register(rate_limit=10)
    set_clock("2040-01-01 00:00:03Z")
    assert len(core.claim()) == 10
    core.value("select pgreaper._spend(p, '2040-01-01 00:00:00Z', 5) from pgreaper.policies as p")
    assert core.rows("select rate_tokens, rate_at = '2040-01-01 00:00:03Z' from pgreaper.cursors") == [(-5, True)]
    set_clock("2040-01-01 00:00:02Z")
    assert core.claim() == []
    set_clock("2040-01-01 00:00:04Z")
    assert len(core.claim()) == 5


def test_a_clock_that_was_put_back_does_not_stop_a_limited_policy(core, holds, set_clock):
    holds.due(50)
    core.register(rate_limit=10)
    set_clock("2040-01-01 01:00:00Z")
    assert len(core.claim()) == 10
    set_clock("2040-01-01 00:00:00Z")
    assert len(core.claim()) == 10
    assert core.claim() == []
    set_clock("2040-01-01 00:00:01Z")
    assert len(core.claim()) == 10


def test_a_session_bound_claim_remembers_its_backend(core, holds):
    """Only when asked: behind a pooler the backend says nothing."""
    holds.due(2)
    core.register()
    core.claim(batch=1)
    core.claim(batch=1, session=True)
    assert core.rows(
        "select session_pid = pg_backend_pid(), session_start = (select backend_start from pg_stat_activity"
        " where pid = pg_backend_pid()) from pgreaper.claims order by first_deadline"
    ) == [(None, None), (True, True)]


def test_a_policy_that_is_not_there_is_named(core, holds):
    """Raises RP002, for a withdrawn one too, and with a hint."""
    core.register()
    core.call("reaper_unregister", policy="p")
    for name, shown in (("p", "p"), ("No such", '"No such"'), (None, "NULL")):
        error = core.refused("select pgreaper.reaper_claim(%s)", name)
        assert (error.sqlstate, error.diag.message_primary) == ("RP002", f"there is no policy {shown}")
        assert error.diag.message_hint.startswith("pgreaper.policies lists the registered ones")


@pytest.mark.parametrize("batch", [0, -1, 10001])
def test_a_batch_that_makes_no_sense(core, holds, batch):
    """Raises 22023."""
    core.register()
    error = core.refused("select pgreaper.reaper_claim('p', %s)", batch)
    assert (error.sqlstate, error.diag.message_primary) == ("22023", f"batch must be between 1 and 10000, not {batch}")
    assert error.diag.message_hint == "Repeat the call for more; 500 to 1000 is a good size."


@pytest.mark.parametrize("mode", ["isolation level repeatable read", "isolation level serializable", "read only"])
def test_where_the_guard_cannot_hold(committed, core, holds, mode):
    """Raises RP004: an old snapshot would judge the rows."""
    holds.due(1)
    core.register()
    with core.connection.transaction(force_rollback=True):
        core.do(f"set transaction {mode}")
        assert core.refused("select pgreaper.reaper_claim('p')").sqlstate == "RP004"


def test_a_table_that_stays_locked(committed, core, holds):
    """Raises 55P03: nothing happened; the reaper gives way long before the deadlock timeout."""
    holds.due(1)
    core.register()
    other = committed(autocommit=False)
    other.execute("lock table holds in access exclusive mode")
    assert core.refused("select pgreaper.reaper_claim('p')").sqlstate == "55P03"
    other.rollback()
    other.execute("select from pgreaper.cursors for update")
    assert core.refused("select pgreaper.reaper_claim('p')").sqlstate == "55P03"
    other.rollback()
    assert core.value("select count(*) from pgreaper.claims") == 0
    assert keys(core.claim()) == ["1"]


def test_a_table_that_is_gone_and_comes_back(core, holds):
    """Raises 42P01 that names the policy; a table of that name serves again."""
    holds.due(1)
    core.register()
    core.do("alter table holds rename to away")
    error = core.refused("select pgreaper.reaper_claim('p')")
    assert error.sqlstate == "42P01"
    assert error.diag.message_primary == "public.holds, the target of policy p, does not exist"
    assert error.diag.message_hint.startswith("Bring it back under that name")
    core.do("alter table away rename to holds", "alter table holds rename column status to state")
    error = core.refused("select pgreaper.reaper_claim('p')")
    assert error.sqlstate == "42703"
    assert error.diag.message_primary == "column status of public.holds, used by policy p, does not exist"
    core.do("alter table holds rename column state to status")
    assert keys(core.claim()) == ["1"]


def test_a_set_column_that_is_gone_is_named(core, holds):
    """The columns that `set` writes and those of the payload are needed as much as the others."""
    holds.due(1)
    core.do("alter table holds add token text, add note text")
    core.register(set='{"token": null}', payload_columns=["note"])
    core.do("alter table holds drop column note")
    assert "column note of public.holds, used by policy p" in str(core.refused("select pgreaper.reaper_claim('p')"))
    core.do("alter table holds add note text", "alter table holds drop column token")
    assert "column token of public.holds, used by policy p" in str(core.refused("select pgreaper.reaper_claim('p')"))

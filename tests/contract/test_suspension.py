"""A policy whose holds all fail alike rests, and its holds are innocent (docs/decisions/0005)."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import psycopg
import pytest

RAISE = "raise exception 'broken';"
# What breaks the policy, how it is mended, and what status says.
BREAKAGES = {
    "check": (
        "alter table holds add constraint known check (status <> 'expired') not valid",
        "alter table holds drop constraint known",
        "every hold fails alike: ConstraintViolation (SQLSTATE 23514)",
    ),
    "trigger": (RAISE, "drop trigger broken on holds", "every hold fails alike: TriggerException (SQLSTATE P0001)"),
    "assert": (
        "assert false;",
        "drop trigger broken on holds",
        "every hold fails alike: DatabaseError (SQLSTATE P0004)",
    ),
    "veto": ("return null;", "drop trigger broken on holds", "every hold fails alike: UpdateVetoed"),
}


def break_(core, how: str = "trigger") -> None:
    statement = BREAKAGES[how][0] if how in BREAKAGES else how
    if not statement.startswith("alter"):
        core.do(
            f"create or replace function broken() returns trigger language plpgsql as"
            f" $$ begin {statement} return new; end $$"
        )
        statement = "create trigger broken before update on holds for each row execute function broken()"
    core.do(statement)


def poison(core, ids: list[int], body: str = RAISE) -> None:
    core.connection.execute("update holds set customer_email = 'poison' where id = any (%s)", (ids,))
    break_(core, f"if new.customer_email = 'poison' then {body} end if;")


def turn(core, batch: int | None = None) -> dict[str, str]:
    """One claim + expire; outcomes by key."""
    claim = core.claim(batch=batch, rescan=True)
    if not claim:
        return {}
    return {key: outcome for key, (outcome, _) in core.expire(claim[0].token).items()}


def sweep_fails(core, batch: int | None = None) -> str:
    """Sweep, which must end with an error; what it says."""
    with pytest.raises(psycopg.errors.RaiseException) as caught:
        core.value("call pgreaper.reaper_sweep(batch => %s)", batch)
    return str(caught.value)


def charged(core) -> int:
    count = core.value("select count(*) from pgreaper.failures")
    assert isinstance(count, int)
    return count


class Clock:
    """The database clock by hand: it runs on from where it was set."""

    def __init__(self, set_clock) -> None:
        self.set_clock = set_clock
        self.ahead = timedelta(0)

    def pass_(self, **time: float) -> None:
        self.ahead += timedelta(**time)
        self.set_clock(self.ahead)


@pytest.fixture
def clock(set_clock):
    return Clock(set_clock)


def rests(core, clock) -> float:
    """For how many seconds the policy rests from now."""
    rest = core.value("select extract(epoch from suspended_until - pgreaper._clock())::float8 from pgreaper.cursors")
    assert isinstance(rest, float)
    return rest


@pytest.mark.parametrize("how", BREAKAGES)
def test_c032_a_policy_that_is_broken_charges_nobody_says_why_and_heals_by_itself(core, holds, clock, how):
    """100 holds, every transition fails: no dead letter, `suspended` with the reason; mended, all expire."""
    ids = holds.due(100)
    core.register()
    break_(core, how)
    assert set(turn(core).values()) == {"retry"}
    status = core.status()
    assert (status["state"], status["reason"]) == ("suspended", BREAKAGES[how][2])
    assert (status["dead"], status["retrying"], charged(core)) == (0, 0, 0)
    assert core.column("select outcome from pgreaper.history where outcome = 'suspend'") == ["suspend"]
    assert core.claim(rescan=True) == [], "it rests"

    for _ in range(20):
        clock.pass_(minutes=7)
        outcomes = turn(core)
        assert 0 < len(outcomes) <= 8
        assert set(outcomes.values()) == {"retry"}
    assert charged(core) == 0
    assert core.value("select count(*) from pgreaper.history where outcome = 'suspend'") == 1, (
        "told once, not each time"
    )

    core.do(BREAKAGES[how][1])
    clock.pass_(minutes=7)
    core.run()
    assert {holds.states()[id_] for id_ in ids} == {"expired"}
    assert core.status()["state"] == "active"
    assert charged(core) == 0


@pytest.mark.parametrize("how", BREAKAGES)
def test_c032_a_sweep_raises_and_charges_nobody(committed, core, holds, clock, how):
    """So pg_cron's run is a failed one; the next run rests, and says so too; mended, all expire."""
    ids = holds.due(100)
    core.register()
    break_(core, how)
    assert "p (suspended: all its holds fail alike)" in sweep_fails(core)
    assert charged(core) == 0
    assert "suspended" in sweep_fails(core)
    core.do(BREAKAGES[how][1])
    assert "suspended" in sweep_fails(core), "it still rests"
    clock.pass_(minutes=7)
    assert core.value("call pgreaper.reaper_sweep()") == 100
    assert {holds.states()[id_] for id_ in ids} == {"expired"}


def test_the_rest_grows_to_a_cap(core, holds, clock):
    """From about a second to five minutes, each time longer than the last."""
    holds.due(30)
    core.register()
    break_(core)
    found = []
    for _ in range(12):
        assert turn(core)
        found.append(rests(core, clock))
        clock.pass_(seconds=found[-1] + 0.01)
    for n, rest in enumerate(found):
        plain = min(300, 2**n)
        assert plain * 0.9 - 0.5 < rest <= plain * 1.25
    assert found[-1] > 299
    assert charged(core) == 0


def test_the_rest_is_known_to_who_sleeps(core, holds, clock):
    """reaper_next_due() is the end of the rest, so a daemon sleeps until then and not in a loop."""
    holds.due(30)
    core.register()
    break_(core)
    turn(core)
    [(wait,)] = core.call("reaper_next_due", policy="p")
    assert timedelta(seconds=0.5) < wait <= timedelta(seconds=1.25)


def test_a_rest_writes_nothing(core, holds, clock):
    """While a policy rests, a pass is as free as an idle one."""
    holds.due(30)
    core.register()
    break_(core)
    turn(core)
    before = core.value("select pg_current_wal_insert_lsn()")
    row = core.rows("select xmin::text, * from pgreaper.cursors")
    assert core.claim(rescan=True) == []
    assert core.rows("select xmin::text, * from pgreaper.cursors") == row
    assert before is not None


def test_the_probe_comes_from_the_young_end(core, holds, clock):
    """What it is tried with are not the ones that failed: the fault may be theirs."""
    ids = holds.due(100)
    core.register(batch=20)
    break_(core)
    turn(core)
    clock.pass_(minutes=7)
    probe = core.claim(rescan=True)
    assert {int(hold.key) for hold in probe} == set(ids[-8:])
    assert core.claim(rescan=True) == [], "one probe at a time: the others wait for its answer"


def test_a_probe_whose_worker_dies_does_not_end_the_trying(core, holds, clock):
    """The next probe follows after seconds; the lease that lapsed is charged as any."""
    holds.due(100)
    core.register()
    break_(core)
    turn(core)
    clock.pass_(minutes=7)
    first = core.claim(rescan=True)
    clock.pass_(seconds=6)
    second = core.claim(rescan=True)
    assert second
    assert not {hold.key for hold in first} & {hold.key for hold in second}


@pytest.mark.parametrize("batch", [10, 50, 500])
@pytest.mark.parametrize("body", [RAISE, "return null;"])
def test_c009_fifty_poison_holds_at_the_head_do_not_stop_a_thousand_good_ones(core, holds, clock, batch, body):
    """They end as dead letters, exactly they; the good ones are expired within a few turns, not behind them."""
    bad = holds.due(50, overdue="3 hours")
    good = holds.due(1000, overdue="2 hours")
    core.register(batch=batch)
    poison(core, bad, body)
    turns = 0
    while core.value("select exists (select from holds where status = 'held' and customer_email <> 'poison')"):
        turns += 1
        assert turns < 1000 / batch + 30
        turn(core)
        clock.pass_(seconds=2)
    for _ in range(30):
        turn(core)
        clock.pass_(seconds=10)
    states = holds.states()
    assert {states[id_] for id_ in good} == {"expired"}
    assert {states[id_] for id_ in bad} == {"held"}
    assert sorted(int(key) for key in core.column("select key from pgreaper.dead_letters")) == bad
    assert core.status()["state"] == "active"


def test_c009_sweeps_get_there_too(committed, core, holds, clock):
    bad = holds.due(50, overdue="3 hours")
    holds.due(1000, overdue="2 hours")
    core.register(batch=50)
    poison(core, bad)
    for _ in range(20):
        with suppress(psycopg.errors.RaiseException):
            core.value("call pgreaper.reaper_sweep()")
        clock.pass_(seconds=10)
    assert sum(state == "expired" for state in holds.states().values()) == 1000
    assert sorted(int(key) for key in core.column("select key from pgreaper.dead_letters")) == bad


def test_c009_retries_wait_for_their_time_and_fresh_holds_do_not_wait_for_them(core, holds, clock):
    """Ten attempts and no backoff: no batch is made only of what failed before while others were never tried."""
    bad = holds.due(7, overdue="3 hours")
    good = holds.due(500, overdue="2 hours")
    core.register(batch=50, permanent_attempts=10, backoff_base="0", backoff_cap="0")
    poison(core, bad)
    never_tried = set(good)
    turns = 0
    while never_tried:
        turns += 1
        assert turns <= 24
        never_tried -= {int(key) for key in turn(core)}
    assert sum(state == "expired" for state in holds.states().values()) == 500


def test_a_trickle_of_single_failing_holds_is_recognised_too(core, holds, clock):
    """One hold at a time, each fails: after the eighth in a row nobody more is charged."""
    core.register(permanent_attempts=5, backoff_base="1 day", backoff_cap="1 day")
    break_(core)
    tried = 0
    while core.status()["state"] == "active":
        holds.due(1)
        turn(core)
        tried += 1
        assert tried <= 8
        clock.pass_(seconds=20)
    assert tried == 8
    assert charged(core) == 7
    assert core.value("select max(attempts) from pgreaper.failures") == 1


def test_a_trickle_with_successes_between_is_not_a_suspicion(core, holds, clock):
    """A success since the last failure says that the policy is sound."""
    core.register()
    poison(core, [])
    for _ in range(12):
        core.do("insert into holds (expires_at, customer_email) values (now() - interval '1 hour', 'poison')")
        turn(core)
        holds.due(1)
        turn(core)
        clock.pass_(seconds=20)
    assert core.status()["state"] == "active"
    assert charged(core) == 12


def test_seven_that_fail_alike_are_charged(core, holds):
    """Fewer than eight are no suspicion, alone or at the head of a batch of good ones."""
    ids = holds.due(7, overdue="2 hours")
    holds.due(20)
    core.register()
    poison(core, ids)
    outcomes = turn(core)
    assert sorted(outcomes.values()) == ["dead-letter"] * 7 + ["expired"] * 20
    assert core.status()["state"] == "active"


def test_holds_that_fail_in_different_ways_are_no_suspicion(core, holds):
    """The holds are bad then, each in its way."""
    holds.due(16)
    core.register()
    break_(core, "if new.id % 2 = 0 then raise exception 'even'; else perform 1 / 0; end if;")
    assert set(turn(core).values()) == {"dead-letter"}
    assert core.status()["state"] == "active"


def test_a_suspended_policy_does_not_delay_the_others(committed, core, holds):
    """Its sibling is swept in the same call, and then the error is raised."""
    holds.due(20)
    core.do("create table fine (like holds including all)")
    core.do("insert into fine (expires_at) select now() - interval '1 hour' from generate_series(1, 20)")
    core.register("a_broken")
    core.register("b_fine", target="fine")
    break_(core)
    assert "a_broken" in sweep_fails(core, batch=5)
    assert core.column("select distinct status from fine") == ["expired"]
    assert core.rows("select policy, state from pgreaper.status order by 1") == [
        ("a_broken", "suspended"),
        ("b_fine", "active"),
    ]


def test_what_failed_and_was_not_charged_is_not_lost(core, holds, clock):
    """With claim + expire too: the claim is over, the holds are claimable again once the rest has ended."""
    ids = holds.due(300)
    core.register(batch=100)
    break_(core)
    first = core.claim(batch=100)
    second = core.claim(batch=100)
    core.expire(first[0].token)
    core.expire(second[0].token)
    core.do("drop trigger broken on holds")
    clock.pass_(minutes=7)
    seen = set()
    for _ in range(20):
        claim = core.claim()  # no rescan: the suspension itself has put the cursor back
        if not claim:
            break
        seen |= {int(key) for key, (outcome, _) in core.expire(claim[0].token).items() if outcome == "expired"}
        clock.pass_(seconds=1)
    assert seen == set(ids)


def heals(core, holds, clock, good: list[int], bad: list[int], probes: int) -> None:
    """The good expire within so many turns, the bad do not, and nobody has to help."""
    for _ in range(probes):
        turn(core)
        clock.pass_(seconds=max(1, rests(core, clock) + 0.01 if core.status()["state"] == "suspended" else 0))
        if set(good) <= {id_ for id_, state in holds.states().items() if state == "expired"}:
            break
    states = holds.states()
    assert {states[id_] for id_ in good} == {"expired"}
    assert {states[id_] for id_ in bad} == {"held"}


@pytest.mark.parametrize("place", [0, 6, 10, 14, 20])
def test_one_good_hold_among_twenty_bad_ones_is_found(core, holds, clock, place):
    """The youngest are bad too, wherever the good one is: each probe looks elsewhere."""
    ids = holds.due(21)
    core.register()
    bad = ids[:place] + ids[place + 1 :]
    poison(core, bad)
    heals(core, holds, clock, [ids[place]], bad, probes=60)


@pytest.mark.parametrize("shape", ["bad at both ends", "scattered", "far from the others"])
def test_innocents_between_bad_holds_expire(core, holds, clock, shape):
    """2,000 good ones among 608 bad (or a tenth): a bounded number of probes finds them, however the deadlines lie."""
    few = shape == "scattered"  # each of these is found by halving
    old = holds.due(60 if few else 600, overdue="5 hours")
    good = holds.due(200 if few else 2000, overdue="3 hours")
    late = holds.due(50, overdue="2 hours") if shape == "far from the others" else []
    young = holds.due(8, overdue="1 hour")
    if shape == "far from the others":
        core.do(f"update holds set expires_at = expires_at - interval '300 days' where id < {young[0]}")
    elif shape == "scattered":
        core.do(
            "update holds set expires_at = now() - interval '2 hours' - (id * 7919 % 260) * interval '1 second'"
            f" where id < {young[0]}"
        )
    core.register()
    bad = old + late + young
    poison(core, bad)
    heals(core, holds, clock, good, bad, probes=40)


def test_deadlines_without_a_beginning_can_be_probed(core, holds, clock):
    """-infinity has no distance to anything; the third and further probes pick deadlines at random."""
    ids = holds.due(30)
    core.do("update holds set expires_at = '-infinity' where id <= 10")
    core.register()
    break_(core)
    for _ in range(12):
        assert set(turn(core).values()) == {"retry"}
        clock.pass_(minutes=7)
    core.do("alter table holds disable trigger broken", "update holds set expires_at = '-infinity'",
            "alter table holds enable trigger broken")  # fmt: skip
    for _ in range(6):
        assert set(turn(core).values()) == {"retry"}
        clock.pass_(minutes=7)
    core.do("drop trigger broken on holds")
    core.run()
    assert {holds.states()[id_] for id_ in ids} == {"expired"}

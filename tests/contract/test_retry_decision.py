"""The retry decision (_not_before, _fail): when a hold that failed is tried again, and when it is given up."""

from __future__ import annotations

from datetime import timedelta

import pytest

NOW = "2030-01-01 00:00Z"
MOST = 2**31 - 1


@pytest.fixture
def policy(core, holds):
    """A policy with these budgets; a function, because each case has its own."""

    def policy(**budgets):
        holds.due(1)
        core.register(**budgets)

    return policy


def delays(core, attempts: int, budget: int, retry_in: str | None = None, tries: int = 1) -> list[timedelta]:
    found: list[timedelta] = core.column(
        "select pgreaper._not_before(p, %s, %s, %s, %s::interval) - %s::timestamptz"
        " from pgreaper.policies as p, generate_series(1, %s)",
        NOW, attempts, budget, retry_in, NOW, tries,
    )  # fmt: skip
    return found


# attempts so far -> the bounds of the delay, base 2 s and cap 1 min: least(cap, base * 2^attempts), half more at most
BOUNDS = [(0, 2), (1, 4), (2, 8), (3, 16), (4, 32), (5, 60), (6, 60), (30, 60), (31, 60), (62, 60), (63, 60), (64, 60),
          (1023, 60), (1024, 60), (5000, 60), (2**30, 60), (MOST - 1, 60)]  # fmt: skip


@pytest.mark.parametrize(("attempts", "seconds"), BOUNDS)
def test_c035_the_delay_doubles_up_to_the_cap_at_any_attempt_number(core, policy, attempts, seconds):
    policy(backoff_base="2 seconds", backoff_cap="1 minute")
    found = [delay.total_seconds() for delay in delays(core, attempts, MOST, tries=200)]
    assert seconds <= min(found)
    assert max(found) <= seconds * 1.5


def test_c034_the_jitter_is_spread_over_its_whole_width(core, policy):
    """Up to half of the delay, evenly: no second gets more than its share."""
    policy(backoff_base="50 seconds", backoff_cap="1 hour")
    found = sorted(delay.total_seconds() for delay in delays(core, 1, MOST, tries=2000))
    assert len(set(found)) > 1990
    assert found[0] < 102.5
    assert found[-1] > 147.5
    tenths = [sum(100 + 5 * n <= delay < 105 + 5 * n for delay in found) for n in range(10)]
    assert sum(tenths) == 2000
    assert min(tenths) > 130


@pytest.mark.parametrize(
    ("base", "cap"), [("0", "0"), ("1 microsecond", "1 microsecond"), ("0", "1 year"), ("1 year", "1 year")]
)
@pytest.mark.parametrize("attempts", [0, 1, 60, 61, MOST - 1])
def test_c035_no_budget_that_can_be_registered_overflows(core, policy, base, cap, attempts):
    policy(backoff_base=base, backoff_cap=cap)
    [delay] = delays(core, attempts, MOST)
    assert timedelta(0) <= delay <= timedelta(days=366 * 1.5)


@pytest.mark.parametrize(
    ("attempts", "budget", "dead"),
    [(0, 1, False), (1, 1, True), (2, 1, True), (4, 5, False), (5, 5, True), (0, 0, True), (MOST, MOST, True),
     (MOST - 1, MOST, False)],
)  # fmt: skip
@pytest.mark.parametrize("retry_in", [None, "1 second"])
def test_the_budget_decides_and_a_wish_does_not_prolong_it(core, policy, attempts, budget, dead, retry_in):
    policy()
    query = "select pgreaper._not_before(p, %s, %s, %s, %s::interval) = 'infinity' from pgreaper.policies as p"
    assert core.value(query, NOW, attempts, budget, retry_in) is dead


@pytest.mark.parametrize(
    ("wish", "delay"),
    [
        ("0", timedelta(0)),
        ("-1 day", timedelta(0)),
        ("-170000000 years", timedelta(0)),
        ("90 seconds", timedelta(seconds=90)),
        ("2 years", timedelta(days=731)),
        ("170000000 years", timedelta(days=36525)),
    ],
)
def test_c035_the_delay_that_was_asked_for(core, policy, wish, delay):
    """As wished, without jitter, never in the past, and no wish is too large to be written down."""
    policy(backoff_cap="1 minute")
    [found] = delays(core, 1, 5, wish)
    assert abs(found - delay) < timedelta(days=2 if delay.days > 365 else 0, microseconds=1)


# class of failure -> what becomes of it with each further attempt
DECISIONS = [
    ({"transient": True}, {"max_attempts": 3}, ["retry", "retry", "dead-letter"]),
    ({"transient": True}, {"max_attempts": 1}, ["dead-letter"]),
    ({"transient": False}, {}, ["dead-letter"]),
    ({"transient": False}, {"permanent_attempts": 2}, ["retry", "dead-letter"]),
    ({"transient": False}, {"permanent_attempts": 2, "max_attempts": 9}, ["retry", "dead-letter"]),
    ({"transient": True, "final": True}, {"max_attempts": 9}, ["dead-letter"]),
    ({"transient": True, "retry_in": "1 second"}, {"max_attempts": 2}, ["retry", "dead-letter"]),
    ({"transient": True, "charged": False}, {"max_attempts": 1}, ["retry", "retry", "retry", "retry"]),
    ({"transient": False, "charged": False}, {}, ["retry", "retry"]),
]


@pytest.mark.parametrize(("failure", "budgets", "expected"), DECISIONS)
def test_the_decision_by_class_and_budget(core, holds, set_clock, failure, budgets, expected):
    """A retry until the budget of its kind is spent, then a dead letter, once; attempts only go up."""
    [id_] = holds.due(1)
    core.register(**budgets)
    attempts = []
    for day, outcome in enumerate(expected, start=1):
        set_clock(timedelta(days=400 * day))
        [hold] = core.claim(rescan=True)
        [(found, count, not_before)] = core.call(
            "reaper_fail", "outcome", "attempts", "not_before::text", token=hold.token, key=hold.key,
            error_class="TimeoutError", **failure,
        )  # fmt: skip
        assert found == outcome
        assert (not_before == "infinity") == (outcome == "dead-letter")
        attempts.append(count)
        core.expire(hold.token)
    assert attempts == ([0] * len(expected) if failure.get("charged") is False else [*range(1, len(expected) + 1)])
    set_clock(timedelta(days=4000))
    assert bool(core.claim(rescan=True)) == (expected[-1] == "retry")
    assert holds.states() == {id_: "held"}


@pytest.mark.parametrize("attempts", [0, 10, 11, 31, 715827883, MOST - 1, MOST])
def test_c035_recording_a_failure_never_overflows(core, holds, set_clock, attempts):
    """Whatever the counter says, the hold is claimed, fails, is recorded, and the counter does not go down."""
    holds.due(2)
    core.register(max_attempts=MOST)
    hold = core.claim(batch=1)[0]
    core.call("reaper_fail", token=hold.token, key=hold.key, error_class="TimeoutError", transient=True)
    core.expire(hold.token)
    core.connection.execute("update pgreaper.failures set attempts = %s, not_before = now()", (attempts,))
    again = core.claim(rescan=True)
    assert [(h.key, h.attempt) for h in again if h.key == hold.key] == [(hold.key, min(attempts + 1, MOST))]
    [(outcome, count)] = core.call(
        "reaper_fail", "outcome", "attempts", token=again[0].token, key=hold.key, error_class="T", transient=True
    )
    assert count == min(attempts + 1, MOST)
    assert outcome == ("dead-letter" if count == MOST else "retry")


def test_a_new_deadline_is_a_new_incarnation(core, holds, set_clock):
    """Its attempts begin anew, its failure replaces the old one."""
    [id_] = holds.due(1)
    core.register(max_attempts=5)
    hold = core.claim()[0]
    core.call("reaper_fail", token=hold.token, key=hold.key, error_class="TimeoutError", transient=True)
    core.expire(hold.token)
    core.do("update holds set expires_at = expires_at + interval '1 minute'")
    second = core.claim(rescan=True)[0]
    assert (second.key, second.attempt) == (hold.key, 1)
    [(attempts,)] = core.call(
        "reaper_fail", "attempts", token=second.token, key=hold.key, error_class="OtherError", transient=True
    )
    assert attempts == 1
    assert core.rows("select key, deadline::text, error_class from pgreaper.retries") == [
        (str(id_), second.deadline, "OtherError")
    ]


def test_a_late_failure_does_not_replace_that_of_a_later_incarnation(core, holds):
    """A worker that was slow speaks of a deadline that is over: it must not give the newer one a fresh budget."""
    holds.due(2)
    core.register()
    slow = core.claim(batch=1)[0]
    core.expire(core.claim()[0].token)  # the cursor is now beyond the deadline that the first claim knows
    core.connection.execute("update holds set expires_at = expires_at + interval '1 minute' where id = %s", (slow.key,))
    quick = core.claim()[0]
    assert quick.key == slow.key
    core.call("reaper_fail", "outcome", token=quick.token, key=quick.key, error_class="Refused")
    before = core.rows("select * from pgreaper.dead_letters")
    [(outcome,)] = core.call(
        "reaper_fail", "outcome", token=slow.token, key=slow.key, error_class="TimeoutError", transient=True
    )
    assert outcome == "not-eligible"
    assert core.rows("select * from pgreaper.dead_letters") == before
    assert core.expire(slow.token) == {slow.key: ("not-eligible", "held")}, "its own claim has settled it"
    assert core.expire(quick.token) == {slow.key: ("dead-letter", None)}
    assert core.rows("select * from pgreaper.dead_letters") == before
    assert core.claim(rescan=True) == []

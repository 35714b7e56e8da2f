"""The views `status`, `leases` and `backlog`: every column tells what its comment says."""

from __future__ import annotations

from datetime import timedelta

REFUSE = (
    "create function refuse() returns trigger language plpgsql as $$ begin raise exception 'no'; end $$",
    "create trigger refuse before update on holds for each row when (new.id = 1) execute function refuse()",
)


def test_status_of_a_fresh_policy(core, holds):
    """Nothing has happened: zeros, no ages and no latencies."""
    core.register(objective="30 seconds")
    status = core.status()
    assert {name: status[name] for name in ("policy", "target", "owner", "state", "reason", "objective")} == {
        "policy": "p", "target": "public.holds", "owner": "tests", "state": "active", "reason": None,
        "objective": "00:00:30",
    }  # fmt: skip
    assert {status[name] for name in "due leased retrying dead expired already_done not_eligible".split()} == {0}
    empty = "oldest_deadline oldest_due lateness_p50 lateness_p99 lateness_max finish_p50 finish_p99 last_success"
    assert {status[name] for name in empty.split()} == {None}
    assert status["due_capped"] is False


def test_status_counts_each_hold_where_it_belongs(core, holds, set_clock):
    """Due: free and not failed; the others apart."""
    holds.due(9)
    holds.ahead(3)
    core.do(*REFUSE)
    core.register(permanent_attempts=1)
    first = core.claim(batch=4)[0].token
    core.do("update holds set status = 'consumed' where id = 2", "update holds set status = 'expired' where id = 3")
    core.expire(first)  # 1 dead, 2 not eligible, 3 already done, 4 expired
    core.claim(batch=2)  # 5 and 6 lapse
    set_clock(timedelta(minutes=2))
    core.claim(batch=1)  # takes them back; 7 is leased
    status = core.status()
    assert {name: status[name] for name in "due leased retrying dead expired already_done not_eligible".split()} == {
        "due": 2,
        "leased": 1,
        "retrying": 2,
        "dead": 1,
        "expired": 1,
        "already_done": 1,
        "not_eligible": 1,
    }
    set_clock(timedelta(minutes=4))
    assert core.status()["leased"] == 0, "lapsed, though nobody took it back"
    set_clock(timedelta(minutes=2))
    assert core.value(
        "select oldest_deadline = (select expires_at from holds where id = 8)"
        " and abs(extract(epoch from oldest_due - (pgreaper._clock() - oldest_deadline))) < 1 from pgreaper.status"
    )


def test_status_lateness_and_time_to_finish(core, holds, set_clock):
    """Quantiles of the last five minutes; the greatest bounds the others; grace does not count as lateness."""
    set_clock("2040-01-01 00:00Z")
    for seconds in (11, 12, 13, 14, 40):
        core.do(f"insert into holds (expires_at) values ('2040-01-01 00:00Z'::timestamptz - interval '{seconds} s')")
    core.register(grace="10 seconds")
    token = core.claim()[0].token
    set_clock("2040-01-01 00:00:02Z")
    core.expire(token)
    query = "select {} from pgreaper.status"
    names = "lateness_p50 lateness_p99 lateness_max finish_p50 finish_p99".split()
    [found] = core.rows(query.format(", ".join(f"extract(epoch from {name})::float" for name in names)))
    p50, p99, greatest, finish50, finish99 = found
    assert greatest == 32
    assert 2.5 <= p50 <= 6, p50
    assert 25 <= p99 <= 32, p99
    assert (finish50, finish99) == (2, 2)
    assert core.value("select last_success = '2040-01-01 00:00:02Z' from pgreaper.status")
    set_clock("2040-01-01 00:06Z")
    assert core.rows(query.format("lateness_p50, lateness_max, finish_p50")) == [(None, None, None)]
    assert core.value("select last_success = '2040-01-01 00:00:02Z' from pgreaper.status")


def test_c039_status_stays_finite(core, holds):
    """-infinity and BC are due; ages and latencies stay numbers that a program can read."""
    core.do("insert into holds (expires_at) values ('-infinity'), ('0044-03-15 BC'), ('infinity'), ('275760-09-13')")
    core.register()
    before = core.status()
    assert (before["due"], before["oldest_deadline"], before["finite"]) == (2, "-infinity", True)
    core.run()
    after = core.status()
    assert (after["due"], after["expired"]) == (0, 2)
    assert core.value(
        "select lateness_p50 <= lateness_max and lateness_p99 <= lateness_max and lateness_max <= interval '36525 days'"
        " from pgreaper.status"
    )


def test_status_of_a_paused_and_of_a_broken_policy(core, holds):
    """A target that is missing costs its own line only, and says what is wrong."""
    core.do("create table others (like holds including all)")
    holds.due(1)
    core.register()
    core.register("q", target="others")
    core.call("reaper_pause", policy="p", reason="stock-taking")
    core.do("drop table others")
    assert (core.status()["state"], core.status()["reason"], core.status()["due"]) == ("paused", "stock-taking", 1)
    broken = core.status("q")
    assert (broken["state"], broken["due"]) == ("broken", None)
    assert broken["reason"] == "public.others, the target of policy q, does not exist"
    assert core.rows("select distinct policy from pgreaper.backlog") == [("p",)]


def test_status_of_a_table_that_is_locked(committed, core, holds):
    """Looking waits for a moment and then says so, and who has it."""
    core.register()
    other = committed(autocommit=False)
    other.execute("lock table holds in access exclusive mode")
    assert core.rows("select state, reason from pgreaper.status") == [
        ("broken", f"table public.holds is locked by backend {other.info.backend_pid} (AccessExclusiveLock)")
    ]
    other.rollback()


def test_backlog_of_a_table_that_is_locked(committed, core, holds):
    """A locked table costs its own lines only."""
    core.do("create table others (like holds including all)")
    core.register()
    core.register("q", target="others")
    other = committed(autocommit=False)
    other.execute("lock table holds in access exclusive mode")
    assert core.rows("select distinct policy from pgreaper.backlog") == [("q",)]
    other.rollback()


def test_status_reads_a_bounded_number_of_holds(core, holds):
    """At most 10000 and a mark: looking must not become the load."""
    core.do("insert into holds (expires_at) select now() - interval '1 hour' from generate_series(1, 10001)")
    core.register()
    assert (core.status()["due"], core.status()["due_capped"]) == (10000, True)
    core.do("delete from holds where id = 1")
    assert (core.status()["due"], core.status()["due_capped"]) == (10000, False)


def test_status_counts_what_retention_has_removed(core, holds):
    """Exported counters never go back."""
    holds.due(2)
    core.register()
    core.run()
    core.do(
        "insert into pgreaper.totals (policy_id, expired, already_done, not_eligible) select"
        " policy_id, 40, 30, 20 from pgreaper.policies"
    )
    status = core.status()
    assert (status["expired"], status["already_done"], status["not_eligible"]) == (42, 30, 20)


def test_leases_are_the_active_claims(core, holds):
    """Who works on what, and whether the lease has run out."""
    holds.due(6)
    core.register()
    done = core.claim(batch=1)[0].token
    core.expire(done)
    mine = core.claim(batch=2, worker="w1")[0].token
    lost = core.claim(batch=3, worker="w2")[0].token
    core.do(f"update pgreaper.claims set claim_until = clock_timestamp() - interval '1 second' where token = '{lost}'")
    assert core.rows(
        "select policy, token::text, worker, holds, attempt, lapsed from pgreaper.leases order by worker"
    ) == [("p", mine, "w1", 2, 1, False), ("p", lost, "w2", 3, 1, True)]


def test_backlog_by_age(core, holds, set_clock):
    """Each hold that is due, as status counts it, in one bucket; bounds belong to the older one."""
    set_clock("2040-01-01 00:00Z")
    for age, number in (
        ("0 s", 1),
        ("59.999999 s", 1),
        ("1 min", 2),
        ("5 min", 3),
        ("1 h", 4),
        ("1 day", 5),
        ("9 years", 6),
    ):
        for _ in range(number):
            core.do(f"insert into holds (expires_at) values ('2040-01-01 00:00Z'::timestamptz - interval '{age}')")
    core.do("insert into holds (expires_at) values ('2040-01-01 00:00:00.000001Z')")
    core.register()
    assert core.rows('select age, due, capped from pgreaper.backlog order by "position"') == [
        ("under 1 minute", 2, False), ("1 to 5 minutes", 2, False), ("5 to 60 minutes", 3, False),
        ("1 to 24 hours", 4, False), ("over 1 day", 11, False),
    ]  # fmt: skip
    core.register(grace="1 minute")
    assert core.column('select due from pgreaper.backlog order by "position"') == [2, 3, 4, 5, 6]


def test_backlog_has_no_hold_that_is_leased_or_has_failed(core, holds, set_clock):
    """One meaning of due: the ages add up to what status says, and what a lapsed lease had counts again."""
    set_clock("2040-01-01 00:00Z")
    core.do(
        "insert into holds (expires_at) select '2040-01-01 00:00Z'::timestamptz - a * interval '1 minute'"
        " from unnest('{1,1,1,20,20,20,300,300,3000,3000}'::int[]) as a"
    )
    core.register(permanent_attempts=1)
    [dead, retrying, leased] = core.claim(batch=3)
    core.call("reaper_fail", "outcome", token=dead.token, key=dead.key, error_class="x", transient=False)
    core.call("reaper_fail", "outcome", token=retrying.token, key=retrying.key, error_class="x", transient=True)
    ages = 'select due from pgreaper.backlog order by "position"'
    assert core.column(ages) == [0, 3, 3, 1, 0]
    assert core.status()["due"] == sum(core.column(ages))
    set_clock("2040-01-01 00:01Z")
    assert core.column(ages) == [0, 3, 3, 2, 0]
    assert core.status()["due"] == sum(core.column(ages))
    assert leased.key not in core.column("select key from pgreaper.failures")


def test_backlog_sees_free_holds_between_any_number_of_failures(core, holds):
    """In each bucket as many rows more are read as there are failures in it."""
    core.do(
        "insert into holds (expires_at)"
        " select now() - interval '2 hours' + g * interval '1 ms' from generate_series(1, 10040) as g"
    )
    core.register()
    core.do(
        "insert into pgreaper.failures"
        " (policy_id, key, deadline, attempts, first_seen_at, failed_at, not_before, error_class)"
        " select p.policy_id, h.id::text, h.expires_at, 1, now(), now(), 'infinity', 'x'"
        "   from holds as h, pgreaper.policies as p where h.id <= 40"
    )
    assert core.rows("select due, capped from pgreaper.backlog where age = '1 to 24 hours'") == [(10000, False)]


def test_backlog_counts_are_bounded(core, holds):
    core.do("insert into holds (expires_at) select now() - interval '2 hours' from generate_series(1, 10005)")
    core.register()
    assert core.rows("select due, capped from pgreaper.backlog where age = '1 to 24 hours'") == [(10000, True)]


def test_backlog_with_extreme_deadlines_and_every_kind_of_deadline(core):
    for column, zone in (("timestamptz", None), ("timestamp", "America/New_York"), ("date", "Asia/Tokyo")):
        core.do(f"create table t_{column} (id int primary key, status text, expires_at {column})")
        core.do(
            f"insert into t_{column} values (1, 'held', '-infinity'), (2, 'held', '0044-03-15 BC'),"
            " (3, 'held', 'infinity'),"
            f" (4, 'held', '4999-01-01')"
        )
        core.register(column, target=f"t_{column}", zone=zone)
        assert core.rows("select age, due from pgreaper.backlog where policy = %s and due > 0", column) == [
            ("over 1 day", 2)
        ]


def test_metrics_see_what_a_dead_worker_left_behind_and_overdue_retries(core, holds, set_clock):
    """Both wait for somebody, and only as long as their rows say so."""
    age = "select due, round(oldest_due_seconds) from pgreaper.metrics"
    holds.due(2, overdue="1 hour")
    core.register(permanent_attempts=5, backoff_base="1 minute")
    token = core.claim()[0].token
    assert core.rows(age) == [(0, 0)]
    set_clock(timedelta(minutes=10))
    assert core.rows(age) == [(2, 4199)], "the lease has lapsed"
    with core.connection.transaction(force_rollback=True):
        core.do("update holds set expires_at = 'infinity'")
        assert core.rows(age) == [(0, 0)], "the application has extended what was left behind"
    core.call("reaper_fail", "outcome", token=token, key="1", error_class="x", transient=False, retry_in="2 minutes")
    core.expire(token)
    assert core.rows(age) == [(0, 0)]
    set_clock(timedelta(minutes=15))
    assert core.value("select oldest_due_seconds between 170 and 190 from pgreaper.metrics"), "overdue since its time"
    core.do("update holds set status = 'consumed'")
    assert core.rows(age) == [(0, 0)], "nothing is left to be tried again"


def test_what_lies_beyond_many_dead_letters_is_seen(core, holds):
    """However many lie before it, and wherever the cursor is: one due hold is one due hold."""
    holds.due(3000, overdue="2 hours")
    core.register()
    core.do(
        "insert into pgreaper.failures"
        " (policy_id, key, deadline, attempts, first_seen_at, failed_at, not_before, error_class)"
        " select policy_id, id::text, expires_at, 1, now(), now(), 'infinity', 'x' from pgreaper.policies, holds",
        "update pgreaper.cursors set position = now()",
    )
    assert core.rows("select due, oldest_due from pgreaper.status") == [(0, None)]
    holds.due(1, overdue="30 minutes")
    assert core.rows("select due, round(extract(epoch from oldest_due)) from pgreaper.status") == [(1, 1799)]


def test_c062_the_reason_of_a_broken_policy_repeats_no_value(core, holds):
    """The server's own message may quote a row: a cast to regclass that fails names what was in it."""
    holds.due(1)
    core.do(
        "create view shown as select * from holds where status <> 'consumed' and customer_email::regclass is not null",
        "update holds set customer_email = null",
    )
    core.register(target="shown", key_columns=["id"])
    core.do("update holds set customer_email = 'hunter2topsecret'")
    status = core.status()
    assert (status["state"], status["due"]) == ("broken", None)
    assert "hunter2" not in status["reason"]
    assert "public.shown cannot be read" in status["reason"]

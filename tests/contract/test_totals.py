"""Counters: what happened is counted when it happens, once, by whoever did it, without waiting."""

from __future__ import annotations

from datetime import timedelta

import pytest

REFUSE = (
    "create function refuse() returns trigger language plpgsql as $$ begin raise exception 'no'; end $$",
    "create trigger refuse before update on holds for each row when (new.id = 1) execute function refuse()",
)
COUNTED = """
select coalesce(sum(expired), 0), coalesce(sum(already_done), 0), coalesce(sum(not_eligible), 0),
       coalesce(sum(retry), 0), coalesce(sum(dead_letter), 0), coalesce(sum(taken_back), 0) from pgreaper.totals
"""
BOOKED = """
select (select coalesce(sum(cardinality(keys)), 0) from pgreaper.transitions),
       count(*) filter (where kind = 'already-done'), count(*) filter (where kind = 'not-eligible'),
       count(*) filter (where kind = 'retry'), count(*) filter (where kind = 'dead-letter'),
       count(*) filter (where kind = 'taken-back')
  from pgreaper.events
"""


def everything_happens(core, holds, set_clock):
    """One of each: expired, conflicts, a retry, a dead letter, a lease taken back."""
    holds.due(12)
    core.do(*REFUSE)
    core.register(permanent_attempts=1)
    token = core.claim(batch=5)[0].token
    core.do("update holds set status = 'consumed' where id = 2", "update holds set status = 'expired' where id = 3")
    core.expire(token)
    token = core.claim(batch=2)[0].token
    core.call("reaper_fail", "outcome", token=token, key="6", error_class="TimeoutError", transient=True)
    core.expire(token, ["7"])
    core.claim(batch=2)
    set_clock(timedelta(minutes=2))
    core.run()


def test_the_counters_are_what_the_books_hold(core, holds, set_clock):
    """Every way of settling a hold is counted, and once: the sums are the same, and of each kind there is one."""
    everything_happens(core, holds, set_clock)
    counted = core.rows(COUNTED)
    assert counted == core.rows(BOOKED)
    assert all(count > 0 for count in counted[0])
    assert core.value("select sum(l) from pgreaper.totals, unnest(lateness) as l") == counted[0][0]
    assert core.value("select max(last_success) = (select max(at) from pgreaper.transitions) from pgreaper.totals")


def test_a_sweep_counts_too(core, holds, committed):
    """The fused way writes the same trail, so it is counted the same."""
    holds.due(30)
    core.register()
    core.do("call pgreaper.reaper_sweep(batch => 7)")
    assert core.rows(COUNTED) == [(30, 0, 0, 0, 0, 0)]
    assert core.value("select count(*) from pgreaper.totals") == 1


def test_what_is_rolled_back_is_not_counted(core, holds):
    """Counters commit with what they count."""
    holds.due(3)
    core.register()
    with core.connection.transaction(force_rollback=True):
        core.run()
    assert core.rows(COUNTED) == [(0, 0, 0, 0, 0, 0)]


def test_counting_waits_for_nobody(core, holds, committed):
    """Two open transactions of one policy: the second counts in a row of its own, and both are in the sum."""
    holds.due(6)
    core.register()
    core.expire(core.claim(batch=2)[0].token)  # there is a row to fight over
    first, second = committed(autocommit=False), committed(autocommit=False)
    for connection in (first, second):
        token = core.claim(batch=2)[0].token
        connection.execute("set lock_timeout = '1ms'")
        connection.execute("select * from pgreaper.reaper_expire(%s)", (token,))
    second.commit()
    first.commit()
    assert core.rows(COUNTED) == [(6, 0, 0, 0, 0, 0)]
    assert core.value("select count(*) from pgreaper.totals") == 2


def test_a_counter_is_one_narrow_row(core, holds, committed):
    """Counting again and again touches no index, so its dead versions go without a vacuum."""
    holds.due(200)
    core.register()
    with committed() as session:  # a session that ends reports what it did, in every version
        session.execute("call pgreaper.reaper_sweep(batch => 1)")
    core.do("""
        do $$ begin
          for i in 1 .. 2000 loop
            exit when (select n_tup_upd from pg_stat_user_tables where relname = 'totals') >= 199;
            perform pg_sleep(0.005), pg_stat_clear_snapshot();
          end loop;
        end $$""")
    updates, hot = core.rows("select n_tup_upd, n_tup_hot_upd from pg_stat_user_tables where relname = 'totals'")[0]
    assert updates == hot == 199
    assert core.value("select pg_relation_size('pgreaper.totals')") <= 2 * 8192


@pytest.mark.parametrize(
    ("late", "bucket"),
    [(0, 1), (0.001, 1), (0.001001, 2), (0.0025, 2), (0.9, 10), (1, 10), (1.000001, 11), (2.5e6, 29), (2.6e6, 30)],
)
def test_a_lateness_belongs_to_the_bucket_whose_bound_it_reaches(core, late, bucket):
    """Alone, in a batch of the like, and beside one that is infinitely late."""
    alone, alike, beside = core.rows(
        "select pgreaper._lateness(now(), array[d], d, d), pgreaper._lateness(now(), array[d, d], d, d),"
        " pgreaper._lateness(now(), array['-infinity', d], '-infinity', d)"
        "  from (select now() - make_interval(secs => %s) as d) as x",
        late,
    )[0]
    one = [int(place == bucket) for place in range(1, 31)]
    assert alone == one
    assert alike == [2 * count for count in one]
    assert beside == [*one[:-1], one[-1] + 1]

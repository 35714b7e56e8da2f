"""reaper_preview: what a run would meet now."""

from __future__ import annotations

from datetime import timedelta

import pytest


def test_c020_it_counts_what_is_due_and_what_will_never_be(core, holds):
    """NULL deadlines of held rows and NULL states are visible numbers, and nothing else is counted."""
    core.do("alter table holds alter expires_at drop not null, alter status drop not null")
    holds.due(3)
    holds.ahead(2)
    core.do(
        "insert into holds (status, expires_at) values ('held', null), ('held', null), (null, now()"
        " - interval '1 day'),"
        " ('consumed', null), ('held', 'infinity'), ('expired', now() - interval '1 day')"
    )
    core.register()
    oldest = core.value("select min(expires_at)::text from holds where status = 'held'")
    assert core.preview() == {
        "due": 3, "due_capped": False, "oldest_deadline": oldest, "locked": 0, "leased": 0, "retrying": 0, "dead": 0,
        "no_deadline": 2, "no_state": 1, "looked_at": None,
    }  # fmt: skip


def test_leased_retrying_and_dead_are_told_apart(core, holds, set_clock):
    """Due is what a claim could take, as in status; what a lapsed lease had is due again."""
    holds.due(7)
    core.do(
        "create function refuse() returns trigger language plpgsql as $$ begin raise exception 'no'; end $$",
        "create trigger refuse before update on holds for each row when (new.id <= 3) execute function refuse()",
    )
    core.register(permanent_attempts=1)
    core.expire(core.claim(batch=4)[0].token)  # 1, 2, 3 are dead, 4 is expired
    core.claim(batch=1)
    set_clock(timedelta(minutes=2))
    core.claim(batch=1)  # 5 comes back and waits; 6 is leased
    found = core.preview()
    assert {name: found[name] for name in ("due", "leased", "retrying", "dead")} == {
        "due": 1, "leased": 1, "retrying": 1, "dead": 3,
    }  # fmt: skip
    assert found["oldest_deadline"] == core.value("select expires_at::text from holds where id = 7")
    set_clock(timedelta(hours=1))
    assert (core.preview()["leased"], core.preview()["due"]) == (0, 2)
    assert core.status()["due"] == core.preview()["due"] == core.value("select sum(due) from pgreaper.backlog")


def test_due_is_counted_up_to_a_bound_behind_any_number_of_failures(core, holds):
    """10,000 and whether there are more; dead letters before them hide none."""
    holds.due(10_030, overdue="1 day")
    core.register()
    core.do(
        "insert into pgreaper.failures"
        " (policy_id, key, deadline, attempts, first_seen_at, failed_at, not_before, error_class)"
        " select p.policy_id, h.id::text, h.expires_at, 1, now(), now(), 'infinity', 'x'"
        "   from holds as h, pgreaper.policies as p where h.id <= 25"
    )
    assert [core.preview()[name] for name in ("due", "due_capped", "dead")] == [10_000, True, 25]
    core.do("delete from holds where id > 10025")
    assert [core.preview()[name] for name in ("due", "due_capped", "dead")] == [10_000, False, 25]


def test_a_large_table_is_not_read_for_what_has_no_index(core, holds):
    """Rows without deadline or state are looked for in a part of it, and how large that part was is told."""
    core.do(
        "alter table holds alter expires_at drop not null, alter status drop not null",
        "insert into holds (status, expires_at, customer_email) select case when g % 2 = 0 then 'held' end,"
        " case when g % 4 = 0 then now() + interval '1 day' end, repeat('x', 1500) from generate_series(1, 30000) as g",
        "analyze holds",
    )
    core.register()
    size = core.value("select pg_relation_size('holds') / 8192")
    read = "select pg_stat_get_xact_blocks_fetched('holds'::regclass)"
    before = core.value(read)
    found = core.preview()
    assert core.value(read) - before < 4500 < size
    assert 15000 < found["looked_at"] < 25000
    assert found["no_state"] / found["looked_at"] == pytest.approx(0.5, abs=0.05)
    assert found["no_deadline"] / found["looked_at"] == pytest.approx(0.25, abs=0.05)


def test_of_a_view_the_first_rows_are_looked_at(core, holds):
    core.do("alter table holds alter status drop not null")
    core.do("insert into holds (status, expires_at) select null, now() from generate_series(1, 100010)")
    core.do("create view shown as select * from holds")
    core.register(target="shown", key_columns=["id"])
    assert (core.preview()["no_state"], core.preview()["looked_at"]) == (100_000, 100_000)


def test_a_row_that_another_transaction_has_marked_counts_as_locked(committed, core, holds):
    """Nothing has to be locked to find out; a mark of a transaction that is over is none."""
    holds.due(3)
    core.register()
    other = committed(autocommit=False)
    other.execute("select from holds where id = 1 for update")
    other.execute("update holds set customer_email = 'x' where id = 2")
    assert core.preview()["locked"] == 2
    other.rollback()
    assert core.preview()["locked"] == 0


def test_locked_is_unknown_where_it_cannot_be_read(core, holds):
    """A view has no xmax: NULL, not zero."""
    holds.due(1)
    core.do("create view shown as select * from holds where customer_email <> 'x'")
    core.register(target="shown")
    assert (core.preview()["due"], core.preview()["locked"]) == (1, None)


def test_it_writes_nothing(committed, core, holds):
    """Promise: works in a read-only transaction and takes no transaction id."""
    holds.due(2)
    core.register()
    core.claim(batch=1)
    with core.connection.transaction():
        core.preview()
        assert core.changed_nothing()
    with core.connection.transaction():
        core.do("set transaction isolation level repeatable read read only")
        assert core.preview()["due"] == 1


def test_extreme_deadlines(core, holds):
    core.do("insert into holds (expires_at) values ('-infinity'), ('infinity'), ('0044-03-15 BC'), ('275760-09-13')")
    core.register()
    assert (core.preview()["due"], core.preview()["oldest_deadline"]) == (2, "-infinity")


def test_a_stamp_alone(core, holds):
    """Without a status column a NULL state cannot be."""
    core.do("alter table holds add done_at timestamptz")
    holds.due(2)
    core.register(status_column=None, held=None, expired=None, stamp_column="done_at")
    assert (core.preview()["due"], core.preview()["no_state"]) == (2, 0)


def test_a_policy_that_is_not_there(core):
    """Raises RP002."""
    assert core.refused("select pgreaper.reaper_preview('nope')").sqlstate == "RP002"

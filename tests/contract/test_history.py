"""reaper_history and the view `history`: what happened to which hold."""

from __future__ import annotations

from datetime import timedelta


def story(core, key, policy="p"):
    return core.call("reaper_history", "outcome", "state", "worker", "attempts", policy=policy, key=key)


def live(core, holds, set_clock):
    """Hold 1 is lost by a dying worker, fails, is extended by the application, and expires at last."""
    holds.due(2)
    core.do(
        "create function refuse() returns trigger language plpgsql as $$ begin raise exception 'no'; end $$",
        "create trigger refuse before update of status on holds for each row when (new.id = 1)"
        " execute function refuse()",
    )
    core.register(permanent_attempts=9, max_attempts=9)
    core.claim(worker="w1")
    set_clock(timedelta(hours=2))
    core.claim(worker="w2")
    set_clock(timedelta(hours=4))
    core.expire(core.claim(worker="w2", batch=500)[0].token)
    core.do(
        "drop trigger refuse on holds", "update holds set expires_at = expires_at + interval '1 minute' where id = 1"
    )
    set_clock(timedelta(hours=6))
    core.expire(core.claim(worker="w3", rescan=True)[0].token)


def test_everything_that_happened_to_one_hold_oldest_first(core, holds, set_clock):
    live(core, holds, set_clock)
    assert story(core, "1") == [
        ("retry", None, "w1", 1),
        ("retry", None, "w2", 2),
        ("expired", "expired", "w3", None),
    ]
    assert [row[0] for row in story(core, "2")] == ["retry", "expired"]
    assert core.column("select count(distinct deadline) from pgreaper.reaper_history('p', '1')") == [2]


def test_the_view_tells_the_same(core, holds, set_clock):
    """One row per happening, the trail and the events together, with the same columns."""
    live(core, holds, set_clock)
    for key in ("1", "2"):
        assert core.rows("select h.* from pgreaper.reaper_history('p', %s) as h", key) == core.rows(
            "select * from pgreaper.history where policy = 'p' and key = %s order by at", key
        )
    assert core.rows("select error_class, sqlstate from pgreaper.history where sqlstate is not null") == [
        ("TriggerException", "P0001")
    ]
    assert core.value("select count(*) from pgreaper.history where outcome = 'taken-back' and key is null") == 1


def test_a_key_without_a_history(core, holds):
    core.register()
    assert story(core, "77") == []
    assert story(core, "no number") == []
    assert story(core, None) == []


def test_it_works_when_policy_target_or_row_are_gone(core, holds):
    """Promise: the books are enough."""
    holds.due(2)
    core.register()
    core.run()
    core.do("delete from holds where id = 1")
    assert [row[0] for row in story(core, "1")] == ["expired"]
    core.call("reaper_unregister", policy="p")
    core.do("drop table holds")
    assert [row[0] for row in story(core, "2")] == ["expired"]


def test_a_large_trail_is_entered_by_the_deadline(core, holds):
    """Beyond 32 MB the hold's deadline leads to its batches: no scan of the whole trail, and the same answer."""
    core.do(
        "insert into holds (expires_at) select '2020-01-01Z'::timestamptz + g * interval '1 s' from"
        " generate_series(1, 40) g"
    )
    core.register()
    core.run(batch=10)
    core.do(
        "alter table pgreaper.transitions alter worker set storage external",  # not compressed
        "insert into pgreaper.transitions"
        " (policy_id, worker, at, holds, keys, deadlines, first_deadline, last_deadline, lateness)"
        " select (select policy_id from pgreaper.policies), repeat('x', 10000), now(), 1, '{x}', '{}', d, d, '{}'"
        " from generate_series('2021-01-01'::timestamptz, '2021-12-31', '2 hours') as d",
        "analyze pgreaper.transitions",
    )
    assert core.value("select pg_total_relation_size('pgreaper.transitions') > 32 * 1024 * 1024")
    scans = "select sum(seq_tup_read + idx_tup_fetch)::int from pg_stat_xact_all_tables where relname = 'transitions'"
    before = core.value(scans)
    assert story(core, "17") == [("expired", "expired", None, None)]
    assert core.value(scans) - before < 10, "the trail was read from end to end"
    # Nothing leads there: the row is gone, so all of the trail is searched.
    core.do("delete from holds where id = 18")
    assert story(core, "18") == [("expired", "expired", None, None)]
    assert core.value(scans) - before > 4000, "the measure cannot fail"
    assert story(core, "nonsense") == []


def test_it_writes_nothing(committed, core, holds):
    """Promise: works in a read-only transaction."""
    holds.due(1)
    core.register()
    core.run()
    with core.connection.transaction():
        core.do("set transaction read only")
        assert len(story(core, "1")) == 1
        assert core.changed_nothing()


def test_there_never_was_such_a_policy(core):
    """Raises RP002."""
    error = core.refused("select pgreaper.reaper_history('nope', '1')")
    assert (error.sqlstate, error.diag.message_primary) == ("RP002", "there is no policy nope")


def test_policies_do_not_see_each_others_holds(core, holds):
    core.do("create table others (like holds including all)", "insert into others (expires_at) values (now())")
    holds.due(1)
    core.register()
    core.register("q", target="others")
    core.run()
    assert story(core, "1", policy="q") == []
    core.run("q")
    assert len(story(core, "1", policy="q")) == 1

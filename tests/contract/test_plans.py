"""Plans: the claim and the transition use their indexes, whatever the planner is told."""

from __future__ import annotations

import pytest

# What a transaction has done so far is known inside it at once, in every version.
SCANS = "select coalesce(seq_scan, 0) from pg_stat_xact_user_tables where relname = 'holds'"
BLOCKS = """
select pg_stat_get_xact_blocks_fetched('holds'::regclass)
       + (select sum(pg_stat_get_xact_blocks_fetched(indexrelid)) from pg_index where indrelid = 'holds'::regclass)
"""

# Rows that an index led to.
FETCHED = "select coalesce(idx_tup_fetch, 0) from pg_stat_xact_user_tables where relname = 'holds'"

FORCED = [f"enable_{way} = off" for way in ("hashjoin", "mergejoin", "hashagg", "sort", "material")]


@pytest.fixture
def many(core, holds):
    """20,000 rows, the first 95% of the heap expired long ago, 200 due at its end."""
    core.do(
        "insert into holds (status, expires_at) select 'expired', now() - interval '2 days' + g * interval '1 s'"
        " from generate_series(1, 19000) as g",
        "insert into holds (status, expires_at) select 'held', now() + interval '1 day' from generate_series(1, 800)",
        "insert into holds (status, expires_at) select 'held', now() - interval '1 hour' + g * interval '1 s'"
        " from generate_series(1, 200) as g order by random()",
        "analyze holds",
    )
    core.register()
    return holds


def cycle(core, batch=50):
    """One claim and its expiry; the deadlines in order."""
    got = core.claim(batch=batch)
    assert len(got) == batch
    assert set(core.expire(got[0].token).values()) == {("expired", "expired")}
    return [hold.key for hold in got]


@pytest.mark.parametrize(
    "settings",
    [
        ["plan_cache_mode = force_generic_plan"],
        ["plan_cache_mode = force_custom_plan"],
        [
            "enable_hashjoin = off",
            "enable_mergejoin = off",
            "enable_hashagg = off",
            "enable_sort = off",
            "enable_material = off",
        ],
        ["enable_nestloop = off"],
        ["enable_bitmapscan = off", "enable_indexonlyscan = off"],
        ["jit = on", "jit_above_cost = 0"],
        ["parallel_setup_cost = 0", "parallel_tuple_cost = 0", "min_parallel_table_scan_size = 0"],
    ],
    ids=lambda settings: settings[0],
)
def test_c014_c018_the_batch_is_kept_and_the_index_used_under_any_settings(core, many, settings):
    """Exactly as many as asked for, oldest first, and no scan of the table."""
    for setting in settings:
        core.do(f"set local {setting}")
    oldest = core.column("select id::text from holds where status = 'held' order by expires_at limit 150")
    before = core.value(SCANS)
    got = [key for _ in range(3) for key in cycle(core)]
    assert got == oldest
    assert core.value(SCANS) == before
    assert core.column("select count(*) from holds where status = 'expired'") == [19150]


@pytest.mark.parametrize("settings", [[], FORCED], ids=["plain", "forced"])  # fmt: skip
def test_c014_without_statistics_the_limit_holds(core, holds, settings):
    """A locking sub-select that is run again per row would take them all."""
    holds.due(1000)
    core.register()
    for setting in settings:
        core.do(f"set local {setting}")
    batch = core.claim(batch=5)
    assert [hold.key for hold in batch] == ["1", "2", "3", "4", "5"]
    core.expire(batch[0].token)
    assert core.value("select count(*) from holds where status = 'expired'") == 5


def test_c019_a_claim_touches_few_pages(committed, core, many):
    """Blocks of table and index that a claim of 100 and its expiry touch: the batch's own, not the empty head's."""

    def touched(action):
        with core.connection.transaction():
            before = core.value(BLOCKS)
            action()
            return core.value(BLOCKS) - before

    core.claim(batch=10)  # catalogs
    assert touched(lambda: core.claim(batch=100)) < 250
    assert touched(lambda: core.claim(batch=1, rescan=True)) < 400
    assert touched(lambda: core.value("select count(*) from holds where customer_email = 'x'")) > 100, (
        "the measure works"
    )


def test_c018_a_prepared_call_keeps_its_plan_good(committed, core, many):
    """Called often in one session, as a daemon does, under a generic plan."""
    core.do("set plan_cache_mode = force_generic_plan", "prepare claim as select * from pgreaper.reaper_claim('p', 10)")
    for _ in range(12):
        with core.connection.transaction():
            before = core.value(SCANS)
            assert len(core.rows("execute claim")) == 10
            assert core.value(SCANS) == before


def test_the_full_index_serves_too(core, holds):
    """Not everybody has a partial index; (deadline) alone keeps the order."""
    core.do("drop index holds_due", "create index on holds (expires_at)")
    core.do(
        "insert into holds (expires_at) select now() - interval '1 hour' + g * interval '1 s' from"
        " generate_series(1, 5000) as g",
        "analyze holds",
    )
    core.register()
    before = core.value(SCANS)
    assert [len(core.claim(batch=50)) for _ in range(3)] == [50] * 3
    assert core.value(SCANS) == before


def test_without_an_index_it_works_all_the_same(core, holds):
    """Slower, but right: nothing is derived from the index."""
    core.do("drop index holds_due")
    holds.due(20)
    core.register()
    assert len(core.run(batch=7)) == 20


def test_c017_final_rows_lapsed_leases_and_retries_leave_the_claim_its_index(committed, core, holds):
    """The shipped statement among many final rows, with leases to take back and retries due: no scan, few pages."""
    core.do(
        "insert into holds (status, expires_at) select (array['expired', 'consumed', 'cancelled'])[1 + g % 3],"
        " now() - interval '2 days' + g * interval '1 s' from generate_series(1, 60000) as g",
        "insert into holds (status, expires_at) select 'held', now() + interval '1 day' from generate_series(1, 20000)",
        "insert into holds (status, expires_at) select 'held', now() - interval '1 hour' + g * interval '1 s'"
        " from generate_series(1, 1000) as g order by random()",
        "analyze holds",
    )
    core.register(lease="1 minute", backoff_base="1 second", max_attempts=9)
    core.claim(batch=100)
    failed = core.claim(batch=50)
    for hold in failed:
        core.call("reaper_fail", token=hold.token, key=hold.key, error_class="T", transient=True)
    core.expire(failed[0].token)
    core.claim(batch=100)
    core.do(
        "update pgreaper.failures set not_before = now()",
        "update pgreaper.claims set claim_until = now() - interval '1 s' where finished_at is null",
        "analyze pgreaper.failures",
        "analyze pgreaper.claims",
    )
    taken, pages = [], []
    for _ in range(4):
        with core.connection.transaction():
            before = core.value(SCANS)
            # The pages of all statements inside, the books' too.
            [(plan,)] = core.rows(
                "explain (analyze, buffers, format json) select * from pgreaper.reaper_claim('p', 100, rescan => true)"
            )
            assert core.value(SCANS) == before
        top = plan[0]["Plan"]
        taken.append(top["Actual Rows"])
        pages.append(top["Shared Hit Blocks"] + top["Shared Read Blocks"])

    assert core.value("select count(*) from pgreaper.events where kind = 'taken-back'") == 2
    assert sorted(map(int, taken)) == sorted([12, 100, 12, 100]), "retries, an eighth of the batch, in turn with fresh"
    assert max(pages[1:]) < 1000
    # What takes leases back writes a failure and an event for each of 200 holds, with their indexes.
    assert pages[0] < 1000 + 200 * 25


def test_dead_letters_behind_the_cursor_cost_a_probe_nothing(core, many):
    """A daemon's question reads a page or two of the failures, however many there are."""
    core.do(
        "insert into pgreaper.failures"
        " (policy_id, key, deadline, attempts, first_seen_at, failed_at, not_before, error_class)"
        " select policy_id, 'gone ' || g, now() - interval '3 days' + g * interval '1 s',"
        "        1, now(), now(), 'infinity', 'x'"
        "   from pgreaper.policies, generate_series(1, 20000) as g",
        "analyze pgreaper.failures",
    )
    read = (
        "select coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0) from pg_stat_xact_user_tables"
        " where relid = 'pgreaper.failures'::regclass"
    )
    core.expire(core.claim(batch=200)[0].token)
    before = core.value(read)
    core.do(*["select pgreaper.reaper_next_due('p')"] * 10)  # from the sixth on with a plan for any parameters
    assert core.value(read) - before <= 30
    before = core.value(read)
    core.do(*["select pgreaper._taken(policy_id, now() - interval '1 day') from pgreaper.policies"] * 10)
    assert core.value(read) - before <= 10


@pytest.mark.parametrize("settings", [[], ["enable_hashjoin = off"]], ids=["plain", "not hashed"])
@pytest.mark.parametrize("statistics", ["known", "unknown", "of others"])
@pytest.mark.parametrize("apart", ["1 ms", "0"], ids=["apart", "shared"])
def test_dead_letters_before_what_is_free_are_read_as_a_whole(committed, core, holds, apart, statistics, settings):
    """
    A rescan past any number of them takes the oldest of the rest in order, and looks none of them up by itself.

    Also where all have one deadline, which makes every look by the deadline a look at all of them.
    """
    core.do(
        f"insert into holds (expires_at) select now() - interval '1 day' + g * interval '{apart}'"
        " from generate_series(1, 40000) as g order by random()",
        "insert into holds (expires_at) select now() - interval '1 hour' + g * interval '1 ms'"
        " from generate_series(1, 600) as g order by random()",
        "vacuum analyze holds",
    )
    core.register()
    other = """
        insert into pgreaper.failures
          (policy_id, key, deadline, attempts, first_seen_at, failed_at, not_before, error_class)
        select p.policy_id, (1000000 + g)::text, now() - interval '2 days' + g * interval '1 s', 1, now(), now(),
               'infinity', 'x'
          from pgreaper.policies as p, generate_series(1, 1000) as g
    """
    core.do(
        "alter table pgreaper.failures set (autovacuum_enabled = off)",
        *([other, "vacuum analyze pgreaper.failures"] if statistics == "of others" else []),
        "insert into pgreaper.failures"
        " (policy_id, key, deadline, attempts, first_seen_at, failed_at, not_before, error_class)"
        " select p.policy_id, h.id::text, h.expires_at, 1, now(), now(), 'infinity', 'x'"
        "   from pgreaper.policies as p, (select * from holds order by expires_at limit 40000) as h",
        *(["vacuum analyze pgreaper.failures"] if statistics == "known" else []),
        "set statement_timeout = '30s'",
        *(f"set {setting}" for setting in settings),
    )
    oldest = core.column("select id::text from holds order by expires_at offset 40000 limit 500")
    with core.connection.transaction(force_rollback=True):
        [(plan,)] = core.rows(
            "explain (analyze, buffers, format json) select * from pgreaper.reaper_claim('p', 500, rescan => true)"
        )
    assert plan[0]["Plan"]["Shared Hit Blocks"] + plan[0]["Plan"]["Shared Read Blocks"] < 100_000
    assert [hold.key for hold in core.claim(batch=500, rescan=True)] == oldest

    # A look, which wants one, behind leases too; then there is none.
    for _ in range(2):
        [(plan,)] = core.rows("explain (analyze, buffers, format json) select * from pgreaper._agenda(rescan => '{p}')")
        assert plan[0]["Plan"]["Shared Hit Blocks"] + plan[0]["Plan"]["Shared Read Blocks"] < 60_000
        core.claim(batch=500, rescan=True)


@pytest.mark.parametrize(
    "look",
    [
        "select * from pgreaper.reaper_claim('p')",
        "select pgreaper.reaper_next_due('p')",
        "select * from pgreaper._agenda()",
    ],
)
def test_a_look_at_nothing_reads_a_few_pages(committed, core, holds, look):
    """What a fleet of idle daemons costs: a few pages of the books, the catalog and the index, all of them warm."""
    core.do(
        "insert into holds (expires_at) select now() + interval '1 day' + g * interval '1 s'"
        " from generate_series(1, 20000) as g",
        "vacuum analyze holds",
    )
    core.register()
    for _ in range(7):  # from the sixth on with a plan for any parameters
        [(plan,)] = core.rows(f"explain (analyze, buffers, format json) {look}")
    assert plan[0]["Plan"]["Shared Hit Blocks"] + plan[0]["Plan"]["Shared Read Blocks"] <= 18


@pytest.mark.parametrize("look", ["select pgreaper.reaper_next_due('p')", "select * from pgreaper._agenda()"])
def test_a_look_past_dead_letters_and_leases_reads_a_few_pages(committed, core, holds, look):
    """The cursor stands on the last leased hold: what its claim's other keys are is not read."""
    core.do(
        "insert into holds (expires_at) select now() - interval '1 day' + g * interval '1 s'"
        " from generate_series(1, 14000) as g",
        "insert into holds (expires_at) select now() + interval '1 day' + g * interval '1 s'"
        " from generate_series(1, 10000) as g",
        "vacuum analyze holds",
    )
    core.register()
    core.do(
        "insert into pgreaper.failures"
        " (policy_id, key, deadline, attempts, first_seen_at, failed_at, not_before, error_class)"
        " select p.policy_id, h.id::text, h.expires_at, 1, now(), now(), 'infinity', 'x'"
        "   from pgreaper.policies as p, (select * from holds order by expires_at limit 10000) as h",
        "vacuum analyze pgreaper.failures",
    )
    for _ in range(4):
        assert len(core.claim(batch=1000)) == 1000
    for _ in range(7):
        [(plan,)] = core.rows(f"explain (analyze, buffers, format json) {look}")
    assert plan[0]["Plan"]["Shared Hit Blocks"] + plan[0]["Plan"]["Shared Read Blocks"] <= 20


@pytest.mark.parametrize("trigger", [False, True], ids=["straight", "careful"])
@pytest.mark.parametrize("way", ["claim", "sweep", "retry", "lapsed"])
def test_a_burst_after_the_last_statistics_is_not_read_again_for_each_batch(committed, core, holds, trigger, way):
    """The planner believes that no row is held: it still finds the given ones where they are."""
    core.do(
        "insert into holds (status, expires_at)"
        " select 'expired', now() - interval '2 days' from generate_series(1, 20000)",
        "analyze holds",
        "insert into holds (status, expires_at) select 'held', now() - interval '1 hour' + g * interval '1 ms'"
        " from generate_series(1, 20000) as g",
    )
    if trigger:
        core.do(
            "create function nothing() returns trigger language plpgsql as $$ begin return new; end $$",
            "create trigger nothing before update on holds for each row execute function nothing()",
        )
    core.register(max_attempts=9)
    if way == "retry":
        token = core.claim(batch=100)[0].token
        core.do(
            f"select pgreaper.reaper_fail('{token}', key, error_class => 'T', transient => true)"
            f" from pgreaper.claims, unnest(keys) as key where token = '{token}'"
        )
        core.expire(token)
        core.do("update pgreaper.failures set not_before = now()")
    elif way == "lapsed":
        core.claim(batch=100)
        core.do("update pgreaper.claims set claim_until = now() - interval '1 s'")
    with core.connection.transaction():
        before = core.value(FETCHED)
        if way == "sweep":
            core.do("select pgreaper._sweep_step('p', 100, null, 'w', now(), null)")
        else:
            core.expire(core.claim(batch=100)[0].token)
        fetched = core.value(FETCHED) - before
    assert core.value("select count(*) > 0 from pgreaper.transitions")
    # To go through the backlog once would be 20,000.
    assert fetched < 2000

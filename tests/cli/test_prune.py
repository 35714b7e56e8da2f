"""`pgreaper prune`: old books go in short transactions, beside everybody else, and whatever happens it adds up."""

from __future__ import annotations

import signal
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

BOOKS = (
    "select (select count(*) from pgreaper.claims), (select count(*) from pgreaper.transitions),"
    " (select count(*) from pgreaper.events where kind <> 'register')"
)


@pytest.fixture
def old(db: psycopg.Connection[Any], holds: Any, set_clock: Callable[..., None]) -> Any:
    """Books of 100 days ago: 25 claims that expired 50 holds and found 25 consumed; the clock is back at now."""
    set_clock(timedelta(days=-100))
    db.execute(
        "insert into holds (expires_at) select pgreaper._clock() - interval '1 hour' from generate_series(1, 75)"
    )
    holds.register()
    for _ in range(25):
        ((token,),) = db.execute("select distinct token from pgreaper.reaper_claim('holds', 3, 'w', true)").fetchall()
        db.execute("update holds set status = 'consumed' where id = (select min(id) from holds where status = 'held')")
        db.execute("select pgreaper.reaper_expire(%s)", [token])
    set_clock(timedelta(0))
    assert db.execute(BOOKS).fetchone() == (25, 25, 25)
    return holds


def holds_true(db: psycopg.Connection[Any]) -> None:
    """Every invariant of every policy."""
    broken = db.execute("select policy, invariant, found from pgreaper.reaper_verify() where not holds").fetchall()
    assert broken == []


def test_all_that_is_old_goes_however_small_the_steps(in_process, db, old):
    """Calls until nothing is left, each a transaction; counters stay as they were."""
    before = db.execute("select expired, not_eligible, last_success from pgreaper.status").fetchone()
    result = in_process("prune", "--max-rows", "4", "--json")
    assert result.code == 0
    assert result.json["removed"] == {"claims": 25, "transitions": 25, "events": 26}  # one is the registration
    assert result.json["policies"] == {"holds": {"claims": 25, "transitions": 25, "events": 26}}
    assert (result.json["ended"], result.json["calls"]) == ("done", 7)
    assert db.execute(BOOKS).fetchone() == (0, 0, 0)
    assert db.execute("select expired, not_eligible, last_success from pgreaper.status").fetchone() == before
    holds_true(db)
    assert in_process("prune").out.startswith("nothing was old enough in ")


def test_each_kind_has_its_time(in_process, db, old):
    """As the options say."""
    assert in_process("prune", "--keep", "200 days", "--json").json["removed"] == {
        "claims": 25,
        "transitions": 0,
        "events": 0,
    }
    removed = in_process("prune", "--keep", "200 days", "--keep-events", "50 days", "--json").json["removed"]
    assert removed == {"claims": 0, "transitions": 0, "events": 26}
    assert in_process("prune", "--keep-claims", "200 days", "--keep", "99 days").out.startswith(
        "0 claims, 25 transitions, 0 events removed in"
    )


def test_claims_that_are_kept_keep_what_they_did(in_process, db, old):
    """Unless the trail is kept for less: then the claims go with it."""
    result = in_process(
        "prune", "--keep", "200 days", "--keep-claims", "200 days", "--keep-events", "200 days", "--json"
    )
    assert result.json["removed"] == {"claims": 0, "transitions": 0, "events": 0}
    assert in_process("prune", "--keep-claims", "200 days", "--json").json["removed"]["claims"] == 25


@pytest.mark.parametrize(
    "options",
    [[], ["--keep", "200 days"], ["--keep-events", "200 days"], ["--keep", "99 days", "--keep-claims", "101 days"],
     ["--keep", "200 days", "--keep-events", "1 day"]],
)  # fmt: skip
def test_a_dry_run_counts_what_would_go_and_changes_nothing(in_process, db, old, options):
    """The same numbers as the run after it; some of the claims are young, or not finished."""
    tokens = "(select token from pgreaper.claims order by claimed_at, token limit 5)"
    db.execute(f"update pgreaper.claims set finished_at = pgreaper._clock() where token in {tokens}")
    before = db.execute(BOOKS).fetchone()
    dry = in_process("prune", *options, "--dry-run", "--json")
    assert (dry.code, db.execute(BOOKS).fetchone()) == (0, before)
    counted = {kind: books["rows"] for kind, books in dry.json["policies"].get("holds", {}).items()}
    wet = in_process("prune", *options, "--max-rows", "3", "--json").json["removed"]
    assert {kind: n for kind, n in wet.items() if n} == {kind: n for kind, n in counted.items() if n}
    assert in_process("prune", *options, "--dry-run").out == "nothing is old enough\n"


def test_a_dry_run_counts_to_a_bound(in_process, db, old):
    """And says that there is more; it works on a read-only node."""
    db.execute("insert into pgreaper.events (policy_id, kind, at) select policy_id, 'resume', '2020-01-01'"
               " from pgreaper.policies, generate_series(1, 100000)")  # fmt: skip
    db.execute(f"alter database {db.info.dbname} set default_transaction_read_only = on")
    result = in_process("prune", "--dry-run")
    db.execute(f"alter database {db.info.dbname} reset default_transaction_read_only")
    assert result.code == 0
    assert result.out.splitlines()[1].split() == ["holds", "25", "25", "100,000+"]
    assert result.out.splitlines()[2] == "would be removed; nothing was changed"


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
@pytest.mark.parametrize("options", [["--keep", "59 minutes"], ["--keep-events", "0"], ["--keep-claims", "-1 day"]])
def test_an_hour_is_the_least(in_process, db, old, options, dry):
    """A dry run refuses what the run would."""
    result = in_process("prune", *options, *dry)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: the books must be kept for an hour at least\n")
    assert db.execute(BOOKS).fetchone() == (25, 25, 25)


def test_time_that_is_up(in_process, db, old):
    """What was done stays done, and the exit code is that of a run that ended as it was told to."""
    result = in_process("prune", "--max-rows", "1", "--max-seconds", "0.000001", "--json")
    assert (result.code, result.json["ended"], result.json["calls"]) == (0, "time", 0)
    assert db.execute(BOOKS).fetchone() == (25, 25, 25)


def test_a_transaction_a_call_also_under_another_isolation(in_process, db, old):
    """A role with repeatable read by default: each call commits all the same."""
    db.execute(f"alter database {db.info.dbname} set default_transaction_isolation = 'repeatable read'")
    # Deleting the last claim fails: what came before it has been committed.
    db.execute("""
        create function stop() returns trigger language plpgsql as
          $$ begin
               if (select count(*) from pgreaper.claims) <= 10 then raise exception 'enough'; end if;
               return old;
             end $$;
        create trigger stop before delete on pgreaper.claims for each row execute function stop();
    """)
    result = in_process("prune", "--max-rows", "5")
    assert result.code == 1
    assert db.execute(BOOKS).fetchone() == (10, 10, 11)
    holds_true(db)


def test_a_statement_timeout_makes_the_steps_smaller(in_process, db, old):
    """Nothing of the call that was cancelled is done; smaller ones are."""
    db.execute("""
        create function slow() returns trigger language plpgsql as
          $$ begin perform pg_sleep(0.03); return old; end $$;
        create trigger slow before delete on pgreaper.claims for each row execute function slow();
    """)
    db.execute(f"alter database {db.info.dbname} set statement_timeout = '500ms'")
    result = in_process("prune", "--json")
    assert (result.code, result.json["ended"]) == (0, "done")
    assert result.json["removed"]["claims"] == 25
    assert result.json["calls"] > 1


SLOW = """
    create function slow() returns trigger language plpgsql as $$ begin perform pg_sleep(0.05); return old; end $$;
    create trigger slow before delete on pgreaper.claims for each row execute function slow();
"""


def test_c084_killed_in_the_middle_the_next_run_goes_on(in_process, start, wait_until, db, old):
    """SIGKILL between two calls, or in one: what was committed is gone, the rest is there, and all adds up."""
    db.execute(SLOW)
    pruning = start("prune", "--max-rows", "2")
    wait_until("select count(*) between 3 and 20 from pgreaper.claims")
    pruning.popen.kill()
    pruning.end()
    wait_until("select not exists (select from pg_stat_activity where application_name = 'pgreaper/prune'"
               " and datname = current_database())")  # fmt: skip
    left = db.execute(BOOKS).fetchone()
    assert 0 < left[0] < 25
    assert left[0] <= left[1]
    holds_true(db)
    assert in_process("prune", "--json").json["removed"]["claims"] == left[0]
    assert db.execute(BOOKS).fetchone() == (0, 0, 0)
    holds_true(db)


def test_c088_ctrl_c_keeps_what_was_done(start, wait_until, db, old):
    """The statement in hand is cancelled, the summary says what went, 130."""
    db.execute(SLOW)
    pruning = start("prune", "--max-rows", "5", "--json")
    wait_until("select count(*) < 25 from pgreaper.claims")
    pruning.popen.send_signal(signal.SIGINT)
    result, _ = pruning.end()
    assert (result.code, result.err, result.json["ended"]) == (130, "", "interrupted")
    left = db.execute(BOOKS).fetchone()
    assert 0 < left[0] < 25
    assert 25 - left[0] - result.json["removed"]["claims"] in (0, 5)  # the reply of the last call may be lost
    holds_true(db)


def test_what_somebody_has_locked_is_left(in_process, db, old, connect):
    """Prune does not wait for it, and does not loop either."""
    other = connect(autocommit=False)
    other.execute("select from pgreaper.claims order by claimed_at limit 3 for update")
    assert in_process("prune", "--json").json["removed"] == {"claims": 22, "transitions": 22, "events": 23}
    other.rollback()
    assert in_process("prune", "--json").json["removed"] == {"claims": 3, "transitions": 3, "events": 3}


def test_a_table_that_is_locked(in_process, db, old, connect):
    """75: somebody else is at it, try later; nothing was done."""
    other = connect(autocommit=False)
    other.execute("lock table pgreaper.claims in access exclusive mode")
    result = in_process("prune")
    other.rollback()
    assert (result.code, result.out) == (75, "")
    assert "the database was busy" in result.err
    assert db.execute(BOOKS).fetchone() == (25, 25, 25)


def test_c084_beside_workers_and_sweeps(start, in_process, wait_until, db, holds, set_clock):
    """
    Workers and sweeps drain while books that have just been written are pruned: all expires once, all adds up.

    The clock runs five hours a second, so that an hour's books are old while their claims' neighbours are at work.
    """
    db.execute(
        "create or replace function pgreaper._clock() returns timestamptz language sql as"
        f" $$ select clock_timestamp() + 18000 * (clock_timestamp() - '{db.execute('select now()').fetchone()[0]}') $$"
    )
    holds.connection.execute(
        "insert into holds (expires_at) select now() - interval '1 hour' from generate_series(1, 6000)"
    )
    holds.register(batch=20, lease="1 day")
    workers = [start("work", "--batch", "20") for _ in range(2)]
    removed = {"claims": 0, "transitions": 0, "events": 0}

    def prune() -> None:
        result = in_process("prune", "--keep", "1 hour", "--keep-claims", "1 hour", "--max-rows", "7", "--json")
        assert (result.code, result.json["ended"]) == (0, "done")
        for kind, n in result.json["removed"].items():
            removed[kind] += n

    while any(worker.popen.poll() is None for worker in workers):
        prune()
        db.execute("call pgreaper.reaper_sweep('holds', 20, 40)")
    for worker in workers:
        result, _ = worker.end()
        assert (result.code, result.err) == (0, "")
    held = db.execute("select count(*) filter (where status = 'expired'), count(*) from holds").fetchone()
    assert held == (6000, 6000)
    assert removed["claims"] > 0
    assert removed["transitions"] > 0
    holds_true(db)
    assert db.execute("select expired from pgreaper.status").fetchone() == (6000,)
    assert in_process("verify").code == 0


def test_c084_empty_runs_leave_nothing_behind(db, holds):
    """However many: no row in any table of pgreaper's, and no transaction id."""
    holds.ahead(10)
    holds.register()
    tables = [name for (name,) in db.execute(
        "select relname from pg_class where relnamespace = 'pgreaper'::regnamespace and relkind = 'r'")]  # fmt: skip
    sizes = "select " + ", ".join(f"(select count(*) from pgreaper.{name})" for name in sorted(tables))
    before = db.execute(sizes).fetchone()
    ((horizon,),) = db.execute("select pg_snapshot_xmax(pg_current_snapshot())::text").fetchall()
    for _ in range(300):
        db.execute("select * from pgreaper.reaper_claim('holds')")
        db.execute("call pgreaper.reaper_sweep()")
    assert db.execute(sizes).fetchone() == before
    assert len(before) >= 8
    # Other tests share the server, so only what is in the tables' pages is asked.
    written = db.execute(
        "select count(*) from pgreaper.cursors where xmin::text::bigint >= %s", [int(horizon) % 2**32]
    ).fetchone()
    assert written == (0,)


def test_c084_large_books_are_pruned_in_steps(in_process, db, holds):
    """9,000 events, 3,000 transitions and claims; 500 dead letters and the counters stay."""
    holds.register()
    db.execute("""
        insert into pgreaper.claims (policy_id, first_deadline, last_deadline, holds, attempt, claimed_at, claim_until,
                                     finished_at, ending, expired)
        select policy_id, at, at, 1, 1, at, at, at, 'expired', 1
          from pgreaper.policies, generate_series(1, 3000) as g,
               lateral (select now() - interval '100 days' + g * interval '1 s' as at) as t;
        insert into pgreaper.transitions (policy_id, token, at, holds, keys, deadlines, first_deadline, last_deadline,
                                          lateness)
        select policy_id, token, finished_at, 1, array[token::text], array[finished_at], finished_at, finished_at, '{}'
          from pgreaper.claims;
        insert into pgreaper.events (policy_id, kind, key, at)
        select policy_id, 'not-eligible', g::text, now() - interval '100 days'
          from pgreaper.policies, generate_series(1, 9000) as g;
        insert into pgreaper.failures (policy_id, key, deadline, attempts, first_seen_at, failed_at, not_before,
                                       error_class)
        select policy_id, 'd' || g, old, 1, old, old, 'infinity', 'X'
          from pgreaper.policies, generate_series(1, 500) as g,
               lateral (select now() - interval '400 days' as old) as o;
    """)
    before = db.execute("select expired, not_eligible, dead from pgreaper.status").fetchone()
    result = in_process("prune", "--json")
    assert result.json["removed"] == {"claims": 3000, "transitions": 3000, "events": 9000}
    assert result.json["calls"] == 5
    assert db.execute("select expired, not_eligible, dead from pgreaper.status").fetchone() == before
    assert before[2] == 500


def test_c088_a_first_run_against_a_backlog(in_process, start, wait_until, db, holds):
    """Preview counts to a bound, --max-rows takes a part, Ctrl-C keeps what is done, no statement_timeout stops it."""
    holds.due(20_000, overdue="10 hours")
    holds.register(batch=200)
    db.execute(f"alter database {db.info.dbname} set statement_timeout = '5s'")
    preview = in_process("preview", "holds", "--json").json
    assert (preview["due"], preview["due_capped"]) == (10_000, True)
    assert db.execute("select count(*) from holds where status = 'expired'").fetchone() == (0,)
    assert in_process("work", "--max-rows", "3000").code == 0
    assert db.execute("select count(*) from holds where status = 'expired'").fetchone() == (3000,)
    db.execute("""
        create function slow() returns trigger language plpgsql as $$ begin perform pg_sleep(0.02); return null; end $$;
        create trigger slow after update on holds execute function slow();
    """)
    working = start("work")
    wait_until("select count(*) >= 4000 from holds where status = 'expired'")
    working.popen.send_signal(signal.SIGINT)
    result, _ = working.end()
    ((expired,),) = db.execute("select count(*) from holds where status = 'expired'").fetchall()
    assert result.code == 0
    assert 4000 <= expired < 20_000
    assert db.execute("select sum(holds) from pgreaper.transitions").fetchone() == (expired,)
    assert db.execute("select count(*) from pgreaper.claims where finished_at is null").fetchone() == (0,)


def test_c113_the_fields_are_a_contract(in_process, old):
    run = in_process("prune", "--json").json
    assert set(run) == set("schema_version command dry_run ended seconds calls removed policies".split())
    dry = in_process("prune", "--dry-run", "--json").json
    assert set(dry) == set("schema_version command dry_run policies".split())

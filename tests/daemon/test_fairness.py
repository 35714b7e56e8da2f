"""Several policies in one daemon: what ails one of them costs the others a batch of it, and no more."""

from __future__ import annotations

import signal
from typing import Any

import pytest


def expired(db: Any, table: str) -> int:
    ((n,),) = db.execute(f"select count(*) from {table} where status = 'expired'").fetchall()
    return int(n)


def test_a_slow_policy_delays_the_others_by_one_batch(db, holds, others, start, wait_until):
    """Twenty batches of half a second are due: a hold of the other policy waits for the one that is under way."""
    db.execute("""
        create function slow() returns trigger language plpgsql as $$ begin perform pg_sleep(0.5); return new; end $$;
        create trigger slow before update on holds for each row execute function slow();
    """)
    holds.due(20)
    holds.register(batch=1)
    others()
    db.execute("insert into others (expires_at) values (clock_timestamp() + interval '2 seconds')")
    start("work", "--daemon", "--poll", "600")
    wait_until("select clock_timestamp() >= expires_at from others")
    before = expired(db, "holds")

    wait_until("select status = 'expired' from others")

    assert expired(db, "holds") - before <= 2


def test_batches_that_take_long_become_smaller(db, holds, work):
    """Two hundred holds in a batch at 25 ms each would keep everybody for five seconds: the next ones are shorter."""
    db.execute("""
        create function slow() returns trigger language plpgsql as $$ begin perform pg_sleep(0.025); return new; end $$;
        create trigger slow before update on holds for each row execute function slow();
    """)
    holds.due(150)
    holds.register(batch=80)

    work()

    sizes = [n for (n,) in db.execute("select holds from pgreaper.claims order by claimed_at").fetchall()]
    assert sizes[0] == 80
    assert 10 <= sizes[1] < 45
    assert set(holds.states().values()) == {"expired"}


def test_a_locked_table_keeps_nobody_waiting(db, connect, holds, others, work, monkeypatch):
    """ACCESS EXCLUSIVE on one table: the daemon never sleeps in place of serving the other policy."""
    slept: list[float] = []
    monkeypatch.setattr("pgreaper.worker.time.sleep", slept.append)
    holds.due(5)
    holds.register()
    others()
    db.execute("insert into others (expires_at) select now() + g * interval '50 ms' from generate_series(1, 40) as g")
    application = connect(autocommit=False)
    application.execute("lock table holds in access exclusive mode")

    run, lines = work(daemon=True, poll=0.5, max_seconds=3.5)

    assert slept == []
    assert expired(db, "others") == 40
    assert run.policies["holds"].claims == 0
    assert len(lines) <= 4, lines
    application.rollback()
    work()
    assert expired(db, "holds") == 5
    assert db.execute("select count(*) from pgreaper.failures").fetchone() == (0,)


def test_a_dropped_table_is_told_and_keeps_nobody_waiting(db, holds, others, start, wait_until):
    """The other policy's holds expire when they are due; the table comes back, and its holds expire as well."""
    others()
    holds.register()
    db.execute("alter table holds rename to away")
    daemon = start("work", "--daemon", "--poll", "0.5")
    assert " is up, 2 policies" in daemon.popen.stderr.readline()
    assert "public.holds, the target of policy holds, does not exist; trying again in" in daemon.popen.stderr.readline()

    db.execute("insert into others (expires_at) select now() + g * interval '100 ms' from generate_series(1, 10) as g")
    wait_until("select count(*) = 10 from others where status = 'expired'")
    db.execute("alter table away rename to holds")
    holds.due(1)

    wait_until("select status = 'expired' from holds")


def test_a_policy_under_a_rate_limit_keeps_nobody_waiting(db, holds, others, start, wait_until):
    """A hundred are due at two a second; the other policy's holds expire meanwhile, and the limit holds."""
    holds.due(100)
    holds.register(rate_limit=2)
    others()
    db.execute("insert into others (expires_at) select now() + g * interval '100 ms' from generate_series(1, 20) as g")
    start("work", "--daemon", "--poll", "600")

    wait_until("select count(*) = 20 from others where status = 'expired'")

    assert 1 <= expired(db, "holds") <= 50


def test_a_suspended_policy_keeps_nobody_waiting(db, holds, others, start, wait_until):
    """All its holds fail alike: it rests, the other policy's hold expires when due, and the rest ends by itself."""
    others()
    db.execute("alter table holds add constraint never_expired check (status <> 'expired')")
    holds.due(20)
    holds.register()
    db.execute("insert into others (expires_at) values (clock_timestamp() + interval '1500 ms')")
    daemon = start("work", "--daemon", "--poll", "600")
    daemon.popen.stderr.readline()
    assert "is suspended, no hold is charged" in daemon.popen.stderr.readline()

    wait_until("select status = 'expired' from others")
    db.execute("alter table holds drop constraint never_expired")

    wait_until("select count(*) = 20 from holds where status = 'expired'")


def test_a_policy_that_cannot_be_looked_at_keeps_nobody_waiting(db, holds, others, start, wait_until):
    """Its view takes longer than the statement timeout: the question for both fails, and each is asked alone."""
    db.execute("""
        create function dull(holds) returns boolean language plpgsql as $$
          begin perform pg_sleep(1); return true; end $$;
        create view dull_holds as select id, status, expires_at from holds where dull(holds);
    """)
    holds.due(5)
    holds.register("dull", target="dull_holds", key_columns=["id"])
    others()
    db.execute(f"alter database {db.info.dbname} set statement_timeout = '500ms'")
    daemon = start("work", "--daemon", "--poll", "0.5")
    wait_until("select exists (select from pg_stat_activity where application_name like 'pgreaper/%')")

    db.execute("insert into others (expires_at) values (now() + interval '1 second')")

    wait_until("select status = 'expired' from others")
    daemon.popen.send_signal(signal.SIGTERM)
    result, _ = daemon.end()
    assert "policy dull: cannot look ahead" in result.err
    assert "policy others" not in result.err


@pytest.mark.parametrize("number", [30])
def test_many_policies_are_one_question(db, holds, start, wait_until, number):
    """Thirty policies, each with a hold that is due soon: all of them expire without a poll."""
    holds.ahead(1, within="1 second")
    for n in range(number):
        db.execute(f"create table t{n} (like holds including all)")
        db.execute(f"insert into t{n} (expires_at) values (now() + interval '{1 + n / 15} s')")
        holds.register(f"p{n}", target=f"t{n}")
    start("work", "--daemon", "--poll", "600")

    wait_until(f"select sum(cardinality(keys)) = {number} from pgreaper.transitions")

"""The fixtures do what the other tests trust them with."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta

import psycopg
import pytest


def test_an_empty_database_has_no_pgreaper_until_it_is_installed(empty_dsn, install):
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        installed = "select to_regnamespace('pgreaper') is not null"
        assert connection.execute(installed).fetchone() == (False,)
        install(empty_dsn)
        assert connection.execute(installed).fetchone() == (True,)


def test_holds_are_due_or_ahead_and_can_be_registered(holds):
    due = holds.due(3)
    ahead = holds.ahead(2)
    holds.register()
    found = holds.connection.execute("select id from holds where expires_at <= clock_timestamp() order by id")
    assert [row[0] for row in found] == due
    assert list(holds.states()) == due + ahead
    assert set(holds.states().values()) == {"held"}
    assert holds.connection.execute("select name from pgreaper.policies").fetchall() == [("holds",)]


def test_the_clock_stands_runs_and_comes_back(db, set_clock):
    def hours_ahead() -> int:
        difference = "extract(epoch from pgreaper._clock() - clock_timestamp()) / 3600"
        return int(db.execute(f"select round({difference})").fetchone()[0])

    with db.transaction(force_rollback=True):
        for moment in (datetime(2030, 1, 1, tzinfo=UTC), "2030-01-01T00:00Z"):
            set_clock(moment)
            assert db.execute("select pgreaper._clock() = '2030-01-01Z'").fetchone() == (True,)
        set_clock(timedelta(days=-1))
        assert hours_ahead() == -24
    assert hours_ahead() == 0


def test_waiting_for_a_lock_ends_when_there_is_one_and_only_then(connect, holds, wait_for_lock):
    holds.due(1)
    first, second = connect(autocommit=False), connect()
    with pytest.raises(pytest.fail.Exception, match="does not wait for a lock"):
        wait_for_lock(second.info.backend_pid, seconds=0.05)
    first.execute("select from holds for update")
    blocked = threading.Thread(target=second.execute, args=("update holds set status = 'consumed'",))
    blocked.start()
    wait_for_lock(second.info.backend_pid)
    first.rollback()
    blocked.join()
    assert holds.states() == {1: "consumed"}

"""The sweep commits, so it must be called alone: whoever does not is told how."""

from __future__ import annotations

import psycopg
import pytest


@pytest.fixture(autouse=True)
def _due(db, holds):
    holds.due(3)
    holds.register()
    db.execute("""
        create procedure around() language plpgsql as $$
          declare n bigint; begin call pgreaper.reaper_sweep(expired => n); end $$;
        create procedure pinned() language plpgsql set search_path = public as $$
          declare n bigint; begin call pgreaper.reaper_sweep(expired => n); end $$;
        create procedure definer() language plpgsql security definer as $$
          declare n bigint; begin call pgreaper.reaper_sweep(expired => n); end $$;
        create function a_function() returns bigint language plpgsql as $$
          declare n bigint; begin call pgreaper.reaper_sweep(expired => n); return n; end $$;
        """)


@pytest.mark.parametrize(
    "statement",
    [
        "select 1; call pgreaper.reaper_sweep()",
        "call pgreaper.reaper_sweep(); select 1",
        "call pgreaper.reaper_sweep(); call pgreaper.reaper_sweep()",
        "set search_path = public; call pgreaper.reaper_sweep()",
        "begin; call pgreaper.reaper_sweep(); commit",
        "select a_function()",
        "call pinned()",
        "call definer()",
    ],
)
def test_c082_not_the_only_statement(db, holds, statement):
    """What cannot commit is refused by name and with the remedy, nothing is expired, and the session goes on."""
    with pytest.raises(psycopg.Error, match="must be the only statement and outside a transaction") as caught:
        db.execute(statement)
    assert caught.value.sqlstate == "2D000"
    assert "exactly one statement: call pgreaper.reaper_sweep()" in (caught.value.diag.message_hint or "")
    if db.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
        db.execute("rollback")
    assert set(holds.states().values()) == {"held"}
    db.execute("call pgreaper.reaper_sweep()")
    assert set(holds.states().values()) == {"expired"}


@pytest.mark.parametrize("parameters", [None, ["holds"]])
def test_c082_psycopg_begins_a_transaction_by_itself(connect, holds, parameters):
    """Its default is not autocommit: the same message, whichever protocol it speaks."""
    connection = connect(autocommit=False)
    with pytest.raises(psycopg.Error, match="must be the only statement") as caught:
        connection.execute(f"call pgreaper.reaper_sweep({'%s' if parameters else ''})", parameters)
    assert "autocommit on" in (caught.value.diag.message_hint or "")
    connection.rollback()
    connection.autocommit = True
    connection.execute(f"call pgreaper.reaper_sweep({'%s' if parameters else ''})", parameters)
    assert set(holds.states().values()) == {"expired"}


def test_c082_select_instead_of_call(db):
    """Postgres' own words say it: a procedure, use CALL."""
    with pytest.raises(psycopg.Error, match="is a procedure") as caught:
        db.execute("select pgreaper.reaper_sweep()")
    assert caught.value.diag.message_hint == "To call a procedure, use CALL."


@pytest.mark.parametrize(
    "statement", ["call around()", "do $$ declare n bigint; begin call pgreaper.reaper_sweep(expired => n); end $$"]
)
def test_c082_a_procedure_of_the_users_own_may_call_it(db, holds, statement):
    """What may commit is not refused: a procedure or DO block that is called alone."""
    db.execute(statement)
    assert set(holds.states().values()) == {"expired"}

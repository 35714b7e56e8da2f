"""C016: the guard needs READ COMMITTED; whatever the role's default is, nothing is done under anything else."""

from collections.abc import Callable

import psycopg
import pytest

from tests.concurrency.sessions import Connect, Connection, Session, rows
from tests.conftest import Holds

LEVELS = ["repeatable read", "serializable"]
CALLS = [
    "reaper_claim('holds')",
    "reaper_expire('{token}')",
    "reaper_renew('{token}')",
    "reaper_release('{token}')",
]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("call", CALLS)
def test_c016_functions_refuse_other_levels(db: Connection, witnessed: Holds, connect: Connect, level: str, call: str):
    """RP004, with the remedy, and nothing happened."""
    witnessed.register()
    witnessed.due(3)
    token = rows(db, "select * from pgreaper.reaper_claim('holds', batch => 2)")[0]["token"]
    strict = connect(options=f"-c default_transaction_isolation={level.replace(' ', chr(92) + ' ')}")
    before = rows(db, "select * from pgreaper.claims")

    with pytest.raises(psycopg.Error, match="READ COMMITTED") as refused:
        strict.execute(f"select * from pgreaper.{call.format(token=token)}")

    assert refused.value.sqlstate == "RP004"
    assert level.upper() in str(refused.value)
    assert "ISOLATION LEVEL READ COMMITTED" in (refused.value.diag.message_hint or "")
    assert rows(db, "select * from pgreaper.claims") == before
    assert set(witnessed.states().values()) == {"held"}


@pytest.mark.parametrize("level", LEVELS)
def test_c016_the_sweep_works_whatever_the_default(
    db: Connection, witnessed: Holds, session: Callable[..., Session], level: str
):
    """Two sweeps under a strict default, an application that consumes every third hold: one final state each."""
    witnessed.register()
    witnessed.due(300)
    db.execute(f"alter database \"{db.info.dbname}\" set default_transaction_isolation = '{level}'")
    one, two, application = session(), session(), session()
    assert one.run("show transaction_isolation") == [{"transaction_isolation": level}]

    sweep = "call pgreaper.reaper_sweep('holds', batch => 20)"
    answers = [each.start(sweep) for each in (one, two)]
    consumed: set[int] = set()
    for id_ in range(3, 301, 3):
        statement = "update holds set status = 'consumed' where id = %s and status = 'held' returning id"
        try:
            consumed |= {row["id"] for row in application.run(statement, id_)}
        except psycopg.errors.SerializationFailure:
            continue  # the application's own level; its business
    swept = sum(answer.result(timeout=30)[0]["expired"] for answer in answers)
    swept += rows(db, "call pgreaper.reaper_sweep('holds')")[0]["expired"]

    assert swept == 300 - len(consumed)
    assert witnessed.states() == dict.fromkeys(range(1, 301), "expired") | dict.fromkeys(consumed, "consumed")
    assert rows(db, "select * from pgreaper.failures") == []
    db.execute(f'alter database "{db.info.dbname}" reset default_transaction_isolation')


def test_c016_a_strict_default_is_overridden_by_the_transaction(db: Connection, witnessed: Holds, connect: Connect):
    """The hint helps: the same role works inside a transaction that says READ COMMITTED."""
    witnessed.register()
    witnessed.due(3)
    strict = connect(options="-c default_transaction_isolation=serializable")

    strict.execute("begin isolation level read committed")
    token = rows(strict, "select * from pgreaper.reaper_claim('holds')")[0]["token"]
    rows(strict, "select pgreaper.reaper_expire(%s)", token)
    strict.execute("commit")

    assert set(witnessed.states().values()) == {"expired"}

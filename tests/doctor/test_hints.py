"""What a refused role is told: the kind of role that it would have to be, and that this is so."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import psycopg
import pytest

from pgreaper.api import Reaper
from pgreaper.errors import AccessDenied
from pgreaper.rights import LEAST, OWNERS, needed

if TYPE_CHECKING:
    from psycopg import Connection

KINDS = ("reader", "worker", "operator", "registrar", "application")


def test_the_kinds_are_those_that_sql_knows(db: Connection) -> None:
    """Of each public function the first kind that may call it; a new function is missed here."""
    rows = db.execute("select name, array_agg(kind) from pgreaper._rights() where name like 'reaper%' group by 1")
    found = {name: next(k for k in KINDS if k in kinds) for name, kinds in rows if kinds != [None]}
    table = {name: kind for name, kind in LEAST.items() if name not in OWNERS and name.startswith("reaper_")}
    assert {name: kind for name, kind in found.items() if name not in OWNERS} == table
    unread = db.execute(
        "select name from pgreaper._rights() where object = 'table' and privilege = 'select' group by 1"
        " having not 'reader' = any (array_agg(kind))"
    ).fetchall()
    assert [f"pgreaper.{name}" for (name,) in unread] == [name for name in LEAST if name.startswith("pgreaper.")]


@pytest.mark.parametrize(
    ("kind", "command", "wanted"),
    [
        # That there is nothing to see comes first.
        (None, "status", "reader"),
        (None, "work", "reader worker"),
        ("reader", "preview holds", "worker"),
        ("reader", "work", "worker"),
        ("reader", "pause holds", "operator"),
        ("worker", "verify", "operator"),
        ("worker", "pause holds", "operator"),
        ("worker", "resume holds", "operator"),
        ("worker", "prune", "operator"),
        ("worker", "dead replay holds --all --reason x", "operator"),
        ("registrar", "work", "worker"),
        ("registrar", "pause holds", "operator"),
        ("worker", "unregister holds", "registrar"),
    ],
)
def test_c061_the_kind_that_is_needed_is_named_and_is_enough(holds, db, worker, run, kind, command, wanted):
    """Pasted as it stands, by the owner, it makes the refused command work."""
    role, url = worker
    holds.register()
    if kind:
        db.execute("select pgreaper.reaper_grant(%s, %s)", [role, kind])
    told = []
    for _ in range(len(wanted.split()) + 1):
        result = run(*command.split(), url=url)
        hint = re.search(rf"`pgreaper (grant {role} --as (\w+))`", result.err)
        if hint is None:
            break
        told.append(hint[2])
        assert (result.code, run(*hint[1].split()).code) == (1, 0)
    assert told == wanted.split()
    assert result.code == 0 or "does not own public.holds" in result.err


def test_what_no_kind_may_do_is_left_to_the_owner(holds, db, worker, run):
    role, url = worker
    db.execute("select pgreaper.reaper_grant(%s, 'worker')", [role])
    refused = run("grant", role, "--as", "operator", url=url)
    assert (refused.code, "Let the owner of pgreaper do it." in refused.err) == (1, True)


def test_a_right_that_no_grant_of_ours_gives_is_not_promised(holds, db, worker):
    """The schema of somebody's table is closed to whoever registers it; a trigger says what it likes."""
    role, url = worker
    db.execute("create schema shop; create table shop.carts (like holds including all)")
    db.execute("select pgreaper.reaper_grant(%s, 'registrar')", [role])
    with psycopg.connect(url, autocommit=True) as connection, pytest.raises(AccessDenied) as refused:
        Reaper(connection).register(
            "carts", "shop.carts", deadline_column="expires_at", status_column="status", held=["held"],
            expired="expired", owner="x",
        )  # fmt: skip
    assert "shop" in refused.value.message
    assert "pgreaper grant" not in (refused.value.hint or "")


def test_of_several_functions_the_most_demanding_counts():
    assert needed("select pgreaper.reaper_preview(x) from pgreaper.reaper_verify(y)") == "operator"
    assert needed("select * from pgreaper.status") == "reader"
    assert needed("select * from pgreaper.reaper_grant(x)") is None

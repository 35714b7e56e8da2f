"""The doctor through a pooler: it notices it, works all the same, and leaves nothing behind for the next client."""

from __future__ import annotations

import psycopg

from pgreaper.discover import discover
from pgreaper.doctor import examine


def test_c066_a_look_through_a_pooler(holds, connect, direct):
    """One note; without a pooler none; of the settings that a look makes none stays."""
    holds.register()
    settings = "select name, setting from pg_settings where name !~ 'plpgsql|application_name' order by name"
    session = connect()
    before = session.execute(settings).fetchall()
    assert [(f.code, f.level) for f in examine(session).findings if f.code == "pooler"] == [("pooler", "note")]
    assert discover(session).tables == 1
    assert session.execute(settings).fetchall() == before
    with psycopg.connect(direct, autocommit=True) as past:
        assert [f for f in examine(past).findings if f.code == "pooler"] == []

"""`pgreaper preview`: what a run would meet now, and why it would take nothing."""

from __future__ import annotations

import re

import psycopg


def test_what_is_due_is_told_apart_from_what_is_not(db, holds, in_process):
    """Due is what a run could take; leased, retrying and dead have lines of their own."""
    holds.due(6)
    holds.register()
    claimed = db.execute("select token, key from pgreaper.reaper_claim('holds', 3)").fetchall()
    for (token, key), transient in zip(claimed[:2], (True, False), strict=True):
        db.execute("select outcome from pgreaper.reaper_fail(%s, %s, 'X', %s)", (token, key, transient))
    told = in_process("preview", "holds").out
    assert re.sub(r" since .*", "", told).splitlines()[1:] == [
        "  due                  3, the oldest",
        "  locked by others     0",
        "  leased to workers    3",
        "  waiting for a retry  1",
        "  dead letters         1",
    ]
    document = in_process("preview", "holds", "--json").json
    assert [document[name] for name in ("due", "due_capped", "looked_at")] == [3, False, None]


def test_why_nothing_would_be_taken(db, holds, in_process):
    """A paused policy and a suspended one say so: what is due is not what a run takes."""
    holds.due(12)
    holds.register()
    db.execute("alter table holds add constraint never check (status <> 'expired') not valid")
    assert in_process("work", "holds").code == 1
    assert re.search(r"suspended +every hold fails alike: .*23514", in_process("preview", "holds").out)
    db.execute("select pgreaper.reaper_pause('holds', 'stock-taking')")
    told = in_process("preview", "holds").out
    assert re.search(r"nothing is claimed +paused since .*: stock-taking\n", told)
    assert re.search(r"due +12,", told)


def test_a_table_that_is_locked_names_who_has_it(dsn, holds, in_process):
    """75, with the backend: "busy" alone helps nobody."""
    holds.register()
    with psycopg.connect(dsn) as other:
        other.execute("lock table holds")
        result = in_process("preview", "holds")
        pid = other.info.backend_pid
    assert (result.code, result.out) == (75, "")
    assert f"table public.holds is locked by backend {pid}" in result.err


def test_what_was_looked_for_in_a_part_of_the_table_only(db, holds, in_process):
    """A number of a sample is not told as the number."""
    db.execute("alter table holds alter status drop not null")
    db.execute("insert into holds (status, expires_at) select null, now() from generate_series(1, 100010)")
    db.execute("create view shown as select * from holds")
    holds.register("shown", target="shown", key_columns=["id"])
    line = "not held             100,000 among 100,000 rows that were looked at (the state is NULL)"
    assert line in in_process("preview", "shown").out

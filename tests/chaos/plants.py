"""
Faults for ``--plant``: a run with one of them must end with 1.

Some change a function before the run, as a careless hand might have written it; the others are done to the books
or to the table when the run is over, as a careless hand might have repaired them.
"""

from typing import Any

import psycopg

from tests.concurrency.faults import FAULTS, Fault

BEFORE = {
    "guard-held": FAULTS["guard: held"],
    "guard-due": FAULTS["guard: due"],
    "trail": FAULTS["trail"],
    "no-take-back": Fault("take back", "_lapsed", "return exists", "return false; return exists"),
    "no-bisection": Fault("bisection", "_transition", "if v_from < v_to then", "if false then"),
}
AFTER = {
    "double-trail": """
        insert into pgreaper.transitions
          (policy_id, token, worker, at, state, holds, keys, deadlines, first_deadline, last_deadline, lateness)
        select policy_id, token, worker, at, state, holds, keys, deadlines, first_deadline, last_deadline, lateness
        from pgreaper.transitions order by at desc limit 1""",
    "lost-trail": """
        delete from pgreaper.transitions
        where ctid = (select ctid from pgreaper.transitions order by at desc limit 1)""",
    "forgotten-hold": """
        delete from pgreaper.failures where ctid = (select ctid from pgreaper.failures order by key limit 1)""",
    "resurrection": """
        update holds set status = 'held'
        where id = (select id from holds where status = 'expired' order by id limit 1)""",
}
NAMES = sorted([*BEFORE, *AFTER])


def before(name: str | None, connection: psycopg.Connection[Any]) -> None:
    """Plant the fault if it is one that must be there from the start."""
    if name in BEFORE:
        BEFORE[name].plant(connection)


def after(name: str | None, connection: psycopg.Connection[Any]) -> None:
    """Plant the fault if it is one of the end."""
    if name in AFTER:
        assert connection.execute(AFTER[name]).rowcount == 1, f"there was nothing to plant {name} into"

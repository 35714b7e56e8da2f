"""
Faults to plant into pgreaper's functions, in a test's own database, to see the tests turn red.

Each one breaks a rule that the SQL keeps; a harness that does not notice is no harness.
"""

from dataclasses import dataclass

from tests.concurrency.sessions import Connection


@dataclass(frozen=True)
class Fault:
    """A text of a function and what a careless hand would have written."""

    rule: str
    function: str
    text: str
    instead: str

    def plant(self, connection: Connection) -> None:
        row = connection.execute(
            "select pg_get_functiondef(oid) from pg_proc"
            " where proname = %s and pronamespace = 'pgreaper'::regnamespace",
            (self.function,),
        ).fetchone()
        assert row is not None, f"there is no function {self.function}"
        assert row[0].count(self.text) >= 1, f"{self.function} does not say {self.text!r} any more"
        connection.execute(row[0].replace(self.text, self.instead))


FAULTS = {
    fault.rule: fault
    for fault in (
        Fault("guard: held", "_write", "target.held, target.due,", "'true', target.due,"),
        Fault("guard: due", "_write", "target.held, target.due,", "target.held, 'true',"),
        Fault("skip locked", "_row_lock", " skip locked", ""),
        Fault("trail", "_write", "if done is null then", "if true then"),
        Fault("token", "_lease", "elsif v_claim.finished_at is not null then", "elsif false then"),
        Fault("lease locked", "_lease", "for update", ""),
        Fault("cursor locked", "_claim", "for update", ""),
        Fault("read again", "_claim", "v_locked.moves <> v_cursor.moves", "false"),
        Fault("leased left out", "_due", "(s.key operator(pg_catalog.=) any ($3)) is not true", "true"),
        Fault("take back", "_claim", "perform pgreaper._take_back(v_policy, v_target, v_now);", ""),
        Fault("take back ends the claim", "_take_back", "where c.token = v_claim.token", "where false"),
        Fault("take back skips", "_take_back", "for update skip locked", "for update"),
        Fault("release counts as a move", "_put_back", "c.moves + 1", "c.moves"),
    )
}

"""
Every order in which the steps of two sessions can happen, played on real sessions and judged after each.

A script is a line of words, such as ``begin claim expire commit``; :data:`STEPS` says what each does.  All
interleavings that keep each script's own order are played.  A step that blocks on a lock does not stop the play:
the other session goes on, as PostgreSQL's isolation tester has it, and the blocked one is picked up when its lock
is granted.  After each play the invariants of :mod:`tests.concurrency.books` are checked; then everything that is
left is expired and they are checked again.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

import psycopg

from tests.concurrency import books
from tests.concurrency.sessions import Connect, Connection, Rows, Session, rows

if TYPE_CHECKING:
    from concurrent.futures import Future

# Session-local steps; {token} is the session's own last token.
STEPS = {
    "begin": "begin",
    "commit": "commit",
    "rollback": "rollback",
    # The reaper.
    "claim": "select * from pgreaper.reaper_claim('holds', batch => 2, worker => 'same-name')",
    "rescan": "select * from pgreaper.reaper_claim('holds', batch => 2, worker => 'same-name', rescan => true)",
    "expire": "select * from pgreaper.reaper_expire({token})",
    "release": "select pgreaper.reaper_release({token})",
    "renew": "select pgreaper.reaper_renew({token})",
    "sweep": "call pgreaper.reaper_sweep('holds', batch => 2)",
    # The application; hold 1 is due first.
    "consume": "update holds set status = 'consumed' where id = 1 and status = 'held'",
    "extend": "update holds set expires_at = pgreaper._clock() + interval '1 day' where id = 1 and status = 'held'",
    "delete": "delete from holds where id = 1",
    "rekey": "update holds set id = 101 where id = 1",
    "touch": "update holds set customer_email = 'new@example.com' where id = 1",
    "rehold": "update holds set status = 'held', expires_at = pgreaper._clock() where id = 1 and status <> 'held'",
    "lock": "select from holds where id = 1 for update",
    # Time.
    "lapse": "update clock set ahead = ahead + interval '5 minutes'",
}
FENCED = {"expire", "renew"}
REAPER = {"claim", "rescan", "expire", "release", "renew", "sweep"}

# SQLSTATEs that are an honest answer: the lease is lost; the transaction has failed before.
ANSWERS = {"RP001", "25P02"}


class Violation(AssertionError):
    """An order of steps after which something does not hold."""


def interleavings(left: int, right: int) -> Iterator[str]:
    """All orders of `left` L and `right` R."""
    for places in combinations(range(left + right), left):
        yield "".join("L" if place in places else "R" for place in range(left + right))


class Actor:
    """One session playing its script."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.script: list[str] = []
        self.reaps = False
        self.step = ""
        self.answer: Future[Rows] | None = None
        self.token: str | None = None

    @property
    def over(self) -> bool:
        return self.answer is None and not self.script

    def start(self) -> None:
        self.step = self.script.pop(0)
        statement = STEPS[self.step]
        if "{token}" in statement:
            if self.token is None:  # nothing was claimed, so there is nothing to do
                statement = "select 1 where false"
            statement = statement.format(token=f"'{self.token}'")
        self.answer = self.session.start(statement)

    def finish(self) -> tuple[str, bool]:
        """Take the answer; return it in words, and whether it is an honest one."""
        assert self.answer is not None
        answer, self.answer = self.answer, None
        try:
            said = answer.result()
        except psycopg.Error as error:
            return f"{error.sqlstate} {error}", error.sqlstate in ANSWERS
        if self.step in ("claim", "rescan") and said:
            self.token = str(said[0]["token"])
        if self.step == "expire":
            return " ".join(f"{row['key']}={row['outcome']}" for row in said), True
        return " ".join(row["key"] for row in said if "key" in row), True


@dataclass
class Play:
    """Two sessions on one table of holds, for as many plays as a test wants."""

    admin: Connection
    left: Actor
    right: Actor

    def reset(self) -> None:
        """Three holds, due a minute apart, hold 1 first; empty books."""
        self.admin.execute(
            """
            set application_name = 'application';
            update clock set ahead = '0';
            delete from holds;
            delete from witness;
            delete from pgreaper.claims;
            delete from pgreaper.transitions;
            delete from pgreaper.failures;
            delete from pgreaper.events;
            update pgreaper.cursors set position = null, moves = 0, retried = false;
            insert into holds (id, expires_at)
            overriding system value
            select n, clock_timestamp() - interval '1 hour' + n * interval '1 minute' from generate_series(1, 3) as n;
            set application_name = 'reaper';
            """
        )
        for actor in (self.left, self.right):
            actor.token = None
            actor.session.run(
                "select set_config('application_name', %s, false)", "reaper" if actor.reaps else "application"
            )

    def run(self, left: str, right: str, order: str) -> list[str]:
        """Play one order; return what happened, and raise when something did that may not."""
        self.left.script, self.right.script = left.split(), right.split()
        self.left.reaps, self.right.reaps = (bool(REAPER & set(actor.script)) for actor in (self.left, self.right))
        self.reset()
        log: list[str] = []
        wrong: list[str] = []
        due = {"L": 0, "R": 0}  # steps whose turn has come

        def proceed() -> bool:
            """Take what is answered, start whose turn it is; return whether anything moved."""
            moved = False
            for name, actor in (("L", self.left), ("R", self.right)):
                if actor.answer is not None and actor.session.settle():
                    said, honest = actor.finish()
                    log.append(f"{name}.{actor.step}: {said}".rstrip(": "))
                    if not honest:
                        wrong.append(f"{name}.{actor.step} failed: {said}")
                    wrong.extend(books.violations(self.admin, books.SHARED))
                    if actor.step in FENCED and not said.startswith("RP001") and self.taken_back(actor):
                        wrong.append(f"{name}.{actor.step} was answered although the lease was taken back")
                    moved = True
                if actor.answer is None and due[name]:
                    due[name] -= 1
                    actor.start()
                    moved = True
                    if not actor.session.settle():
                        log.append(f"{name}.{actor.step} waits")
                        other = self.right if actor is self.left else self.left
                        if actor.step in REAPER and not other.reaps:
                            wrong.append(f"{name}.{actor.step} waits for the application")
            return moved

        for name in order:
            due[name] += 1
            while proceed():
                pass
        while not (self.left.over and self.right.over):
            proceed()
        wrong += books.violations(self.admin)
        books.settle(self.admin)
        wrong += books.violations(self.admin) + books.lost(self.admin)
        if wrong:
            raise Violation(f"{left} | {right} as {order}\n  " + "\n  ".join(log) + "\nbut\n  " + "\n  ".join(wrong))
        return log

    def taken_back(self, actor: Actor) -> bool:
        query = "select token from pgreaper.claims where token = %s and ending = 'taken-back'"
        return bool(rows(self.admin, query, actor.token))

    def run_all(self, left: str, right: str) -> list[list[str]]:
        """Play every order of the two scripts."""
        orders = interleavings(len(left.split()), len(right.split()))
        return [self.run(left, right, order) for order in orders]


SET_UP = """
alter table holds alter id set generated by default;  -- so that a step may change a key

create table clock (ahead interval not null);
insert into clock values ('0');
create or replace function pgreaper._clock() returns timestamptz language sql volatile as
$$ select clock_timestamp() + (select ahead from public.clock) $$;

-- A play steps on as soon as a lock is granted; the time that a person would wait is of no interest here.
do $$
declare v_function regprocedure;
begin
  for v_function in select oid from pg_proc
    where pronamespace = 'pgreaper'::regnamespace and proconfig::text like '%lock_timeout%' loop
    execute format('alter function %s set lock_timeout = ''10s''', v_function);
  end loop;
end $$;
"""


def set_up(admin: Connection, connect: Connect) -> Play:
    """Prepare a database with the table of holds and its policy for plays."""
    admin.execute(books.WITNESS)
    admin.execute(SET_UP)
    actors = []
    for _ in "LR":
        # A cycle of locks is a fault: let the server find it before anything else gives way.
        connection = connect(options="-c deadlock_timeout=30ms")
        actors.append(Actor(Session(connection, admin)))
    return Play(admin, *actors)


def close(play: Play) -> None:
    play.left.session.close()
    play.right.session.close()

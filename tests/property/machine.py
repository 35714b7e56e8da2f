"""A hypothesis state machine that plays workers and an application on real connections, beside the model."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import psycopg
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.property.model import BACKOFF, LEASE, MAX_ATTEMPTS, Claim, Hold, LeaseLostError, Model

if TYPE_CHECKING:
    from tests.concurrency.sessions import Connect, Connection

SET_UP = """
create table clock (now timestamptz not null);
insert into clock values ('2040-01-01 00:00Z');
create or replace function pgreaper._clock() returns timestamptz language sql volatile
  as 'select c.now from public.clock as c';
create table holds (
  id integer primary key, status text not null, expires_at timestamptz not null, poison boolean not null default false);
create index on holds (expires_at) where status = 'held';
create function poison() returns trigger language plpgsql as
  $$ begin if new.poison and new.status = 'expired' then raise exception 'poison'; end if; return new; end $$;
create trigger poison before update on holds for each row execute function poison();
select pgreaper.reaper_register('p', 'holds', 'expires_at', 'status', array['held'], 'expired', 'tests',
  lease => '1 minute', max_attempts => 3, permanent_attempts => 1, backoff_base => '2 seconds',
  backoff_cap => '2 seconds', objective => '100 years');
"""
RESET = """
truncate holds, pgreaper.claims, pgreaper.transitions, pgreaper.failures, pgreaper.events;
update pgreaper.cursors set position = null, moves = 0, retried = false, failing_at = null, failing_sqlstate = null,
  suspensions = 0, suspended_until = null;
update pgreaper.policies set paused_at = null, pause_reason = null;
"""
WORKERS = range(3)
KEYS = [str(n) for n in range(1, 7)]
POISON = {"1", "2", "3"}  # few enough that they are never taken for a policy that is broken
keys = st.sampled_from(KEYS)
workers = st.sampled_from(WORKERS)
pick = st.integers(0, 5)
waits = st.sampled_from([0, 0, 6, 70])


class Shop:
    """The database and the connections; they outlive an example."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self.judge = self.connect()
        self.judge.execute(SET_UP)
        self.workers = [self.connect() for _ in WORKERS]
        self.application = self.connect()

    def connect(self) -> Connection:
        """Open a connection on which a statement that does not end is a failure."""
        return self._connect(options="-c statement_timeout=5s")

    def crash(self, worker: int) -> None:
        pid = self.workers[worker].info.backend_pid
        self.judge.execute("select pg_terminate_backend(%s, 10000)", (pid,))
        self.workers[worker].close()
        self.workers[worker] = self.connect()


class Reaping(RuleBasedStateMachine):
    """Rules are what workers and the application do; each compares the answer, each invariant all that is stored."""

    shop: ClassVar[Shop]

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.shop.judge.execute(RESET)
        self.deadlines = 0
        self.sessions = 0
        self.session_of = {worker: self.new_session() for worker in WORKERS}
        self.pending: tuple[str, str] | None = None
        self.tick()
        for key in KEYS:
            self.hold(key, -100, poison=key == "1")

    # Helpers.

    def new_session(self) -> int:
        self.sessions += 1
        self.model.sessions.add(self.sessions)
        return self.sessions

    def tick(self, by: timedelta = timedelta(0)) -> None:
        self.model.now += by + timedelta(milliseconds=1)
        self.shop.judge.execute("update clock set now = %s", (self.model.now,))

    def new_deadline(self, seconds: int) -> datetime:
        self.deadlines += 1
        return self.model.now + timedelta(seconds=seconds, microseconds=self.deadlines)

    def ask(self, worker: int, query: str, *parameters: Any) -> list[tuple[Any, ...]]:
        self.tick()
        return self.shop.workers[worker].execute(query, parameters or None).fetchall()

    def token(self, number: int) -> str | None:
        """One of the active claims, else (and sometimes) one of the latest, over or not."""
        tokens = (number < 4 and list(self.model.active())) or list(self.model.claims)[-6:]
        return tokens[number % len(tokens)] if tokens else None

    def held(self, number: int) -> str | None:
        """A hold that the application may write without waiting for itself, mostly one that is leased."""
        held = sorted(key for key, hold in self.model.holds.items() if hold.status == "held" and not hold.locked)
        held = (number < 4 and [key for key in held if self.model.leased(key)]) or held
        return held[number % len(held)] if held else None

    def free(self, key: str) -> bool:
        """Whether the application may write the row without waiting for itself."""
        return self.pending is None or self.pending[0] != key

    # The application.

    @rule(key=keys, seconds=st.sampled_from([-100, -50, -5, 1, 20, 200]), poison=st.booleans())
    def hold(self, key: str, seconds: int, poison: bool) -> None:
        """Hold it, hold it anew, or extend it: always with another deadline."""
        if not self.free(key):
            return
        deadline, poison = self.new_deadline(seconds), poison and key in POISON
        self.shop.judge.execute(
            "insert into holds values (%s, 'held', %s, %s)"
            " on conflict (id) do update"
            " set status = 'held', expires_at = excluded.expires_at, poison = excluded.poison",
            (int(key), deadline, poison),
        )
        self.model.holds[key] = Hold("held", deadline, poison)

    @rule(number=pick, seconds=st.sampled_from([-50, 20]))
    def extend(self, number: int, seconds: int) -> None:
        if key := self.held(number):
            self.hold(key, seconds, poison=self.model.holds[key].poison)

    @rule(number=pick)
    def consume(self, number: int) -> None:
        if key := self.held(number):
            self.shop.judge.execute("update holds set status = 'consumed' where id = %s", (int(key),))
            self.model.holds[key].status = "consumed"

    @rule(key=keys)
    def heal(self, key: str) -> None:
        if self.free(key) and key in self.model.holds:
            self.shop.judge.execute("update holds set poison = false where id = %s", (int(key),))
            self.model.holds[key].poison = False

    @rule(key=keys)
    def delete(self, key: str) -> None:
        if self.free(key):
            self.shop.judge.execute("delete from holds where id = %s", (int(key),))
            self.model.holds.pop(key, None)

    @precondition(lambda self: self.pending is None)
    @rule(number=pick, what=st.sampled_from(["consumed", "held"]))
    def open_transaction(self, number: int, what: str) -> None:
        """Write a row and leave the transaction open: whoever comes by must go past it."""
        if key := self.held(number):
            self.shop.application.execute("begin")
            self.shop.application.execute("update holds set status = %s where id = %s", (what, int(key)))
            self.model.holds[key].locked = True
            self.pending = key, what

    @precondition(lambda self: self.pending is not None)
    @rule(commit=st.booleans())
    def close_transaction(self, commit: bool) -> None:
        assert self.pending
        key, what = self.pending
        self.shop.application.execute("commit" if commit else "rollback")
        self.model.holds[key].locked = False
        if commit:
            self.model.holds[key].status = what
        self.pending = None

    # Time and accidents.

    @rule(seconds=st.sampled_from([6, 30, 70]))
    def advance(self, seconds: int) -> None:
        self.tick(timedelta(seconds=seconds))

    @rule(worker=workers)
    def crash(self, worker: int) -> None:
        self.shop.crash(worker)
        self.model.sessions.discard(self.session_of[worker])
        self.session_of[worker] = self.new_session()

    @rule(paused=st.sampled_from([True, False, False, False]))
    def pause(self, paused: bool) -> None:
        query = "select pgreaper.reaper_pause('p')" if paused else "select pgreaper.reaper_resume('p')"
        assert self.ask(0, query) == [(paused != self.model.paused,)]
        self.model.paused = paused

    # The workers.

    @rule(worker=workers, batch=st.sampled_from([1, 3, 500]), rescan=st.booleans(), bound=st.booleans(), wait=waits)
    def claim(self, worker: int, batch: int, rescan: bool, bound: bool, wait: int = 0) -> None:
        self.tick(timedelta(seconds=wait))
        found = self.ask(
            worker,
            "select token::text, key, deadline, attempt, claim_until from pgreaper.reaper_claim("
            "'p', batch => %s, rescan => %s, session => %s)",
            batch, rescan, bound,
        )  # fmt: skip
        model = self.model
        if model.paused:
            assert found == [], "a paused policy"
            return
        model.take_back()
        assert found or not (rescan and model.claimable()), f"missed {model.claimable()}"
        taken = {key: deadline for _, key, deadline, _, _ in found}
        assert len(taken) == len(found) <= batch
        for _, key, deadline, attempt, until in found:
            assert model.due(key), f"{key} is not due"
            assert model.holds[key].deadline == deadline
            assert not model.leased_as(key, deadline), f"{key} is leased already"
            failure = model.failure(key)
            assert attempt == (failure.attempts + 1 if failure else 1)
            assert failure is None or model.ready(key), f"{key} is dead, or too early"
            assert until == model.now + LEASE
        if found:
            [token] = {row[0] for row in found}
            assert token not in model.claims
            model.claims[token] = Claim(taken, model.now, model.now + LEASE, self.session_of[worker] if bound else None)

    @rule(worker=workers, other=workers, wait=waits)
    def lose(self, worker: int, other: int, wait: int) -> None:
        """A worker is killed while it has a claim that is bound to its session; another one comes by, twice."""
        self.claim(worker=worker, batch=3, rescan=True, bound=True)
        self.crash(worker=worker)
        self.claim(worker=other, batch=3, rescan=True, bound=False)
        self.claim(worker=other, batch=3, rescan=True, bound=False, wait=wait)

    @rule(worker=workers, number=pick, some=st.one_of(st.none(), st.none(), st.sets(keys)))
    def expire(self, worker: int, number: int, some: set[str] | None) -> None:
        token = self.token(number)
        if token is None:
            return
        claim = self.model.claims[token]
        wanted = None if some is None else sorted(some & set(claim.deadlines))
        call = "select key, outcome from pgreaper.reaper_expire(%s, %s)"
        self.compare(worker, call, [token, wanted], lambda: sorted(self.model.expire(token, wanted).items()))

    @rule(worker=workers, number=st.integers(0, 3), what=st.sampled_from(["extend", "consume"]), some=st.sets(keys))
    def overtaken(self, worker: int, number: int, what: str, some: set[str]) -> None:
        """The application is faster: what was leased is extended or consumed before it is settled, in two calls."""
        self.claim(worker=worker, batch=3, rescan=True, bound=False)
        if what == "extend":
            self.extend(number=number, seconds=20)
        else:
            self.consume(number=number)
        self.expire(worker=worker, number=number, some=some)
        self.expire(worker=worker, number=number, some=None)

    @rule(worker=workers, number=pick, which=pick, kind=st.sampled_from(["transient", "final", "put off", "asked for"]))
    def fail(self, worker: int, number: int, which: int, kind: str) -> None:
        token = self.token(number)
        if token is None:
            return
        deadlines = self.model.claims[token].deadlines
        key = list(deadlines)[which % len(deadlines)]

        def expected() -> list[tuple[Any, ...]]:
            claim, hold = self.model.claim_of(token), self.model.holds.get(key)
            if key in claim.settled:
                pass
            elif (key, deadlines[key]) in self.model.trail or (hold is not None and hold.status == "expired"):
                claim.settled[key] = "already-done"
            elif hold is None or not self.model.due(key) or hold.deadline != deadlines[key]:
                claim.settled[key] = "not-eligible"
            else:
                budget = 1 if kind == "final" else MAX_ATTEMPTS
                ready = self.model.now + timedelta(seconds=40) if kind in ("asked for", "put off") else None
                before = self.model.failures.get(key)
                attempts = before.attempts if before and before.deadline == deadlines[key] else 0
                outcome = self.model.fail(key, deadlines[key], 2**31 if kind == "put off" else budget,
                                          claim.claimed_at, ready)  # fmt: skip
                if kind == "put off" and self.model.failures[key].failed_at == self.model.now:
                    self.model.failures[key].attempts = attempts
                claim.settled[key] = outcome
            return [(claim.settled[key],)]

        self.compare(
            worker,
            "select outcome from pgreaper.reaper_fail(%s, %s, 'TimeoutError', transient => true, final => %s,"
            " charged => %s, retry_in => %s)",
            [token, key, kind == "final", kind != "put off", "40 s" if kind in ("asked for", "put off") else None],
            expected,
        )

    @rule(worker=workers, number=pick)
    def renew(self, worker: int, number: int) -> None:
        token = self.token(number)
        if token is None:
            return

        def expected() -> list[tuple[Any, ...]]:
            claim = self.model.claim_of(token)
            claim.until = max(claim.until, self.model.now + LEASE)
            if claim.session is not None:
                claim.session, claim.lost_at = self.session_of[worker], None
            return [(claim.until,)]

        self.compare(worker, "select pgreaper.reaper_renew(%s)", [token], expected)

    @rule(worker=workers, number=pick)
    def release(self, worker: int, number: int) -> None:
        token = self.token(number)
        if token is None:
            return
        claim = self.model.claims[token]
        given = len(claim.deadlines) - len(claim.settled) if claim.ending is None else 0
        assert self.ask(worker, "select pgreaper.reaper_release(%s)", token) == [(given,)]
        claim.ending = claim.ending or "released"

    @rule(worker=workers, batch=st.sampled_from([1, 500]), wait=waits)
    def sweep(self, worker: int, batch: int, wait: int) -> None:
        self.tick(timedelta(seconds=wait))
        before = len(self.model.trail)
        [(expired,)] = self.ask(worker, "call pgreaper.reaper_sweep('p', batch => %s)", batch)
        if self.model.paused:
            assert expired == 0
            return
        for key in self.model.sweep():
            row = self.shop.judge.execute("select status from holds where id = %s", (int(key),)).fetchone()
            dead = self.shop.judge.execute(
                "select 1 from pgreaper.failures where key = %s and deadline = %s",
                (key, self.model.holds[key].deadline),
            ).fetchone()
            if row == ("expired",) or dead:
                self.model.transition(key, self.model.holds[key].deadline, None)
        assert expired == len(self.model.trail) - before

    # People.

    @rule(key=st.one_of(st.none(), keys))
    def replay(self, key: str | None) -> None:
        found = self.ask(0, "select key, outcome from pgreaper.reaper_replay('p', %s)", key)
        dead = {k for k, (_, is_dead, discarded) in self.model.current_failures().items() if is_dead and not discarded}
        dead &= {key} if key else dead
        assert {k for k, outcome in found if outcome == "replay"} == dead
        for k in dead:
            self.model.failures[k].attempts, self.model.failures[k].ready_at = 0, self.model.now

    @rule(key=st.one_of(st.none(), keys))
    def discard(self, key: str | None) -> None:
        found = {row[0] for row in self.ask(0, "select pgreaper.reaper_discard('p', %s, 'tests')", key)}
        dead = {k for k, (_, is_dead, discarded) in self.model.current_failures().items() if is_dead and not discarded}
        dead &= {key} if key else dead
        assert dead <= found
        for k in dead:
            self.model.failures[k].discarded = True

    def compare(self, worker: int, call: str, arguments: list[Any], expected: Any) -> None:
        """Ask the database and the model; both must give the same answer, or both say that the lease is lost."""
        try:
            found = sorted(self.ask(worker, call, *arguments))
        except psycopg.Error as error:
            if error.sqlstate != "RP001":
                raise
            with pytest.raises(LeaseLostError):
                expected()
        else:
            try:
                answer = expected()
            except LeaseLostError:
                pytest.fail(f"the lease is lost, yet it answers {found}")
            assert found == answer

    # After each step.

    def read(self, query: str) -> list[tuple[Any, ...]]:
        return self.shop.judge.execute(query).fetchall()

    @invariant()
    def rows_are_as_the_model_says(self) -> None:
        found = self.read("select id::text, status, expires_at from holds")
        assert sorted(found) == sorted((key, hold.status, hold.deadline) for key, hold in self.model.holds.items())

    @invariant()
    def once_and_all_of_it_is_in_the_trail(self) -> None:
        found = self.read("select key, deadline from pgreaper.history where outcome = 'expired'")
        assert sorted(found) == sorted(self.model.trail)
        assert len(set(found)) == len(found)

    @invariant()
    def attempts_are_what_was_charged(self) -> None:
        found = self.read("""
            select f.key, f.attempts, f.not_before = 'infinity', f.discarded_at is not null from pgreaper.failures as f
            join holds as h on h.id::text = f.key and h.expires_at = f.deadline and h.status = 'held'""")
        assert {key: tuple(rest) for key, *rest in found} == self.model.current_failures()

    @invariant()
    def leases_are_as_the_model_says(self) -> None:
        found = self.read("select token::text, claim_until from pgreaper.claims where finished_at is null")
        assert dict(found) == {token: claim.until for token, claim in self.model.active().items()}

    @invariant()
    def the_books_verify(self) -> None:
        assert self.read("select invariant, found, example from pgreaper.reaper_verify('p') where not holds") == []

    # At the end.

    def teardown(self) -> None:
        """Nothing is lost: when all leases have lapsed and all retries come due, what is left is dead."""
        try:
            if self.pending:
                self.close_transaction(commit=False)
            self.pause(paused=False)
            for _ in range(100):
                self.tick(LEASE + BACKOFF)
                claims = len(self.model.claims)
                self.claim(worker=0, batch=500, rescan=True, bound=False)
                if len(self.model.claims) > claims:
                    self.expire(worker=0, number=min(len(self.model.claims), 6) - 1, some=None)
                elif not self.model.active() and not any(map(self.model.waits, self.model.holds)):
                    break
            left = {key for key in self.model.holds if self.model.due(key)}
            dead = {key for key, (_, is_dead, _) in self.model.current_failures().items() if is_dead}
            assert left == dead, "lost"
            self.once_and_all_of_it_is_in_the_trail()
            self.rows_are_as_the_model_says()
        finally:
            if self.shop.application.info.transaction_status:
                self.shop.application.execute("rollback")

"""
The play that ``pgreaper demo`` shows: a table, workers, an application, a murder, a proof.

Owns the throw-away server's contents and everything that happens to them.  Nothing is
staged: the workers are ``pgreaper work --daemon`` processes, the application is another
client with plain statements, the victim dies of SIGKILL while it holds a lease, and
:func:`prove` reads its verdict from table, trail and a trigger.  How it looks is the
business of whoever passes ``watch``.
"""

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final, Self

import psycopg
from psycopg.rows import dict_row

from pgreaper.api import Reaper
from pgreaper.embedded import Cluster, ClusterError
from pgreaper.errors import ReaperError
from pgreaper.text import duration, plural

if TYPE_CHECKING:
    from types import TracebackType
    from uuid import UUID

POLICY: Final = "bookings"
VICTIM: Final = 3

# Everything below is seconds.
_DRAIN: Final = 8.0
_KILL_AFTER: Final = 1.5
_KILL_MODESTY: Final = 2.5
_KILL_PATIENCE: Final = 10.0
_LOOK_EVERY: Final = 0.125
_START_PATIENCE: Final = 60.0
_PATIENCE: Final = 60.0


class DemoError(ReaperError):
    """The demo could not be played to its end."""

    code = "demo"


@dataclass(frozen=True, slots=True)
class Plan:
    """How large everything is.  ``lease`` in seconds, ``rate`` in holds per second."""

    holds: int = 100_000
    workers: int = 4
    lease: float = 4.0

    @property
    def ahead(self) -> int:
        """Bookings whose deadline has not come."""
        return self.holds // 5

    @property
    def rate(self) -> int:
        """The policy's rate limit: unthrottled, there would be nothing to watch."""
        return round(self.holds / _DRAIN)

    @property
    def batch(self) -> int:
        """Holds a claim takes: some fifty claims a second."""
        return min(250, max(20, self.rate // 50))


@dataclass(slots=True)
class WorkerScene:
    """One worker as it is now; ``lease_left`` in seconds, negative when the lease has lapsed."""

    number: int
    pid: int
    name: str
    expired: int = 0
    rate: float = 0.0
    leased: int = 0
    lease_left: float | None = None
    killed: bool = False


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened, ``at`` seconds after the start; ``tone``: plain, bad or good."""

    at: float
    text: str
    tone: str = "plain"


@dataclass(slots=True)
class ApplicationScene:
    """What the application did; ``late``: the hold was expired already; ``waits``: seconds that each statement took."""

    paid: int = 0
    extended: int = 0
    late: int = 0
    waits: list[float] = field(default_factory=list)

    @property
    def typical(self) -> float:
        """The median wait, in seconds."""
        return median(self.waits or [0.0])

    @property
    def longest(self) -> float:
        """The longest wait, in seconds."""
        return max(self.waits, default=0.0)


@dataclass(slots=True)
class Scene:
    """What there is to see.  ``step`` tells what is being prepared, and is None once the workers work."""

    plan: Plan
    step: str | None = None
    server: str = ""
    elapsed: float = 0.0
    remaining: int = 0
    rate: float = 0.0
    workers: list[WorkerScene] = field(default_factory=list)
    application: ApplicationScene = field(default_factory=ApplicationScene)
    events: list[Event] = field(default_factory=list)

    def tell(self, text: str, tone: str = "plain") -> None:
        """Add an event that happens now."""
        self.events.append(Event(self.elapsed, text, tone))


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the proof: what is claimed, whether it holds, and the numbers that say so."""

    name: str
    claim: str
    holds: bool
    detail: str
    numbers: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Kept:
    """How to reach and to end a server that was kept; ``psql`` is None when there is none to be found."""

    url: str
    psql: str | None
    stop: str


@dataclass(frozen=True, slots=True)
class Report:
    """What is left of a demo."""

    scene: Scene
    proof: Sequence[Line]
    queries: Sequence[str]
    kept: Kept | None

    @property
    def holds(self) -> bool:
        """Whether every line of the proof does."""
        return all(line.holds for line in self.proof)


# --------------------------------------------------------------------------
# The play


def play(plan: Plan, watch: Callable[[Scene], None], *, keep: bool = False) -> Report:
    """
    Play the demo to its end and return the proof; ``watch`` is called whenever there is something new to see.

    Leaves no process and no folder, however it ends; with ``keep`` the server stays when it ends well.
    Raises ClusterError without PostgreSQL, DemoError when the workers do not come up.
    """
    scene = Scene(plan, step="starting PostgreSQL")
    watch(scene)
    with _nothing_of_libpq(), ExitStack() as stack:
        cluster = stack.enter_context(Cluster(keep=keep))
        scene.server = cluster.version
        scene.step = "installing pgreaper"
        watch(scene)
        _install(cluster.dsn)
        connection = stack.enter_context(_connection(cluster.dsn, "pgreaper demo"))
        # The workers come up while the table is filled; without a policy they wait.
        with _Fleet(plan, cluster) as fleet:
            scene.step = f"filling the table: {plan.holds + plan.ahead:,} bookings"
            watch(scene)
            fill(connection, plan)
            scene.step = "waiting for the workers"
            watch(scene)
            scene.workers = fleet.wait(connection)
            _Director(scene, connection, cluster.dsn, fleet, watch).run()
        scene.step = "proving it"
        watch(scene)
        proof = prove(connection)
        scene.step = None
        watch(scene)
        return Report(scene, proof, _queries(connection), _kept(cluster) if keep else None)


@contextmanager
def _nothing_of_libpq() -> Iterator[None]:
    """Hide the shell's PGSERVICE, PGOPTIONS and the like: they speak of another server."""
    hidden = {name: os.environ.pop(name) for name in list(os.environ) if re.match(r"PG(?!REAPER_)", name)}
    try:
        yield
    finally:
        os.environ.update(hidden)


def _install(dsn: str) -> None:
    from pgreaper import schema  # Alembic, which nothing else here needs

    schema.install(dsn)


def _connection(dsn: str, name: str) -> psycopg.Connection[tuple[Any, ...]]:
    return psycopg.connect(dsn, autocommit=True, application_name=name)


def _kept(cluster: Cluster) -> Kept:
    try:
        psql: str | None = cluster.connect_command
    except ClusterError:
        psql = None
    return Kept(cluster.dsn, psql, cluster.stop_command)


# --------------------------------------------------------------------------
# The table

# `journal` is the application's own record of what it did, written with it.  `changes` is
# kept by a trigger: it sees what happens to the table without knowing of pgreaper.
# `workers` and `kills` are the demo's notes.
_TABLES: Final = """
create table bookings (
  id bigint generated always as identity primary key,
  seat text not null,
  customer text not null,
  status text not null default 'held' check (status in ('held', 'paid', 'expired')),
  booked_at timestamptz not null,
  hold_until timestamptz not null,
  expired_at timestamptz
);

create table journal (
  entry bigint generated always as identity primary key,
  booking bigint not null,
  action text not null check (action in ('paid', 'extended')),
  hold_until timestamptz not null,
  at timestamptz not null default clock_timestamp()
);

create table changes (was text not null, became text not null, bookings bigint not null);

create function count_changes() returns trigger language plpgsql as $$
begin
  insert into changes
  select o.status, n.status, count(*) from old_rows as o join new_rows as n using (id) group by 1, 2;
  return null;
end
$$;

create table workers (number integer primary key, name text not null);
create table kills (token uuid, worker text, keys text[], claimed_at timestamptz, killed_at timestamptz);
"""

_ROWS: Final = """
insert into bookings (seat, customer, booked_at, hold_until)
select 'row ' || g / 40 %% 50 + 1 || ' seat ' || g %% 40 + 1,
       'customer-' || g || '@example.com',
       t.deadline - interval '1 hour',
       t.deadline
  from generate_series(1, %(holds)s + %(ahead)s) as g
 cross join lateral (
   select case when g <= %(holds)s
               then now() - interval '1 second' - (%(holds)s - g) * interval '45 minutes' / %(holds)s
               else now() + interval '30 minutes' + (g - %(holds)s) * interval '30 minutes' / %(ahead)s
          end as deadline
 ) as t
"""

_AFTERWARDS: Final = """
create index bookings_due on bookings (hold_until) where status = 'held';

create trigger count_changes after update on bookings
  referencing old table as old_rows new table as new_rows
  for each statement execute function count_changes();
"""


def fill(connection: psycopg.Connection[Any], plan: Plan) -> None:
    """Create the tables; afterwards ``plan.holds`` bookings are overdue and ``plan.ahead`` are not."""
    connection.execute(_TABLES)
    connection.execute(_ROWS, {"holds": plan.holds, "ahead": plan.ahead})
    connection.execute(_AFTERWARDS)
    connection.execute("vacuum analyze bookings")


def register(connection: psycopg.Connection[Any], plan: Plan) -> None:
    """Register the policy; from here on the workers expire."""
    Reaper(connection).register(
        POLICY,
        "bookings",
        deadline_column="hold_until",
        status_column="status",
        held=["held"],
        expired="expired",
        stamp_column="expired_at",
        owner="box-office",
        lease=f"{plan.lease} seconds",
        batch=plan.batch,
        rate_limit=plan.rate,
        backoff_base="250 ms",
    )


# --------------------------------------------------------------------------
# The application

# The guard is the state: whoever changes a held row first wins, the other finds no row.
_PAY: Final = """
with changed as (
  update bookings set status = 'paid'
   where id = %s and status = 'held'
  returning id, hold_until
)
insert into journal (booking, action, hold_until) select id, 'paid', hold_until from changed
"""

_EXTEND: Final = """
with changed as (
  update bookings set hold_until = now() + interval '1 hour'
   where id = %s and status = 'held'
  returning id, hold_until
)
insert into journal (booking, action, hold_until) select id, 'extended', hold_until from changed
"""


class _Application:
    """Customers who pay for their booking or ask for more time, about a hundred a second, on its own connection."""

    def __init__(self, dsn: str, scene: Scene) -> None:
        self._scene = scene
        self._connection = _connection(dsn, "box office")
        self._served: set[int] = set()
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name="application")
        self.error: psycopg.Error | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: "TracebackType | None"
    ) -> None:
        self.stop()
        self._connection.close()

    def stop(self) -> None:
        """Serve nobody any more."""
        self._over.set()
        self._thread.join()

    def pay(self, booking: int) -> bool:
        """Let a customer pay; False when the hold has expired."""
        return self._act(_PAY, booking)

    def extend(self, booking: int) -> bool:
        """Give a customer more time; False when the hold has expired."""
        return self._act(_EXTEND, booking)

    def _act(self, statement: str, booking: int) -> bool:
        with self._lock:
            self._served.add(booking)
            began = time.monotonic()
            found = self._connection.execute(statement, (booking,)).rowcount == 1
            done = self._scene.application
            done.waits.append(time.monotonic() - began)
            if not found:
                done.late += 1
            elif statement is _PAY:
                done.paid += 1
            else:
                done.extended += 1
            return found

    def _serve(self) -> None:
        try:
            while not self._over.wait(random.uniform(0.002, 0.014)):  # noqa: S311
                booking = self._somebody()
                if booking not in self._served:
                    (self.pay if random.random() < 0.7 else self.extend)(booking)  # noqa: S311
        except psycopg.Error as error:
            self.error = error

    def _somebody(self) -> int:
        """A customer: every other one comes in the last moment, when workers are about to take the hold."""
        plan = self._scene.plan
        front = plan.holds - self._scene.remaining + 1
        if random.random() < 0.5:  # noqa: S311
            return random.randint(front, plan.holds + plan.ahead)  # noqa: S311
        return min(plan.holds, front + round(random.expovariate(20 / plan.holds)))


# --------------------------------------------------------------------------
# The workers

# The workers' parent.  It reads from a pipe that only the demo writes to: a word means that they
# may finish what they have in hand, end of file without a word that the demo was killed.
_KEEPER: Final = """
workers=$1 logs=$2 number=1 pids=
shift 2
while [ "$number" -le "$workers" ]; do
  "$@" </dev/null >"$logs/worker.$number.log" 2>&1 &
  pids="$pids $!"
  number=$((number + 1))
done
echo $pids
if read -r word; then how=TERM; else how=KILL; fi
kill -$how $pids
kill -CONT $pids
wait
"""


class _Fleet:
    """The worker processes, alive inside a ``with`` block: the real command, each with its lines in a log."""

    def __init__(self, plan: Plan, cluster: Cluster) -> None:
        self._logs = cluster.room
        command = [sys.executable, *"-P -m pgreaper work --daemon --poll 0.2 --shutdown-timeout 3".split()]
        self._keeper = subprocess.Popen(
            ["/bin/sh", "-c", _KEEPER, "pgreaper-demo", str(plan.workers), str(self._logs), *command],
            env=os.environ | {"PGREAPER_DATABASE_URL": cluster.dsn},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is our business
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: "TracebackType | None"
    ) -> None:
        self._keeper.communicate("stop\n" if kind is None else "")

    def wait(self, connection: psycopg.Connection[Any]) -> list[WorkerScene]:
        """Wait until all of them are connected."""
        assert self._keeper.stdout is not None  # noqa: S101
        pids = [int(pid) for pid in self._keeper.stdout.readline().split()]
        deadline = time.monotonic() + _START_PATIENCE
        while time.monotonic() < deadline:
            there = {
                int(name.rpartition("/")[2]): name
                for (name,) in connection.execute(
                    "select application_name from pg_stat_activity where application_name like 'pgreaper/%'"
                )
            }
            if there.keys() >= set(pids):
                workers = [WorkerScene(number, pid, there[pid]) for number, pid in enumerate(pids, start=1)]
                connection.cursor().executemany(
                    "insert into workers (number, name) values (%s, %s)", [(w.number, w.name) for w in workers]
                )
                return workers
            if complaint := self._complaint():
                raise DemoError(f"a worker did not start: {complaint}")
            time.sleep(0.05)
        raise DemoError(f"the workers did not start within {duration(_START_PATIENCE)}", hint=self.last_words())

    def last_words(self) -> str:
        """The last line that each worker logged, for when things do not go on."""
        logs = sorted(Path(self._logs).glob("worker.*.log"))
        lines = [log.read_text(errors="replace").splitlines()[-1:] for log in logs]
        return "The workers' last words: " + "; ".join(dict.fromkeys(line[0] for line in lines if line))

    def _complaint(self) -> str | None:
        """The error that a worker left with, if one did."""
        for log in sorted(Path(self._logs).glob("worker.*.log")):
            for line in log.read_text(errors="replace").splitlines():
                if line.startswith("error: "):
                    return line.removeprefix("error: ")
        return None


# --------------------------------------------------------------------------
# The run

_LOOK: Final = """
select w.number,
       (select coalesce(sum(t.holds), 0)::integer from pgreaper.transitions as t where t.worker = w.name),
       coalesce(l.holds, 0)::integer,
       extract(epoch from l.claim_until - clock_timestamp())::float8
  from workers as w
  left join lateral (
    select sum(l.holds) as holds, min(l.claim_until) as claim_until from pgreaper.leases as l where l.worker = w.name
  ) as l on true
 order by w.number
"""

_REMAINING: Final = "select count(*) from bookings where status = 'held' and hold_until <= clock_timestamp()"

# What the victim has in hand, and whether its backend still does something for it.
_CLAIMS: Final = """
select exists (select from pg_stat_activity
                where application_name = %s and state = 'active' and query like '%%reaper_claim%%')
"""
_IN_HAND: Final = """
select a.state = 'idle', l.token, l.holds
  from pg_stat_activity as a
  left join pgreaper.leases as l on l.worker = a.application_name and not l.lapsed
 where a.application_name = %s
"""

_NOTE: Final = """
insert into kills (token, worker, keys, claimed_at, killed_at)
select c.token, c.worker, c.keys, c.claimed_at, clock_timestamp()
  from pgreaper.claims as c
 where c.token = %s and c.finished_at is null and c.claim_until > clock_timestamp()
returning keys
"""

# Whoever takes a lease back claims with the same reading of the clock.
_TAKEN_BACK: Final = """
select c.token, v.number, t.number, extract(epoch from c.finished_at - c.claimed_at)::float8
  from pgreaper.claims as c
  join workers as v on v.name = c.worker
  left join pgreaper.claims as n on n.policy_id = c.policy_id and n.claimed_at = c.finished_at and n.token <> c.token
  left join workers as t on t.name = n.worker
 where c.ending = 'taken-back' and c.token <> all (%s)
 order by c.finished_at
"""

_SETTLED: Final = """
select not exists (
  select from bookings as b where b.id = any (%s::bigint[]) and b.status = 'held' and b.hold_until <= clock_timestamp())
"""

_LAST_EXPIRED: Final = """
select w.number
  from pgreaper.history as h
  join workers as w on w.name = h.worker
 where h.policy = %s and h.outcome = 'expired' and h.key = any (%s)
 order by h.at desc
 limit 1
"""


class _Director:
    """Lets workers and application run, kills one of the workers, and looks on until nothing is left to do."""

    def __init__(
        self,
        scene: Scene,
        connection: psycopg.Connection[Any],
        dsn: str,
        fleet: _Fleet,
        watch: Callable[[Scene], None],
    ) -> None:
        self._scene = scene
        self._connection = connection
        self._dsn = dsn
        self._fleet = fleet
        self._watch = watch
        self._began = 0.0
        self._looks: deque[tuple[float, list[int]]] = deque(maxlen=round(1 / _LOOK_EVERY) + 1)
        self._victims_keys: list[str] | None = None
        self._seen: list[UUID] = []
        self._recovered = False

    def run(self) -> None:
        scene = self._scene
        scene.step = None
        scene.remaining = scene.plan.holds
        register(self._connection, scene.plan)
        self._began = time.monotonic()
        scene.tell(f"{scene.plan.workers} workers begin, and so do the customers")
        with _Application(self._dsn, scene) as application:
            while self._look() and scene.elapsed < _PATIENCE:
                if self._victims_keys is None and scene.elapsed > _KILL_AFTER:
                    if self._kill(scene.workers[VICTIM - 1]):
                        self._visit(application)
                else:
                    time.sleep(_LOOK_EVERY)
            if scene.elapsed >= _PATIENCE:
                scene.tell(f"not done after {duration(_PATIENCE)}. {self._fleet.last_words()}", "bad")
            application.stop()
            if application.error is not None:
                raise DemoError(f"the application failed: {type(application.error).__name__}") from application.error
        self._look()

    def _look(self) -> bool:
        """Read the state of things; whether anything is left to do."""
        scene = self._scene
        scene.elapsed = time.monotonic() - self._began
        rows = self._connection.execute(_LOOK).fetchall()
        ((scene.remaining,),) = self._connection.execute(_REMAINING).fetchall()
        self._looks.append((scene.elapsed, [expired for _, expired, _, _ in rows]))
        then, before = self._looks[0]
        for worker, (_, expired, leased, left), was in zip(scene.workers, rows, before, strict=True):
            worker.expired, worker.leased, worker.lease_left = expired, leased, left
            worker.rate = (expired - was) / (scene.elapsed - then) if scene.elapsed > then else 0.0
        scene.rate = sum(worker.rate for worker in scene.workers)
        self._tell_what_happened()
        self._watch(scene)
        return scene.remaining > 0 or any(worker.leased for worker in scene.workers) or not self._recovered

    def _tell_what_happened(self) -> None:
        for token, loser, taker, seconds in self._connection.execute(_TAKEN_BACK, (self._seen,)).fetchall():
            self._seen.append(token)
            who = f"worker {taker}" if taker else "the others"
            self._scene.tell(f"worker {loser}'s lease is taken back by {who}, {seconds:.1f} s after its claim", "good")
        if self._victims_keys is not None and not self._recovered:
            ((self._recovered,),) = self._connection.execute(_SETTLED, (self._victims_keys,)).fetchall()
            last = self._recovered and self._connection.execute(_LAST_EXPIRED, (POLICY, self._victims_keys)).fetchone()
            if last:
                self._scene.tell(f"the last of worker {VICTIM}'s holds is expired, by worker {last[0]}", "good")

    def _kill(self, victim: WorkerScene) -> bool:
        """
        Try to kill a worker between claim and expire, which lie milliseconds apart; whether it is dead.

        So it is frozen whenever it is seen to claim, until it is caught with a lease in hand and with
        nothing under way to the server; then it dies without another instruction.
        """
        tried_for = time.monotonic() - self._began - _KILL_AFTER
        if tried_for > _KILL_PATIENCE:
            raise DemoError("the worker that was to be killed never had a lease in hand", hint=self._fleet.last_words())
        # Half a batch is a good catch; with time anything will do.
        wanted = max(1, round(self._scene.plan.batch / 2 * (1 - tried_for / _KILL_MODESTY)))
        deadline = time.monotonic() + _LOOK_EVERY
        while time.monotonic() < deadline:
            ((claims,),) = self._connection.execute(_CLAIMS, (victim.name,)).fetchall()
            if not claims:
                continue
            os.kill(victim.pid, signal.SIGSTOP)
            token = self._caught(victim, wanted)
            if token is not None and (keys := self._connection.execute(_NOTE, (token,)).fetchone()):
                os.kill(victim.pid, signal.SIGKILL)
                self._victims_keys = keys[0]
                victim.killed = True
                self._scene.elapsed = time.monotonic() - self._began
                holds = plural(len(keys[0]), "hold")
                self._scene.tell(f"worker {victim.number} is killed (SIGKILL) with {holds} leased to it", "bad")
                return True
            os.kill(victim.pid, signal.SIGCONT)
        return False

    def _caught(self, victim: WorkerScene, wanted: int) -> "UUID | None":
        """The token of a frozen worker's lease, once its backend is idle; a last word may be on its way, so wait."""
        before: UUID | None = None
        while True:
            row = self._connection.execute(_IN_HAND, (victim.name,)).fetchone()
            if row is None:
                raise DemoError(f"worker {victim.number} has lost its connection")
            idle, token, holds = row
            if not idle:
                time.sleep(0.002)
            elif token is None or holds < wanted:
                return None
            elif token == before:
                return before
            else:
                before = token
                time.sleep(0.02)

    def _visit(self, application: _Application) -> None:
        """Customers whose holds the dead worker has come as well: a lease keeps workers away, nobody else."""
        keys = self._victims_keys or []
        customers = [int(key) for key in random.sample(keys, min(5, len(keys) // 2))]
        if not customers:
            return
        paid = sum(application.pay(booking) for booking in customers[::2])
        extended = sum(application.extend(booking) for booking in customers[1::2])
        self._scene.elapsed = time.monotonic() - self._began
        self._scene.tell(f"customers pay {paid} and extend {extended} of these: a lease binds workers only")


# --------------------------------------------------------------------------
# The proof

# One row of counts.  A booking was overdue when the policy was registered, or it was not:
# `booked_at` never changes.  `trail` is what pgreaper says, `bookings` what the table says,
# `journal` what the application says, `changes` what the trigger saw.
_PROOF: Final = """
with trail as materialized (
  select h.key, count(*) as times, max(h.deadline) as deadline, max(h.worker) as worker, min(h.at) as at
    from pgreaper.history as h
   where h.policy = %(policy)s and h.outcome = 'expired'
   group by h.key
), last_word as (
  select distinct on (j.booking) j.booking, j.action, j.hold_until
    from journal as j
   order by j.booking, j.entry desc
), story as materialized (
  select b.status, b.hold_until, b.expired_at,
         t.times, t.deadline,
         w.action, w.hold_until as granted,
         b.booked_at + interval '1 hour' <= p.registered_at as overdue
    from bookings as b
   cross join (select p.registered_at from pgreaper.policies as p where p.name = %(policy)s) as p
    left join trail as t on t.key = b.id::text
    left join last_word as w on w.booking = b.id
), verdict as materialized (
  select s.overdue, s.action,
         s.status = 'expired' and s.times = 1 and s.deadline = s.hold_until and s.expired_at is not null
           and s.action is null as expired,
         s.status = 'paid' and s.times is null and s.action = 'paid' and s.hold_until = s.granted as paid,
         s.status = 'held' and s.times is null and s.action = 'extended' and s.hold_until = s.granted as extended,
         s.status = 'held' and s.times is null and s.action is null and s.hold_until > clock_timestamp() as waiting
    from story as s
), fate as (
  select t.worker, t.at, t.times,
         w.action is not null as changed,
         coalesce(t.times = 1 and t.worker <> k.worker and t.at >= c.finished_at, false) as taken_over
    from kills as k
   cross join lateral unnest(k.keys) as h (key)
    left join pgreaper.claims as c on c.token = k.token and c.ending = 'taken-back'
    left join trail as t on t.key = h.key
    left join last_word as w on w.booking = h.key::bigint
)
select (select count(*) from verdict as v where v.overdue) as overdue,
       (select count(*) from verdict as v where v.overdue and v.expired) as overdue_expired,
       (select count(*) from verdict as v where v.overdue and v.paid) as overdue_paid,
       (select count(*) from verdict as v where v.overdue and v.extended) as overdue_extended,
       (select count(*) from bookings as b where b.status = 'expired') as rows_expired,
       (select coalesce(sum(t.times), 0)::bigint from trail as t) as trail_expired,
       (select count(*) from trail as t where t.times > 1) as twice,
       (select coalesce(sum(c.bookings), 0)::bigint from changes as c
         where c.was = 'held' and c.became = 'expired') as trigger_expired,
       (select coalesce(sum(c.bookings), 0)::bigint from changes as c where c.was = 'expired') as resurrected,
       (select count(*) from verdict as v where v.action = 'paid') as paid,
       (select count(*) from verdict as v where v.action = 'extended') as extended,
       (select count(*) from verdict as v where v.paid or v.extended) as survived,
       (select count(*) from pgreaper.history as h
         where h.policy = %(policy)s and h.outcome = 'not-eligible') as while_leased,
       (select count(*) from verdict as v where not v.overdue and v.action is null) as ahead,
       (select count(*) from verdict as v where not v.overdue and v.waiting) as ahead_waiting,
       (select count(*) from kills) as kills,
       (select w.number from kills as k join workers as w on w.name = k.worker) as victim,
       (select cardinality(k.keys) from kills as k) as leased,
       (select extract(epoch from c.finished_at - k.claimed_at)::float8 from kills as k
          join pgreaper.claims as c on c.token = k.token and c.ending = 'taken-back') as taken_back_after,
       (select w.number from kills as k
          join pgreaper.claims as c on c.token = k.token and c.ending = 'taken-back'
          join pgreaper.claims as n on n.policy_id = c.policy_id and n.claimed_at = c.finished_at and n.token <> c.token
          join workers as w on w.name = n.worker
         limit 1) as taken_back_by,
       (select count(*) from fate as f where f.taken_over) as taken_over,
       (select count(*) from fate as f where f.changed) as taken_over_changed,
       (select extract(epoch from max(f.at) - min(k.killed_at))::float8
          from fate as f cross join kills as k where f.taken_over) as finished_after,
       (select coalesce(jsonb_object_agg(n.number, n.holds), '{}')
          from (select w.number, count(*) as holds from fate as f join workers as w on w.name = f.worker
                 where f.taken_over group by w.number) as n) as taken_over_by,
       (select count(*) from kills as k join pgreaper.transitions as t on t.token = k.token) as dead_hand
"""


def prove(connection: psycopg.Connection[Any]) -> list[Line]:
    """Compute the proof from what is in the database, and from nothing else."""
    with connection.cursor(row_factory=dict_row) as cursor:
        found = cursor.execute(_PROOF, {"policy": POLICY}).fetchone()
    assert found is not None  # noqa: S101
    return [_settled(found), _once(found), _survived(found), _ahead(found), _taken_over(found)]


def _pick(found: Mapping[str, Any], *names: str) -> dict[str, object]:
    return {name: found[name] for name in names}


def _settled(n: Mapping[str, Any]) -> Line:
    left = n["overdue"] - n["overdue_expired"] - n["overdue_paid"] - n["overdue_extended"]
    return Line(
        "settled",
        "Every overdue hold is settled",
        n["overdue"] > 0 and left == 0,
        f"{n['overdue']:,} = {n['overdue_expired']:,} expired + {n['overdue_paid']:,} paid"
        f" + {n['overdue_extended']:,} extended, {left:,} left",
        _pick(n, "overdue", "overdue_expired", "overdue_paid", "overdue_extended") | {"left": left},
    )


def _once(n: Mapping[str, Any]) -> Line:
    agree = n["rows_expired"] == n["trail_expired"] == n["trigger_expired"] == n["overdue_expired"]
    return Line(
        "once",
        "Each expired once, none twice",
        n["rows_expired"] > 0 and agree and n["twice"] == 0 and n["resurrected"] == 0,
        f"{n['rows_expired']:,} rows, {n['trail_expired']:,} in the history,"
        f" {n['trigger_expired']:,} seen by a trigger; {n['twice']:,} twice",
        _pick(n, "rows_expired", "trail_expired", "trigger_expired", "twice", "resurrected"),
    )


def _survived(n: Mapping[str, Any]) -> Line:
    harmed = n["paid"] + n["extended"] - n["survived"]
    return Line(
        "untouched",
        "What was paid or extended is untouched",
        n["paid"] > 0 and n["extended"] > 0 and harmed == 0,
        f"{n['paid']:,} paid, {n['extended']:,} extended, {harmed:,} of them harmed;"
        f" {n['while_leased']:,} while leased to a live worker",
        _pick(n, "paid", "extended", "survived", "while_leased") | {"harmed": harmed},
    )


def _ahead(n: Mapping[str, Any]) -> Line:
    return Line(
        "ahead",
        "Nothing was expired ahead of its deadline",
        n["ahead"] > 0 and n["ahead"] == n["ahead_waiting"],
        f"{n['ahead_waiting']:,} of {n['ahead']:,} future holds still wait",
        _pick(n, "ahead", "ahead_waiting"),
    )


def _taken_over(n: Mapping[str, Any]) -> Line:
    names = (
        "victim",
        "leased",
        "taken_back_after",
        "taken_back_by",
        "taken_over",
        "taken_over_changed",
        "finished_after",
        "taken_over_by",
    )
    claim = "The killed worker's lease was taken over"
    if n["kills"] != 1 or n["taken_back_after"] is None:
        detail = "no worker was killed" if n["kills"] != 1 else f"the lease of worker {n['victim']} was not taken back"
        return Line("taken-over", claim, holds=False, detail=detail, numbers=_pick(n, *names))
    by = f" by worker {n['taken_back_by']}" if n["taken_back_by"] is not None else ""
    shares = sorted((int(number), holds) for number, holds in n["taken_over_by"].items())
    who = ", ".join(f"{holds:,} by worker {number}" for number, holds in shares)
    return Line(
        "taken-over",
        claim,
        n["taken_over"] > 0 and n["taken_over"] + n["taken_over_changed"] == n["leased"] and n["dead_hand"] == 0,
        f"{n['leased']:,} holds, taken back{by} after {n['taken_back_after']:.1f} s;"
        f" {n['taken_over_changed']:,} paid or extended, {n['taken_over']:,} expired ({who})"
        f" within {n['finished_after'] or 0:.1f} s of the kill",
        _pick(n, *names),
    )


def _queries(connection: psycopg.Connection[Any]) -> list[str]:
    """Three queries worth trying; the first tells the story of a hold that the dead worker had."""
    row = connection.execute(
        "select e.key from pgreaper.events as e join kills as k on k.token = e.token where e.kind = 'retry' limit 1"
    ).fetchone()
    key = row[0] if row else "1"
    return [
        f"select at, outcome, worker from pgreaper.reaper_history('{POLICY}', '{key}');",  # noqa: S608  to be read
        "select policy, state, due, expired, not_eligible, dead from pgreaper.status;",
        "select worker, outcome, count(*) from pgreaper.history group by 1, 2;",
    ]

"""
Everybody who is at work during the chaos run: worker processes, a cron loop, sweeps, an application.

Processes share one process group, whose leader ends all of them when its pipe to us closes: nothing outlives the
run, however that ends.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import psycopg

from tests.chaos.audit import POLICIES, REGISTER

ROOT = Path(__file__).parents[2]

# Reads until end of file, then kills its whole group, itself included; stopped processes die of it too.
_LEADER = "trap '' INT TERM HUP; cat >/dev/null; kill -KILL 0"

# What a worker says when it may not go on, and still is right: something failed, or the database is away.
_HONEST_EXITS = {0, 1, 75}


class Fleet:
    """The process group, alive inside a ``with`` block, and the folder with what its processes wrote."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs

    def __enter__(self) -> Self:
        self._leader = subprocess.Popen(["/bin/sh", "-c", _LEADER], stdin=subprocess.PIPE, process_group=0)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._leader.stdin is not None
        self._leader.stdin.close()
        self._leader.wait()

    def start(self, name: str, url: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start the real command; stdout and stderr are appended to files of that name."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        environment |= {"PGREAPER_DATABASE_URL": url, "PYTHONPATH": str(ROOT)}
        with (self.logs / f"{name}.out").open("ab") as out, (self.logs / f"{name}.err").open("ab") as err:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "pgreaper", *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                process_group=self._leader.pid,
            )

    def tracebacks(self) -> list[str]:
        """What no command may ever show."""
        return [
            f"{log.name}: {text[text.index('Traceback') :][-1500:]}"
            for log in sorted(self.logs.glob("*.err"))
            if "Traceback" in (text := log.read_text(errors="replace"))
        ]

    def last_words(self, name: str) -> str:
        return (self.logs / f"{name}.err").read_text(errors="replace")[-600:]


class Slot:
    """A place for one process at a time: a daemon, or the run that cron has started last."""

    def __init__(self, fleet: Fleet, name: str, url: str, *arguments: str) -> None:
        self.name = name
        self.wrong: list[str] = []
        self._fleet = fleet
        self._url = url
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = False
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start the process, unless it runs."""
        with self._lock:
            self._look()
            if self._process is None:
                self._process = self._fleet.start(self.name, self._url, *self._arguments)
                self._killed = False

    def signal(self, number: signal.Signals) -> bool:
        """Send it a signal if it is there."""
        with self._lock:
            self._look()
            if self._process is None:
                return False
            self._process.send_signal(number)
            if number == signal.SIGKILL:
                self._killed = True
                self._process.wait()
                self._process = None
            return True

    def finish(self, seconds: float) -> int | None:
        """Ask it to leave and wait; its exit code, None when there was no process."""
        with self._lock:
            process = self._process
            if process is None:
                return None
            process.send_signal(signal.SIGTERM)
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            self._process = None
            return code

    def wait(self, seconds: float) -> bool:
        """Wait until the process has ended by itself; whether it did."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with self._lock:
                self._look()
                if self._process is None:
                    return True
            time.sleep(0.02)
        return False

    def _look(self) -> None:
        """A daemon does not leave by itself, and nobody leaves with an odd exit code."""
        if self._process is None or (code := self._process.poll()) is None:
            return
        self._process = None
        if "--daemon" in self._arguments or code not in _HONEST_EXITS:
            self.wrong.append(f"{self.name} ended by itself with {code}: {self._fleet.last_words(self.name)}")


class Player(threading.Thread):
    """Somebody with a database connection of its own, who connects again whenever it is lost."""

    # Besides a lost connection this is all that it may meet.
    honest: frozenset[str] = frozenset()

    def __init__(self, name: str, url: str, seed: int) -> None:
        super().__init__(name=name, daemon=True)
        self.dice = random.Random(seed)
        self.wrong: list[str] = []
        self.did: Counter[str] = Counter()
        self.lost_connections = 0
        self.over = threading.Event()
        self._url = url

    def run(self) -> None:
        while not self.over.is_set():
            try:
                with psycopg.connect(
                    self._url, autocommit=True, connect_timeout=10, application_name=self.name
                ) as connection:
                    while not self.over.is_set() and self._try(connection):
                        pass
                    self.lost_connections += not self.over.is_set()
            except psycopg.OperationalError:
                pass  # the server is away
            self.over.wait(0.05)

    def _try(self, connection: psycopg.Connection[Any]) -> bool:
        """One step; whether the connection is still of use."""
        try:
            self.step(connection)
        except psycopg.Error as error:
            if connection.closed or (error.sqlstate or "").startswith("57P"):
                return False
            if error.sqlstate not in self.honest:
                self.wrong.append(f"{self.name} met {error.sqlstate}: {error}")
            self.over.wait(0.1)
        return True

    def stop(self) -> None:
        self.over.set()

    def step(self, connection: psycopg.Connection[Any]) -> None:
        raise NotImplementedError


class Sweep(Player):
    """``call pgreaper.reaper_sweep()``, again and again, as pg_cron would."""

    # A lock that did not come, a deadlock that it gave way to; a policy that is suspended raises.
    honest = frozenset({"55P03", "40P01", "P0001"})

    def step(self, connection: psycopg.Connection[Any]) -> None:
        connection.execute("call pgreaper.reaper_sweep(batch => %s)", (self.dice.randint(1, 60),))
        self.did["sweep"] += 1
        self.over.wait(self.dice.uniform(0.1, 1.0))


class Operator(Player):
    """Somebody who pauses and resumes, registers anew, replays and discards dead letters, and looks."""

    honest = frozenset({"55P03"})
    _actions = ("pause", "register", "replay", "replay all", "discard", "look", "verify")

    def step(self, connection: psycopg.Connection[Any]) -> None:
        dice = self.dice
        action = dice.choice(self._actions)
        policy = dice.choice(POLICIES)
        pause = dice.uniform(0.05, 0.4)
        settings = {
            "policy": policy,
            "batch": dice.choice([3, 15, 40, 100]),
            "rate": dice.choice([None, None, 200.0]),
            "claims": dice.choice([None, None, 2]),
        }
        if action == "pause":
            connection.execute("select pgreaper.reaper_pause(%s, 'chaos')", (policy,))
            self.over.wait(pause)
            connection.execute("select pgreaper.reaper_resume(%s)", (policy,))
        elif action == "register":
            connection.execute(REGISTER, settings)
        elif action == "replay all":
            connection.execute("select pgreaper.reaper_replay(%s, reason => 'chaos')", (policy,))
        elif action in ("replay", "discard"):
            connection.execute(
                f"select pgreaper.reaper_{action}(d.policy, d.key, reason => 'chaos')"
                " from (select * from pgreaper.dead_letters order by died_at desc limit 1) as d"
            )
        elif action == "look":
            for view in ("status", "backlog", "leases", "dead_letters"):
                connection.execute(f"select * from pgreaper.{view}")
        else:
            # All of it holds at any moment; only a backlog needs time, and what fails while a sweep that had it in
            # hand is about to commit is closed when its retry comes.
            broken = connection.execute(
                "select v.policy, v.invariant, v.found, v.example from pgreaper.reaper_verify() as v"
                " where not v.holds and v.invariant not in ('accounted', 'closed')"
            ).fetchall()
            self.wrong += [f"verify, in the middle of it: {row}" for row in broken]
        self.did[action] += 1
        self.over.wait(dice.uniform(0.1, 0.8))


# No two incarnations of a hold share a deadline: each step has microseconds of its own.
_DEADLINE = (
    "date_trunc('milliseconds', clock_timestamp()) + %(ahead)s * interval '1 ms' + %(micro)s * interval '1 microsecond'"
)
_JUST_DUE = """
id = (select id from {table} where status = 'held' and expires_at > clock_timestamp() - interval '15 ms'
      order by expires_at limit 1)
"""
# How often each is done, in proportion, and its statements, which make one transaction.
_ACTIONS: dict[str, tuple[int, tuple[str, ...]]] = {
    # A reply may get lost, so an insert may come twice.
    "insert": (
        5,
        (
            f"""
            insert into {{table}} (id, expires_at)
            select %(new)s + 2 * g, {_DEADLINE} + g * interval '7 ms' from generate_series(1, %(many)s) as g
            on conflict do nothing""",
        ),
    ),
    "consume": (4, ("update {table} set status = 'consumed' where id = %(id)s and status = 'held'",)),
    "extend": (3, (f"update {{table}} set expires_at = {_DEADLINE} where id = %(id)s and status = 'held'",)),
    "hold again": (
        5,
        (f"update {{table}} set status = 'held', expires_at = {_DEADLINE} where id = %(id)s and status <> 'held'",),
    ),
    "delete": (1, ("delete from {table} where id = %(id)s",)),
    "replace": (
        2,
        (
            "delete from {table} where id = %(id)s",
            f"insert into {{table}} (id, expires_at) values (%(id)s, {_DEADLINE}) on conflict do nothing",
        ),
    ),
    "consume in the last moment": (
        4,
        (f"update {{table}} set status = 'consumed' where status = 'held' and {_JUST_DUE}",),
    ),
    "extend in the last moment": (
        2,
        (f"update {{table}} set expires_at = {_DEADLINE} where status = 'held' and {_JUST_DUE}",),
    ),
    "lock for a while": (
        1,
        (
            "select from {table} where id between %(id)s and %(id)s + 6 order by id for update",
            "select pg_sleep(%(pause)s)",
        ),
    ),
    "lock for a while, then consume": (
        1,
        (
            "select from {table} where id between %(id)s and %(id)s + 6 order by id for update",
            "select pg_sleep(%(pause)s)",
            "update {table} set status = 'consumed' where id = %(id)s and status = 'held'",
        ),
    ),
}


class Application(Player):
    """
    Inserts holds, consumes, extends, holds again, deletes, replaces and locks them, mostly those of late.

    Takes its rows in the order of their ids and is therefore never part of a deadlock.  No error is honest: the
    application always wins.
    """

    def __init__(self, name: str, url: str, seed: int, number: int) -> None:
        super().__init__(name, url, seed)
        self._number = number
        self._steps = 0
        self._made = {"holds": 0, "slow": 0}

    def step(self, connection: psycopg.Connection[Any]) -> None:
        dice = self.dice
        self._steps += 1
        action = dice.choices(list(_ACTIONS), [weight for weight, _ in _ACTIONS.values()])[0]
        table = "slow" if dice.random() < 0.15 else "holds"
        many = dice.randint(1, 25)
        recent = max(0, self._made[table] - round(dice.expovariate(1 / 300)))
        values = {
            "new": 2 * self._made[table] + self._number,
            "many": many,
            "id": 2 * recent + dice.randrange(2),
            "ahead": dice.choice([-500, 0, 10, 50, 200, 500, 1000, 2500]),
            "micro": 2 * (self._steps % 500) + self._number,
            "pause": dice.uniform(0.0, 0.4),
        }
        undo = dice.random() < 0.1
        pause = dice.uniform(0.0, 0.01)
        if action == "insert":
            self._made[table] += many
        with connection.transaction(force_rollback=undo):
            for statement in _ACTIONS[action][1]:
                connection.execute(statement.format(table=table), values)
        self.did[action] += 1
        self.over.wait(pause)


class Cron(threading.Thread):
    """``pgreaper work`` every few moments, as cron would start it."""

    def __init__(self, slots: Sequence[Slot], seed: int) -> None:
        super().__init__(name="cron", daemon=True)
        self.runs = 0
        self.over = threading.Event()
        self.wrong: list[str] = []
        self._slots = slots
        self._dice = random.Random(seed)

    def run(self) -> None:
        while not self.over.wait(self._dice.uniform(0.1, 0.6)):
            slot = self._slots[self.runs % len(self._slots)]
            slot.start()
            self.runs += 1
            # Longer than the longest stop and the longest stall together.
            if not slot.wait(60):
                self.wrong.append(f"{slot.name} does not end")
                slot.signal(signal.SIGKILL)

    def stop(self) -> None:
        self.over.set()


def verify(fleet: Fleet, url: str) -> list[str]:
    """What ``pgreaper verify`` finds broken."""
    process = fleet.start("verify", url, "verify", "--json")
    code = process.wait(120)
    text = (fleet.logs / "verify.out").read_text()
    if code not in (0, 3):
        return [f"pgreaper verify ended with {code}: {fleet.last_words('verify')}"]
    checks: list[dict[str, Any]] = json.loads(text)["checks"]
    return [
        f"pgreaper verify, {check['policy']}, {check['invariant']}: {check['found']}, for example {check['example']}"
        for check in checks
        if not check["holds"]
    ]

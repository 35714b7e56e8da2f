"""
The chaos run: ``python -m tests.chaos [--seconds 60] [--seed N] [--plant FAULT]``.

A durable server; workers of every kind, some behind a bad network; an application; and blows that fall on all of
them.  Then it grows quiet, what is left is expired, and it is judged: by ``pgreaper verify`` and by an audit of its
own.  The decisions of a run follow from its seed; what they meet does not, as several processes race.

Exit codes: 0 every promise was kept; 1 one was broken (the seed and examples are printed); 2 usage.
"""

import argparse
import logging
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from heapq import heappop, heappush
from types import FrameType
from typing import Any, TypeVar

import psycopg

from pgreaper.embedded import Cluster
from pgreaper.schema import install
from tests.chaos import audit, plants
from tests.chaos.blows import Blow, plan
from tests.chaos.crowd import Application, Cron, Fleet, Operator, Player, Slot, Sweep, verify
from tests.chaos.proxy import Proxy

T = TypeVar("T")

_BUSY = "select worker from pgreaper.claims where finished_at is null order by claimed_at desc"
_BACKENDS = """
select pid from pg_stat_activity
 where backend_type = 'client backend' and application_name ~ '^(pgreaper|application|operator)'
 order by backend_start, pid
"""
_THERE = "select count(distinct application_name) from pg_stat_activity where application_name ~ '^pgreaper/'"


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class Chaos:
    """One run: everybody who takes part, and the blows."""

    def __init__(self, stack: ExitStack, seed: int, *, verbose: bool) -> None:
        self.cluster = stack.enter_context(Cluster())
        install(self.cluster.dsn)
        proxy = stack.enter_context(Proxy(self.cluster.room / f".s.PGSQL.{self.cluster.port}"))
        fleet = stack.enter_context(Fleet(self.cluster.room))
        direct = self.cluster.dsn
        far = (
            f"postgresql://{self.cluster.superuser}@127.0.0.1:{proxy.port}/postgres?sslmode=disable&gssencmode=disable"
        )

        work = "work --daemon --poll 0.5 --shutdown-timeout 10".split()
        handler = "holds --handler tests.chaos.handler:handle --concurrency 4".split()
        self.daemons = [
            Slot(fleet, "worker-near", direct, *work),
            Slot(fleet, "worker-far", far, *work, "--batch", "7"),
            Slot(fleet, "handler-near", direct, *work, *handler),
            Slot(fleet, "handler-far", far, *work, *handler),
        ]
        self.crons = [
            Slot(fleet, "cron-near", direct, *"work --max-seconds 2".split()),
            Slot(fleet, "cron-far", far, *"work --max-seconds 2".split()),
        ]
        self.cron = Cron(self.crons, seed)
        self.sweeps = [Sweep("pgreaper-sweep-near", direct, seed), Sweep("pgreaper-sweep-far", far, seed + 1)]
        self.applications = [
            Application("application-near", direct, seed + 2, 0),
            Application("application-far", far, seed + 3, 1),
        ]
        self.operators = [Operator("operator-near", direct, seed + 4), Operator("operator-far", far, seed + 5)]
        self.fleet = fleet
        self.wrong: list[str] = []
        self.struck: Counter[str] = Counter()
        self.missed: Counter[str] = Counter()
        self.caught = 0
        self._verbose = verbose
        self._later: list[tuple[float, int, Callable[[], object]]] = []
        self._deeds: dict[str, Callable[[Blow], bool]] = {
            "kill a worker": self._kill,
            "kill a worker that holds a lease": self._kill_busy,
            "stop a worker": self._stop,
            "terminate a backend": self._terminate,
            "cut a connection": lambda blow: proxy.cut(blow.dice),
            "stall a connection": lambda blow: proxy.stall(blow.dice, blow.seconds),
            "half-close a connection": lambda blow: proxy.half_close(blow.dice, blow.seconds),
            "swallow replies": lambda blow: proxy.swallow(blow.dice, blow.seconds / 4),
            "crash the server": self._crash,
            "kill a backend": self._kill_backend,
        }

    def connect(self) -> psycopg.Connection[Any]:
        """A connection as the auditor, who is nobody's victim; waits while the server recovers."""
        deadline = time.monotonic() + 60
        while True:
            try:
                return psycopg.connect(self.cluster.dsn, autocommit=True, application_name="auditor")
            except psycopg.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def _ask(self, question: Callable[[psycopg.Connection[Any]], T]) -> T:
        """Ask the database, again if the last blow takes the connection."""
        deadline = time.monotonic() + 60
        while True:
            try:
                with self.connect() as connection:
                    return question(connection)
            except psycopg.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    # The run

    def begin(self) -> None:
        """Everybody comes in; returns when the workers are connected."""
        for slot in self.daemons:
            slot.start()
        with self.connect() as connection:
            deadline = time.monotonic() + 60
            while (row := connection.execute(_THERE).fetchone()) is None or row[0] < len(self.daemons):
                if time.monotonic() > deadline:
                    raise SystemExit(f"the workers do not come up: {self.fleet.last_words(self.daemons[0].name)}")
                time.sleep(0.05)
        for thread in (*self.applications, *self.operators, *self.sweeps, self.cron):
            thread.start()

    def strike(self, blows: list[Blow]) -> None:
        """Deal the blows, each at its time or as soon after it as the one before is over."""
        began = time.monotonic()
        for blow in blows:
            self._wait_until(began + blow.at)
            landed = self._deal(blow)
            (self.struck if landed else self.missed)[blow.kind] += 1
            if self._verbose:
                say(f"{time.monotonic() - began:7.2f}  {blow.kind}{'' if landed else ': nobody there'}")

    def calm(self, patience: float) -> None:
        """No more blows, no more customers: what is left is to be expired by those who are there."""
        self._end(*self.applications, *self.operators)
        while self._later:
            self._wait_until(self._later[0][0])
        for slot in self.daemons:
            slot.start()
        deadline = time.monotonic() + patience
        self._ask(audit.put_right)
        while not self._ask(audit.is_quiet):
            if time.monotonic() > deadline:
                self.wrong.append(f"after {patience:.0f} s of calm there is still something to do")
                break
            time.sleep(0.2)
        self._end(*self.sweeps)
        self.cron.stop()
        self.cron.join(90)
        for slot in self.daemons:
            slot.start()  # finds out whether it has left by itself
            if (code := slot.finish(30)) != 0:
                self.wrong.append(f"{slot.name} ended with {code} when asked to: {self.fleet.last_words(slot.name)}")
        if (code := self.fleet.start("last", self.cluster.dsn, "work").wait(120)) != 0:
            self.wrong.append(f"the last `pgreaper work` ended with {code}: {self.fleet.last_words('last')}")

    def judge(self) -> tuple[dict[str, list[str]], dict[str, int]]:
        """What is broken, with examples, and the figures."""
        with self.connect() as connection:
            broken = audit.broken(connection)
            figures = audit.figures(connection)
        said = verify(self.fleet, self.cluster.dsn)
        people: list[Player | Slot | Cron] = [
            *self.applications,
            *self.operators,
            *self.sweeps,
            self.cron,
            *self.daemons,
            *self.crons,
        ]
        wrong = [*self.wrong, *(line for one in people for line in one.wrong), *self.fleet.tracebacks()]
        wrong += [error for error in self.errors() if error.startswith("PANIC") or "cache lookup" in error]
        return (
            broken | ({"pgreaper verify": said} if said else {}) | ({"nobody meets trouble": wrong} if wrong else {}),
            figures,
        )

    def errors(self) -> Counter[str]:
        """What the server's log complains of: without the rows, they are poison or part of the play."""
        found = re.findall(r"(?:ERROR|PANIC): .*", self.cluster.log(10**9))
        return Counter(re.sub(r"[0-9a-f-]{36}|\d+", "#", error) for error in found)

    # The blows

    def _wait_until(self, moment: float) -> None:
        """Wait, and do what comes due meanwhile: whoever was stopped goes on, whoever was killed comes back."""
        while self._later and self._later[0][0] <= moment:
            at, _, deed = heappop(self._later)
            time.sleep(max(0.0, at - time.monotonic()))
            deed()
        time.sleep(max(0.0, moment - time.monotonic()))

    def _deal(self, blow: Blow) -> bool:
        """After a crash everybody may be away: wait a little for somebody whom the blow can hit."""
        deadline = time.monotonic() + 3
        while True:
            # A server that lost a backend ends the others a moment later, ours among them.
            with suppress(psycopg.OperationalError):
                if self._deeds[blow.kind](blow):
                    return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)

    def _after(self, seconds: float, deed: Callable[[], object]) -> None:
        heappush(self._later, (time.monotonic() + seconds, len(self._later) + self.struck.total() * 1000, deed))

    def _somebody(self, blow: Blow, number: signal.Signals) -> Slot | None:
        """Signal one of the processes: the first that is there, from where the dice fell on."""
        slots = [*self.daemons, *self.crons]
        first = blow.dice % len(slots)
        return next((slot for slot in slots[first:] + slots[:first] if slot.signal(number)), None)

    def _kill(self, blow: Blow) -> bool:
        return self._is_dead(self._somebody(blow, signal.SIGKILL), blow)

    def _kill_busy(self, blow: Blow) -> bool:
        """Kill somebody who holds a lease; if nobody does within a second, somebody else."""
        deadline = time.monotonic() + 1
        with self.connect() as connection:
            while time.monotonic() < deadline:
                names = [name or "" for (name,) in connection.execute(_BUSY).fetchall()]
                busy = [s for name in names for s in (*self.daemons, *self.crons) if name.endswith(f"/{s.pid}")]
                if busy and (slot := busy[blow.dice % len(busy)]).signal(signal.SIGKILL):
                    self.caught += 1
                    return self._is_dead(slot, blow)
                time.sleep(0.005)
        return self._kill(blow)

    def _is_dead(self, slot: Slot | None, blow: Blow) -> bool:
        """Somebody killed a daemon: it comes back after a while.  Cron's runs come back by themselves."""
        if slot in self.daemons:
            self._after(blow.seconds / 2, slot.start)
        return slot is not None

    def _stop(self, blow: Blow) -> bool:
        slot = self._somebody(blow, signal.SIGSTOP)
        if slot is not None:
            self._after(blow.seconds, lambda: slot.signal(signal.SIGCONT))
        return slot is not None

    def _backend(self, connection: psycopg.Connection[Any], dice: int) -> int | None:
        backends = connection.execute(_BACKENDS).fetchall()
        return int(backends[dice % len(backends)][0]) if backends else None

    def _terminate(self, blow: Blow) -> bool:
        with self.connect() as connection:
            pid = self._backend(connection, blow.dice)
            row = connection.execute("select pg_terminate_backend(%s)", (pid,)).fetchone()
            return row == (True,)

    def _kill_backend(self, blow: Blow) -> bool:
        """SIGKILL of a backend: the server starts all of them anew and recovers, but has not been restarted."""
        with self.connect() as connection:
            pid = self._backend(connection, blow.dice)
        if pid is None:
            return False
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def _crash(self, blow: Blow) -> bool:
        """``pg_ctl restart -m immediate``."""
        self.cluster.restart("immediate")
        return True

    def _end(self, *players: Player) -> None:
        for player in players:
            player.stop()
        for player in players:
            player.join(60)
            if player.is_alive():
                self.wrong.append(f"{player.name} hangs")


def report(chaos: Chaos, figures: dict[str, int], seconds: float) -> None:
    """The figures, on stdout."""
    struck = chaos.struck
    lost = sum(player.lost_connections for player in (*chaos.applications, *chaos.operators, *chaos.sweeps))
    sweeps = sum(player.did["sweep"] for player in chaos.sweeps)
    steps = sum(player.did.total() for player in chaos.applications)
    f = figures
    lines = {
        "killed": f"{struck['kill a worker'] + struck['kill a worker that holds a lease']} workers (SIGKILL),"
        f" {chaos.caught} of them picked for a lease in hand;"
        f" {struck['kill a backend']} backends (SIGKILL)",
        "stopped": f"{struck['stop a worker']} workers (SIGSTOP, SIGCONT)",
        "restarted": f"{struck['crash the server']} times the server, -m immediate",
        "terminated": f"{struck['terminate a backend']} backends",
        "cut": f"{struck['cut a connection']} connections; {struck['stall a connection']} stalled,"
        f" {struck['half-close a connection']} half-closed, {struck['swallow replies']} with their replies swallowed",
        "missed": f"{chaos.missed.total()} blows fell on nobody",
        "application": f"{steps} transactions: {f['consumed']} consumed, {f['extended']} extended,"
        f" {f['held_again']} held again, {f['deleted']} deleted;"
        f" {lost} connections lost, the sweeps' and operators' included",
        "operators": f"{f['pauses']} pauses, {f['replays']} replays, {f['discards']} discards,"
        f" {sum(player.did['verify'] for player in chaos.operators)} verifications in the middle of it",
        "work": f"{f['claims']} claims, {sweeps} sweeps, {chaos.cron.runs} runs by cron",
        "holds": f"{f['inserted']} inserted, {f['poison']} of their keys poison",
        "transitions": f"{f['transitions']}, {f['transitions_by_sweep']} of them by sweeps",
        "conflicts": f"{f['conflicts']}",
        "retries": f"{f['retries']}, {f['retries_after_lost_lease']} of them after a lost lease",
        "taken back": f"{f['taken_back']} leases",
        "suspensions": f"{f['suspensions']}",
        "dead letters": f"{f['deaths']}, {f['dead_letters']} still are",
        "duplicates": f"{f['duplicates']}",
        "lost": f"{f['lost']}",
        "took": f"{seconds:.0f} s in all",
    }
    for name, line in lines.items():
        say(f"  {name:<15}{line}")


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Work under blows, then an audit.")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the blows fall (default: 60)")
    parser.add_argument("--seed", type=int, help="decides what happens and when (default: drawn)")
    parser.add_argument("--patience", type=float, default=90.0, help="seconds until all must be expired afterwards")
    parser.add_argument("--plant", choices=plants.NAMES, metavar="FAULT", help=", ".join(plants.NAMES))
    parser.add_argument("--verbose", action="store_true", help="a line for each blow")
    return parser.parse_args(argv)


def leave(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main(argv: list[str]) -> int:
    asked = arguments(argv)
    seed = random.SystemRandom().randrange(1_000_000) if asked.seed is None else asked.seed
    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGHUP, leave)
    logging.getLogger("psycopg").setLevel(logging.CRITICAL)  # a rollback on a lost connection is no news here
    for name in [name for name in os.environ if name.startswith("PG") and not name.startswith("PGREAPER_PG")]:
        del os.environ[name]
    began = time.monotonic()
    planted = f" --plant {asked.plant}" if asked.plant else ""
    say(f"chaos for {asked.seconds:g} s, seed {seed}{planted}")
    with ExitStack() as stack:
        chaos = Chaos(stack, seed, verbose=asked.verbose)
        with chaos.connect() as connection:
            audit.prepare(connection)
            plants.before(asked.plant, connection)
        chaos.begin()
        chaos.strike(plan(seed, asked.seconds))
        chaos.calm(asked.patience)
        with chaos.connect() as connection:
            plants.after(asked.plant, connection)
        broken, figures = chaos.judge()
        report(chaos, figures, time.monotonic() - began)
        errors = chaos.errors()
        if asked.verbose:
            for log in sorted(chaos.fleet.logs.glob("*.err")):
                say(f"{log.name}:\n{log.read_text(errors='replace')}")
    if not broken:
        say(f"every promise was kept (seed {seed})")
        return 0
    for promise, examples in broken.items():
        say(f"BROKEN: {promise}: {len(examples)}")
        for example in examples[:5]:
            say(f"    {example}")
    say("what the server's log complains of:")
    for error, times in errors.most_common(10):
        say(f"    {times} times {error}")
    say(f"broken with seed {seed}: python -m tests.chaos --seconds {asked.seconds:g} --seed {seed}{planted}")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`pgreaper status`: what is late, since when, why, whose it is, what comes next; at any width, also in an outage."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from contextlib import ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from rich.cells import cell_len

from pgreaper.overview import STATES
from tests.cli.conftest import PGREAPER, Result, environment
from tests.conftest import SQL, Holds, install_sql

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = SQL.parent
UTF8 = {"LANG": "C.UTF-8"}
HOSTILE = [
    "a policy whose name goes on and on and on, for more columns than any terminal has, and then some more of it",
    "two\nlines: error",
    "\x1b[31mred\x1b[0m\x07",
    "予約テーブル予約テーブル予約テーブル予約テーブル",
    "[bold red]markup[/]",
    "--help",
    "'; drop table holds; --",
    "left \u202eright",
]


@pytest.fixture
def look(in_process: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """A function that runs a command in this process, in a pipe of 200 columns that has blocks."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("LANG", "C.UTF-8")
    monkeypatch.delenv("LC_ALL", raising=False)
    return in_process


def told(look: Callable[..., Result], *arguments: str) -> str:
    """The screen, with each paragraph on one line."""
    result = look("status", *arguments)
    assert (result.code, result.err) == (0, "")
    return str(result.out)


def condition(look: Callable[..., Result], policy: str = "holds") -> dict[str, Any]:
    """The policy's part of the document."""
    (found,) = look("status", policy, "--json").json["policies"]
    assert isinstance(found, dict)
    return found


# -- what is wrong


def test_nothing_is_wrong(look, holds):
    """Idle, on time: nobody is told to do anything."""
    holds.register()
    assert re.search(r"1 policy, all is well\n?", told(look))
    assert condition(look)["condition"] == "idle"
    holds.due(3, overdue="10 seconds")
    screen = told(look)
    assert (condition(look)["condition"], condition(look)["notices"]) == ("on time", [])
    assert "→" not in screen


def test_late_and_nobody_works(look, holds):
    """Since when, by how much, whose, why, and the command that comes next."""
    holds.due(3, overdue="2 hours")
    holds.register(owner="box-office")
    screen = told(look)
    assert re.search(
        r"holds late since \d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ: 3 due, the oldest for (2 h|1 h 59 min); promised is 1 min"
        r" \(owner: box-office\)\n"
        r"    nobody works: no worker is connected, and nothing has ever been expired\n"
        r"    → pgreaper work holds\n",
        screen,
    )
    found = condition(look)
    assert (found["condition"], found["late"], found["waited_for"]) == ("late", True, "free")
    assert 7190 < found["waited_seconds"] < 7300


def test_late_is_beyond_the_objective_and_not_before(look, holds, set_clock):
    """To the second, by the database clock."""
    holds.connection.execute("insert into holds (expires_at) values ('2040-01-01 00:00Z')")
    holds.register(objective="5 minutes")
    set_clock("2040-01-01 00:05Z")
    assert condition(look)["condition"] == "on time"
    set_clock("2040-01-01 00:05:01Z")
    found = condition(look)
    assert (found["condition"], found["notices"][0]["since"]) == ("late", "2040-01-01T00:05:00Z")


def test_late_and_worked_on(look, db, holds):
    """Who is catching up is told so, with how long it takes."""
    holds.due(600, overdue="2 hours")
    holds.register(batch=10)
    db.execute("call pgreaper.reaper_sweep('holds', max_rows => 20)")
    assert re.search(r"it is worked on: \d+ a minute, .+ to go\n    → pgreaper work holds", told(look))


def test_late_and_nobody_works_any_more(look, db, holds, set_clock):
    """Twenty seconds after the last transition nobody is said to be at it, whatever the minutes before say."""
    holds.due(600, overdue="2 hours")
    holds.register(batch=10)
    db.execute("call pgreaper.reaper_sweep('holds', max_rows => 200)")
    set_clock(timedelta(seconds=20))
    assert re.search(
        r"nobody works: no worker is connected, and the last transition was [23]\d s ago, by \S+\n"
        r"    → pgreaper work holds",
        told(look),
    )


def test_late_because_it_is_locked(look, db, holds, connect):
    """The others are expired: another worker would not help."""
    holds.due(30)
    holds.register()
    application = connect(autocommit=False)
    application.execute("select from holds where id = 1 for update")
    db.execute("call pgreaper.reaper_sweep('holds')")
    assert re.search(
        r"it is worked on: \d+ a minute; what stays all the same is locked by another transaction\n"
        r"    → pgreaper doctor holds",
        told(look),
    )
    application.rollback()


def test_late_though_workers_are_connected(look, dsn, holds, connect):
    """They are counted by host, and the doctor is to look; commands that look are no workers."""
    holds.due(1)
    holds.register()
    for name in (
        "pgreaper/web-1/11",
        "pgreaper/web-1/12",
        "pgreaper/web-2/7",
        "pgreaper/status",
        "pgreaper/doctor",
        "x",
    ):
        connect(application_name=name)
    screen = told(look)
    assert "3 workers connected: web-1 (2), web-2\n" in screen
    assert "3 workers connected, but nothing has ever been expired\n    → pgreaper doctor holds" in screen
    ours = f"{dsn}&application_name=pgreaper/web-3/1"
    hosts = [w["host"] for w in look("status", "--json", "--database-url", ours).json["workers"]]
    assert hosts == ["web-1", "web-1", "web-2"]


def test_late_and_leased(look, db, holds):
    """Somebody has a lease and settles nothing: who, and since when."""
    holds.due(4)
    holds.register()
    db.execute("select pgreaper.reaper_claim('holds', 2, 'pgreaper/web-1/12')")
    screen = told(look)
    assert re.search(r"pgreaper/web-1/12 has 2 holds since [\d.]+ m?s and settles none", screen)
    assert "→ pgreaper doctor holds" in screen


def test_c081_what_a_dead_worker_had_is_late(look, db, holds, set_clock):
    """All due holds are leased, the lease has run out, nobody is there to take it back: late, though none is free."""
    holds.due(3, overdue="30 seconds")
    holds.register()
    db.execute("select pgreaper.reaper_claim('holds', 3, 'w')")
    assert condition(look)["condition"] == "on time"
    set_clock(timedelta(minutes=5))
    found = condition(look)
    assert (found["due"], found["condition"], found["waited_for"]) == (3, "late", "lapsed")
    assert "a worker left holds behind that are overdue for 5 min" in told(look)


def test_c081_a_retry_whose_time_has_come_is_late(look, db, holds, set_clock):
    """Nobody is there to try again: late, though nothing is due that has not failed."""
    holds.due(1, overdue="30 seconds")
    holds.register()
    db.execute(
        "select pgreaper.reaper_fail(c.token, c.key, 'TimeoutError', true, '10 minutes')"
        " from pgreaper.reaper_claim('holds', 1, 'w') as c"
    )
    db.execute("select pgreaper.reaper_expire(token) from pgreaper.claims")
    assert (condition(look)["condition"], condition(look)["retrying"]) == ("on time", 1)
    set_clock(timedelta(minutes=12))
    found = condition(look)
    assert (found["condition"], found["waited_for"]) == ("late", "retry")
    assert 110 < found["waited_seconds"] < 180
    assert "a retry is overdue for" in told(look)


def test_suspended_says_why_and_since_when(look, db, holds):
    """The class of the error and its SQLSTATE, when it is tried again, and that nobody is charged."""
    db.execute("alter table holds add constraint never check (status <> 'expired')")
    holds.due(20)
    holds.register()
    with pytest.raises(psycopg.Error):
        db.execute("call pgreaper.reaper_sweep('holds')")
    found = condition(look)
    assert found["condition"] == "suspended"
    assert found["suspended_since"] is not None
    assert found["notices"][0]["since"] == found["suspended_since"]
    screen = told(look)
    assert re.search(
        r"holds suspended since \d{4}-\d\d-\d\d .*: no hold can be expired, and the oldest has waited", screen
    )
    assert "ConstraintViolation (SQLSTATE 23514); no hold is charged" in screen
    assert "→ pgreaper doctor holds" in screen


def test_paused_says_by_whom_and_why(look, db, holds):
    """And what is waiting meanwhile."""
    holds.due(1)
    holds.register()
    db.execute("select pgreaper.reaper_pause('holds', 'stock-taking')")
    found = condition(look)
    assert (found["condition"], found["paused_by"]) == ("paused", db.info.user)
    screen = told(look)
    assert re.search(r"holds paused since .*Z: nothing is claimed; the oldest hold has waited (1 h|59 min)", screen)
    assert f"    by {db.info.user}: stock-taking\n    → pgreaper resume holds" in screen


def test_dead_letters_by_class(look, db, holds):
    """How many of which kind, and the command that lists them."""
    db.execute("""
        create function refuse() returns trigger language plpgsql as $$ begin
          if new.id = 1 then raise check_violation; end if;
          if new.id < 4 then raise exception 'no'; end if;
          return new; end $$;
        create trigger refuse before update on holds for each row execute function refuse();
    """)
    holds.due(40, overdue="50 seconds")
    holds.register()
    db.execute("call pgreaper.reaper_sweep('holds')")
    screen = told(look)
    assert re.search(r"holds dead letters since .*Z: 3 holds were given up", screen)
    assert "    2 TriggerException P0001, 1 ConstraintViolation 23514\n    → pgreaper dead list holds" in screen
    kinds = [(k["error_class"], k["constraint_name"], k["holds"]) for k in condition(look)["dead_by_class"]]
    assert kinds == [("TriggerException", None, 2), ("ConstraintViolation", None, 1)]
    assert re.search(r"dead by class +2 holds TriggerException P0001, the first", told(look, "holds"))


def test_broken_says_what_is_missing(look, db, holds):
    """And costs the others nothing."""
    db.execute("create table others (like holds including all)")
    holds.register()
    holds.register("others", target="others")
    db.execute("drop table others")
    screen = told(look)
    assert (
        "others broken: the target cannot be read (owner: tests)\n    public.others, the target of policy others"
        in screen
    )
    assert "→ pgreaper doctor others" in screen
    assert re.search(r"^holds +idle", screen, re.MULTILINE)


def test_a_clock_that_is_wrong(look, db, holds):
    """Told from a second on, in words that say that nothing is decided by it."""
    holds.due(2, overdue="10 seconds")
    holds.register()
    db.execute(
        "select pgreaper.reaper_expire(c.token)"
        " from (select distinct token from pgreaper.reaper_claim('holds', 9, 'w')) as c"
    )
    for skew, wrong in (("-0.9 s", False), ("1.1 s", True), ("-3 min", True)):
        db.execute("update pgreaper.claims set skew = %s", [skew])
        assert [n["state"] for n in condition(look)["notices"]] == ["clock"] * wrong
        screen = told(look, "holds")
        assert "tolerated is 1 s; nothing is decided by it" in screen
        assert ("that worker's own log are wrong" in screen) == wrong
    assert "a worker's clock is 3 min behind the database's" in told(look)


def test_the_worst_comes_first(look, db, holds):
    """Broken, suspended, late (by how many times the objective), paused, dead letters, on time, idle."""
    db.execute("create table gone (like holds including all)")
    holds.register("z-broken", target="gone")
    for policy, age, objective in (
        ("idle", None, "1 min"), ("a-late", "2 hours", "30 min"), ("b-late", "1 hour", "1 min"),
        ("paused", None, "1 min"), ("on-time", "10 s", "1 min"),
    ):  # fmt: skip
        db.execute(f'create table "{policy}" (like holds including all)')
        holds.register(policy, target=f'"{policy}"', objective=objective)
        if age:
            db.execute(f"insert into \"{policy}\" (expires_at) values (now() - interval '{age}')")
    db.execute("select pgreaper.reaper_pause('paused'); drop table gone")
    order = [(p["policy"], p["condition"]) for p in look("status", "--json").json["policies"]]
    assert order == [
        ("z-broken", "broken"), ("b-late", "late"), ("a-late", "late"), ("paused", "paused"), ("on-time", "on time"),
        ("idle", "idle"),
    ]  # fmt: skip
    screen = told(look)
    rows = [line.split()[0] for line in screen.splitlines() if re.search(r"  tests  public", line)]
    assert rows == [policy for policy, _ in order]


# -- in depth


def test_one_policy_in_depth(look, db, holds):
    """Every figure that an operator may ask for, from real work."""
    db.execute("""
        create function refuse() returns trigger language plpgsql as
          $$ begin if new.id = 5 then raise exception 'no'; end if; return new; end $$;
        create trigger refuse before update on holds for each row execute function refuse();
    """)
    holds.due(30, overdue="50 seconds")
    holds.register(owner="shop-team")
    claim = db.execute("select token from pgreaper.reaper_claim('holds', 20, 'pgreaper/h/1')").fetchall()
    db.execute("update holds set status = 'consumed' where id in (1, 2)")
    db.execute("update holds set status = 'expired' where id = 3")
    db.execute("select pgreaper.reaper_expire(%s)", claim[0])
    db.execute("select pgreaper.reaper_claim('holds', 4, 'pgreaper/h/2')")
    screen = told(look, "holds")
    for line in (
        r"due +6, the oldest for 2\d s",
        r"leased +4$",
        r"dead letters +1$",
        r"backlog +under 1 minute +█+ +6$",
        r"lateness +p50 .*, p99 .*, max 50 s|lateness +p50 .*, max \d+ s",
        r"claim to start +p50 .+, p99 .+",
        r"claim to finish +p50 .+, p99 .+",
        r"transitions +·+█·* 16 in 15 minutes",
        r"expired +16, the last .* ago by pgreaper/h/1",
        r"conflicts +3: 1 already done, 2 consumed, extended or gone",
        r"duplicate rate +5.00%",
        r"failures +0 led to a retry, 1 to a dead letter",
        r"taken back +0 leases",
        r"leases +4 holds for .*, until .* from now, attempt 1: pgreaper/h/2",
        r"dead by class +1 hold TriggerException P0001, the first \d{4}",
        r"promised +1 min after the deadline",
        r"owner +shop-team",
    ):
        assert re.search(line, screen, re.MULTILINE), (line, screen)


def test_the_next_retry(look, db, holds):
    holds.due(1, overdue="30 seconds")
    holds.register()
    db.execute(
        "select pgreaper.reaper_fail(c.token, c.key, 'TimeoutError', true, '10 minutes')"
        " from pgreaper.reaper_claim('holds', 1, 'w') as c"
    )
    assert re.search(r"retrying +1, the next in (9 min \d+ s|1\d min.*)\n", told(look, "holds"))
    assert condition(look)["next_retry"].endswith("Z")


# -- at any width


@pytest.fixture
def crowd(db: psycopg.Connection[Any], holds: Holds) -> Holds:
    """Policies with hostile names and owners, in every state that two tables can be in."""
    holds.due(600, overdue="3 hours")
    db.execute("create table others (like holds including all)")
    for number, name in enumerate(HOSTILE):
        holds.register(name, target="holds" if number % 3 else "others", owner=name[::-1])
        if number % 4 == 1:
            db.execute("select pgreaper.reaper_pause(%s, %s)", [name, name])
    db.execute("drop table others")
    return holds


@pytest.mark.parametrize("width", [24, 60, 80, 100, 120, 300])
@pytest.mark.parametrize("locale", ["C.UTF-8", "C"])
def test_c113_no_line_is_wider_than_the_room(in_process, crowd, monkeypatch, width, locale):
    """Whatever the names are: but for commands, which are there to be copied whole; nothing is forged."""
    monkeypatch.setenv("COLUMNS", str(width))
    if locale == "C":
        monkeypatch.setattr("pgreaper.render._has_unicode", lambda: False)
    for arguments in (["status"], ["status", "--", HOSTILE[0]], ["status", "--", HOSTILE[3]]):
        result = in_process(*arguments)
        assert (result.code, result.err) == (0, "")
        lines = result.out.splitlines()
        arrow = "→ " if locale != "C" else "-> "
        plain = [line for line in lines if not line.strip().startswith(arrow)]
        assert max(map(cell_len, plain)) <= width, max(plain, key=cell_len)
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202e]", result.out)
        assert not any(line.startswith("lines: error") for line in lines)
        if locale == "C":
            assert "".join(plain).isascii()
    if width == 80:
        names = [line for line in in_process("status").out.splitlines() if line.startswith("a poli")]
        assert all(re.match(r"a policy [\w ]*(…|\.\.) ", name) for name in names), names
        assert names


def test_the_table_has_all_of_it_at_80(pgreaper, holds):
    """State, how many, how old against the promise, bars by age, a sparkline, lateness and dead letters."""
    holds.due(3)
    holds.register()
    header = pgreaper("status").out.splitlines()[3]
    assert header.split() == ["policy", "state", "due", "waits/goal", "by", "age", "per", "min", "p50/p99", "dead"]
    wide = pgreaper("status", COLUMNS="200").out.splitlines()[3]
    assert {"leased", "retry", "last", "owner", "expired", "target"} <= set(wide.split())
    assert max(map(len, pgreaper("status", COLUMNS="junk").out.splitlines())) <= 80


@pytest.mark.parametrize("width", [80, 100, 120, 160])
def test_policies_are_told_apart_by_their_names(db, holds, in_process, monkeypatch, width):
    """Figures give way to a name; what is dropped is told about one policy."""
    names = [f"bookings-of-the-shop-{n}" for n in ("b", "a")]
    for name in names:
        holds.register(name, owner="platform-reliability-engineering@example.com")
    monkeypatch.setenv("COLUMNS", str(width))
    lines = in_process("status").out.splitlines()
    assert [line.split()[0] for line in lines[4:6]] == sorted(names)
    assert max(map(len, lines)) <= width
    assert {"state", "due", "waits/goal", "dead"} <= set(lines[3].split())


@pytest.mark.parametrize(
    ("variables", "blocks"),
    [
        ({"LANG": "C.UTF-8"}, True),
        ({"LANG": "C"}, False),
        ({"LC_ALL": "C"}, False),
        ({"LC_ALL": "POSIX", "LANG": "C.UTF-8"}, False),
        ({"LANG": ""}, False),
        ({"LANG": "C", "PYTHONUTF8": "1"}, True),
        ({"LANG": "C.UTF-8", "PYTHONIOENCODING": "latin-1"}, False),
        ({"LANG": "xx_XX.UTF-8"}, True),  # a locale that this machine lacks
    ],
)
def test_bars_are_ascii_where_there_are_no_blocks(pgreaper, holds, variables, blocks):
    """By the locale, and by the encoding of stdout."""
    holds.due(2)
    holds.register()
    shown = pgreaper("status", **variables).out
    assert ("█" in shown) == blocks
    assert ("@" in shown) != blocks
    assert blocks or shown.isascii()


# -- on a terminal


def without_colours(shown: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", shown)


class Terminal:
    """A command on a terminal of its own, of a size that may change."""

    def __init__(self, dsn: str, *arguments: str, size: tuple[int, int] = (24, 80), **variables: str) -> None:
        self.main, side = pty.openpty()
        self.resize(*size)
        self.popen = subprocess.Popen(
            [*PGREAPER, *arguments], env=environment(dsn, TERM="xterm-256color", **(UTF8 | variables)),
            stdin=side, stdout=side, stderr=side, close_fds=True, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # Ctrl-C and its size reach it
        )  # fmt: skip
        os.close(side)
        self.shown = ""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.main, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def until(self, text: str, seconds: float = 20) -> str:
        """Read on until something is shown; all that was shown since the last call."""
        end = time.monotonic() + seconds
        while not re.search(text, without_colours(self.shown)):
            if not select.select([self.main], [], [], max(end - time.monotonic(), 0))[0]:
                pytest.fail(f"never shown: {text}: {self.shown[-3000:]}")
            try:
                data = os.read(self.main, 65536)
            except OSError:
                pytest.fail(f"ended without {text}: {self.shown[-3000:]}")
            self.shown += data.decode(errors="replace")
        shown, self.shown = self.shown, ""
        return shown

    def end(self) -> tuple[int, str]:
        """Read to the end; the exit code and all that was still shown."""
        while True:
            try:
                data = os.read(self.main, 65536)
            except OSError:
                break
            if not data:
                break
            self.shown += data.decode(errors="replace")
        return self.popen.wait(20), self.shown


@pytest.fixture
def terminal(dsn: str) -> Iterator[Callable[..., Terminal]]:
    """A function that starts a command on a terminal."""
    with ExitStack() as stack:

        def terminal(*arguments: str, url: str = dsn, **more: Any) -> Terminal:
            started = Terminal(url, *arguments, **more)
            stack.callback(os.close, started.main)
            stack.callback(started.popen.wait)
            stack.callback(started.popen.kill)
            return started

        yield terminal


ALTERNATE = "\x1b[?1049"  # and h: the other screen, l: back
CURSOR = "\x1b[?25"  # and h: it is seen, l: it is not


def test_watch_draws_again_and_ctrl_c_is_its_end(terminal, db, holds):
    """On the other screen, without clearing it; the terminal is as before, the last picture stays, exit 0."""
    holds.register()
    watch = terminal("status", "--watch", "--interval", "0.2")
    first = watch.until("Ctrl-C ends")
    assert first.count(ALTERNATE + "h") == 1
    assert re.search(r"holds +idle", without_colours(first))
    holds.due(3)
    later = watch.until(r"late since.*(\n.*)*Ctrl-C ends")
    assert "\x1b[2J" not in later, "the screen flickers"

    os.write(watch.main, b"\x03")
    code, rest = watch.end()
    assert code == 0
    assert rest.count(ALTERNATE + "l") == 1
    assert rest.rindex(CURSOR + "h") > rest.rfind(CURSOR + "l")
    after = rest[rest.index(ALTERNATE + "l") :]
    assert "holds late since" in without_colours(after)
    assert "Traceback" not in rest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_watch_puts_the_terminal_right_when_it_is_killed(terminal, holds, number):
    """And the exit code tells the signal."""
    holds.register()
    watch = terminal("status", "--watch", "--interval", "60")
    watch.until("Ctrl-C ends")
    watch.popen.send_signal(number)
    code, rest = watch.end()
    assert code == 128 + number
    assert ALTERNATE + "l" in rest
    assert CURSOR + "h" in rest


def test_watch_follows_the_size_of_the_terminal(terminal, holds):
    """At once, not at the next look; never higher or wider than the terminal."""
    for number in range(12):
        holds.register(f"policy-{number}")
    holds.due(1)
    watch = terminal("status", "--watch", "--interval", "600", size=(12, 80))
    low = watch.until("Ctrl-C ends")
    assert "more need somebody" in low
    assert low.count("\n") < 12
    watch.resize(50, 120)
    wide = watch.until("Ctrl-C ends")
    assert "last 15 min" in wide
    assert len(re.findall(r"policy-\d+ late since|policy-\d+.{0,9} late since", without_colours(wide))) > 5


def test_watch_survives_an_outage(terminal, cluster):
    """The last picture stays, with what is wrong and for how long; it goes on when the database is back."""
    install_sql(conninfo=cluster.url("postgres"))
    with psycopg.connect(cluster.url("postgres"), autocommit=True) as db:
        Holds(db).register()
    watch = terminal("status", "--watch", "--interval", "0.2", url=cluster.url("postgres"), size=(24, 120))
    watch.until("Ctrl-C ends")
    cluster.stop()
    lost = watch.until("no answer for")
    assert re.search(r"holds +idle", without_colours(lost))
    cluster.start()
    watch.until("Ctrl-C ends")
    os.write(watch.main, b"\x03")
    code, rest = watch.end()
    assert (code, "Traceback" in rest) == (0, False)


def test_watch_ends_while_it_waits_for_the_database(terminal, db, holds, connect):
    """Ctrl-C cancels the statement in hand: nothing of it stays on the server."""
    holds.register()
    other = connect(autocommit=False)
    watch = terminal("status", "--watch", "--interval", "0.1")
    watch.until("Ctrl-C ends")
    other.execute("lock table pgreaper.policies in access exclusive mode")

    def wait(wanted: int, condition: str) -> None:
        query = (
            "select count(*) from pg_stat_activity where datname = current_database() and application_name = %s and "
        )
        end = time.monotonic() + 10
        while db.execute(query + condition, ["pgreaper/status"]).fetchone() != (wanted,):
            assert time.monotonic() < end, condition
            time.sleep(0.01)

    wait(1, "wait_event_type = 'Lock'")
    os.write(watch.main, b"\x03")
    code, rest = watch.end()
    assert (code, "Traceback" in rest) == (0, False)
    wait(0, "true")
    other.rollback()


def test_watch_in_a_pipe(start, holds):
    """Picture after picture; Ctrl-C ends it with 0."""
    holds.register()
    watching = start("status", "--watch", "--interval", "0.05")
    for _ in range(3):
        while not watching.popen.stdout.readline().startswith("holds"):
            pass
    watching.popen.send_signal(signal.SIGINT)
    result, _ = watching.end()
    assert (result.code, result.err) == (0, "")


def test_colours(terminal, db, holds):
    """Late is red; NO_COLOR is honoured."""
    holds.due(1)
    holds.register()
    _, shown = terminal("status").end()
    assert re.search(r"\x1b\[1;31mlate", shown)
    _, plain = terminal("status", NO_COLOR="1").end()
    assert "late" in plain
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", plain)


def test_a_picture_of_it(look, holds, tmp_path):
    """--svg draws what is shown, in colour; with --watch it makes no sense."""
    holds.due(1)
    holds.register("<&>")
    picture = tmp_path / "status.svg"
    assert "late since" in told(look, "--svg", str(picture))
    drawn = picture.read_text()
    assert drawn.startswith("<svg")
    assert "&lt;&amp;&gt;" in drawn
    assert "█" in drawn
    assert look("status", "--svg", str(picture), "--watch").code == 2


# -- for machines


def documented() -> dict[str, set[str]]:
    """The fields that docs/status.md lists, by the heading under which it does."""
    text = (ROOT / "docs/status.md").read_text()
    sections = re.split(r"^### `?([\w\[\].]+)`?.*$", text, flags=re.MULTILINE)[1:]
    return {
        name: set(re.findall(r"^\| `(\w+)` \|", body, re.MULTILINE))
        for name, body in zip(sections[::2], sections[1::2], strict=True)
    }


def test_c113_the_fields_are_a_contract(pgreaper, db, holds, connect):
    """Pinned here, documented there: every field of every part, from a policy that has all the parts."""
    holds.due(20)
    holds.register()
    db.execute(
        "select pgreaper.reaper_fail(c.token, c.key, 'X', false) from pgreaper.reaper_claim('holds', 1, 'w') as c"
    )
    db.execute("select pgreaper.reaper_claim('holds', 1, 'w')")
    connect(application_name="pgreaper/h/1")
    document = pgreaper("status", "--json").json
    (policy,) = document["policies"]
    parts = {"document": document, "workers": document["workers"][0], "policies": policy} | {
        name: policy[name][0] for name in ("notices", "backlog", "activity", "dead_by_class", "leases")
    }
    found = {name: set(part) for name, part in parts.items()}
    assert found == {
        "document": set("schema_version command at database workers policies".split()),
        "workers": {"worker", "host", "connected_at"},
        "policies": set(
            "policy target owner state reason due due_capped oldest_deadline oldest_due_seconds oldest_retry_seconds "
            "leased retrying dead "
            "expired already_done not_eligible retries dead_letters taken_back duplicate_rate objective_seconds "
            "lateness_p50_seconds lateness_p99_seconds lateness_max_seconds start_p50_seconds start_p99_seconds "
            "finish_p50_seconds finish_p99_seconds clock_skew_seconds last_success "
            "condition late waited_seconds waited_for notices backlog activity per_minute dead_by_class leases "
            "next_retry paused_at paused_by suspended_since suspended_until last_worker".split()
        ),
        "notices": {"state", "what", "why", "since", "next"},
        "backlog": {"age", "due", "capped"},
        "activity": {"minute", "expired"},
        "dead_by_class": {"error_class", "sqlstate", "constraint_name", "holds", "since"},
        "leases": {"worker", "holds", "attempt", "claimed_at", "claim_until", "lapsed"},
    }
    assert documented() == found
    assert {policy["condition"]} <= set(STATES)


def test_watch_json_tells_of_an_outage(start, cluster):
    """A document a line, also then: with the error, and without policies."""
    install_sql(conninfo=cluster.url("postgres"))
    with psycopg.connect(cluster.url("postgres"), autocommit=True) as db:
        Holds(db).register()
    watching = start("status", "--watch", "--json", "--interval", "0.1", url=cluster.url("postgres"))
    line = json.loads(watching.popen.stdout.readline())
    assert (line["error"], [p["policy"] for p in line["policies"]]) == (None, ["holds"])
    cluster.stop()
    while json.loads(watching.popen.stdout.readline())["error"] is None:
        pass
    line = json.loads(watching.popen.stdout.readline())
    assert (line["error"]["code"], line["policies"]) == ("database-unavailable", [])
    cluster.start()
    while json.loads(watching.popen.stdout.readline())["error"] is not None:
        pass

"""
C085: what each command answers to a script, in one table.

``0`` done, ``1`` something failed, ``2`` usage, ``3`` a check did not hold, ``75`` the database is away or read-only;
data on stdout, all else on stderr; with ``--json`` one document, whatever happens.  The rows of a run of `work`
in which holds fail, or which a signal ends, are in test_signals.py and tests/daemon.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
import psycopg
import pytest

from pgreaper.cli import cli, main
from tests.cli.conftest import Result, environment
from tests.conftest import Holds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Run = Callable[..., Result]

UNREACHABLE = "postgresql://u:s3cret@127.0.0.1:1/d"
ROLE = "pgreaper_c085"
OVERDUE = "--deadline=expires_at --status=status --held=held --expired=expired --owner=me"


@dataclass(frozen=True, slots=True)
class Row:
    """
    A call that goes well in a database with policy `holds`, and its exit code in each condition.

    ``code`` when all is well, ``bare`` without pgreaper in the database, ``unknown`` with another policy's name,
    ``reading`` on a read-only node; ``down`` is None for what asks no database.  ``fields``: of the document.
    """

    arguments: str
    fields: str
    code: int = 0
    down: int | None = 75
    bare: int = 1
    unknown: int | None = None
    reading: int = 0


def local(arguments: str, fields: str, *, code: int = 0) -> Row:
    """A command that asks no database."""
    return Row(arguments, fields, code=code, down=None, bare=code, reading=code)


# In an order in which they may be called one after the other.
TABLE = {
    "install": Row("", "changed before revision", bare=0, reading=0),
    "register": Row(f"holds holds {OVERDUE}", "policy target dry_run changes index lacking_rights", reading=75),
    "policies": Row("", "policies"),
    "grant": Row(f"{ROLE} --as=worker", "role kind dry_run statements exit_code", reading=75),
    "revoke": Row(ROLE, "role statements", reading=75),
    "preview": Row(
        "holds",
        "policy due due_capped oldest_deadline locked leased retrying dead no_deadline no_state looked_at",
        unknown=2,
    ),
    "work": Row("holds", "exit_code ended worker seconds reconnects outcomes policies error", unknown=2, reading=75),
    "listen": Row(
        "--once --from=stdin:",
        "exit_code ended listener source seconds reconnects received done put_off lost rejected outcomes policies"
        " error",
        reading=75,
    ),
    "relay": Row(
        "holds --once --to=http://127.0.0.1:1/",
        "exit_code ended worker relay policy to created seconds reconnects batches delivered retried dead returned"
        " unconfirmed lost leased leased_until refused troubles error",
        unknown=2,
        reading=75,
    ),
    "relays list": Row("", "relays"),
    "relays dead": Row("", "more dead_events"),
    "relays resend": Row("holds --all", "dry_run relay resent", reading=75),
    # Its document when there is one: tests/relay.
    "relays remove": Row("nothing --yes", "error exit_code", code=2, reading=75),
    "pause": Row("holds", "policy changed", unknown=2, reading=75),
    "resume": Row("holds", "policy changed", unknown=2, reading=75),
    "status": Row("holds", "at database workers policies", unknown=2),
    "check": Row("holds", "ok line policies judged findings exit_code", unknown=2),
    "prune": Row("", "dry_run ended seconds calls removed policies", reading=75),
    "verify": Row("holds", "holds checks exit_code", unknown=2),
    "metrics": Row("", "policies unread"),
    "report": Row(
        "holds --html=/dev/null", "database at since until step_seconds headline kept policies more", unknown=2
    ),
    "history": Row("holds 1", "policy key entries", unknown=2),
    "dead list": Row("holds", "more dead_letters", unknown=2),
    # Its document when there is one: test_dead.py.
    "dead show": Row("holds 1", "error exit_code", code=1, unknown=2, reading=1),
    "dead replay": Row("holds --all", "dry_run replayed moot", unknown=2, reading=75),
    "dead discard": Row("holds --all --reason=x", "dry_run discarded", unknown=2, reading=75),
    "doctor": Row(
        "holds", "healthy database role server policies checks findings exit_code", bare=3, unknown=2, reading=3
    ),
    "discover": Row("", "tables candidates skipped", bare=0),
    "cron print": Row("--policy=holds", "job database statements ready", unknown=2),
    # There is no pg_cron on this server: said, with what a superuser would do, and nothing was done.
    "cron enable": Row("--policy=holds", "change job statements error exit_code", code=1, unknown=2, reading=1),
    "cron disable": Row("", "error exit_code", code=1, reading=1),
    "cron status": Row("", "works pg_cron jobs findings late exit_code", code=3, reading=3),
    "deploy print crontab": local("holds", "files written_to"),
    "deploy print systemd": local("holds", "files written_to"),
    "deploy print k8s": local("holds", "files written_to"),
    "heartbeat": local("/nowhere/heartbeat", "alive worker age_seconds max_age_seconds exit_code", code=3),
    "unregister": Row("holds", "policy changed", unknown=2, reading=75),
    "uninstall": Row("", "changed before revision kept", bare=0, reading=75),
}
# Starts a server of its own: test_demo.py.
ELSEWHERE = {"demo"}


def commands(command: click.Command = cli, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Every command that can be given, by its full name."""
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from commands(below, (*path, name))
    else:
        yield " ".join(path)


def test_the_table_has_every_command():
    assert sorted(commands()) == sorted({*TABLE, *ELSEWHERE})


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """A function that runs a command of the table on a database: ``run(url, name, *arguments)``."""

    def run(url: str, name: str, *arguments: str) -> Result:
        monkeypatch.setenv("DATABASE_URL", url)
        capsys.readouterr()
        code = main([*name.split(), *arguments])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        assert "s3cret" not in err + out
        return Result(code, out, err)

    return run


def exact(digits: str) -> int:
    """A number that a reader with nothing but doubles, jq or JavaScript, reads as it is."""
    assert abs(int(digits)) < 2**53, f"{digits} is rounded by whoever reads it"
    return int(digits)


def read(text: str) -> Any:
    """The one document that a text is; raises ValueError."""
    return json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"), parse_int=exact)


@pytest.fixture
def twice(run: Run) -> Callable[..., str]:
    """
    A function that runs a command as it is and with --json, and gives its exit code, or what is wrong about it.

    Wrong is: a failure that says nothing on stderr or that looks unlike the others, one that prints on stdout, a
    document that is not the only thing there or lacks a field, another exit code in it, or another exit code.
    """

    def twice(url: str, name: str, arguments: str, *more: str, fields: str | None = None) -> str:
        text = run(url, name, *arguments.split(), *more)
        if text.code == 0 and (before := {"unregister": "register", "revoke": "grant"}.get(name)):
            run(url, before, *TABLE[before].arguments.split())
        both = run(url, name, *arguments.split(), *more, "--json")
        try:
            document = read(both.out)
        except ValueError:
            return f"no document: {both.out!r} {both.err!r}"
        wrong = []
        if text.code != both.code:
            wrong.append(f"{text.code} and with --json {both.code}")
        if document.get("schema_version") != 1 or document.get("command") != name:
            wrong.append(f"it is of {document.get('command')}")
        if document.get("exit_code", both.code) != both.code:
            wrong.append(f"exit_code is {document['exit_code']}")
        if text.code in (1, 2, 75):
            first, *rest = text.err.splitlines() or [""]
            if not first.startswith("error: ") or not all(line.startswith("hint: ") for line in rest) or len(rest) > 1:
                wrong.append(f"says {text.err!r}")
            if both.err != text.err:
                wrong.append(f"says with --json {both.err!r}")
            if name not in ("cron enable", "work", "metrics") and text.out:
                wrong.append(f"prints {text.out!r}")
            error = document.get("error") or {}
            if not {"code", "message", "hint", "sqlstate"} <= error.keys() or document.get("exit_code") != text.code:
                wrong.append(f"tells {document}")
        elif text.err and text.code == 0:
            wrong.append(f"says {text.err!r}")
        if fields is not None and document.keys() - {"schema_version", "command"} != set(fields.split()):
            wrong.append(f"has {' '.join(k for k in document if k not in ('schema_version', 'command'))}")
        return "; ".join(wrong) or str(text.code)

    return twice


@dataclass(frozen=True, slots=True)
class Shop:
    url: str
    db: psycopg.Connection[Any]


@pytest.fixture
def shop(run: Run, new_database: Callable[[], str]) -> Iterator[Shop]:
    """A database as `pgreaper install` leaves it, with a table of holds that is not registered yet."""
    url = new_database()
    assert run(url, "install").code == 0
    with psycopg.connect(url, autocommit=True) as db:
        Holds(db)
        db.execute(f"create role {ROLE} login")
        yield Shop(url, db)
        db.execute("set default_transaction_read_only = off")
        db.execute(f"drop owned by {ROLE}")
        db.execute(f"drop role {ROLE}")


def test_c085_fine(twice, shop):
    """Everything there, nothing due."""
    found = {name: twice(shop.url, name, row.arguments, fields=row.fields) for name, row in TABLE.items()}
    assert found == {name: str(row.code) for name, row in TABLE.items()}


def test_c085_database_down(twice):
    wanted = {name: row for name, row in TABLE.items() if row.down is not None}
    found = {name: twice(UNREACHABLE, name, row.arguments) for name, row in wanted.items()}
    assert found == {name: str(row.down) for name, row in wanted.items()}


def test_c085_not_installed(run, twice, new_database):
    """1, and how to install it; looking round, and installing, need no pgreaper."""
    found, hints = {}, {}
    for name, row in TABLE.items():
        # A database each: one of them installs it.
        url = new_database() if row.bare == 0 and row.down is not None else None
        url = url or new_database()
        found[name] = twice(url, name, row.arguments)
        if row.bare == 1:
            hints[name] = "hint: Run `pgreaper install`" in run(url, name, *row.arguments.split()).err
    assert found == {name: str(row.bare) for name, row in TABLE.items()}
    assert [name for name, told in hints.items() if not told] == []


def test_c085_unknown_policy(run, twice, dsn, holds):
    """2, and the name that was probably meant."""
    holds.register()
    wanted = {name: row for name, row in TABLE.items() if row.unknown is not None}
    changed = {name: row.arguments.replace("holds", "hold", 1) for name, row in wanted.items()}
    found = {name: twice(dsn, name, changed[name]) for name in wanted}
    assert found == {name: str(row.unknown) for name, row in wanted.items()}
    hints = {name: run(dsn, name, *changed[name].split()).err.splitlines()[1:] for name in wanted}
    assert hints == {name: ["hint: Did you mean holds?"] for name in wanted}


def test_c085_bad_option(twice):
    """2, before anything else is tried."""
    found = {name: twice(UNREACHABLE, name, row.arguments, "--no-such-option") for name, row in TABLE.items()}
    assert found == dict.fromkeys(TABLE, "2")


def test_c085_read_only(run, twice, shop):
    """75 for what writes: try later, or elsewhere.  Looking works."""
    run(shop.url, "register", *TABLE["register"].arguments.split())
    shop.db.execute(f"alter database {shop.db.info.dbname} set default_transaction_read_only = on")
    found = {name: twice(shop.url, name, row.arguments) for name, row in TABLE.items()}
    assert found == {name: str(row.reading) for name, row in TABLE.items()}


def test_c113_odd_keys_and_deadlines(run, shop):
    """Keys that JSON has no type for, deadlines at the ends of time, NaN beside them: one exact document each."""
    keys = {
        "bigint": ["9007199254740993"],
        "uuid": ["0f8fad5b-d9cb-469f-a165-70867728950e"],
        "numeric": ["1e40", "NaN"],
        "bytea": [r"\x00ff"],
        "timestamptz": ["infinity", "2026-01-02 03:04:05+01"],
        "text": ["", "a\nERROR", "żółć%s'", "\u2028"],
    }
    per_policy = [
        "preview {}",
        "status {}",
        "check {} --max-dead=0",
        "verify {}",
        "dead list {}",
        "dead replay {} --all --dry-run",
        "doctor {}",
    ]
    calls = []
    for type_, values in keys.items():
        table = f"odd_{type_}"
        shop.db.execute(
            f"create table {table} (id {type_} primary key, status text, expires_at timestamptz, n numeric)"
        )
        for value in values:
            shop.db.execute(f"insert into {table} values (%s, 'held', '-infinity', 'NaN')", [value])
        shop.db.execute(f"alter table {table} add check (status <> 'expired')")
        assert run(shop.url, f"register {table} {table} {OVERDUE} --payload=n").code == 0
        calls += [call.format(table) for call in per_policy]
    failed = run(shop.url, "work", "--json")
    letters = json.loads(run(shop.url, "dead list", "--json").out)["dead_letters"]
    assert (failed.code, len(letters)) == (1, sum(map(len, keys.values())))
    calls += [
        "work",
        "policies",
        "discover",
        "doctor",
        "status",
        "check",
        "prune",
        "prune --dry-run",
        "metrics",
        "cron print",
        "cron status",
        f"grant {ROLE} --as=reader",
    ]
    for call in calls:
        result = run(shop.url, call, "--json")
        read(result.out)
        # Something is wrong here, and the commands that judge say so: 3.
        assert (result.code in (0, 3), result.err) == (True, ""), call
    for letter in letters:
        assert isinstance(letter["key"], str)
        for name in ("dead show", "history"):
            result = run(shop.url, name, letter["policy"], letter["key"], "--json")
            assert read(result.out)["key"] == letter["key"]


# Each command in a process of its own, whose reader has gone before it writes; the imports are paid for once.
DEAF = """
import json, os, sys
import click, pgreaper.cli, psycopg
for name in pgreaper.cli.COMMANDS:
    pgreaper.cli.cli.get_command(click.Context(pgreaper.cli.cli), name)
for arguments in json.load(sys.stdin):
    read, write = os.pipe()
    os.close(read)
    err_read, err_write = os.pipe()
    if not (child := os.fork()):
        os.dup2(write, 1)
        os.dup2(err_write, 2)
        sys.argv = ["pgreaper", *arguments]
        pgreaper.cli.run()
    os.close(write)
    os.close(err_write)
    said = open(err_read).read()
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said]), flush=True)
"""


@pytest.mark.parametrize("more", [[], ["--json"]], ids=["text", "json"])
def test_c085_nobody_reads(shop, more):
    """`pgreaper … | head -0`: no complaint, however much was to be said."""
    names = [name for name, row in TABLE.items() if row.code in (0, 3) and name not in ("install", "uninstall")]
    calls = [[*name.split(), *TABLE[name].arguments.split(), *more] for name in names]
    done = subprocess.run(
        [sys.executable, "-c", DEAF], input=json.dumps(calls), env=environment(shop.url),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found: dict[str, Any] = dict(zip(names, map(json.loads, done.stdout.splitlines()), strict=True))
    quiet = {"work", "listen", "heartbeat"} if not more else set()  # these print nothing
    wanted = {name: [TABLE[name].code if name in quiet else 141, ""] for name in names}
    if not more:
        found["heartbeat"][1] = ""  # it says that there is none, on stderr
    assert found == wanted

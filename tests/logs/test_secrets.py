"""
C062 over everything: what is private is planted wherever a row, a trigger, a view, a handler or a URL can put it, and
looked for in every output of every command and in every book of the database.

What is planted begins with ``s3cr3t-`` and says where it was: a test that fails names the place.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import cycle
from typing import TYPE_CHECKING, Any

import pytest

from pgreaper.cli import COMMANDS, main
from pgreaper.embedded import Cluster
from tests.cli.conftest import PGREAPER, Result, environment, in_process, pgreaper, start, wait_until  # noqa: F401
from tests.queues.broker import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg

# What a trigger may call its error: permanent ones, ours, those of the environment, and those that read like our own.
CODES = """P0001 P0002 22023 23505 23514 42501 42883 42P01 42703 42704 3F000 XX000 XX001 RP001 RP002 RP003 RP004 RP005
40001 40P01 55P03 57014 53100 53300 57P01 57P03 58030 08000 08006 08P01 25006 25P03 28P01 28000 0A000""".split()
# How a row may be refused otherwise.
KINDS = ["unique", "check", "cast", "veto", "elsewhere", "deferred", "domain"]
# What a function in a view may say while somebody only looks.
READING = ["42501", "42P01", "42703", "22012", "P0001", "55P03"]

COVERED = {
    "work", "preview", "status", "policies", "dead", "history", "doctor", "verify", "discover", "pause", "resume",
    "register", "unregister", "cron", "check", "metrics", "report", "prune",
    "listen", "relay", "relays",
}  # fmt: skip
# They meet no row: a server of their own, templates, a file, rights on objects, our own SQL.
ELSEWHERE = {"demo", "deploy", "heartbeat", "grant", "revoke", "install", "uninstall"}


@pytest.fixture
def planted(db: psycopg.Connection[Any]) -> None:
    """One table, a view and a policy for each way to fail; each row, and all that the database says, has a secret."""
    db.execute(
        """
        create domain shy as text check (value !~ 'never');
        create table tickets (id bigint generated always as identity primary key, status text not null default 'held',
          expires_at timestamptz not null default clock_timestamp() - interval '1 hour', email text not null,
          kind text not null, note text, constraint polite check (not (kind = 'check' and status = 'expired')));
        create index on tickets (kind, expires_at) where status = 'held';
        create unique index one_of_a_kind on tickets ((case when kind = 'unique' and status = 'expired'
          then email end));
        create table loud (on_read boolean not null);
        insert into loud values (false);

        create function shout(code text, what text) returns void language plpgsql as $$ begin
          raise exception using errcode = code, message = 's3cr3t-message ' || what, detail = 's3cr3t-detail ' || what,
            hint = 's3cr3t-hint ' || what, constraint = 's3cr3t-constraint', table = 's3cr3t-table',
            column = 's3cr3t-column', schema = 's3cr3t-schema', datatype = 's3cr3t-type'; end $$;

        create function fails() returns trigger language plpgsql as $$ begin
          raise notice 's3cr3t-notice %', new.email;
          raise warning 's3cr3t-warning %', new.email using detail = new.email;
          case new.kind
            when 'unique', 'check', 'deferred' then null;
            when 'cast' then perform new.email::integer;
            when 'domain' then perform ('never ' || new.email)::public.shy;
            when 'veto' then return null;
            when 'elsewhere' then new.status := 'free';
            else if new.kind ~ '^(write|handler)' then
              if new.kind ~ '^write' then perform public.shout(substr(new.kind, 7), new.email); end if;
            end if;
          end case;
          return new; end $$;
        create trigger fails before update on tickets for each row execute function fails();

        create function fails_late() returns trigger language plpgsql as $$ begin
          if new.kind = 'deferred' then perform public.shout('23514', new.email); end if; return null; end $$;
        create constraint trigger fails_late after update on tickets deferrable initially deferred
          for each row execute function fails_late();

        create function peeks(code text, what text) returns boolean language plpgsql volatile as $$ begin
          if (select on_read from public.loud) then raise notice 's3cr3t-notice %', what;
            perform public.shout(code, what); end if; return true; end $$;
        """
    )
    kinds = [*KINDS, *(f"write-{code}" for code in CODES), "handler", *(f"read-{code}" for code in READING)]
    db.execute(
        "insert into tickets (kind, email) select k, 's3cr3t-value-' || g || '@example.com'"
        " from unnest(%s::text[]) as k, generate_series(1, 3) as g",
        [kinds],
    )
    db.execute(
        "insert into tickets (kind, email, status) select kind, email, 'expired' from tickets where kind = 'unique'"
    )
    for kind in kinds:
        view = f'"{kind}"'
        peek = f" and public.peeks('{kind[5:]}', email)" if kind.startswith("read-") else ""
        db.execute(
            f"create view {view} as select id, status, expires_at, email, kind from tickets where kind = '{kind}'{peek}"
        )
        db.execute(
            "select pgreaper.reaper_register(policy => %s, target => %s::regclass, deadline_column => 'expires_at',"
            " status_column => 'status', held => '{held}', expired => 'expired',"
            " owner => 'tests', payload_columns => '{email}', key_columns => '{id}')",
            (kind, view),
        )
    db.execute("update loud set on_read = true")


def said(result: Result) -> str:
    return result.out + result.err


def found(text: str) -> set[str]:
    return set(re.findall(r".{0,60}s3cr3t-\w*.{0,40}|.{0,60}@example.{0,20}", text))


def books(db: psycopg.Connection[Any]) -> str:
    """All that pgreaper keeps, as text."""
    tables = db.execute("select relname from pg_class where relnamespace = 'pgreaper'::regnamespace and relkind = 'r'")
    rows = [db.execute(f'select to_jsonb(t)::text from pgreaper."{t}" as t').fetchall() for (t,) in tables.fetchall()]
    return "\n".join(text for table in rows for (text,) in table)


HANDLER = """
import asyncio, sys
class Refused(ValueError):
    def __str__(self): return "s3cr3t-str"
    __repr__ = __str__
def chain(call):
    assert "s3cr3t-value" in call.payload["email"]
    try:
        raise KeyError("s3cr3t-cause " + call.payload["email"])
    except KeyError as cause:
        error = Refused("s3cr3t-raised")
        error.add_note("s3cr3t-note")
        raise error from cause
async def group(call):
    await asyncio.sleep(0)
    raise ExceptionGroup("s3cr3t-group", [TimeoutError("s3cr3t-inner"), Refused()])
def leaves(call):
    sys.exit("s3cr3t-exit " + call.payload["email"])
raise_on_import = False
"""
BROKEN = "raise RuntimeError('s3cr3t-import')\n"


@pytest.fixture
def handlers(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "leaky_handlers.py").write_text(HANDLER)
    (tmp_path / "leaky_import.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in ("leaky_handlers", "leaky_import"):
        sys.modules.pop(name, None)


def test_every_command_is_swept():
    """A command that comes in is either swept here or meets no row."""
    assert set(COMMANDS) <= COVERED | ELSEWHERE


def test_c062_nothing_private_is_in_any_output_or_book(db, planted, handlers, in_process, monkeypatch):  # noqa: F811
    """Every command, as text and as JSON, against every way to fail; then all the books."""
    # A run that ends waits so long for an environment to come back.
    monkeypatch.setattr("pgreaper.session._PATIENCE", 0.2)
    lost = [f"write-{code}" for code in CODES if code.startswith(("57P", "25", "RP004"))]
    rest = [p for (p,) in db.execute("select name from pgreaper.policies").fetchall() if p not in lost]
    runs: list[tuple[str, ...]] = [
        ("work", "--once", *rest),
        ("work", "--once", *rest, "--log-format", "json", "--log-level", "debug"),
        *(("work", policy, "--log-format", form, "--json") for policy, form in zip(lost, cycle(["text", "json"]))),
        ("work", "handler", "--handler", "leaky_handlers:chain", "--once", "--batch", "1"),
        ("work", "handler", "--handler", "leaky_handlers:group", "--once", "--log-format", "json", "--batch", "1"),
        ("work", "--handler", "leaky_import:any"),
        ("work", "--handler", "leaky_import:any", "--log-format", "json"),
    ]
    looks: list[tuple[str, ...]] = [
        ("preview", kind) for kind in ("check", "write-P0001", *(f"read-{code}" for code in READING))
    ]
    looks += [("status",), *(("status", f"read-{code}") for code in READING), ("status", "unique")]
    looks += [("policies",), ("policies", "check"), ("doctor",), ("verify",), ("discover",), ("cron", "status")]
    looks += [
        ("dead", "list"),
        ("dead", "show", "check", key_of(db, "check")),
        ("history", "check", key_of(db, "check")),
    ]
    looks += [("history", "read-42501", key_of(db, "read-42501"))]
    looks += [("dead", "replay", "check", "--all", "--dry-run"), ("dead", "discard", "cast", "--all", "--reason", "r")]
    looks += [("dead", "replay", "unique", "--all"), ("pause", "check"), ("resume", "check"), ("prune", "--dry-run")]
    looks += [("register", "again", "read-22012", "--deadline", "expires_at", "--status", "status", "--held", "held",
               "--expired", "expired", "--owner", "o", "--key", "id"), ("unregister", "again")]  # fmt: skip
    looks += [("check",), ("check", "--max-lateness", "1 s"), ("metrics",), ("report", "--html", "-")]
    runs += [look for look in looks if look[0] in COMMANDS]
    runs += [(*look, "--json") for look in looks if look[0] in COMMANDS and look[:3] != ("report", "--html", "-")]
    runs += [("report", "--json")] if "report" in COMMANDS else []
    runs += [("work", *rest, "--json")]

    leaks = {run: leak for run in runs if (leak := found(said(in_process(*run))))}

    assert not leaks, "\n".join(f"{run}: {leak}" for run, leak in leaks.items())
    assert db.execute("select count(*) from pgreaper.dead_letters").fetchone()[0] > 20
    assert db.execute("select count(*) from tickets where status = 'expired'").fetchone()[0] > 0
    assert not found(books(db))


@pytest.mark.parametrize("form", ["text", "json"])
def test_c062_commands_from_a_queue_say_nothing(db, planted, dsn, form):
    """Commands for every hold, and messages that are none: neither what fails nor what is in a message is told."""
    rows = db.execute("select p.name, t.id from pgreaper.policies as p, tickets as t").fetchall()
    messages = [json.dumps({"policy": policy, "key": key}) for policy, key in rows]
    messages += [
        json.dumps({"policy": "s3cr3t-policy", "key": 1}),
        json.dumps({"policy": "check", "key": "s3cr3t-key"}),
    ]
    done = subprocess.run(
        [*PGREAPER, "listen", "--from", "stdin:", "--once", "--log-format", form, "--json"],
        input="\n".join([*messages, "s3cr3t-body", '{"policy": ["s3cr3t-list"]}']),
        env=environment(dsn),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    run = Result(done.returncode, done.stdout, done.stderr)
    assert run.code == 1, run
    assert not found(said(run)), run
    assert run.json["outcomes"]["expired"] > 0
    assert run.json["outcomes"]["dead-letter"] + run.json["outcomes"]["retry"] > 10
    assert run.json["rejected"] == {"Malformed": 2, "UnknownPolicy": 1, "WrongKey": 1}
    assert not found(books(db))


@pytest.mark.parametrize(("form", "code"), [("text", "P0001"), ("json", "42501"), ("json", "55P03")])
def test_c062_events_to_a_queue_say_nothing(db, planted, pgreaper, in_process, form, code):  # noqa: F811
    """What a view says while the payload is read is not repeated; without a payload no value of a row leaves."""
    db.execute("select pgreaper.reaper_relay('handler')")
    db.execute("call pgreaper.reaper_sweep('handler')")
    plain = "create or replace view handler as select id, status, expires_at, email, kind from tickets where kind = %s"
    db.execute(plain.replace("%s", f"'handler' and public.peeks('{code}', email)"))
    relay = ("relay", "handler", "--to", "stdout:", "--once", "--log-format", form)
    run = pgreaper(*relay, "--payload", "email")
    # A wait for a lock is the server's trouble; what else a row raises is its own event's, which is tried again.
    assert (run.code != 0, run.out) == (code == "55P03", "")
    assert not found(said(run)), run
    db.execute("update pgreaper.undelivered set not_before = now()")
    nobody = pgreaper("relay", "handler", "--to", "amqp://u:s3cr3t-queue@127.0.0.1:1/?queue=q", "--once", "--json")
    assert (nobody.code, found(said(nobody))) == (75, set()), nobody
    for command in (("list",), ("dead",), ("resend", "handler", "--all"), ("remove", "handler")):
        for as_json in ([], ["--json"]):
            assert not found(said(in_process("relays", *command, *as_json))), command
    sent = pgreaper(*relay)
    assert (sent.code, sent.out.count('"policy":"handler"')) == (0, 3), sent
    assert not found(said(sent)), sent
    assert not found(books(db))


def key_of(db: Any, kind: str) -> str:
    return str(db.execute("select min(id) from tickets where kind = %s", (kind,)).fetchone()[0])


def test_c062_debug_is_the_one_way_to_the_servers_words(db, planted, in_process):  # noqa: F811
    """Who asks for them gets the server's words, and the help says what that means; nobody else does."""
    help_ = " ".join(in_process("status", "--help").out.split())
    assert "Show tracebacks and the server's own words, which may hold values of rows; nothing else does." in help_
    quiet = in_process("preview", "read-P0001")
    loud = in_process("preview", "read-P0001", "--debug")
    assert (quiet.code, found(said(quiet))) == (1, set())
    assert "s3cr3t-value" in loud.err


@pytest.mark.parametrize("form", ["text", "json"])
def test_c062_a_handler_that_ends_the_process_says_nothing(db, planted, handlers, pgreaper, tmp_path, form):  # noqa: F811
    """``sys.exit("...")`` prints its argument, were it left to Python."""
    done = pgreaper(
        "work", "handler", "--handler", "leaky_handlers:leaves", "--log-format", form, PYTHONPATH=str(tmp_path)
    )
    assert done.code == 1
    assert not found(said(done)), done


@pytest.fixture(scope="module")
def locked_server() -> Iterator[Cluster]:
    """A server that wants a password over TCP."""
    with Cluster(settings={"listen_addresses": "127.0.0.1", "port": free_port(), "fsync": False}) as cluster:
        yield cluster


URLS = {
    "url": "postgresql://postgres:s3cr3t-url@127.0.0.1:{port}/postgres",
    "escaped": "postgresql://postgres:s3cr3t%2Durl@127.0.0.1:{port}/postgres",
    "keywords": "host=127.0.0.1 port={port} user=postgres password=s3cr3t-word",
    "nobody there": "postgresql://postgres:s3cr3t-url@127.0.0.1:1/postgres",
    "not a URL": "postgresql://postgres:s3cr3t-@url@127.0.0.1:{port}/postgres",
    "query": "postgresql://postgres@127.0.0.1:{port}/postgres?password=s3cr3t-query&sslpassword=s3cr3t-key",
    "options": "postgresql:///postgres?host={host}&port={port}&user={user}&options=-c%20work_mem%3Ds3cr3t-option",
    "long options": "postgresql:///postgres?host={host}&port={port}&user={user}&options=--work_mem%3Ds3cr3t-option",
    "passfile": "postgresql://postgres@127.0.0.1:{port}/postgres?passfile={passfile}",
}
VARIABLES = {
    "PGPASSWORD": {"PGPASSWORD": "s3cr3t-variable"},
    "PGPASSFILE": {"PGPASSFILE": "{passfile}"},
    "PGOPTIONS": {"PGOPTIONS": "-c work_mem=s3cr3t-option", "PGHOST": "{host}", "PGUSER": "{user}"},
}


@pytest.mark.parametrize("command", [("work",), ("work", "--log-format", "json"), ("doctor",), ("status", "--json")],
                         ids=" ".join)  # fmt: skip
def test_c062_no_password_is_in_any_output(locked_server, tmp_path, capsys, monkeypatch, command):
    """Wherever a password, the path of a password file or a setting comes from, and whatever libpq says about it."""
    passfile = tmp_path / "s3cr3t-passfile"
    passfile.write_text("*:*:*:*:s3cr3t-filed\n")
    passfile.chmod(0o600)
    places = {
        "port": locked_server.port, "host": locked_server.host, "user": locked_server.superuser, "passfile": passfile,
    }  # fmt: skip
    cases: list[tuple[str, str | None, dict[str, str]]] = [(name, url, {}) for name, url in URLS.items()]
    tcp = {"PGHOST": "127.0.0.1", "PGPORT": "{port}", "PGUSER": "postgres", "PGDATABASE": "postgres"}
    cases += [(name, None, tcp | variables) for name, variables in VARIABLES.items()]
    leaks = {}
    for name, url, variables in cases:
        with monkeypatch.context() as patch:
            for variable, value in variables.items():
                patch.setenv(variable, value.format(**places))
            arguments = [*command, "--database-url", url.format(**places)] if url else [*command]
            code = main(arguments)
        out, err = capsys.readouterr()
        done = Result(code, out, err)
        assert done.code in (2, 75, 1), (name, done)
        if leak := found(said(done)):
            leaks[name] = leak
        if command == ("work", "--log-format", "json"):
            assert [json.loads(line)["event"] for line in done.err.splitlines()] == ["worker.refused"], name
    assert leaks == {}

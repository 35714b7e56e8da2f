"""Where the database is looked for, how it is opened, and that no password is ever repeated."""

from __future__ import annotations

import json
import os
import re
import traceback

import pytest

from pgreaper.connection import Unreachable, connect, resolve, worker_name
from pgreaper.errors import InvalidInput
from pgreaper.logs import sentences
from pgreaper.worker import Settings, Worker


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in ("PGREAPER_DATABASE_URL", "DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)


def test_the_order_of_settings(monkeypatch):
    """Argument, PGREAPER_DATABASE_URL, DATABASE_URL, libpq's own."""
    assert resolve().parameters == {}
    monkeypatch.setenv("DATABASE_URL", "postgresql://h/three")
    assert resolve().parameters["dbname"] == "three"
    monkeypatch.setenv("PGREAPER_DATABASE_URL", "postgresql://h/two")
    assert resolve().parameters["dbname"] == "two"
    assert resolve("postgresql://h/one").parameters["dbname"] == "one"


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg", "postgresql+psycopg2", "POSTGRES"])
def test_every_usual_scheme(scheme):
    """What Heroku, libpq and SQLAlchemy write."""
    assert resolve(f"{scheme}://u:p%40ss@h:5433/d?sslmode=require").parameters == {
        "user": "u", "password": "p@ss", "host": "h", "port": "5433", "dbname": "d", "sslmode": "require",
    }  # fmt: skip


def test_libpq_keywords():
    assert resolve("host=h dbname='a b'").parameters == {"host": "h", "dbname": "a b"}


@pytest.mark.parametrize(
    "url",
    [
        "mysql://u:s3cret@h/d",
        "postgres://u:s3cret@x@h/d",
        "postgres://u:s3cret/x@h/d",
        "postgres://u:s3cret%zz@h/d",
        "postgres://u:1/s3cret@h/d",
        "postgres://s3cret:s3cret/d",
        "postgres://u:s3cret@h:s3cret/d",
        "postgres://u:p@h/d?s3cret=1&sslmode",
        "s3cret",
        "host=h password='s3cret",
        "host=h s3cret",
    ],
)
def test_c062_a_url_that_cannot_be_read_is_not_repeated(url):
    """libpq's own message would quote the part it stumbled over: it may be the password."""
    with pytest.raises(InvalidInput) as error:
        resolve(url)
    shown = "".join(traceback.format_exception(error.value)) + str(error.value.hint)
    assert error.value.exit_code == 2
    if "?s3cret" not in url:  # a parameter's name is no secret
        assert "s3cret" not in shown.replace(repr(url), "")


def test_c062_a_refused_connection_shows_no_password():
    """Not in the message, not in the traceback, not in the address's repr."""
    address = resolve("postgresql://u:s3cret@127.0.0.1:1/d")
    with pytest.raises(Unreachable) as error:
        connect(address)
    shown = "".join(traceback.format_exception(error.value)) + repr(address) + str(error.value.hint)
    shown += json.dumps({"address": address}, default=str) + f"{address}"
    assert "s3cret" not in shown
    assert "127.0.0.1" in str(error.value)
    assert "\n" not in str(error.value)
    assert error.value.exit_code == 75
    assert not error.value.waiting


def test_a_password_that_libpq_echoes_is_concealed():
    """Whatever the server or libpq says about it."""
    assert resolve("postgresql://u:s3cret@h/d").conceal('fe_sendauth: "s3cret"') == 'fe_sendauth: "***"'


def test_what_a_connection_is_opened_with(dsn):
    """C063, C065, C071: no prepared statements, no startup options, keepalives, a name; given values win."""
    with connect(resolve(dsn)) as connection:
        parameters = connection.info.get_parameters()
        assert connection.prepare_threshold is None
        assert connection.autocommit
        assert "options" not in parameters
        assert parameters["connect_timeout"] == "10"
        assert parameters["tcp_user_timeout"] == "45000"
        assert connection.execute("show application_name").fetchone() == (worker_name(),)
    with connect(resolve(f"{dsn}&application_name=mine&connect_timeout=3")) as connection:
        assert connection.info.get_parameters()["connect_timeout"] == "3"
        assert connection.execute("show application_name").fetchone() == ("mine",)


def test_pgconnect_timeout_is_respected(dsn, monkeypatch):
    monkeypatch.setenv("PGCONNECT_TIMEOUT", "4")
    with connect(resolve(dsn)) as connection:
        assert connection.info.get_parameters()["connect_timeout"] == "4"


def test_a_long_host_name_keeps_its_end(monkeypatch):
    """Pods differ in the end of their names; Postgres cuts at 63 bytes."""
    monkeypatch.setattr("socket.gethostname", lambda: "shop-" + "x" * 200 + "-7f9c4")
    name = worker_name()
    assert len(name) == 63
    assert name.endswith(f"-7f9c4/{os.getpid()}")


@pytest.fixture
def guest(db, dsn):
    """The URL of a role that may hold one connection."""
    db.execute("create role pgreaper_guest login connection limit 1")
    yield re.sub(r"//[^@]*@", "//pgreaper_guest@", dsn)
    db.execute("drop owned by pgreaper_guest")
    db.execute("drop role pgreaper_guest")


def test_c036_a_full_server_is_worth_waiting_for(guest):
    """A server that has no place is told from one that is not there."""
    with connect(resolve(guest)), pytest.raises(Unreachable, match="too many connections") as error:
        connect(resolve(guest))
    assert error.value.waiting


def test_c036_a_worker_waits_for_its_place_and_then_works(db, holds, guest):
    """No place at first: bounded, jittered waiting instead of a failure; one connection is all it takes."""
    holds.due(3)
    holds.register()
    db.execute("""
        grant usage on schema pgreaper to pgreaper_guest;
        grant execute on all routines in schema pgreaper to pgreaper_guest;
        grant all on all tables in schema pgreaper to pgreaper_guest;
        grant all on all sequences in schema pgreaper to pgreaper_guest;
        grant select, update on holds to pgreaper_guest;
    """)
    occupant = connect(resolve(guest))
    lines: list[str] = []

    def log(line: str) -> None:
        lines.append(line)
        if len(lines) == 2:
            occupant.close()

    run = Worker(resolve(guest), Settings(), log=sentences(log)).run()

    assert (run.exit_code, run.expired) == (0, 3)
    assert len(lines) >= 2
    assert all("trying again in" in line for line in lines)

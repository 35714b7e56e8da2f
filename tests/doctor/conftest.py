"""Fixtures of doctor and discover: the commands on this test's database, and what they print."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import sql

from pgreaper import schema
from pgreaper.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.conftest import Server

    Run = Callable[..., "Result"]


@dataclass(frozen=True, slots=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def run(dsn: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """A function that runs a command on this test's database, or on another one, inside this process."""

    def run(*arguments: str, url: str = dsn) -> Result:
        monkeypatch.setenv("DATABASE_URL", url)
        code = main(list(arguments))
        out, err = capsys.readouterr()
        return Result(code, out, err)

    return run


@pytest.fixture
def paste(run: Run, dsn: str) -> Callable[..., None]:
    """A function that does with a remedy what a person does: statements go into psql, commands into a shell."""

    def paste(finding: dict[str, Any], *, url: str = dsn) -> None:
        assert finding["sql"] or finding["commands"], f"nothing to paste: {finding}"
        with psycopg.connect(url, autocommit=True) as connection:
            for statement in finding["sql"]:
                assert "\n" not in statement
                assert statement.endswith(";")
                connection.execute(statement)
        for command in finding["commands"]:
            # The shell itself reads the quotes; what it makes of them is run here, without another Python.
            done = subprocess.run(
                ["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True, text=True, check=True
            )
            program, *arguments = done.stdout.removesuffix("\0").split("\0")
            assert program == "pgreaper"
            result = run(*arguments, url=url)
            assert result.code == 0, result.err

    return paste


@pytest.fixture(scope="module")
def template(server: Server, worker_id: str) -> Iterator[str]:
    """A database with pgreaper as `pgreaper install` leaves it, to be cloned."""
    name = sql.Identifier(f"pgreaper_installed_{worker_id}")
    with psycopg.connect(server.url(server.maintenance_dbname), autocommit=True) as admin:
        admin.execute(sql.SQL("drop database if exists {}").format(name))
        admin.execute(sql.SQL("create database {} template template0").format(name))
        schema.install(server.url(name.as_string(admin).strip('"')))
        yield name.as_string(admin).strip('"')
        admin.execute(sql.SQL("drop database {} with (force)").format(name))


@pytest.fixture
def installed(server: Server, worker_id: str, template: str) -> Iterator[str]:
    """The URL of a clone of it."""
    name = f"pgreaper_installation_{worker_id}"
    with psycopg.connect(server.url(server.maintenance_dbname), autocommit=True) as admin:
        query = sql.SQL("create database {} template {}").format(sql.Identifier(name), sql.Identifier(template))
        admin.execute(query)
        yield server.url(name)
        admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


class Doctor:
    """The doctor on this test's database; findings by their code."""

    def __init__(self, run: Run, paste: Callable[..., None]) -> None:
        self.run = run
        self._paste = paste

    def look(self, *policies: str, url: str | None = None) -> list[dict[str, Any]]:
        """What is found; the exit code is checked against the levels."""
        result = self.run("doctor", "--json", *policies, **({"url": url} if url else {}))
        report = result.json
        assert "error" not in report, report
        wrong = [f for f in report["findings"] if f["level"] != "note"]
        assert (result.code, report["exit_code"], report["healthy"]) == ((3, 3, False) if wrong else (0, 0, True))
        findings: list[dict[str, Any]] = report["findings"]
        return findings

    def codes(self, *policies: str, url: str | None = None) -> list[str]:
        """The codes of what is found, but for what every look of a superuser finds."""
        return sorted(
            f["code"] for f in self.look(*policies, url=url) if (f["code"], f["level"]) != ("superuser", "note")
        )

    def only(self, code: str, *, level: str, url: str | None = None) -> dict[str, Any]:
        """The one finding of this code, of this level."""
        found = [f for f in self.look(url=url) if f["code"] == code and (code, f["level"]) != ("superuser", "note")]
        assert [f["level"] for f in found] == [level], self.look(url=url)
        return found[0]

    def heal(self, code: str, *, level: str, url: str | None = None, admin: str | None = None) -> dict[str, Any]:
        """The finding of this code, after its remedy was pasted and it has gone."""
        finding = self.only(code, level=level, url=url)
        self._paste(finding, **({"url": admin or url} if admin or url else {}))
        assert code not in self.codes(url=url)
        return finding


@pytest.fixture
def doctor(run: Run, paste: Callable[..., None]) -> Doctor:
    return Doctor(run, paste)


@pytest.fixture
def worker(db: psycopg.Connection[Any], dsn: str) -> Iterator[tuple[str, str]]:
    """A role with what a worker needs, and no more; its name and URL.  See grant_worker."""
    role = f"{db.info.dbname}_worker"
    db.execute(sql.SQL("create role {} login").format(sql.Identifier(role)))
    yield role, make_url(dsn, role)
    db.execute(sql.SQL("drop owned by {r}; drop role {r}").format(r=sql.Identifier(role)))


def make_url(dsn: str, role: str) -> str:
    """The same database as another role."""
    before, _, rest = dsn.partition("//")
    return f"{before}//{role}@{rest.partition('@')[2]}"


def grant_worker(db: psycopg.Connection[Any], role: str, *, targets: bool = True) -> None:
    """What a worker needs on pgreaper and its targets; ``targets=False``: not on these."""
    db.execute("select pgreaper.reaper_grant(%s, 'worker')", [role])
    if not targets:
        db.execute(sql.SQL("revoke all on holds from {}").format(sql.Identifier(role)))

"""Fixtures of doctor and discover: the commands on this test's database, and what they print."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pgreaper.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable

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
def paste(dsn: str) -> Callable[..., None]:
    """A function that does with a remedy what a person does: statements go into psql, commands into a shell."""

    def paste(finding: dict[str, Any], *, url: str = dsn) -> None:
        assert finding["sql"] or finding["commands"], f"nothing to paste: {finding}"
        with psycopg.connect(url, autocommit=True) as connection:
            for statement in finding["sql"]:
                assert "\n" not in statement
                assert statement.endswith(";")
                connection.execute(statement)
        for command in finding["commands"]:
            assert shlex.split(command)[0] == "pgreaper"
            # The shell itself reads the quotes.
            words = f'"$PYTHON" -m {command}'
            environment = {**os.environ, "PYTHON": sys.executable, "DATABASE_URL": url}
            done = subprocess.run(
                ["bash", "-c", words], env=environment, capture_output=True, text=True, timeout=60, check=False
            )
            assert done.returncode == 0, done.stderr

    return paste

"""Fixtures of the command line's tests: real processes, with the environment of nobody in particular."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from pgreaper.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PGREAPER = [sys.executable, "-m", "pgreaper"]


@dataclass(frozen=True, slots=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def environment(dsn: str | None, **more: str) -> dict[str, str]:
    kept = {
        k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "LANG", "PYTHONPATH", "COVERAGE_PROCESS_START")
    }
    return kept | ({"DATABASE_URL": dsn} if dsn else {}) | more


@pytest.fixture
def pgreaper(dsn: str) -> Callable[..., Result]:
    """A function that runs a command on this test's database to its end."""

    def pgreaper(*arguments: str, url: str | None = dsn, **variables: str) -> Result:
        done = subprocess.run(
            [*PGREAPER, *arguments],
            env=environment(url, **variables),
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        return Result(done.returncode, done.stdout, done.stderr)

    return pgreaper


@pytest.fixture
def in_process(dsn: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """The same without a process, for tables of cases: what the program's entry point returns and prints."""

    def in_process(*arguments: str) -> Result:
        monkeypatch.setenv("DATABASE_URL", dsn)
        code = main(list(arguments))
        out, err = capsys.readouterr()
        return Result(code, out, err)

    return in_process


class Process:
    """A command that runs on; stdout and stderr are read at the end."""

    def __init__(self, popen: subprocess.Popen[str]) -> None:
        self.popen = popen

    def end(self, seconds: float = 30) -> tuple[Result, float]:
        """Wait for the end; the result, and how long that took."""
        started = time.monotonic()
        out, err = self.popen.communicate(timeout=seconds)
        return Result(self.popen.returncode, out, err), time.monotonic() - started


@pytest.fixture
def start(dsn: str) -> Iterator[Callable[..., Process]]:
    """A function that starts a command on this test's database."""
    with ExitStack() as stack:

        def start(*arguments: str, url: str | None = dsn) -> Process:
            popen = subprocess.Popen(
                [*PGREAPER, *arguments],
                env=environment(url),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                stdin=subprocess.DEVNULL,
                text=True,
            )
            stack.callback(popen.communicate)
            stack.callback(popen.kill)
            return Process(popen)

        yield start


@pytest.fixture
def wait_until(connect: Callable[..., Any]) -> Callable[..., None]:
    """A function that returns when a query answers true, and fails after some seconds."""
    watcher = connect()

    def wait_until(query: str, *parameters: Any, seconds: float = 15) -> None:
        end = time.monotonic() + seconds
        while not watcher.execute(query, parameters or None).fetchone()[0]:
            if time.monotonic() > end:
                pytest.fail(f"never true: {query}")
            time.sleep(0.005)

    return wait_until

"""
A real PgBouncer before the tests' server.

``dsn`` of these tests leads through it, so every fixture and every test that is collected here does too:
``connect``, ``db``, ``holds``, the driver's ``reaper`` and ``work``, the command line's ``pgreaper`` and ``start``.
``direct`` is the way past it.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pgreaper.cli import main
from tests.cli.conftest import Result, start, wait_until  # noqa: F401  fixtures
from tests.driver.conftest import proxy, reaper, work  # noqa: F401  fixtures

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.conftest import Connect, Server

# Defaults of these tests; every server connection is shared by transactions.
SETTINGS = {
    "pool_mode": "transaction",
    "default_pool_size": "2",
    "server_login_retry": "1",
    "query_wait_timeout": "20",
}

# The roles that tests make; PgBouncer lets in nobody that it does not know.
ROLES = ("pgreaper_nobody", "pgreaper_guest", "pgreaper_app")


class Pooler:
    """One PgBouncer on a socket in a folder of its own; it refuses to be root, so it runs as somebody else then."""

    def __init__(self, program: Path, server: Server, settings: dict[str, str]) -> None:
        self.server = server
        self.folder = Path(tempfile.mkdtemp(prefix="pgreaper-pooler-", dir="/tmp" if os.geteuid() == 0 else None))
        self._program = program
        self._user = pwd.getpwnam("nobody") if os.geteuid() == 0 else None
        self._process: subprocess.Popen[bytes] | None = None
        self._settings = SETTINGS | settings
        found = re.search(r"(\d+)\.(\d+)", subprocess.check_output([program, "--version"], text=True))
        assert found
        if (int(found[1]), int(found[2])) >= (1, 21):
            # Newer ones can keep track of prepared statements: they must not have to.
            self._settings = {"max_prepared_statements": "0"} | self._settings
        if self._user:
            os.chown(self.folder, self._user.pw_uid, self._user.pw_gid)

    def url(self, database: str, *, user: str | None = None, **parameters: str) -> str:
        more = "".join(f"&{name}={value}" for name, value in parameters.items())
        return f"postgresql://{user or self.server.user}@/{database}?host={self.folder}&port=6432{more}"

    def write(self, **settings: str) -> None:
        """Write the configuration; a running PgBouncer reads it with ``tell("reload")``."""
        self._settings |= settings
        password = f" password={self.server.password}" if self.server.password else ""
        users = self.folder / "users"
        users.write_text("".join(f'"{user}" "{self.server.password or ""}"\n' for user in (self.server.user, *ROLES)))
        lines = [
            "[databases]",
            f"* = host={self.server.host} port={self.server.port}{password}",
            "[pgbouncer]",
            "listen_port = 6432",
            f"unix_socket_dir = {self.folder}",
            "auth_type = trust",
            f"auth_file = {users}",
            f"admin_users = {self.server.user}",
            f"logfile = {self.folder}/log",
            *(f"{name} = {value}" for name, value in self._settings.items()),
        ]
        (self.folder / "pgbouncer.ini").write_text("\n".join(lines) + "\n")

    def start(self) -> None:
        self.write()
        who: dict[str, Any] = {}
        if self._user:
            who = {"user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": []}
        self._process = subprocess.Popen(
            [self._program, "--quiet", self.folder / "pgbouncer.ini"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
            **who,
        )
        end = time.monotonic() + 20
        while True:
            with suppress(psycopg.OperationalError):
                self.show("version")
                return
            if time.monotonic() > end or self._process.poll() is not None:
                pytest.fail(f"PgBouncer does not start: {self.log()}")
            time.sleep(0.01)

    def stop(self) -> None:
        """End it as an operator does who does not wait for clients."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=20)
            self._process = None
            for left in (".s.PGSQL.6432", ".s.PGSQL.6432.lock"):
                (self.folder / left).unlink(missing_ok=True)

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def log(self) -> str:
        log = self.folder / "log"
        return log.read_text() if log.exists() else "no log"

    def tell(self, command: str) -> list[dict[str, Any]]:
        """Run a command of the admin console, such as ``pause``, and return its rows."""
        with psycopg.connect(self.url("pgbouncer"), autocommit=True, cursor_factory=psycopg.ClientCursor) as console:
            cursor = console.execute(command)
            if cursor.description is None:
                return []
            names = [column.name for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def show(self, what: str) -> list[dict[str, Any]]:
        return self.tell(f"show {what}")


@pytest.fixture
def new_pooler(needs: Callable[..., Path], server: Server) -> Iterator[Callable[..., Pooler]]:
    """A function that starts a PgBouncer; arguments are settings of it."""
    with ExitStack() as stack:

        def new_pooler(**settings: str) -> Pooler:
            pooler = Pooler(needs("pgbouncer", package="pgbouncer"), server, settings)
            stack.callback(pooler.close)
            pooler.start()
            return pooler

        yield new_pooler


@pytest.fixture
def pooler(new_pooler: Callable[..., Pooler], request: pytest.FixtureRequest) -> Pooler:
    """The PgBouncer of this test; ``@pytest.mark.parametrize("pooler", [{…}], indirect=True)`` changes its settings."""
    return new_pooler(**getattr(request, "param", {}))


@pytest.fixture
def direct(server: Server, postgresql: psycopg.Connection[Any]) -> str:
    """The URL of this test's database, past the pooler."""
    return server.url(postgresql.info.dbname)


@pytest.fixture
def dsn(pooler: Pooler, postgresql: psycopg.Connection[Any]) -> str:
    """The URL of this test's database, through the pooler."""
    return pooler.url(postgresql.info.dbname)


@pytest.fixture
def connect(connect: Connect) -> Connect:
    """The tests' own connections must not prepare statements either, unless they mean to."""
    return lambda **arguments: connect(**({"prepare_threshold": None} | arguments))


@pytest.fixture
def past(direct: str) -> Iterator[psycopg.Connection[Any]]:
    """An autocommit connection past the pooler."""
    with psycopg.connect(direct, autocommit=True) as connection:
        yield connection


@pytest.fixture
def pgreaper(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> Callable[..., Result]:
    """A function that runs a command to its end: what the program's entry point returns and prints."""

    def pgreaper(*arguments: str, url: str | None = None) -> Result:
        with monkeypatch.context() as patch:
            patch.setenv("DATABASE_URL", url or request.getfixturevalue("dsn"))
            code = main(list(arguments))
        out, err = capsys.readouterr()
        return Result(code, out, err)

    return pgreaper

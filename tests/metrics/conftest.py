"""Fixtures of the metrics' tests: a page as a scraper understands it, and daemons with an endpoint."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml  # type: ignore[import-untyped]
from prometheus_client.parser import text_string_to_metric_families

from pgreaper.connection import resolve
from pgreaper.metrics import Source
from tests.cli.conftest import in_process, pgreaper, start, wait_until  # noqa: F401
from tests.driver.conftest import proxy, reaper  # noqa: F401
from tests.replication.conftest import pair  # noqa: F401

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RULES = Path(__file__).resolve().parents[2] / "deploy/prometheus/pgreaper.rules.yml"
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(page: str) -> Samples:
    """Each sample of a page by name and labels; none may be there twice."""
    found: Samples = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, key
            found[key] = sample.value
    return found


def one(page: str | Samples, name: str, **labels: str) -> Any:
    """The value of a sample, a float; None: there is none."""
    found = samples(page) if isinstance(page, str) else page
    return found.get((name, frozenset(labels.items())))


def scrape(url: str, *, seconds: float = 15) -> str:
    """The page of an endpoint, as Prometheus gets it."""
    with urllib.request.urlopen(url, timeout=seconds) as answer:
        assert answer.status == 200
        return str(answer.read().decode())


@pytest.fixture
def source(dsn: str) -> Callable[..., Source]:
    """A function that makes a source for this test's database, or the one of a URL."""
    return lambda url=dsn, **more: Source(resolve(url), **more)


class Serving:
    """A daemon that serves its metrics."""

    def __init__(self, process: object, url: str) -> None:
        self.popen = process
        self.url = url

    def until(self, name: str, value: float, seconds: float = 30, **labels: str) -> Samples:
        """Scrape until a sample has a value."""
        end = time.monotonic() + seconds
        while one(found := samples(scrape(self.url)), name, **labels) != value:
            if time.monotonic() > end:
                pytest.fail(f"{name} never was {value}, it is {one(found, name, **labels)}")
            time.sleep(0.1)
        return found


@pytest.fixture
def serving(start: Callable[..., object]) -> Callable[..., Serving]:  # noqa: F811
    """A function that starts a daemon with an endpoint on a free port, and waits until it listens."""

    def serving(*arguments: str, **more: str) -> Serving:
        process = start("work", "--daemon", "--metrics-port=0", "--metrics-address=127.0.0.1", *arguments, **more)
        line = process.popen.stderr.readline()  # type: ignore[attr-defined]
        found = re.search(r"metrics at (\S+)", line)
        assert found, line
        return Serving(process, found[1])

    return serving


@pytest.fixture
def prometheus(needs: Callable[..., Path], tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """
    A function that starts a Prometheus with our rules, which scrapes a target every second; its API.

    ``more`` is for its scrape configuration.
    """
    program = needs("prometheus", package="prometheus")
    running = []

    def prometheus(target: str, **more: Any) -> Any:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(RULES)],
            "scrape_configs": [{"job_name": "shop", "static_configs": [{"targets": [target]}], **more}],
        }
        (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
        log = (tmp_path / "log").open("w")
        running.append((log, subprocess.Popen(
            [program, f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data",
             f"--web.listen-address=127.0.0.1:{port}"],
            stdout=log, stderr=log,
        )))  # fmt: skip

        def ask(path: str, **parameters: str) -> Any:
            url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
            try:
                with urllib.request.urlopen(url, timeout=10) as answer:
                    return json.load(answer)["data"]
            except urllib.error.HTTPError as error:
                if error.code == 503:  # not up yet
                    raise
                pytest.fail(f"{parameters}: {error.read().decode()}")

        end = time.monotonic() + 30
        while True:
            try:
                if ask("query", query="pgreaper_up")["result"]:
                    return ask
            except OSError:
                pass
            assert time.monotonic() < end, (tmp_path / "log").read_text()
            time.sleep(0.1)

    yield prometheus
    for log, process in running:
        process.send_signal(signal.SIGTERM)
        process.wait(20)
        log.close()

"""Fixtures of the metrics' tests: a page as a scraper understands it, and daemons with an endpoint."""

from __future__ import annotations

import re
import time
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pgreaper.connection import resolve
from pgreaper.metrics import Source
from tests.cli.conftest import in_process, pgreaper, start, wait_until  # noqa: F401
from tests.driver.conftest import proxy, reaper  # noqa: F401
from tests.replication.conftest import pair  # noqa: F401

if TYPE_CHECKING:
    from collections.abc import Callable

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

"""
The configuration for sql_exporter tells what `pgreaper metrics` tells.

sql_exporter is no package of Debian's.  What it does with a collector is done here as its documentation has it: key
columns become labels, each value column that is not NULL becomes a sample, several are told apart by `value_label`.
Debian's prometheus-sql-exporter is another program: it runs, and a Prometheus scrapes it.
"""

from __future__ import annotations

import socket
import subprocess
import time
import urllib.parse
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from pgreaper.metrics import page
from tests.metrics.conftest import one, samples
from tests.metrics.test_page import everything

FOLDER = Path(__file__).resolve().parents[2] / "deploy/sql_exporter"
SCRAPE = FOLDER.parent / "prometheus/debian.scrape.yml"
FIELDS = {"metric_name", "type", "help", "key_labels", "value_label", "values", "query_ref"}
# What only the program itself knows.
OURS = {"pgreaper_build_info", "pgreaper_read_seconds"}


@pytest.fixture(scope="module")
def collector() -> Any:
    return yaml.safe_load((FOLDER / "pgreaper.collector.yml").read_text())


def test_the_configuration_is_well_formed(collector):
    """What sql_exporter refuses when it starts is not in it."""
    whole = yaml.safe_load((FOLDER / "sql_exporter.yml").read_text())
    assert whole.keys() == {"global", "target", "collector_files"}
    assert whole["target"].keys() == {"data_source_name", "collectors"}
    assert whole["target"]["collectors"] == [collector["collector_name"]]
    assert [file for pattern in whole["collector_files"] for file in FOLDER.glob(pattern)]
    assert collector.keys() == {"collector_name", "metrics", "queries"}
    queries = {q["query_name"] for q in collector["queries"]}
    used = {m["query_ref"] for m in collector["metrics"]}
    assert queries == used
    keys, values = set(), set()
    for metric in collector["metrics"]:
        assert {"metric_name", "type", "help", "values", "query_ref"} <= metric.keys() <= FIELDS
        assert metric["type"] in ("gauge", "counter")
        assert all(isinstance(value, str) for value in metric["values"])
        assert len(metric["values"]) == 1 or "value_label" in metric
        keys |= {(metric["query_ref"], k) for k in metric.get("key_labels", [])}
        values |= {(metric["query_ref"], v) for v in metric["values"]}
    assert not keys & values, "a column is used both as key and as value"


def exported(db, collector):
    """The samples of a scrape by sql_exporter."""
    found = {}
    for query in collector["queries"]:
        metrics = [m for m in collector["metrics"] if m["query_ref"] == query["query_name"]]
        cursor = db.execute(query["query"])
        names = [column.name for column in cursor.description]
        needed = {c for m in metrics for c in [*m.get("key_labels", []), *m["values"]]}
        assert needed == set(names)
        for row in cursor:
            cells = dict(zip(names, row, strict=True))
            for m in metrics:
                labels = {k: cells[k] or "" for k in m.get("key_labels", [])}
                for value in m["values"]:
                    if cells[value] is None:
                        continue
                    more = {m["value_label"]: value} if "value_label" in m else {}
                    key = (m["metric_name"], frozenset({**labels, **more}.items()))
                    assert key not in found, key
                    found[key] = float(cells[value])
    return found


@pytest.mark.parametrize("condition", ["", "drop table holds", "select pgreaper.reaper_pause('holds', 'x')"])
def test_it_tells_the_same(db, holds, source, collector, condition):
    """The same names, labels and values; only ages move on between two looks."""
    everything(db, holds)
    holds.register('other "x" \\')
    db.execute(condition)
    ours = {k: v for k, v in samples(page(source().latest()).decode()).items() if k[0] not in OURS}
    theirs = exported(db, collector)
    assert theirs.keys() == ours.keys()
    assert theirs == pytest.approx(ours, abs=30)
    exact = [k for k in ours if not k[0].endswith(("_seconds", "timestamp_seconds"))]
    assert {k: theirs[k] for k in exact} == {k: ours[k] for k in exact}
    assert one(theirs, "pgreaper_objective_seconds", policy="holds") == 30


def test_the_types_are_the_same(holds, source, collector):
    """A counter is one there too; a histogram is told as counters, because sql_exporter knows no other way."""
    from prometheus_client.parser import text_string_to_metric_families

    holds.register()
    ours = {
        sample.name: "counter" if family.type == "histogram" else family.type
        for family in text_string_to_metric_families(page(source().latest()).decode())
        for sample in family.samples
    }
    theirs = {m["metric_name"]: m["type"] for m in collector["metrics"]}
    assert {name: theirs[name] for name in ours if name not in OURS} == {n: t for n, t in ours.items() if n not in OURS}


def test_a_reader_may_run_it(db, holds, collector):
    """`pgreaper grant … --as reader` is enough for each of its queries."""
    role = f"exporter_{db.info.dbname}"
    holds.register()
    db.execute(f"create role {role}")
    try:
        db.execute("select pgreaper.reaper_grant(%s, 'reader')", (role,))
        db.execute(f"set role {role}")
        assert one(exported(db, collector), "pgreaper_policy_state", policy="holds", state="active") == 1
    finally:
        db.execute("reset role")
        db.execute(f"drop owned by {role}")
        db.execute(f"drop role {role}")


# -- Debian's


@pytest.fixture
def debian(db, needs, tmp_path):
    """Debian's exporter on this test's database; where it listens."""
    program = needs("prometheus-sql-exporter", package="prometheus-sql-exporter")
    given = yaml.safe_load((FOLDER / "debian.yml").read_text())
    info = db.info
    place = {"host": info.host, "port": info.port, "sslmode": "disable"}
    url = f"postgres://{info.user}@/{info.dbname}?{urllib.parse.urlencode(place)}"
    given["jobs"][0] |= {"connections": [url], "interval": "1s"}
    (tmp_path / "debian.yml").write_text(yaml.safe_dump(given))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with (tmp_path / "exporter.log").open("w") as log:
        process = subprocess.Popen(
            [program, f"-config.file={tmp_path}/debian.yml", f"-web.listen-address={address}"], stdout=log, stderr=log
        )
        yield address
        process.terminate()
        process.wait(20)


def test_debians_exporter_and_a_real_prometheus_tell_the_same(db, holds, source, debian, prometheus):
    """What Prometheus has in the end: the names, labels and values of `pgreaper metrics`, and an alert about them."""
    everything(db, holds)
    holds.register('other "x" \\')
    (scrape,) = yaml.safe_load(SCRAPE.read_text())["scrape_configs"]
    ask = prometheus(debian, metric_relabel_configs=scrape["metric_relabel_configs"])
    ours = {k: v for k, v in samples(page(source().latest()).decode()).items() if k[0] not in OURS}

    def told():
        found = {}
        for sample in ask("query", query='{__name__=~"pgreaper_.+"}')["result"]:
            labels = {k: v for k, v in sample["metric"].items() if k not in ("__name__", "job", "instance")}
            found[sample["metric"]["__name__"], frozenset(labels.items())] = float(sample["value"][1])
        return found

    end = time.monotonic() + 30
    while (theirs := told()).keys() != ours.keys():
        assert time.monotonic() < end, theirs.keys() ^ ours.keys()
        time.sleep(0.2)
    assert theirs == pytest.approx(ours, abs=60)
    exact = [k for k in ours if not k[0].endswith(("_seconds", "timestamp_seconds"))]
    assert {k: theirs[k] for k in exact} == {k: ours[k] for k in exact}
    while not (late := [a["labels"] for a in ask("alerts")["alerts"] if a["labels"]["alertname"] == "PgreaperLate"]):
        assert time.monotonic() < end
        time.sleep(0.2)
    assert {(labels["policy"], labels["owner"]) for labels in late} == {("holds", "tests"), ('other "x" \\', "tests")}

"""Alert rules and dashboard: Prometheus' own tools parse them, the names are ours, and a real Prometheus runs them."""

from __future__ import annotations

import json
import re
import subprocess
import time
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.metrics.conftest import RULES

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "deploy/prometheus/pgreaper.test.yml"
DASHBOARD = ROOT / "deploy/grafana/pgreaper.json"
DOCUMENT = ROOT / "docs/metrics.md"


@pytest.fixture(scope="module")
def rules() -> Any:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return group["rules"]


@pytest.fixture(scope="module")
def dashboard() -> Any:
    return json.loads(DASHBOARD.read_text())


@pytest.fixture(scope="module")
def promtool(needs):
    """A function that runs promtool and gives its exit code and what it said."""
    program = needs("promtool", package="prometheus")

    def promtool(*arguments: object) -> tuple[int, str]:
        done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    return promtool


def names(expression):
    """The metrics of an expression."""
    return set(re.findall(r"\bpgreaper_\w+(?!\w*[=!~])", re.sub(r"\{__name__=~\"([^\"]*)\"\}", r"{}", expression)))


def documented():
    """Each metric that docs/metrics.md lists; another test compares that with what is exported."""
    return set(re.findall(r"^\| `(pgreaper_\w+)", DOCUMENT.read_text(), re.MULTILINE))


def queries(dashboard):
    """Every expression of the dashboard, with values for its variables."""
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield panel, re.sub(r"\$(job|policy)\b", ".*", target["expr"]).replace("$__rate_interval", "1m")


# -- rules


def test_promtool_takes_the_rules(promtool):
    code, said = promtool("check", "rules", RULES)
    assert (code, "SUCCESS" in said) == (0, True), said


def test_the_alerts_fire_when_they_should(promtool):
    """pgreaper.test.yml: each fires, does not fire, and ends."""
    code, said = promtool("test", "rules", TESTS)
    assert code == 0, said


def alerts(rules):
    return [rule for rule in rules if "alert" in rule]


def failing(promtool, tmp_path, rules):
    """Which alerts pgreaper.test.yml finds wrong with these rules."""
    (tmp_path / RULES.name).write_text(yaml.safe_dump({"groups": [{"name": "pgreaper", "rules": rules}]}))
    (tmp_path / TESTS.name).write_text(TESTS.read_text())
    code, said = promtool("test", "rules", tmp_path / TESTS.name)
    assert code == 1
    return set(re.findall(r"alertname: (\w+), time", said))


@pytest.mark.parametrize(
    ("change", "unnoticed"),
    [
        (lambda expr: {"expr": f"({expr}) and on () vector(0) == 1"}, set()),
        (lambda expr: {"expr": f"(vector(1) > 0) or ({expr})"}, set()),
        # How long an old file is looked at is told by the file's age, not by patience.
        (lambda expr: {"for": "0s"}, {"PgreaperStale"}),
        (lambda expr: {"for": "1h"}, set()),
    ],
    ids=["never fires", "always fires", "without patience", "too much patience"],
)
def test_the_tests_of_the_alerts_can_fail(promtool, rules, tmp_path, change, unnoticed):
    """Each alert, changed for the worse, makes pgreaper.test.yml fail."""
    noticed = failing(promtool, tmp_path, [rule | change(rule["expr"]) if "alert" in rule else rule for rule in rules])
    assert {rule["alert"] for rule in alerts(rules)} - noticed == unnoticed


def test_a_lost_scrape_that_stops_an_alert_is_noticed(promtool, rules, tmp_path):
    """Without what was told last, each alert but the one about missing metrics begins anew."""
    lasting = re.compile(r"\n +or .*\n|(?<= |\()max_over_time(?=\()|(?<=})\[3m\]")
    changed = [rule | {"expr": lasting.sub(" ", rule["expr"])} for rule in rules]
    noticed = failing(promtool, tmp_path, changed)
    assert {rule["alert"] for rule in alerts(rules)} - noticed == {"PgreaperAbsent"}


def test_what_is_told_now_counts_more_than_what_was(promtool, rules, tmp_path):
    """The last three minutes of a daemon that is gone must not speak for one that is there."""
    last = re.compile(r"max by \((.*?)\) \(\w+\)\n +or (max by .*)")
    changed = [rule | {"expr": last.sub(r"\2", rule["expr"])} if "record" in rule else rule for rule in rules]
    assert failing(promtool, tmp_path, changed) == {"PgreaperLate"}


def test_every_alert_helps(rules):
    """What it is, what to do next, and how bad; its metrics are ours, the document lists it, and it is tested."""
    tested = TESTS.read_text()
    rows = dict(re.findall(r"^\| `(Pgreaper\w+)` \| (\w+) \|", DOCUMENT.read_text(), re.MULTILINE))
    assert rows == {rule["alert"]: rule["labels"]["severity"] for rule in alerts(rules)}
    for rule in rules:
        assert names(rule["expr"]) <= documented()
    for rule in alerts(rules):
        assert rule["annotations"].keys() == {"summary", "action", "description"}
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert re.fullmatch(r"\d+m", rule["for"])
        assert f"alertname: {rule['alert']}\n        exp_alerts" in tested


def test_the_commands_that_alerts_name_exist(rules):
    """`pgreaper …` in an annotation is a command."""
    from pgreaper.cli import COMMANDS

    told = " ".join(text for rule in alerts(rules) for text in rule["annotations"].values())
    commands = set(re.findall(r"pgreaper (?!cannot|is\b)([a-z]+)", told))
    assert {"doctor", "status", "dead", "resume", "metrics", "work"} <= commands
    assert commands <= set(COMMANDS)


# -- dashboard


def test_the_dashboard_is_well_formed(dashboard):
    """Ids are unique, panels do not overlap and fill the width, each has a unit, a title and a sentence."""
    panels = dashboard["panels"]
    ids = [panel["id"] for panel in panels]
    assert len(ids) == len(set(ids))
    places = [panel["gridPos"] for panel in panels]
    for a, b in combinations(places, 2):
        apart_x = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        apart_y = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert apart_x or apart_y, (a, b)
    for y in {p["y"] for p in places}:
        assert sum(p["w"] for p in places if p["y"] == y) == 24
    for panel in panels:
        assert panel["title"]
        if panel["type"] == "row":
            continue
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"] in ("s", "short", "cps", "percentunit")
        references = [target["refId"] for target in panel["targets"]]
        assert len(references) == len(set(references)) > 0
    assert [p["title"] for p in panels if p["type"] == "row"] == [
        "What is late, and since when", "Why", "How late", "Who works", "Events out"
    ]  # fmt: skip


def test_every_query_goes_to_the_chosen_source(dashboard):
    """No data source is built in; job and policy can be chosen."""
    assert [(v["name"], v["type"]) for v in dashboard["templating"]["list"]] == [
        ("datasource", "datasource"), ("job", "query"), ("policy", "query")
    ]  # fmt: skip
    sources = re.findall(r'"uid": "([^"]*)"', json.dumps(dashboard["panels"]) + json.dumps(dashboard["templating"]))
    assert set(sources) == {"${datasource}"}
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            assert 'job=~"$job"' in target["expr"]


def test_the_dashboard_asks_for_what_there_is(dashboard):
    """Metric names of ours only, and of the policies' metrics each one is shown somewhere."""
    asked = set().union(*(names(expression) for _, expression in queries(dashboard)))
    assert asked - documented() == set()
    about = {
        "pgreaper_build_info",
        "pgreaper_schema_info",
        "pgreaper_read_timestamp_seconds",
        "pgreaper_paused_seconds",
    }
    assert documented() - asked == {*about, "pgreaper_lateness_seconds_count"}


def test_promtool_parses_every_query(dashboard, promtool, tmp_path):
    """As recording rules, because that is what promtool checks."""
    found = [expression for _, expression in queries(dashboard)]
    file = tmp_path / "queries.yml"

    def check(expressions):
        made = [{"record": f"q:{i}", "expr": e} for i, e in enumerate(expressions)]
        file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": made}]}))
        return promtool("check", "rules", file)

    code, said = check(found)
    assert (code, f"{len(found)} rules found" in said) == (0, True), said
    assert check([*found, "sum by (le (x)"])[0] != 0


# -- a real one


def test_a_real_prometheus(db, holds, serving, prometheus, dashboard):
    """It scrapes a daemon, each query of the dashboard has an answer, and the alert that has to be pending is."""
    holds.due(30)
    holds.register()
    db.execute("create table others (like holds including all)")
    db.execute("insert into others (status, expires_at) values ('held', clock_timestamp() - interval '1 hour')")
    holds.register("late", target="others")
    db.execute("select pgreaper.reaper_relay('holds')")
    daemon = serving("holds")
    ask = prometheus(daemon.url.removeprefix("http://").removesuffix("/metrics"))
    daemon.until("pgreaper_outcomes_total", 30, policy="holds", outcome="expired")

    def value(query):
        result = ask("query", query=query)["result"]
        return float(result[0]["value"][1]) if result else None

    end = time.monotonic() + 30
    while value('pgreaper_outcomes_total{policy="holds", outcome="expired"}') != 30:
        assert time.monotonic() < end
        time.sleep(0.2)
    # Two scrapes more: a rate wants two samples.
    scraped = value("count_over_time(pgreaper_up[1m])")
    while value("count_over_time(pgreaper_up[1m])") < scraped + 2:
        assert time.monotonic() < end
        time.sleep(0.2)

    empty = [e for _, e in queries(dashboard) if not ask("query", query=e)["result"]]
    assert empty == []
    assert value("count(pgreaper_lateness_seconds_bucket)") == 60
    while not (alerts := ask("alerts")["alerts"]):
        assert time.monotonic() < end
        time.sleep(0.2)
    found = {(a["labels"]["alertname"], a["labels"]["policy"], a["labels"]["owner"]) for a in alerts}
    assert ("PgreaperLate", "late", "tests") in found
    assert {policy for _, policy, _ in found} == {"late"}

"""``pgreaper work`` where nothing is looked for: it does not say that nothing is due."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.cli.test_commands import on_terminal


def test_a_paused_policy_is_said_to_be_paused(dsn: str, db: Any, holds: Any, pgreaper: Any) -> None:
    """Since when and why, on a terminal and in the document; exit 0, and silence for cron."""
    holds.due(3)
    holds.register()
    db.execute("create table empty (like holds including all)")
    holds.register("idle", target="empty")
    db.execute("select pgreaper.reaper_pause('holds', 'a migration\u001b[2J')")

    shown = on_terminal(dsn, "work")
    ran, named = pgreaper("work"), pgreaper("work", "holds", "--json")

    first, second = shown.splitlines()
    assert re.fullmatch(r"holds: paused since \d{4}-\d\d-\d\d \d\d:\d\d UTC: a migration\\x1b\[2J", first)
    assert second == "of the other policies nothing is due"
    assert (ran.code, ran.out, ran.err) == (0, "", "")
    assert named.json["policies"][0]["resting"].startswith("paused since ")
    assert set(holds.states().values()) == {"held"}

    db.execute("select pgreaper.reaper_resume('holds')")
    resumed = pgreaper("work", "--json")
    assert {p["policy"]: p["resting"] for p in resumed.json["policies"]} == {"holds": None, "idle": None}


def test_the_log_for_machines_has_it_too(db: Any, holds: Any, pgreaper: Any) -> None:
    """One event for each policy that rests."""
    holds.register()
    db.execute("select pgreaper.reaper_pause('holds')")

    events = [json.loads(line) for line in pgreaper("work", "--log-format", "json").err.splitlines()]

    assert [e["policy"] for e in events if e["event"] == "policy.resting"] == ["holds"]

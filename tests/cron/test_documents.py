"""docs/pg_cron.md: its statements are run, its commands exist and do what is said."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs/pg_cron.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def test_the_statements_without_python(cron, shop, pgreaper):
    """As they stand there, for a database `shop` and a role `reaper`; `cron enable` finds nothing to change."""
    call, setup, do = blocks("sql")
    cron.run("create database shop template pgreaper_template")
    shop(cron, "shop")
    cron.run("create role reaper login")
    cron.script(setup)
    jobs = "select jobname::text, schedule, command, database, username from cron.job order by jobid"
    before = cron.run(jobs)
    assert len(before) == 3
    for what, role in (("sweep", "reaper"), ("prune", "reaper"), ("log", "postgres")):
        done = pgreaper(cron, "shop", "cron", "enable", what, "--role", role, "--json")
        assert done.json["change"] == "unchanged", what
    assert cron.run(jobs) == before
    cron.script(do, "shop")
    assert cron.run("select distinct status from holds", database="shop") == [("expired",)]
    cron.script(call, "shop")


def test_the_commands(cron, shop, pgreaper):
    """Each of them runs to its end."""
    (commands,) = [block for block in blocks("sh") if "cron enable" in block]
    database = cron.new_database()
    shop(cron, database, due=0)
    cron.run("create role reaper login")
    connection = cron.connect(database)
    connection.execute("update pgreaper.policies set name = 'bookings'")
    connection.close()
    lines = [shlex.split(line, comments=True)[1:] for line in commands.splitlines()]
    assert len(lines) == 8
    for line in lines:
        expected = (0, 3) if line[1] == "status" else (0,)
        result = pgreaper(cron, database, *line)
        assert result.code in expected, (line, result.err)

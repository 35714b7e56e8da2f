"""Every line of expected.tsv, registered and run from the command line, under three session time zones."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import psycopg
import pytest

from pgreaper.cli import main
from tests.realworld.conftest import ROWS, lines

ZONES = ["UTC", "America/Vancouver", "Asia/Tokyo"]
LINES = lines()


def register_arguments(line, connection):
    """The command line for a line of the table."""
    arguments = [line.id, line.target, "--deadline", line.deadline, "--status", line.status, "--owner", "tests"]
    for value in line.held:
        arguments += ["--held", value]
    arguments += ["--expired", line.expired]
    if line.zone:
        arguments += ["--zone", line.zone]
    if line.stamp:
        arguments += ["--stamp", line.stamp]
        [(kind,)] = connection.execute(
            "select format_type(atttypid, null) from pg_attribute where attrelid = %s::regclass and attname = %s",
            [line.target, line.stamp],
        )
        if kind == "timestamp without time zone":
            arguments += ["--stamp-zone", "UTC"]
    return arguments


def key_of(line):
    """The key of a row as text, in SQL."""
    return "json_build_array({})::text".format(", ".join(f'"{name}"::text' for name in line.key))


def versions(line, connection):
    """The row version of every row by its key."""
    return dict(connection.execute(f"select {key_of(line)}, xmin::text from {line.table}").fetchall())


def in_process(capfd, url):
    def run(*arguments):
        code = main([*arguments, "--json", "--database-url", url])
        out = capfd.readouterr().out
        return code, json.loads(out)

    return run


def as_program(url):
    def run(*arguments):
        done = subprocess.run(
            [sys.executable, "-m", "pgreaper", *arguments, "--json"],
            env={**os.environ, "PGREAPER_DATABASE_URL": url},
            capture_output=True,
            text=True,
            check=False,
        )
        assert "Traceback" not in done.stderr
        return done.returncode, json.loads(done.stdout)

    return run


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("line", LINES, ids=[line.id for line in LINES])
def test_the_application_is_expired_as_expected(application, capfd, line, zone):
    """The counts of expected.tsv; no other row, no other column; a second run changes nothing."""
    url = application(line.file, zone)
    # The program itself where the shell's quoting matters, its function elsewhere: that is faster.
    run = as_program(url) if line.id == "btcpay" and zone == "UTC" else in_process(capfd, url)
    with psycopg.connect(url, autocommit=True) as connection:
        assert connection.execute("show timezone").fetchone() == (zone,)
        if line.condition:
            connection.execute(f"create view due_by_rule as select * from {line.table} where {line.condition}")
        reference = {
            found[0]
            for found in connection.execute(
                "select {} from {} where {} in ({}) and {}".format(
                    key_of(line), line.table, f'"{line.status}"',
                    ", ".join(f"'{value}'" for value in line.held), line.predicate,
                )
            )
        }  # fmt: skip
        connection.execute(
            f"create table before_run as select {key_of(line)} as key, to_jsonb(t) as said from {line.table} as t"
        )
        before = versions(line, connection)
        assert len(before) == ROWS

        register = register_arguments(line, connection)
        code, registered = run("register", *register)
        assert code == 0, registered
        assert {change["setting"]: change["new_value"] for change in registered["changes"]}[
            "key_columns"
        ] == json.dumps(line.key)
        code, preview = run("preview", line.id)
        assert code == 0
        assert str(line.changed) in json.dumps(preview)

        code, worked = run("work", line.id)
        assert code == 0, worked
        assert worked["outcomes"]["expired"] == line.changed
        assert sum(worked["outcomes"].values()) == line.changed

        after = versions(line, connection)
        changed = {key for key in before if before[key] != after[key]}
        assert changed == reference
        assert len(changed) == line.changed
        differing = connection.execute(
            f"select b.key, array_agg(now.key) from (select {key_of(line)} as hold, to_jsonb(t) as"
            f" says from {line.table} as t)"
            " as t join before_run as b on b.key = t.hold cross join jsonb_each(t.says) as now"
            " where now.value is distinct from b.said -> now.key group by b.key"
        ).fetchall()
        assert {key for key, _ in differing} == changed
        assert {column for _, columns in differing for column in columns} == {line.status, line.stamp} - {None}
        assert (
            dict(
                connection.execute(
                    f"select coalesce(\"{line.status}\"::text, 'NULL'), count(*) from {line.table} group by 1"
                ).fetchall()
            )
            == line.after
        )
        if line.stamp:
            check_stamp(line, connection, len(changed))

        code, again = run("work")
        assert (code, sum(again["outcomes"].values())) == (0, 0)
        code, registered = run("register", *register)
        assert (code, registered["changes"]) == (0, [])
        assert versions(line, connection) == after

        trail = connection.execute(
            "select count(*), count(distinct key), count(distinct state) from pgreaper.history where"
            " outcome = 'expired'"
        ).fetchone()
        assert trail == (line.changed, line.changed, 1)


def check_stamp(line, connection, number):
    """Stamps say the time of the run: as an instant, or in UTC where the column has no zone."""
    clock = "(clock_timestamp() at time zone 'UTC')" if connection.execute(
        "select format_type(atttypid, null) like '%% without %%' from pg_attribute"
        " where attrelid = %s::regclass and attname = %s",
        [line.table, line.stamp],
    ).fetchone() == (True,) else "clock_timestamp()"  # fmt: skip
    stamped = connection.execute(
        f'select count(*) from {line.table} where "{line.status}"::text = %s'
        f" and \"{line.stamp}\" between {clock} - interval '2 minutes' and {clock} + interval '2 seconds'",
        [line.expired],
    ).fetchone()
    assert stamped == (number,)

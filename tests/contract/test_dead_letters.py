"""The views dead_letters and retries: what was given up, what will be tried again, and the command for people."""

from __future__ import annotations

import os
import subprocess
from datetime import UTC, datetime, timedelta

import pytest

COLUMNS = "policy key owner deadline attempts first_seen_at died_at error_class sqlstate constraint_name replay_command"


def fail(core, hold, **arguments) -> None:
    arguments = {"token": hold.token, "key": hold.key, "error_class": "T"} | arguments
    core.call("reaper_fail", "outcome", **arguments)


def test_dead_letters_tells_whose_and_why_and_since_when(core, holds, set_clock):
    """First seen at the first attempt, died at the last; the class, SQLSTATE and constraint of the last."""
    holds.due(1)
    core.do("alter table holds add constraint polite check (status <> 'expired') not valid")
    core.register(owner="desk@example.com", max_attempts=5, permanent_attempts=2, backoff_base="0", backoff_cap="0")
    set_clock("2040-01-01 00:00Z")
    [hold] = core.claim()
    fail(core, hold, transient=True)
    core.expire(hold.token)
    set_clock("2040-01-01 01:00Z")
    core.run()
    assert core.column("select column_name::text from information_schema.columns where table_schema = 'pgreaper'"
                       " and table_name = 'dead_letters' order by ordinal_position") == COLUMNS.split()  # fmt: skip
    [row] = core.rows("select * from pgreaper.dead_letters")
    letter = dict(zip(COLUMNS.split(), row, strict=True))
    deadline = core.value("select expires_at from holds")
    assert letter == {
        "policy": "p", "key": hold.key, "owner": "desk@example.com", "deadline": deadline, "attempts": 2,
        "first_seen_at": datetime(2040, 1, 1, tzinfo=UTC), "died_at": datetime(2040, 1, 1, 1, tzinfo=UTC),
        "error_class": "ConstraintViolation", "sqlstate": "23514", "constraint_name": "polite",
        "replay_command": f"pgreaper dead replay p --key {hold.key}",
    }  # fmt: skip
    assert core.rows("select * from pgreaper.retries") == []


def test_retries_tells_what_waits_and_until_when(core, holds, set_clock):
    holds.due(2)
    core.register(backoff_base="1 hour", backoff_cap="1 hour")
    set_clock("2040-01-01 00:00Z")
    first, second = core.claim()
    fail(core, first, transient=True, retry_in="5 minutes", error_class="TimeoutError")
    fail(core, second, final=True)
    assert core.rows(
        "select policy, key, attempts, first_seen_at = failed_at, not_before - failed_at, error_class, sqlstate,"
        " constraint_name from pgreaper.retries"
    ) == [("p", first.key, 1, True, timedelta(minutes=5), "TimeoutError", None, None)]
    assert core.column("select key from pgreaper.dead_letters") == [second.key]


def test_discarded_and_withdrawn_ones_are_not_listed(core, holds):
    holds.due(3)
    core.register()
    first, second, third = core.claim()
    fail(core, first, final=True)
    fail(core, second, final=True)
    fail(core, third, transient=True)
    core.call("reaper_discard", policy="p", key=first.key, reason="x")
    assert core.column("select key from pgreaper.dead_letters") == [second.key]
    core.expire(first.token)
    core.call("reaper_unregister", policy="p")
    assert core.rows("select * from pgreaper.dead_letters") == []
    assert core.rows("select * from pgreaper.retries") == []


def test_every_column_says_what_it_is(core):
    for view in ("dead_letters", "retries"):
        assert core.column(
            "select attname::text from pg_attribute where attrelid = %s::regclass and attnum > 0"
            " and col_description(attrelid, attnum) is null", f"pgreaper.{view}",
        ) == []  # fmt: skip


WORDS = [
    "plain", "two words", "", " ", "it's", 'a "quoted" word', "$HOME", "`id`", "$(id)", "a;b&c|d<e>f", "*", "~", "#no",
    "back\\slash", "new\nline", "tab\ttab", "!history!", "-5", "--all", "-", "=", "%s %%", "{a,b}", "ä€\U0001f4a3",
    "a=b", "=ls",
    "@file", '["a", "7"]', '["it\'s", "x y"]', "'", "''", "'\\''", "\x1b[31m", "x" * 5000,
]  # fmt: skip


def test_words_that_only_some_shells_expand_are_quoted(core):
    """zsh puts the path of a command for `=ls`, and an option is never read as a key."""
    assert core.column("select pgreaper._shell_quoted(w) from unnest(%s::text[]) as w", ["=ls", "-5", "~", "a=b"]) == [
        "'=ls'", "'-5'", "'~'", "a=b",
    ]  # fmt: skip


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_the_replay_command_survives_a_shell(core, tmp_path, shell):
    """Whatever is in the key: pasted into a shell it calls pgreaper with exactly that key, and runs nothing else."""
    program = tmp_path / "pgreaper"
    program.write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"; printf 'next\\0'\n")
    program.chmod(0o755)
    quoted = core.column("select pgreaper._shell_quoted(w) from unnest(%s::text[]) as w", WORDS)
    commands = "".join(f"pgreaper dead replay p --key {word}\n" for word in quoted)
    done = subprocess.run(
        [shell, "-c", commands],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": "/", "LANG": "C.UTF-8"},
        capture_output=True,
        check=True,
        cwd=tmp_path,
    )
    calls = [["dead", "replay", "p", "--key", word, "next"] for word in WORDS]
    assert done.stdout.decode().split("\0")[:-1] == [part for call in calls for part in call]


def test_the_view_quotes_policy_and_key(core):
    """Both, wherever they are odd."""
    core.do("create table t (id text primary key, status text default 'held', expires_at timestamptz)")
    core.do("insert into t values ('it''s $HOME', 'held', now() - interval '1 hour')")
    core.register("my policy", target="t")
    [hold] = core.claim("my policy")
    fail(core, hold, final=True)
    assert core.column("select replay_command from pgreaper.dead_letters") == [
        """pgreaper dead replay 'my policy' --key 'it'"'"'s $HOME'"""
    ]

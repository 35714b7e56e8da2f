"""pgreaper dead and verify: what was given up, what a person does about it, and whether the books are sound."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

import pytest

from tests.cli.conftest import environment

LETTER = {
    "policy", "key", "owner", "deadline", "attempts", "first_seen_at", "died_at", "error_class", "sqlstate",
    "constraint_name", "replay_command",
}  # fmt: skip


@pytest.fixture
def graveyard(db, holds):
    """Four dead letters: 1 and 2 by a CHECK, 3 by a trigger, 4 by a handler two days ago; 5 and 6 have expired."""
    holds.due(6)
    db.execute("""
        alter table holds add constraint polite check (not (id <= 2 and status = 'expired'));
        create function bad() returns trigger language plpgsql as
        $$ begin if new.id = 3 and new.status = 'expired' then raise exception 'no'; end if; return new; end $$;
        create trigger bad before update on holds for each row execute function bad();
    """)
    holds.register(owner="desk")
    [(token,)] = db.execute("select distinct token from pgreaper.reaper_claim('holds')").fetchall()
    db.execute("select (pgreaper.reaper_fail(%s, '4', 'TimeoutError', final => true)).outcome", (token,))
    db.execute("select pgreaper.reaper_expire(%s)", (token,))
    db.execute("update pgreaper.failures set failed_at = failed_at - interval '2 days' where key = '4'")
    return holds


def dead(db) -> list[str]:
    return [row[0] for row in db.execute("select key from pgreaper.dead_letters order by key").fetchall()]


def mend(db) -> None:
    db.execute("alter table holds drop constraint polite; drop trigger bad on holds")


def test_list(in_process, graveyard):
    """The newest first, with owner, attempts and what they failed with; and how to try one again."""
    result = in_process("dead", "list")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert [line.split()[1] for line in lines[1:5]][-1] == "4"
    assert "ConstraintViolation, 23514, polite" in result.out
    assert "TriggerException, P0001" in result.out
    assert "TimeoutError" in result.out
    assert "pgreaper dead replay holds --key" in result.out


def test_list_as_json(in_process, graveyard):
    """Stable fields; keys are strings."""
    document = in_process("dead", "list", "holds", "--json").json
    assert (document["command"], document["more"]) == ("dead list", False)
    assert {letter["key"] for letter in document["dead_letters"]} == {"1", "2", "3", "4"}
    assert all(set(letter) == LETTER for letter in document["dead_letters"])
    assert {letter["owner"] for letter in document["dead_letters"]} == {"desk"}


@pytest.mark.parametrize(
    ("filters", "keys"),
    [
        (["--key", "2"], ["2"]),
        (["--error-class", "ConstraintViolation"], ["1", "2"]),
        (["--older-than", "1 day"], ["4"]),
        (["--older-than", "1 day", "--error-class", "ConstraintViolation"], []),
        (["--older-than", "PT1H"], ["4"]),
    ],
)
def test_filters_mean_the_same_everywhere(in_process, db, graveyard, filters, keys):
    """What `list` shows is what --dry-run names and what replay and discard take."""

    def listed(*command: str) -> list[str]:
        return sorted(letter["key"] for letter in in_process("dead", *command, "--json").json["dead_letters"])

    assert listed("list", *filters) == keys
    assert listed("replay", "holds", *filters, "--dry-run") == keys
    assert listed("discard", "holds", *filters, "--reason", "x", "--dry-run") == keys
    assert dead(db) == ["1", "2", "3", "4"], "a dry run changes nothing"
    assert db.execute("select count(*) from pgreaper.events where kind in ('replay', 'discard')").fetchone() == (0,)
    assert sorted(in_process("dead", "discard", "holds", *filters, "--reason", "x", "--json").json["discarded"]) == keys


def test_list_is_bounded(in_process, graveyard):
    result = in_process("dead", "list", "--limit", "3")
    assert "only the newest 3 are shown" in result.out
    document = in_process("dead", "list", "--limit", "3", "--json").json
    assert (document["more"], len(document["dead_letters"])) == (True, 3)
    assert in_process("dead", "list", "--limit", "4", "--json").json["more"] is False


def test_list_without_any(in_process, holds):
    holds.register()
    assert in_process("dead", "list").out == "there is no dead letter\n"
    assert in_process("dead", "list", "holds").out == "there is no dead letter of policy holds\n"
    assert in_process("dead", "list", "--json").json["dead_letters"] == []


def test_show(in_process, graveyard):
    result = in_process("dead", "show", "holds", "2")
    assert result.code == 0
    for words in ("holds 2", "desk", "ConstraintViolation, 23514, polite", "pgreaper dead replay holds --key 2"):
        assert words in result.out
    document = in_process("dead", "show", "holds", "2", "--json").json
    assert set(document["dead_letter"]) == LETTER


@pytest.mark.parametrize("key", ["5", "9", "", " 2"])
@pytest.mark.parametrize(
    "command", [["show"], ["replay"], ["replay", "--dry-run"], ["discard", "--reason", "x"],
                ["discard", "--reason", "x", "--dry-run"]],
    ids=" ".join,
)  # fmt: skip
def test_a_key_that_is_no_dead_letter_is_an_error(in_process, db, graveyard, command, key):
    """A typo does not look done: exit 1, the fact and where to look; as JSON too."""
    named = [key] if command == ["show"] else ["--key", key]
    arguments = ["dead", command[0], *command[1:], "holds", *named]
    result = in_process(*arguments)
    assert (result.code, result.out) == (1, "")
    assert "is no dead letter\nhint: `pgreaper dead list`" in result.err
    document = in_process(*arguments, "--json").json
    assert (document["exit_code"], document["error"]["code"]) == (1, "no-dead-letter")
    assert dead(db) == ["1", "2", "3", "4"]


def test_replayed_twice_is_told(in_process, db, graveyard):
    """The second time there is nothing to replay; filters that match nothing are no error."""
    assert in_process("dead", "replay", "holds", "--key", "2").code == 0
    assert in_process("dead", "replay", "holds", "--key", "2").code == 1
    assert in_process("dead", "replay", "holds", "--error-class", "Nothing").code == 0
    assert in_process("dead", "discard", "holds", "--older-than", "1 year", "--reason", "x").code == 0
    # It is one, but not of that class.
    assert in_process("dead", "replay", "holds", "--key", "3", "--error-class", "Nothing").code == 0
    assert in_process("dead", "list", "holds", "--key", "2").code == 0


def test_replay_then_work(in_process, db, graveyard):
    """The cause mended, all replayed, and they expire; who and why are in the history."""
    mend(db)
    result = in_process("dead", "replay", "holds", "--all", "--reason", "constraint dropped")
    assert (result.code, result.out, result.err) == (0, "4 dead letters replayed\n", "")
    assert in_process("work").code == 0
    assert set(graveyard.states().values()) == {"expired"}
    assert "constraint dropped" in in_process("history", "holds", "1").out
    assert in_process("dead", "replay", "holds", "--all").out == "0 dead letters replayed\n"


def test_replay_of_one_that_moved_on(in_process, db, graveyard):
    db.execute("update holds set status = 'consumed' where id = 1")
    result = in_process("dead", "replay", "holds", "--error-class", "ConstraintViolation")
    assert result.out == "1 dead letter replayed; 1 hold had moved on, closed as moot\n"
    assert dead(db) == ["3", "4"]
    document = in_process("dead", "replay", "holds", "--key", "3", "--json").json
    assert (document["replayed"], document["moot"], document["dry_run"]) == (["3"], [], False)


def test_discard(in_process, db, graveyard):
    result = in_process("dead", "discard", "holds", "--older-than", "1 day", "--reason", "agreed")
    assert (result.code, result.out, result.err) == (0, "1 dead letter discarded\n", "")
    assert dead(db) == ["1", "2", "3"]
    assert "agreed" in in_process("history", "holds", "4").out
    assert in_process("dead", "discard", "holds", "--all", "--reason", "x", "--json").json["discarded"] == [
        "1",
        "2",
        "3",
    ]


@pytest.mark.parametrize("command", [["replay", "holds"], ["discard", "holds", "--reason", "x"]])
def test_which_ones_must_be_said(in_process, db, graveyard, command):
    """Nothing is done to all of them by leaving an option out."""
    result = in_process("dead", *command)
    assert (result.code, result.out) == (2, "")
    assert "--all" in result.err
    assert dead(db) == ["1", "2", "3", "4"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["list", "hold"], "no policy hold"),
        (["show", "hold", "1"], "no policy hold"),
        (["replay", "hold", "--all"], "Did you mean holds"),
        (["discard", "hold", "--all", "--reason", "x"], "Did you mean holds"),
        (["discard", "holds", "--all"], "--reason"),
        (["discard", "holds", "--all", "--reason", " "], "reason"),
        (["list", "--older-than", "soon"], "length of time"),
        (["replay", "holds", "--older-than", "soon"], "length of time"),
        (["discard", "holds", "--older-than", "", "--reason", "x"], "length of time"),
        (["list", "--limit", "0"], "0"),
        (["list", "--limit", "many"], "many"),
        (["show", "holds"], "KEY"),
        (["bury", "holds"], "bury"),
    ],
)
def test_bad_input(in_process, db, graveyard, arguments, words):
    """Exit 2, one remedy, no traceback, nothing on stdout, nothing done."""
    result = in_process("dead", *arguments)
    assert (result.code, result.out) == (2, "")
    assert words in result.err
    assert "Traceback" not in result.err
    assert dead(db) == ["1", "2", "3", "4"]


KEYS = ["", " ", "-5", "--all", "it's", '"$HOME" `id`', "a;b", "new\nline", "\x1b[31mred", "\u202eevil", "ä€", "=ls"]


@pytest.fixture
def odd(db):
    """Dead letters with keys that nobody should give."""
    db.execute("create table odd (id text primary key, status text default 'held', expires_at timestamptz)")
    for key in KEYS:
        db.execute("insert into odd values (%s, 'held', now() - interval '1 hour')", (key,))
    db.execute(
        "select pgreaper.reaper_register('odd one', 'odd', 'expires_at', 'status', array['held'], 'expired', 'desk')"
    )
    [(token,)] = db.execute("select distinct token from pgreaper.reaper_claim('odd one')").fetchall()
    db.execute(
        "select (pgreaper.reaper_fail(%s, id, 'TimeoutError', final => true)).outcome from odd", (token,)
    )  # fmt: skip
    db.execute("select pgreaper.reaper_expire(%s)", (token,))
    return db


def test_what_the_view_prints_can_be_pasted(odd, dsn, tmp_path):
    """Every replay_command, in a real shell, replays exactly its own dead letter."""
    shim = tmp_path / "pgreaper"
    shim.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m pgreaper "$@"\n')
    shim.chmod(0o755)
    commands = dict(odd.execute("select key, replay_command from pgreaper.dead_letters").fetchall())
    assert set(commands) == set(KEYS)
    variables = environment(dsn)
    variables["PATH"] = f"{tmp_path}:{variables['PATH']}"
    for key in ("", "-5", "it's", '"$HOME" `id`', "new\nline"):
        done = subprocess.run(
            ["sh", "-c", commands[key] + " --json"], env=variables, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert json.loads(done.stdout)["replayed"] == [key]


@pytest.mark.parametrize("key", KEYS)
def test_every_key_can_be_shown_and_replayed(in_process, odd, key):
    """As an option and, after --, as an argument."""
    document = in_process("dead", "show", "--json", "--", "odd one", key).json
    assert document["dead_letter"]["key"] == key
    assert in_process("dead", "list", "--key", key, "--json").json["dead_letters"] == [document["dead_letter"]]
    assert in_process("dead", "replay", "odd one", "--json", "--key", key).json["replayed"] == [key]
    assert len(dead(odd)) == len(KEYS) - 1


@pytest.mark.parametrize(
    "arguments", [["list"], ["replay", "odd one", "--all", "--dry-run"]] + [["show", "--", "odd one", k] for k in KEYS]
)
def test_nothing_in_a_key_reaches_the_terminal_as_a_command(in_process, odd, arguments):
    """No escape sequence and no text that runs backwards."""
    result = in_process("dead", *arguments)
    assert result.code == 0
    assert not {"\x1b", "\u202e"} & set(result.out)


@pytest.mark.parametrize("command", [["list"], ["show", "p", "1"], ["replay", "p", "--all"]])
def test_an_unreachable_database(in_process, monkeypatch, command):
    """Exit 75: try later."""
    result = in_process("dead", *command, "--database-url", "postgresql://127.0.0.1:1/none")
    assert (result.code, result.out) == (75, "")
    assert "Traceback" not in result.err


@pytest.mark.parametrize("command", ["replay", "discard"])
def test_on_a_read_only_node(in_process, db, graveyard, command):
    """What writes is refused with 75; a dry run and the list are not."""
    db.execute(f'alter database "{db.info.dbname}" set default_transaction_read_only = on')
    arguments = [command, "holds", "--all"] + (["--reason", "x"] if command == "discard" else [])
    assert in_process("dead", *arguments).code == 75
    assert in_process("dead", *arguments, "--dry-run").code == 0
    assert in_process("dead", "list").code == 0
    assert in_process("verify").code == 0


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_the_roles_default_isolation_does_not_matter(in_process, db, graveyard, level):
    db.execute(f"alter database \"{db.info.dbname}\" set default_transaction_isolation = '{level}'")
    assert in_process("dead", "replay", "holds", "--key", "1").code == 0
    assert in_process("dead", "discard", "holds", "--key", "2", "--reason", "x").code == 0
    assert dead(db) == ["3", "4"]


def test_verify_sound(in_process, graveyard):
    result = in_process("verify")
    assert (result.code, result.err) == (0, "")
    assert result.out.count("ok") == 6
    assert "broken" not in result.out
    document = in_process("verify", "holds", "--json").json
    assert (document["holds"], document["exit_code"], len(document["checks"])) == (True, 0, 6)
    assert set(document["checks"][0]) == {"policy", "invariant", "holds", "found", "example"}


def test_verify_broken(in_process, db, graveyard):
    """Exit 3, and which check did not hold, how often, and where to look."""
    db.execute("update holds set status = 'held' where id in (5, 6)")
    result = in_process("verify")
    assert result.code == 3
    [line] = [line for line in result.out.splitlines() if "what expired is not held again" in line]
    assert "broken" in line
    assert line.split()[-2:] == ["2", "5"]
    document = in_process("verify", "--json").json
    assert (document["holds"], document["exit_code"]) == (False, 3)
    assert [(c["invariant"], c["found"], c["example"]) for c in document["checks"] if not c["holds"]] == [
        ("kept", 2, "5"), ("accounted", 2, "5"),
    ]  # fmt: skip


def test_verify_without_policies_and_with_a_wrong_one(in_process, holds):
    assert in_process("verify").out == "no policy is registered, so there is nothing to check\n"
    assert in_process("verify", "--json").json["checks"] == []
    holds.register()
    result = in_process("verify", "hold")
    assert (result.code, result.out) == (2, "")
    assert "Did you mean holds" in result.err
    assert in_process("verify", "--database-url", "postgresql://127.0.0.1:1/none").code == 75


def test_one_whose_hold_moved_on_is_closed_by_the_next_run(db, holds, in_process):
    """Nobody has to replay or discard it: no longer listed or counted, and the history says what became of it."""
    holds.due(2)
    holds.register(permanent_attempts=1)
    for token, key in db.execute("select token, key from pgreaper.reaper_claim('holds', 2)").fetchall():
        db.execute("select outcome from pgreaper.reaper_fail(%s, %s, 'Refused', false)", (token, key))
    db.execute("select count(*) from pgreaper.reaper_release((select token from pgreaper.claims))")
    assert in_process("check", "--max-dead", "0").code == 3
    db.execute("update holds set status = 'consumed'")
    assert in_process("work").code == 0
    assert in_process("check", "--max-dead", "0").code == 0
    assert in_process("dead", "list").out == "there is no dead letter\n"
    entries = in_process("history", "holds", "1", "--json").json["entries"]
    assert [(e["outcome"], e["state"]) for e in entries][-1] == ("moot", "consumed")

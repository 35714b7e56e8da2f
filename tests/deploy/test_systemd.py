"""The units for systemd, read by systemd itself."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from pgreaper.cli import main
from pgreaper.deploy import systemd_command
from tests.deploy.conftest import HOSTILE, PROGRAM, drawn

C_ESCAPES = {"n": "\n", "t": "\t", "a": "\a", "b": "\b", "f": "\f", "r": "\r", "v": "\v", "e": "\x1b", "s": " "}


@pytest.fixture
def analyze(needs, tmp_path):
    """A function that runs systemd-analyze on units that are laid into a folder; gives what it complains of."""
    program = needs("systemd-analyze", package="systemd")

    def analyze(units: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
        for name, text in units.items():
            (tmp_path / name).write_text(text)
        names = [str(tmp_path / name) for name in units]
        return subprocess.run(
            [program, *arguments, *names], capture_output=True, text=True, stdin=subprocess.DEVNULL,
            env={"PATH": os.defpath, "SYSTEMD_UNIT_PATH": f"{tmp_path}:"}, check=False,
        )  # fmt: skip

    return analyze


def test_systemd_takes_the_units(printed, analyze):
    """Every line of them is known, and nothing that they name is missing."""
    units = printed("systemd", "--name=shop-holds", "--handler=shop.x:release", "--", *HOSTILE)
    assert list(units) == ["shop-holds.service", "shop-holds-run.service", "shop-holds-run.timer"]
    done = analyze(units, "verify", "--man=no")
    ours = [line for line in done.stderr.splitlines() if "shop-holds" in line]
    assert (ours, done.returncode) == ([], 0)


def test_systemd_minds(printed, analyze):
    """An unknown key or a wrong value is told: the test above can fail."""
    for right, wrong in (
        ("KillMode=mixed", "KillMode=mxied"),
        ("TimeoutStopSec", "TimeoutStop"),
        ("minutely", "minutly"),
    ):
        units = {name: text.replace(right, wrong) for name, text in printed("systemd").items()}
        done = analyze(units, "verify", "--man=no")
        assert [line for line in done.stderr.splitlines() if "pgreaper" in line]


def test_the_services_are_locked_in(printed, analyze):
    """systemd's own measure of what a service could do, from 0 to 10: with one lock less it is above this."""
    units = printed("systemd")
    units.pop("pgreaper-run.timer")
    done = analyze(units, "security", "--offline=true", "--threshold=18", "--no-pager")
    assert done.returncode == 0, done.stdout


def test_hostile_words_arrive_unchanged(needs):
    """The manager's parser is given each word as an argument; what it says it would run is those words."""
    manager = needs("/lib/systemd/systemd", package="systemd")
    words = [*HOSTILE, *drawn(300), "plain", "/a/b"]
    odd = "/opt/100% of a $lot/żółć"
    commands = [*(["/bin/true", word, "end"] for word in words), [odd, "end"]]
    unit = "[Service]\nType=oneshot\n" + "".join(f"ExecStart={systemd_command(command)}\n" for command in commands)
    with TemporaryDirectory() as name:
        # The manager tests nothing as root.
        folder = Path(name)
        folder.chmod(0o777)
        (folder / "words.service").write_text(unit)
        (folder / "basic.target").write_text("[Unit]\nWants=words.service\n")
        done = subprocess.run(
            ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups",
             manager, "--test", "--user", "--unit=basic.target"],
            env={"PATH": os.defpath, "SYSTEMD_UNIT_PATH": name, "XDG_RUNTIME_DIR": name, "HOME": "/"},
            capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    found = [_words(line) for line in re.findall(r"Command Line: (.*)", done.stdout + done.stderr)]
    assert [[program, *map(_plain, arguments)] for program, *arguments in found] == commands


def _words(line: str) -> list[str]:
    """A command line as systemd shows it: quoted where needed, escaped as in C, and for a shell."""
    return [
        re.sub(r"\\(x[0-9a-f]{2}|[0-7]{3}|.)", _character, quoted or bare)
        for quoted, bare in re.findall(r'"((?:\\.|[^"\\])*)"|(\S+)', line)
    ]


def _character(match: re.Match[str]) -> str:
    code = match[1]
    if len(code) == 3:
        return chr(int(code[1:], 16) if code[0] == "x" else int(code, 8))
    return C_ESCAPES.get(code, code)


def _plain(word: str) -> str:
    """A word after systemd has put variables in: two dollars are one, and no single one is there to name any."""
    assert "$" not in word.replace("$$", "")
    return word.replace("$$", "$")


def test_the_exit_codes_have_their_meaning(printed):
    """75 starts the daemon again and is no failure; 2 does not; a stop waits longer than the shutdown may take."""
    units = printed("systemd", "--shutdown-timeout=45", "--max-seconds=300")
    daemon, run = units["pgreaper.service"], units["pgreaper-run.service"]
    settings = dict(re.findall(r"^(\w+)=(.*)$", daemon, re.MULTILINE))
    assert settings["Restart"] == "on-failure"
    assert settings["RestartForceExitStatus"] == settings["SuccessExitStatus"] == "75"
    assert settings["RestartPreventExitStatus"] == "2"
    assert settings["StartLimitIntervalSec"] == "0"
    for unit in (daemon, run):
        assert "--shutdown-timeout=45" in unit
        assert int(re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)[0]) > 45
    assert int(re.findall(r"^TimeoutStartSec=(\d+)$", run, re.MULTILINE)[0]) > 300 + 60
    assert "--max-seconds=300" in run


def test_the_program_is_named_by_its_path(printed):
    """The one that runs now, unless another is named."""
    assert f"\nExecStart={PROGRAM} work --daemon" in printed("systemd")["pgreaper.service"]
    for text in printed("systemd", "--program=/opt/x/pgreaper", "--kind=timer").values():
        assert str(PROGRAM) not in text


def test_units_are_written(capsys, tmp_path):
    """Each as a file; again is the same, and what somebody has changed is not overwritten."""
    command = ["deploy", "print", "systemd", "--to", str(tmp_path)]
    assert main(command) == 0
    names = ["pgreaper.service", "pgreaper-run.service", "pgreaper-run.timer"]
    assert capsys.readouterr().out.split() == [str(tmp_path / name) for name in names]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    assert main(command) == 0
    (tmp_path / names[2]).write_text("mine")
    (tmp_path / names[0]).unlink()
    capsys.readouterr()
    assert main(command) == 2
    assert "pgreaper-run.timer is there already and says something else" in capsys.readouterr().err
    assert not (tmp_path / names[0]).exists()


@pytest.mark.parametrize(
    "arguments", [["--name=a b"], ["--name=x\nUser=root"], ["--schedule=daily\nUnit=x"], ["--program=pgreaper"],
                  ["--schedule=bogus"], ["--name=root"], ["--name=nobody"],
                  ["--program=/it's"], ["--program=/a\nUser=root"], ["--kind=both"], ["--to=/nowhere"]],
)  # fmt: skip
def test_refused(capsys, arguments):
    """Nothing that would begin a line of its own gets into a unit."""
    assert main(["deploy", "print", "systemd", *arguments]) == 2
    assert capsys.readouterr().out == ""


CALENDARS = """
minutely | hourly | daily | weekly | monthly | quarterly | semiannually | annually | daily UTC | daily Europe/Zurich
*:0/5 | *:*:00/30 | *:*:0/0.5 | 08:05:40.2345 | 05:40 | 05:40 UTC | 5:4 | Mon | mon..wed,fri *:0 | Mon, 10:00
Mon-Fri 8:0 | Monday..Tue | Mon,Tue *-*-01..04 12:00:00 | 2003-03-05 | 70-01-01 | 10-15 | *-02~03 | *-*~1..3
*:1,2,3..7 | *-*-1/7 | 10:00 CET | *:1..5/2 | *-*-*
""".replace("\n", " | ")
NO_CALENDARS = """
bogus | hourly bogus | minutely 5 | Mon Tue 10:00 | Fri..Mon | Fre 10:00 | UTC | 12 | 1: | :1 | 1:,2 | 1:2:3:4
25:00 | 24:00 | *:60 | 1:1:60 | *-13-01 | *-*-32 | *-*-0 | *-*~29 | 2200-01-01 | 123-01-01 | 00:00/0 | *:0/61 | *:*/5
*:10..5 | *:1..5/2,* | **:00 | * | 10:00 europe/nowhere | Mon *-*-* 10:00 10:00 | 1:00 2003-01-01 | */5 * * * *
""".replace("\n", " | ")


@pytest.mark.parametrize(("texts", "right"), [(CALENDARS, True), (NO_CALENDARS, False)], ids=["taken", "refused"])
def test_a_calendar_is_what_systemd_takes_for_one(capsys, needs, texts, right):
    """Each of them is asked of systemd itself."""
    program = needs("systemd-analyze", package="systemd")
    calendars = [text.strip() for text in texts.split("|") if text.strip()]
    assert len(calendars) > 25
    for text in calendars:
        done = subprocess.run([program, "calendar", "--", text], capture_output=True, check=False)
        assert (done.returncode == 0) is right, text
        code = main(["deploy", "print", "systemd", "--kind=timer", f"--schedule={text}"])
        assert (code == 0) is right, text
        assert (f"\nOnCalendar={text}\n" in capsys.readouterr().out) is right

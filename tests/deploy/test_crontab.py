"""The crontab, checked and run by cron itself."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import time

import pytest

from pgreaper.cli import main
from tests.deploy.conftest import HOSTILE, PROGRAM, drawn

# A cron of the test's own: its folders lie over the machine's in a mount namespace.
PRIVATE = """
mount --bind "$1" /var/spool/cron/crontabs
mount -t tmpfs none /run
mkdir "$1/none"
mount --bind "$1/none" /etc/cron.d
mount --bind /dev/null /etc/crontab
exec "$2" -f
"""
RECORDER = """#!{python} -I
import json, os, sys
with open({record!r}, "a") as record:
    record.write(json.dumps([sys.argv[1:], dict(os.environ)]) + "\\n")
"""


def entry(text: str) -> str:
    """The one line that is neither a comment nor a setting."""
    (line,) = [line for line in text.split("\n") if line.startswith(("*", "@", "0"))]
    return line


def test_cron_takes_it(printed, needs, tmp_path):
    """Debian's crontab reads it, and refuses one with a wrong minute."""
    crontab = needs("crontab", package="cron")
    file = tmp_path / "crontab"
    for text, code in ((printed("crontab", "--", *HOSTILE[:12])["crontab"], 0), (f"61 {' '.join('****')} true\n", 1)):
        file.write_text(text)
        assert subprocess.run([crontab, "-n", file], capture_output=True, check=False).returncode == code


def test_hostile_words_arrive_unchanged_from_cron(printed, needs, tmp_path):
    """Through cron's percent signs and /bin/sh: a program that writes down what it is given, started by cron."""
    cron = needs("cron", package="cron")
    record, recorder = tmp_path / "record", tmp_path / "it's 100% a recorder"
    recorder.write_text(RECORDER.format(python=sys.executable, record=str(record)))
    recorder.chmod(stat.S_IRWXU)
    rows = [["plain"], *([word] for word in HOSTILE), HOSTILE[:6], *(drawn(40)[i : i + 4] for i in range(0, 40, 4))]
    texts = [printed("crontab", f"--program={recorder}", "--", *row)["crontab"] for row in rows]
    head, *lines = [texts[0].replace(entry(texts[0]), ""), *map(entry, texts)]
    # cron starts these at once instead of in the next minute; the rest of the line is as printed.
    lines = ["@reboot" + line.removeprefix("* * * * *") for line in lines]
    folder = tmp_path / "spool"
    folder.mkdir()
    table = folder / "root"
    table.write_text(head.replace("MAILTO=root", 'MAILTO=""') + "\n".join(lines) + "\n")
    table.chmod(stat.S_IRUSR | stat.S_IWUSR)

    started = subprocess.Popen(
        ["unshare", "--mount", "--pid", "--fork", "--kill-child", "/bin/sh", "-ec", PRIVATE, "sh", folder, cron],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        end = time.monotonic() + 60
        while len(seen := record.read_text().splitlines() if record.exists() else []) < len(rows):
            assert time.monotonic() < end, f"only these were started: {seen}"
            assert started.poll() is None, "cron ended"
            time.sleep(0.02)
    finally:
        started.kill()
        started.wait()

    calls = [json.loads(line) for line in seen]
    options = ["work", "--max-seconds=50"]
    wanted = [[*options, *(["--"] if any(w.startswith("-") for w in row) else []), *row] for row in rows]
    assert sorted(arguments for arguments, _ in calls) == sorted(wanted)
    for _, environment in calls:
        assert environment["PATH"] == "/usr/local/bin:/usr/bin:/bin"
        assert environment["PGREAPER_DATABASE_URL"] == "postgresql://USER@HOST/DATABASE"


def test_the_line_works(printed, dsn, holds):
    """As cron starts it: /bin/sh, hardly an environment.  It expires what is due, and has nothing to mail."""
    holds.due(2)
    holds.register("100%")
    command = entry(printed("crontab", "100%", "--schedule=@hourly")["crontab"]).removeprefix("@hourly ")
    assert "%" in command.replace(r"\%", "%")
    done = subprocess.run(
        ["/bin/sh", "-c", command.replace(r"\%", "%")],
        env={"PATH": "/usr/bin:/bin", "PGREAPER_DATABASE_URL": dsn}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert set(holds.states().values()) == {"expired"}


def test_what_fails_is_mailed(printed, db, dsn, holds):
    """A hold that is refused: the line says so on stderr, which cron mails, and exits 1."""
    db.execute("alter table holds add check (status <> 'expired' or id <> 1)")
    holds.due(2)
    holds.register()
    command = entry(printed("crontab")["crontab"]).removeprefix("* * * * * ")
    done = subprocess.run(
        ["/bin/sh", "-c", command], env={"PGREAPER_DATABASE_URL": dsn}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "policy holds: 1 hold failed" in done.stderr


def test_the_program_is_found_without_a_path(printed, monkeypatch, tmp_path, capsys):
    """The one that runs now, absolutely; if there is none to be found, a person has to say."""
    assert f" {PROGRAM} work" in entry(printed("crontab")["crontab"])
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(sys, "argv", ["-c"])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["deploy", "print", "crontab"]) == 2
    assert "hint: Say where it is: --program" in capsys.readouterr().err
    (tmp_path / "pgreaper").symlink_to(PROGRAM)
    assert f" {tmp_path}/pgreaper work" in entry(printed("crontab")["crontab"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x" * 199] * 5, "longer than the 998 bytes that cron takes"),
        (["--schedule=* * * *"], "is not a schedule: it has 4 fields and not five"),
        (["--schedule=* * * * *\n* * * * * id"], "is not a schedule"),
        (["--program=pgreaper"], "pgreaper is not an absolute path"),
    ],
)
def test_refused(capsys, arguments, message):
    assert main(["deploy", "print", "crontab", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err.splitlines()[0]

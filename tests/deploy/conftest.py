"""What `pgreaper deploy print` prints, and words that no scheduler may take for anything but words."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml  # type: ignore[import-untyped]

from pgreaper.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable

    Printed = Callable[..., dict[str, str]]

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(sys.executable).with_name("pgreaper")

HOSTILE = [
    "a b",
    "100%",
    "%n\\%",
    "$(HOME)",
    "$$(HOME)",
    "$HOME ${HOME} $$",
    "`id`",
    "it's",
    'say "x"',
    "back\\slash\\",
    "line\nbreak\n",
    "\ttab",
    "; rm -rf /",
    "#c",
    "-x",
    "--help",
    "yes",
    "null",
    "~",
    "1:30",
    "0x10",
    "- a: b",
    "{a: [b]}",
    "&a *a !a |",
    "żółć 座席 😀",
    "\u2028\u0085\ufeff\x7f\x1b[2J",
    "@@@",
    "end\\",
]


def drawn(number: int) -> list[str]:
    """More of them, the same ones each time, of characters that mean something somewhere."""
    chance = random.Random(7)
    return [
        "".join(chance.choices("a %$\\\"'`\n\t;#&|(){}[]*?~!-:,@é座😀\x01", k=chance.randint(1, 12)))
        for _ in range(number)
    ]


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Printed:
    """A function that gives the files of `deploy print`, by name: ``printed("k8s", "bookings")``."""

    def printed(kind: str, *arguments: str) -> dict[str, str]:
        code = main(["deploy", "print", kind, "--json", *arguments])
        out, err = capsys.readouterr()
        assert (code, err) == (0, "")
        return {file["name"]: file["text"] for file in json.loads(out)["files"]}

    return printed


def container(manifest: str) -> dict[str, object]:
    """The one container of a manifest."""
    document = yaml.safe_load(manifest)
    pod = document["spec"]["jobTemplate"]["spec"] if document["kind"] == "CronJob" else document["spec"]
    (only,) = pod["template"]["spec"]["containers"]
    assert isinstance(only, dict)
    return only


def expanded(word: str) -> str:
    """A word of a container's command as the kubelet starts it, in a container that has no variable of use here."""
    result, rest = "", word
    while "$" in rest:
        before, _, rest = rest.partition("$")
        result += before
        if rest.startswith("("):
            assert ")" not in rest, f"a reference to a variable: {word!r}"
            result, rest = result + "$(", rest[1:]
        else:
            # A second dollar is dropped; any other character, or none, leaves the first as it is.
            result, rest = result + "$" + (rest[:1] if rest[:1] != "$" else ""), rest[1:]
    return result + rest

"""
Commands and statements that a person can paste.

Owns how a name or a value is written so that a shell or psql reads it back as it was, also one with quotes,
line breaks or a leading dash.  Runs nothing.
"""

import shlex
from collections.abc import Mapping, Sequence
from typing import Final

from pgreaper.text import quoted


def shell(*words: str) -> str:
    """The words as a shell command; what is not printable is written as ``$'…'``, which bash and zsh read."""
    return " ".join(map(_shell_word, words))


def command(subcommand: str, policy: str, *options: str) -> str:
    """A command of pgreaper's about a policy, whose name may begin with a dash."""
    words = ["pgreaper", *subcommand.split()]
    return shell(*words, *options, "--", policy) if policy.startswith("-") else shell(*words, policy, *options)


def _shell_word(word: str) -> str:
    if word.isprintable():
        return shlex.quote(word)
    escaped = word.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + "".join(c if c.isprintable() else _bytes(c) for c in escaped) + "'"


def _bytes(character: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in character.encode())


def name(*parts: str) -> str:
    """An identifier of SQL, qualified when there are several parts."""
    return ".".join(quoted(p) if p.isprintable() else _unicode(p, "U&", '"') for p in parts)


def relation(*parts: str) -> str:
    """The same as ``pgreaper register`` and ``regclass`` read it, which know no escapes."""
    return ".".join(map(quoted, parts))


def literal(value: str) -> str:
    """A string constant of SQL that means the same whatever ``standard_conforming_strings`` says."""
    if not value.isprintable():
        return _unicode(value, "U&", "'")
    escaped = value.replace("'", "''")
    return "E'" + escaped.replace("\\", "\\\\") + "'" if "\\" in value else f"'{escaped}'"


def _unicode(value: str, prefix: str, quote: str) -> str:
    escaped = value.replace("\\", "\\\\").replace(quote, quote * 2)
    return prefix + quote + "".join(c if c.isprintable() else f"\\+{ord(c):06x}" for c in escaped) + quote


DEFAULTS: Final = {
    "grace": "00:00:00",
    "lease": "00:01:00",
    "batch": "500",
    "max_attempts": "5",
    "permanent_attempts": "1",
    "backoff_base": "00:00:01",
    "backoff_cap": "01:00:00",
    "objective": "00:01:00",
}
"""What ``pgreaper register`` takes for options that are not given, as Postgres writes it."""


def register(
    policy: str,
    table: str,
    *,
    deadline: str,
    status: str | None = None,
    held: Sequence[str] = (),
    expired: str | None = None,
    owner: str,
    key: Sequence[str] = (),
    stamp: str | None = None,
    assignments: Mapping[str, str | None] | None = None,
    payload: Sequence[str] = (),
    **settings: str | None,
) -> str:
    """
    The ``pgreaper register`` that makes this policy; ``table`` is written as in SQL.

    ``settings`` are the remaining options by the names of the SQL parameters; those that are None or the
    default are left out.
    """
    words = ["--deadline", deadline]
    if status is not None:
        words += ["--status", status]
    for state in held:
        words += ["--held", state]
    if expired is not None:
        words += ["--expired", expired]
    words += ["--owner", owner]
    for column in key:
        words += ["--key", column]
    if stamp is not None:
        words += ["--stamp", stamp]
    for column, value in (assignments or {}).items():
        words += ["--set", f"{column}={_constant(value)}"]
    for column in payload:
        words += ["--payload", column]
    for setting, text in settings.items():
        if text is not None and text != DEFAULTS.get(setting):
            words += [f"--{setting.replace('_', '-')}", text]
    # After `--` nothing is taken for an option.
    places = [policy, table]
    if any(place.startswith("-") for place in places):
        return shell("pgreaper", "register", *words, "--", *places)
    return shell("pgreaper", "register", *places, *words)


def _constant(value: str | None) -> str:
    """As ``--set`` reads it: the bare word is NULL, quotes make it a word."""
    if value is None:
        return "null"
    return f"'{value}'" if value.lower() in ("null", "'null'") else value

"""
How values are written for people: escaped, shortened, rounded.

A key, a name or a state may be anything that fits into a text: nothing here lets it
forge a line, move the cursor or fill the screen.  Imports nothing of pgreaper.
"""

import sys
from datetime import datetime, timedelta

_ELLIPSIS = "…"


def visible(text: str, limit: int = 60) -> str:
    """
    The text on one line, without control characters, at most ``limit`` characters.

    What was cut is told by its length, so that two long keys are not taken for one.
    """
    cut = text[: limit + 1]
    shown = "".join(c if c.isprintable() else _escaped(c) for c in cut)
    if len(text) <= limit and len(shown) <= limit:
        return shown
    tail = f"{_ELLIPSIS} ({len(text):,} characters)"
    return shown[: max(limit - len(tail), 8)] + tail


def one_line(text: str) -> str:
    """The text with each control character escaped, whole."""
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def key(text: str, limit: int = 40) -> str:
    """A hold's key; the empty one is shown as two quotes."""
    return visible(text, limit) if text else "''"


def count(number: int | None, *, capped: bool = False) -> str:
    """``12,345``; ``12,345+`` when counting stopped there."""
    if number is None:
        return "-"
    return f"{number:,}+" if capped else f"{number:,}"


def plural(number: int, noun: str) -> str:
    """``1 hold``, ``2 holds``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def duration(value: timedelta | float | None) -> str:
    """A length of time in the two units that matter: ``250 ms``, ``3.2 s``, ``4 min 10 s``, ``3 d 4 h``."""
    if value is None:
        return "-"
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if seconds < 0:
        return "-" + duration(-seconds)
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f}".removesuffix(".0") + " s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    size, unit, part, part_unit = next(unit for limit, unit in _UNITS if whole < limit)
    rest = whole % size // part
    return f"{whole // size:,} {unit}" + (f" {rest} {part_unit}" if rest else "")


_UNITS = (
    (3600, (60, "min", 1, "s")),
    (86400, (3600, "h", 60, "min")),
    (365 * 86400, (86400, "d", 3600, "h")),
    (float("inf"), (365 * 86400, "y", 86400, "d")),
)


def instant(value: datetime | None) -> str:
    """A point in time, in UTC to the second; what Python cannot tell is ``-infinity`` or ``infinity``."""
    if value is None:
        return "-"
    if value.year == 1:
        return "-infinity"
    if value.year == 9999:
        return "infinity"
    return value.strftime("%Y-%m-%d %H:%M:%SZ")


def quoted(name: str) -> str:
    """An identifier as it is written in SQL: quoted when it must be."""
    plain = name.isascii() and name.replace("_", "a").isalnum() and name == name.lower() and not name[0].isdigit()
    return name if plain and name not in _RESERVED else '"' + name.replace('"', '""') + '"'


_RESERVED = frozenset(
    "all analyse analyze and any array as asc asymmetric both case cast check collate column constraint create "
    "current_catalog current_date current_role current_time current_timestamp current_user default deferrable desc "
    "distinct do else end except false fetch for foreign from grant group having in initially intersect into lateral "
    "leading limit localtime localtimestamp not null offset on only or order placing primary references returning "
    "select session_user some symmetric system_user table then to trailing true union unique user using variadic when "
    "where window with "
    "authorization binary collation concurrently cross current_schema freeze full ilike inner is isnull "
    "join left like natural notnull outer overlaps right similar tablesample verbose".split()
)


def harden(*streams: object) -> None:
    """Let no stream fail on a character that its encoding lacks."""
    for stream in streams or (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")

"""
The server's own names in a statement, with their schema.

A statement of the driver runs with the session's ``search_path``, which is the user's and
stays as it is: behind a pooler a changed one would reach other clients, and triggers must
find what they always find.  Whoever may create something in one of its schemas could put a
better-matching ``=`` or ``count`` there.  So :func:`qualified` says of types, functions and
operators that the server's are meant; the statements stay as readable as they are written.

It is a translator for this package's own statements and knows no more SQL than they use:
``in (…)``, ``using (…)``, ``like``, ``between`` and ``is distinct from`` look operators up in
the path and cannot name a schema, so they are refused (``= any (…)`` and ``on`` say the same).
Imports nothing of pgreaper.
"""

import re
from functools import cache
from typing import Final

# Types whose names are words of SQL's grammar (integer, boolean, interval …) always mean the server's own.
_TYPES: Final = "text|name|uuid|oid|tid|xid|date|timestamptz|json|jsonb|bytea|int2|int4|int8|float8|reg[a-z]+"
# Looks like a call, and is grammar.
_GRAMMAR: Final = (
    "all|and|any|array|as|case|coalesce|distinct|else|exists|extract|filter|from|greatest|group|interval|lateral|least|"
    "limit|not|nullif|on|or|over|row|select|some|then|trim|values|when|where|with|within"
)
_QUOTED: Final = r"""(?P<literal> '(?:[^']|'')*' | "(?:[^"]|"")*" )"""
_PIECES: Final = re.compile(
    rf"""{_QUOTED}
       | (?P<refused> \b (?: (?:not\ )?in\s*\( | using\s*\( | i?like\b | between\b | is\ (?:not\ )?distinct\b ) )
       | :: (?P<type> (?:{_TYPES}) ) \b (?!\.)
       | (?: (?<=from\ ) | (?<=join\ ) ) (?P<catalog> pg_[a-z_]+ ) \b (?![.(])
       | (?<![\w.%]) (?P<call> (?!(?:{_GRAMMAR})\b) [a-z_]\w* ) (?= \( )
       | (?<= [ ]) (?P<operator> <> | <= | >= | !~ | \|\| | ->> | [=<>~+-] ) (?= [ ])""",
    re.VERBOSE,
)
_FIRST: Final = rf"{_QUOTED} | \$1\b"


def filled(statement: str, value: str) -> str:
    """The statement with ``value`` for its parameter ``$1``; a quoted text or name that contains one stays as it is."""
    return re.sub(_FIRST, lambda found: found[0] if found["literal"] else value, statement, flags=re.VERBOSE)


@cache
def qualified(statement: str) -> str:
    """The statement with schema ``pg_catalog`` on each type, function, operator and catalog of the server's."""

    def replace(found: re.Match[str]) -> str:
        if found["refused"]:
            raise ValueError(f"{found[0]!r} looks up an operator in the search_path: {statement}")
        if found["type"]:
            return f"::pg_catalog.{found['type']}"
        if found["call"] or found["catalog"]:
            return f"pg_catalog.{found['call'] or found['catalog']}"
        if found["operator"]:
            return f"operator(pg_catalog.{found['operator']})"
        return found[0]

    return _PIECES.sub(replace, statement)

"""
What a run says while it works: events, as a sentence for people or as a line of JSON for machines.

Owns the fields of an event and how they are written; knows no stream.  An event names policies, keys,
counts, error classes, SQLSTATEs and constraints, and has sentences of our own: values of rows, error texts and
passwords have no place in it.  Whatever is in a key or a name, an event is one line of bounded length.

The fields and the names of the events are documented in ``docs/logs.md``; none is renamed or dropped within
a version of the JSON documents.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple
from uuid import UUID

from pgreaper.text import visible

DEBUG: Final = "debug"
INFO: Final = "info"
WARNING: Final = "warning"
ERROR: Final = "error"

# A sentence or a name beyond that is shortened, and so is a key.
_LONGEST: Final = 1000
_LONGEST_KEY: Final = 200
# An event about many holds names so many of them.
EXAMPLES: Final = 3


class Event(NamedTuple):
    """
    One happening.

    ``text`` is the sentence for people; without one the event is for machines only, because people read the same
    elsewhere.  ``counts`` are plain numbers by name; ``seconds`` is the length of time that the event is about.
    ``code``, ``sqlstate``, ``constraint`` and ``hint`` are those of an error of ours, ``error_class`` is the kind of
    failure that the books have.
    """

    name: str
    text: str = ""
    level: str = INFO
    policy: str | None = None
    token: UUID | None = None
    key: str | None = None
    keys: Sequence[str] = ()
    outcome: str | None = None
    counts: Mapping[str, int] = {}
    seconds: float | None = None
    code: str | None = None
    error_class: str | None = None
    sqlstate: str | None = None
    constraint: str | None = None
    hint: str | None = None


Log = Callable[[Event], None]
"""Where events go."""


def sentences(write: Callable[[str], None]) -> Log:
    """A log that passes on what people read, a line at a time."""

    def log(event: Event) -> None:
        for line in as_text(event):
            write(line)

    return log


def as_text(event: Event) -> list[str]:
    """The event for people: nothing, a line, or a line and a hint."""
    if not event.text:
        return []
    lines = [visible(event.text, _LONGEST)]
    if event.hint:
        lines.append(f"hint: {visible(event.hint, _LONGEST)}")
    return lines


def as_json(event: Event, worker: str, now: datetime | None = None) -> str:
    """The event for machines: one JSON object in ASCII, on one line; fields without a value are left out."""
    now = (now or datetime.now(UTC)).astimezone(UTC)
    whole: dict[str, object] = {
        "time": now.strftime("%Y-%m-%dT%H:%M:%S.") + f"{now.microsecond // 1000:03}Z",
        "level": event.level,
        "event": event.name,
        "worker": worker,
        "policy": _bounded(event.policy),
        "token": str(event.token) if event.token else None,
        "key": _bounded(event.key, _LONGEST_KEY),
        "keys": [_bounded(key, _LONGEST_KEY) for key in event.keys] or None,
        "outcome": event.outcome,
        "counts": dict(event.counts) or None,
        "seconds": None if event.seconds is None else round(event.seconds, 6),
        "code": event.code,
        "error_class": _bounded(event.error_class),
        "sqlstate": event.sqlstate,
        "constraint": _bounded(event.constraint),
        "message": _bounded(event.text) or None,
        "hint": _bounded(event.hint),
    }
    return json.dumps({name: value for name, value in whole.items() if value is not None}, allow_nan=False)


def _bounded(text: str | None, limit: int = _LONGEST) -> str | None:
    """The text as it is, or a beginning of it and its length."""
    if text is None or len(text) <= limit:
        return text
    return f"{text[:limit]}… ({len(text):,} characters)"

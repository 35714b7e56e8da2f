"""
When a schedule of pg_cron starts its job.

Owns the syntax, five fields of cron or ``10 seconds``, and the next start after a moment.  Nothing is accepted
that pg_cron would refuse; what it takes but means otherwise than it looks (a sixth field, ``5/15``, ``9-5``: it
ignores the rest, or never starts) is refused here with a reason.  Imports nothing of pgreaper.
"""

import re
from calendar import monthrange
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Final

EVERY_MINUTE: Final = "* * * * *"
SECONDS_SINCE: Final = (1, 5)
"""The first version of pg_cron that knows ``10 seconds``."""
LAST_DAY_SINCE: Final = (1, 6)
"""The first version that knows ``$``, the last day of the month."""

_MACROS: Final = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_MONTHS: Final = tuple("jan feb mar apr may jun jul aug sep oct nov dec".split())
_DAYS: Final = tuple("sun mon tue wed thu fri sat".split())
_FIELDS: Final = (
    ("minute", 0, 59),
    ("hour", 0, 23),
    ("day of the month", 1, 31),
    ("month", 1, 12),
    ("day of the week", 0, 7),
)
_SECONDS: Final = re.compile(r"\s*(\d+)\s+seconds?\s*", re.IGNORECASE)
_PART: Final = re.compile(r"(?:(?P<all>\*)|(?P<low>\w+)(?:-(?P<high>\w+))?)(?:/(?P<step>\d+))?")
_LAST: Final = "$"


class ScheduleError(ValueError):
    """Not a schedule; ``str()`` says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule as pg_cron reads it; ``seconds`` instead of the fields, or neither: only when the server starts."""

    text: str
    seconds: int | None = None
    minutes: frozenset[int] = frozenset()
    hours: frozenset[int] = frozenset()
    days: frozenset[int] = frozenset()
    months: frozenset[int] = frozenset()
    weekdays: frozenset[int] = frozenset()
    either_day: bool = False
    last_day: bool = False

    @property
    def at_start_only(self) -> bool:
        """Whether it is ``@reboot``."""
        return self.seconds is None and not self.minutes

    @property
    def since(self) -> tuple[int, int] | None:
        """The version of pg_cron that this syntax needs, when not every one has it."""
        if self.seconds is not None:
            return SECONDS_SINCE
        return LAST_DAY_SINCE if self.last_day else None

    def after(self, moment: datetime, zone: tzinfo = UTC) -> datetime | None:
        """
        The next start after a moment, which has a time zone; None when there is none within nine years.

        ``zone`` is pg_cron's: GMT, unless cron.timezone says otherwise.
        """
        if self.seconds is not None:
            return moment + timedelta(seconds=self.seconds)
        if self.at_start_only:
            return None
        at = (moment.astimezone(zone) + timedelta(minutes=1)).replace(second=0, microsecond=0)
        end = at + timedelta(days=9 * 366)
        while at < end:
            if at.month not in self.months or not self._has_day(at):
                at = (at + timedelta(days=1)).replace(hour=0, minute=0)
            elif at.hour not in self.hours:
                at = (at + timedelta(hours=1)).replace(minute=0)
            elif at.minute not in self.minutes:
                at += timedelta(minutes=1)
            else:
                return at.astimezone(UTC)
        return None

    def gap(self, moment: datetime, zone: tzinfo = UTC) -> timedelta | None:
        """How far apart the next two starts are."""
        first = self.after(moment, zone)
        second = self.after(first, zone) if first else None
        return second - first if first and second else None

    def _has_day(self, at: datetime) -> bool:
        last = self.last_day and at.day == monthrange(at.year, at.month)[1]
        of_month = at.day in self.days or last
        of_week = at.isoweekday() % 7 in self.weekdays
        return of_month or of_week if self.either_day else of_month and of_week


def parse(text: str) -> Schedule:
    """Read a schedule.  Raises ScheduleError."""
    if match := _SECONDS.fullmatch(text):
        seconds = int(match[1])
        if not 0 < seconds < 60:
            raise ScheduleError("an interval is of 1 to 59 seconds; a minute is '* * * * *'")
        return Schedule(text, seconds=seconds)
    words = text.split()
    if words == ["@reboot"]:
        return Schedule(text)
    if len(words) == 1 and words[0].startswith("@"):
        if words[0] not in _MACROS:
            raise ScheduleError(f"pg_cron knows {', '.join(_MACROS)} and @reboot")
        words = _MACROS[words[0]].split()
    if len(words) != len(_FIELDS):
        more = "; pg_cron would ignore the rest" if len(words) > len(_FIELDS) else ""
        raise ScheduleError(f"it has {len(words)} fields and not five: minute hour day month weekday{more}")
    last_day = words[2] == _LAST
    values = [
        frozenset[int]() if last_day and index == 2 else _values(word, *_FIELDS[index])
        for index, word in enumerate(words)
    ]
    weekdays = frozenset(day % 7 for day in values[4])
    # As cron has always done it: when both days are restricted, either will do.
    restricted = not words[2].startswith("*") and not words[4].startswith("*")
    return Schedule(text, None, values[0], values[1], values[2], values[3], weekdays, restricted, last_day)


def _values(word: str, field: str, least: int, most: int) -> frozenset[int]:
    found: set[int] = set()
    for part in word.split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise ScheduleError(f"'{part}' is no {field}")
        if match["all"]:
            low, high = least, most
        else:
            low = _number(match["low"], field, least, most)
            high = _number(match["high"], field, least, most) if match["high"] else low
            if match["step"] and not match["high"]:
                raise ScheduleError(f"'{part}' would mean {low} only: write {low}-{most}/{match['step']}")
        step = int(match["step"]) if match["step"] else 1
        if low > high:
            raise ScheduleError(f"'{part}' runs backwards, and pg_cron would never start it")
        if step < 1:
            raise ScheduleError(f"the step in '{part}' is zero")
        found.update(range(low, high + 1, step))
    return frozenset(found)


def _number(word: str, field: str, least: int, most: int) -> int:
    names = {"month": _MONTHS, "day of the week": _DAYS}.get(field, ())
    if word.lower() in names:
        return names.index(word.lower()) + (1 if field == "month" else 0)
    if not (word.isascii() and word.isdigit()) or not least <= int(word) <= most:
        raise ScheduleError(f"'{word}' is no {field}: {least} to {most}")
    return int(word)

"""
What a scheduler is given to run pgreaper: a crontab, systemd's units, Kubernetes' manifests.

The texts are the templates in ``deploy/``, where people read them; this module fills them in.
It owns how a word of a command is written in each of them, whatever characters it has, and the
deadlines that must fit each other: a run's ``--max-seconds``, the time that SIGTERM leaves, and
when the scheduler gives up.
"""

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Final

from pgreaper.errors import InvalidInput, ReaperError
from pgreaper.schedule import ScheduleError, parse
from pgreaper.text import visible

HEARTBEAT: Final = "/run/pgreaper/heartbeat"
"""Where the daemon of the Deployment beats, in a volume of its own."""

# Beyond --shutdown-timeout, before the scheduler kills.
_SPARE: Final = 10
# Beyond --max-seconds: a pod has to start, and the last batch to end.
_OVERRUN: Final = 120
# Debian's cron refuses a longer command.
_LONGEST_LINE: Final = 998


@dataclass(frozen=True, slots=True)
class Job:
    """
    What is to run.

    ``max_seconds`` bounds one run, ``shutdown_timeout`` is what SIGTERM leaves (None: nobody sends one), in seconds.
    """

    policies: Sequence[str] = ()
    handler: str | None = None
    concurrency: int | None = None
    max_seconds: float = 50
    shutdown_timeout: float | None = None

    def run(self) -> list[str]:
        """The arguments of one run, without the program."""
        return self._arguments(f"--max-seconds={self.max_seconds:.15g}")

    def daemon(self, *options: str) -> list[str]:
        """The arguments of a daemon, without the program."""
        return self._arguments("--daemon", *options)

    def _arguments(self, *options: str) -> list[str]:
        words = ["work", *options]
        if self.shutdown_timeout is not None:
            words.append(f"--shutdown-timeout={self.shutdown_timeout:.15g}")
        if self.handler is not None:
            words.append(f"--handler={self.handler}")
        if self.concurrency is not None:
            words.append(f"--concurrency={self.concurrency}")
        if any(policy.startswith("-") for policy in self.policies):
            words.append("--")
        return [*words, *self.policies]

    @property
    def grace(self) -> int:
        """Seconds from SIGTERM to SIGKILL."""
        return math.ceil(self.shutdown_timeout or 0) + _SPARE

    @property
    def deadline(self) -> int:
        """Seconds after which a run that has not ended is given up."""
        return math.ceil(self.max_seconds) + _OVERRUN


def crontab(job: Job, *, program: str, schedule: str) -> str:
    """
    The lines for a user's crontab.

    Raises InvalidInput when the command is longer than cron takes.
    """
    command = crontab_command([program, *job.run()])
    if len(command.encode()) > _LONGEST_LINE - len("  > /dev/null"):
        raise InvalidInput(
            f"the command is longer than the {_LONGEST_LINE} bytes that cron takes",
            hint="Name fewer policies: without any, pgreaper works on all.",
        )
    return _fill("crontab", schedule=schedule, command=command)


def check_user(name: str) -> str:
    """
    A name for the units and for the user that they run as.

    Raises InvalidInput for one that would run them with the rights of the system, or of everybody's.
    """
    if name in ("root", "nobody"):
        raise InvalidInput(
            f"a service named {name} would run as the user {name}, if there is one", hint="Choose another --name."
        )
    return name


def systemd_daemon(job: Job, *, program: str, name: str) -> dict[str, str]:
    """The unit of the daemon, by file name."""
    return {f"{name}.service": _unit("daemon.service", job, program=program, name=name)}


def systemd_timer(job: Job, *, program: str, name: str, schedule: str) -> dict[str, str]:
    """The units of a run and of its timer, by file name."""
    return {
        f"{name}-run.service": _unit("run.service", job, program=program, name=name),
        f"{name}-run.timer": _fill("systemd/run.timer", name=name, schedule=schedule),
    }


def _unit(template: str, job: Job, *, program: str, name: str) -> str:
    return _fill(
        f"systemd/{template}",
        name=name,
        run=systemd_command([program, *job.run()]),
        daemon=systemd_command([program, *job.daemon()]),
        environment_file=f"/etc/{name}.env",
        deadline=job.deadline,
        grace=job.grace,
        hardening=_fill("systemd/hardening.conf", name=name).rstrip("\n"),
    )


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where in Kubernetes: names, the image, and the secret that holds the URL of the database."""

    name: str
    image: str
    secret: str
    secret_key: str
    namespace: str | None = None


def cronjob(job: Job, where: Cluster, *, schedule: str) -> str:
    """The manifest of a CronJob."""
    return _manifest("cronjob", job, where, schedule=yaml_word(schedule))


def deployment(job: Job, where: Cluster) -> str:
    """The manifest of a Deployment that runs the daemon."""
    return _manifest("deployment", job, where)


def _manifest(template: str, job: Job, where: Cluster, **more: str) -> str:
    return _fill(
        f"k8s/{template}.yaml",
        name=yaml_word(where.name),
        namespace=f"\n  namespace: {yaml_word(where.namespace)}" if where.namespace else "",
        image=yaml_word(where.image),
        secret=yaml_word(where.secret),
        secret_key=yaml_word(where.secret_key),
        secret_plain=where.secret,
        secret_key_plain=where.secret_key,
        run=_yaml_list(["pgreaper", *job.run()], indent=16),
        daemon=_yaml_list(["pgreaper", *job.daemon(f"--heartbeat={HEARTBEAT}")], indent=12),
        heartbeat=HEARTBEAT,
        heartbeat_folder=str(Path(HEARTBEAT).parent),
        deadline=job.deadline,
        grace=job.grace,
        **more,
    )


def _yaml_list(words: Sequence[str], *, indent: int) -> str:
    """The items of a block list; Kubernetes replaces $(NAME) in a command, and takes $$ for one dollar."""
    return ("\n" + " " * indent).join(f"- {yaml_word(word.replace('$', '$$'))}" for word in words)


# -- how a word is written


def crontab_command(words: Sequence[str]) -> str:
    """Words for /bin/sh in one line of a crontab, where a bare percent sign would end the command."""
    text = shlex.join(words)
    if text.isprintable() and "\\" not in text:
        return text.replace("%", r"\%")
    # A crontab has no way to write a line break, and crons differ in what they make of two backslashes: printf
    # writes these characters when the command runs.
    octal = "".join(c if c.isprintable() and c not in "\\%" else _octal(c) for c in text)
    return f'eval "$(printf {shlex.quote(octal)})"'


def _octal(character: str) -> str:
    return "".join(f"\\{byte:03o}" for byte in character.encode())


def systemd_command(words: Sequence[str]) -> str:
    """Words for ExecStart=: no specifier, no variable, no escape is left for systemd to replace."""
    program, *arguments = words
    return " ".join(_systemd_word(word) for word in (program, *(word.replace("$", "$$") for word in arguments)))


def _systemd_word(word: str) -> str:
    word = word.replace("%", "%%")
    return word if _PLAIN_ARGUMENT.fullmatch(word) else _double_quoted(word)


_PLAIN_ARGUMENT = re.compile(r"[A-Za-z0-9_./:=,+@-]+")
_PLAIN_YAML = re.compile(r"(?:--)?[A-Za-z_/](?:[A-Za-z0-9_./@=+-]|:(?=[A-Za-z0-9_.]))*")
# Words that YAML, 1.1 or 1.2, does not read as text.
_YAML_VALUES = frozenset("y n yes no on off true false null".split())


def yaml_word(text: str) -> str:
    """A scalar that YAML reads as this text."""
    plain = _PLAIN_YAML.fullmatch(text) and text.lower() not in _YAML_VALUES
    return text if plain else _double_quoted(text)


def _double_quoted(text: str) -> str:
    r"""In double quotes with the escapes that systemd and YAML share: \", \\, \xNN, \uNNNN, \UNNNNNNNN."""
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    if character.isprintable():
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x80 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


# -- the templates


def _fill(template: str, /, **values: object) -> str:
    return Template(_read(template)).substitute(values)


def _read(name: str) -> str:
    package = Path(__file__).resolve().parent
    for folder in (package / "_deploy", package.parent / "deploy"):
        if (folder / name).is_file():
            return (folder / name).read_text(encoding="utf-8")
    raise ReaperError(
        f"the template {name} is missing", hint="Reinstall the package; a build has left out its data files."
    )


# -- what may be filled in


def check_schedule(text: str, *, kubernetes: bool = False) -> str:
    """
    A schedule as cron reads it, and Kubernetes if asked: five fields, or @hourly and the like.

    Raises InvalidInput.
    """
    try:
        schedule = parse(text)
    except ScheduleError as error:
        raise InvalidInput(f"{visible(text)} is not a schedule: {error}", hint=_SCHEDULE_HINT) from None
    if schedule.seconds is not None or schedule.at_start_only or schedule.last_day:
        raise InvalidInput(f"{visible(text)} is a schedule that only pg_cron knows", hint=_SCHEDULE_HINT)
    words = text.split()
    if kubernetes and "7" in words[-1]:
        raise InvalidInput("Kubernetes has no weekday 7", hint="Sunday is 0.")
    return " ".join(words)


def check_calendar(text: str) -> str:
    """
    A calendar expression as systemd reads it: [weekdays] [date] [time] [zone], or minutely and the like.

    Raises InvalidInput.
    """
    words = text.split()
    fault = _calendar_fault(words)
    if fault is not None:
        raise InvalidInput(f"{visible(text)} is no calendar expression of systemd: {fault}", hint=_CALENDAR_HINT)
    return " ".join(words)


_SHORT = frozenset("minutely hourly daily monthly weekly yearly annually quarterly semiannually".split())
_DAYS = {day: n for n, day in enumerate("monday tuesday wednesday thursday friday saturday sunday".split())}
_DAYS |= {day[:3]: n for day, n in _DAYS.items()}


def _calendar_fault(words: list[str]) -> str | None:
    """What is wrong with it; None: nothing."""
    rest = list(words)
    if len(rest) > 1 and re.fullmatch(r"[A-Za-z][A-Za-z0-9_+-]*(?:/[A-Za-z0-9_+-]+)*", rest[-1]):
        zone = rest[-1]
        zones = _zones()  # empty on a machine without tzdata
        if zone.upper() == "UTC" or zone in zones or (not zones and zone.lower() not in _DAYS):
            rest.pop()
        elif zone.lower() not in _DAYS:
            return f"{visible(zone)} is no time zone"
    if len(rest) == 1 and rest[0].lower() in _SHORT:
        return None
    # A list of weekdays may be followed by a comma; "Mon *-*-01".
    if rest and rest[0][:1].isalpha():
        days = rest.pop(0)
        for part in days.removesuffix(",").split(","):
            ends = [_DAYS.get(day.lower()) for day in re.split(r"\.\.|-", part)]
            if len(ends) > 2 or None in ends:
                return f"{visible(part)} is no weekday"
            if ends != sorted(ends, key=lambda day: day or 0):
                return f"{visible(part)} ends before it begins"
    date = rest.pop(0) if rest and ":" not in rest[0] else None
    time = rest.pop(0) if rest else None
    if rest or (time is not None and ":" not in time):
        return f"{visible(rest[0] if rest else time or '')} is too much"
    if date is not None and (fault := _date_fault(date)):
        return fault
    return _time_fault(time) if time is not None else None if words else "it is empty"


def _date_fault(date: str) -> str | None:
    whole, from_end, day = date.partition("~")
    fields = [*whole.split("-"), day] if from_end else whole.split("-")
    if len(fields) not in (2, 3):
        return f"{visible(date)} is no date"
    *years, month, day = fields
    faults = [_field_fault(year, 1970, 2199, year=True) for year in years]
    # Counted from the end, a day is one that each month has.
    faults += [_field_fault(month, 1, 12), _field_fault(day, 1, 28 if from_end else 31, from_end=bool(from_end))]
    return next(filter(None, faults), None)


def _time_fault(time: str) -> str | None:
    hour, minute, *seconds = time.split(":")
    if len(seconds) > 1:
        return f"{visible(time)} is no time"
    faults = [_field_fault(hour, 0, 23), _field_fault(minute, 0, 59)]
    faults += [_field_fault(second, 0, 59, fraction=True) for second in seconds]
    return next(filter(None, faults), None)


def _field_fault(
    field: str, least: int, most: int, *, year: bool = False, from_end: bool = False, fraction: bool = False
) -> str | None:
    """One field: *, or numbers and ranges with two dots, each with a step that leads to another number of the field."""
    if field == "*":
        return None
    number = r"\d{1,10}(?:\.\d{1,10})?" if fraction else r"\d{1,10}"
    above = most + 1 if fraction else most
    for part in field.split(","):
        found = re.fullmatch(rf"({number})(?:\.\.({number}))?(?:/({number}))?", part)
        if found is None:
            return f"{visible(part)} is no number, range or *"
        ends = [float(n) for n in found.group(1, 2) if n is not None]
        if year:
            ends = [n + (2000 if n < 70 else 1900 if n < 100 else 0) for n in ends]
        if any(not least <= n <= above or (fraction and n == above) for n in ends):
            return f"{visible(part)} is not from {least} to {most}"
        if ends != sorted(ends):
            return f"{visible(part)} ends before it begins"
        if found[3] is None:
            continue
        step = float(found[3])
        last = ends[1] if len(ends) == 2 else above
        beyond = ends[0] - step < least if from_end and len(ends) == 1 else ends[0] + step > last
        if not 0 < step <= above - least or beyond:
            return f"the step of {visible(part)} leads nowhere"
    return None


def _zones() -> set[str]:
    from zoneinfo import available_timezones

    return available_timezones()


_CALENDAR_HINT = "For example minutely, '*:0/5' (every fifth minute) or 'Mon..Fri 08:00'; see systemd.time(7)."
_SCHEDULE_HINT = "Five fields, minute hour day month weekday: '*/5 * * * *' is every fifth minute."

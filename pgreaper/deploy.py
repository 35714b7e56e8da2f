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


_SCHEDULE_HINT = "Five fields, minute hour day month weekday: '*/5 * * * *' is every fifth minute."

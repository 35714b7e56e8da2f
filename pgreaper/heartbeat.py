"""
The heartbeat file: proof that a daemon's main loop goes round.

Owns the file and its age, for a liveness probe.  The age is a difference of monotonic
clocks, which are one for all processes of a machine: a step of the wall clock neither kills a
daemon that lives nor keeps a dead one.  Knows nothing of databases: whether that is
reachable is no question of liveness.
"""

import errno
import math
import os
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

# A probe looks every few seconds: more beats than that are only writes.
_EVERY: Final = 1.0
# A beat is shorter; what is longer is no beat, and need not be read.
_LONGEST: Final = 4096


class NoFile(OSError):
    """There is something of that name, and it is no file."""


@dataclass(frozen=True, slots=True)
class Beat:
    """What the file said: ``worker`` was alive ``age`` seconds ago."""

    worker: str
    age: float


class Heartbeat:
    """
    The writing end.  Raises OSError when the first beat cannot be written.

    Later beats that fail are dropped: a full disk must not stop the work.  The file then grows old, and the
    probe says so.
    """

    def __init__(self, path: Path, worker: str) -> None:
        self._path = path
        self._new = path.with_name(f".{path.name}.new")
        self._worker = worker
        self._beaten_at = time.monotonic()
        self._write()

    def beat(self) -> None:
        """Say that the main loop made progress; cheap when it was said within the last second."""
        now = time.monotonic()
        if now - self._beaten_at < _EVERY:
            return
        self._beaten_at = now
        with suppress(OSError):
            self._write()

    def end(self) -> None:
        """Remove the file: who ends properly leaves nothing that grows old."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _write(self) -> None:
        # Renamed into place, so that nobody reads half a beat.
        self._new.write_text(f"{self._beaten_at:.3f} {self._worker}\n")
        self._new.replace(self._path)


def read(path: Path) -> Beat | None:
    """
    The last beat; None when there is no such file, or what is in it is no beat.

    Raises NoFile for what can hold none, a folder or a pipe, and OSError.  Waits for nobody.
    """
    try:
        # Of a pipe, opening alone would wait for somebody who writes; a terminal must not become ours.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket
            raise NoFile(path) from None
        raise
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise NoFile(path)
        text = os.read(file, _LONGEST).decode(errors="replace")
    finally:
        os.close(file)
    beaten_at, _, worker = text.partition(" ")
    try:
        age = time.monotonic() - float(beaten_at)
    except ValueError:
        return None
    # From the future: the machine was started anew since.  (What is written is rounded.)
    return Beat(worker.strip(), max(age, 0.0)) if -0.001 < age < math.inf else None

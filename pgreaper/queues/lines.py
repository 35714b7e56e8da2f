"""
``stdout:`` and ``stdin:``: one JSON document a line, for pipes, files and people.

What a pipe has taken counts as delivered: whether its reader does something with it, nobody can say.  In the
other direction a pipe forgets what was read from it: commands that are not carried out when the process is
killed are lost, so ``stdin:`` is for what can be said again.
"""

import errno
import heapq
import os
import select
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from typing import Final

from pgreaper.errors import InvalidInput
from pgreaper.queues import Message, Received, Sent, Trouble, Url

# A pipe that is writable takes so many bytes without blocking.
_CHUNK: Final = select.PIPE_BUF
# A longer line is no command: it is delivered cut off, and is malformed.
_LONGEST: Final = 1_000_000


def open_sink(url: Url) -> "StdoutSink":
    """``stdout:``.  Raises InvalidInput when there is more behind the colon."""
    _bare(url)
    return StdoutSink(1)


def open_source(url: Url, *, visibility: float) -> "StdinSource":  # noqa: ARG001  nobody else reads our stdin
    """``stdin:``.  Raises InvalidInput when there is more behind the colon."""
    _bare(url)
    return StdinSource(0)


def _bare(url: Url) -> None:
    if url.text.rstrip("/") != f"{url.scheme}:":
        raise InvalidInput(
            f"{url.option} {url.scheme}: takes nothing behind the colon",
            hint=f"Write {url.scheme}: and redirect it in the shell.",
        )


class StdoutSink:
    """Writes to a descriptor, which stays open."""

    name = "stdout:"

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        # The end of a line that was begun: it comes first, or the next line would be glued to the beginning.
        self._rest = b""

    def send(self, messages: Sequence[Message], *, timeout: float) -> Sent:
        """
        Write a line a message.  A reader that is slow is trouble ``Timeout`` after so many seconds.

        Raises BrokenPipeError when the reader has gone: nothing of this call is confirmed then.
        """
        # A line break in JSON is white space, and would end the line.
        lines = [message.body.replace(b"\r", b" ").replace(b"\n", b" ") + b"\n" for message in messages]
        data = self._rest + b"".join(lines)
        written, trouble = self._write(data, time.monotonic() + timeout)
        ends = len(self._rest)
        if written < ends:
            self._rest = self._rest[written:]
            return Sent(frozenset(), {}, trouble)
        for position, line in enumerate(lines):
            if written < ends + len(line):
                self._rest = line[written - ends :] if written > ends else b""
                return Sent(frozenset(range(position)), {}, trouble)
            ends += len(line)
        self._rest = b""
        return Sent(frozenset(range(len(lines))), {})

    def close(self) -> None:
        """End a line that was begun, if that can be done at once: whoever reads on must not find it glued to ours."""
        if self._rest:
            with suppress(BrokenPipeError):
                self._write(self._rest, 0.0)
            self._rest = b""

    def _write(self, data: bytes, until: float) -> tuple[int, str | None]:
        """How many bytes were taken, and what the trouble is if it was not all of them."""
        view = memoryview(data)
        written = 0
        while written < len(view):
            left = max(until - time.monotonic(), 0.0)
            if not select.select([], [self._descriptor], [], left)[1]:
                return written, "Timeout"
            try:
                written += os.write(self._descriptor, view[written : written + _CHUNK])
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise
            except OSError as error:
                return written, _NAMES.get(error.errno or 0, "WriteFailed")
        return written, None


_NAMES: Final = {errno.ENOSPC: "NoSpace", errno.EDQUOT: "NoSpace", errno.EFBIG: "NoSpace"}


class StdinSource:
    """Reads from a descriptor, which stays open."""

    name = "stdin:"

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._begun = b""
        self._at_end = False
        self._ready: deque[Received] = deque()
        self._held: list[tuple[float, int, Received]] = []
        self._numbers = count()

    @property
    def ended(self) -> bool:
        """Whether the end of the input was read and nothing is left to deliver, put-off lines included."""
        return self._at_end and not self._ready and not self._held

    @property
    def lost(self) -> Sequence[Received]:
        """The lines that were read and not settled, those first that were put off."""
        return [*(message for _, _, message in sorted(self._held)), *self._ready]

    def receive(self, limit: int, *, wait: float) -> Sequence[Received]:
        """The next lines; empty ones are left out.  Raises Trouble when reading fails."""
        end = time.monotonic() + wait
        while True:
            now = time.monotonic()
            while self._held and self._held[0][0] <= now:
                self._ready.append(heapq.heappop(self._held)[2])
            if self._ready:
                # What has arrived meanwhile belongs to the same batch.
                while len(self._ready) < limit and not self._at_end and self._read(0.0):
                    pass
                return [self._ready.popleft() for _ in range(min(limit, len(self._ready)))]
            if self._at_end and not self._held:
                return []
            left = max((min(end, self._held[0][0]) if self._held else end) - now, 0.0)
            if not self._at_end:
                found = self._read(left)
            elif now < end:
                time.sleep(left)
                found = True
            else:
                found = False
            if not found and time.monotonic() >= end:
                return []

    def done(self, messages: Sequence[Received]) -> None:
        """A pipe wants to hear of nothing."""

    def later(self, message: Received, *, seconds: float) -> None:
        """Keep it here: it is lost with this process."""
        heapq.heappush(self._held, (time.monotonic() + max(seconds, 0.0), next(self._numbers), message))

    def put_off(self, messages: Sequence[tuple[Received, float]]) -> None:
        """Keep them here."""
        for message, seconds in messages:
            self.later(message, seconds=seconds)

    def reject(self, message: Received, *, reason: str) -> None:
        """A pipe has no dead-letter path: the line is dropped."""

    def keep(self, messages: Sequence[Received], *, seconds: float) -> None:
        """Nobody else reads this pipe."""

    def close(self) -> None:
        """Forget what was put off."""
        self._held.clear()
        self._ready.clear()

    def _read(self, wait: float) -> bool:
        """Read what there is within so many seconds; whether there was something."""
        if not select.select([self._descriptor], [], [], wait)[0]:
            return False
        try:
            data = os.read(self._descriptor, 65536)
        except BlockingIOError:
            return False
        except OSError:
            raise Trouble("ReadFailed") from None
        if not data:
            self._at_end = True
            self._deliver(self._begun)
            self._begun = b""
            return True
        *whole, self._begun = (self._begun + data).split(b"\n")
        for line in whole:
            self._deliver(line)
        # Of a line without end only the beginning is kept.
        self._begun = self._begun[: _LONGEST + 1]
        return True

    def _deliver(self, line: bytes) -> None:
        if line.strip():
            self._ready.append(Received(body=line[:_LONGEST], attempt=1, handle=None))

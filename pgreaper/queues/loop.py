"""
An event loop in a thread of its own, for brokers whose libraries are asynchronous.

What must go on while the caller works for long (heartbeats, deliveries, acknowledgements) goes on there.  The
caller waits for one coroutine at a time, for as long as it says and hardly longer.
"""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

_R = TypeVar("_R")

# A coroutine ends by its own clock; the caller gives up on it that many seconds later.
_GRACE: Final = 5.0


class Loop:
    """Starts with the first call.  Its thread is a daemon: a broker that hangs does not keep the process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, coroutine: Coroutine[Any, Any, _R], *, timeout: float) -> _R:
        """
        Run a coroutine and wait for what it returns.

        ``timeout`` is how many seconds it gives itself.  Raises what it raises, and TimeoutError when it is stuck.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._started())
        try:
            return future.result(timeout + _GRACE)
        except BaseException:
            # Also what a signal raises here: nobody waits for it any more.
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel what still runs and end the thread."""
        loop, thread = self._loop, self._thread
        self._loop = self._thread = None
        if loop is None or thread is None:
            return
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_GRACE)

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            # A library's forgotten task is not to write to stderr, where a broker's words have no place.
            self._loop.set_exception_handler(lambda _loop, _context: None)
            self._thread = threading.Thread(target=self._serve, args=(self._loop,), name=self._name, daemon=True)
            self._thread.start()
        return self._loop

    @staticmethod
    def _serve(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            if left := asyncio.all_tasks(loop):
                for task in left:
                    task.cancel()
                # A task that does not end is left behind: it must not keep us.
                loop.run_until_complete(asyncio.wait(left, timeout=_GRACE / 2))
        finally:
            loop.close()

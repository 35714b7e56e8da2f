"""
What must happen before anything else is imported: process 1 can be told to end.

The kernel keeps a signal from process 1 of a container unless it has a handler for it. Importing
the command takes a fraction of a second, and under a small CPU limit several: without this a SIGTERM
that falls into them is lost, and the container waits for its whole grace period.
"""

import os
import signal
from types import FrameType


def _leave(number: int, _frame: FrameType | None) -> None:
    os._exit(128 + number)


# Nothing is held yet.  A command that has something to finish installs its own.
if os.getpid() == 1:
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _leave)

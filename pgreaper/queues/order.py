"""The order of events that share a key, for sinks that send many at once.  Knows no queue."""

from collections import Counter
from collections.abc import Sequence

from pgreaper.queues import Message


def waves(messages: Sequence[Message]) -> list[list[int]]:
    """
    The positions of the messages, in waves: the first of each key, then the second of each, and so on.

    A sink that sends one wave after the other, and of each key only what comes after a known answer, keeps the
    order of equal keys whatever happens within a wave.
    """
    found: list[list[int]] = []
    seen: Counter[str] = Counter()
    for position, message in enumerate(messages):
        if seen[message.key] == len(found):
            found.append([])
        found[seen[message.key]].append(position)
        seen[message.key] += 1
    return found

"""The order of events that share a key, for sinks that send many at once.  Knows no queue."""

from collections.abc import Sequence
from itertools import zip_longest

from pgreaper.queues import Message


def by_key(messages: Sequence[Message]) -> list[list[int]]:
    """The positions of the messages of each key, in order: what a sink sends one after the other."""
    positions: dict[str, list[int]] = {}
    for position, message in enumerate(messages):
        positions.setdefault(message.key, []).append(position)
    return list(positions.values())


def waves(messages: Sequence[Message]) -> list[list[int]]:
    """
    The positions of the messages, in waves: the first of each key, then the second of each, and so on.

    A sink that sends one wave after the other, and of each key only what comes after a known answer, keeps the
    order of equal keys whatever happens within a wave.
    """
    return [[position for position in wave if position is not None] for wave in zip_longest(*by_key(messages))]

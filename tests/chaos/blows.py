"""What befalls the chaos run, and when: decided by the seed alone, before anything begins."""

import random
from dataclasses import dataclass

# How often each comes, in proportion.
KINDS = {
    "kill a worker": 14,
    "kill a worker that holds a lease": 16,
    "stop a worker": 18,
    "terminate a backend": 18,
    "cut a connection": 10,
    "stall a connection": 8,
    "half-close a connection": 8,
    "swallow replies": 8,
    "crash the server": 4,
    "kill a backend": 3,
}
_PAUSE = 0.45
_LONGEST = 4.0


@dataclass(frozen=True, slots=True)
class Blow:
    """One of them: ``at`` seconds after the start, for so many ``seconds``; ``dice`` chooses among those there are."""

    at: float
    kind: str
    dice: int
    seconds: float


def plan(seed: int, seconds: float) -> list[Blow]:
    """Every kind once, in some order, and from then on whatever comes."""
    dice = random.Random(f"blows {seed}")
    first = dice.sample(list(KINDS), len(KINDS))
    blows: list[Blow] = []
    # A short run is a dense one, else it would not see all of them.
    pause = min(_PAUSE, seconds / (1.5 * len(KINDS)))
    at = dice.uniform(0.2, 0.5)
    while at < seconds:
        kind = first.pop() if first else dice.choices(list(KINDS), list(KINDS.values()))[0]
        blows.append(Blow(at, kind, dice.randrange(1 << 30), dice.uniform(0.2, _LONGEST)))
        at += dice.uniform(0.2, 1.8) * pause
    return blows

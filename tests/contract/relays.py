"""A relay as the tests speak of it: what is fetched, and what is said about it."""

from __future__ import annotations

from typing import Any, NamedTuple


class Event(NamedTuple):
    """A row of ``reaper_fetch``, times as text: psycopg cannot read infinity."""

    token: str
    event: str
    key: str
    deadline: str
    expired_at: str
    state: str
    attempt: int
    lease_until: str
    payload: Any


class Relay:
    """One relay on one connection; ``core`` is the tests' core or whatever has its ``call``."""

    def __init__(self, core: Any, name: str = "p") -> None:
        self.core, self.name = core, name

    def fetch(self, **arguments: Any) -> list[Event]:
        as_text = ("token", "deadline", "expired_at", "lease_until")
        columns = [f"f.{column}" + "::text" * (column in as_text) for column in Event._fields]
        return [Event(*row) for row in self.core.call("reaper_fetch", *columns, relay=self.name, **arguments)]

    def keys(self, **arguments: Any) -> list[str]:
        """Fetch, and deliver everything; the keys."""
        batch = self.fetch(**arguments)
        if batch:
            assert self.ack(batch) == (len(batch), 0, 0, 0)
        return [event.key for event in batch]

    def drain(self, **arguments: Any) -> list[str]:
        """Deliver until nothing is left; the keys in the order of their delivery."""
        keys: list[str] = []
        for _ in range(2000):
            batch = self.keys(**arguments)
            if not batch:
                return keys
            keys += batch
        raise AssertionError(f"the relay does not end: {keys[-20:]}")

    def ack(self, batch: list[Event] | str, **arguments: Any) -> tuple[int, ...]:
        """Acknowledge; delivered, retry, dead, returned."""
        token = batch if isinstance(batch, str) else batch[0].token
        [row] = self.core.call("reaper_ack", token=token, **arguments)
        return tuple(row)

    def refuse(self, batch: list[Event], *keys: str, transient: bool = False, retry_in: str | None = None,
               error_class: str = "Unroutable", **arguments: Any) -> tuple[int, ...]:  # fmt: skip
        """Acknowledge; the events of these keys were refused."""
        refused = [event.event for event in batch if event.key in keys]
        return self.ack(
            batch,
            refused=refused,
            error_classes=[error_class] * len(refused),
            transient=[transient] * len(refused),
            retry_in=[retry_in] * len(refused),
            **arguments,
        )

"""The event loop beside the caller: what it returns, when it gives up, and that nothing of it stays."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from pgreaper.queues import loop as module
from pgreaper.queues.loop import Loop


def test_what_a_coroutine_returns_or_raises_reaches_the_caller():
    """On one thread for all calls, which ends with the loop."""
    loop = Loop("test-loop")

    async def where() -> str:
        return threading.current_thread().name

    async def fail() -> None:
        raise KeyError("k")

    assert {loop.run(where(), timeout=10) for _ in range(3)} == {"test-loop"}
    with pytest.raises(KeyError):
        loop.run(fail(), timeout=10)
    loop.close()
    loop.close()

    assert "test-loop" not in {thread.name for thread in threading.enumerate()}


def test_work_goes_on_while_nobody_calls():
    """A heartbeat needs no caller."""
    loop = Loop("test-loop")
    beats = threading.Event()

    async def begin() -> None:
        tasks.append(asyncio.create_task(beat()))

    async def beat() -> None:
        await asyncio.sleep(0)
        beats.set()
        await asyncio.sleep(3600)

    tasks: list[asyncio.Task[None]] = []
    loop.run(begin(), timeout=10)

    assert beats.wait(10)
    loop.close()
    assert tasks[0].cancelled()


def test_a_stuck_coroutine_is_given_up(monkeypatch):
    """After its time and a grace, also when it does not even listen to being cancelled."""
    monkeypatch.setattr(module, "_GRACE", 0.2)
    loop = Loop("test-loop")
    over = threading.Event()

    async def stuck() -> None:
        while not over.is_set():
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue

    began = time.monotonic()
    with pytest.raises(TimeoutError):
        loop.run(stuck(), timeout=0.1)
    loop.close()

    assert time.monotonic() - began < 5
    over.set()

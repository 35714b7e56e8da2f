"""The handler of the chaos run's workers: takes its time, so that leases are in hand when the blows fall."""

import time
from zlib import crc32

from pgreaper.handlers import Call, Retry


def handle(call: Call) -> None:
    """Be slow, and ask for another try now and then; both depend on the key alone."""
    number = crc32(call.idempotency_key.encode())
    time.sleep(0.01 + number % 7 * 0.01)
    if call.attempt == 1 and number % 23 == 0:
        raise Retry(0.2)

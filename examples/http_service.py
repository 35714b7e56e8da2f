"""
A handler that tells an HTTP service of each hold before it expires.

    pgreaper register seats bookings --deadline hold_until --status status \
      --held held --expired expired --owner tickets --payload seat
    SEATS_URL=https://seats.example.com pgreaper work seats --handler examples.http_service:release

Three things make it safe to be called again: the idempotency key goes along, so that the
service can tell a repetition; the timeout is shorter than anybody's patience, so that a
service that hangs costs one attempt and not a worker; and each answer is put into one of
three classes: done, try again, give up.
"""

import json
import os
import urllib.request
from http.client import HTTPException
from urllib.error import HTTPError

from pgreaper.handlers import Call, DeadLetter, Retry


class Refused(DeadLetter):
    """The service understood and said no; nothing will change its mind.  The name is what is recorded."""


def release(call: Call) -> None:
    """Ask the service to give the seat back."""
    request = urllib.request.Request(  # noqa: S310  the address is the operator's
        f"{os.environ['SEATS_URL']}/release",
        data=json.dumps({"hold": call.key, **call.payload}).encode(),
        headers={"Content-Type": "application/json", "Idempotency-Key": call.idempotency_key},
        method="POST",
    )
    timeout = float(os.environ.get("SEATS_TIMEOUT", "10"))
    try:
        # A timeout, a refused and a broken connection pass through: pgreaper knows them as transient.
        with urllib.request.urlopen(request, timeout=timeout) as answer:  # noqa: S310
            answer.read()
    except HTTPError as error:
        error.close()
        if error.code == 409:
            return  # The service has done it already: the reply of an earlier call got lost.
        if error.code == 429 or error.code >= 500:
            raise Retry(after=_seconds(error.headers.get("Retry-After"))) from error
        raise Refused from error
    except HTTPException as error:
        raise Retry from error  # The answer broke off in the middle.


def _seconds(header: str | None) -> float | None:
    return float(header) if header and header.isdigit() else None

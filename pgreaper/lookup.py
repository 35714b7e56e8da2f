"""
Looking up the names of database hosts, where a signal can interrupt it.

libpq looks names up in a call that nothing ends: while a resolver is silent, which may take
minutes, no signal handler runs, no thread does, and SIGTERM seems lost.  So the lookup is done
beforehand in a thread that may be left behind, and libpq is given the addresses beside the names.
"""

import os
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress


class NotResolved(OSError):
    """None of the names has an address, or nobody said so in time; ``str()`` says which and why."""


def addresses(parameters: Mapping[str, str], seconds: float) -> dict[str, str]:
    """
    The ``host``, ``hostaddr`` and ``port`` with which libpq need not look up anything; empty when it would not.

    A host with several addresses becomes several, to be tried in turn as libpq does. Raises NotResolved, also
    after so many seconds.
    """
    known = {"hostaddr", "service", "servicefile"} & parameters.keys()
    if known or os.environ.get("PGHOSTADDR") or os.environ.get("PGSERVICE"):
        return {}
    hosts = (parameters.get("host") or os.environ.get("PGHOST") or "").split(",")
    ports = (parameters.get("port") or os.environ.get("PGPORT") or "").split(",")
    if len(ports) == 1:
        ports *= len(hosts)
    lookups = {host: _Lookup(host) for host in hosts if _is_name(host)}
    if not lookups or len(ports) != len(hosts):
        return {}  # libpq says what is wrong with them.
    end = time.monotonic() + seconds
    for lookup in lookups.values():
        lookup.join(max(end - time.monotonic(), 0.0))
    found = [
        (host, address, port)
        for host, port in zip(hosts, ports, strict=True)
        for address in (lookups[host].found if host in lookups else [""])
    ]
    if not found:
        raise NotResolved("; ".join(dict.fromkeys(lookup.trouble for lookup in lookups.values())))
    host, hostaddr, port = (",".join(parts) for parts in zip(*found, strict=True))
    return {"host": host, "hostaddr": hostaddr} | ({"port": port} if any(ports) else {})


def _is_name(host: str) -> bool:
    """Whether it must be looked up: no socket's folder, no address."""
    if not host or host.startswith(("/", "@")):
        return False
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError):
            socket.inet_pton(family, host.partition("%")[0])
            return False
    return True


class _Lookup(threading.Thread):
    """One name.  Left behind when it takes too long: its thread does not keep the process."""

    def __init__(self, host: str) -> None:
        super().__init__(name="lookup", daemon=True)
        self.host = host
        self.found: list[str] = []
        self.trouble = f"the name of host {host!r} is not resolved in time"
        self.start()

    def run(self) -> None:
        try:
            # As bytes: text would load a codec for international names.
            answer = socket.getaddrinfo(self.host.encode(), None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            self.trouble = f"failed to resolve host {self.host!r}: {getattr(error, 'strerror', None) or error}"
        else:
            self.found = list(dict.fromkeys(str(entry[4][0]) for entry in answer))

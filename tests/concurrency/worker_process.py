"""
A worker as a process of its own, for a test to kill: ``python worker_process.py DSN WORKER SETTLE``.

Claims ten holds, settles SETTLE of them, says so on stdout, and then waits for its death.
"""

import json
import sys

import psycopg


def main(dsn: str, worker: str, settle: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        claim = connection.execute(
            "select token::text, key from pgreaper.reaper_claim('holds', batch => 10, worker => %s)", (worker,)
        ).fetchall()
        token, keys = claim[0][0], [key for _, key in claim]
        connection.execute("select pgreaper.reaper_expire(%s, %s)", (token, keys[: int(settle)]))
        sys.stdout.write(json.dumps({"token": token, "keys": keys}) + "\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""
pg_cron: the jobs that call pgreaper.

Owns their names and commands, the statements that schedule and remove them, and the judgement whether they work.
pg_cron lives in one database of a server and starts jobs in any: whoever calls hands in the connection to pgreaper's
database and a function that opens another one.
"""

from pgreaper.cron.health import Finding, Job, Run, Survey, findings, survey
from pgreaper.cron.home import OLDEST, Absent, Home, at_home
from pgreaper.cron.jobs import (
    KINDS,
    LOG,
    PRUNE,
    SWEEP,
    Kind,
    Scheduled,
    Wanted,
    job_name,
    lacking,
    schedule,
    script,
    statement,
    unschedule,
)

__all__ = [
    "KINDS", "LOG", "OLDEST", "PRUNE", "SWEEP",
    "Absent", "Finding", "Home", "Job", "Kind", "Run", "Scheduled", "Survey", "Wanted",
    "at_home", "findings", "job_name", "lacking", "schedule", "script", "statement", "survey", "unschedule",
]  # fmt: skip

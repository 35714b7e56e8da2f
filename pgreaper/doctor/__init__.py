"""
Looks for what keeps holds from expiring, or will.

Owns the checks of ``pgreaper doctor``: each yields findings, and each finding names the statement or command
that repairs it.  Everything is read, nothing written: no transaction id is taken, no row locked, every look
ends in bounded time, and no setting stays on the session.  A check that cannot look, for want of a right or
because it took too long, is a finding itself and stops no other.

Owns no repair: a person runs it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import psycopg

from pgreaper.doctor import books, installation, policy, server
from pgreaper.doctor.finding import ERROR, LEVELS, NOTE, WARNING, Finding, Limits, Look
from pgreaper.errors import DatabaseUnavailable, QueryCancelled, UnknownPolicy, translate
from pgreaper.text import visible

__all__ = ["ERROR", "LEVELS", "NOTE", "WARNING", "Finding", "Limits", "Report", "examine"]


@dataclass(frozen=True, slots=True)
class Report:
    """
    What was looked at and found; the findings are in the order of the checks.

    ``heard`` are the server's own words behind some of the findings; they may contain values of rows.
    """

    database: str
    role: str
    server: str
    policies: dict[str, str]
    checks: int
    findings: list[Finding]
    heard: "list[tuple[Finding, psycopg.Error]]"

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong; notes are no fault."""
        return all(finding.level == NOTE for finding in self.findings)


def examine(
    connection: "psycopg.Connection[Any]",
    policies: Sequence[str] = (),
    *,
    limits: Limits | None = None,
    open_database: "Callable[[str], psycopg.Connection[Any]] | None" = None,
) -> Report:
    """
    Examine the installation, the server and the policies (default: all).

    The connection is in autocommit and outside a transaction; ``open_database`` opens another database of the server,
    where pg_cron may live.  Raises UnknownPolicy, and DatabaseUnavailable when
    the connection is lost.
    """
    limits = limits or Limits()
    look = Look(connection, limits.seconds, limits, open_database=open_database)
    look.facts = server.learn(look)
    examination = _Examination(look)
    named: dict[str, str] = {}

    examination.run("node", partial(server.node, look))
    usable = not examination.run("presence", partial(installation.presence, look))
    if usable:
        try:
            look.policies = _chosen(policy.registered(look), policies)
        except psycopg.errors.InsufficientPrivilege as error:
            # Not a note like other things that cannot be seen: nothing at all is known of any policy.
            examination.heard(
                Finding(
                    "grants", ERROR, None, look.facts.role,
                    f"role {visible(look.facts.role)} may not read the policies: {translate(error).message}",
                    sql=(installation.grant(look.facts.role),),
                ),
                error,
            )  # fmt: skip
        except psycopg.Error as error:
            examination.unable("policies", error)
        checks: Iterable[Callable[[Look], Iterator[Finding]]] = (
            *installation.CHECKS, *server.CHECKS[1:], *books.CHECKS,
        )  # fmt: skip
        for check in checks:
            examination.run(check.__name__, partial(check, look))
        for row in look.policies:
            target = policy.Target(look, row)
            named[row.name] = target.table
            if not any(f.level == ERROR for f in examination.run("target", partial(policy.prepare, target), row.name)):
                for each in policy.CHECKS:
                    examination.run(each.__name__, partial(each, target), row.name)
            else:
                examination.run("dead_letters", partial(policy.dead_letters, target), row.name)
    return Report(
        database=look.facts.database,
        role=look.facts.role,
        server=look.facts.version,
        policies=named,
        checks=examination.checks,
        findings=examination.findings,
        heard=look.heard,
    )


def _chosen(registered: tuple[Any, ...], names: Sequence[str]) -> tuple[Any, ...]:
    known = [row.name for row in registered]
    for name in names:
        if name not in known:
            raise UnknownPolicy(f"there is no policy {visible(name)}", sqlstate="RP002")
    return tuple(row for row in registered if not names or row.name in names)


class _Examination:
    """Runs checks and keeps what they find."""

    def __init__(self, look: Look) -> None:
        self.look = look
        self.findings: list[Finding] = []
        self.checks = 0

    def run(self, name: str, check: Callable[[], Iterator[Finding]], policy: str | None = None) -> list[Finding]:
        """The findings of one check; its failure is one of them."""
        self.checks += 1
        before = len(self.findings)
        try:
            self.findings.extend(check())
        except psycopg.Error as error:
            self.unable(name, error, policy)
        return self.findings[before:]

    def unable(self, name: str, error: psycopg.Error, policy: str | None = None) -> None:
        """Tell that a check could not look; a lost connection ends everything."""
        known = translate(error)
        if isinstance(known, DatabaseUnavailable) and error.sqlstate != "55P03":
            raise known from None
        what = name.replace("_", " ")
        denied = error.sqlstate == "42501"
        why = "it took too long" if isinstance(known, QueryCancelled) else known.message
        self.heard(
            Finding(
                "unchecked",
                NOTE if denied else WARNING,
                policy,
                what,
                f"could not look at: {what} ({why})",
                advice="Look again as a role with more rights to know." if denied else known.hint,
            ),
            error,
        )

    def heard(self, finding: Finding, error: psycopg.Error) -> None:
        """A finding that is made of an answer of the server's."""
        self.findings.append(finding)
        self.look.heard.append((finding, error))

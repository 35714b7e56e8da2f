"""The commands around a policy's life: list, withdraw, pause, resume."""

import click

from pgreaper.cli.common import common_options, database, document, emit, unknown_policy
from pgreaper.errors import UnknownPolicy
from pgreaper.records import Policy
from pgreaper.render import Column, show_line, show_table
from pgreaper.text import duration, instant, quoted, visible


@click.command()
@common_options
def policies(*, database_url: str | None, as_json: bool) -> None:
    """List the registered policies."""
    with database(database_url) as reaper:
        found = reaper.policies()
    if as_json:
        emit("policies", policies=[document(policy) for policy in found])
    elif not found:
        show_line("No policy is registered yet: `pgreaper register` adds one.")
    else:
        show_table(
            [
                Column("policy"),
                Column("target"),
                Column("deadline", priority=2),
                Column("transition"),
                Column("grace", right=True, priority=4),
                Column("lease", right=True, priority=5),
                Column("owner", priority=3),
                Column("paused", priority=1),
            ],
            [
                [
                    visible(p.policy, 40),
                    visible(_target(p), 50),
                    visible(p.deadline_column + (f" ({p.zone})" if p.zone else ""), 40),
                    visible(_transition(p), 60),
                    duration(p.grace) if p.grace else "-",
                    duration(p.lease),
                    visible(p.owner, 30),
                    instant(p.paused_at),
                ]
                for p in found
            ],
        )


def _target(policy: Policy) -> str:
    return f"{quoted(policy.target_schema)}.{quoted(policy.target_table)}"


def _transition(policy: Policy) -> str:
    if policy.status_column is None or policy.held is None:
        return f"{policy.stamp_column}: null → set"
    return f"{policy.status_column}: {', '.join(policy.held)} → {policy.expired}"


@click.command()
@click.argument("policy")
@common_options
def unregister(*, policy: str, database_url: str | None, as_json: bool) -> None:
    """
    Withdraw a policy: nothing is claimed for it any more.

    Its history stays, and registering the name again continues it.
    """
    with database(database_url, writes=True) as reaper:
        try:
            reaper.unregister(policy)
        except UnknownPolicy:
            raise unknown_policy(policy, list(reaper.registered())) from None
    _tell("unregister", policy, "withdrawn; its history stays", as_json=as_json, changed=True)


@click.command()
@click.argument("policy")
@click.option("--reason", metavar="TEXT", help="Why, for whoever reads the status.")
@common_options
def pause(*, policy: str, reason: str | None, database_url: str | None, as_json: bool) -> None:
    """
    Claim nothing more for a policy until it is resumed.

    What is claimed already is finished by its worker.
    """
    with database(database_url, writes=True) as reaper:
        try:
            changed = reaper.pause(policy, reason=reason)
        except UnknownPolicy:
            raise unknown_policy(policy, list(reaper.registered())) from None
    _tell("pause", policy, "paused" if changed else "was paused already", as_json=as_json, changed=changed)


@click.command()
@click.argument("policy")
@common_options
def resume(*, policy: str, database_url: str | None, as_json: bool) -> None:
    """Let a paused policy go on."""
    with database(database_url, writes=True) as reaper:
        try:
            changed = reaper.resume(policy)
        except UnknownPolicy:
            raise unknown_policy(policy, list(reaper.registered())) from None
    _tell("resume", policy, "goes on" if changed else "was not paused", as_json=as_json, changed=changed)


def _tell(command: str, policy: str, what: str, *, as_json: bool, changed: bool) -> None:
    if as_json:
        emit(command, policy=policy, changed=changed)
    else:
        show_line(f"policy {visible(policy)}: {what}")

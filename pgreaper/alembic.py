"""
The call from a host application's own Alembic revision.

Owns how pgreaper joins the host's run: same connection, same transaction, online
and with ``--sql``.  The host's ``alembic_version`` is left alone; ours is
``pgreaper.schema_version``.

    def upgrade():
        from pgreaper.alembic import upgrade
        upgrade(to="0001")

    def downgrade():
        from pgreaper.alembic import downgrade
        downgrade(to="base")

The import stands inside the function, because Alembic loads every revision for every
command: a host that has removed the package later can still run the others.

Policies may be registered in a revision too (``select pgreaper.reaper_register(...)``), but a value that the
host adds to an enum can only be named once it is committed, not in the same ``alembic upgrade``.

With ``include_schemas=True`` in the host's ``env.py``, give its ``context.configure``
our :func:`include_name`, so that autogenerate does not want to drop our tables.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from alembic import op
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from pgreaper import __version__, schema
from pgreaper.errors import InvalidInput, VersionMismatch

__all__ = ["downgrade", "include_name", "upgrade"]


def upgrade(*, to: str) -> None:
    """
    Bring pgreaper to revision ``to`` inside the host's ``upgrade()``; nothing to do when it is there or beyond.

    ``to`` is one of pgreaper's revisions by its id.  ``"head"`` is refused: the
    host's revision would mean something else after the next release.  With
    ``--sql`` the script starts from a database without pgreaper.

    Raises InvalidInput for a wrong ``to`` or outside of a migration, VersionMismatch
    when this package has no such revision.  The database's errors arrive as
    SQLAlchemy raises them.
    """
    scripts = schema.source().scripts
    _revision(scripts, to)
    _run(scripts, schema.upgrade_steps(scripts, to), start=None)


def downgrade(*, to: str, force: bool = False) -> None:
    """
    Take pgreaper back to revision ``to``, or out of the database with ``"base"``.

    Leaves with ``"base"`` only when there are no dead letters and no active leases,
    or with ``force``.  Never drops an object of the host's.  With ``--sql`` the
    script starts from this package's newest revision.

    Raises as :func:`upgrade` does.
    """
    scripts = schema.source().scripts
    if to != "base":
        _revision(scripts, to)
    _run(
        scripts,
        schema.downgrade_steps(scripts, to),
        start=scripts.get_current_head(),
        options={schema.FORCE: force},
    )


def include_name(name: str | None, type_: str, parent_names: Mapping[str, str | None]) -> bool:  # noqa: ARG001
    """
    For ``context.configure(include_schemas=True, include_name=...)``: false for schema ``pgreaper``.

    A host with its own ``include_name`` combines the two with ``and``.
    """
    return not (type_ == "schema" and name == "pgreaper")


def _revision(scripts: ScriptDirectory, to: str) -> None:
    known = [script.revision for script in scripts.walk_revisions()][::-1]
    if to in known:
        return
    if not to.isdigit():
        raise InvalidInput(
            f"{to!r} is no revision of pgreaper",
            hint=f"Name one by its id, so that your revision keeps its meaning: {', '.join(known)}.",
        )
    raise VersionMismatch(
        f"pgreaper {__version__} has no revision {to}, its newest is {known[-1]}",
        hint="Install the version of the package that your revision was written for, or a newer one.",
    )


def _run(
    scripts: ScriptDirectory,
    steps: Callable[..., Iterable[Any]],
    *,
    start: str | None,
    options: Mapping[str, object] | None = None,
) -> None:
    try:
        host = op.get_context()
    except NameError:
        raise InvalidInput(
            "pgreaper.alembic works inside a migration only",
            hint="Call it from upgrade() or downgrade() of a revision; elsewhere use `pgreaper install`.",
        ) from None
    offline: dict[str, object] = {}
    if host.as_sql:
        offline = {"as_sql": True, "output_buffer": host.output_buffer, "starting_rev": start}
    schema.run(
        MigrationContext.configure(
            connection=None if host.as_sql else host.connection,
            dialect=host.dialect,
            opts={**schema.OPTIONS, "script": scripts, "fn": steps, **offline, **(options or {})},
        )
    )

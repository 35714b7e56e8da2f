"""
${message}.
"""

from alembic.operations import Operations

from pgreaper import schema

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = None
depends_on = None

# The texts that the revision before installs have to be in retired/ first, see README.md.
CHANGED: tuple[str, ...] = ()
ADDED: tuple[str, ...] = ()
FILES = (*CHANGED, *ADDED, "rights.sql")


def upgrade(op: Operations) -> None:
    schema.replace(op, down_revision, revision, CHANGED)
    schema.apply(op, revision, (*ADDED, "rights.sql"))


def downgrade(op: Operations) -> None:
    schema.drop(op, revision, ADDED)
    schema.replace(op, revision, down_revision, CHANGED)
    schema.apply(op, down_revision, ("rights.sql",))

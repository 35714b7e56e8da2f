"""
${message}.
"""

from alembic.operations import Operations

from pgreaper import schema

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = None
depends_on = None

# Of these files, the texts that the revisions before this one install have to be
# in retired/ first, see README.md.
FILES: tuple[str, ...] = ()


def upgrade(op: Operations) -> None:
    schema.apply(op, revision, FILES)


def downgrade(op: Operations) -> None:
    schema.drop(op, revision, FILES)

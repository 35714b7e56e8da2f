"""
What Alembic's own commands run: ``alembic history``, ``revision``, ``current``, ``upgrade``.

``pgreaper install`` does not come through here, it needs no config file; both end
in ``pgreaper.schema.run``.  Logging stays as the caller has set it up.
"""

from alembic import context

from pgreaper import schema

if context.is_offline_mode():
    context.configure(dialect_name="postgresql+psycopg", **schema.OPTIONS)
    with context.begin_transaction():
        schema.run(context.get_context())
else:
    with schema.transaction(context.config.attributes.get("connection")) as connection:
        context.configure(connection=connection, **schema.OPTIONS)
        with context.begin_transaction():
            schema.run(context.get_context())

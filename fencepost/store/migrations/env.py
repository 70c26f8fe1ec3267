"""Entry of alembic: runs the migrations on the connection that `fencepost.store.migrate` hands over."""

from alembic import context

from fencepost.store.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table="fencepost_version",
)
with context.begin_transaction():
    context.run_migrations()

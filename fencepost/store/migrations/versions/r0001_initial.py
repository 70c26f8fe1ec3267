"""The first schema."""

from pathlib import Path

from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create every table and index of the SQL file beside this one."""
    statements = Path(__file__).with_name("0001_initial.sql").read_text().split(";\n")
    for statement in statements:
        if statement.strip():
            op.execute(statement)

"""Indexes of the recovery scan."""

from alembic import op
from sqlalchemy import text

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Create the three partial indexes by which the scan finds what waits, however much is settled."""
    op.create_index(
        "session_execution_expiry_idx",
        "session_execution",
        ["expires_at", "session_id"],
        postgresql_where=text("recovery_error IS NULL"),
    )
    op.create_index(
        "session_recovery_wake_idx",
        "session_recovery",
        ["wake_attempts", "time_created", "execution_id"],
        postgresql_where=text("wake_pending AND recovery_error IS NULL"),
    )
    op.create_index(
        "session_input_wake_idx",
        "session_input",
        ["wake_attempts", "time_created", "id"],
        postgresql_where=text("wake_pending AND promoted_seq IS NULL"),
    )

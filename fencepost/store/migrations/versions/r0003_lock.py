"""The two locks of every fenced transaction, got in one round trip."""

from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Create `fencepost_lock`: it locks the session's execution row, then the end of its log, and tells what it found.

    Each statement of a volatile function sees what was committed before it began, so that the later ones see what
    the locks before them waited for. `late` says that a claim was inserted while this one waited for the log, `owed`
    that a continuation waits.
    """
    op.execute(
        """
        CREATE FUNCTION fencepost_lock(
            session text, execution text,
            OUT seq bigint, OUT now bigint,
            OUT id text, OUT owner_id text, OUT assistant_message_id text, OUT phase text, OUT expires_at bigint,
            OUT late boolean, OUT owed boolean,
            OUT step integer, OUT stage text, OUT attempt integer, OUT continuations integer, OUT result jsonb
        ) LANGUAGE plpgsql VOLATILE AS $$
        BEGIN
            SELECT e.id, e.owner_id, e.assistant_message_id, e.phase, e.expires_at
                INTO id, owner_id, assistant_message_id, phase, expires_at
                FROM session_execution AS e WHERE e.session_id = session FOR UPDATE;
            SELECT s.seq INTO seq FROM event_sequence AS s WHERE s.aggregate_id = session FOR UPDATE;
            late := id IS NULL AND EXISTS (SELECT FROM session_execution AS e WHERE e.session_id = session);
            owed := EXISTS (
                SELECT FROM session_recovery AS r
                WHERE r.session_id = session AND r.phase = 'pending' AND r.recovery_error IS NULL
            );
            SELECT l.step, l.stage, l.attempt, l.continuations, l.result
                INTO step, stage, attempt, continuations, result
                FROM execution_ledger AS l WHERE l.execution_id = execution;
            now := (extract(epoch FROM clock_timestamp()) * 1000)::bigint;
        END
        $$
        """
    )

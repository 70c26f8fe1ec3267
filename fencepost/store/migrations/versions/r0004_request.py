"""The intent of a request in one round trip, and without a transaction of several."""

from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Create `fencepost_request`: it locks and finds what `fencepost_lock` does, and records the intent of the asked
    attempt if that is due (`done`), renewing a lease that has aged. Times are in milliseconds.
    """
    op.execute(
        """
        CREATE FUNCTION fencepost_request(
            session text, execution text, owner text, asked_step integer, asked_attempt integer,
            length bigint, renew_after bigint,
            OUT seq bigint, OUT now bigint,
            OUT id text, OUT owner_id text, OUT assistant_message_id text, OUT phase text, OUT expires_at bigint,
            OUT late boolean, OUT owed boolean,
            OUT step integer, OUT stage text, OUT attempt integer, OUT continuations integer, OUT result jsonb,
            OUT done boolean
        ) LANGUAGE plpgsql VOLATILE AS $$
        BEGIN
            SELECT l.* INTO
                seq, now, id, owner_id, assistant_message_id, phase, expires_at, late, owed,
                step, stage, attempt, continuations, result
                FROM fencepost_lock(session, execution) AS l;
            done := coalesce(
                id = execution AND owner_id = owner AND expires_at > now AND step = asked_step AND (
                    (stage = 'prepared' AND asked_attempt = 1)
                    OR (
                        stage = 'requested' AND attempt = asked_attempt - 1
                        AND (result ->> 'failed_attempt')::integer = asked_attempt - 1
                    )
                ),
                false
            );
            IF done THEN
                UPDATE execution_ledger AS l SET stage = 'requested', attempt = asked_attempt, time_updated = now
                    WHERE l.execution_id = execution;
                IF expires_at - length + renew_after <= now THEN
                    UPDATE session_execution AS e SET expires_at = now + length WHERE e.session_id = session;
                END IF;
            END IF;
        END
        $$
        """
    )

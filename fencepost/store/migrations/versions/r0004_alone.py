"""The intent of a request, and the start of a tool, in one round trip each: a statement that is its own transaction."""

from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Create both functions. Times are in milliseconds."""
    _create_request()
    _create_start_tool()


def _create_request() -> None:
    """Create `fencepost_request`: it locks and finds what `fencepost_lock` does, and records the intent of the asked
    attempt if that is due (`done`), renewing a lease that has aged.
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


def _create_start_tool() -> None:
    """Create `fencepost_start_tool`: it does so with a planned call, and gives what the call needs."""
    op.execute(
        """
        CREATE FUNCTION fencepost_start_tool(
            session text, execution text, owner text, message text, call text, length bigint, renew_after bigint,
            OUT seq bigint, OUT now bigint,
            OUT id text, OUT owner_id text, OUT assistant_message_id text, OUT phase text, OUT expires_at bigint,
            OUT late boolean, OUT owed boolean,
            OUT step integer, OUT stage text, OUT attempt integer, OUT continuations integer, OUT result jsonb,
            OUT done boolean, OUT effect_key text, OUT data jsonb, OUT directory text
        ) LANGUAGE plpgsql VOLATILE AS $$
        BEGIN
            SELECT l.* INTO
                seq, now, id, owner_id, assistant_message_id, phase, expires_at, late, owed,
                step, stage, attempt, continuations, result
                FROM fencepost_lock(session, execution) AS l;
            done := false;
            IF id = execution AND owner_id = owner AND expires_at > now THEN
                UPDATE tool_call AS c SET status = 'started', time_updated = now
                    FROM session_message AS m, session AS s
                    WHERE c.assistant_message_id = message AND c.call_id = call AND c.execution_id = execution
                        AND c.status = 'called' AND m.id = message AND s.id = m.session_id
                        AND m.data -> 'content' @> jsonb_build_array(jsonb_build_object('type', 'tool', 'id', call))
                    RETURNING true, c.effect_key, m.data, s.directory INTO done, effect_key, data, directory;
                done := coalesce(done, false);
                IF done AND expires_at - length + renew_after <= now THEN
                    UPDATE session_execution AS e SET expires_at = now + length WHERE e.session_id = session;
                END IF;
            END IF;
        END
        $$
        """
    )

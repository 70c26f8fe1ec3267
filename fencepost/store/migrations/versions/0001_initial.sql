CREATE TABLE event_sequence (
    aggregate_id TEXT NOT NULL,
    seq BIGINT NOT NULL,
    owner_id TEXT,
    PRIMARY KEY (aggregate_id)
);

CREATE TABLE project (
    id TEXT NOT NULL,
    worktree TEXT NOT NULL,
    vcs TEXT,
    name TEXT,
    time_created BIGINT NOT NULL,
    time_updated BIGINT NOT NULL,
    PRIMARY KEY (id)
);

CREATE TABLE session_execution (
    id TEXT NOT NULL,
    session_id TEXT NOT NULL,
    owner_id TEXT NOT NULL,
    assistant_message_id TEXT,
    phase TEXT NOT NULL,
    time_created BIGINT NOT NULL,
    expires_at BIGINT NOT NULL,
    recovery_error TEXT,
    CONSTRAINT session_execution_session_idx UNIQUE (session_id)
);

CREATE TABLE session_recovery (
    session_id TEXT NOT NULL,
    execution_id TEXT NOT NULL,
    assistant_message_id TEXT,
    continuation_message_id TEXT NOT NULL,
    phase TEXT NOT NULL,
    wake_pending BOOLEAN DEFAULT true NOT NULL,
    wake_attempts BIGINT DEFAULT '0' NOT NULL,
    recovery_error TEXT,
    time_created BIGINT NOT NULL,
    CONSTRAINT session_recovery_execution_idx UNIQUE (execution_id)
);
CREATE INDEX session_recovery_session_idx ON session_recovery (session_id, phase);

CREATE TABLE event (
    id TEXT NOT NULL,
    aggregate_id TEXT NOT NULL,
    seq BIGINT NOT NULL,
    type TEXT NOT NULL,
    data JSONB NOT NULL,
    PRIMARY KEY (id),
    CONSTRAINT event_aggregate_seq_idx UNIQUE (aggregate_id, seq),
    FOREIGN KEY(aggregate_id) REFERENCES event_sequence (aggregate_id) ON DELETE CASCADE
);
CREATE INDEX event_aggregate_type_seq_idx ON event (aggregate_id, type, seq);

CREATE TABLE permission (
    id TEXT NOT NULL,
    project_id TEXT NOT NULL,
    action TEXT NOT NULL,
    resource TEXT NOT NULL,
    time_created BIGINT NOT NULL,
    time_updated BIGINT NOT NULL,
    PRIMARY KEY (id),
    CONSTRAINT permission_project_action_resource_idx UNIQUE (project_id, action, resource),
    FOREIGN KEY(project_id) REFERENCES project (id) ON DELETE CASCADE
);

CREATE TABLE session (
    id TEXT NOT NULL,
    project_id TEXT NOT NULL,
    workspace_id TEXT,
    parent_id TEXT,
    slug TEXT NOT NULL,
    directory TEXT NOT NULL,
    path TEXT,
    title TEXT NOT NULL,
    version TEXT NOT NULL,
    metadata JSONB,
    cost DOUBLE PRECISION DEFAULT '0' NOT NULL,
    tokens_input BIGINT DEFAULT '0' NOT NULL,
    tokens_output BIGINT DEFAULT '0' NOT NULL,
    tokens_reasoning BIGINT DEFAULT '0' NOT NULL,
    tokens_cache_read BIGINT DEFAULT '0' NOT NULL,
    tokens_cache_write BIGINT DEFAULT '0' NOT NULL,
    revert JSONB,
    agent TEXT,
    model JSONB,
    time_created BIGINT NOT NULL,
    time_updated BIGINT NOT NULL,
    time_compacting BIGINT,
    time_archived BIGINT,
    PRIMARY KEY (id),
    FOREIGN KEY(project_id) REFERENCES project (id) ON DELETE CASCADE
);
CREATE INDEX session_parent_idx ON session (parent_id);
CREATE INDEX session_project_idx ON session (project_id);
CREATE INDEX session_workspace_idx ON session (workspace_id);

CREATE TABLE workspace (
    id TEXT NOT NULL,
    type TEXT NOT NULL,
    name TEXT DEFAULT '' NOT NULL,
    branch TEXT,
    directory TEXT,
    project_id TEXT NOT NULL,
    time_used BIGINT NOT NULL,
    PRIMARY KEY (id),
    FOREIGN KEY(project_id) REFERENCES project (id) ON DELETE CASCADE
);

CREATE TABLE execution_ledger (
    execution_id TEXT NOT NULL,
    session_id TEXT NOT NULL,
    owner_id TEXT NOT NULL,
    step INTEGER NOT NULL,
    stage TEXT NOT NULL,
    attempt INTEGER DEFAULT '0' NOT NULL,
    continuations INTEGER DEFAULT '0' NOT NULL,
    result JSONB,
    time_created BIGINT NOT NULL,
    time_updated BIGINT NOT NULL,
    PRIMARY KEY (execution_id),
    FOREIGN KEY(session_id) REFERENCES session (id) ON DELETE CASCADE
);
CREATE INDEX execution_ledger_session_idx ON execution_ledger (session_id, time_created);

CREATE UNLOGGED TABLE live_part (
    assistant_message_id TEXT NOT NULL,
    kind TEXT NOT NULL,
    part_id TEXT NOT NULL,
    session_id TEXT NOT NULL,
    execution_id TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    text TEXT NOT NULL,
    PRIMARY KEY (assistant_message_id, kind, part_id),
    FOREIGN KEY(session_id) REFERENCES session (id) ON DELETE CASCADE
);
CREATE INDEX live_part_session_idx ON live_part (session_id);

CREATE TABLE session_context_epoch (
    session_id TEXT NOT NULL,
    baseline TEXT NOT NULL,
    snapshot JSONB NOT NULL,
    baseline_seq BIGINT NOT NULL,
    PRIMARY KEY (session_id),
    FOREIGN KEY(session_id) REFERENCES session (id) ON DELETE CASCADE
);

CREATE TABLE session_input (
    id TEXT NOT NULL,
    session_id TEXT NOT NULL,
    prompt JSONB NOT NULL,
    delivery TEXT NOT NULL,
    admitted_seq BIGINT NOT NULL,
    promoted_seq BIGINT,
    wake_pending BOOLEAN DEFAULT false NOT NULL,
    wake_attempts BIGINT DEFAULT '0' NOT NULL,
    time_created BIGINT NOT NULL,
    PRIMARY KEY (id),
    CONSTRAINT session_input_session_admitted_seq_idx UNIQUE (session_id, admitted_seq),
    CONSTRAINT session_input_session_promoted_seq_idx UNIQUE (session_id, promoted_seq),
    FOREIGN KEY(session_id) REFERENCES session (id) ON DELETE CASCADE
);
CREATE INDEX session_input_session_pending_delivery_seq_idx ON session_input (session_id, promoted_seq, delivery, admitted_seq);

CREATE TABLE session_message (
    id TEXT NOT NULL,
    session_id TEXT NOT NULL,
    type TEXT NOT NULL,
    seq BIGINT NOT NULL,
    time_created BIGINT NOT NULL,
    time_updated BIGINT NOT NULL,
    data JSONB NOT NULL,
    PRIMARY KEY (id),
    CONSTRAINT session_message_session_seq_idx UNIQUE (session_id, seq),
    FOREIGN KEY(session_id) REFERENCES session (id) ON DELETE CASCADE
);
CREATE INDEX session_message_session_time_created_id_idx ON session_message (session_id, time_created, id);
CREATE INDEX session_message_session_type_seq_idx ON session_message (session_id, type, seq);
CREATE INDEX session_message_time_created_idx ON session_message (time_created);

CREATE TABLE todo (
    session_id TEXT NOT NULL,
    content TEXT NOT NULL,
    status TEXT NOT NULL,
    priority TEXT NOT NULL,
    position BIGINT NOT NULL,
    time_created BIGINT NOT NULL,
    time_updated BIGINT NOT NULL,
    PRIMARY KEY (session_id, position),
    FOREIGN KEY(session_id) REFERENCES session (id) ON DELETE CASCADE
);
CREATE INDEX todo_session_idx ON todo (session_id);

CREATE TABLE tool_call (
    assistant_message_id TEXT NOT NULL,
    call_id TEXT NOT NULL,
    session_id TEXT NOT NULL,
    execution_id TEXT NOT NULL,
    status TEXT NOT NULL,
    effect_key TEXT NOT NULL,
    time_updated BIGINT NOT NULL,
    PRIMARY KEY (assistant_message_id, call_id),
    FOREIGN KEY(session_id) REFERENCES session (id) ON DELETE CASCADE
);
CREATE INDEX tool_call_open_idx ON tool_call (session_id) WHERE status <> 'settled';

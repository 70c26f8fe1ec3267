"""The tables. The first group is the published schema, column by column; the second is this project's own.

All ids are text, all times are milliseconds since the epoch in 64-bit integers, JSON is jsonb.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

metadata = MetaData()


def _id(name: str = "id", **options: Any) -> Column[str]:
    return Column(name, Text, **{"nullable": False, **options})


def _text(name: str, **options: Any) -> Column[str]:
    return Column(name, Text, **{"nullable": False, **options})


def _int(name: str, **options: Any) -> Column[int]:
    return Column(name, BigInteger, **{"nullable": False, **options})


def _json(name: str, **options: Any) -> Column[Any]:
    return Column(name, JSONB(none_as_null=True), **{"nullable": False, **options})


def _session(**options: Any) -> Column[str]:
    return Column("session_id", Text, ForeignKey("session.id", ondelete="CASCADE"), **{"nullable": False, **options})


def _project() -> Column[str]:
    return Column("project_id", Text, ForeignKey("project.id", ondelete="CASCADE"), nullable=False)


project = Table(
    "project",
    metadata,
    _id(primary_key=True),
    _text("worktree"),
    _text("vcs", nullable=True),
    _text("name", nullable=True),
    _int("time_created"),
    _int("time_updated"),
)

workspace = Table(
    "workspace",
    metadata,
    _id(primary_key=True),
    _text("type"),
    _text("name", server_default=""),
    _text("branch", nullable=True),
    _text("directory", nullable=True),
    _project(),
    _int("time_used"),
)

session = Table(
    "session",
    metadata,
    _id(primary_key=True),
    _project(),
    _text("workspace_id", nullable=True),
    _text("parent_id", nullable=True),
    _text("slug"),
    _text("directory"),
    _text("path", nullable=True),
    _text("title"),
    _text("version"),
    _json("metadata", nullable=True),
    Column("cost", Double, nullable=False, server_default="0"),
    _int("tokens_input", server_default="0"),
    _int("tokens_output", server_default="0"),
    _int("tokens_reasoning", server_default="0"),
    _int("tokens_cache_read", server_default="0"),
    _int("tokens_cache_write", server_default="0"),
    _json("revert", nullable=True),
    _text("agent", nullable=True),
    _json("model", nullable=True),
    _int("time_created"),
    _int("time_updated"),
    _int("time_compacting", nullable=True),
    _int("time_archived", nullable=True),
    Index("session_project_idx", "project_id"),
    Index("session_workspace_idx", "workspace_id"),
    Index("session_parent_idx", "parent_id"),
)

session_message = Table(
    "session_message",
    metadata,
    _id(primary_key=True),
    _session(),
    _text("type"),
    _int("seq"),
    _int("time_created"),
    _int("time_updated"),
    _json("data"),
    UniqueConstraint("session_id", "seq", name="session_message_session_seq_idx"),
    Index("session_message_session_type_seq_idx", "session_id", "type", "seq"),
    Index("session_message_session_time_created_id_idx", "session_id", "time_created", "id"),
    Index("session_message_time_created_idx", "time_created"),
)

session_input = Table(
    "session_input",
    metadata,
    _id(primary_key=True),
    _session(),
    _json("prompt"),
    _text("delivery"),
    _int("admitted_seq"),
    _int("promoted_seq", nullable=True),
    Column("wake_pending", Boolean, nullable=False, server_default=text("false")),
    _int("wake_attempts", server_default="0"),
    _int("time_created"),
    UniqueConstraint("session_id", "admitted_seq", name="session_input_session_admitted_seq_idx"),
    UniqueConstraint("session_id", "promoted_seq", name="session_input_session_promoted_seq_idx"),
    Index("session_input_session_pending_delivery_seq_idx", "session_id", "promoted_seq", "delivery", "admitted_seq"),
    # For the recovery scan: settled rows, nearly all there are, are not in it.
    Index(
        "session_input_wake_idx",
        "wake_attempts",
        "time_created",
        "id",
        postgresql_where=text("wake_pending AND promoted_seq IS NULL"),
    ),
)

session_context_epoch = Table(
    "session_context_epoch",
    metadata,
    _session(primary_key=True),
    _text("baseline"),
    _json("snapshot"),
    _int("baseline_seq"),
)

session_execution = Table(
    "session_execution",
    metadata,
    _id(),
    _text("session_id"),
    _text("owner_id"),
    _text("assistant_message_id", nullable=True),
    _text("phase"),
    _int("time_created"),
    _int("expires_at"),
    _text("recovery_error", nullable=True),
    UniqueConstraint("session_id", name="session_execution_session_idx"),
    Index(
        "session_execution_expiry_idx",
        "expires_at",
        "session_id",
        postgresql_where=text("recovery_error IS NULL"),
    ),
)

session_recovery = Table(
    "session_recovery",
    metadata,
    _text("session_id"),
    _text("execution_id"),
    _text("assistant_message_id", nullable=True),
    _text("continuation_message_id"),
    _text("phase"),
    Column("wake_pending", Boolean, nullable=False, server_default=text("true")),
    _int("wake_attempts", server_default="0"),
    _text("recovery_error", nullable=True),
    _int("time_created"),
    # One abandoned execution can have one row only.
    UniqueConstraint("execution_id", name="session_recovery_execution_idx"),
    Index("session_recovery_session_idx", "session_id", "phase"),
    Index(
        "session_recovery_wake_idx",
        "wake_attempts",
        "time_created",
        "execution_id",
        postgresql_where=text("wake_pending AND recovery_error IS NULL"),
    ),
)

event_sequence = Table(
    "event_sequence",
    metadata,
    _id("aggregate_id", primary_key=True),
    _int("seq"),
    _text("owner_id", nullable=True),
)

event = Table(
    "event",
    metadata,
    _id(primary_key=True),
    Column("aggregate_id", Text, ForeignKey("event_sequence.aggregate_id", ondelete="CASCADE"), nullable=False),
    _int("seq"),
    _text("type"),
    _json("data"),
    UniqueConstraint("aggregate_id", "seq", name="event_aggregate_seq_idx"),
    Index("event_aggregate_type_seq_idx", "aggregate_id", "type", "seq"),
)

todo = Table(
    "todo",
    metadata,
    _session(),
    _text("content"),
    _text("status"),
    _text("priority"),
    _int("position"),
    _int("time_created"),
    _int("time_updated"),
    PrimaryKeyConstraint("session_id", "position"),
    Index("todo_session_idx", "session_id"),
)

permission = Table(
    "permission",
    metadata,
    _id(primary_key=True),
    _project(),
    _text("action"),
    _text("resource"),
    _int("time_created"),
    _int("time_updated"),
    UniqueConstraint("project_id", "action", "resource", name="permission_project_action_resource_idx"),
)

# This project's own.

execution_ledger = Table(
    "execution_ledger",
    metadata,
    _id("execution_id", primary_key=True),
    _session(),
    _text("owner_id"),
    Column("step", Integer, nullable=False),
    _text("stage"),
    Column("attempt", Integer, nullable=False, server_default="0"),
    Column("continuations", Integer, nullable=False, server_default="0"),
    _json("result", nullable=True),
    _int("time_created"),
    _int("time_updated"),
    Index("execution_ledger_session_idx", "session_id", "time_created"),
)

tool_call = Table(
    "tool_call",
    metadata,
    _text("assistant_message_id"),
    _text("call_id"),
    _session(),
    _text("execution_id"),
    _text("status"),
    _text("effect_key"),
    _int("time_updated"),
    PrimaryKeyConstraint("assistant_message_id", "call_id"),
    # Only the open ones are ever searched for.
    Index("tool_call_open_idx", "session_id", postgresql_where=text("status <> 'settled'")),
)

# What a reader joining in the middle of a part starts from, and what survives of a part whose worker was killed.
# Unlogged: losing it in a crash of the database costs the text since the part began, never a durable event.
live_part = Table(
    "live_part",
    metadata,
    _text("assistant_message_id"),
    _text("kind"),
    _text("part_id"),
    _session(),
    _text("execution_id"),
    Column("attempt", Integer, nullable=False),
    _text("text"),
    PrimaryKeyConstraint("assistant_message_id", "kind", "part_id"),
    Index("live_part_session_idx", "session_id"),
    prefixes=["UNLOGGED"],
)

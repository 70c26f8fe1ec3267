"""Every error that fencepost raises on purpose. `code` is stable and travels as the type of Temporal failures.

FencepostError
+-- ConfigurationError          a setting is wrong: names the file, the key and the allowed values
+-- UnavailableError            a service (PostgreSQL, Temporal) cannot be reached, or answers with a fault
+-- SchemaVersionError          the database is at another migration than this program
+-- InvalidInputError           a client's request cannot be understood
|   +-- InvalidCursorError      a page's cursor is not one of ours
+-- NotFoundError               no such session
+-- MessageNotFoundError        no such message in this session
+-- PromptConflictError         an input id is used again with other content
+-- DirectoryError              a session's working directory is not usable
+-- WorkspaceUnavailableError   no worker of a session's workspace takes its tool calls
+-- OwnershipLostError          the token does not hold (any more): write nothing, go away
|   +-- LeaseExpiredError       the token holds, but for too long without renewal: nothing was begun, renew it first
+-- ClaimRefusedError           another run owns the session
+-- EventConflictError          an event id is used again with other content, or in another aggregate
+-- InvalidDurableEventError    an event of the log is unknown or does not fit
+-- LifecycleConflictError      an invariant of the inbox is broken
+-- SessionAlreadyProjectedError  two creations of one session raced
+-- MessageDecodeError          a stored message cannot be read
+-- ContextError                what the model is told of its surroundings cannot be made
|   +-- ContextBlockedError     a source of it cannot be had now, and there is no baseline yet
|   +-- DuplicateContextKeyError  two sources have one key
|   +-- ContextSnapshotDecodeError  the stored record of what was told cannot be read
+-- SubscriberOverflowError     a reader was slower than what it reads, for longer than its buffer lasts
+-- ModelNotSelectedError, ModelUnavailableError, AgentNotFoundError   nothing to run the step with
+-- ProviderError               one provider request failed; says whether it may be repeated
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, TypeAlias


class FencepostError(Exception):
    """Root of the tree. `message` is one line that says what is wrong and what to do."""

    code: ClassVar[str] = "FencepostError"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ConfigurationError(FencepostError):
    code = "ConfigurationError"


class UnavailableError(FencepostError):
    code = "UnavailableError"
    retryable = True


class SchemaVersionError(FencepostError):
    code = "SchemaVersionError"


class InvalidInputError(FencepostError):
    code = "InvalidInputError"


class InvalidCursorError(InvalidInputError):
    code = "InvalidCursorError"


class NotFoundError(FencepostError):
    code = "Session.NotFoundError"


class MessageNotFoundError(FencepostError):
    code = "Session.MessageNotFoundError"


class PromptConflictError(FencepostError):
    code = "Session.PromptConflictError"


class DirectoryError(FencepostError):
    code = "DirectoryError"


class WorkspaceUnavailableError(FencepostError):
    code = "WorkspaceUnavailableError"


class OwnershipLostError(FencepostError):
    code = "OwnershipLostError"


class LeaseExpiredError(OwnershipLostError):
    code = "LeaseExpiredError"


class ClaimRefusedError(FencepostError):
    code = "ClaimRefusedError"


class EventConflictError(FencepostError):
    code = "EventConflictError"


class InvalidDurableEventError(FencepostError):
    code = "EventV2.InvalidDurableEvent"


class LifecycleConflictError(FencepostError):
    code = "SessionInput.LifecycleConflict"


class SessionAlreadyProjectedError(FencepostError):
    code = "SessionAlreadyProjected"


class MessageDecodeError(FencepostError):
    code = "Session.MessageDecodeError"


class ContextError(FencepostError):
    code = "SystemContext.Error"


class ContextBlockedError(ContextError):
    """`keys` are the sources that are unavailable."""

    code = "SystemContext.InitializationBlocked"

    def __init__(self, message: str, *, keys: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.keys = tuple(keys)


class DuplicateContextKeyError(ContextError):
    code = "SystemContext.DuplicateKeyError"


class ContextSnapshotDecodeError(ContextError):
    code = "Session.ContextSnapshotDecodeError"


class SubscriberOverflowError(FencepostError):
    """`capacity` is the number of notices that the reader's buffer holds."""

    code = "EventV2.SubscriberOverflow"

    def __init__(self, message: str, *, capacity: int = 0) -> None:
        super().__init__(message)
        self.capacity = capacity


class ModelNotSelectedError(FencepostError):
    code = "SessionRunnerModel.ModelNotSelectedError"


class ModelUnavailableError(FencepostError):
    code = "SessionRunnerModel.ModelUnavailableError"


class AgentNotFoundError(FencepostError):
    code = "AgentNotFoundError"


ProviderReason: TypeAlias = Literal[
    "InvalidRequest",
    "NoRoute",
    "Authentication",
    "RateLimit",
    "QuotaExceeded",
    "ContentPolicy",
    "ProviderInternal",
    "Transport",
    "InvalidProviderOutput",
    "UnknownProvider",
]


class ProviderError(FencepostError):
    """One provider request failed. `transient` says that the cause may pass by itself; `retry_after` is in seconds,
    None when the provider named no time. The message never holds a key."""

    code = "LLM.Error"

    def __init__(
        self,
        message: str,
        *,
        reason: ProviderReason,
        transient: bool,
        status: int | None = None,
        retry_after: float | None = None,
        classification: Literal["context-overflow"] | None = None,
    ) -> None:
        super().__init__(message)
        self.reason: ProviderReason = reason
        self.transient = transient
        self.status = status
        self.retry_after = retry_after
        self.classification = classification

"""Names and payloads of workflows, signals, updates, queries and activities.

The first part is the public contract, for any Temporal client in any language, and is fixed. The second part is
between the turn workflow and its activities; fields are only ever added, with defaults.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from pydantic import Field, field_validator

from fencepost.domain.inbox import AgentAttachment, Delivery, FileAttachment, Location, MessageId, Prompt
from fencepost.domain.messages import Tokens
from fencepost.domain.models import ModelRef
from fencepost.domain.ownership import TakeoverReason, Token
from fencepost.domain.wire import WireModel

# The public contract.

SESSION_TURN = "SessionTurn"
TASK_QUEUE = "fencepost"

SIGNAL_STEER = "steer"
SIGNAL_QUEUE = "queue"
SIGNAL_INTERRUPT = "interrupt"
SIGNAL_WAKE = "wake"
UPDATE_PROMPT = "prompt"
UPDATE_RESUME = "resume"
QUERY_STATUS = "status"


SEARCH_ATTRIBUTES = (
    ("FencepostAgent", "Keyword"),
    ("FencepostModel", "Keyword"),
    ("FencepostPhase", "Keyword"),
    ("FencepostStep", "Int"),
    ("FencepostTokens", "Int"),
)
"""Names and types of what a session can be searched by, where the server has them."""


def workspace_queue(task_queue: str, workspace_id: str) -> str:
    """Give the task queue of the workers that see a workspace."""
    return f"{task_queue}-workspace-{workspace_id}"


class SessionInput(WireModel):
    """Attributes of a new session; `model` may be written as provider/model."""

    agent: str | None = None
    model: ModelRef | None = None
    location: Location | None = None
    title: str | None = None

    @field_validator("model", mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return ModelRef.parse(value) if isinstance(value, str) else value


class PromptInput(WireModel):
    """One input. Without `delivery` it steers; with `resume` false it is only recorded."""

    id: MessageId | None = None
    text: str = Field(min_length=1)
    files: tuple[FileAttachment, ...] | None = None
    agents: tuple[AgentAttachment, ...] | None = None
    delivery: Delivery = "steer"
    resume: bool = True

    @field_validator("text")
    @classmethod
    def _not_blank(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("must not be blank")
        return value

    def prompt(self) -> Prompt:
        """Give what is stored of it."""
        return Prompt(text=self.text, files=self.files, agents=self.agents)


class InterruptInput(WireModel):
    """`after` is the last sequence the user saw; `reason` is a note of theirs for the log."""

    id: str | None = Field(default=None, max_length=200)
    reason: str | None = Field(default=None, max_length=1000)
    after: int | None = Field(default=None, ge=-1)


Outcome: TypeAlias = Literal["done", "failed", "interrupted", "idle"]


class TurnResult(WireModel):
    """How a turn ended; `error` is in the provider's own words. `idle` means that there was nothing to run."""

    session_id: str
    outcome: Outcome
    steps: int = 0
    tokens: Tokens = Tokens()
    cost: float = 0
    error: str | None = None


class Rejection(WireModel):
    """A signal that could not be understood."""

    signal: str
    reason: str


class GoingOn(WireModel):
    """What a turn has had so far that goes on in a new run; `agent_step` counts since the last input."""

    agent_step: int
    steps: int
    tokens: Tokens
    cost: float


class StartInput(WireModel):
    """Input of the workflow. `carried`, `rejected` and `going_on` are set only by a run that continues as new."""

    session: SessionInput | None = None
    prompt: PromptInput | None = None
    carried: bool = False
    rejected: tuple[Rejection, ...] = ()
    going_on: GoingOn | None = None


class Status(WireModel):
    """What the query `status` gives. `tools` are the calls that run now."""

    session_id: str
    phase: Literal["idle", "busy", "retrying", "waiting"]
    step: int = 0
    attempt: int = 0
    agent: str | None = None
    model: str | None = None
    tools: tuple[str, ...] = ()
    tokens: Tokens = Tokens()
    waiting_for: str | None = None
    rejected: tuple[Rejection, ...] = ()


# Between the turn workflow and its activities.

SIGNAL_ANNOUNCE = "announce_tool_call"
SIGNAL_BEGUN = "announce_tool_start"
SIGNAL_MOVED = "announce_move"

ADMIT_START = "admit_start"
ADMIT_INPUT = "admit_input"
PLACE_INTERRUPT = "place_interrupt"
CLAIM_SESSION = "claim_session"
RELEASE_SESSION = "release_session"
RESOLVE_MODEL = "resolve_model"
STREAM_PROVIDER = "stream_provider"
EXECUTE_TOOL = "execute_tool"
REFUSE_TOOL = "refuse_tool"
SETTLE_STEP = "settle_step"

WORKER_SHUTDOWN = "WorkerShutdown"
"""Type of the failure with which an activity hands its work over when its worker shuts down."""


class AdmitInput(WireModel):
    session_id: str
    input_id: str
    prompt: PromptInput


class PlaceInterrupt(WireModel):
    session_id: str
    interrupt_id: str


class PlacedInterrupt(WireModel):
    """`head` is the log's last sequence; `recorded` says that an earlier run had this interrupt already."""

    head: int
    recorded: bool = False


class ClaimInput(WireModel):
    """`ordinal` counts the claims of this run: with the run's id it gives the execution's id. The same one again
    renews the claim. `carried` asks for a session between two steps of a turn that goes on in this run."""

    session_id: str
    ordinal: int
    force: bool = False
    reason: TakeoverReason = "lost"
    carried: bool = False


class Settings(WireModel):
    """What the workflow needs to know of its worker's settings; times in seconds."""

    heartbeat_timeout: float
    provider_timeout: float
    tool_timeout: float
    max_provider_attempts: int
    max_run_events: int | None = None
    workspace_wait: float = 30
    workspace_absent: Literal["wait", "fail"] = "wait"
    search_attributes: tuple[str, ...] = ()


class ClaimResult(WireModel):
    """`token` is there when the session is held; `repeated` says that this was so when the claim was first made, and
    `carried` that the turn of the run before goes on."""

    token: Token | None = None
    exhausted: bool = False
    repeated: bool = False
    carried: bool = False
    settings: Settings | None = None


class AdmitStart(WireModel):
    """With `claim` the session is claimed as well, once everything is admitted; with `begin` also its first step is
    begun, if nobody had the session."""

    session_id: str
    start: StartInput
    input_id: str
    claim: ClaimInput | None = None
    begin: bool = False


class StepInput(WireModel):
    token: Token
    step: int


class Plan(WireModel):
    """What a step runs with: names only, nothing of the conversation."""

    agent: str
    model: ModelRef
    tools: tuple[str, ...] = ()
    last_step: bool = False
    workspace_id: str | None = None


class ResolveInput(StepInput):
    """`queued` also promotes queued input, `required` makes the step even if there is nothing new to answer, and
    `agent_step` counts the steps made since input was last promoted."""

    queued: bool = True
    required: bool = False
    agent_step: int = 0


class Resolved(WireModel):
    """What a step begins with. Without `plan` there is nothing to do, unless `error` says what is wrong with the
    agent or the model."""

    assistant_message_id: str
    promoted: int = 0
    continued: bool = False
    plan: Plan | None = None
    error: str | None = None


class AdmitStartResult(WireModel):
    """`claim` is absent when none was asked for, or when it has to be asked for again; `begun` is there when the first
    step was begun."""

    claim: ClaimResult | None = None
    begun: Resolved | None = None


class StreamInput(StepInput):
    """`delay` is a back-off in seconds that is too short for a timer of the workflow."""

    attempt: int
    assistant_message_id: str
    plan: Plan
    delay: float = 0


class CallRef(WireModel):
    """A tool call by id; `summary` is one short line for people."""

    id: str
    summary: str


class Announcement(WireModel):
    """A tool call that is durable while its stream goes on."""

    execution_id: str
    step: int
    call: CallRef


class StreamResult(WireModel):
    """How one provider request ended. `calls` are all local calls of the step that are to be executed; `local_calls`
    also counts those that were settled as failed at once, which the model has yet to see.

    On failure, `output` says whether anything of the answer is durable, `transient` whether the cause may pass, and
    `retry_after` is in seconds.
    """

    ok: bool
    finish: str | None = None
    tokens: Tokens = Tokens()
    cost: float = 0
    calls: tuple[CallRef, ...] = ()
    local_calls: int = 0
    error: str | None = None
    output: bool = False
    transient: bool = False
    retry_after: float | None = None


class ToolInput(StepInput):
    """`waited` says that no worker took the call at first, so that its start is worth a word."""

    assistant_message_id: str
    call_id: str
    plan: Plan
    waited: bool = False


class ToolOutcome(WireModel):
    ok: bool


class ToolBegun(WireModel):
    """A call that waited for a worker runs now."""

    execution_id: str
    call_id: str


class RefuseTool(StepInput):
    """A call that no worker has taken fails with these words, and is never started."""

    assistant_message_id: str
    call_id: str
    error: str


class Relocation(WireModel):
    """The session was moved, and this execution lost it with that."""

    execution_id: str


class SettleInput(StepInput):
    """Exactly one of `result` (the stream's end), `error` (no request was possible) and `interrupt` is there."""

    assistant_message_id: str | None = None
    plan: Plan | None = None
    result: StreamResult | None = None
    error: str | None = None
    interrupt: InterruptInput | None = None
    interrupt_reason: Literal["user", "cancelled"] = "user"
    release: bool = False
    """The turn ends with this step: give the session back as well, unless it goes on by a continuation."""
    next: ResolveInput | None = None
    """The turn goes on: begin this step as well."""


ReleaseState: TypeAlias = Literal["done", "more", "lost"]


class SettleResult(WireModel):
    """`continued` says that the failed turn goes on by a continuation, under a new execution; `released` is there when
    the session was to be given back, `begun` when another step was to be begun."""

    continued: bool = False
    released: ReleaseState | None = None
    begun: Resolved | None = None


class ReleaseInput(WireModel):
    """`step` is the last one that this execution has settled or prepared for nothing."""

    token: Token
    step: int
    interrupted: bool = False


class ReleaseResult(WireModel):
    state: ReleaseState

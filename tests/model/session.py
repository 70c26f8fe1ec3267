"""One real session beside its model: each operation is done to both, and both have to answer alike and look alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import JSON, column, text

from fencepost.domain.errors import ClaimRefusedError, FencepostError, LeaseExpiredError, OwnershipLostError
from fencepost.domain.ids import derived_id
from fencepost.domain.ownership import Token as RealToken
from fencepost.store.claims import AskAgainError
from tests.model.rows import Db, RefusedError, Token
from tests.store.kit import StoreKit, Work, token_of

RUNS, ORDINALS, STEPS = range(3), range(1, 4), range(1, 9)

_KINDS = {
    "prompt.admitted": "prompt.admitted",
    "prompted": "prompted",
    "synthetic": "synthetic",
    "step.started": "step.started",
    "step.ended": "step.ended",
    "step.failed": "step.failed",
    "step.interrupted": "step.interrupted",
    "text.ended": "said",
    "tool.called": "tools",
    "tool.success": "tool.success",
    "tool.failed": "tool.failed",
}
_VISIBLE = text(
    """
    SELECT
        (SELECT json_agg(to_jsonb(x) || jsonb_build_object('now', extract(epoch FROM clock_timestamp()) * 1000))
            FROM session_execution x WHERE session_id = :session) AS session_execution,
        (SELECT json_agg(x) FROM execution_ledger x WHERE session_id = :session) AS execution_ledger,
        (SELECT json_agg(x) FROM session_input x WHERE session_id = :session) AS session_input,
        (SELECT json_agg(x) FROM session_recovery x WHERE session_id = :session) AS session_recovery,
        (SELECT json_agg(x) FROM tool_call x WHERE session_id = :session) AS tool_call,
        (SELECT json_agg(x) FROM event x WHERE aggregate_id = :session) AS event
    """
).columns(
    *(
        column(name, JSON)
        for name in ("session_execution", "execution_ledger", "session_input", "session_recovery", "tool_call", "event")
    )
)
_TERMINAL = ("step.ended", "step.failed", "step.interrupted")
_OF_THE_SESSION = ("prompt.admitted", "prompted", "synthetic")


def kind_of(error: Exception) -> str:
    """Name a refusal of the store in the model's words."""
    if isinstance(error, AskAgainError):
        return "ask"
    if isinstance(error, ClaimRefusedError):
        return "busy"
    if isinstance(error, LeaseExpiredError):
        return "expired"
    assert isinstance(error, OwnershipLostError), error
    return "lost"


@dataclass
class Session:
    """A session in the store, and what the model says it is."""

    store: StoreKit
    session_id: str
    db: Db = field(default_factory=lambda: Db(log=()))
    ghosts: dict[int, int] = field(default_factory=dict)
    admitted: list[int] = field(default_factory=list)
    ordinal: int = 0

    def __post_init__(self) -> None:
        self.executions = {
            self.real(run * 100 + ordinal).execution_id: run * 100 + ordinal for run in RUNS for ordinal in ORDINALS
        }
        self.messages = {
            derived_id("msg", name, step): execution for name, execution in self.executions.items() for step in STEPS
        }

    def real(self, execution: int) -> RealToken:
        """Give the store's token of an execution."""
        return token_of(self.session_id, f"run-{execution // 100}", execution % 100)

    def token(self, execution: int) -> Token:
        """Give the model's token of an execution."""
        return Token(execution, execution // 100, self.ghosts.get(execution, -1))

    def work(self, execution: int, step: int, attempt: int = 1) -> Work:
        """Give a step's hand, whose next events have ordinals that nobody used."""
        token = self.real(execution)
        self.ordinal += 10
        return Work(self.store, token, step, derived_id("msg", token.execution_id, step), attempt, self.ordinal)

    async def both(
        self, model: Callable[[Db], tuple[Db, Any]], store: Callable[[], Awaitable[Any]], what: str = ""
    ) -> Any:
        """Do one operation to both. Gives what both answered."""
        claims = self.db.claims
        try:
            db, expected = model(self.db)
        except RefusedError as error:
            db, expected = self.db, error.kind
        try:
            answer = await store()
        except (FencepostError, AskAgainError) as error:
            answer = kind_of(error)
        assert answer == expected, f"{what}: the store says {answer!r}, the model {expected!r}"
        if db.claims > claims and db.row is not None:
            self.ghosts[db.row.execution] = db.claims
        self.db = db
        await self.compare(what)
        return answer

    async def compare(self, what: str) -> None:
        """Compare what is visible, and see that what always holds does."""
        async with self.store.database.read() as conn:
            row = (await conn.execute(_VISIBLE, {"session": self.session_id})).one()
        found = {name: value or [] for name, value in row._mapping.items()}
        db = self.db
        rows = [
            (
                self.executions[row["id"]],
                int(row["owner_id"][4:]),
                row["phase"],
                row["assistant_message_id"] is not None,
                row["expires_at"] <= row["now"],
            )
            for row in found["session_execution"]
        ]
        assert rows == ([tuple(db.row)] if db.row is not None else []), f"{what}: the claim"
        assert [self._ledger(row) for row in self._sorted(found["execution_ledger"])] == [
            (one.execution, *one[2:6], one.continued, one.continuations, one.ended, one.exhausted) for one in db.ledgers
        ], f"{what}: the ledgers"
        inputs = sorted(found["session_input"], key=lambda row: row["admitted_seq"])
        self.admitted = [row["admitted_seq"] for row in inputs]
        assert [(row["promoted_seq"] is not None, row["wake_pending"]) for row in inputs] == [
            (bool(one.promoted), one.wake) for one in db.inputs
        ], f"{what}: the inbox"
        believed = [row for row in found["session_recovery"] if row["recovery_error"] is None]
        assert sorted((self.executions[row["execution_id"]], row["phase"]) for row in believed) == sorted(
            db.recovery
        ), f"{what}: the continuations"
        assert Counter(row["status"] for row in found["tool_call"]) == Counter(one.status for one in db.calls), what
        self._compare_log(found["event"], what)

    def _sorted(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return sorted(rows, key=lambda row: self.executions[row["execution_id"]])

    def _ledger(self, row: dict[str, Any]) -> tuple[Any, ...]:
        results = row["result"] or {}
        held = results.get("held", True)
        ended = (
            "" if row["stage"] != "released" else "released" if results.get("released") else "" if held else "not-held"
        )
        place = (self.executions[row["execution_id"]], row["step"], row["stage"], row["attempt"])
        turn = (results.get("failed_attempt", 0), bool(results.get("continued")), row["continuations"])
        return (*place, *turn, ended, bool(results.get("exhausted")))

    def _compare_log(self, log: list[dict[str, Any]], what: str) -> None:
        made: Counter[tuple[int, str]] = Counter()
        ends: Counter[str] = Counter()
        for row in log:
            kind = _KINDS.get(row["type"].removeprefix("session.next.").rsplit(".", 1)[0])
            if kind is None:
                continue
            data = row["data"]
            execution = self.executions.get(
                data.get("executionID"), self.messages.get(data.get("assistantMessageID"), 0)
            )
            made[0 if kind in _OF_THE_SESSION else execution, kind] += 1
            if kind in _TERMINAL and data.get("assistantMessageID"):
                ends[data["assistantMessageID"]] += 1
        assert self.db.log is not None
        expected = Counter((0 if kind in _OF_THE_SESSION else execution, kind) for execution, kind in self.db.log)
        assert made == expected, f"{what}: the log has {made - expected} too many, {expected - made} too few"
        assert all(count == 1 for count in ends.values()), f"{what}: a step that ended twice"
        assert made[0, "prompted"] == sum(one.promoted for one in self.db.inputs), f"{what}: an input promoted twice"

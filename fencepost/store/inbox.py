"""The inbox: input is admitted durably, and promoted into the transcript at a boundary between two steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import and_, bindparam, exists, or_, select, union_all, update
from sqlalchemy.ext.asyncio import AsyncConnection

from fencepost.domain.attachments import with_types
from fencepost.domain.clean import clean
from fencepost.domain.errors import LifecycleConflictError, PromptConflictError
from fencepost.domain.events import PromptAdmitted, Prompted
from fencepost.domain.ids import derived_id
from fencepost.domain.inbox import Delivery, Prompt, Receipt
from fencepost.store import event_log, tables
from fencepost.store.event_log import Entry, Head
from fencepost.store.ownership import owner_of
from fencepost.store.statement import Statement

_inbox, _recovery = tables.session_input, tables.session_recovery
_FIND = Statement(select(_inbox).where(_inbox.c.id == bindparam("id")))
_ASK = Statement(update(_inbox).where(_inbox.c.id == bindparam("id")).values(wake_pending=True))
_open = and_(_inbox.c.session_id == bindparam("session_id"), _inbox.c.promoted_seq.is_(None))
_owed = exists().where(
    _recovery.c.session_id == bindparam("session_id"),
    _recovery.c.phase == "pending",
    _recovery.c.recovery_error.is_(None),
)
PENDING = or_(exists().where(_open), _owed)
"""A condition: input or a recovery of `:session_id` waits to be run."""
WAKING = or_(exists().where(_open, _inbox.c.wake_pending), _owed)
"""The same of what still asks for execution."""
_HAS_PENDING = Statement(select(PENDING.label("pending")))
_HAS_WAKING = Statement(select(WAKING.label("pending")))
_ALL_PENDING = Statement(select(_inbox).where(_open).order_by(_inbox.c.admitted_seq))


def _first(delivery: Delivery, most: int) -> Any:
    """Give the oldest inputs up to the head that are to be delivered like this, and no more than so many."""
    eligible = select(_inbox).where(_open, _inbox.c.delivery == delivery, _inbox.c.admitted_seq <= bindparam("head"))
    return select(eligible.order_by(_inbox.c.admitted_seq).limit(most).subquery())


# What one boundary takes at most: more could not be promoted in the time that a turn gives the database.
_MOST_STEERS = 5_000
_UP_TO = Statement(union_all(_first("steer", _MOST_STEERS), _first("queue", 1)))


@dataclass(frozen=True, slots=True)
class Admission:
    """The receipt, and whether a live claim will look at the inbox anyway, so that no wake has to be sent. A caller
    that has locked the log itself is not told."""

    receipt: Receipt
    claimed: bool | None


async def admit(
    conn: AsyncConnection,
    session_id: str,
    input_id: str,
    prompt: Prompt,
    delivery: Delivery,
    *,
    resume: bool = True,
    head: Head | None = None,
) -> Admission:
    """Record one input under its id, once: the same id with the same content gives the same receipt.

    With `resume` the row asks for execution until it is promoted. An attachment without a type gets the one that its
    address shows. Raises NotFoundError for an unknown session and
    PromptConflictError when the id stands for something else already. `head` is the log's end, if this transaction
    has locked it already.
    """
    prompt = with_types(Prompt.model_validate(clean(prompt.to_wire())))
    own, head = head is None, head or await event_log.lock(conn, session_id)
    row = await _FIND.first(conn, id=input_id)
    if row is None:
        event = PromptAdmitted(
            timestamp=head.now, session_id=session_id, message_id=input_id, prompt=prompt, delivery=delivery
        )
        entry, before = Entry(derived_id("evt", "admitted", session_id, input_id), event), head.seq
        try:
            [seq] = await event_log.append(conn, head, [entry])
        except LifecycleConflictError as error:
            # A message of this id is visible, or another session admitted the id at the same time, and won.
            raise _conflict(session_id, input_id, await _FIND.first(conn, id=input_id)) from error
        if seq <= before:
            raise _conflict(session_id, input_id, None)  # admitted once, and taken back by a revert
        receipt = Receipt(
            id=input_id,
            session_id=session_id,
            prompt=prompt,
            delivery=delivery,
            admitted_seq=seq,
            time_created=head.now,
        )
    else:
        receipt = _receipt(row)
    if (receipt.session_id, receipt.delivery, receipt.prompt) != (session_id, delivery, prompt):
        raise _conflict(session_id, input_id, row)
    if resume and receipt.promoted_seq is None and (row is None or not row.wake_pending):
        await _ASK.run(conn, id=input_id)
    owner = await owner_of(conn, session_id) if own else None
    return Admission(receipt, claimed=(owner is not None and not owner.expired) if own else None)


def _conflict(session_id: str, input_id: str, row: Any) -> PromptConflictError:
    """Say what the id stands for: ids are unique in the whole database, for other sessions' input too."""
    if row is not None and row.session_id != session_id:
        return PromptConflictError(
            f"input id {input_id} belongs to another session, {row.session_id}: ids are unique, use a new one"
        )
    return PromptConflictError(
        f"input id {input_id} stands for something else than this prompt to {session_id} already: use a new id"
    )


def _receipt(row: Any) -> Receipt:
    return Receipt(
        id=row.id,
        session_id=row.session_id,
        prompt=Prompt.model_validate(row.prompt),
        delivery=row.delivery,
        admitted_seq=row.admitted_seq,
        time_created=row.time_created,
        **({} if row.promoted_seq is None else {"promoted_seq": row.promoted_seq}),
    )


async def find(conn: AsyncConnection, input_id: str) -> Receipt | None:
    """Give the receipt of an admitted input, None when there is none of this id."""
    row = await _FIND.first(conn, id=input_id)
    return None if row is None else _receipt(row)


async def pending(conn: AsyncConnection, session_id: str) -> list[Receipt]:
    """Give the receipts of the session's input that is not promoted, in the order of admission."""
    return [_receipt(row) for row in await _ALL_PENDING.all(conn, session_id=session_id)]


async def has_pending(conn: AsyncConnection, session_id: str, *, waking_only: bool = False) -> bool:
    """Say whether input or a recovery waits to be run; with `waking_only` just what still asks for execution."""
    found = await (_HAS_WAKING if waking_only else _HAS_PENDING).first(conn, session_id=session_id)
    return bool(found.pending)


async def is_answered(conn: AsyncConnection, session_id: str, input_id: str) -> bool:
    """Say whether the input was promoted and the session has nothing left to run: a run would find nothing to do."""
    receipt = await find(conn, input_id)
    if receipt is None or receipt.session_id != session_id or receipt.promoted_seq is None:
        return False
    return await owner_of(conn, session_id) is None and not await has_pending(conn, session_id)


async def promote(conn: AsyncConnection, head: Head, *, queued: bool) -> list[Entry]:
    """Give the promotion events of what may be seen now: the steers that wait, else one queued input if wanted.

    The head is locked, so everything admitted so far lies before the cutoff. Of thousands of steers the oldest are
    taken, and the others at the boundaries that follow, since a session with input is not given back. The caller
    appends the events; the projector marks the rows, clears the wakes of exactly these, and shows the messages.
    """
    rows = await _UP_TO.all(conn, session_id=head.session_id, head=head.seq)
    chosen = sorted((row for row in rows if row.delivery == "steer"), key=lambda row: row.admitted_seq)
    if queued and not chosen:
        chosen = rows
    if not chosen:
        return []
    return [
        Entry(
            derived_id("evt", "prompted", head.session_id, row.id),
            Prompted(
                timestamp=row.time_created,
                session_id=head.session_id,
                message_id=row.id,
                prompt=Prompt.model_validate(row.prompt),
                delivery=row.delivery,
            ),
        )
        for row in chosen
    ]


async def clear_wakes(conn: AsyncConnection, session_id: str, up_to: int) -> None:
    """After a user stopped the turn: input admitted up to this sequence waits for the client's next call, and a
    continuation that was recorded but not begun is dropped."""
    inbox, recovery = tables.session_input, tables.session_recovery
    await conn.execute(
        update(inbox)
        .where(inbox.c.session_id == session_id, inbox.c.promoted_seq.is_(None), inbox.c.admitted_seq <= up_to)
        .values(wake_pending=False)
    )
    await conn.execute(
        update(recovery)
        .where(recovery.c.session_id == session_id, recovery.c.phase == "pending")
        .values(phase="stopped", wake_pending=False)
    )

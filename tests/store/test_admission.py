"""What an input may be, and which of several a step gets to see."""

from __future__ import annotations

import pytest

from fencepost.domain import messages as m
from fencepost.domain.attachments import DIRECTORY, UNKNOWN, mime_of
from fencepost.domain.errors import PromptConflictError
from fencepost.domain.events import PromptAdmitted
from fencepost.domain.ids import fresh_id
from fencepost.domain.inbox import FileAttachment, Prompt
from fencepost.store import event_log, inbox, ownership, tables
from tests.store.kit import LEASE, StoreKit, token_of

TYPES = {
    "data:image/png;base64,AAAA": "image/png",
    "data:Text/HTML;charset=utf-8,<p>": "text/html",
    "data:,hello": "text/plain",
    "file:///src/src/": DIRECTORY,
    "file:///src/photo.of.me.JPG": "image/jpeg",
    "file:///src/a%20b.pdf": "application/pdf",
    "file:///src/main.ts": "text/plain",
    "file:///src/notes.md": "text/markdown",
    "https://example.org/table.csv?download=1#top": "text/csv",
    "relative/data.json": "application/json",
    "file:///src/Makefile": UNKNOWN,
    "file:///src/.hidden": UNKNOWN,
    "": UNKNOWN,
}


@pytest.mark.parametrize(("uri", "mime"), TYPES.items())
def test_the_type_is_in_the_address(uri: str, mime: str) -> None:
    """What it says itself, a directory by its last character, else the extension."""
    assert mime_of(uri) == mime


@pytest.mark.conformance("INB-05")
async def test_attachments_have_a_type_before_they_are_admitted(store: StoreKit, session_id: str) -> None:
    """In the receipt, the row, the event and later the message; one that is given stays. The same input again, as it
    was first sent or as it came back, is the same."""
    files = [*(FileAttachment(uri=uri, name=f"n{n}") for n, uri in enumerate(TYPES))]
    files.append(FileAttachment(uri="file:///src/photo.png", mime="text/x-mine"))
    prompt, input_id = Prompt(text="look", files=tuple(files)), fresh_id("msg")
    receipt = (await store.do(inbox.admit, session_id, input_id, prompt, "steer")).receipt
    expected = [*TYPES.values(), "text/x-mine"]

    assert [file.mime for file in receipt.prompt.files or ()] == expected
    row = await store.row(tables.session_input, session_id)
    assert [file["mime"] for file in row["prompt"]["files"]] == expected
    admitted = (await store.events(session_id))[1].decode()
    assert isinstance(admitted, PromptAdmitted)
    assert admitted.prompt == receipt.prompt
    for again in (prompt, receipt.prompt):
        assert (await store.do(inbox.admit, session_id, input_id, again, "steer")).receipt == receipt
    await store.claim_and_prepare(session_id)
    [message] = await store.messages(session_id)
    assert isinstance(message, m.UserMessage)
    assert message.files == receipt.prompt.files


@pytest.mark.conformance("INB-12")
@pytest.mark.parametrize("delivery", ["steer", "queue"])
@pytest.mark.parametrize("promoted", [False, True])
async def test_an_id_with_another_delivery_is_refused(
    store: StoreKit, session_id: str, delivery: str, promoted: bool
) -> None:
    """Pending or promoted, and the row keeps the delivery that it has."""
    first, other = ("steer", "queue") if delivery == "steer" else ("queue", "steer")
    input_id = fresh_id("msg")
    await store.admit(session_id, input_id=input_id, delivery=first)  # type: ignore[arg-type]
    if promoted:
        await store.claim_and_prepare(session_id)
    before = await store.everything(session_id)

    with pytest.raises(PromptConflictError, match=input_id):
        await store.admit(session_id, input_id=input_id, delivery=other)  # type: ignore[arg-type]
    assert await store.everything(session_id) == before


@pytest.mark.conformance("INB-17")
async def test_a_queued_input_again_after_its_promotion_gives_its_receipt(store: StoreKit, session_id: str) -> None:
    """With the sequence of the promotion, and no second message."""
    receipt = (await store.admit(session_id, "later", delivery="queue")).receipt
    assert (await store.claim_and_prepare(session_id)).promoted == 1
    before = await store.everything(session_id)

    again = (await store.admit(session_id, "later", input_id=receipt.id, delivery="queue")).receipt
    [_, _, promotion] = await store.events(session_id)
    assert again == receipt.model_copy(update={"promoted_seq": promotion.seq})
    assert await store.everything(session_id) == before
    assert len(await store.messages(session_id)) == 1


@pytest.mark.conformance("INB-18")
@pytest.mark.parametrize("promoted", [False, True])
async def test_a_message_id_belongs_to_one_session(store: StoreKit, session_id: str, promoted: bool) -> None:
    """The same words under the same id to another session are a conflict there, and nothing is written to either."""
    other, input_id = await store.new_session(), fresh_id("msg")
    await store.admit(session_id, input_id=input_id)
    if promoted:
        await store.claim_and_prepare(session_id)
    before = await store.everything(session_id), await store.everything(other)

    with pytest.raises(PromptConflictError, match=input_id):
        await store.admit(other, input_id=input_id)
    assert (await store.everything(session_id), await store.everything(other)) == before


@pytest.mark.conformance("INB-19")
async def test_an_id_of_the_transcript_is_refused(store: StoreKit, session_id: str) -> None:
    """An answer's, a note's; of this session or of another one."""
    work = await store.begin(session_id)
    await work.say("hello")
    await work.settle()
    other = await store.new_session()
    before = await store.everything(session_id), await store.everything(other)

    answer = (await store.messages(session_id))[-1]
    assert answer.type == "assistant"
    for target in (session_id, other):
        with pytest.raises(PromptConflictError, match=answer.id):
            await store.admit(target, "hello", input_id=answer.id)
    assert (await store.everything(session_id), await store.everything(other)) == before


@pytest.mark.conformance("INB-15")
async def test_steers_are_promoted_up_to_the_cutoff_and_no_further(store: StoreKit, session_id: str) -> None:
    """The cutoff is the log's end when the step is prepared: what is admitted while it is prepared waits, also if its
    row could be seen, and comes with the next step."""
    for words in ("one", "two"):
        await store.admit(session_id, words)
    token = token_of(session_id)
    await store.claim(token)
    async with store.database.begin() as conn:
        held = await ownership.hold(conn, token)
        # A third input is admitted in this very transaction: its row is there, behind the head that was looked at.
        cutoff = event_log.Head(session_id, held.head.seq, held.head.now)
        await inbox.admit(conn, session_id, fresh_id("msg"), Prompt(text="three"), "steer")
        chosen = await inbox.promote(conn, cutoff, queued=False)
        held.head.seq = await event_log.latest(conn, session_id)
        await ownership.append(conn, held, chosen, LEASE)

    def texts(found: list[m.Message]) -> list[str]:
        return [message.text for message in found if isinstance(message, m.UserMessage)]

    assert texts(await store.messages(session_id)) == ["one", "two"]
    pending = [row for row in await store.rows(tables.session_input, session_id) if row["promoted_seq"] is None]
    assert [(row["prompt"]["text"], row["wake_pending"]) for row in pending] == [("three", True)]
    assert (await store.prepare(token)).promoted == 1
    assert texts(await store.messages(session_id)) == ["one", "two", "three"]

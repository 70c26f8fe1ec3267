"""A session is moved while it works, or rests: the old place's work is interrupted, and all goes on at the new one."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fencepost.client import Client, open_client
from fencepost.domain.inbox import Location, Prompt
from fencepost.domain.messages import AssistantMessage, CompletedTool, FailedTool, UserMessage
from fencepost.domain.projection import INTERRUPTED
from fencepost.providers.script import Action, CallTool, Gate, Hang, Pause, Say
from fencepost.store import inbox, moves, ownership
from fencepost.store.claims import Seen
from tests.house_kit import HeldTool, House, assert_equal_to_rebuild
from tests.replay import assert_replays
from tests.workflows.conftest import MakeHouse
from tests.workflows.test_interrupts import SOON, in_phase, interruptions, is_held, logged, pending
from tests.workflows.test_routing import LIMITS, at_workspace
from tests.workflows.test_steering import During, asked
from tests.workflows.test_turn import said, tools


@asynccontextmanager
async def client_of(house: House) -> AsyncIterator[Client]:
    async with open_client(house.services.settings, house.services.environ) as client:
        yield client


def place(house: House, name: str, workspace: str | None = None) -> Location:
    """Make a directory in the house's, and give it as a location."""
    directory = house.directory / name
    directory.mkdir(exist_ok=True)
    return Location(directory=str(directory), workspace_id=workspace)


async def move_in_silence(house: House, session_id: str, location: Location) -> None:
    """Move a session, and have its run never hear of it."""
    database = house.services.database
    async with database.read() as conn:
        owner = await ownership.owner_of(conn, session_id)
    assert owner is not None
    moved = await database.transact(lambda conn: moves.move(conn, session_id, location, Seen(owner, "open")))
    assert moved.fenced == owner.execution_id


async def check_moved_once(house: House, session_id: str) -> None:
    """Check that one step was cut by a move, that its interruption and the move stand beside each other, and that
    nothing came after them from what was cut."""
    [stopped] = await interruptions(house, session_id)
    assert stopped["reason"] == "moved"
    log = await house.events(session_id)
    [at] = [event.seq for event in log if event.type == "session.next.moved.1"]
    assert log[at - 1].type == "session.next.step.interrupted.1"
    cut = stopped["assistantMessageID"]
    assert all(event.data.get("assistantMessageID") != cut for event in log if event.seq > at)
    assert not await is_held(house, session_id)
    await assert_replays(house, session_id)
    await assert_equal_to_rebuild(house, session_id)


@pytest.mark.conformance("MOV-01")
@pytest.mark.parametrize("heard", [True, False], ids=["heard", "the signal is lost"])
async def test_a_move_during_a_stream(house: MakeHouse, heard: bool) -> None:
    """The text that was shown stays, the rest is never seen, and the model answers anew with the new place's tools."""
    gate = Gate()
    answer: list[Action] = [CallTool("bash", {"command": "pwd"})]
    replies: list[list[Action]] = [
        [Say("Half an answer."), Pause(gate), Say("Never seen."), Hang()],
        answer,
        [Say("Whole.")],
    ]
    h = await house(replies, limits={"lease_seconds": 3, "renew_seconds": 1})
    session_id, there = h.new_id(), place(h, "there")
    await h.start(session_id, "Go.")
    await gate.reached()
    await logged(h, session_id, "session.next.text.started.1")
    begun = asyncio.get_running_loop().time()
    if heard:
        async with client_of(h) as client:
            moved = await client.move(session_id, there)
        assert (moved.moved, moved.owed) == (True, True)
    else:
        await move_in_silence(h, session_id, there)
    result = await h.ended(session_id)

    assert asyncio.get_running_loop().time() - begun < (2 * SOON if heard else 10)
    assert result.outcome == "done"
    assert len(h.provider.requests) == 3
    messages = [message for message in await h.messages(session_id) if message.type != "system"]
    assert [message.type for message in messages] == ["user", "assistant", "synthetic", "assistant", "assistant"]
    assert "Never" not in "".join(said(m) for m in messages if isinstance(m, AssistantMessage))
    [part] = tools(messages[3])
    assert isinstance(part.state, CompletedTool)
    assert there.directory in str(part.state.content)
    gate.release()
    await check_moved_once(h, session_id)


@pytest.mark.conformance("MOV-01")
@pytest.mark.parametrize("heard", [True, False], ids=["heard", "the signal is lost"])
async def test_a_move_during_a_tool_to_another_workspace(house: MakeHouse, heard: bool) -> None:
    """Two workers, one for each workspace. What runs at the old one is stopped, and its call fails as interrupted; the
    model calls again, and that runs at the new one."""
    here, far = HeldTool(), HeldTool()
    far.gate.set()
    calls: list[list[Action]] = [[CallTool("hold", id="call_1")], [CallTool("hold", id="call_2")], [Say("Done.")]]
    limits = {"lease_seconds": 3, "renew_seconds": 1}
    h = await house(calls, registry=here.registry, limits=limits)
    old = await house(
        registry=here.registry, limits=limits, workspace={"id": "here", "directory": h.directory}, serve=False
    )
    new = await house(
        registry=far.registry, limits=limits, workspace={"id": "far", "directory": h.directory}, serve=False
    )
    session_id, there = h.new_id(), place(h, "there", "far")
    async with at_workspace(old.services), at_workspace(new.services):
        await h.start(session_id, "Go.", location=place(h, "first", "here").to_wire())
        await here.started(1)
        if heard:
            async with client_of(h) as client:
                await client.move(session_id, there)
        else:
            await move_in_silence(h, session_id, there)
        result = await h.ended(session_id)

    assert result.outcome == "done"
    assert (len(here.invocations), here.cancelled, len(far.invocations)) == (1, 1, 1)
    assert far.invocations[0].directory == there.directory
    first, second = (
        tools(m)[0] for m in (await h.messages(session_id)) if isinstance(m, AssistantMessage) and tools(m)
    )
    assert isinstance(first.state, FailedTool)
    assert first.state.error.message == INTERRUPTED
    assert isinstance(second.state, CompletedTool)
    await check_moved_once(h, session_id)


@pytest.mark.parametrize("heard", [True, False], ids=["heard", "the signal is lost"])
async def test_a_move_away_from_a_workspace_that_nobody_serves(house: MakeHouse, heard: bool) -> None:
    """What the user is advised to do helps at once; if only a wake is heard, that helps too."""
    tool = HeldTool()
    tool.gate.set()
    h = await house(
        [[CallTool("hold")], [CallTool("hold")], [Say("Done.")]], registry=tool.registry,
        limits={**LIMITS, "workspace_wait_seconds": 2, "lease_seconds": 60},
    )  # fmt: skip
    session_id, there = h.new_id(), place(h, "there")
    handle = await h.start(session_id, "Go.", location={"directory": "/far/away", "workspaceID": "far"})
    await in_phase(handle, "waiting")
    if heard:
        async with client_of(h) as client:
            await client.move(session_id, there)
    else:
        await move_in_silence(h, session_id, there)
        await handle.signal("wake")
    begun = asyncio.get_running_loop().time()
    result = await h.ended(session_id)

    assert asyncio.get_running_loop().time() - begun < 2 * SOON
    assert result.outcome == "done"
    assert [invocation.directory for invocation in tool.invocations] == [there.directory]
    await check_moved_once(h, session_id)


@pytest.mark.conformance("RUN-09", "MOV-01")
async def test_a_move_between_plan_and_request(house: MakeHouse) -> None:
    """No request is made for the old place, and what came since is answered at the new one."""
    h = await house([[CallTool("bash", {"command": "pwd"})], [Say("Done.")]])
    session_id, there = h.new_id(), place(h, "there")
    async with client_of(h) as client:

        async def move() -> None:
            assert h.provider.requests == []
            prompt = Prompt(text="And this.")
            await h.services.database.transact(
                lambda conn: inbox.admit(conn, session_id, "msg_two", prompt, "steer", resume=True)
            )
            assert (await client.move(session_id, there)).fenced is not None
            assert await pending(h, session_id) == {"And this.": True}

        with During(h, "resolve_model", move) as during:
            await h.prompt(session_id, "Go.")
            result = await h.ended(session_id)

    assert result.outcome == "done"
    assert during.calls > 1
    assert len(h.provider.requests) == 2
    assert [text for text in asked(h.provider.requests[0]) if not text.startswith("The previous")] == [
        "Go.",
        "And this.",
    ]
    messages = await h.messages(session_id)
    [part] = [part for m in messages if isinstance(m, AssistantMessage) for part in tools(m)]
    assert there.directory in str(part.state)
    assert [m.text for m in messages if isinstance(m, UserMessage)] == ["Go.", "And this."]
    await assert_replays(h, session_id)
    await assert_equal_to_rebuild(h, session_id)


@pytest.mark.conformance("MOV-01")
async def test_what_waits_in_an_idle_session_runs_at_the_new_place(house: MakeHouse) -> None:
    """Input whose wake was lost is announced by the move; moving again to the same place does nothing."""
    h = await house([[Say("Hello.")], [CallTool("bash", {"command": "pwd"})], [Say("Done.")]])
    session_id, there = h.new_id(), place(h, "there")
    await h.run(session_id, "First.")
    prompt = Prompt(text="Second.")
    await h.services.database.transact(
        lambda conn: inbox.admit(conn, session_id, "msg_two", prompt, "steer", resume=True)
    )
    async with client_of(h) as client:
        first = await client.move(session_id, there)
        result = await client.result(session_id)
        second = await client.move(session_id, there)

    assert (first.moved, first.fenced, first.owed) == (True, None, True)
    assert (second.moved, second.session.location) == (False, there)
    assert result.outcome == "done"
    [part] = [part for m in await h.messages(session_id) if isinstance(m, AssistantMessage) for part in tools(m)]
    assert there.directory in str(part.state)
    assert (await h.types(session_id)).count("session.next.moved.1") == 1


async def test_a_turn_is_moved_twice_and_back(house: MakeHouse) -> None:
    """The turn goes on where the last move has put it; late words about an earlier move stop nothing."""
    tool = HeldTool()
    h = await house([[CallTool("hold", id=f"call_{n}")] for n in range(4)] + [[Say("Done.")]], registry=tool.registry)
    session_id = h.new_id()
    places = [place(h, name) for name in ("first", "second", "first")]
    handle = await h.start(session_id, "Go.", location=place(h, "start").to_wire())
    await tool.started(1)
    async with client_of(h) as client:
        for number, there in enumerate(places, 2):
            moved = await client.move(session_id, there)
            await tool.started(number)
            await handle.signal("announce_move", {"executionID": "exe_earlier"})
            assert moved.fenced is not None
        await handle.signal("announce_move", 42)
        tool.gate.set()
        result = await client.result(session_id)

    assert result.outcome == "done"
    assert [Path(invocation.directory).name for invocation in tool.invocations] == ["start", "first", "second", "first"]
    assert tool.cancelled == 3
    assert [each["reason"] for each in await interruptions(h, session_id)] == ["moved"] * 3
    await assert_replays(h, session_id)
    await assert_equal_to_rebuild(h, session_id)


@pytest.mark.parametrize("first", ["move", "interrupt", "both"])
async def test_a_move_and_an_interrupt_at_once(house: MakeHouse, first: str) -> None:
    """The turn stops, the session has moved, and the next prompt is answered at the new place."""
    gate, tool = Gate(), HeldTool()
    fine: list[Action] = [Say("Fine.")]
    replies: list[list[Action]] = [[CallTool("hold"), Say("One"), Pause(gate), Hang()], *[fine] * 3]
    h = await house(replies, registry=tool.registry)
    session_id, there = h.new_id(), place(h, "there")
    await h.start(session_id, "Go.")
    await gate.reached()
    await tool.started(1)
    async with client_of(h) as client:
        if first == "interrupt":
            await client.interrupt(session_id)
        if first == "both":
            await asyncio.gather(client.move(session_id, there), client.interrupt(session_id))
        else:
            await client.move(session_id, there)
        if first == "move":
            await client.interrupt(session_id)
        await client.result(session_id)
        assert (await client.get(session_id)).location == there
        await client.prompt(session_id, "Again.")
        assert (await client.result(session_id)).outcome == "done"

    reasons = [each["reason"] for each in await interruptions(h, session_id)]
    assert reasons in (["moved"], ["moved", "user"], ["user"])
    assert tool.cancelled == 1
    assert asked(h.provider.requests[-1])[-1] == "Again."
    assert not await is_held(h, session_id)
    await assert_replays(h, session_id)
    await assert_equal_to_rebuild(h, session_id)


def _files(root: Path) -> dict[str, tuple[bytes, int]]:
    found = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): (path.read_bytes(), path.stat().st_mtime_ns) for path in found}


@pytest.mark.conformance("MOV-02", "MOV-03")
async def test_a_move_within_a_checkout_touches_no_file(house: MakeHouse, tmp_path: Path) -> None:
    """A git checkout with committed, changed and unknown files: they are the same afterwards, the session sees them
    all, and what it then writes in the nested directory is the only difference."""
    root = tmp_path / "checkout"
    nested = root / "web" / "app"
    nested.mkdir(parents=True)

    def git(*words: str) -> str:
        given = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(root), *words]
        return subprocess.run(given, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    (root / "kept.txt").write_text("committed\n")
    (nested / "index.html").write_text("committed\n")
    git("add", ".")
    git("commit", "-qm", "first")
    (root / "kept.txt").write_text("changed\n")
    (nested / "new.txt").write_text("unknown to git\n")
    state, before = git("status", "--porcelain"), _files(root)
    command = {"command": "cat new.txt ../../kept.txt; echo made > made.txt"}
    h = await house([[Say("Hello.")], [CallTool("bash", command)], [Say("Done.")]])
    session_id = h.new_id()
    await h.run(session_id, "First.", location={"directory": str(root)})
    async with client_of(h) as client:
        moved = await client.move(session_id, Location(directory=str(nested)))
        assert git("status", "--porcelain") == state
        assert _files(root).items() >= {k: v for k, v in before.items() if k != ".git/index"}.items()
        await client.prompt(session_id, "Second.")
        await client.result(session_id)

    assert moved.session.location.directory == str(nested)
    [event] = [event for event in await h.events(session_id) if event.type == "session.next.moved.1"]
    assert event.data["subdirectory"] == "web/app"
    [part] = [part for m in await h.messages(session_id) if isinstance(m, AssistantMessage) for part in tools(m)]
    assert isinstance(part.state, CompletedTool)
    assert "unknown to git" in str(part.state.content)
    assert "changed" in str(part.state.content)
    after = {name: file for name, file in _files(root).items() if not name.startswith(".git/")}
    assert after.pop("web/app/made.txt")[0] == b"made\n"
    assert after == {name: file for name, file in before.items() if not name.startswith(".git/")}

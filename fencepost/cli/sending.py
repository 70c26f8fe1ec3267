"""`fencepost session prompt, steer, queue, resume, interrupt`: what makes a turn begin, go on or stop."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from fencepost.cli import arguments, listing, terminal
from fencepost.cli import choice as choices
from fencepost.cli.entry import OK, Signals
from fencepost.cli.records import open_records
from fencepost.cli.render import JsonLines, Screen
from fencepost.cli.session import Ready, Wanted, ready
from fencepost.cli.stack import open_place
from fencepost.cli.terminal import Notices
from fencepost.cli.turn import TurnView, exit_code, told_of_waits
from fencepost.client import Client, open_client
from fencepost.config import load_settings
from fencepost.domain.contracts import TurnResult
from fencepost.domain.errors import InvalidInputError
from fencepost.domain.ids import fresh_id
from fencepost.domain.inbox import Delivery, FileAttachment, Receipt


@dataclass(frozen=True, slots=True)
class Input:
    """What is sent, as the command line has it."""

    session_id: str
    text: str
    input_id: str | None = None
    files: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class How:
    """How it is sent: only recorded without `resume`; with `wait` the turn is shown."""

    delivery: Delivery = "steer"
    resume: bool = True
    wait: bool = False
    as_json: bool = False


@dataclass(frozen=True, slots=True)
class _Checked:
    session_id: str
    text: str
    input_id: str
    files: tuple[FileAttachment, ...]
    how: How

    async def send(self, client: Client) -> Receipt:
        """Admit it."""
        return await client.prompt(
            self.session_id,
            self.text,
            files=self.files,
            id=self.input_id,
            delivery=self.how.delivery,
            resume=self.how.resume,
        )


async def prompt(given: Input, how: How, config: Path | None, signals: Signals) -> int:
    """Send input and print its receipt, or show the turn."""
    if how.wait and not how.resume:
        raise InvalidInputError("--wait and --no-resume: input that is only recorded begins no turn to wait for")
    limits = load_settings(config).limits
    checked = _Checked(
        arguments.session_id(given.session_id),
        arguments.text(given.text, limits.prompt_bytes, f'fencepost session prompt {given.session_id} "what to do"'),
        arguments.input_id(given.input_id) or fresh_id("msg"),
        arguments.attachments(given.files),
        how,
    )
    say = Notices()
    signals.unsent = True
    if not how.resume:
        async with open_records(config) as records:
            signals.unsent = False
            _put_receipt(await checked.send(records.client), how)
        say("recorded: it is seen with the session's next input, or after `fencepost session resume`")
        return OK
    async with _ready(checked.session_id, config, say) as house:
        signals.unsent = False
        if how.wait:
            return await _shown(house, checked.session_id, lambda: _turn(house.client, checked), how, signals, say)
        receipt = await checked.send(house.client)
        _put_receipt(receipt, how)
        if not house.is_last_user():
            return OK
        say(f"staying until the turn has ended, since its worker ends with this command: {house.why_last_user()}")
        async with told_of_waits(house.client, checked.session_id, say):
            result = await house.client.result(checked.session_id)
        return exit_code(result, say)


def _put_receipt(receipt: Receipt, how: How) -> None:
    if how.as_json:
        listing.put_json(receipt.to_wire())
    else:
        terminal.out(listing.receipt_line(receipt))


def _ready(session_id: str, config: Path | None, say: Notices) -> AbstractAsyncContextManager[Ready]:
    """Give a place with a worker for the session."""
    choice = choices.choose(load_settings(config), dict(os.environ), model=None, agent=None, base_url=None)
    return ready(Wanted(choice, config, session_id), say, say)


async def _shown(
    house: Ready,
    session_id: str,
    work: Callable[[], Awaitable[TurnResult]],
    how: How,
    signals: Signals,
    say: Notices,
) -> int:
    shown = JsonLines() if how.as_json else Screen()
    result = await TurnView(house.client, session_id, shown, say).run(work, signals)
    return exit_code(result, say)


async def _turn(client: Client, checked: _Checked) -> TurnResult:
    await checked.send(client)
    return await client.result(checked.session_id)


async def resume(session_id: str, *, as_json: bool, config: Path | None, signals: Signals) -> int:
    """Join or begin a turn, and show it."""
    arguments.session_id(session_id)
    say = Notices()
    async with _ready(session_id, config, say) as house:
        how = How(as_json=as_json)
        return await _shown(house, session_id, lambda: house.client.resume(session_id), how, signals, say)


async def interrupt(session_id: str, reason: str | None, *, as_json: bool, config: Path | None) -> int:
    """Ask the turn to stop. It is a message to the run, so no worker has to be there."""
    arguments.session_id(session_id)
    say = Notices()
    settings, environ = load_settings(config), dict(os.environ)
    async with (
        open_place(settings, environ, say) as place,
        open_client(place.settings, place.environ) as client,
    ):
        is_asked = await client.interrupt(session_id, reason)
    if as_json:
        listing.put_json({"sessionID": session_id, "interrupted": is_asked})
    elif is_asked:
        terminal.out(f"{session_id} was told to stop")
    if not is_asked:
        say(f"session {session_id} is idle: there is nothing to interrupt")
    return OK

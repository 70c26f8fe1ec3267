"""`fencepost run`: one prompt in a directory, to the end of its turn."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fencepost.cli import choice as choices
from fencepost.cli.choice import Choice
from fencepost.cli.entry import Signals
from fencepost.cli.terminal import Notices
from fencepost.config import load_settings
from fencepost.domain.contracts import SessionInput
from fencepost.domain.errors import DirectoryError, InvalidInputError
from fencepost.domain.ids import fresh_id, is_session_id
from fencepost.domain.inbox import Location

if TYPE_CHECKING:
    from fencepost.store.sessions import Session


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of the command."""

    prompt: str
    model: str | None = None
    agent: str | None = None
    base_url: str | None = None
    session: str | None = None
    directory: Path | None = None
    as_json: bool = False
    config: Path | None = None


async def run(options: RunOptions, signals: Signals) -> int:
    """Send the prompt, show the turn, and give the exit code."""
    say = Notices()
    settings = load_settings(options.config)
    text = _prompt(options.prompt)
    directory = _directory(options)
    if options.session is not None and not is_session_id(options.session):
        raise InvalidInputError(f"--session: {options.session!r} is no session id: one begins with ses_")
    choice = choices.choose(
        settings, dict(os.environ), model=options.model, agent=options.agent, base_url=options.base_url
    )
    if options.session is None and choices.is_local(choice):
        choices.check(choice)
    return await _run(options, choice, text, directory, signals, say)


async def _run(options: RunOptions, choice: Choice, text: str, directory: str, signals: Signals, say: Notices) -> int:
    # Imported once the input is known to be good: these bring everything else with them.
    from fencepost.cli.render import JsonLines, Screen  # noqa: PLC0415
    from fencepost.cli.session import Wanted, ready  # noqa: PLC0415
    from fencepost.cli.turn import TurnView, exit_code  # noqa: PLC0415

    wanted = Wanted(choice, options.config, options.session)
    async with ready(wanted, say, say.progress) as house:
        if house.existing is not None:
            _check_unchanged(options, house.existing, choice.settings.default_agent)
        session_id, attributes = options.session, None
        if session_id is None:
            session_id = fresh_id("ses")
            attributes = SessionInput(agent=options.agent, model=choice.model, location=Location(directory=directory))
        shown = JsonLines() if options.as_json else Screen()
        result = await TurnView(house.client, session_id, shown, say).run(text, attributes, signals)
        if result.outcome == "done":
            say(f'session {session_id}: `fencepost run --session {session_id} "..."` goes on with it')
        return exit_code(result, say)


def _prompt(given: str) -> str:
    try:
        text = sys.stdin.read() if given == "-" else given
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"the prompt on standard input is not text: {error.reason}") from None
    if not text.strip():
        where = "standard input held none" if given == "-" else "it is empty"
        raise InvalidInputError(f'no prompt: {where}; write `fencepost run "what to do"`')
    return text


def _directory(options: RunOptions) -> str:
    """Give the absolute directory for a new session. Whether a remote worker has it, only that worker knows."""
    try:
        directory = Path(options.directory or Path.cwd()).expanduser().absolute()
    except FileNotFoundError:
        raise DirectoryError("the current directory does not exist any more: change to another one") from None
    if options.session is not None and options.directory is not None:
        raise InvalidInputError("--directory is for a new session: a session keeps the directory it was made for")
    if not directory.is_dir():
        raise DirectoryError(f"--directory: {directory} is not a directory: create it first")
    return str(directory)


def _check_unchanged(options: RunOptions, session: Session, default_agent: str) -> None:
    """A session keeps its agent and model: refuse other ones rather than ignore them."""
    own_agent, default = session.agent or default_agent, "the default one"
    if options.agent not in (None, own_agent):
        raise InvalidInputError(f"--agent is for a new session: {session.id} runs with agent {own_agent}")
    if options.model is not None and choices.parse_model(options.model) != session.model:
        raise InvalidInputError(f"--model is for a new session: {session.id} runs with {session.model or default}")

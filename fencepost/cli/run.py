"""`fencepost run`: one prompt in a directory, to the end of its turn."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fencepost.cli import arguments
from fencepost.cli import choice as choices
from fencepost.cli.choice import Choice
from fencepost.cli.entry import Signals
from fencepost.cli.terminal import Notices, command
from fencepost.config import load_settings
from fencepost.domain.contracts import SessionInput, TurnResult
from fencepost.domain.errors import InvalidInputError, NotFoundError
from fencepost.domain.ids import fresh_id
from fencepost.domain.inbox import FileAttachment, Location

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
    newest: bool = False
    directory: Path | None = None
    files: tuple[Path, ...] = ()
    as_json: bool = False
    config: Path | None = None


async def run(options: RunOptions, signals: Signals) -> int:
    """Send the prompt, show the turn, and give the exit code."""
    say = Notices()
    settings = load_settings(options.config)
    if options.session is not None and options.newest:
        raise InvalidInputError("--session and --continue: both say which session goes on, so give one of them")
    if options.session is not None:
        arguments.session_id(options.session, "--session")
        if options.directory is not None:
            raise InvalidInputError("--directory is for a new session: a session keeps the directory it was made for")
    text = arguments.text(options.prompt, settings.limits.prompt_bytes, 'fencepost run "what to do"')
    directory = arguments.directory(options.directory)
    files = arguments.attachments(options.files)
    choice = choices.choose(
        settings, dict(os.environ), model=options.model, agent=options.agent, base_url=options.base_url
    )
    if not choices.is_local(choice):
        choices.check_remote(choice)
    elif options.session is None and not options.newest:
        choices.check(choice)
    elif options.model is not None or options.agent is not None:
        choices.check_names(choice)
    if options.newest:
        options = replace(options, session=await _newest(directory, options.config))
    return await _run(options, _Given(text, directory, files), choice, signals, say)


@dataclass(frozen=True, slots=True)
class _Given:
    text: str
    directory: str
    files: tuple[FileAttachment, ...]


async def _run(options: RunOptions, given: _Given, choice: Choice, signals: Signals, say: Notices) -> int:
    # Imported once the input is known to be good: these bring everything else with them.
    from fencepost.cli.render import JsonLines, Screen  # noqa: PLC0415
    from fencepost.cli.session import Wanted, ready  # noqa: PLC0415
    from fencepost.cli.turn import TurnView, exit_code  # noqa: PLC0415

    def verify(session: Session) -> None:
        _check_unchanged(options, session, choice.settings.default_agent)

    wanted = Wanted(choice, options.config, options.session, verify=verify)
    signals.unsent = True
    async with ready(wanted, say, say) as house:
        session_id, attributes = options.session, None
        if session_id is None:
            session_id = fresh_id("ses")
            where = Location(directory=given.directory)
            attributes = SessionInput(agent=options.agent, model=choice.model, location=where)

        async def work() -> TurnResult:
            signals.unsent = False
            await house.client.prompt(session_id, given.text, files=given.files, session=attributes)
            return await house.client.result(session_id)

        shown = JsonLines() if options.as_json else Screen()
        view = TurnView(house.client, session_id, shown, say)
        goes_on = f'session {session_id}: `{command()} run --session {session_id} "..."` goes on with it'
        try:
            result = await view.run(work, signals, is_new=attributes is not None)
        except BrokenPipeError:
            say(goes_on)
            raise
        if result.outcome == "done":
            say(goes_on)
        return exit_code(result, say)


async def _newest(directory: str, config: Path | None) -> str:
    """Give the newest session of a directory. Raises NotFoundError."""
    from fencepost.cli.records import open_records  # noqa: PLC0415

    async with open_records(config) as records:
        page = await records.client.list(limit=1, directory=directory)
    if not page.items:
        raise NotFoundError(f"--continue: there is no session of {directory}: leave --continue out to begin one")
    return page.items[0].id


def _check_unchanged(options: RunOptions, session: Session, default_agent: str) -> None:
    """A session keeps its agent and model: refuse other ones rather than ignore them."""
    own_agent, default = session.agent or default_agent, "the default one"
    if options.agent not in (None, own_agent):
        raise InvalidInputError(f"--agent is for a new session: {session.id} runs with agent {own_agent}")
    if options.model is not None and choices.parse_model(options.model) != session.model:
        raise InvalidInputError(f"--model is for a new session: {session.id} runs with {session.model or default}")

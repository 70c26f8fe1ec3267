"""`fencepost demo`: everything at once, from nothing to a settled session, and nothing left running."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from fencepost.cli import choice as choices
from fencepost.cli import terminal
from fencepost.cli.choice import SCRIPTED
from fencepost.cli.entry import INTERRUPTED, Signals
from fencepost.cli.render import Screen
from fencepost.cli.session import Ready, Wanted, ready
from fencepost.cli.turn import TurnView, exit_code
from fencepost.config import load_settings
from fencepost.domain.contracts import SessionInput, TurnResult
from fencepost.domain.ids import fresh_id
from fencepost.domain.inbox import Location

PROMPT = "Read README.md and write a short summary of it to SUMMARY.md."

_FILES = {
    "README.md": (
        "# Lighthouse\n\nA small weather station for sailors.\n\n"
        "It reads wind and pressure every minute, and warns of storms an hour ahead.\n"
        "Run `python station.py` on any machine with a serial port.\n"
    ),
    "station.py": "WIND_LIMIT = 17.2  # metres a second: a gale\n\n\ndef warns(wind: float) -> bool:\n"
    "    return wind >= WIND_LIMIT\n",
}


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The options of the command."""

    model: str | None = None
    base_url: str | None = None
    config: Path | None = None


async def demo(options: DemoOptions, signals: Signals) -> int:
    """Show a session from its start to its end, and give the exit code."""
    begun = time.monotonic()
    signals.unread = INTERRUPTED
    settings = load_settings(options.config)
    wanted_model = options.model or (settings.default_model if options.base_url else f"{SCRIPTED}/demo")
    choice = choices.choose(settings, dict(os.environ), model=wanted_model, agent=None, base_url=options.base_url)
    choices.check(choice)
    session_id = fresh_id("ses")
    directory = settings.home / "demo" / session_id[-8:]
    async with ready(Wanted(choice, options.config, only_local=True), _progress, _progress) as house:
        _make_project(directory)
        _tell(house, wanted_model, session_id, directory)
        attributes = SessionInput(
            model=house.choice.model, location=Location(directory=str(directory)), title="The demonstration"
        )
        view = TurnView(house.client, session_id, Screen(echo_prompts=True), _progress)

        async def work() -> TurnResult:
            await house.client.prompt(session_id, PROMPT, session=attributes)
            return await house.client.result(session_id)

        result = await view.run(work, signals, is_new=True)
        code = exit_code(result, terminal.Notices())
        link = f"{house.place.ui_url}/namespaces/default/workflows/{session_id}"
        terminal.out("")
        _progress("stopping what was started ...")
    _tell_next(result, directory, link, time.monotonic() - begun)
    return code


def _progress(line: str) -> None:
    # Part of what a demonstration shows, so it goes where the rest goes and in its order.
    sys.stdout.write(f"{terminal.one_line(line)}\n")
    sys.stdout.flush()


def _make_project(directory: Path) -> None:
    directory.mkdir(parents=True)
    for name, text in _FILES.items():
        (directory / name).write_text(text, encoding="utf-8")


def _tell(house: Ready, model: str, session_id: str, directory: Path) -> None:
    place = house.place
    for line in (
        "",
        f"Temporal UI  {place.ui_url}",
        f"Temporal     {place.environ['TEMPORAL_ADDRESS']}",
        f"PostgreSQL   {place.settings.database_url}",
        f"worker       python -m worker, task queue {house.client.settings.task_queue}",
        f"model        {model}",
        f"session      {session_id}",
        f"directory    {directory}",
        "",
    ):
        terminal.out(line)


def _tell_next(result: TurnResult, directory: Path, link: str, seconds: float) -> None:
    summary, call = directory / "SUMMARY.md", terminal.command()
    lines = [f"Done in {seconds:.0f} s, and nothing of it runs any more. The session stays in the local state."]
    if result.outcome == "done" and summary.is_file():
        lines.append(f"What it wrote: {summary}")
    lines += [
        "",
        "Try next:",
        f"  {call} dev",
        f"    keeps all of this running; then this very run is at {link}",
        f'  {call} run "..."',
        "    sends one prompt in your own directory, to a model of yours (OPENAI_API_KEY)",
        f"  {call} session messages {result.session_id}",
        "    shows this session again; `session list` all of them",
        f"  {call} --help",
        "    other commands; `run --help`: other models, agents, sessions, JSON",
    ]
    for line in lines:
        terminal.out(line)

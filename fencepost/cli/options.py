"""Options that several commands share, and how a command is started with them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any, NoReturn, Optional, TypeAlias

import typer

Work: TypeAlias = Callable[[Any], Coroutine[Any, Any, int]]

Config = Annotated[
    Optional[Path],  # noqa: UP045 - read by typer at run time
    typer.Option("--config", metavar="FILE", help="Configuration file, in place of the fencepost.toml that is found."),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks, and what libraries log.")]
Model = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--model",
        metavar="PROVIDER/MODEL",
        help="Model, such as openai/gpt-4o-mini; scripted/demo plays one, without a key.",
    ),
]
BaseUrl = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--base-url", metavar="URL", help="Address of the model's provider: any server that speaks OpenAI Chat."
    ),
]
Agent = Annotated[Optional[str], typer.Option("--agent", help="Agent, such as build or plan.")]  # noqa: UP045
Directory = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--directory", help="Where the session works; else the current directory."),
]
Files = Annotated[
    Optional[list[Path]],  # noqa: UP045
    typer.Option("--file", metavar="PATH", help="Attach this file; may be given several times."),
]
Json = Annotated[bool, typer.Option("--json", help="JSON for programs: one object, or one a line.")]


def help_alone(context: typer.Context) -> None:
    """Without a command, show what there is."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit


def start(context: typer.Context, config: Path | None, debug: bool, work: Callable[[Path | None], Work]) -> NoReturn:
    """Run a command's work, with the options that may stand before or after its name."""
    from fencepost.cli.entry import enter, quiet_libraries  # noqa: PLC0415 - only commands that do something need it

    before = context.find_root().obj
    debug = debug or before[1]
    quiet_libraries(debug=debug)
    enter(work(config or before[0]), debug=debug)

"""The command line: its commands and options. What they do is imported when one is chosen."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn, Optional

import typer
from typer.exceptions import TyperException

from fencepost import __version__
from fencepost.cli import operate
from fencepost.cli.commands import sessions
from fencepost.cli.options import Agent, BaseUrl, Config, Debug, Directory, Files, Model, Work, help_alone, start

_EPILOG = (
    "Exit codes: 0 it went well; 1 the turn failed, or another error; 2 bad input, configuration, or a database at "
    "another migration; 3 a service cannot be reached; 130 interrupted."
)

app = typer.Typer(
    name="fencepost",
    help="Durable LLM-agent sessions on Temporal.",
    epilog=_EPILOG,
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
database = typer.Typer(help="The database's schema.", invoke_without_command=True, rich_markup_mode=None)
app.add_typer(sessions, name="session")
app.add_typer(database, name="db")
operate.add_to(app)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fencepost {__version__}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    config: Config = None,
    debug: Debug = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Durable LLM-agent sessions on Temporal."""
    del version
    context.obj = (config, debug)
    help_alone(context)


@database.callback()
def database_root(context: typer.Context) -> None:
    """The database's schema."""
    help_alone(context)


@app.command()
def demo(
    context: typer.Context, model: Model = None, base_url: BaseUrl = None, config: Config = None, debug: Debug = False
) -> None:
    """Start everything, show one session, stop everything."""

    def work(configured: Path | None) -> Work:
        from fencepost.cli import demo as command  # noqa: PLC0415

        return lambda signals: command.demo(command.DemoOptions(model, base_url, configured), signals)

    start(context, config, debug, work)


@app.command()
def dev(
    context: typer.Context,
    port: Annotated[Optional[int], typer.Option("--port", min=0, max=65535, help="Port of Temporal.")] = None,  # noqa: UP045
    ui_port: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--ui-port", min=0, max=65535, help="Port of the Temporal UI."),
    ] = None,
    config: Config = None,
    debug: Debug = False,
) -> None:
    """Keep everything running on this machine until Ctrl-C.

    That is PostgreSQL, Temporal with its UI, a worker, and the scripted model, scripted/demo, which needs no key.
    """

    def work(configured: Path | None) -> Work:
        from fencepost.cli import dev as command  # noqa: PLC0415

        return lambda signals: command.dev(configured, (port, ui_port), signals)

    start(context, config, debug, work)


@app.command()
def run(
    context: typer.Context,
    prompt: Annotated[str, typer.Argument(help="What to do; - reads it from standard input.")],
    model: Model = None,
    agent: Agent = None,
    base_url: BaseUrl = None,
    session: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--session", metavar="ID", help="Go on with this session."),
    ] = None,
    newest: Annotated[
        bool, typer.Option("--continue", help="Go on with the newest session of this directory.")
    ] = False,
    directory: Directory = None,
    file: Files = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, the result last.")] = False,
    config: Config = None,
    debug: Debug = False,
) -> None:
    """Send one prompt, and show the turn until it ends."""

    def work(configured: Path | None) -> Work:
        from fencepost.cli import run as command  # noqa: PLC0415

        options = command.RunOptions(
            prompt, model, agent, base_url, session, newest, directory, tuple(file or ()), as_json, configured
        )
        return lambda signals: command.run(options, signals)

    start(context, config, debug, work)


@database.command()
def upgrade(context: typer.Context, config: Config = None, debug: Debug = False) -> None:
    """Bring the database to this program's schema."""

    def work(configured: Path | None) -> Work:
        from fencepost.cli import database as command  # noqa: PLC0415

        return lambda signals: command.upgrade(configured, signals)

    start(context, config, debug, work)


@database.command()
def check(context: typer.Context, config: Config = None, debug: Debug = False) -> None:
    """Say whether the database is at this program's schema."""

    def work(configured: Path | None) -> Work:
        from fencepost.cli import database as command  # noqa: PLC0415

        return lambda signals: command.check(configured, signals)

    start(context, config, debug, work)


@database.command()
def rebuild(context: typer.Context, config: Config = None, debug: Debug = False) -> None:
    """Make the projection anew from the event log. Says what was different."""

    def work(configured: Path | None) -> Work:
        from fencepost.cli import database as command  # noqa: PLC0415

        return lambda signals: command.rebuild(configured, signals)

    start(context, config, debug, work)


def run_command_line() -> NoReturn:
    """Run the command line of this process. A wrong one is one line and exit code 2."""
    from fencepost.cli import arguments, terminal  # noqa: PLC0415
    from fencepost.domain.errors import InvalidInputError  # noqa: PLC0415
    from fencepost.process import leave  # noqa: PLC0415

    terminal.prepare()
    try:
        arguments.check_encoding(sys.argv[1:])
        code = app(prog_name="fencepost", standalone_mode=False) or 0
        sys.stdout.flush()
    except TyperException as error:
        terminal.Notices()(f"fencepost: {arguments.usage_error(error)}")
        code = 2
    except InvalidInputError as error:
        terminal.Notices()(f"fencepost: {error.message}")
        code = 2
    except BrokenPipeError:
        terminal.silence_output()
        code = 0
    except (typer.Abort, KeyboardInterrupt):
        code = 130
    leave(code)

"""`fencepost session ...`: the commands for sessions and their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Optional

import typer

from fencepost.cli.options import Agent, Config, Debug, Directory, Files, Json, Model, Work, help_alone, start

sessions = typer.Typer(
    help="Sessions: create, list, show, send input, follow, put away.",
    invoke_without_command=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Session = Annotated[str, typer.Argument(metavar="SESSION", help="The session's id: ses_...")]
Text = Annotated[str, typer.Argument(help="What to say; - reads it from standard input.")]
InputId = Annotated[
    Optional[str],  # noqa: UP045 - read by typer at run time
    typer.Option("--id", metavar="MSG", help="Id of the input, msg_...: sent twice, it counts once."),
]
Wait = Annotated[bool, typer.Option("--wait", help="Show the turn until it ends, as `run` does.")]


@sessions.callback()
def root(context: typer.Context) -> None:
    """Sessions: create, list, show, send input, follow, put away."""
    help_alone(context)


@sessions.command()
def create(
    context: typer.Context,
    session_id: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--id", metavar="ID", help="Its id, ses_...; one that is there already stays as it is."),
    ] = None,
    title: Annotated[Optional[str], typer.Option("--title", help="Its title.")] = None,  # noqa: UP045
    agent: Agent = None,
    model: Model = None,
    directory: Directory = None,
    as_json: Json = False,
    config: Config = None,
    debug: Debug = False,
) -> None:
    """Create a session and print its id. Needs only PostgreSQL."""

    def work(configured: Path | None) -> Work:
        from fencepost.cli import records as command  # noqa: PLC0415 - what a command does is imported with it

        given = command.Attributes(session_id, title, agent, model, directory)
        return lambda _: command.create(given, as_json=as_json, config=configured)

    start(context, config, debug, work)


@sessions.command(name="list")
def list_sessions(
    context: typer.Context,
    limit: Annotated[int, typer.Option("--limit", min=1, max=200, help="At most so many.")] = 20,
    search: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--search", metavar="TEXT", help="Only titles with this in them."),
    ] = None,
    directory: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--directory", help="Only sessions of this directory."),
    ] = None,
    archived: Annotated[bool, typer.Option("--archived", help="Those that are archived, and no others.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="All of them, whatever the limit.")] = False,
    cursor: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--cursor", help="The next page, as the notice of the page before has it."),
    ] = None,
    as_json: Json = False,
    config: Config = None,
    debug: Debug = False,
) -> None:
    """List sessions, newest first. Needs only PostgreSQL."""

    def work(configured: Path | None) -> Work:
        from fencepost.cli import records as command  # noqa: PLC0415

        wanted = command.Selection(limit, search, directory, archived, everything, cursor)
        return lambda _: command.list_sessions(wanted, as_json=as_json, config=configured)

    start(context, config, debug, work)


@sessions.command()
def show(
    context: typer.Context, session: Session, as_json: Json = False, config: Config = None, debug: Debug = False
) -> None:
    """Show a session: its cost, what waits, what it does. Needs only PostgreSQL."""

    def work(configured: Path | None) -> Work:
        from fencepost.cli import records as command  # noqa: PLC0415

        return lambda _: command.show(session, as_json=as_json, config=configured)

    start(context, config, debug, work)


@sessions.command()
def messages(
    context: typer.Context,
    session: Session,
    limit: Annotated[int, typer.Option("--limit", min=1, max=200, help="The newest ones, at most so many.")] = 50,
    everything: Annotated[bool, typer.Option("--all", help="All of them, whatever the limit.")] = False,
    as_json: Json = False,
    config: Config = None,
    debug: Debug = False,
) -> None:
    """Show a session's messages, oldest first. Needs only PostgreSQL."""

    def work(configured: Path | None) -> Work:
        from fencepost.cli import records as command  # noqa: PLC0415

        most = None if everything else limit
        return lambda _: command.messages(session, most, as_json=as_json, config=configured)

    start(context, config, debug, work)


@sessions.command()
def events(
    context: typer.Context,
    session: Session,
    after: Annotated[int, typer.Option("--after", min=-1, metavar="N", help="Only those after this sequence.")] = -1,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what happens, until Ctrl-C.")] = False,
    as_json: Json = False,
    config: Config = None,
    debug: Debug = False,
) -> None:
    """Show a session's durable events in order. Needs only PostgreSQL; --follow waits for one that is away."""

    def work(configured: Path | None) -> Work:
        from fencepost.cli import following as command  # noqa: PLC0415

        wanted = command.Range(session, after, follow)
        return lambda _: command.events(wanted, as_json=as_json, config=configured)

    start(context, config, debug, work)


@sessions.command()
def move(
    context: typer.Context,
    session: Session,
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="Where the session works from now on.")],
    workspace: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--workspace", metavar="ID", help="Whose workers see that directory; without it: all workers."),
    ] = None,
    as_json: Json = False,
    config: Config = None,
    debug: Debug = False,
) -> None:
    """Let a session work elsewhere. A turn that runs is interrupted and goes on there; files stay where they are."""

    def work(configured: Path | None) -> Work:
        from fencepost.cli import moving as command  # noqa: PLC0415

        return lambda _: command.move(session, directory, workspace, as_json=as_json, config=configured)

    start(context, config, debug, work)


@sessions.command()
def archive(
    context: typer.Context,
    session: Session,
    undo: Annotated[bool, typer.Option("--undo", help="Take it back.")] = False,
    as_json: Json = False,
    config: Config = None,
    debug: Debug = False,
) -> None:
    """Put a session away, out of the list. It can be used all the same. Needs only PostgreSQL."""

    def work(configured: Path | None) -> Work:
        from fencepost.cli import records as command  # noqa: PLC0415

        return lambda _: command.archive(session, undo=undo, as_json=as_json, config=configured)

    start(context, config, debug, work)


@sessions.command()
def delete(
    context: typer.Context,
    session: Session,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
    config: Config = None,
    debug: Debug = False,
) -> None:
    """Delete a session with its events and messages, for good. Asks first; where nobody can answer, give --yes."""
    from fencepost.cli import terminal  # noqa: PLC0415

    if not yes and terminal.is_interactive():
        yes = terminal.ask(f"Delete {session} with its events and messages, for good?")
        if not yes:
            raise typer.Abort

    def work(configured: Path | None) -> Work:
        from fencepost.cli import records as command  # noqa: PLC0415

        return lambda _: command.delete(session, sure=yes, as_json=as_json, config=configured)

    start(context, config, debug, work)


@sessions.command()
def prompt(
    context: typer.Context,
    session: Session,
    text: Text,
    input_id: InputId = None,
    file: Files = None,
    delivery: Annotated[
        Literal["steer", "queue"],
        typer.Option("--delivery", help="steer: seen at the next step; queue: when the session would become idle."),
    ] = "steer",
    no_resume: Annotated[
        bool, typer.Option("--no-resume", help="Only record it: it is seen with the next input. Needs no worker.")
    ] = False,
    wait: Wait = False,
    as_json: Json = False,
    config: Config = None,
    debug: Debug = False,
) -> None:
    """Send input and print its receipt. The turn is left to the workers.

    On this machine's own services the worker ends with the last fencepost command. So without `fencepost dev` or
    another command beside it, this one stays until the turn has ended.
    """

    def work(configured: Path | None) -> Work:
        from fencepost.cli import sending as command  # noqa: PLC0415

        how = command.How(delivery, not no_resume, wait, as_json)
        given = command.Input(session, text, input_id, tuple(file or ()))
        return lambda signals: command.prompt(given, how, configured, signals)

    start(context, config, debug, work)


@sessions.command()
def steer(
    context: typer.Context,
    session: Session,
    text: Text,
    input_id: InputId = None,
    file: Files = None,
    wait: Wait = False,
    as_json: Json = False,
    config: Config = None,
    debug: Debug = False,
) -> None:
    """Send input for the turn's next step. An idle session begins a turn. As `prompt --delivery steer`."""

    def work(configured: Path | None) -> Work:
        from fencepost.cli import sending as command  # noqa: PLC0415

        given = command.Input(session, text, input_id, tuple(file or ()))
        how = command.How("steer", wait=wait, as_json=as_json)
        return lambda signals: command.prompt(given, how, configured, signals)

    start(context, config, debug, work)


@sessions.command()
def queue(
    context: typer.Context,
    session: Session,
    text: Text,
    input_id: InputId = None,
    file: Files = None,
    wait: Wait = False,
    as_json: Json = False,
    config: Config = None,
    debug: Debug = False,
) -> None:
    """Send input for when the session would become idle. As `prompt --delivery queue`."""

    def work(configured: Path | None) -> Work:
        from fencepost.cli import sending as command  # noqa: PLC0415

        given = command.Input(session, text, input_id, tuple(file or ()))
        how = command.How("queue", wait=wait, as_json=as_json)
        return lambda signals: command.prompt(given, how, configured, signals)

    start(context, config, debug, work)


@sessions.command()
def resume(
    context: typer.Context, session: Session, as_json: Json = False, config: Config = None, debug: Debug = False
) -> None:
    """Join the turn that runs, or begin one with what waits. It is shown until it ends, as `run` does."""

    def work(configured: Path | None) -> Work:
        from fencepost.cli import sending as command  # noqa: PLC0415

        return lambda signals: command.resume(session, as_json=as_json, config=configured, signals=signals)

    start(context, config, debug, work)


@sessions.command()
def interrupt(
    context: typer.Context,
    session: Session,
    reason: Annotated[Optional[str], typer.Option("--reason", help="A note for the session's log.")] = None,  # noqa: UP045
    as_json: Json = False,
    config: Config = None,
    debug: Debug = False,
) -> None:
    """Stop the turn that runs; what it has shown stays. An idle session is left as it is."""

    def work(configured: Path | None) -> Work:
        from fencepost.cli import sending as command  # noqa: PLC0415

        return lambda _: command.interrupt(session, reason, as_json=as_json, config=configured)

    start(context, config, debug, work)

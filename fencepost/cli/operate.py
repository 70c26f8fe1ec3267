"""Commands that look and mend: what is configured, what works, and the state of local mode."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from fencepost.cli.options import Config, Debug, Json, Work, help_alone, start

_DOCTOR_CODES = (
    "Exit codes: 0 nothing is wrong (there may be warnings); 1 something is wrong; 3 a service, a worker or the "
    "model's provider cannot be reached. It starts nothing, changes nothing and shows no key. With --sessions: 1 "
    "a session is stuck, and was not repaired; 3 PostgreSQL or Temporal cannot be reached. What changes something is "
    "--repair."
)
_RECOVER_CODES = "Exit codes: 0 the scan is through; 3 a service cannot be reached, or went away on the way."

_LOCAL_CODES = "Exit codes: 0 it is done; 1 refused, since it is in use or the answer was no; 2 nobody can be asked."

configuration = typer.Typer(help="The configuration.", invoke_without_command=True, rich_markup_mode=None)
local = typer.Typer(help="The local servers and their state.", invoke_without_command=True, rich_markup_mode=None)


def add_to(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    app.command(epilog=_DOCTOR_CODES)(doctor)
    app.command(epilog=_RECOVER_CODES)(recover)
    app.add_typer(configuration, name="config")
    app.add_typer(local, name="local")


@configuration.callback()
def configuration_root(context: typer.Context) -> None:
    """The configuration."""
    help_alone(context)


@local.callback()
def local_root(context: typer.Context) -> None:
    """The local servers and their state."""
    help_alone(context)


def doctor(
    context: typer.Context,
    session_ids: Annotated[
        Optional[list[str]],  # noqa: UP045 - read by typer at run time
        typer.Argument(metavar="SESSION", help="With --sessions: look at these only, and at all of each."),
    ] = None,
    sessions: Annotated[
        bool,
        typer.Option(
            "--sessions",
            help="Look for sessions that are stuck: at most 200 of each kind of trouble, and compare the 20 most "
            "recently active ones with their logs.",
        ),
    ] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="With --sessions: repair what can be repaired safely.")
    ] = False,
    attempts: Annotated[
        Optional[int],  # noqa: UP045 - read by typer at run time
        typer.Option(
            min=2,
            help="With --sessions: from which attempt of its workflow task on a run counts as one that is stuck; "
            "5 unless it is given.",
        ),
    ] = None,
    as_json: Json = False,
    config: Config = None,
    debug: Debug = False,
) -> None:
    """Say what is wrong, and its mend. Looks at what is configured and what can be reached."""
    if not sessions and (session_ids or repair or attempts is not None):
        raise typer.BadParameter("sessions are looked at and repaired with --sessions: add it")

    def work(configured: Path | None) -> Work:
        if sessions:
            from fencepost.cli import session_checks  # noqa: PLC0415

            return lambda _: session_checks.examine(
                configured, session_ids or [], repair=repair, as_json=as_json, attempts=attempts
            )
        from fencepost.cli import doctor as command  # noqa: PLC0415

        return lambda signals: command.doctor(configured, as_json, signals)

    start(context, config, debug, work)


def recover(
    context: typer.Context,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    as_json: Json = False,
    config: Config = None,
    debug: Debug = False,
) -> None:
    """Set sessions going again that nobody works on.

    Those whose run was lost are settled, those whose wake was are started: what workers do by themselves, now.
    """

    def work(configured: Path | None) -> Work:
        from fencepost.cli import recover as command  # noqa: PLC0415

        return lambda _: command.recover(configured, dry_run=dry_run, as_json=as_json)

    start(context, config, debug, work)


@configuration.command()
def show(context: typer.Context, as_json: Json = False, config: Config = None, debug: Debug = False) -> None:
    """Show every setting, its value, and its origin. Secrets are withheld."""

    def work(configured: Path | None) -> Work:
        from fencepost.cli import config_show as command  # noqa: PLC0415

        return lambda signals: command.show(configured, as_json, signals)

    start(context, config, debug, work)


@local.command()
def status(context: typer.Context, as_json: Json = False, config: Config = None, debug: Debug = False) -> None:
    """Say which local servers run. Also who uses them, and how big their state is."""

    def work(configured: Path | None) -> Work:
        from fencepost.cli import local_state as command  # noqa: PLC0415

        return lambda signals: command.status(configured, as_json, signals)

    start(context, config, debug, work)


@local.command(epilog=_LOCAL_CODES)
def stop(
    context: typer.Context,
    force: Annotated[bool, typer.Option("--force", help="End the commands that use them, too.")] = False,
    config: Config = None,
    debug: Debug = False,
) -> None:
    """Stop what a killed command has left. With --force also what is in use."""

    def work(configured: Path | None) -> Work:
        from fencepost.cli import local_state as command  # noqa: PLC0415

        return lambda signals: command.stop(configured, force, signals)

    start(context, config, debug, work)


@local.command(epilog=f"{_LOCAL_CODES} What stays is `stack.lock`: it is the lock itself.")
def reset(
    context: typer.Context,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    config: Config = None,
    debug: Debug = False,
) -> None:
    """Delete the local state: all sessions of local mode, for good. Refused while it is used."""

    def work(configured: Path | None) -> Work:
        from fencepost.cli import local_state as command  # noqa: PLC0415

        return lambda signals: command.reset(configured, yes, signals)

    start(context, config, debug, work)

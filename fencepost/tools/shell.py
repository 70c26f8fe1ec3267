"""The bash tool: one command line, run to its end in the session's directory."""

from __future__ import annotations

import asyncio
import shutil

from pydantic import Field

from fencepost.domain.tools import TextItem, ToolFailure, ToolOutput
from fencepost.domain.wire import WireModel
from fencepost.tools.paths import locate
from fencepost.tools.processes import ProcessResult
from fencepost.tools.registry import Tool, ToolContext

DEFAULT_TIMEOUT_MS = 120_000
MAX_TIMEOUT_MS = 600_000


class BashInput(WireModel):
    command: str = Field(min_length=1, description="The command line to run.")
    workdir: str | None = Field(
        default=None, description="Directory to run in; the working directory of the session when left out."
    )
    timeout: int = Field(default=DEFAULT_TIMEOUT_MS, ge=1, le=MAX_TIMEOUT_MS, description="Time limit in milliseconds.")


class BashOutput(WireModel):
    """`exit_code` is None after a time limit; `size` is that of all output, in bytes, and may exceed what is kept."""

    exit_code: int | None
    timeout: bool
    truncated: bool
    size: int = Field(ge=0, alias="bytes")


def _external(directory: str, given: BashInput) -> tuple[str, ...]:
    return locate(directory, given.workdir or ".").external(is_directory=True)


def _command(directory: str, given: BashInput) -> tuple[str, ...]:  # noqa: ARG001 - as Tool.resources
    return (given.command,)


def _notes(result: ProcessResult, timeout_ms: int) -> list[str]:
    notes = []
    if result.output.truncated:
        notes.append(f"[output truncated: {result.output.total} bytes in total, beginning and end are kept]")
    if result.timed_out:
        notes.append(f"[timed out after {timeout_ms} ms; the command was stopped, the output so far is above]")
    elif result.exit_code < 0:
        notes.append(f"[ended by signal {-result.exit_code}]")
    elif result.exit_code:
        notes.append(f"[exit code {result.exit_code}]")
    return notes


async def _run(context: ToolContext, given: BashInput) -> ToolOutput:
    if "\0" in given.command:
        raise ToolFailure("Invalid tool input: command: holds a NUL character")
    place = await asyncio.to_thread(locate, context.invocation.directory, given.workdir or ".")
    shell = shutil.which("bash") or "/bin/sh"
    try:
        result = await context.runner.run(
            [shell, "-c", given.command],
            directory=str(place.path),
            timeout=given.timeout / 1000,
            effect_key=context.invocation.effect_key,
        )
    except OSError as error:
        raise ToolFailure(f"Cannot run the command in {place.resource}: {error.strerror}") from None
    notes = _notes(result, given.timeout)
    text = result.output.text()
    if notes:
        text += ("\n" if text and not text.endswith("\n") else "") + "\n".join(notes)
    structured = {
        "exitCode": None if result.timed_out else result.exit_code,
        "timeout": result.timed_out,
        "truncated": result.output.truncated,
        "bytes": result.output.total,
    }
    return ToolOutput(structured=structured, content=(TextItem(text=text or "(no output)"),))


BASH = Tool(
    name="bash",
    description=(
        "Run a command line with bash in the session's directory and give its output (standard output and error "
        "together) and exit code. Nothing can be typed into it, and everything it started is stopped when it ends: "
        "do not start servers in the background."
    ),
    input_model=BashInput,
    action="bash",
    run=_run,
    resources=_command,
    external=_external,
    output_model=BashOutput,
)

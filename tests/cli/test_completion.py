"""What the shell is told about the command, and what the command says about how it was called."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fencepost.cli import terminal
from tests.cli.command import Command

_SHELL = "_FENCEPOST_COMPLETE"


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("fencepost se", ["session"]),
        ("fencepost session arc", ["archive"]),
        ("fencepost session mo", ["move"]),
        ("fencepost session move ses_x . --wo", ["--workspace"]),
        ("fencepost session prompt ses_x hi --no-r", ["--no-resume"]),
        ("fencepost session prompt ses_x hi --delivery ", ["steer", "queue"]),
    ],
)
def test_commands_options_and_choices_are_completed(alone: Command, words: str, offered: list[str]) -> None:
    """One word a line on standard output, nothing else anywhere."""
    place = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = alone.given(**{_SHELL: "complete_bash"}, **place)()

    assert (done.code, done.out.splitlines(), done.err) == (0, offered, "")


def test_the_script_for_a_shell_is_one_that_it_can_read(alone: Command) -> None:
    """Bash itself says so."""
    done = alone.given(**{_SHELL: "source_bash"})()
    checked = subprocess.run(["bash", "-n"], input=done.out, check=False, capture_output=True, text=True)

    assert (done.code, done.err) == (0, "")
    assert "complete -o default -F _fencepost_completion fencepost" in done.out
    assert (checked.returncode, checked.stderr) == (0, "")


def test_advice_names_the_command_as_it_was_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By its bare name only where the shell would find just this one."""
    program = tmp_path / "my env" / "bin" / "fencepost"
    program.parent.mkdir(parents=True)
    program.touch(0o755)
    monkeypatch.chdir(tmp_path)

    def said(started: str, path: str) -> str:
        monkeypatch.setattr(sys, "argv", [started])
        monkeypatch.setenv("PATH", path)
        return terminal.command()

    assert said(str(program), str(program.parent)) == "fencepost"
    assert said(str(program), "/nowhere") == "'my env/bin/fencepost'"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert said(str(program), "/nowhere") == f"'{program}'"
    assert said("/somewhere/cli/__main__.py", "/nowhere").endswith(" -m fencepost.cli")

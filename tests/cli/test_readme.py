"""What the README shows is true: its configuration is accepted, its commands and contract are those of the code."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

from fencepost.config import load_settings
from fencepost.domain import contracts
from fencepost.domain.contracts import PromptInput, SessionInput, StartInput, Status, TurnResult
from fencepost.domain.inbox import Receipt
from fencepost.local.temporal import executable
from tests.house.project import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def _wire_names(kind: Any) -> set[str]:
    return {field.alias for field in kind.model_fields.values()}


def test_its_configuration_is_accepted(tmp_path: Path) -> None:
    """Key for key."""
    settings = []
    for block in re.findall(r"```toml\n(.*?)```", README, re.S):
        file = tmp_path / "fencepost.toml"
        file.write_text(block, encoding="utf-8")
        settings.append(load_settings(file, {}))

    assert len(settings) == 2
    assert settings[0].agents["reviewer"].permissions[0].effect == "deny"


def test_its_contract_is_the_code_s() -> None:
    """Every name and every field of the table, and none that is not there."""
    table = [line for line in README.splitlines() if re.match(r"\| (workflow|signal|update|query) ", line)]
    rows = {line.split("|")[2].strip(): line for line in table}
    text = " ".join(rows)
    for name in (
        *(contracts.SESSION_TURN, contracts.TASK_QUEUE, contracts.SIGNAL_STEER, contracts.SIGNAL_QUEUE),
        *(contracts.SIGNAL_INTERRUPT, contracts.SIGNAL_WAKE, contracts.UPDATE_PROMPT, contracts.UPDATE_RESUME),
        contracts.QUERY_STATUS,
    ):
        assert f"`{name}`" in text
    for row, kinds in {
        "`SessionTurn` on task queue `fencepost`": (SessionInput, PromptInput, TurnResult),
        "`prompt`": (PromptInput, Receipt),
        "`status`": (Status,),
    }.items():
        for kind in kinds:
            assert {name for name in _wire_names(kind) if not re.search(rf"\b{name}\b", rows[row])} == set()
    assert _wire_names(StartInput) == {"session", "prompt", "carried", "rejected", "goingOn"}


def test_its_temporal_commands_have_the_options_it_uses() -> None:
    """As far as that shows without a server: the program knows each option."""
    text = README.replace("\\\n", " ")
    commands = re.findall(r"^    temporal workflow (\S+)(.*)$", text, re.M)
    assert {name for name, _ in commands} == {
        *("start", "result", "signal-with-start", "execute-update-with-start", "signal", "query"),
    }
    for name, arguments in commands:
        shown = subprocess.run(
            [str(executable()), "workflow", name, "--help"], check=True, capture_output=True, text=True
        ).stdout
        assert [one for one in re.findall(r"(?<= )--[a-z-]+", arguments) if f"{one} " not in shown] == []

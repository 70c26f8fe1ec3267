"""Deterministic orchestration. Imports the domain and temporalio, nothing else."""

from workflows.runtime import served_workflows
from workflows.session_turn import SessionTurn

__all__ = ["SessionTurn", "served_workflows"]

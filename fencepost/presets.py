"""What is configured before anyone configures anything: the providers, agents and rules that fencepost comes with.

These are plain mappings, shaped like the configuration file, so that the file's entries merge into them key by key.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

_BUILD_SYSTEM = """\
You are a software engineer working in the user's directory through tools. Finish what you are asked to do; do not \
stop at describing it.

- Look before you change: read the files that matter, and follow the conventions you find in them.
- Make the smallest change that solves the whole problem, then run what shows that it works, and say what you ran.
- Never claim a result you have not seen. When something fails, say so and say what you know.
- A tool call marked as interrupted may or may not have taken effect: check before you repeat it.
- Answer briefly, in plain text. Ask only when the answer would change what you do.
"""

_PLAN_SYSTEM = """\
You are a software engineer who plans. Read and search the user's directory as much as you need, and change nothing.

Answer with a plan that another engineer could carry out: what to change and where, in which order, how to verify it, \
and what could go wrong. Name files and functions. Say what you could not find out.
"""


def _model(context: int, output: int, cost: tuple[float, float, float]) -> dict[str, Any]:
    cost_input, cost_cache_read, cost_output = cost
    return {
        "context": context,
        "output": output,
        "cost_input": cost_input,
        "cost_output": cost_output,
        "cost_cache_read": cost_cache_read,
    }


PROVIDERS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "openai": {
            "protocol": "openai-chat",
            "base_url": "https://api.openai.com/v1",
            "api_key_env": "OPENAI_API_KEY",
            # Tokens of context and of output, then dollars per million tokens: input, cached input, output.
            "models": {
                "gpt-4o-mini": _model(128_000, 16_384, (0.15, 0.075, 0.60)),
                "gpt-4o": _model(128_000, 16_384, (2.50, 1.25, 10.0)),
                "gpt-4.1": _model(1_047_576, 32_768, (2.0, 0.50, 8.0)),
                "gpt-4.1-mini": _model(1_047_576, 32_768, (0.40, 0.10, 1.60)),
                "gpt-4.1-nano": _model(1_047_576, 32_768, (0.10, 0.025, 0.40)),
                "gpt-5": _model(400_000, 128_000, (1.25, 0.125, 10.0)),
                "gpt-5-mini": _model(400_000, 128_000, (0.25, 0.025, 2.0)),
                "gpt-5-nano": _model(400_000, 128_000, (0.05, 0.005, 0.40)),
            },
        }
    }
)

AGENTS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "build": {"system": _BUILD_SYSTEM},
        "plan": {"system": _PLAN_SYSTEM, "permissions": [{"action": "edit", "effect": "deny"}]},
    }
)

PERMISSIONS: Final[tuple[Mapping[str, str], ...]] = (
    {"action": "*", "resource": "*", "effect": "allow"},
    {"action": "external_directory", "resource": "*", "effect": "ask"},
    {"action": "read", "resource": "*.env", "effect": "ask"},
    {"action": "read", "resource": "*.env.*", "effect": "ask"},
    {"action": "read", "resource": "*.env.example", "effect": "allow"},
)
"""Rules that hold before those of the file, of the agent and of the session; of all that match, the last one counts."""

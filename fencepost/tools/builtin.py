"""The tools that every worker offers."""

from __future__ import annotations

from typing import Any

from fencepost.tools.editing import editing_tools
from fencepost.tools.reading import READ
from fencepost.tools.registry import Registry, Tool
from fencepost.tools.search import search_tools
from fencepost.tools.shell import BASH


def builtin_tools() -> tuple[Tool[Any], ...]:
    """Give the built-in tools: bash, read, write, edit, glob, grep."""
    write, edit = editing_tools()
    return (BASH, READ, write, edit, *search_tools())


def builtin_registry() -> Registry:
    """Give the registry of the built-in tools."""
    return Registry(builtin_tools())

"""Names packages that some agents and environments need and that `miles` does not install."""

from __future__ import annotations

from importlib.util import find_spec

from milescli.core.errors import MachineError

EXTRA = "agents"
"""Extra of pyproject.toml that contains all of these packages."""


def require_package(module: str, *, needed_by: str) -> None:
    """Raise MachineError if `module` is not installed; imports nothing."""
    if find_spec(module) is None:
        raise MachineError(
            f"{needed_by} needs the package `{module.replace('_', '-')}`",
            why="it is not installed",
            fix=f"pip install 'miles-cli[{EXTRA}]'",
        )

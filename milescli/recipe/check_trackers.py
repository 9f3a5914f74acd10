"""Rules of `run.trackers`, `run.project` and `run.metrics_address`. Pure; called by `check`."""

from __future__ import annotations

import re

from milescli.core.errors import RecipeError
from milescli.recipe.machine import RunSettings

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 9464
_KEY = "run.metrics_address"
_ADDRESS = re.compile(r"(?:(?P<host>\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]*):)?(?P<port>[0-9]{1,5})\Z")


def check_trackers(settings: RunSettings) -> None:
    """Raises RecipeError."""
    if not settings.project.strip():
        raise RecipeError(
            "`run.project` is empty",
            why="trackers keep a run under the name of a project",
            fix="--set run.project=miles",
        )
    metrics_address(settings)


def metrics_address(settings: RunSettings) -> tuple[str, int] | None:
    """(host, port) to listen at; None: nothing listens. A port alone is of this machine alone.
    Raises RecipeError."""
    text = settings.metrics_address
    if text is None:
        return None
    match = _ADDRESS.match(text)
    if match is None or int(match["port"]) > 65535:
        raise RecipeError(
            f"`{_KEY}` cannot be `{text}`",
            why="it is HOST:PORT, or a port of this machine alone",
            fix=f"--set {_KEY}={LOOPBACK}:{DEFAULT_PORT}",
        )
    return (match["host"] or "").strip("[]") or LOOPBACK, int(match["port"])

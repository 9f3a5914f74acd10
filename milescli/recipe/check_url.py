"""What an address in a recipe must be. Pure; called by the rules of who is asked by HTTP."""

from __future__ import annotations

import re
from typing import Protocol
from urllib.parse import urlsplit

from milescli.core.errors import RecipeError

_HERE = ("localhost", "::1")
"""And 127.0.0.0/8."""


class HasKey(Protocol):
    """Settings of who is asked with a key."""

    api_key_env: str | None


def doubt_about_key(url: str | None, section: str, settings: HasKey) -> str | None:
    """A warning where the key of `section` would go over the network for all to read."""
    parts = urlsplit(url or "")
    host = parts.hostname or ""
    is_here = host in _HERE or re.fullmatch(r"127(\.\d+){3}", host)
    if settings.api_key_env is None or parts.scheme != "http" or is_here:
        return None
    return f"`{section}.api_key_env` goes to {host} by http, which others can read"


def check_url(url: str, *, key: str, section: str, example: str) -> None:
    """`key`: that holds it; `section`: that has an `api_key_env`. Raises RecipeError for what no
    request can go to, and for a secret, which would be written to disk."""
    try:
        parts = urlsplit(url)
        is_right = parts.scheme in ("http", "https") and bool(parts.hostname)
        has_secret = bool(parts.password or parts.username)
        assert parts.port is None or parts.port
    except (ValueError, AssertionError):
        is_right = has_secret = False
    if has_secret:
        raise RecipeError(
            f"`{key}` holds a user or a password",
            why="the recipe is written into the run's folder: secrets come from the environment",
            fix=f"--set {section}.api_key_env=NAME   # of the variable",
        )
    if not is_right:
        raise RecipeError(
            f"`{key}` cannot be `{url}`",
            why="it is no address of an HTTP server",
            fix=f"--set {key}={example}",
        )

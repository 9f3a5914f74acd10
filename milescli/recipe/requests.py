"""Defines how a recipe names a server that is queried over HTTP: the settings of requests, the
rules for its address, and when its key would be sent in clear text."""

from __future__ import annotations

import re
from typing import Annotated, Protocol
from urllib.parse import urlsplit

from pydantic import Field

from milescli.core.errors import RecipeError
from milescli.recipe.section import NonNegative, PositiveFloat, Section

EXAMPLE_URL = "http://127.0.0.1:8000/v1"
"""Example address of an OpenAI-compatible endpoint."""
_LOCAL_HOSTS = ("localhost", "::1")
"""Hosts that are this machine, in addition to 127.0.0.0/8."""


class Requests(Section):
    """How to send requests to an HTTP server."""

    api_key_env: str | None = None
    """Name of the environment variable that holds the API key, sent as `Authorization: Bearer`;
    null: no key is sent. The key is never written to disk."""
    timeout_s: PositiveFloat = 60.0
    """Timeout of one request."""
    retries: NonNegative = 3
    """Number of retries after a temporary failure (429, 5xx, no connection), with increasing
    pauses."""
    concurrency: Annotated[int, Field(ge=1, le=1024)] = 16
    """Number of requests at once."""


class HasKey(Protocol):
    """Settings of a server that may need an API key."""

    api_key_env: str | None


def check_url(url: str, *, key: str, section: str, example: str) -> None:
    """Raise RecipeError for an invalid address, and for a secret in it, which would be written to
    disk. `key` holds the address; `section` has an `api_key_env`."""
    try:
        parts = urlsplit(url)
        is_right = parts.scheme in ("http", "https") and bool(parts.hostname)
        has_secret = bool(parts.password or parts.username)
        assert parts.port is None or parts.port
    except (ValueError, AssertionError):
        is_right = has_secret = False
    if has_secret:
        raise RecipeError(
            f"`{key}` contains a user name or a password",
            why="the recipe is stored in the run's directory, so secrets must come from the "
            "environment",
            fix=f"--set {section}.api_key_env=NAME   # name of the variable",
        )
    if not is_right:
        raise RecipeError(
            f"`{key}` cannot be `{url}`",
            why="it is not the address of an HTTP server",
            fix=f"--set {key}={example}",
        )


def unencrypted_key_warning(url: str | None, section: str, settings: HasKey) -> str | None:
    """Return a warning if the API key of `section` would be sent over the network in clear text."""
    parts = urlsplit(url or "")
    host = parts.hostname or ""
    is_here = host in _LOCAL_HOSTS or re.fullmatch(r"127(\.\d+){3}", host)
    if settings.api_key_env is None or parts.scheme != "http" or is_here:
        return None
    return f"`{section}.api_key_env` goes to {host} by http, which others can read"

"""What the hub's client keeps on this machine: its cache and the token of its login. Asks nobody.
Called by the doctor and by the rest of this room."""

from __future__ import annotations

from pathlib import Path


def cache_dir() -> Path:
    """Where the client keeps what it fetched (HF_HOME, HF_HUB_CACHE)."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def cache_of(kind: str, name: str) -> Path:
    """The part of the cache that one repository has. `kind`: model or dataset."""
    return cache_dir() / f"{kind}s--{name.replace('/', '--')}"


def saved_token() -> str | None:
    """As the client finds it: HF_TOKEN, or the file that `hf auth login` writes."""
    from huggingface_hub import get_token

    return get_token()

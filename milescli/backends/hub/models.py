"""Models from the hub: whole, their config alone, or all but their weights. Knows no recipe; called
by runs, conversions and the doctor."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from milescli.backends.hub.fetch import Read, check_size, fetch_files
from milescli.backends.hub.repo import Repo, fetch_one, newest_commit, no_hub
from milescli.core.errors import CheckpointError

if TYPE_CHECKING:
    from milescli.console.output import Output

MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken", "LICENSE*")
NOT_MODEL_FILES = ("original/*", "metal/*", "consolidated*")
"""The same weights once more, in other frameworks' forms."""
MODEL_COPY = "--set model.path=/path/to/a/copy"


def fetch_model(
    name: str, *, revision: str | None, output: Output | None = None, instead: str = MODEL_COPY
) -> Path:
    """The folder of a model: config, safetensors, tokenizer. Raises CheckpointError, or
    MachineError where the disk is too small. `instead`: how the caller's user names a copy on a
    disk.

    Sizes are checked against the hub's; the hub's client checks them as they come.
    """

    def choose(paths: Sequence[str], _: Read) -> list[str]:
        return [p for p in paths if _matches(p, MODEL_FILES) and not _matches(p, NOT_MODEL_FILES)]

    repo = Repo(name=name, kind="model", revision=revision, instead=instead)
    files = fetch_files(repo, choose, check=check_size, output=output)
    config = files.get("config.json")
    if config is None:
        raise CheckpointError(
            f"the model `{name}` has no config.json",
            why="the hub lists "
            f"{', '.join(sorted(files)[:5]) or 'nothing that a model is made of'}",
            fix="--set model.path=NAME   # of a model in the format of transformers",
        )
    return config.parent


def fetch_config(name: str, *, revision: str | None, instead: str = MODEL_COPY) -> Path:
    """A folder with the model's config.json, a few kilobytes. Raises CheckpointError."""
    repo = Repo(name=name, kind="model", revision=revision, instead=instead)
    try:
        newest_commit(repo)
        online = True
    except no_hub():
        online = False
    return fetch_one(repo, "config.json", revision=revision, online=online).parent


def fetch_tokenizer(name: str, *, revision: str | None) -> Path:
    """A folder with what `fetch_model` gives but the weights: config and tokenizer. Raises
    CheckpointError."""
    patterns = [pattern for pattern in MODEL_FILES if pattern != "*.safetensors"]

    def choose(paths: Sequence[str], _: Read) -> list[str]:
        return [path for path in paths if "/" not in path and _matches(path, patterns)]

    repo = Repo(name=name, kind="model", revision=revision, instead=MODEL_COPY)
    fetch_files(repo, choose, check=check_size, output=None)
    return fetch_config(name, revision=revision)


def _matches(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(path, pattern) for pattern in patterns)

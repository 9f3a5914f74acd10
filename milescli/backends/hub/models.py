"""Downloads models from the hub: completely, their config alone, or all but their weights. Uses no
recipe; called by runs, conversions and the doctor. `outline_model` writes sparse files in place of
the weights, for `miles convert --dry-run`."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from milescli.backends.hub.fetch import Read, check_size, fetch_files
from milescli.backends.hub.repo import (
    Repo,
    fetch_one,
    first_line,
    newest_commit,
    no_hub,
    quiet_client,
)
from milescli.core.errors import CheckpointError
from milescli.core.units import format_bytes

if TYPE_CHECKING:
    from huggingface_hub.utils import SafetensorsFileMetadata

    from milescli.console.output import Output


def outline_model(name: str, *, revision: str | None, into: Path, output: Output) -> Path | None:
    """Fill the folder `into` as `fetch_model` would, but with sparse files in place of the weights:
    only their headers are downloaded, some kilobytes each. Return None if the hub is unreachable.
    Raises CheckpointError."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        HfHubHTTPError,
        NotASafetensorsRepoError,
        SafetensorsParsingError,
    )

    small = fetch_tokenizer(name, revision=revision)
    try:
        with quiet_client():
            files = HfApi().get_safetensors_metadata(name, revision=revision).files_metadata
    except no_hub():
        return None
    except (HfHubHTTPError, NotASafetensorsRepoError, SafetensorsParsingError) as error:
        raise CheckpointError(
            f"the weights of `{name}` cannot be inspected",
            why=f"{type(error).__name__}: {first_line(error)}",
            fix=f"hf download {name}   # then use the folder that it prints",
        ) from None
    for path in small.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            (into / path.name).symlink_to(path.resolve())
    size_bytes = sum(_write_sparse(into / file, header) for file, header in files.items())
    output.note(
        f"read the headers of {len(files)} files of `{name}` on the hub, without downloading "
        f"their {format_bytes(size_bytes)}"
    )
    return into


def _write_sparse(path: Path, metadata: SafetensorsFileMetadata) -> int:
    """Write a safetensors file with this header and no data. It is as long as the real one, but
    sparse, so it takes no disk space. Return its length in bytes."""
    header = {
        name: {"dtype": info.dtype, "shape": info.shape, "data_offsets": info.data_offsets}
        for name, info in metadata.tensors.items()
    }
    text = json.dumps(header).encode()
    data_bytes = max((info.data_offsets[1] for info in metadata.tensors.values()), default=0)
    size_bytes = 8 + len(text) + data_bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(size_bytes)
    return size_bytes


MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken", "LICENSE*")
NOT_MODEL_FILES = ("original/*", "metal/*", "consolidated*")
"""Copies of the same weights in other frameworks' formats."""
MODEL_COPY = "--set model.path=/path/to/a/copy"


def fetch_model(
    name: str, *, revision: str | None, output: Output | None = None, instead: str = MODEL_COPY
) -> Path:
    """Download a model (config, safetensors, tokenizer) and return its folder. Sizes are compared
    with the hub's; the hub's client checks the content as it arrives. `instead`: what the error
    tells the user to write in order to use a local copy. Raises CheckpointError, or MachineError if
    the disk is too small."""

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
            fix="--set model.path=NAME   # a model in the format of transformers",
        )
    return config.parent


def fetch_config(name: str, *, revision: str | None, instead: str = MODEL_COPY) -> Path:
    """Download the model's config.json, a few kilobytes, and return its folder. Raises
    CheckpointError."""
    repo = Repo(name=name, kind="model", revision=revision, instead=instead)
    try:
        newest_commit(repo)
        online = True
    except no_hub():
        online = False
    return fetch_one(repo, "config.json", revision=revision, online=online).parent


def fetch_tokenizer(name: str, *, revision: str | None) -> Path:
    """Download config and tokenizer without the weights, and return their folder. Raises
    CheckpointError."""
    patterns = [pattern for pattern in MODEL_FILES if pattern != "*.safetensors"]

    def choose(paths: Sequence[str], _: Read) -> list[str]:
        return [path for path in paths if "/" not in path and _matches(path, patterns)]

    repo = Repo(name=name, kind="model", revision=revision, instead=MODEL_COPY)
    fetch_files(repo, choose, check=check_size, output=None)
    return fetch_config(name, revision=revision)


def _matches(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(path, pattern) for pattern in patterns)

"""The outline of a model on the hub: all but the data of its weights. For what only looks (`miles
convert --dry-run`) and must fetch nothing large. Called by conversions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from milescli.backends.hub.models import fetch_tokenizer
from milescli.backends.hub.repo import first_line, no_hub, silent
from milescli.core.errors import CheckpointError
from milescli.core.units import format_bytes

if TYPE_CHECKING:
    from huggingface_hub.utils import SafetensorsFileMetadata

    from milescli.console.output import Output


def outline_model(name: str, *, revision: str | None, into: Path, output: Output) -> Path | None:
    """Fill the folder `into` as `fetch_model` would, with holes in place of the weights' bytes: the
    headers of their files are read, some kilobytes each. None where the hub cannot be asked. Raises
    CheckpointError."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        HfHubHTTPError,
        NotASafetensorsRepoError,
        SafetensorsParsingError,
    )

    small = fetch_tokenizer(name, revision=revision)
    try:
        with silent():
            files = HfApi().get_safetensors_metadata(name, revision=revision).files_metadata
    except no_hub():
        return None
    except (HfHubHTTPError, NotASafetensorsRepoError, SafetensorsParsingError) as error:
        raise CheckpointError(
            f"the weights of `{name}` cannot be looked at",
            why=f"{type(error).__name__}: {first_line(error)}",
            fix=f"hf download {name}   # then once more with the folder that it prints",
        ) from None
    for path in small.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            (into / path.name).symlink_to(path.resolve())
    size_bytes = sum(_write_hollow(into / file, header) for file, header in files.items())
    output.note(
        f"read the headers of {len(files)} files of `{name}` on the hub, and none of their "
        f"{format_bytes(size_bytes)}"
    )
    return into


def _write_hollow(path: Path, metadata: SafetensorsFileMetadata) -> int:
    """A safetensors file with this header and nothing behind it, as long as the real one: sparse,
    it takes no room. Returns its length."""
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

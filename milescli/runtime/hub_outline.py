"""The outline of a model on the hub: all but the data of its weights. For what only looks (`miles
convert --dry-run`) and must fetch nothing large. Called by `convert_source`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from milescli.core.errors import CheckpointError
from milescli.core.units import format_bytes
from milescli.runtime.hub import fetch_tokenizer, silent

if TYPE_CHECKING:
    from huggingface_hub.utils import SafetensorsFileMetadata

    from milescli.console.output import Output


def outline_model(name: str, *, revision: str | None, into: Path, output: Output) -> Path | None:
    """Fill the folder `into` as `fetch_model` would, with holes in place of the weights' bytes: the
    headers of their files are read, some kilobytes each. None where the hub cannot be asked. Raises
    CheckpointError."""
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        HfHubHTTPError,
        NotASafetensorsRepoError,
        OfflineModeIsEnabled,
        SafetensorsParsingError,
    )

    small = fetch_tokenizer(name, revision=revision)
    try:
        with silent():
            files = HfApi().get_safetensors_metadata(name, revision=revision).files_metadata
    except (httpx.TransportError, OfflineModeIsEnabled):
        return None
    except (HfHubHTTPError, NotASafetensorsRepoError, SafetensorsParsingError) as error:
        raise CheckpointError(
            f"the weights of `{name}` cannot be looked at",
            why=f"{type(error).__name__}: {(str(error).splitlines() or ['no further word'])[0]}",
            fix=f"hf download {name}   # then once more with the folder that it prints",
        ) from None
    for path in small.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            (into / path.name).symlink_to(path.resolve())
    size_bytes = sum(_write_hollow(into / file, told) for file, told in files.items())
    output.note(
        f"read the headers of {len(files)} files of `{name}` on the hub, and none of their "
        f"{format_bytes(size_bytes)}"
    )
    return into


def _write_hollow(path: Path, told: SafetensorsFileMetadata) -> int:
    """A safetensors file with this header and nothing behind it, as long as the real one: sparse,
    it takes no room. Returns its length."""
    header = {
        name: {"dtype": each.dtype, "shape": each.shape, "data_offsets": each.data_offsets}
        for name, each in told.tensors.items()
    }
    text = json.dumps(header).encode()
    size_bytes = (
        8 + len(text) + max((each.data_offsets[1] for each in told.tensors.values()), default=0)
    )
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(size_bytes)
    return size_bytes

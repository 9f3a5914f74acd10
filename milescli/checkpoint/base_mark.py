"""By what an adapter knows its base model: a digest of samples of its weight files, which other
weights do not share, and which costs no time."""

from __future__ import annotations

import hashlib
from pathlib import Path

from milescli.core.errors import CheckpointError

_SAMPLE_BYTES = 64 * 1024
_NUM_SAMPLES = 16
"""Of each file, from its first byte to its last."""


def mark_of(folder: Path) -> str:
    """SHA-256, hex, of names, sizes and samples of its safetensors files."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        last = max(0, size - _SAMPLE_BYTES)
        with file.open("rb") as opened:
            for number in range(_NUM_SAMPLES):
                opened.seek(last * number // (_NUM_SAMPLES - 1))
                digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def require_base(expected: str, base: Path, *, checkpoint: Path) -> None:
    """Raises CheckpointError where `base` is another model than the one whose mark is expected."""
    if mark_of(base) != expected:
        raise CheckpointError(
            f"the adapter of `{checkpoint}` is of another base model than `{base}`",
            why="the weight files there are not those that it was trained beside",
            fix="put the base model back as it was, or give it: --set model.path=FOLDER, --base "
            "FOLDER",
        )

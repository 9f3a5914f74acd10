"""The weight files of a Hugging Face folder, without torch: their names and index, whether they are
complete, and a digest that distinguishes base models. Called before a run is created, and by the
reader of the folder."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path

from milescli.checkpoint.safetensors_file import DOWNLOAD_AGAIN, SafetensorsFile
from milescli.core.errors import CheckpointError
from milescli.core.files import open_regular, read_json

INDEX_NAME = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_SAMPLE_BYTES = 64 * 1024
_NUM_SAMPLES = 16
"""Samples that the digest reads of each file, evenly spaced from its first byte to its last."""


def require_weights(folder: Path) -> dict[str, bool]:
    """Return name -> True if the tensor holds real numbers. Raises CheckpointError if a file is
    missing or truncated, or contradicts the index."""
    names, index = weight_file_names(folder)
    files: dict[str, SafetensorsFile] = {}
    try:
        for name in names:
            files[name] = SafetensorsFile(folder / name)
        file_by_tensor(folder, files, index)
        return {name: at.is_real for file in files.values() for name, at in file.tensors.items()}
    finally:
        for file in files.values():
            file.close()


def digest_of(folder: Path) -> str:
    """Return a digest that identifies a base model: SHA-256, hex, over the name, the size and
    samples of each safetensors file. Reading the samples takes no noticeable time."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        last = max(0, size - _SAMPLE_BYTES)
        with open_regular(file) as opened:
            for number in range(_NUM_SAMPLES):
                opened.seek(last * number // (_NUM_SAMPLES - 1))
                digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def require_base(expected: str, base: Path, *, checkpoint: Path) -> None:
    """Raise CheckpointError if `base` is not the model whose digest is `expected`."""
    if digest_of(base) != expected:
        raise CheckpointError(
            f"the adapter of `{checkpoint}` belongs to another base model than `{base}`",
            why="its weight files differ from those that the adapter was trained with",
            fix="restore the base model, or name it: --set model.path=FOLDER, --base FOLDER",
        )


def files_of_tensors(folder: Path) -> dict[str, str]:
    """Return name of each tensor of the folder -> its file. Raises CheckpointError as
    `require_weights`."""
    names, index = weight_file_names(folder)
    with ExitStack() as stack:
        files = {
            name: stack.enter_context(closing(SafetensorsFile(folder / name))) for name in names
        }
        return file_by_tensor(folder, files, index)


def file_by_tensor(
    folder: Path, files: Mapping[str, SafetensorsFile], index: Mapping[str, str]
) -> dict[str, str]:
    """Return name of each tensor -> its file. Raises CheckpointError if two files have the same
    tensor, or if the index names another file."""
    where: dict[str, str] = {}
    for file_name, file in files.items():
        for name in file.tensors:
            if name in where:
                why = f"`{name}` is in `{where[name]}` and in `{file_name}`"
                raise CheckpointError(
                    f"`{folder}` has no usable weights", why=why, fix=DOWNLOAD_AGAIN
                )
            where[name] = file_name
    for name, file_name in index.items():
        if where.get(name) != file_name:
            place = f"it is in `{where[name]}`" if name in where else "it is in no file"
            why = f"{INDEX_NAME} says that `{name}` is in `{file_name}`, and {place}"
            raise CheckpointError(f"`{folder}` has no usable weights", why=why, fix=DOWNLOAD_AGAIN)
    return where


def weight_file_names(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return (names of the weight files, the index: tensor -> file). The index is empty if the
    folder has no index file. Raises CheckpointError if a file is missing or the index is
    unreadable."""
    index = folder / INDEX_NAME
    weight_map: dict[str, str] = {}
    if index.exists():
        try:
            weight_map = dict(read_json(index)["weight_map"])
            names = sorted(set(weight_map.values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"cannot read `{index}`", why=f"{type(error).__name__}: {error}", fix=DOWNLOAD_AGAIN
            ) from error
        if outside := [name for name in names if Path(name).name != name]:
            raise CheckpointError(
                f"cannot read `{index}`",
                why=f"`{outside[0]}` is outside the folder",
                fix=DOWNLOAD_AGAIN,
            )
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
    missing = [name for name in names if not (folder / name).exists()]
    if missing or not names:
        raise CheckpointError(
            f"`{folder}` has no usable weights", why=_why_none(folder, missing), fix=DOWNLOAD_AGAIN
        )
    return names, weight_map


def _why_none(folder: Path, missing: list[str]) -> str:
    if missing:
        return f"`{missing[0]}` is named by the index but not there"
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        return (
            f"it holds no *.safetensors file, and `{pickles[0]}` is a pickle: reading one can "
            "run code that is hidden in it"
        )
    return "it holds no *.safetensors file"

"""Which safetensors files a Hugging Face folder has, and whether they fit its index: by names and
headers alone, without torch. Called before a run is made, and by the reader of the folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from milescli.checkpoint.safetensors_file import FETCH_AGAIN, SafetensorsFile
from milescli.core.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def require_weights(folder: Path) -> None:
    """Raises CheckpointError where a file is missing or cut off, or the index says otherwise."""
    names, index = file_names(folder)
    files: dict[str, SafetensorsFile] = {}
    try:
        for name in names:
            files[name] = SafetensorsFile(folder / name)
        one_place(folder, files, index)
    finally:
        for file in files.values():
            file.close()


def one_place(
    folder: Path, files: Mapping[str, SafetensorsFile], index: Mapping[str, str]
) -> dict[str, str]:
    """Name of a tensor -> name of its file. Raises CheckpointError where two files have it, or the
    index says another."""
    where: dict[str, str] = {}
    for file_name, file in files.items():
        for name in file.tensors:
            if name in where:
                why = f"`{name}` is in `{where[name]}` and in `{file_name}`"
                raise CheckpointError(f"`{folder}` has no usable weights", why=why, fix=FETCH_AGAIN)
            where[name] = file_name
    for name, file_name in index.items():
        if where.get(name) != file_name:
            place = f"it is in `{where[name]}`" if name in where else "it is in no file"
            why = f"{INDEX_NAME} says that `{name}` is in `{file_name}`, and {place}"
            raise CheckpointError(f"`{folder}` has no usable weights", why=why, fix=FETCH_AGAIN)
    return where


def file_names(folder: Path) -> tuple[list[str], dict[str, str]]:
    """(names of the files, the index: tensor -> file, empty where there is none)"""
    index = folder / INDEX_NAME
    weight_map: dict[str, str] = {}
    if index.exists():
        try:
            weight_map = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            names = sorted(set(weight_map.values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"cannot read `{index}`", why=f"{type(error).__name__}: {error}", fix=FETCH_AGAIN
            ) from error
        if outside := [name for name in names if Path(name).name != name]:
            raise CheckpointError(
                f"cannot read `{index}`",
                why=f"`{outside[0]}` lies outside the folder",
                fix=FETCH_AGAIN,
            )
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
    missing = [name for name in names if not (folder / name).exists()]
    if missing or not names:
        raise CheckpointError(
            f"`{folder}` has no usable weights", why=_why_none(folder, missing), fix=FETCH_AGAIN
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

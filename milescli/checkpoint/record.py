"""Records the layout of a Hugging Face folder (files, names, dtypes and their order), so that the
conversion back writes the same; and copies the files besides the weights. Called by convert in both
directions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from milescli.checkpoint.base import MANIFEST_NAME, RECORD_NAME
from milescli.checkpoint.hf_folder import HfReader
from milescli.checkpoint.safetensors_file import dtype_name
from milescli.checkpoint.source import Source
from milescli.checkpoint.weight_files import INDEX_NAME
from milescli.core.errors import CheckpointError
from milescli.core.files import read_json
from milescli.models.base import CONFIG_NAME, quantization_config, read_config

PASSTHROUGH_PREFIX = "passthrough"
_WEIGHT_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".distcp",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".index.json",
)
_CARRIED_FOLDERS = ("additional_chat_templates",)
_OURS = (RECORD_NAME, MANIFEST_NAME)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedFile:
    """Records the layout of one file of weights."""

    name: str
    metadata: dict[str, str]
    tensors: tuple[str, ...]
    """Names in the order of their data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Records the files of one folder."""

    dtypes: dict[str, str]
    """Name of a tensor -> dtype as safetensors writes it; in order."""
    files: tuple[RecordedFile, ...]
    """Empty if the folder was quantised: no file had the plain tensors."""
    index: dict[str, object] | None
    """`metadata` of the index file; None if there was no index."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Name of a tensor -> its shape; empty in records of older versions."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor, or None if the record does not have it."""
        return self.shapes.get(name)

    def to_json(self) -> str:
        """Return the JSON to write to disk."""
        files = [
            {"name": file.name, "metadata": file.metadata, "tensors": list(file.tensors)}
            for file in self.files
        ]
        whole = {"dtypes": self.dtypes, "shapes": self.shapes, "files": files, "index": self.index}
        return json.dumps(whole) + "\n"


def record_of(source: Source) -> Record:
    """Record the layout of an open folder."""
    shapes = {name: source.shape(name) for name in source.names()}
    if not isinstance(source, HfReader):
        return Record(
            dtypes={name: dtype_name(source.dtype(name)) for name in source.names()},
            files=(),
            index=None,
            shapes=shapes,
        )
    files = []
    for name, file in source.files.items():
        order = sorted(
            file.tensors,
            key=lambda tensor: (file.tensors[tensor].begin, file.tensors[tensor].num_bytes),
        )
        files.append(RecordedFile(name=name, metadata=file.metadata, tensors=tuple(order)))
    dtypes = {
        tensor: source.files[file.name].tensors[tensor].dtype
        for file in files
        for tensor in file.tensors
    }
    index = _index(source.folder)
    return Record(dtypes=dtypes, files=tuple(files), index=index, shapes=shapes)


def _index(folder: Path) -> dict[str, object] | None:
    path = folder / INDEX_NAME
    if not path.exists():
        return None
    metadata = read_json(path).get("metadata")
    return metadata if isinstance(metadata, dict) else {}


def read_record(folder: Path) -> Record | None:
    """Read the record that convert left in `hf/`; None if there is none. Raises CheckpointError if
    it is invalid."""
    path = folder / RECORD_NAME
    if not path.exists():
        return None
    try:
        raw = read_json(path)
        files = tuple(
            RecordedFile(
                name=str(file["name"]),
                metadata=dict(file["metadata"]),
                tensors=tuple(file["tensors"]),
            )
            for file in raw["files"]
        )
        record = Record(
            dtypes=dict(raw["dtypes"]),
            files=files,
            index=raw["index"],
            shapes={name: tuple(shape) for name, shape in raw.get("shapes", {}).items()},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"cannot read `{path}`",
            why=f"{type(error).__name__}: {error}",
            fix="convert the model again",
        ) from error
    wrong = [f"`{file.name}` is outside the folder" for file in files if _is_outside(file.name)]
    listed = [tensor for file in files for tensor in file.tensors]
    if files and sorted(map(str, listed)) != sorted(record.dtypes):
        wrong.append("its files do not hold each of its tensors once")
    if wrong:
        raise CheckpointError(f"cannot read `{path}`", why=wrong[0], fix="convert the model again")
    return record


def _is_outside(name: str) -> bool:
    return Path(name).name != name


def copy_non_weights(source: Path, target: Path) -> list[str]:
    """Copy everything except weights: config, generation config, tokenizer, chat template, license.
    Return the names."""
    paths = non_weight_files(source)
    target.mkdir(parents=True, exist_ok=True)
    for path in paths:
        if path.is_dir():
            shutil.copytree(path, target / path.name, dirs_exist_ok=True, symlinks=False)
        else:
            shutil.copyfile(path, target / path.name)
    return [path.name for path in paths]


def non_weight_files(source: Path) -> list[Path]:
    """Return the files that `copy_non_weights` copies. Raises CheckpointError if one of them is a
    link out of the folder: its target is not part of the model, and must not be published with
    it."""
    paths = [
        path
        for path in sorted(source.iterdir())
        if (path.is_dir() and path.name in _CARRIED_FOLDERS)
        or (
            path.is_file()
            and not path.name.startswith(".")
            and path.name not in _OURS
            and not path.name.endswith(_WEIGHT_SUFFIXES)
        )
    ]
    homes = [source.resolve()]
    if homes[0].parent.name == "snapshots":  # the hub's cache: files are links to its blobs
        homes.append(homes[0].parent.parent / "blobs")
    for path in paths:
        for inner in (path, *path.rglob("*")) if path.is_dir() else (path,):
            target = inner.resolve()
            if not any(target.is_relative_to(home) for home in homes):
                raise CheckpointError(
                    f"`{inner}` points outside the model's folder",
                    why=f"it is a link to {target}, and a copy of the model would include that "
                    "content",
                    fix=[
                        f"rm {inner}   # if it is not part of the model",
                        f"cp --remove-destination {target} {inner}   # if it is part of the model",
                    ],
                )
    return paths


def write_plain_config(folder: Path, *, dtype: str | None) -> None:
    """Write the config.json of weights that are now plain: without the quantisation, and with
    `dtype` if given. If nothing changes, the file stays identical byte for byte."""
    before = read_config(folder)
    after = {key: value for key, value in before.items() if key != "quantization_config"}
    nested = after.get("text_config")
    if isinstance(nested, Mapping):
        after["text_config"] = {
            key: value for key, value in nested.items() if key != "quantization_config"
        }
    if quantization_config(before) is not None:
        after.pop("expert_dtype", None)
        dtype = dtype or "bfloat16"
    if dtype is not None:
        holders = [after, *([after["text_config"]] if isinstance(nested, Mapping) else [])]
        for holder in holders:
            assert isinstance(holder, dict)
            for key in ("dtype", "torch_dtype"):
                if key in holder:
                    holder[key] = dtype
        if not any(key in holder for holder in holders for key in ("dtype", "torch_dtype")):
            after["dtype"] = dtype
    if after != before:
        (folder / CONFIG_NAME).write_text(json.dumps(after, indent=2) + "\n", encoding="utf-8")

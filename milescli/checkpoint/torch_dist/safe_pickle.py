"""A checkpoint's `.metadata` is a pickle, and reading one can run code. This reads it first, with
only those classes at hand that torch and Megatron write there; Megatron may read it after. Tensors
are read by torch with `weights_only`, which has a list of its own."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import TYPE_CHECKING

from milescli.checkpoint.base import METADATA_NAME
from milescli.core.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

_MODULES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.planner",
    "torch.distributed.checkpoint.filesystem",
)
_NAMES = {
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
}


class _Refused(pickle.UnpicklingError):
    pass


class _Plain:
    """In the place of Megatron's own additions, which hold plans of its next save."""


_MEGATRONS = {
    ("megatron.core.dist_checkpointing.strategies.torch", name)
    for name in ("MCoreMetadata", "MCoreSavePlan")
}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (module, name) in _MEGATRONS:
            return _Plain
        named = (
            super().find_class(module, name)
            if (module, name) in _NAMES
            or module in _MODULES
            or (module == "torch" and "." not in name)
            else None
        )
        import torch

        plain = (module, name) in _NAMES or isinstance(
            named, torch.dtype | torch.layout | torch.memory_format
        )
        if not plain and not (isinstance(named, type) and named.__module__ in _MODULES):
            raise _Refused(f"{module}.{name}")
        return named


def require_known_pickles(folder: Path) -> None:
    """Raises CheckpointError where the checkpoint has no metadata, or one that holds anything but
    torch's own plain data."""
    read_metadata(folder)


def read_metadata(folder: Path) -> Metadata:
    """`.metadata`. Raises CheckpointError where there is none, or it holds anything but torch's own
    plain data."""
    path = folder / METADATA_NAME
    try:
        with path.open("rb") as file:
            metadata = _PlainUnpickler(file).load()
        if not hasattr(metadata, "state_dict_metadata"):
            raise _Refused(type(metadata).__name__)
    except OSError as error:
        raise CheckpointError(
            f"`{folder}` is not a checkpoint of the trainer",
            why=f"`{METADATA_NAME}` cannot be read: {error.strerror}",
            fix="miles resume RUN   # takes the newest complete checkpoint",
        ) from error
    except _Refused as error:
        raise CheckpointError(
            f"the checkpoint `{folder}` is refused",
            why=f"`{METADATA_NAME}` would load `{error}`, which the trainer never writes: reading "
            "it could run foreign code",
            fix="use a checkpoint that you made",
        ) from error
    except Exception as error:  # a torn pickle may raise anything
        raise CheckpointError(
            f"the checkpoint `{folder}` is corrupt",
            why=f"`{METADATA_NAME}` cannot be read: {type(error).__name__}: {error}",
            fix="resume from another checkpoint of the run",
        ) from error
    return metadata

"""Checks that a Hugging Face folder fits its config.json: every tensor is used exactly once, none
is missing or left over, all have their shapes. Reads headers, not numbers. Called by convert before
it writes anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from milescli.core.errors import CheckpointError
from milescli.core.units import format_few
from milescli.models import WeightTable, load_facts
from milescli.models import table as table_of
from milescli.models.base import Entry
from milescli.models.mtp import require_mtp_weights, with_mtp

if TYPE_CHECKING:
    import torch

    from milescli.checkpoint.source import Source

_DOWNLOAD_AGAIN = "fetch the model again"
_OUTPUT = "lm_head.weight"
_EMBEDDING = "embedding.word_embeddings.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderMatch:
    """Assigns each tensor of a folder to its use."""

    table: WeightTable
    """The weight table, in the forms in which the folder stores tensors, without MTP layers that it
    lacks."""
    passthrough: tuple[str, ...]
    """Tensors that are copied, as Megatron does not store them."""
    ignored: tuple[str, ...]
    """Tensors without content."""
    tied_copy: str | None
    """Output layer that repeats the tied embedding, if the folder has one."""
    lacks_mtp: int
    """MTP layers that config.json names and the folder does not have."""

    def dtype(self, entry: Entry, source: Source) -> torch.dtype:
        """Return the dtype of an entry's Megatron tensor: the widest of its disk tensors, so that
        none is rounded."""
        import torch

        widest = source.dtype(entry.hf[0])
        for name in entry.hf[1:]:
            widest = torch.promote_types(widest, source.dtype(name))
        return widest

    @property
    def num_tensors(self) -> int:
        """Return the number of tensors of the folder that are used."""
        return len(self.table.hf_shapes()) + len(self.passthrough) + (self.tied_copy is not None)


def match(source: Source, table: WeightTable) -> FolderMatch:
    """Match the folder's tensors with the table. Raises CheckpointError for a tensor that is
    missing, left over or misshapen, and for a tied output layer that differs from the embedding."""
    names = source.names()
    by_config, table = table, table.as_on_disk(names, source.shape)
    # releases that were saved again by transformers have lost their MTP layers, and config.json
    # still names them
    lacks_mtp = _num_mtp(by_config) - _num_mtp(table)
    wanted = table.hf_shapes()
    there = set(names)
    missing = [name for name in wanted if name not in there]
    if missing:
        raise _missing_error(source.folder, missing, names, table=table)
    for name, shape in wanted.items():
        if (stored := source.shape(name)) != shape:
            raise CheckpointError(
                f"`{source.folder}`: weights and config.json do not match",
                why=f"`{name}` has shape {list(stored)} on disk, but {list(shape)} according to "
                "config.json",
                fix=_DOWNLOAD_AGAIN,
            )
    require_kinds(table, source.is_real, folder=source.folder)
    left = [name for name in names if name not in wanted]
    passthrough = [name for name in left if table.is_passthrough(name)]
    ignored = [name for name in left if table.is_ignored(name) and name not in set(passthrough)]
    extra = sorted(set(left) - set(passthrough) - set(ignored))
    tied = [name for name in extra if table.facts.tied_embeddings and name.endswith(_OUTPUT)]
    if tied:
        _require_equal(source, tied[0], table.by_megatron[_EMBEDDING].hf[0])
        extra.remove(tied[0])
    if extra:
        raise CheckpointError(
            f"`{source.folder}` has {_tensors(len(extra))} that config.json does not explain",
            why=f"{_format_names(extra)}: miles does not know where "
            f"{'they belong' if len(extra) > 1 else 'it belongs'} in a "
            f"`{table.facts.family}` model, and it never drops a weight silently",
            fix=f"{_DOWNLOAD_AGAIN}, or correct config.json",
        )
    return FolderMatch(
        table=table,
        passthrough=tuple(passthrough),
        ignored=tuple(ignored),
        tied_copy=tied[0] if tied else None,
        lacks_mtp=lacks_mtp,
    )


def kind_faults(table: WeightTable, is_real: Callable[[str], bool | None]) -> list[str]:
    """Return a fault for each tensor that has integers where the family has real numbers, or vice
    versa. `is_real`: returns True if the tensor of this name holds real numbers; None if there is
    none."""
    return [
        f"`{name}` holds {'whole' if entry.rule.integers else 'real'} numbers in this family, and "
        f"{'real' if entry.rule.integers else 'whole'} ones (or truth values) on disk"
        for entry in table.entries
        for name in entry.hf
        if is_real(name) is entry.rule.integers
    ]


def require_kinds(
    table: WeightTable, is_real: Callable[[str], bool | None], *, folder: Path
) -> None:
    """Raise CheckpointError if there are `kind_faults`."""
    if faults := kind_faults(table, is_real):
        raise CheckpointError(
            f"`{folder}`: {_tensors(len(faults))} cannot be weights",
            why=format_few(faults, 1, joint="; "),
            fix=f"{_DOWNLOAD_AGAIN}, or save it again in the dtype of config.json",
        )


def _num_mtp(table: WeightTable) -> int:
    return len({entry.mtp for entry in table.entries if entry.mtp is not None})


def _missing_error(
    folder: Path, missing: list[str], names: list[str], *, table: WeightTable
) -> CheckpointError:
    output = [name for name in missing if name.endswith(_OUTPUT)]
    if output and len(missing) == 1:
        return CheckpointError(
            f"`{folder}`: config.json and weights contradict each other about the output layer",
            why="config.json has `tie_word_embeddings: false`, but the folder has no "
            f"`{output[0]}`",
            fix="set `tie_word_embeddings` to true in config.json if the embedding is meant to "
            "be shared, or download the model again",
        )
    why = (
        f"{_format_names(missing)} {'are' if len(missing) > 1 else 'is'} not there, and a "
        f"`{table.facts.family}` model of this config.json has"
    )
    return CheckpointError(
        f"`{folder}` lacks {_tensors(len(missing))} of {len(table.hf_shapes())}",
        why=f"{why} {'them' if len(missing) > 1 else 'it'}; the folder contains {len(names)} "
        "tensors",
        fix=_DOWNLOAD_AGAIN,
    )


def _require_equal(source: Source, output: str, embedding: str) -> None:
    import torch

    equal = source.shape(output) == source.shape(embedding)
    rows = source.shape(embedding)[0] if equal else 0
    step = max(1, 2**26 // max(1, source.shape(embedding)[1]))
    for start in range(0, rows, step):
        parts = [
            source.read(name, start=start, end=min(start + step, rows))
            for name in (output, embedding)
        ]
        equal = equal and torch.equal(parts[0], parts[1])
    if not equal:
        raise CheckpointError(
            f"`{source.folder}`: config.json and weights contradict each other about the output "
            "layer",
            why=f"config.json has `tie_word_embeddings: true`, but `{output}` differs from "
            f"`{embedding}`, so one of them would be lost",
            fix="set `tie_word_embeddings` to false in config.json if both were trained, or "
            "download the model again",
        )


def _tensors(count: int) -> str:
    return f"{count} tensor{'s' if count != 1 else ''}"


def _format_names(names: Sequence[str]) -> str:
    return format_few([f"`{name}`" for name in names], 3)


def require_mtp_layer(folder: Path) -> None:
    """Raise CheckpointError if the folder lacks an MTP layer, or has one that the trainer cannot
    compute."""
    from milescli.checkpoint.source import open_source  # imports torch

    wanted = table_of(with_mtp(load_facts(folder)))
    with open_source(folder) as source:
        names = source.names()
        require_mtp_weights(wanted.as_on_disk(names), names, folder=str(folder))

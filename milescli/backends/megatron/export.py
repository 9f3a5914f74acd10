"""A trainer's checkpoint -> a Hugging Face folder, in one process, without a process group, a port or Megatron itself: torch reads the
`torch_dist` files tensor by tensor, and the table of `models` names and splits them. Called by export and eval."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from milescli.checkpoint.torch_dist.safe_pickle import require_known_pickles
from milescli.checkpoint.hf_folder import write_tensors
from milescli.checkpoint.torch_dist.keys import names_of
from milescli.core.errors import CheckpointError
from milescli.models import Entry, WeightTable, load_facts, table
from milescli.models.base import CONFIG_NAME

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".safetensors.index.json", ".bin.index.json")


def checkpoint_to_hf(
    folder: Path, model_dir: Path, out_dir: Path, *, dtype: str | None = None, max_shard_bytes: int = 4 * 2**30
) -> int:
    """Write the weights of `folder` (which a trainer's `save` wrote) as safetensors into `out_dir`, with config and tokenizer of
    `model_dir`. `dtype`: float32, bfloat16 or float16; None: as config.json says. Returns the bytes of the weights.

    `out_dir` appears when it is whole. Raises CheckpointError where it is there already, or the checkpoint cannot be used.
    """
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise CheckpointError(f"`{out_dir}` is there already", why="an export does not overwrite", fix=f"rm -r {out_dir}")
    facts = load_facts(model_dir)
    target = dtype or facts.dtype
    require_known_pickles(folder)
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    part = out_dir.with_name(f".{out_dir.name}.part-{os.getpid()}")
    part.mkdir()
    try:
        lines = table(facts)
        wide = {name for entry in lines.entries if entry.rule.float32 for name in entry.hf}
        size = write_tensors(
            part,
            (
                (name, tensor.to(torch.float32 if name in wide else getattr(torch, target)))
                for name, tensor in read_hf_tensors(folder, lines)
            ),
            max_shard_bytes=max_shard_bytes,
        )
        _carry_over(model_dir, part, dtype=target)
        if out_dir.exists():
            out_dir.rmdir()
        part.rename(out_dir)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return size


def read_hf_tensors(folder: Path, weights: WeightTable) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, whole tensor) of every weight, one line of the table in memory at a time."""
    reader = FileSystemReader(folder)
    metadata = reader.read_metadata()
    for names, unit in groupby((entry for entry in weights.entries if entry.mtp is None), key=lambda entry: entry.hf):
        entries = list(unit)
        rows = [_read_disk(reader, metadata, entry, folder=folder) for entry in entries]
        tensors = [torch.stack(column) for column in zip(*rows, strict=True)] if entries[0].rule.stacked else rows[0]
        yield from zip(names, tensors, strict=True)


def _read_disk(reader: FileSystemReader, metadata: Metadata, entry: Entry, *, folder: Path) -> list[torch.Tensor]:
    """Disk tensors of an entry (of one expert where they are stacked)."""
    tensor = _read_megatron(reader, metadata, entry, folder=folder)
    if entry.rule.sharding.padded:
        tensor = tensor[: sum(shape[0] for shape in entry.shapes)]
    disk = entry.rule.to_disk(entry.rule.split(tensor, entry.facts), entry.facts)
    for part, shape in zip(disk, entry.shapes, strict=True):
        if tuple(part.shape) != shape:
            raise _other_model(folder, entry, found=tuple(part.shape), expected=shape)
    return disk


def _read_megatron(reader: FileSystemReader, metadata: Metadata, entry: Entry, *, folder: Path) -> torch.Tensor:
    """The whole Megatron tensor of an entry, whose parts may lie under names of their own."""
    key = _key_on_disk(entry, metadata)
    parts = [_read(reader, metadata, key + suffix, folder=folder) for suffix in entry.rule.suffixes or ("",)]
    tensor = entry.rule.fuse(parts, entry.facts) if entry.rule.suffixes else parts[0]
    return tensor if entry.expert is None else tensor[entry.expert]


def _read(reader: FileSystemReader, metadata: Metadata, key: str, *, folder: Path) -> torch.Tensor:
    stored = metadata.state_dict_metadata.get(key)
    if not isinstance(stored, TensorStorageMetadata):
        raise CheckpointError(
            f"the checkpoint `{folder}` lacks `{key}`",
            why="config.json says that the model has it: the checkpoint is of another model",
            fix="export with the model.path that the run was made with",
        )
    whole = {key: torch.empty(stored.size, dtype=stored.properties.dtype)}
    planner = DefaultLoadPlanner()
    planner.set_up_planner(whole, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    try:
        plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
        reader.read_data(plan, planner).wait()
    except (OSError, RuntimeError, ValueError, EOFError) as error:
        raise CheckpointError(
            f"the checkpoint `{folder}` is corrupt",
            why=f"`{key}` cannot be read: {type(error).__name__}: {error}",
            fix="export another checkpoint of the run",
        ) from error
    return whole[key]


def _key_on_disk(entry: Entry, metadata: Metadata) -> str:
    """The name of the modules that wrote it: norms may be fused into what comes after them."""
    names = names_of(entry)
    return next((name for name in names if name in metadata.state_dict_metadata), names[-1])


def _other_model(folder: Path, entry: Entry, *, found: tuple[int, ...], expected: tuple[int, ...]) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint `{folder}` is of another model",
        why=f"`{entry.megatron}` holds {list(found)}, and config.json says {list(expected)}",
        fix="export with the model.path that the run was made with",
    )


def _carry_over(model_dir: Path, out_dir: Path, *, dtype: str) -> None:
    """Everything but weights: config (with its dtype), generation config, tokenizer, chat template, license."""
    for path in sorted(model_dir.iterdir()):
        if path.is_file() and not path.name.endswith(_WEIGHT_SUFFIXES) and not path.name.startswith("."):
            shutil.copyfile(path, out_dir / path.name)
    config = json.loads((out_dir / CONFIG_NAME).read_text(encoding="utf-8"))
    for key in ("dtype", "torch_dtype"):
        if key in config or key == "dtype":
            config[key] = dtype
    (out_dir / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

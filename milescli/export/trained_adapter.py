"""The adapter of a LoRA run out of one of its checkpoints, and its base model with it. Called by
export, evaluation and whoever else takes a run's weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from milescli.checkpoint.base_mark import require_base
from milescli.checkpoint.source import open_source
from milescli.checkpoint.torch_dist.weights import read_hf_tensors
from milescli.core.errors import CheckpointError
from milescli.export.adapter import Adapter, adapter_of, merge_into
from milescli.export.folder import write_folder
from milescli.export.stored import Named, read_folder
from milescli.models import load_facts, table
from milescli.models.adapter import adapter_table, read_shape
from milescli.models.base import WeightTable

PLAIN_OF = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""torch's name of a dtype -> the format that stores it."""


def read_trained_adapter(checkpoint: Path, *, base: Path) -> Adapter | None:
    """None: it is of a run that trained all weights. `base`: the folder of its model. Raises
    CheckpointError where both do not belong together."""
    found = read_shape(checkpoint)
    if found is None:
        return None
    shape, mark = found
    require_base(mark, base, checkpoint=checkpoint)
    of_adapter = adapter_table(table(load_facts(base)), shape)
    tensors = dict(read_hf_tensors(checkpoint, of_adapter))
    return adapter_of(tensors, of_adapter, shape, base_model=base)


def read_merged(base: Path, adapter: Adapter, of_base: WeightTable) -> Iterator[Named]:
    """The base model's tensors with the adapter in them; the folder is open while they are read."""
    with open_source(base) as source:
        on_disk = table(load_facts(base)).as_on_disk(source.names())
        yield from merge_into(read_folder(source, of_base, on_disk=on_disk), adapter)


def write_merged(target: Path, adapter: Adapter, *, base: Path) -> None:
    """As a Hugging Face folder, which must not exist or be empty. Raises CheckpointError."""
    facts = load_facts(base)
    if facts.dtype not in PLAIN_OF:
        raise CheckpointError(
            f"`{base}` is stored as {facts.dtype}",
            why=f"an adapter is put into weights of {', '.join(PLAIN_OF)}",
            fix="miles export it in one of these formats first",
        )
    write_folder(
        target,
        table=table(facts),
        read=lambda of_base: read_merged(base, adapter, of_base),
        base=base,
        format=PLAIN_OF[facts.dtype],
        card=lambda _: {},
    )

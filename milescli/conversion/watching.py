"""How far the reading and writing of checkpoints is, shown while it goes on. Called by `unpack`,
and by whoever looks for a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from milescli.checkpoint.store import CheckpointStore
from milescli.console.output import Output
from milescli.console.transfer import Transfer


def verifying(output: Output) -> Callable[[int, int], Transfer]:
    """For a store: every byte of a checkpoint is read before it counts as whole."""

    def watch(step: int, size_bytes: int) -> Transfer:
        label = f"verifying checkpoint step {step}"
        return Transfer(output, label=label, total=size_bytes, tells_quick=False)

    return watch


def store_of(checkpoints: Path, *, output: Output | None) -> CheckpointStore:
    """To look for a checkpoint in; silent without an output."""
    if output is None:
        return CheckpointStore(checkpoints)
    return CheckpointStore(checkpoints, watch=verifying(output))


def writing(
    output: Output | None, *, size_bytes: int
) -> AbstractContextManager[Callable[[int], None]]:
    """Of a checkpoint that is written out as a folder; silent without an output."""
    if output is None:
        return nullcontext(lambda num_bytes: None)
    label = "writing its weights out"
    return Transfer(output, label=label, total=size_bytes, tells_quick=False)

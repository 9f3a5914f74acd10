"""`miles export`: a checkpoint of a run as a Hugging Face folder. Needs no device and no port."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from milescli.backends.megatron.export import checkpoint_to_hf
from milescli.checkpoint.store import CheckpointStore
from milescli.core.errors import CheckpointError
from milescli.models import load_facts
from milescli.recipe.resolved import load_resolved
from milescli.runtime.material import model_dir_of
from milescli.runtime.rundir import open_run

if TYPE_CHECKING:
    from milescli.console.output import Output


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSummary:
    """What was written."""

    path: str
    step: int
    num_parameters: int
    size_bytes: int
    dtype: str
    seconds: float


def export_run(path: Path, *, to: Path, step: int | None, dtype: str | None, output: Output) -> ExportSummary:
    """Write checkpoint `step` (None: the newest) to the folder `to`, which must not exist or be empty."""
    began = time.monotonic()
    run = open_run(path)
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise CheckpointError(
            f"{to} is in use", why="an export never writes over something", fix=[f"--to {to}-2", f"mv {to} {to}.old"]
        )
    found = CheckpointStore(run.checkpoints).find(step)
    recipe = load_resolved(run.recipe_file).recipe
    model_dir = model_dir_of(recipe.model, run)
    output.note(f"reading checkpoint step {found.step}")
    checkpoint_to_hf(found.path, model_dir, to, dtype=dtype)
    from milescli.models import table

    return ExportSummary(
        path=str(to),
        step=found.step,
        num_parameters=table(load_facts(model_dir)).num_parameters,
        size_bytes=sum(file.stat().st_size for file in to.rglob("*") if file.is_file()),
        dtype=dtype or "as trained",
        seconds=time.monotonic() - began,
    )

"""Writes the quantised folder that engines start from, if a plan has them hold weights in a number
format. It is made from a plain folder by the code that exports, with the choices by which weights
are published later."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from milescli.checkpoint.store import write_atomically
from milescli.checkpoint.weight_files import digest_of
from milescli.core.files import read_json
from milescli.models import load_facts
from milescli.models import table as table_of
from milescli.plan.precision import quantised
from milescli.plan.types import Plan
from milescli.recipe.schema import Recipe
from milescli.runtime.spec import RunSpec

FOLDER = "engine_start"
"""Folder in the run directory."""
MARK = "made_of.json"


def engine_folder(spec: RunSpec) -> Path | None:
    """Return the folder from which the policy's engines start instead of the model's; None if they
    hold plain weights, or nothing is trained."""
    trains = any(slot.trainer_rank is not None for slot in spec.plan.slots)
    return spec.run.path / FOLDER if trains and spec.plan.engine_format else None


def write_engine_folder(spec: RunSpec) -> None:
    """Write that folder, unless it exists already and was made from the same model in the same way.
    Raises CheckpointError if the disk is too small or the model cannot be read."""
    folder = engine_folder(spec)
    if folder is None:
        return
    base, mark = spec.inputs.model_dir, folder / MARK
    made_of = {
        "model": digest_of(base),
        "format": spec.plan.engine_format,
        "trainer": [spec.plan.trainer.tp, spec.plan.trainer.etp],
        "engines": [spec.plan.engines.tp, spec.plan.engines.ep],
        "exempt": spec.recipe.train.exempt,
        "beside": spec.plan.precision,
    }
    if mark.is_file() and read_json(mark) == made_of:
        return
    shutil.rmtree(folder, ignore_errors=True)
    quantise_folder(base, folder, plan=spec.plan, recipe=spec.recipe)
    write_atomically(mark, json.dumps(made_of))


def quantise_folder(base: Path, out: Path, *, plan: Plan, recipe: Recipe) -> None:
    """Write the Hugging Face folder `base` to `out` as the plan's engines hold it."""
    from milescli.checkpoint.source import open_source  # with torch, for number formats alone
    from milescli.export.folder import write_folder
    from milescli.export.stored import read_folder

    form = plan.engine_format
    assert form is not None, "engines that hold plain weights"
    table = table_of(load_facts(base))
    with open_source(base) as source:
        on_disk = table.as_on_disk(source.names(), source.shape)
        write_folder(
            out,
            table=table,
            read=lambda weights: read_folder(source, weights, on_disk=on_disk),
            base=base,
            format=form,
            card=lambda _: {},
            plain_format=plan.precision,
            choose=lambda weights, form: quantised(
                weights, form, (plan.trainer, plan.engines), recipe.train.exempt
            ),
        )

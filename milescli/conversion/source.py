"""Resolves SRC of `miles convert` and `miles export`: a Hugging Face folder, a name on the hub, a
converted model, a Megatron checkpoint, a run or one of its steps."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from milescli.backends.hub.models import fetch_model, outline_model
from milescli.checkpoint.base import (
    CARRIED_PART,
    CHECKPOINT_PART,
    METADATA_NAME,
    RECORD_NAME,
    TRACKER_NAME,
    is_converted,
)
from milescli.checkpoint.run_dir import RECIPE_FILE, RunDir, open_run
from milescli.checkpoint.store import PREFIX
from milescli.conversion.base import store_of
from milescli.core.errors import CheckpointError
from milescli.core.files import read_regular_text
from milescli.models.base import CONFIG_NAME

if TYPE_CHECKING:
    from milescli.console.output import Output

A_FOLDER = "name a folder with config.json, *.safetensors and a tokenizer"
_HUB_NAME = re.compile(r"^[\w.-]+(/[\w.-]+)?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSource:
    """Holds tensors and the model that they belong to."""

    tensors: Path
    """A `torch_dist` folder."""
    model_dir: Path
    """Folder with config.json, tokenizer, and the weights that the checkpoint began from or the
    record of them."""
    what: str
    """Description for people."""
    newest_step: int | None = None
    """Step of the newest checkpoint, if a folder with several was given: a later conversion would
    find another."""


def find_model(
    source: str, *, revision: str | None, output: Output, outline_in: Path | None = None
) -> Path:
    """Return the Hugging Face folder that SRC means, fetched if it is a name on the hub.
    `outline_in` is an empty folder that gets everything but its weights instead. Raises
    CheckpointError."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        if (folder / TRACKER_NAME).exists() and not (folder / CONFIG_NAME).exists():
            raise CheckpointError(
                f"`{folder}` is already a Megatron checkpoint",
                why=f"it has a {TRACKER_NAME} but no {CONFIG_NAME}",
                fix=f"miles convert megatron-to-hf {folder} DST",
            )
        return folder
    if folder.exists() or not _HUB_NAME.match(source) or source.startswith("."):
        raise CheckpointError(
            f"`{source}` is not a model folder",
            why="it is a file"
            if folder.exists()
            else "there is no such folder, and no such name on the hub",
            fix=f"{A_FOLDER}, or name one on the hub: Qwen/Qwen3-0.6B",
        )
    outline = (
        outline_model(source, revision=revision, into=outline_in, output=output)
        if outline_in
        else None
    )
    return outline or fetch_model(source, revision=revision, output=output, instead=A_FOLDER)


def find_checkpoint(
    source: Path,
    *,
    model: Path | None,
    step: int | None,
    model_option: str,
    output: Output | None = None,
) -> CheckpointSource:
    """Return the checkpoint that SRC is or contains. `model` is the folder of its config, which the
    user may name with `model_option`; None means that SRC names it. `step` None means the newest.
    `output` shows the progress of reading all its bytes. Raises CheckpointError."""
    if not source.is_dir():
        raise CheckpointError(
            f"`{source}` is not a checkpoint",
            why="it is a file" if source.exists() else "there is no such folder",
            fix="name a converted model, a Megatron folder (`release`, `iter_0000100`), a run, "
            "or its checkpoints/step_N",
        )
    for run_path, chosen in ((source, step), (source.parent.parent, _step_of(source))):
        if (run_path / RECIPE_FILE).is_file() and (run_path is source or chosen is not None):
            run = open_run(run_path)
            stored = store_of(run.checkpoints, output=output).find(chosen)
            return CheckpointSource(
                tensors=stored.path,
                model_dir=_with_config(model or _model_of(run, model_option=model_option)),
                what=f"step {stored.step} of run {run.name}",
                newest_step=stored.step if chosen is None else None,
            )
    tensors = _tracked(source, step=step)
    if model is None:
        for carried in (source / CARRIED_PART, source.parent / CARRIED_PART):
            if (carried / CONFIG_NAME).is_file() and (carried / RECORD_NAME).is_file():
                model = carried
                break
    if model is None:
        raise CheckpointError(
            f"the model of the checkpoint `{source}` is unknown",
            why="a Megatron checkpoint contains no config.json, and there is no `hf/` next to it",
            fix=_model_option_fix(model_option),
        )
    tracked = re.fullmatch(r"iter_(\d+)", tensors.name) if tensors != source else None
    return CheckpointSource(
        tensors=tensors,
        model_dir=_with_config(model),
        what=os.path.relpath(tensors, source.parent),
        newest_step=int(tracked[1]) if tracked and step is None else None,
    )


def _model_of(run: RunDir, *, model_option: str) -> Path:
    """Return the folder that the run's trainer and engines read. Raises CheckpointError if it is
    unknown or missing."""
    try:
        folder = run.model_dir()
    except CheckpointError as error:
        error.fixes.append(_model_option_fix(model_option))
        raise
    if not is_converted(folder) and not (folder / CONFIG_NAME).is_file():
        raise CheckpointError(
            f"the model of run `{run.name}` no longer exists",
            why=f"the run trained `{folder}`, but there is no {CONFIG_NAME} in it any more",
            fix=_model_option_fix(model_option),
        )
    return folder


def _model_option_fix(model_option: str) -> str:
    return f"{model_option} DIR   # the Hugging Face folder of the model that was trained"


def _with_config(model: Path) -> Path:
    if is_converted(model):
        return model / CARRIED_PART
    return model


def _step_of(folder: Path) -> int | None:
    match = re.fullmatch(rf"{PREFIX}(\d+)", folder.name)
    return int(match[1]) if match else None


def _tracked(source: Path, *, step: int | None) -> Path:
    """Return the folder with the tensors: SRC itself, or the one that its tracker file names."""
    if (source / METADATA_NAME).exists():
        return source
    tracker = source / TRACKER_NAME
    if not tracker.exists():
        raise CheckpointError(
            f"`{source}` is not a Megatron checkpoint",
            why=f"it has neither {METADATA_NAME} nor {TRACKER_NAME}",
            fix="name a converted model, a Megatron folder (`release`, `iter_0000100`), a run, "
            "or its checkpoints/step_N",
        )
    word = read_regular_text(tracker, errors="replace").strip() if step is None else str(step)
    tensors = source / (
        word
        if word == CHECKPOINT_PART
        else f"iter_{int(word):07d}"
        if re.fullmatch("[0-9]{1,18}", word)
        else ""
    )
    if tensors == source or not (tensors / METADATA_NAME).exists():
        raise CheckpointError(
            f"`{source}` has no checkpoint `{word[:40]}`",
            why=f"`{tensors}` contains no {METADATA_NAME}",
            fix="name the folder of one checkpoint",
        )
    return tensors

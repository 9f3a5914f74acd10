"""Makes a model folder with a score head from a model that generates: the same weights, linked, and
a row of small random numbers in place of the output layer."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from milescli.checkpoint.weight_files import files_of_tensors
from milescli.models import parse_facts
from milescli.models.base import CONFIG_NAME, read_config
from milescli.models.facts import ModelFacts
from milescli.models.score_head import HEAD, score_config, scores

_INDEX = "model.safetensors.index.json"
_WEIGHTS, _BASE = "model.safetensors", "base.safetensors"
"""A lone file of weights, and what it is called beside the head: transformers would read the first
name alone, whatever the index says."""
_HEAD_FILE = "score.safetensors"
_STD = 0.02
"""Standard deviation of the new row, as in transformers."""


def score_model(source: Path, folder: Path, *, pad_id: int | None, seed: int) -> Path:
    """Return `source` if it already gives scores; else make the model in `folder`, unless it is
    there, and return that folder. Raises CheckpointError for a model that cannot give scores."""
    config = read_config(source)
    if scores(config):
        return source
    if (folder / CONFIG_NAME).exists():
        return folder
    from safetensors.torch import save_file

    made = score_config(config, pad_token_id=pad_id)
    unfinished = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    for item in sorted(source.iterdir()):
        if item.is_file() and item.name not in (CONFIG_NAME, _INDEX):
            name = _renamed(item.name)
            if item.suffix == Path(_WEIGHTS).suffix:
                (unfinished / name).symlink_to(_target_of_link(item, folder))
            else:  # an export copies it, and follows no link that leads out of the folder
                shutil.copyfile(item, unfinished / name)
    save_file({HEAD: _head(parse_facts(made), seed=seed)}, unfinished / _HEAD_FILE)
    _write_index(source, unfinished)
    (unfinished / CONFIG_NAME).write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
    unfinished.rename(folder)
    return folder


def _target_of_link(item: Path, folder: Path) -> Path:
    """Return what a link in `folder` names to lead to this file: a relative path if both are in one
    run directory, which may be moved."""
    file, run = item.resolve(), folder.parent.resolve()
    return Path(os.path.relpath(file, run / folder.name)) if run in file.parents else file


def _head(facts: ModelFacts, *, seed: int):
    import torch

    generator = torch.Generator().manual_seed(seed)
    row = torch.randn(1, facts.hidden_size, generator=generator) * _STD
    return row.to(getattr(torch, facts.dtype))


def _renamed(name: str) -> str:
    return _BASE if name == _WEIGHTS else name


def _write_index(source: Path, folder: Path) -> None:
    """Write the index, which says which file has which tensor."""
    weight_map = {name: _renamed(file) for name, file in files_of_tensors(source).items()}
    index = {"metadata": {}, "weight_map": {**weight_map, HEAD: _HEAD_FILE}}
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

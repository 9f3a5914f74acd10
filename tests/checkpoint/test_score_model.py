"""A model with a score head, made of one that generates."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from milescli.checkpoint.hf_folder import HfReader
from milescli.checkpoint.score_model import score_model
from milescli.core.errors import CheckpointError
from milescli.models import load_facts, parse_facts, table
from milescli.models.score_head import HEAD, score_config
from milescli.models.scratch import make_model
from milescli.recipe.model import ScratchModel
from tests.backends.megatron.mtp_models import MODELS
from tests.models.families.v4_release import CONFIG

SMALL = ScratchModel(
    hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, ffn_hidden_size=32
)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A model that generates, in one file."""
    make_model(SMALL, tmp_path / "base", seed=0)
    return tmp_path / "base"


def _sharded(base: Path) -> Path:
    weights = load_file(base / "model.safetensors")
    (base / "model.safetensors").unlink()
    names = sorted(weights)
    index: dict[str, str] = {}
    for number, part in enumerate((names[:3], names[3:])):
        file = f"model-{number}.safetensors"
        save_file({name: weights[name] for name in part}, base / file)
        index |= dict.fromkeys(part, file)
    text = json.dumps({"metadata": {}, "weight_map": index})
    (base / "model.safetensors.index.json").write_text(text)
    return base


def _named(base: Path) -> Path:
    (base / "model.safetensors").rename(base / "mine.safetensors")
    return base


def _indexed(base: Path) -> Path:
    weight_map = dict.fromkeys(load_file(base / "model.safetensors"), "model.safetensors")
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (base / "model.safetensors.index.json").write_text(text)
    return base


@pytest.mark.parametrize("form", [Path, _sharded, _named, _indexed])
def test_transformers_and_the_trainer_read_the_same_weights(
    base: Path, tmp_path: Path, form: Callable[[Path], Path]
) -> None:
    from transformers import AutoModelForSequenceClassification

    source = form(base)
    folder = score_model(source, tmp_path / "scores", pad_id=0, seed=3)
    assert load_facts(folder).scores and not load_facts(source).scores
    model, told = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not told["missing_keys"]
    with HfReader(folder) as reader, HfReader(source) as before:
        assert torch.equal(reader.read(HEAD), model.score.weight.detach())
        name = "model.layers.0.mlp.down_proj.weight"
        assert torch.equal(reader.read(name), before.read(name))
        assert torch.equal(reader.read(name), model.model.layers[0].mlp.down_proj.weight.detach())


def test_it_is_made_once_and_equal_seeds_give_equal_heads(base: Path, tmp_path: Path) -> None:
    heads = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        with HfReader(score_model(base, tmp_path / name, pad_id=0, seed=seed)) as reader:
            heads.append(reader.read(HEAD))
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    again = score_model(base, tmp_path / "a", pad_id=0, seed=2)
    with HfReader(again) as reader:
        assert torch.equal(reader.read(HEAD), heads[0])


def test_a_run_with_its_model_in_it_may_be_moved(base: Path, tmp_path: Path) -> None:
    (run := tmp_path / "run").mkdir()
    base.rename(run / "model")
    score_model(run / "model", run / "critic-model", pad_id=0, seed=0)
    run.rename(tmp_path / "moved")
    with HfReader(tmp_path / "moved" / "critic-model") as reader:
        assert reader.read("model.layers.0.mlp.down_proj.weight").isfinite().all()


def test_a_model_that_gives_scores_is_taken_as_it_is(base: Path, tmp_path: Path) -> None:
    folder = score_model(base, tmp_path / "scores", pad_id=0, seed=0)
    assert score_model(folder, tmp_path / "other", pad_id=0, seed=0) == folder
    assert not (tmp_path / "other").exists()


def test_a_classifier_of_several_labels_is_refused(base: Path, tmp_path: Path) -> None:
    folder = score_model(base, tmp_path / "scores", pad_id=0, seed=0)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_labels": 3}))
    with pytest.raises(CheckpointError, match="a classifier with 3 labels is not a reward model"):
        score_model(folder, tmp_path / "other", pad_id=0, seed=0)


@pytest.mark.parametrize("config", [*MODELS.values(), CONFIG], ids=[*MODELS, "v4"])
def test_what_only_a_generating_model_uses_may_lie_in_the_folder(config: dict) -> None:
    """Output layers and MTP layers, each tensor of them and nothing else."""
    base = table(parse_facts(config))
    scoring = table(parse_facts(score_config({"architectures": ["A"], **config}, pad_token_id=0)))
    needed = scoring.hf_shapes()
    assert {name for name in base.hf_shapes() if scoring.is_ignored(name)} == (
        base.hf_shapes().keys() - needed
    )
    assert not any(scoring.is_ignored(name) for name in needed)

"""The MTP layer trains alike under every layout, is what another implementation computes, leaves
the model below as it is, and goes on from a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from milescli.core.errors import CheckpointError
from milescli.models import parse_facts
from milescli.models.mtp import TRAINABLE, with_mtp
from tests.backends.megatron import mtp_models
from tests.backends.megatron.conftest import Worlds
from tests.backends.megatron.layouts import TOKEN_ROWS
from tests.backends.megatron.mtp_cases import MTP
from tests.backends.megatron.tiny_models import MODELS
from tests.forked import run_module


@pytest.mark.parametrize("name", [case["name"] for case in MTP["two"]])
def test_losses_and_gradients_are_those_of_one_process(worlds: Worlds, name: str) -> None:
    one, many = worlds.get("one")[name.split()[0]], worlds.get("two")[name]
    assert many["checksums"] == one["checksums"], "the layer is published whole"
    for expected, report in zip(one["reports"], many["reports"], strict=True):
        assert report.loss == pytest.approx(expected.loss, abs=1e-6)
        assert report.figures == pytest.approx(expected.figures, abs=1e-6, rel=1e-6)
        assert report.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
        assert 1.0 < expected.figures["mtp_loss"] < 10.0


def test_each_family_that_is_trained_was_compared() -> None:
    assert {parse_facts(config).family for config in mtp_models.MODELS.values()} == set(TRAINABLE)


def test_the_layer_is_what_transformers_layers_compute(
    worlds: Worlds, models: dict[str, str], tmp_path: Path
) -> None:
    asked, out = tmp_path / "asked.json", tmp_path / "said.json"
    folders = {model: models[model] for model in mtp_models.MODELS}
    asked.write_text(json.dumps({"folders": folders, "rows": TOKEN_ROWS}))
    run_module("tests.backends.megatron.plain_mtp", asked, out)
    for model, said in json.loads(out.read_text()).items():
        ours = worlds.get("one")[f"ahead {model}"]
        assert [len(row) for row in ours] == [max(len(row) - 2, 0) for row in TOKEN_ROWS]
        for mine, other in zip(ours, said, strict=True):
            assert mine == pytest.approx(other, abs=1e-5), model  # 2e-6 seen


def test_the_model_below_learns_as_without_it(worlds: Worlds) -> None:
    seen = worlds.get("one")["mtp cut"]
    assert seen["of_trunk"] == []
    assert seen["same_reports"]
    # an expert that no token chose stays as it is
    assert all(".local_experts." in name for name in seen["still"])
    assert len(seen["trained_trunk"]) > 10, "trains_trunk lets the gradient through"


def test_rows_packed_together_are_rows_one_by_one(worlds: Worlds) -> None:
    seen = worlds.get("one")["mtp rows"]
    assert seen["microbatches"][0] < seen["microbatches"][1]
    assert seen["losses"][0] == pytest.approx(seen["losses"][1], rel=1e-6)
    assert seen["gradient"] < 1e-5 * seen["largest"]


@pytest.mark.parametrize("name", ["mtp tp2 rest", "mtp pp2 rest"])
def test_a_checkpoint_goes_on_under_another_layout(worlds: Worlds, name: str) -> None:
    [report] = worlds.get("two")[name]["reports"]
    expected = worlds.get("one")["mtp four"]["reports"][3]
    assert report.loss == pytest.approx(expected.loss, abs=1e-6)
    assert report.figures["mtp_loss"] == pytest.approx(expected.figures["mtp_loss"], rel=1e-6)
    assert report.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_nextn_predict_layers": 0}, "no `num_nextn_predict_layers`"),
        ({"num_nextn_predict_layers": 2}, "it has 2 of them"),
        ({"tie_word_embeddings": True}, "its output layer is its embedding"),
        (
            {"model_type": "kimi_k2"},
            "only the layers of deepseek_v3, .*, glm4_moe, .* were compared",
        ),
    ],
)
def test_what_is_not_trained_is_refused_by_name(changes: dict[str, object], why: str) -> None:
    with pytest.raises(CheckpointError, match=why):
        with_mtp(parse_facts({**MODELS["mtp"], **changes}))

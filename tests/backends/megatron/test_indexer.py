"""Indexers of sparse attention that are trained: against plain PyTorch, under every layout, and
without any effect on the model around them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.backends.megatron import world
from tests.backends.megatron.indexer_cases import LAYOUTS
from tests.backends.megatron.tiny_models import make_model

FAMILIES = ("sparse", "v4")
_STEPS = 30


class Indexers:
    """Results by number of ranks, each computed when it is first asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        models = {name: str(make_model(root / name, name)) for name in FAMILIES}
        cases: dict[int, list[dict]] = {1: [], 2: []}
        for name, (size, model, layout) in LAYOUTS.items():
            cases[size].append(
                {
                    "name": name,
                    "call": "indexer_steps",
                    "model": models[model],
                    "layout": layout,
                    "save": str(self.tensors(name)),
                }
            )
        for model, folder in models.items():
            plain = {"model": folder, "layout": {}}
            for call in ("gradients", "packed", "apart"):
                cases[1].append({"name": f"{call} {model}", "call": f"indexer_{call}", **plain})
            cases[1].append(
                {"name": f"learns {model}", "call": "indexer_learns", "steps": _STEPS, **plain}
            )
            saved = str(root / f"checkpoint-{model}")
            goes_on = {"call": "indexer_goes_on", **plain}
            cases[1].append({**goes_on, "name": f"saved {model}", "save": saved})
            cases[1].append({**goes_on, "name": f"loaded {model}", "load": saved})
            layout = {"tp": 2, "sequence_parallel": True, "ep": 2}
            cases[2].append(
                {**goes_on, "name": f"loaded {model} tp2", "load": saved, "layout": layout}
            )
        self.one, self.two = (
            world.run_world(size, listed, root / f"world{size}") for size, listed in cases.items()
        )

    def tensors(self, name: str) -> Path:
        """Where a case of LAYOUTS writes them."""
        return self.root / f"{name.replace(' ', '-')}.safetensors"

    def steps(self, name: str) -> list:
        """Reports of a case of LAYOUTS."""
        return (self.one if LAYOUTS[name][0] == 1 else self.two)[name]


@pytest.fixture(scope="module")
def indexers(tmp_path_factory: pytest.TempPathFactory) -> Indexers:
    return Indexers(tmp_path_factory.mktemp("indexers"))


def off_by(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest difference, relative to the largest number of its tensor."""
    assert set(ours) == set(theirs) != set()
    return max(
        float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()) for name in theirs
    )


@pytest.mark.parametrize("model", FAMILIES)
def test_gradients_are_those_of_plain_pytorch(indexers: Indexers, model: str) -> None:
    seen = indexers.one[f"gradients {model}"]
    assert seen["microbatches"] > 1
    assert seen["figure"] == pytest.approx(seen["divergence"], rel=1e-5)
    assert off_by(seen["ours"], seen["plain"]) < 1e-5


@pytest.mark.parametrize("name", [name for name in LAYOUTS if not name.endswith("one")])
def test_every_layout_has_the_losses_and_gradients_of_one_process(
    indexers: Indexers, name: str
) -> None:
    expected = f"{LAYOUTS[name][1]} one"
    pairs = zip(indexers.steps(expected), indexers.steps(name), strict=True)
    for one, report in pairs:
        assert report.figures["indexer_kl"] == pytest.approx(one.figures["indexer_kl"], rel=1e-4)
        assert report.loss == pytest.approx(one.loss, abs=1e-6)
        assert report.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
    ours, theirs = (load_file(indexers.tensors(each)) for each in (name, expected))
    parts = 1 if "dp2" in name else 2  # weights, and gradients
    assert len(ours) == parts * len(theirs) // 2 > 0
    assert off_by(ours, {key: theirs[key] for key in ours}) < 1e-5


@pytest.mark.parametrize("model", FAMILIES)
def test_rows_packed_together_are_rows_one_by_one(indexers: Indexers, model: str) -> None:
    seen = indexers.one[f"packed {model}"]
    assert seen["microbatches"][0] < seen["microbatches"][1]
    assert seen["figures"][0] == pytest.approx(seen["figures"][1], rel=1e-6)
    assert off_by(*seen["gradients"]) < 1e-5


@pytest.mark.parametrize("model", FAMILIES)
def test_the_model_around_them_learns_as_with_frozen_ones(indexers: Indexers, model: str) -> None:
    seen = indexers.one[f"apart {model}"]
    trained, frozen = seen["kl"], seen["frozen"]
    assert seen["differ"] == trained["moved"] == trained["indexers"] == trained["gradients"]
    assert not frozen["moved"] and not frozen["gradients"] and frozen["indexers"]
    assert trained["sent"] == frozen["sent"] != set(), "engines are sent them in any case"
    one, other = (seen["reports"][mode] for mode in ("kl", "frozen"))
    assert (one.loss, one.grad_norm) == (other.loss, other.grad_norm)
    assert "indexer_kl" not in other.figures


@pytest.mark.parametrize("model", FAMILIES)
def test_the_divergence_falls_on_the_same_rows(indexers: Indexers, model: str) -> None:
    seen = indexers.one[f"learns {model}"]
    assert not seen["moved"], "the rest has no gradient"
    assert seen["figures"][-1] < 0.8 * seen["figures"][0]


@pytest.mark.parametrize(
    "case", ["loaded sparse", "loaded v4", "loaded sparse tp2", "loaded v4 tp2"]
)
def test_a_checkpoint_goes_on(indexers: Indexers, case: str) -> None:
    saved = indexers.one[f"saved {case.split()[1]}"]
    seen = (indexers.two if case.endswith("tp2") else indexers.one)[case]
    assert seen["report"].figures == pytest.approx(saved["report"].figures, rel=1e-4, abs=1e-6)
    is_same = not case.endswith("tp2")
    for name, tensor in saved["indexers"].items():
        bound = 0 if is_same else 1e-5
        torch.testing.assert_close(seen["indexers"][name], tensor, rtol=0, atol=bound, msg=name)

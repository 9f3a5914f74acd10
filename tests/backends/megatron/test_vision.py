"""Vision-language models against transformers and plain PyTorch, under every layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from milescli.checkpoint.torch_dist.weights import read_hf_tensors
from milescli.export.folder import write_folder
from milescli.models import load_facts, table
from tests.backends.megatron import world
from tests.backends.megatron.tiny_models import write_model
from tests.backends.megatron.vision_cases import ROWS, processor_of, rows_of
from tests.families.cases import ALL
from tests.forked import run_module

FAMILIES = ("gemma3-vl", "qwen2-5-vl", "qwen3-vl", "qwen3-vl-moe")
_SP = {"tp": 2, "sequence_parallel": True}
_PP = {"pp": 2, "first_stage_layers": 2}
_FULL = {"recompute": "full"}
LAYOUTS: dict[str, tuple[str, dict, dict]] = {
    # name -> (model, layout, what of the case is special)
    "gemma3-vl one": ("gemma3-vl", {}, {}),
    "gemma3-vl frozen": ("gemma3-vl", {}, {"vision": "frozen"}),
    "gemma3-vl recompute": ("gemma3-vl", {}, {"train": _FULL}),
    "gemma3-vl tp2 sp": ("gemma3-vl", _SP, {}),
    "gemma3-vl pp2": ("gemma3-vl", _PP, {"train": _FULL}),
    "gemma3-vl cp2": ("gemma3-vl", {"cp": 2}, {}),
    "gemma3-vl dp2": ("gemma3-vl", {"dp": 2}, {}),
    "qwen2-5-vl one": ("qwen2-5-vl", {}, {}),
    "qwen2-5-vl recompute": ("qwen2-5-vl", {}, {"train": _FULL}),
    "qwen2-5-vl frozen": ("qwen2-5-vl", {}, {"vision": "frozen"}),
    "qwen2-5-vl tp2": ("qwen2-5-vl", {"tp": 2}, {}),
    "qwen2-5-vl pp2": ("qwen2-5-vl", _PP, {"vision": "frozen"}),
    "qwen2-5-vl tied pp2": ("qwen2-5-vl-tied", _PP, {}),
    "qwen2-5-vl cp2": ("qwen2-5-vl", {"cp": 2}, {}),
    "qwen3-vl one": ("qwen3-vl", {}, {}),
    "qwen3-vl frozen": ("qwen3-vl", {}, {"vision": "frozen"}),
    "qwen3-vl tp2 sp recompute": ("qwen3-vl", _SP, {"train": _FULL}),
    "qwen3-vl pp2 recompute": ("qwen3-vl", _PP, {"train": _FULL}),
    "qwen3-vl dp2": ("qwen3-vl", {"dp": 2}, {}),
    "qwen3-vl dp2 frozen": ("qwen3-vl", {"dp": 2}, {"vision": "frozen"}),
    "qwen3-vl cp2": ("qwen3-vl", {"cp": 2}, {}),
    "qwen3-vl-moe one": ("qwen3-vl-moe", {}, {}),
    "qwen3-vl-moe ep2": ("qwen3-vl-moe", {"ep": 2, "dp": 2}, {}),
    "qwen3-vl-moe tp2 sp ep2": ("qwen3-vl-moe", {**_SP, "ep": 2}, {"train": _FULL}),
}


ADAPTERS: dict[str, tuple[dict, dict]] = {
    "adapter one": ({}, {}),
    "adapter tp2 sp recompute": (_SP, _FULL),
    "adapter pp2": (_PP, {}),
}
SAVED: dict[str, tuple[str, dict, str]] = {
    # name -> (model.vision, layout, what is done with the checkpoint)
    "all saved": ("all", {}, "save"),
    "frozen saved": ("frozen", {}, "save"),
    "all ep2": ("all", {"ep": 2, "dp": 2}, "load"),
    "all pp2": ("all", _PP, "load"),
    "frozen pp2": ("frozen", _PP, "load"),
}


def plain_steps(folder: Path) -> dict[str, torch.Tensor]:
    """What `plain_vision` computes of a folder."""
    out = folder.with_suffix(".plain")
    run_module("tests.backends.megatron.plain_vision", folder, out)
    return load_file(out)


class Vision:
    """Models, and what was computed of them, each once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        names = {model for model, _, _ in LAYOUTS.values()}
        self.models = {name: write_model(root / name, ALL[name].config) for name in names}
        for name, folder in self.models.items():
            settings = json.dumps(processor_of(ALL[name].config))
            (folder / "preprocessor_config.json").write_text(settings)
        self._plain: dict[str, dict[str, torch.Tensor]] = {}
        cases = [
            {
                "name": name,
                "call": "vision_steps",
                "model": str(self.models[model]),
                "layout": layout,
                "save": str(self.saved(name)),
                **special,
            }
            for name, (model, layout, special) in LAYOUTS.items()
        ]
        cases += [
            {
                "name": name,
                "call": "vision_steps",
                "model": str(self.models["qwen3-vl"]),
                "layout": layout,
                "save": str(self.saved(name)),
                "vision": "frozen",
                "train": {"lora": {"rank": 4}, **special},
            }
            for name, (layout, special) in ADAPTERS.items()
        ]
        cases += [
            {
                "name": name,
                "call": "vision_goes_on",
                "model": str(self.models["qwen3-vl-moe"]),
                "layout": layout,
                "vision": trained,
                which: str(self.checkpoint(trained)),
            }
            for name, (trained, layout, which) in SAVED.items()
        ]
        cases.append(
            {
                "name": "projector",
                "call": "vision_steps",
                "model": str(self.models["qwen3-vl"]),
                "layout": {},
                "save": str(self.saved("projector")),
                "vision": "projector",
            }
        )
        many = [case for case in cases if case["layout"]]
        self.two = world.run_world(2, many, root / "two")
        gradients = [
            {
                "name": f"gradients {name}",
                "call": "vision_gradients",
                "model": str(self.models[name]),
                "layout": {},
                "save": str(self.saved(f"gradients {name}")),
            }
            for name in FAMILIES
        ]
        self.one = world.run_world(
            1, [*gradients, *(case for case in cases if not case["layout"])], root / "one"
        )

    def checkpoint(self, trained: str) -> Path:
        """Of the run with this `model.vision`."""
        return self.root / f"checkpoint-{trained}"

    def saved(self, name: str) -> Path:
        """What a case writes."""
        return self.root / f"{name.replace(' ', '-')}.safetensors"

    def result(self, name: str) -> dict:
        """What a case of LAYOUTS returns."""
        return (self.two if LAYOUTS[name][1] else self.one)[name]

    def plain(self, model: str) -> dict[str, torch.Tensor]:
        """By transformers and plain PyTorch."""
        if model not in self._plain:
            self._plain[model] = plain_steps(self.models[model])
        return self._plain[model]

    def plain_weights(self, model: str, kind: str) -> dict[str, torch.Tensor]:
        """Under the names on disk, and as they lie there."""
        parts = self.plain(model).items()
        named = {n.removeprefix(f"{kind}."): t for n, t in parts if n.startswith(f"{kind}.")}
        if "qwen2-5" in model:
            short = {"model.visual.": "visual.", "model.language_model.": "model."}
            for long, disk in short.items():
                named = {name.replace(long, disk, 1): tensor for name, tensor in named.items()}
        if "gemma3" in model:
            forms = {
                "model.language_model.": "language_model.model.",
                "model.vision_tower.": "vision_tower.vision_model.",
                "model.multi": "multi",
            }
            for long, disk in forms.items():
                named = {name.replace(long, disk, 1): tensor for name, tensor in named.items()}
        return {
            name: tensor.mT if ".experts." in name else tensor for name, tensor in named.items()
        }


def of_tower(name: str) -> bool:
    """Whether a weight is one of the tower's or of its projector's."""
    return any(part in name for part in ("visual.", "vision_tower.", "multi_modal_projector."))


def is_shift(name: str) -> bool:
    """Whether a weight moves all logits of a softmax alike, so that it has no gradient."""
    return "attn.qkv.bias" in name or ("vision_tower." in name and "k_proj.bias" in name)


def require_scores(
    scores: list[list[float]], plain: dict[str, torch.Tensor], rows: list[dict] = ROWS
) -> None:
    """They are transformers' log-probs of the rows."""
    for number, row in enumerate(rows):
        ids, logits = torch.tensor(row["ids"]), plain[f"logits.{number}"]
        logprobs = logits[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        assert scores[number][1:] == pytest.approx(logprobs.tolist(), abs=1e-5)


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Vision:
    return Vision(tmp_path_factory.mktemp("vision"))


@pytest.mark.parametrize("model", FAMILIES)
def test_logits_and_gradients_are_those_of_transformers(vision: Vision, model: str) -> None:
    ours, plain = vision.one[f"gradients {model}"], vision.plain(model)
    for number, row in enumerate(rows_of(ALL[model].config)):
        theirs = plain[f"logits.{number}"][:-1]
        gap = float((ours[number][: len(row["ids"]) - 1] - theirs).abs().max())
        assert gap < 1e-5 * float(theirs.abs().max()), number
    gradients = load_file(vision.saved(f"gradients {model}"))
    expected = vision.plain_weights(model, "gradient")
    assert set(gradients) == set(expected)
    largest = {name: float(tensor.abs().max()) for name, tensor in expected.items()}
    off = {
        name: float((gradients[name] - tensor).abs().max()) / (largest[name] + 1e-6)
        for name, tensor in expected.items()
        if largest[name] > 1e-9 or not is_shift(name)
    }
    worst = max(off, key=off.__getitem__)
    assert off[worst] < 2e-5, (worst, off[worst], largest[worst])
    tower = [name for name in largest if of_tower(name)]
    assert min(largest[name] for name in tower if not is_shift(name)) > 1e-6


@pytest.mark.parametrize("name", LAYOUTS)
def test_steps_are_those_of_plain_pytorch(vision: Vision, name: str) -> None:
    model, _, special = LAYOUTS[name]
    result = vision.result(name)
    require_scores(result["scores"], vision.plain(model), rows_of(ALL[model].config))
    is_frozen = special.get("vision") == "frozen"
    expected = vision.plain_weights(model, "frozen" if is_frozen else "after")
    before = load_file(vision.models[model] / "model.safetensors")
    after = load_file(vision.saved(name))
    assert set(after) == set(before)
    for key, weight in expected.items():
        if key not in after:
            assert key == "lm_head.weight" and model.endswith("tied")
            continue
        moved = not torch.equal(after[key], before[key])
        assert moved is not (is_frozen and of_tower(key)) or is_shift(key), key
        torch.testing.assert_close(after[key], weight, atol=2e-6, rtol=0, msg=key)
    assert any(of_tower(sent) for sent in result["sent"]) is not is_frozen


def test_a_frozen_tower_computes_each_image_once_a_step(vision: Vision) -> None:
    frozen = vision.result("qwen3-vl frozen")
    distinct = len({image["seed"] for row in ROWS for image in row["images"]})
    assert sum(frozen["images_scored"]) == distinct
    assert sum(frozen["images"]) == 3 * distinct


@pytest.mark.parametrize("name", [name for name, (layout, _) in ADAPTERS.items() if layout])
def test_an_adapter_of_the_decoder_trains_alike_under_every_layout(
    vision: Vision, name: str
) -> None:
    one, many = vision.one["adapter one"], vision.two[name]
    require_scores(one["scores"], vision.plain("qwen3-vl"))
    assert not any("visual" in sent for sent in one["sent"])
    for expected, report in zip(one["reports"], many["reports"], strict=True):
        assert report.loss == pytest.approx(expected.loss, abs=1e-6)
        assert report.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    ours, theirs = (load_file(vision.saved(which)) for which in ("adapter one", name))
    assert set(ours) == set(theirs)
    for key, weight in ours.items():
        torch.testing.assert_close(theirs[key], weight, atol=2e-6, rtol=0, msg=key)


@pytest.mark.parametrize("name", [name for name, (_, layout, _) in SAVED.items() if layout])
def test_a_checkpoint_with_its_tower_goes_on_under_another_layout(
    vision: Vision, name: str
) -> None:
    saved, resumed = vision.one[f"{SAVED[name][0]} saved"], vision.two[name]
    assert resumed["report"].loss == pytest.approx(saved["report"].loss, abs=1e-6)
    assert resumed["report"].grad_norm == pytest.approx(saved["report"].grad_norm, rel=1e-5)
    for mine, other in zip(saved["scores"], resumed["scores"], strict=True):
        assert mine == pytest.approx(other, abs=1e-5)


@pytest.mark.parametrize("trained", ["all", "frozen"])
def test_an_export_computes_the_same_in_transformers(
    vision: Vision, tmp_path: Path, trained: str
) -> None:
    base, out = vision.models["qwen3-vl-moe"], tmp_path / "export"
    saved = vision.one[f"{trained} saved"]
    write_folder(
        out,
        table=table(load_facts(base)),
        read=lambda weights: read_hf_tensors(vision.checkpoint(trained), weights),
        base=base,
        format="fp32",
        card=lambda _: {},
    )
    require_scores(saved["scores"], plain_steps(out))


def test_a_projector_is_trained_without_the_blocks_before_it(vision: Vision) -> None:
    sent = set(vision.one["projector"]["sent"])
    before = load_file(vision.models["qwen3-vl"] / "model.safetensors")
    after = load_file(vision.saved("projector"))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == sent
    assert {name.split(".")[2] for name in moved if "visual." in name} == {
        "merger",
        "deepstack_merger_list",
    }

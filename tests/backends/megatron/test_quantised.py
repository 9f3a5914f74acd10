"""A trainer whose layers multiply by rounded weights: it computes what a plain one computes with
weights that were rounded before, under every layout, and publishes the bytes that export writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from milescli.checkpoint.source import open_source
from milescli.export.folder import write_folder
from milescli.export.stored import read_folder
from milescli.models import load_facts, table
from tests.backends.megatron import world
from tests.backends.megatron.layouts import ADAMW, ADAMW_KEYS
from tests.backends.megatron.quantised_cases import FORMS, MODELS, case, sha256_of
from tests.backends.megatron.state.test_optimizer import by_megatron, plain_steps
from tests.backends.megatron.tiny_models import write_model

TWO = [
    ("dense", {"tp": 2}),
    ("dense", {"tp": 2, "sequence_parallel": True, "train": {"recompute": "full"}}),
    ("dense", {"pp": 2}),
    ("moe", {"ep": 2, "dp": 2}),
    ("moe", {"tp": 2, "etp": 2, "sequence_parallel": True}),
    ("latent", {"tp": 2, "ep": 2, "sequence_parallel": True}),
]
LORA = {"lora": {"rank": 4}}
RECOMPUTE = {"recompute": "full"}
GROUPED = [
    ("grouped", None, False, None),
    ("looped", None, True, None),
    ("grouped fp8", "fp8", False, {"train": RECOMPUTE}),
    ("looped fp8", "fp8", True, None),
    ("grouped inputs", "fp8", False, {"inputs": True}),
    ("looped inputs", "fp8", True, {"inputs": True}),
    ("grouped lora", None, False, {"train": LORA}),
]
"""Experts computed together, and one after the other: title, format of weights, whether looped,
other options of the case."""


def _title(model: str, form: str, options: dict[str, object]) -> str:
    parts = [f"{key}{value}" for key, value in options.items() if isinstance(value, int)]
    return " ".join([model, form, *parts, *(["train"] if "train" in options else [])])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Name -> plain folder; `name form` -> as export writes it; `name form plain` -> its numbers,
    stored plain in float32."""
    root, made = tmp_path_factory.mktemp("models"), {}
    for name, config in MODELS.items():
        made[name] = write_model(root / name, {**config, "dtype": "float32"})
        for form in FORMS:
            made[f"{name} {form}"] = _exported(made[name], root / f"{name}-{form}", form)
            made[f"{name} {form} plain"] = _plain(
                made[f"{name} {form}"], made[name], root / f"{name}-{form}-plain"
            )
    return made


def _exported(base: Path, out: Path, form: str) -> Path:
    lines = table(load_facts(base))
    with open_source(base) as source:
        on_disk = lines.as_on_disk(source.names())
        return write_folder(
            out,
            table=lines,
            read=lambda weights: read_folder(source, weights, on_disk=on_disk),
            base=base,
            format=form,
            card=lambda _: {},
            plain_format="fp32",
        ).path


def _plain(quantised: Path, base: Path, out: Path) -> Path:
    out.mkdir()
    (out / "config.json").write_text((base / "config.json").read_text())
    with open_source(quantised) as source:
        tensors = {name: source.read(name).contiguous() for name in source.names()}
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    save_file(tensors, out / "model.safetensors")
    return out


@pytest.fixture(scope="module")
def one(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> world.Results:
    """What one process says: rounding, and plain with rounded weights."""
    cases = []
    for model in MODELS:
        for form in FORMS:
            cases.append(case(f"{model} {form}", str(folders[model]), form))
            plain = str(folders[f"{model} {form} plain"])
            cases.append(case(f"{model} {form} plain", plain, None))
    for form in ("fp8", "int4"):
        cases.append(case(f"lora {form}", str(folders["dense"]), form, train=LORA))
        plain = str(folders[f"dense {form} plain"])
        cases.append(case(f"lora {form} plain", plain, None, train=LORA))
    for form in ("fp8", "mxfp8", "nvfp4"):
        cases.append(case(f"inputs {form}", str(folders["dense"]), form, inputs=True))
    for name, form, looped, options in GROUPED:
        cases.append(case(name, str(folders["moe"]), form, looped=looped, **(options or {})))
    return world.run_world(1, cases, tmp_path_factory.mktemp("quantised") / "one")


@pytest.fixture(scope="module")
def two(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> world.Results:
    """What two say."""
    cases = [
        case(_title(model, form, options), str(folders[model]), form, **options)
        for model, options in TWO
        for form in FORMS
    ]
    return world.run_world(2, cases, tmp_path_factory.mktemp("quantised") / "two")


@pytest.mark.parametrize(
    ("model", "form"),
    [*((model, form) for model in MODELS for form in FORMS), ("lora", "fp8"), ("lora", "int4")],
)
def test_it_computes_what_a_plain_trainer_computes_with_rounded_weights(
    one: world.Results, model: str, form: str
) -> None:
    """To the bit: the same products, and by the first step's gradient norm the same gradients."""
    rounding, plain = one[f"{model} {form}"], one[f"{model} {form} plain"]
    assert rounding["first"] == plain["first"]
    assert rounding["losses"][0] == plain["losses"][0]


@pytest.mark.parametrize("form", ["", " fp8"])
def test_experts_computed_together_are_those_of_a_loop(one: world.Results, form: str) -> None:
    together, looped = one[f"grouped{form}"], one[f"looped{form}"]
    assert (together["grouped"], looped["grouped"]) == ({True}, {False})
    assert together["losses"][0] == pytest.approx(looped["losses"][0], rel=1e-5)
    for found, expected in zip(together["first"], looped["first"], strict=True):
        assert found == pytest.approx(expected, abs=2e-5)


def test_the_inputs_of_experts_computed_together_are_rounded(one: world.Results) -> None:
    """By far most of them alike; a product that differs by 1e-7 rounds some to another number."""

    def apart(name: str, other: str) -> float:
        numbers = [[x for row in one[title]["first"] for x in row] for title in (name, other)]
        return sum(abs(a - b) for a, b in zip(*numbers, strict=True)) / len(numbers[0])

    rounded = apart("grouped inputs", "grouped fp8")
    assert rounded > 1e-3
    assert apart("grouped inputs", "looped inputs") < rounded / 2


def test_a_reference_that_is_copied_in_is_never_taken_for_the_policy(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    given = {"call": "reference_steps", "model": str(folders["dense"]), "form": "fp8"}
    pointed, copied = (
        world.run_world(1, [{"name": "kl", **given, "copies": copies}], tmp_path / f"{copies}")
        for copies in (False, True)
    )
    assert pointed["kl"] == copied["kl"]


def test_experts_beside_which_adapters_stand_are_computed_in_a_loop(one: world.Results) -> None:
    assert one["grouped lora"]["grouped"] == {False}


@pytest.mark.parametrize("form", FORMS)
def test_the_optimizer_keeps_what_rounding_takes(one: world.Results, form: str) -> None:
    """A plain trainer moves the rounded weights, this one the weights, which it rounds again."""
    rounding, plain = one[f"dense {form}"], one[f"dense {form} plain"]
    assert rounding["last"] != rounding["first"] and rounding["last"] != plain["last"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", list(MODELS))
def test_engines_are_sent_the_bytes_that_export_writes(
    one: world.Results, folders: dict[str, Path], model: str, form: str
) -> None:
    stored = load_file(folders[f"{model} {form}"] / "model.safetensors")
    quantised = json.loads((folders[f"{model} {form}"] / "config.json").read_text())
    assert "quantization_config" in quantised
    expected = {name: sha256_of(tensor) for name, tensor in stored.items()}
    assert one[f"{model} {form}"]["published"] == expected


@pytest.mark.parametrize("form", ["fp8", "mxfp8", "nvfp4"])
def test_rounded_inputs_change_the_scores_a_little(one: world.Results, form: str) -> None:
    plain, rounded = one[f"dense {form}"]["first"], one[f"inputs {form}"]["first"]
    apart = [
        abs(one - other)
        for rows in zip(plain, rounded, strict=True)
        for one, other in zip(*rows, strict=True)
    ]
    assert 1e-4 < max(apart) < 1.5


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("model", "options"), TWO, ids=[_title(model, "", options) for model, options in TWO]
)
def test_layouts_agree_with_one_process(
    one: world.Results, two: world.Results, model: str, options: dict, form: str
) -> None:
    """Blocks never cross ranks, so that all round to the same numbers. FP8's blocks would under the
    two layouts that cut 128 rows of a matrix: these stay plain there, and scores differ."""
    alone, spread = one[f"{model} {form}"], two[_title(model, form, options)]
    same = spread["published"] == alone["published"]
    assert same or form == "fp8"
    if same:
        for row, other in zip(alone["first"], spread["first"], strict=True):
            assert other == pytest.approx(row, abs=2e-5)
        (loss, norm), (other_loss, other_norm) = alone["losses"][0], spread["losses"][0]
        assert other_loss == pytest.approx(loss, abs=1e-5)
        assert other_norm == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", ["dense", "moe"])
def test_three_steps_are_those_of_plain_pytorch_with_other_formulas(
    folders: dict[str, Path], tmp_path: Path, model: str, form: str
) -> None:
    """Weights that differ by 1e-8 may round to other numbers, so that a few of them differ more."""
    after, formats = {}, {"trainer_format": form}
    for name, case_formats in ((form, formats), ("unrounded", None)):
        made = {"name": name, "call": "adamw_steps", "model": str(folders[model]), "layout": {}}
        made |= {"optimizer": ADAMW_KEYS, "steps": ADAMW["steps"]}
        made |= {"save": str(tmp_path / name), "formats": case_formats}
        world.run_world(1, [made], tmp_path / f"world-{name}")[name]
        after[name] = by_megatron(tmp_path / name, folders[model])
    expected = plain_steps(folders[model], tmp_path / "plain", {**ADAMW, "form": form})
    assert set(after[form]) == set(expected)

    apart = {
        name: torch.cat([(one[key] - weight).abs().flatten() for key, weight in expected.items()])
        for name, one in after.items()
    }
    assert apart[form].mean() < apart["unrounded"].mean() / 100

"""Whole optimizer steps against plain PyTorch on the same model in transformers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from megatron.core import utils
from megatron.core.optimizer import clip_grads
from safetensors.torch import load_file

from milescli.backends.megatron.state.optimizer import install_clipping, norm_of_all, scale_all
from milescli.models import load_facts, table
from tests.backends.megatron.conftest import Worlds
from tests.backends.megatron.layouts import ADAMW, ADAMW_LAYOUTS, MUON, MUON_LAYOUTS
from tests.backends.megatron.plain_adamw import plain_losses


@pytest.fixture(scope="module")
def plain(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """Model -> its weights, by Megatron's names, after the three steps."""
    folder = tmp_path_factory.mktemp("plain")

    def steps(model: str, settings: dict) -> dict[str, torch.Tensor]:
        name = f"{model}-{'muon' if 'muon' in settings else 'adamw'}"
        return plain_steps(Path(models[model]), folder / name, settings)

    kept = {"adamw": ADAMW, "muon": MUON}
    return functools.cache(lambda model, rule="adamw": steps(model, kept[rule]))


Plain = Callable[..., dict[str, torch.Tensor]]


def plain_steps(model: Path, folder: Path, steps: dict) -> dict[str, torch.Tensor]:
    """The weights after the steps of transformers and plain PyTorch, by Megatron's names."""
    folder.mkdir()
    plain_losses(steps, model, folder)
    return by_megatron(folder / "out" / "model.safetensors", model)


def by_megatron(file: Path, model: Path) -> dict[str, torch.Tensor]:
    """The weights of a file, in whichever form of the family's names; MTP layers are left out."""
    tensors = load_file(file)
    lines = table(load_facts(model)).as_on_disk(tensors)
    named = {}
    for entry in lines.entries:
        if entry.mtp is None and not entry.rule.buffer:
            own = [tensors[name] for name in entry.hf]
            own = own if entry.row is None else [tensor[entry.row] for tensor in own]
            named[entry.megatron] = entry.rule.fuse(
                entry.rule.to_parts(own, entry.facts), entry.facts
            )
    return named


@pytest.mark.parametrize(
    ("size", "name"), [(size, name) for size, names in ADAMW_LAYOUTS.items() for name in names]
)
def test_three_steps_are_those_of_plain_pytorch_where_gains_do_not_decay(
    worlds: Worlds, models: dict[str, str], plain: Plain, size: str, name: str
) -> None:
    worlds.get(size)[f"adamw {name}"]
    model = name.split()[0]
    folder = Path(models[model])
    before = by_megatron(folder / "model.safetensors", folder)
    after = by_megatron(Path(worlds.stepped("adamw", name)), folder)
    expected = plain(model)
    assert set(after) == set(expected)
    for key, weight in expected.items():
        learns = ".indexer." not in key
        assert torch.equal(after[key], before[key]) != learns, f"{key} learns: {not learns}"
        torch.testing.assert_close(after[key], weight, atol=1e-6, rtol=0, msg=key)


@pytest.mark.parametrize(
    ("size", "name"), [(size, name) for size, names in MUON_LAYOUTS.items() for name in names]
)
def test_three_steps_of_muon_are_those_of_plain_pytorch_for_each_matrix(
    worlds: Worlds, models: dict[str, str], plain: Plain, size: str, name: str
) -> None:
    """Up to the roundings of bfloat16; a matrix more or less would be far off."""
    worlds.get(size)[f"muon {name}"]
    model = name.split()[0]
    folder = Path(models[model])
    before = by_megatron(folder / "model.safetensors", folder)
    after = by_megatron(Path(worlds.stepped("muon", name)), folder)
    for key, weight in plain(model, "muon").items():
        if key.endswith("router.weight"):
            continue  # its rows' gradients sum to zero: a null space, whatever the tokens
        moved = (weight - before[key]).norm()
        assert (after[key] - weight).norm() < 0.05 * moved, key


def gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in ((3, 5), (7,), (2, 4, 1), (1,))]


def test_the_norm_is_that_of_all_numbers_together() -> None:
    first, second = gradients(), gradients()[:2]
    (norm,), per_tensor = norm_of_all(65536, torch.zeros(1), [first, second], False)
    numbers = torch.cat([tensor.flatten() for tensor in (*first, *second)])
    assert per_tensor is None
    assert float(norm) == pytest.approx(float(numbers.double().norm()), rel=1e-6)


def test_scaling_is_megatrons_own_in_place_and_into_others() -> None:
    ours, theirs = gradients(), gradients()
    scale_all(65536, torch.zeros(1), [ours, ours], 0.3)
    utils.local_multi_tensor_scale(65536, torch.zeros(1), [theirs, theirs], 0.3)
    for mine, own in zip(ours, theirs, strict=True):
        assert torch.equal(mine, own)
    source, target = gradients(), [torch.full_like(tensor, torch.nan) for tensor in gradients()]
    scale_all(65536, torch.zeros(1), [source, target], 0.3)
    for mine, own, given in zip(target, theirs, source, strict=True):
        assert torch.equal(mine, own) and not torch.equal(given, own)


def test_only_megatrons_replacements_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(*_: object) -> None: ...

    monkeypatch.setattr(clip_grads, "l2_norm_impl", compiled)
    monkeypatch.setattr(clip_grads, "multi_tensor_scale_impl", compiled)
    install_clipping()
    assert clip_grads.l2_norm_impl is clip_grads.multi_tensor_scale_impl is compiled
    monkeypatch.setattr(clip_grads, "l2_norm_impl", utils.local_multi_tensor_l2_norm)
    install_clipping()
    assert clip_grads.l2_norm_impl is norm_of_all

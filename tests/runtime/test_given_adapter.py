"""An adapter that a run is given is of the shape that it trains, or refused with what to set."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from milescli.core.errors import RecipeError
from milescli.export.adapter import Adapter, adapter_of, write_adapter
from milescli.models import parse_facts, table
from milescli.models.adapter import (
    ALL_LINEAR,
    LoraShape,
    adapter_table,
    modules_with_adapter,
    peft_name,
)
from milescli.recipe.schema import Recipe
from milescli.runtime.held_models import require_adapter
from tests.backends.megatron.tiny_models import DENSE, MODELS

FACTS = parse_facts(DENSE)


@pytest.fixture
def given(tmp_path: Path) -> Path:
    """Of rank 4 and alpha 8 at all matrices."""
    of_adapter = adapter_table(table(FACTS), LoraShape(rank=4, alpha=8, targets=(ALL_LINEAR,)))
    shapes = of_adapter.hf_shapes()
    pairs = {
        module: (
            torch.ones(shapes[peft_name(module, "lora_A")]),
            torch.ones(shapes[peft_name(module, "lora_B")]),
        )
        for module in modules_with_adapter(of_adapter)
    }
    write_adapter(tmp_path, Adapter(pairs=pairs, alpha=8, rank=4))
    return tmp_path


def _recipe(given: Path, **lora: object) -> Recipe:
    return Recipe(model={"adapter": str(given)}, train={"lora": {"rank": 4, "alpha": 8, **lora}})


def test_one_of_the_same_shape_is_taken(given: Path) -> None:
    require_adapter(_recipe(given), FACTS)


@pytest.mark.parametrize(
    ("lora", "fix"),
    [
        ({"rank": 8, "alpha": 16}, "--lora 4"),
        ({"alpha": 4}, "--set train.lora.alpha=8"),
        ({"type": "rslora"}, "--set train.lora.alpha=8"),
        ({"targets": ["q_proj"]}, "train.lora.targets=["),
        ({"exclude": ["mlp"]}, "train.lora.targets=["),
    ],
)
def test_another_is_refused_with_what_to_set(
    given: Path, lora: dict[str, object], fix: str
) -> None:
    with pytest.raises(RecipeError) as raised:
        require_adapter(_recipe(given, **lora), FACTS)
    assert any(fix in line for line in raised.value.fixes)


@pytest.mark.parametrize("given_as", ["each", "shared_outer"])
def test_one_whose_experts_share_otherwise_is_refused(tmp_path: Path, given_as: str) -> None:
    facts, other = parse_facts(MODELS["moe"]), {"each": "shared_outer", "shared_outer": "each"}
    shape = LoraShape(rank=4, alpha=8, targets=(ALL_LINEAR,), experts=given_as)
    of_adapter = adapter_table(table(facts), shape)
    ones = {name: torch.ones(size) for name, size in of_adapter.hf_shapes().items()}
    write_adapter(tmp_path, adapter_of(ones, of_adapter, shape, base_model=tmp_path))
    require_adapter(_recipe(tmp_path, experts=given_as), facts)
    with pytest.raises(RecipeError) as raised:
        require_adapter(_recipe(tmp_path, experts=other[given_as]), facts)
    assert raised.value.fixes == [f"--set train.lora.experts={given_as}"]


def test_one_of_another_model_is_refused(given: Path) -> None:
    wider = parse_facts({**DENSE, "hidden_size": 128})
    with pytest.raises(RecipeError, match="of another size"):
        require_adapter(_recipe(given), wider)

"""Whatever a user sets: it is refused with what, why and how to mend it, or it is planned.
MILES_EXAMPLES=10000 looks at so many settings."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from milescli.core.errors import MilesError
from milescli.core.plug_points import POINTS
from milescli.recipe.algorithms import ALGORITHMS
from milescli.recipe.keys import RecipeKey, keys
from milescli.recipe.load import load
from milescli.runtime.planning import plan_only

EXAMPLES = int(os.environ.get("MILES_EXAMPLES", "200"))
ELSEWHERE = (
    *("machine.address", "machine.nodes", "machine.gpus"),  # of other machines
    *("run.dir", "run.name", "name", "description", "run.project"),
    *("data.prompts", "data.eval", "data.demonstrations", "model.path", "model.revision"),
)
"""Keys whose values are names of something."""
WHOLE = (0, 1, 2, 3, 4, 8, 16, 64, 256, -1, 100_000)
NUMBERS = (0, 1e-6, 0.05, 0.1, 0.2, 0.5, 0.9, 0.99, 1.0, 1.5, 2, 3, 10, 100, -1, 1e30, "nan", "inf")
SHIPPED = {point.key: point.names() for point in POINTS if point.builtin}


def _value(key: RecipeKey, rng: random.Random) -> object:
    """One that its type allows, or nearly so; None: it takes text."""
    if key.name in SHIPPED:
        return rng.choice(SHIPPED[key.name])
    if key.name == "train.algorithm":
        return rng.choice(list(ALGORITHMS))
    if key.choices:
        return rng.choice(key.choices)
    if key.wants.startswith("true"):
        return rng.choice(("true", "false"))
    if key.optional and rng.random() < 0.2:
        return "null"
    if "whole number" in key.wants:
        return rng.choice(WHOLE)
    return rng.choice(NUMBERS) if "number" in key.wants else None


def _sets(rng: random.Random) -> list[str]:
    names = [name for name in keys() if name not in ELSEWHERE]
    weights = [6 if name.startswith(("train.", "rollout.", "data.")) else 1 for name in names]
    chosen = dict.fromkeys(rng.choices(names, weights, k=rng.randint(1, 7)))
    values = {name: _value(keys()[name], rng) for name in chosen}
    return [f"{name}={value}" for name, value in values.items() if value is not None]


@pytest.mark.parametrize("recipe", ["quickstart", "quickstart-moe"])
def test_it_is_refused_with_a_reason_or_planned(recipe: str, tmp_path: Path) -> None:
    rng, num_planned = random.Random(f"{recipe}/7"), 0
    for _ in range(EXAMPLES // 2):
        sets = _sets(rng)
        try:
            loaded = load(recipe, sets=sets, flags={}, environ={}, cwd=tmp_path, home=tmp_path)
            plan = plan_only(loaded)
        except MilesError as refused:
            assert refused.what and refused.why and all(refused.fixes), sets
            continue
        except Exception as error:
            raise AssertionError(f"{sets} end in {error!r}") from error
        assert plan.trainer.world_size >= 1, sets
        num_planned += 1
    assert EXAMPLES // 8 < num_planned < EXAMPLES // 2, "nearly all of them were alike"

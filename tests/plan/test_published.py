"""Layouts that are known to run are legal here and fit on their hardware; each exception says
why."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from milescli import models
from milescli.core.errors import FitError
from milescli.plan.make import make_plan
from milescli.platform.machine import parse_machine
from milescli.recipe.schema import Recipe
from tests.plan.published import CAUSES, ROWS, Row

CONFIGS = Path(
    os.environ.get(
        "MILES_PUBLISHED_CONFIGS", Path(__file__).resolve().parents[3] / "shared" / "configs"
    )
)
PROMPT = 256

pytestmark = pytest.mark.skipif(
    not CONFIGS.is_dir(), reason=f"published configs are not at {CONFIGS} (MILES_PUBLISHED_CONFIGS)"
)


def recipe_of(row: Row) -> Recipe:
    """Its layout as pins."""
    machine = parse_machine(row.machine)
    num_devices = len(machine.nodes) * len(machine.nodes[0].devices)
    pins = {
        "tp": row.tp,
        "pp": row.pp,
        "cp": row.cp,
        "ep": row.ep,
        "first_stage_layers": row.first,
        "last_stage_layers": row.last,
    }
    engines: dict[str, object] = {"tp": row.engine, "memory_fraction": row.mem}
    if row.trainer_devices is not None:
        pins["dp"] = row.trainer_devices // (row.tp * row.pp * row.cp)
        engines |= {"placement": "split", "num": (num_devices - row.trainer_devices) // row.engine}
    return Recipe.model_validate(
        {
            "name": row.name.replace("/", "-"),
            "model": {"path": "x"},
            "data": {
                "prompts": "x.jsonl",
                "max_prompt_tokens": min(
                    PROMPT, row.mt * row.cp - row.response if row.mt < 2048 else 10**6
                ),
            },
            "rollout": {
                "max_response_tokens": min(row.response, row.mt * row.cp - PROMPT),
                "prompts_per_step": row.prompts[0],
                "samples_per_prompt": row.prompts[1],
            },
            "train": {
                "max_tokens_per_microbatch": row.mt,
                "optimizer": {"offload": True if row.off else None},
            },
            "parallel": {key: value for key, value in pins.items() if value is not None},
            "engines": engines,
            "machine": {"nodes": len(machine.nodes)},
        }
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_what_is_known_to_run_fits(row: Row) -> None:
    facts = models.parse_facts(json.loads((CONFIGS / f"{row.model}.json").read_text()))
    if row.exception:
        with pytest.raises(FitError, match=CAUSES[row.exception]):
            make_plan(recipe_of(row), parse_machine(row.machine), facts)
        if row.instead is None:
            return
        row = replace(row, engine=row.instead)
    plan = make_plan(recipe_of(row), parse_machine(row.machine), facts)
    assert (plan.trainer.tp, plan.trainer.pp, plan.trainer.cp, plan.trainer.ep) == (
        row.tp,
        row.pp,
        row.cp,
        row.ep,
    )
    assert plan.forecast is not None

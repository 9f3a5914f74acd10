"""The JSON of a plan is an interface: its shape is written down for each version, real plans keep
to it, and a change of shape is a new version.

MILES_UPDATE_GOLDEN=1 python -m pytest tests/plan/test_schema.py      # after PLAN_SCHEMA has risen
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from milescli import models
from milescli.plan.make import make_plan
from milescli.plan.types import PLAN_SCHEMA, Plan
from milescli.platform.machine import parse_machine
from milescli.recipe.templates import shipped_shape
from tests.plan.recipes import make_recipe

WRITTEN = Path(__file__).parent / "golden" / f"plan.schema.{PLAN_SCHEMA}.json"


def _schema() -> dict[str, object]:
    """JSON Schema without prose, so that a better docstring is no change."""

    def bare(node: object) -> object:
        if isinstance(node, dict):
            return {
                key: bare(value)
                for key, value in sorted(node.items())
                if key not in ("description", "title")
            }
        return [bare(item) for item in node] if isinstance(node, list) else node

    schema = bare(TypeAdapter(Plan).json_schema(mode="serialization"))
    assert isinstance(schema, dict)
    return schema


def test_a_change_of_shape_is_a_new_version() -> None:
    text = json.dumps(_schema(), indent=1, sort_keys=True) + "\n"
    if os.environ.get("MILES_UPDATE_GOLDEN"):
        WRITTEN.write_text(text, encoding="utf-8")
    assert text == WRITTEN.read_text(encoding="utf-8"), (
        f"raise PLAN_SCHEMA above {PLAN_SCHEMA}, then write the new shape down"
    )


@pytest.mark.parametrize("machine", ["cpu", "8xH200", "2x8xMI300X"])
def test_real_plans_keep_to_the_shape(machine: str) -> None:
    shape = shipped_shape("Qwen/Qwen3-0.6B" if machine == "cpu" else "Qwen/Qwen3-30B-A3B")
    assert shape is not None
    plan = make_plan(make_recipe(machine), parse_machine(machine), models.parse_facts(shape))
    raw = json.loads(plan.to_json())
    assert raw["schema"] == PLAN_SCHEMA
    assert TypeAdapter(Plan).validate_json(plan.to_json(), strict=True) == plan
    assert (raw["forecast"] is None) == (machine == "cpu")


def test_plans_of_the_version_before_are_read() -> None:
    """Runs that began under version 1 are resumed."""
    shape = shipped_shape("Qwen/Qwen3-0.6B")
    assert shape is not None
    raw = json.loads(
        make_plan(make_recipe("cpu"), parse_machine("cpu"), models.parse_facts(shape)).to_json()
    )
    for new in ("first_stage_layers", "last_stage_layers", "recompute", "offload_optimizer"):
        del raw["trainer"][new]
    for new in ("ep", "attention_dp"):
        del raw["engines"][new]
    del raw["forecast"]
    raw["schema"] = 1
    assert Plan.from_json(json.dumps(raw)).trainer.recompute == "none"

"""Constants of a device: estimates until a visit has measured them, and then said so."""

from __future__ import annotations

import json

import pytest

from milescli.models import parse_facts
from milescli.plan import devices
from milescli.plan.devices import Efficiency, efficiency_of
from milescli.plan.make import make_plan
from milescli.plan.types import Plan
from milescli.platform.machine import parse_machine
from milescli.recipe.schema import Recipe
from milescli.recipe.templates import shipped_shape

SHAPE = shipped_shape("Qwen/Qwen3-0.6B")
RECIPE = {"model": {"path": "Qwen/Qwen3-0.6B"}, "data": {"prompts": "task:sums"}}


def plan(machine: str = "H100", **sections: object) -> Plan:
    assert SHAPE is not None
    recipe = Recipe.model_validate(RECIPE | sections)
    return make_plan(recipe, parse_machine(machine), parse_facts(SHAPE))


@pytest.fixture
def visited(tmp_path, monkeypatch):
    """A visit to an H100 has been made."""
    row = {"source": "results/x.json", "train_share": 0.225, "trainer_context": 1.5 * 2**30}
    file = tmp_path / "measured.json"
    file.write_text(json.dumps({"H100": row}))
    monkeypatch.setattr(devices, "FILE", file)
    devices._table.cache_clear()
    yield
    devices._table.cache_clear()


def test_what_a_visit_measured_replaces_the_estimates_of_that_device_alone(visited) -> None:
    assert efficiency_of("H100").train_share == 0.225
    assert efficiency_of("H100").measured == {"train_share", "trainer_context"}
    assert efficiency_of("H200") == Efficiency()


def test_a_forecast_says_what_was_measured_and_goes_by_it(visited, monkeypatch) -> None:
    there, elsewhere = plan().forecast, plan("H200").forecast
    assert there is not None and elsewhere is not None
    assert any("22% (measured)" in text for text in there.assumptions)
    assert "measured: results/x.json" in there.assumptions
    asleep = next(part for part in there.rollout if part.name == "trainer, asleep")
    assert (asleep.basis, asleep.size_bytes) == ("measured", int(1.5 * 2**30))
    assert not any("measured" in text for text in elsewhere.assumptions)
    assert all(part.basis != "measured" for part in elsewhere.rollout + elsewhere.training)
    # half the share, about twice the time
    assert there.train_parts_s["compute"] == pytest.approx(
        2 * elsewhere.train_parts_s["compute"], rel=0.05
    )


def test_engines_without_graphs_leave_their_memory_to_others() -> None:
    with_graphs, without = plan().forecast, plan(engines={"cuda_graphs": False}).forecast
    assert with_graphs is not None and without is not None
    sizes = [
        {part.name: part.size_bytes for part in forecast.rollout}
        for forecast in (with_graphs, without)
    ]
    assert sizes[0]["graphs"] == Efficiency().engine_graphs and sizes[1]["graphs"] == 0


def test_an_attention_that_a_cpu_has_not_is_said_to_be_replaced() -> None:
    settings = {"attention_backend": "triton"}
    noted = {
        machine: {choice.key: choice.value for choice in plan(machine, engines=settings).decisions}
        for machine in ("H100", "cpu")
    }
    assert noted["H100"]["engines.attention_backend"] == "triton"
    assert noted["cpu"]["engines.attention_backend"] == "torch_native"

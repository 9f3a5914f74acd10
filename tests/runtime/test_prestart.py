"""What begins before a run's inputs are there, and is gone at once where they are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from milescli.cluster.nodes import RunNodes
from milescli.core.run_processes import processes_of
from milescli.platform.probe import probe
from milescli.recipe.load import load
from milescli.recipe.model import Model
from milescli.runtime.inputs.model_facts import facts_of_recipe
from milescli.runtime.prestart import Prestarted, prestart_engines, prestart_ray
from tests.plans import PLAN

LOADED = load("quickstart", sets=[], flags={}, environ={}, cwd=Path(), home=Path())
RECIPE, FACTS = LOADED.recipe, facts_of_recipe(LOADED.recipe.model)


def test_a_run_that_is_refused_leaves_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.runtime.refused_run"],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen.pop("processes") > 3, "the warm process, Ray's servers, a rank"
    assert seen == {
        "scratch": True,
        "left": 0,
        "scratch left": False,
        "environment as before": True,
    }


def test_ray_waits_for_a_model_that_is_yet_to_be_fetched() -> None:
    named = RECIPE.model_copy(update={"model": Model(path="Qwen/Qwen3-0.6B")})
    nodes = RunNodes(machine=probe())
    with prestart_ray(named, PLAN, nodes, Prestarted()) as prestarted:
        assert prestarted.ray is None


@pytest.mark.parametrize(
    ("plan", "address"), [(replace(PLAN, device_kind="cuda"), None), (PLAN, "10.0.0.1:6379")]
)
def test_nothing_is_begun_on_an_accelerator_nor_where_engines_may_be_elsewhere(
    plan, address: str | None
) -> None:
    nodes = RunNodes(machine=probe(), address=address)
    with (
        prestart_engines(RECIPE, plan, FACTS, address=address) as engines_begun,
        prestart_ray(RECIPE, plan, nodes, engines_begun) as prestarted,
    ):
        assert prestarted.warm is None and prestarted.ray is None
        assert not list(processes_of(prestarted.token))

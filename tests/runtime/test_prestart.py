"""What begins before a run's inputs are there, and is gone at once where they are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from milescli.cluster.watchdog import processes_of
from milescli.core.errors import DataError
from milescli.recipe.load import load
from milescli.runtime.inputs import facts_of_recipe
from milescli.runtime.prestart import Prestarted, prestart_engines
from tests.plans import PLAN

LOADED = load("quickstart", sets=[], flags={}, environ={}, cwd=Path(), home=Path())
RECIPE, FACTS = LOADED.recipe, facts_of_recipe(LOADED.recipe.model)


def test_a_run_that_is_refused_leaves_no_process() -> None:
    held: list[Prestarted] = []
    with (
        pytest.raises(DataError),
        prestart_engines(RECIPE, PLAN, FACTS, address=None) as prestarted,
    ):
        held.append(prestarted)
        assert len(list(processes_of(prestarted.token))) == 1
        raise DataError("no such file", why="", fix="")
    assert not list(processes_of(held[0].token))


@pytest.mark.parametrize(
    ("plan", "address"), [(replace(PLAN, device_kind="cuda"), None), (PLAN, "10.0.0.1:6379")]
)
def test_nothing_is_begun_on_an_accelerator_nor_where_engines_may_be_elsewhere(
    plan, address: str | None
) -> None:
    with prestart_engines(RECIPE, plan, FACTS, address=address) as prestarted:
        assert prestarted.warm is None
        assert not list(processes_of(prestarted.token))

"""What is refused before any process starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from milescli.backends.ray.cluster import Cluster
from milescli.core.errors import ExitCode, MachineError
from milescli.models import parse_facts
from milescli.plan.types import Slot
from milescli.recipe.schema import Recipe, ScratchModel
from milescli.runtime.build import Builder
from milescli.runtime.scratch import config_of, make_model
from tests.backends.ray.test_cluster import PLAN


def _builder(folder: Path, slots: list[Slot]) -> Builder:
    make_model(ScratchModel(), folder / "model", seed=0)
    return Builder(
        recipe=Recipe(),
        plan=replace(PLAN, slots=slots),
        cluster=Cluster(address=None, temp_dir=folder, log_dir=folder, environment={}),
        model_dir=folder / "model",
        facts=parse_facts(config_of(ScratchModel())),
        log_dir=folder,
    )


def test_a_plan_over_two_machines_is_refused_rather_than_left_to_hang(tmp_path: Path) -> None:
    slots = [Slot(node=node, device=0, trainer_rank=node, engine=node, engine_rank=0) for node in range(2)]
    with pytest.raises(MachineError, match="spans 2 machines") as caught:
        _builder(tmp_path, slots).check()
    assert caught.value.exit_code is ExitCode.NOT_READY


def test_a_plan_on_one_machine_passes(tmp_path: Path) -> None:
    _builder(tmp_path, [Slot(node=0, device=0, trainer_rank=0, engine=0, engine_rank=0)]).check()

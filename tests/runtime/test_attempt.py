"""How an attempt ends where the user asks for it. The run itself is tested in end_to_end; here,
what a CPU cannot show: whose turn it is."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from milescli.checkpoint.run_dir import RunDir
from milescli.core.errors import Stopped
from milescli.core.events import EventBus
from milescli.recipe.load import load
from milescli.runtime.devices import Devices
from milescli.runtime.reinforcing import ReinforceAttempt
from milescli.runtime.saving import Progress
from milescli.runtime.spec import RunSpec
from tests.plans import PLAN
from tests.runtime.recorder import Recorder


class _Saver:
    """Notes what is saved; `newest_step` is complete."""

    def __init__(self, told: list[str], newest_step: int) -> None:
        self.told, self.newest_step = told, newest_step

    async def save(self, trainer: object, *, step: int, progress: Progress) -> None:
        self.told.append(f"save {step}")

    async def settle(self) -> None:
        self.told.append("settle")

    def require_saved(self, step: int) -> None:
        pass


def _stop(tmp_path, *, step: int, newest_step: int) -> list[str]:
    """What happens at a stop after a publish: engines answer, the trainer sleeps."""
    told: list[str] = []
    recipe = load("quickstart", environ={}, cwd=tmp_path, home=tmp_path).recipe
    spec = RunSpec(run=RunDir(tmp_path), recipe=recipe, plan=PLAN, nodes=None, inputs=None)  # type: ignore[arg-type]
    attempt = ReinforceAttempt(spec, session=None, bus=EventBus())  # type: ignore[arg-type]
    devices = Devices(
        taking_turns=True, trainer=Recorder("trainer", told), engines=Recorder("engines", told)
    )
    attempt.run = SimpleNamespace(  # type: ignore[assignment]
        step=step,
        devices=devices,
        trainer=None,
        groups=SimpleNamespace(position=0, taken=[], history={}),
        objective=None,
    )
    attempt.saver = _Saver(told, newest_step)  # type: ignore[assignment]

    with pytest.raises(Stopped, match=f"stopped after step {step}, and saved"):
        asyncio.run(attempt.save_and_stop(Stopped("stopped", why="asked", fix="none")))
    return told


def test_a_stop_after_a_publish_wakes_the_trainer_before_it_saves(tmp_path) -> None:
    assert _stop(tmp_path, step=3, newest_step=2) == [
        "settle",
        "engines.sleep",
        "trainer.wake",
        "save 3",
        "settle",
    ]


def test_a_stop_with_nothing_new_disturbs_nobody(tmp_path) -> None:
    assert _stop(tmp_path, step=3, newest_step=3) == ["settle"]

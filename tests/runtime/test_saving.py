"""When a checkpoint counts, and what becomes of a save that fails. The trainer is a stand-in that
writes when it is let; real ranks save in tests/backends/megatron."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from milescli.checkpoint.run_dir import RunDir
from milescli.checkpoint.store import CheckpointStore, save_failed
from milescli.core.errors import CheckpointError, MachineError, WaitTimeout
from milescli.core.events import CheckpointSaved, EventBus, Notice
from milescli.recipe.load import load
from milescli.runtime.saving import Progress, Saver
from tests.plans import PLAN
from tests.waiting import BOUND_S, until_async


class Writer:
    """Writes what it is asked to, unless `error` says otherwise."""

    def __init__(self) -> None:
        self.written = True
        self.error: Exception | None = None
        self.folder = Path()
        self.asked: list[str] = []
        self.looks = 0
        """How often it was asked whether all is written."""
        self.given_up = 0

    def note_saved(self) -> None:
        self.asked.append("note_saved")

    def note_save_failed(self) -> None:
        self.given_up += 1

    async def save(self, folder: Path) -> None:
        self.folder = folder
        (folder / "half").write_text("torn")

    async def is_written(self) -> bool:
        self.looks += 1
        return self.written

    async def finish_save(self) -> dict[str, str]:
        self.asked.append("finish_save")
        if self.error is not None:
            raise self.error
        return {}


class Rig:
    """A saver, and what it tells."""

    def __init__(self, folder: Path, *sets: str) -> None:
        run = RunDir(folder)
        run.recipe_file.write_text("")
        recipe = load("quickstart", sets=list(sets), environ={}, cwd=folder, home=folder).recipe
        spec = SimpleNamespace(
            run=run, recipe=recipe, plan=PLAN, inputs=SimpleNamespace(data_sha256="d")
        )
        self.events: list[Any] = []
        self.told: list[int] = []
        self.writer = Writer()
        self.saver = Saver(
            store=CheckpointStore(run.checkpoints),
            spec=spec,  # type: ignore[arg-type]
            bus=EventBus([self.events.append]),
            call_hook=self._call_hook,
        )

    async def _call_hook(self, hook: str, *, step: int, folder: Path) -> None:
        self.told.append(step)

    async def save(self, step: int) -> None:
        await self.saver.save(self.writer, step=step, progress=Progress())  # type: ignore[arg-type]

    def steps_of(self, kind: type) -> list[int]:
        return [event.step for event in self.events if isinstance(event, kind)]


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(work(), BOUND_S)

    asyncio.run(bounded())


def test_a_recipe_that_is_lost_while_the_run_goes_on_is_written_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    file = tmp_path / "recipe.yaml"
    file.unlink()

    async def work() -> None:
        await rig.save(1)
        await rig.saver.settle()

    run(work)
    assert file.read_text() == "" and rig.steps_of(CheckpointSaved) == [1]


def test_a_checkpoint_counts_as_soon_as_its_bytes_are_there(tmp_path: Path) -> None:
    rig = Rig(tmp_path)

    async def work() -> None:
        rig.writer.written = False
        await rig.save(3)
        await until_async(lambda: rig.writer.looks >= 2)
        assert rig.writer.asked == [] and rig.saver.store.steps() == []
        rig.writer.written = True
        await until_async(lambda: rig.told, "nobody asks for it")

    run(work)
    assert rig.saver.store.steps() == [3] and rig.saver.newest_step == 3
    assert rig.steps_of(CheckpointSaved) == [3]


def test_a_checkpoint_that_is_half_written_at_the_end_is_removed(tmp_path: Path) -> None:
    rig = Rig(tmp_path)

    async def work() -> None:
        await rig.save(3)
        await rig.saver.settle()
        rig.writer.written = False
        await rig.save(6)
        assert rig.saver.store.incomplete_steps() == [6]
        await rig.saver.close()
        await rig.saver.discard_unfinished()

    run(work)
    assert rig.saver.store.steps() == [3] and rig.saver.store.incomplete_steps() == []


def test_whoever_waits_for_a_checkpoint_does_not_wait_for_a_look(tmp_path: Path) -> None:
    rig = Rig(tmp_path)

    async def work() -> None:
        rig.writer.written = False
        await rig.save(3)
        await rig.saver.settle()
        assert rig.told == [3]
        await rig.saver.settle()

    run(work)


def test_a_save_that_fails_is_told_of_and_the_next_is_another_try(tmp_path: Path) -> None:
    rig = Rig(tmp_path)

    async def work() -> None:
        await rig.save(1)
        await rig.saver.settle()
        rig.writer.error = save_failed(rig.saver.store.path(2), "trainer rank 1: no space")
        await rig.save(2)
        await rig.saver.settle()
        assert not rig.saver.store.path(2).exists() and rig.writer.given_up == 1
        with pytest.raises(MachineError, match="step 2 could not be saved") as caught:
            rig.saver.require_saved(2)
        assert "trainer rank 1: no space" in caught.value.why
        assert "checkpoint step 1" in caught.value.why
        rig.writer.error = None
        await rig.save(3)
        await rig.saver.settle()
        rig.saver.require_saved(3)

    run(work)
    assert rig.saver.store.steps() == [1, 3]
    (warning,) = [event for event in rig.events if isinstance(event, Notice)]
    assert warning.level == "warning" and "the newest checkpoint is that of step 1" in warning.text
    assert str(tmp_path) in warning.text and "are free there" in warning.text


def test_a_failed_save_names_the_warm_up_that_an_earlier_attempt_saved(tmp_path: Path) -> None:
    rig = Rig(tmp_path)

    async def work() -> None:
        await rig.save(0)
        await rig.saver.settle()
        later = Rig(tmp_path)
        later.writer.error = save_failed(later.saver.store.path(0), "no space")
        await later.save(0)
        await later.saver.settle()
        assert later.saver.store.steps() == [0]
        with pytest.raises(MachineError) as caught:
            later.saver.require_saved(0)
        assert "it still has checkpoint step 0" in caught.value.why

    run(work)


def test_a_folder_that_cannot_be_made_is_a_save_that_fails(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.saver.store.folder.write_text("a file where the folder should be")
    run(lambda: rig.save(1))
    assert isinstance(rig.saver.failure, CheckpointError) and rig.writer.given_up == 1


def test_a_checkpoint_that_a_resumed_run_would_need_must_be_written(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "train.kl_coef=0.1")
    assert rig.saver.spec.recipe.keeps_reference

    async def work() -> None:
        rig.writer.error = save_failed(rig.saver.store.path(0), "no space")
        await rig.save(0)
        await until_async(lambda: rig.writer.given_up)
        with pytest.raises(CheckpointError, match="reference"):
            await rig.saver.settle()

    run(work)


def test_a_wait_that_met_its_bound_is_no_full_disk(tmp_path: Path) -> None:
    rig = Rig(tmp_path)

    async def work() -> None:
        rig.writer.error = WaitTimeout("a rank is silent", why="planted", fix="none")
        await rig.save(1)
        with pytest.raises(WaitTimeout):
            await until_async(rig.saver.probe)

    run(work)
    assert rig.writer.given_up == 0

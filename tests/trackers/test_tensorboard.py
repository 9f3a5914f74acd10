"""TensorBoard's own files, read by TensorBoard."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from milescli.trackers import tensorboard
from milescli.trackers.tensorboard import FOLDER, TensorBoard
from tests.trackers.running import events, run_in, tell


def read(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder / FOLDER))
    accumulator.Reload()
    return accumulator


def test_it_shows_every_scalar_and_the_recipe(tmp_path: Path) -> None:
    tell(TensorBoard(run=run_in(tmp_path)), events(1, 2))
    seen = read(tmp_path)
    rewards = [(one.step, one.value) for one in seen.Scalars("rollout/reward_mean")]
    assert rewards == [(1, pytest.approx(0.1)), (2, pytest.approx(0.2))]
    assert seen.Scalars("eval/accuracy")[0].value == 0.5
    [recipe] = seen.Tensors("recipe/text_summary")
    assert b"train.steps: 4" in recipe.tensor_proto.string_val[0]


def test_a_run_that_begins_again_before_its_first_checkpoint_has_one_curve(tmp_path: Path) -> None:
    for _ in range(2):
        tell(TensorBoard(run=run_in(tmp_path)), events(0, 1, 2), outcome="failed")
    assert [one.step for one in read(tmp_path).Scalars("train/loss")] == [0, 1, 2]


def test_steps_that_are_done_again_take_the_place_of_the_first(tmp_path: Path) -> None:
    tell(TensorBoard(run=run_in(tmp_path)), events(1, 2, 3), outcome="failed")
    tell(TensorBoard(run=run_in(tmp_path, first_step=2)), events(3, 4))
    steps = [one.step for one in read(tmp_path).Scalars("train/loss")]
    assert steps == [1, 2, 3, 4]


def test_a_full_disk_is_an_error_and_spoils_nothing_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = TensorBoard(run=run_in(tmp_path))
    with monkeypatch.context() as full:
        full.setattr(tensorboard, "free_bytes", lambda folder: 0)
        with pytest.raises(OSError, match=os.strerror(28)):
            board.log(1, {"train/loss": 0.5})
    tell(board, events(2))
    assert [one.step for one in read(tmp_path).Scalars("train/loss")] == [2]


def test_a_disk_that_is_full_at_the_start_is_an_error_before_its_thread_prints_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorboard, "free_bytes", lambda folder: 0)
    with pytest.raises(OSError, match=os.strerror(28)):
        TensorBoard(run=run_in(tmp_path))
    assert not (tmp_path / FOLDER).exists()

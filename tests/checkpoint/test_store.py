"""The store of a run's checkpoints: what counts as complete, what is forgotten, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from milescli.checkpoint.base import MANIFEST_NAME
from milescli.checkpoint.store import CheckpointStore
from milescli.core.errors import CheckpointError, ExitCode
from tests.checkpoint.making import manifest_of


def _save(store: CheckpointStore, step: int) -> None:
    folder = store.begin(step)
    (folder / "data").mkdir()
    (folder / "data" / "tensors.bin").write_bytes(b"x" * (10 + step))
    store.complete(step, manifest_of(step))


def test_a_checkpoint_is_found_again_with_its_files(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    _save(store, 3)
    newest = store.latest()
    assert newest is not None
    assert (newest.step, newest.path) == (3, tmp_path / "step_3")
    assert newest.manifest.files == {"data/tensors.bin": 13}
    assert newest.manifest.size_bytes == 13
    assert newest.manifest.prompt_position == 24


def test_steps_are_ordered_by_number(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=9)
    for step in (9, 10, 2):
        _save(store, step)
    assert store.steps() == [2, 9, 10]
    assert store.find(None).step == 10


def test_a_folder_without_manifest_does_not_count(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    _save(store, 1)
    store.begin(2)
    assert store.steps() == [1]
    assert store.torn() == [2]
    assert store.find(None).step == 1
    with pytest.raises(CheckpointError, match="step_2 was cut short") as caught:
        store.find(2)
    assert caught.value.exit_code is ExitCode.CHECKPOINT


def test_an_empty_store_has_no_latest(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "nowhere").latest() is None
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        CheckpointStore(tmp_path).find(None)


def test_the_newest_are_kept_and_the_protected_stay(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2, protect={0})
    for step in range(5):
        _save(store, step)
    assert store.steps() == [0, 3, 4]


def test_torn_folders_older_than_a_complete_one_go(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.begin(1)
    _save(store, 2)
    store.begin(3)
    assert store.torn() == [3]


@pytest.mark.parametrize("damage", ["shorter", "missing"])
def test_a_torn_file_is_named(tmp_path: Path, damage: str) -> None:
    store = CheckpointStore(tmp_path)
    _save(store, 1)
    _save(store, 2)
    file = tmp_path / "step_2" / "data" / "tensors.bin"
    if damage == "shorter":
        file.write_bytes(b"x")
    else:
        file.unlink()
    with pytest.raises(CheckpointError, match=r"data/tensors\.bin") as caught:
        store.latest()
    assert "step_1" in caught.value.fixes[0]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": 1}', json.dumps({"files": {"../../x": 1}})]
)
def test_a_manifest_that_cannot_be_used_is_refused(tmp_path: Path, text: str) -> None:
    store = CheckpointStore(tmp_path)
    _save(store, 1)
    path = tmp_path / "step_1" / MANIFEST_NAME
    if "files" in text:
        text = json.dumps(json.loads(path.read_text()) | json.loads(text))
    path.write_text(text)
    with pytest.raises(CheckpointError):
        store.latest()


def test_beginning_a_step_again_starts_empty(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    _save(store, 1)
    folder = store.begin(1)
    assert list(folder.iterdir()) == []
    assert store.steps() == []


def test_nothing_outside_the_folder_is_removed(tmp_path: Path) -> None:
    outside = tmp_path / "precious"
    outside.mkdir()
    (outside / "file").write_text("keep")
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)
    store.folder.mkdir()
    store.path(1).symlink_to(outside)
    for step in (2, 3):
        _save(store, step)
    with pytest.raises(CheckpointError, match="link"):
        store.begin(1)
    assert (outside / "file").read_text() == "keep"


def test_other_things_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "step_x").mkdir()
    store = CheckpointStore(tmp_path, keep=1)
    _save(store, 1)
    _save(store, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"notes", "step_x", "step_2"}

"""The store of a run's checkpoints: what counts as complete, what is forgotten, what is refused."""

from __future__ import annotations

import errno
import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from milescli.checkpoint.base import MANIFEST_NAME
from milescli.checkpoint.store import CheckpointStore, newest_recipe_sha256, restore_recipe
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
    assert store.incomplete_steps() == [2]
    assert store.find(None).step == 1
    with pytest.raises(CheckpointError, match="step_2 is incomplete") as caught:
        store.find(2)
    assert caught.value.exit_code is ExitCode.CHECKPOINT


def test_an_empty_store_has_no_latest(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "nowhere").latest() is None
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        CheckpointStore(tmp_path).find(None)


def test_the_newest_are_kept_and_the_initial_weights_stay(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2, needs=lambda step: {0})
    for step in range(5):
        _save(store, step)
    assert store.steps() == [0, 3, 4]


def test_the_reference_of_each_kept_checkpoint_is_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2, needs=lambda step: {0, step // 8 * 8})
    for step in (0, 8, 10, 12, 14, 16):
        _save(store, step)
    assert store.steps() == [0, 8, 12, 14, 16]
    for step in (18, 20):
        _save(store, step)
    assert store.steps() == [0, 16, 18, 20]


def test_torn_folders_older_than_a_complete_one_go(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.begin(1)
    _save(store, 2)
    store.begin(3)
    assert store.incomplete_steps() == [3]


def _damage(file: Path, how: str) -> None:
    if how == "shorter":
        file.write_bytes(b"x")
    elif how == "missing":
        file.unlink()
    else:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)


@pytest.mark.parametrize("how", ["shorter", "missing", "flipped"])
def test_a_damaged_file_is_named_and_the_step_before_is_the_fix(tmp_path: Path, how: str) -> None:
    store = CheckpointStore(tmp_path)
    _save(store, 1)
    _save(store, 2)
    _damage(tmp_path / "step_2" / "data" / "tensors.bin", how)
    for asked in (None, 2):
        with pytest.raises(CheckpointError, match=r"data/tensors\.bin") as caught:
            store.find(asked)
        assert caught.value.fixes[0].startswith("--step 1 ")
    whole, damages = store.newest_intact()
    assert whole is not None and whole.step == 1
    assert ["step_2" in damage.what for damage in damages] == [True]


@pytest.mark.parametrize("how", ["flipped", "missing"])
def test_where_no_checkpoint_is_whole_nothing_begins_anew(tmp_path: Path, how: str) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        _save(store, step)
        _damage(tmp_path / f"step_{step}" / "data" / "tensors.bin", how)
    with pytest.raises(CheckpointError, match="is intact") as caught:
        store.newest_intact()
    assert "step_1" in caught.value.why and "step_2" in caught.value.why
    assert CheckpointStore(tmp_path / "nowhere").newest_intact() == (None, [])


def test_a_save_that_was_cut_short_before_any_step_loses_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.begin(0)
    assert store.newest_intact() == (None, [])
    store.begin(3)
    with pytest.raises(CheckpointError, match="step_3 was cut short"):
        store.newest_intact()


@pytest.mark.parametrize("what", ["file", "link"])
def test_a_file_in_place_of_a_newer_checkpoint_is_not_passed_over(
    tmp_path: Path, what: str
) -> None:
    store = CheckpointStore(tmp_path)
    _save(store, 1)
    place = tmp_path / "step_2"
    place.touch() if what == "file" else place.symlink_to("step_2")
    with pytest.raises(CheckpointError, match=f"step_2 is a {what}") as caught:
        store.find(None)
    assert caught.value.fixes == ["--step 1   # the newest checkpoint"]
    assert store.find(1).step == 1
    whole, damages = store.newest_intact()
    assert whole is not None and whole.step == 1 and f"is a {what}" in damages[0].what
    _save(store, 3)
    assert store.find(None).step == 3


def test_a_lost_recipe_is_restored_from_the_newest_checkpoint_that_has_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    assert not restore_recipe(tmp_path) and newest_recipe_sha256(tmp_path) is None
    for step, recipe in ((1, "name: old"), (2, "name: new"), (3, "")):
        store.begin(step)
        store.complete(step, replace(manifest_of(step), recipe=recipe, recipe_sha256=f"r{step}"))
    assert restore_recipe(tmp_path) and newest_recipe_sha256(tmp_path) == "r3"
    assert (tmp_path / "recipe.yaml").read_text() == "name: new"


def test_a_flipped_byte_of_the_manifest_is_noticed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    _save(store, 1)
    path = tmp_path / "step_1" / MANIFEST_NAME
    path.write_text(path.read_text().replace('"prompt_position": 8', '"prompt_position": 9'))
    with pytest.raises(CheckpointError, match="manifest"):
        store.latest()


def test_a_manifest_of_an_older_version_is_read(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    _save(store, 1)
    path = tmp_path / "step_1" / MANIFEST_NAME
    record = json.loads(path.read_text())
    del record["sha256"], record["checksum"]
    path.write_text(json.dumps(record))
    assert store.find(1).manifest.sha256 == {}
    (tmp_path / "step_1" / "data" / "tensors.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="should have 11 bytes"):
        store.find(1)


def test_hashes_of_the_writer_are_kept_and_the_others_made(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    folder = store.begin(1)
    (folder / "theirs").write_bytes(b"written by a rank")
    (folder / "ours").write_bytes(b"x")
    told = {"theirs": "f" * 64, "elsewhere": "0" * 64}
    kept = store.complete(1, manifest_of(1), sha256=told).manifest.sha256
    assert kept == {"theirs": "f" * 64, "ours": hashlib.sha256(b"x").hexdigest()}
    with pytest.raises(CheckpointError, match="`theirs` was modified after it was written"):
        store.find(1)


def test_nothing_is_forgotten_before_the_newest_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    _save(store, 1)
    store.begin(2)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("milescli.checkpoint.store.write_atomically", full)
    with pytest.raises(OSError, match="No space"):
        store.complete(2, manifest_of(2))
    assert store.steps() == [1]
    store.discard(2)
    store.discard(1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]


def test_a_damaged_later_step_does_not_drive_out_the_one_that_was_gone_back_to(
    tmp_path: Path,
) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    _save(store, 3)
    _save(store, 6)
    _save(store, 4)
    assert store.steps() == [3, 4, 6]


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


def test_a_save_that_fails_leaves_the_checkpoint_that_it_was_to_replace(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    _save(store, 0)
    (store.begin(0) / "half").write_bytes(b"x")
    store.discard(0)
    assert store.steps() == [0] and store.find(0).manifest.files == {"data/tensors.bin": 10}
    _save(store, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["step_0"]


def test_a_save_that_is_killed_leaves_the_checkpoint_that_it_was_to_replace(tmp_path: Path) -> None:
    _save(CheckpointStore(tmp_path), 0)
    for _ in range(2):
        (CheckpointStore(tmp_path).begin(0) / "half").write_bytes(b"x")
    store = CheckpointStore(tmp_path)
    assert store.incomplete_steps() == [0]
    store.put_back()
    newest, damages = store.newest_intact()
    assert newest is not None and newest.manifest.files == {"data/tensors.bin": 10}
    assert not damages and [path.name for path in tmp_path.iterdir()] == ["step_0"]


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

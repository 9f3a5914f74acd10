"""Copies of checkpoints in an object store: what is copied and when, what is removed, what an
outage does, and what is fetched from there. On a store of files; S3 itself dies in one test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from milescli.backends.stores.store import ObjectStore, StoreError
from milescli.checkpoint.base import MANIFEST_NAME
from milescli.checkpoint.run_dir import RunDir
from milescli.checkpoint.store import CheckpointStore
from milescli.console.output import Mode, Output
from milescli.core.errors import CheckpointError, RecipeError
from milescli.core.events import CheckpointMirrored, Event, EventBus, Notice
from milescli.recipe.load import load
from milescli.recipe.resolved import resolved_yaml
from milescli.runtime.recovery.mirror import Mirror, objects_of_steps, require_mirror
from milescli.runtime.recovery.restoring import restore
from tests.checkpoint.making import manifest_of
from tests.loopback_services import BUCKET, needs_s3, s3_server
from tests.waiting import BOUND_S, until


class Moody(ObjectStore):
    """A store that fails while `is_down`, and notes how often it was called meanwhile."""

    is_down = is_final = keeps_all = False
    refused = 0

    def remove(self, names: list[str]) -> None:
        if names and self.keeps_all:
            raise StoreError("access is denied", why="an object lock", fix="wait")
        super().remove(names)

    def sizes(self, below: str = "") -> dict[str, int]:
        if self.is_down:
            self.refused += 1
            error = StoreError("the store is away", why="a storm", fix="wait")
            error.is_final = self.is_final
            raise error
        return super().sizes(below)


class Rig:
    """A run with checkpoints, its mirror, and what that tells."""

    def __init__(self, folder: Path, *sets: str, store: ObjectStore | None = None) -> None:
        self.run = RunDir(folder / "runs" / "mine")
        self.run.journal_dir.mkdir(parents=True)
        url = f"file://{folder}/store"
        wanted = [f"checkpoint.mirror={url}", *sets]
        self.loaded = load("quickstart", sets=wanted, environ={}, cwd=folder, home=folder)
        self.recipe = self.loaded.recipe
        self.run.recipe_file.write_text(resolved_yaml(self.loaded))
        self.run.manifest_file.write_text("{}")
        self.run.events_file.write_text('{"event": "CheckpointSaved", "step": 1}\n')
        (self.run.journal_dir / "1.journal").write_text("finished samples")
        (self.run.journal_dir / "collector-0").mkdir()
        (self.run.journal_dir / "collector-0" / "1.journal").write_text("of another process")
        self.run.own_model_dir.mkdir()
        (self.run.own_model_dir / "model.safetensors").write_bytes(b"w" * 64)
        self.checkpoints = CheckpointStore(self.run.checkpoints, keep=2)
        self.store = store or Moody(f"{url}/mine", instead="--set checkpoint.mirror=null")
        self.events: list[Event] = []
        self.bus = EventBus([self.events.append])
        self.mirror = self.new_mirror()

    def new_mirror(self) -> Mirror:
        return Mirror(self.store, self.run, self.checkpoints, pauses_s=(0.01, 0.01))

    def save(self, *steps: int) -> None:
        for step in steps:
            folder = self.checkpoints.begin(step)
            (folder / "tensors.bin").write_bytes(b"%d" % step * 1000)
            self.checkpoints.complete(step, manifest_of(step))
            self.mirror.enqueue(step)

    def until_copied(self, step: int) -> None:
        def look() -> bool:
            self.mirror.emit_news(self.bus)
            return step in self.copied

        until(look, f"a copy of step {step}")

    @property
    def copied(self) -> list[int]:
        return [one.step for one in self.events if isinstance(one, CheckpointMirrored)]

    @property
    def warnings(self) -> list[str]:
        return [one.text for one in self.events if isinstance(one, Notice)]

    def finish(self, bound_s: float = BOUND_S) -> None:
        asyncio.run(self.mirror.finish(self.bus, bound_s=bound_s, gives_up=lambda: False))

    def complete(self) -> list[int]:
        found = objects_of_steps(self.store)
        return sorted(step for step, names in found.items() if MANIFEST_NAME in names)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.mirror.close()


def test_what_the_disk_keeps_is_what_the_store_keeps(rig: Rig) -> None:
    rig.checkpoints.needs = lambda step: {0}
    rig.save(0, 1)
    rig.mirror.begin()
    for step in (2, 3, 4):
        rig.until_copied(step - 1)
        rig.save(step)
    rig.until_copied(4)
    assert rig.complete() == rig.checkpoints.steps() == [0, 3, 4]
    assert not rig.warnings and not (rig.run.path / ".mirror").exists()
    assert rig.store.read("step_4/run/journal/1.journal") == b"finished samples"
    assert rig.store.read("made/model/model.safetensors") == b"w" * 64


def test_the_reference_of_each_kept_copy_is_kept(rig: Rig) -> None:
    rig.checkpoints.needs = lambda step: {0, step // 8 * 8}
    rig.mirror.begin()
    for step in (0, 8, 12, 14, 16):
        rig.save(step)
        rig.until_copied(step)
    rig.finish()
    assert rig.complete() == rig.checkpoints.steps() == [0, 8, 12, 14, 16]


def test_of_those_that_wait_only_the_newest_is_copied(rig: Rig) -> None:
    rig.save(1, 2, 3)
    rig.mirror.begin()
    rig.until_copied(3)
    assert rig.copied == [3] and rig.complete() == [3]


def test_an_outage_is_told_once_and_later_saves_are_copied(rig: Rig) -> None:
    rig.store.is_down = True
    rig.mirror.begin()
    rig.save(1)
    until(lambda: rig.store.refused == 3 and not rig.mirror.has_pending)
    rig.save(2)
    until(lambda: rig.store.refused == 6 and not rig.mirror.has_pending)
    rig.mirror.emit_news(rig.bus)
    [told] = rig.warnings
    assert "step 1 could not be copied: the store is away (a storm)" in told
    rig.store.is_down = False
    rig.save(3)
    rig.until_copied(3)
    rig.finish()
    assert rig.complete() == [3] and len(rig.warnings) == 1


def test_a_reference_that_could_not_be_copied_is_copied_later(rig: Rig) -> None:
    rig.checkpoints.needs = lambda step: {0}
    rig.store.is_down = rig.store.is_final = True
    rig.mirror.begin()
    rig.save(0, 1)
    until(lambda: rig.store.refused and not rig.mirror.has_pending)
    rig.store.is_down = False
    rig.save(2)
    rig.until_copied(2)
    assert rig.complete() == [0, 2]


def test_what_is_final_is_not_tried_again(rig: Rig) -> None:
    rig.store.is_down = rig.store.is_final = True
    rig.mirror.begin()
    rig.save(1)
    until(lambda: rig.store.refused and not rig.mirror.has_pending)
    assert rig.store.refused == 1
    rig.finish()
    assert "lacks the newest checkpoint, which is in" in rig.warnings[-1]


def test_a_store_that_removes_nothing_still_takes_copies(rig: Rig) -> None:
    rig.store.keeps_all = True
    _mirrored(rig, 1, 2, 3, 4)
    rig.finish()
    assert rig.copied == [1, 2, 3, 4] == rig.complete()
    assert [told.rpartition(": ")[2] for told in rig.warnings] == ["an object lock"]


def test_the_end_waits_within_its_bound_and_says_what_is_missing(rig: Rig) -> None:
    rig.store.is_down = True
    rig.mirror = Mirror(rig.store, rig.run, rig.checkpoints, pauses_s=(BOUND_S,))
    rig.mirror.begin()
    rig.save(1)
    until(lambda: rig.store.refused)
    rig.finish(bound_s=0.0)
    assert "lacks the newest checkpoint" in rig.warnings[-1]


def test_the_next_attempt_completes_what_was_cut_short(rig: Rig) -> None:
    rig.save(1)
    rig.mirror.begin()
    rig.until_copied(1)
    rig.mirror.close()
    rig.store.remove([f"step_1/{MANIFEST_NAME}"])
    assert rig.complete() == []
    rig.mirror = rig.new_mirror()
    rig.mirror.begin()
    until(lambda: rig.complete() == [1] and not rig.mirror.has_pending)
    record = rig.store.read("step_1/.miles-upload.json")
    rig.run.events_file.write_text('{"event": "RunEnded", "step": 1}\n')
    rig.mirror.close()
    rig.mirror = rig.new_mirror()  # a copy that is complete is not touched
    rig.mirror.begin()
    until(lambda: not rig.mirror.has_pending)
    assert rig.store.read("step_1/.miles-upload.json") == record


def test_another_run_of_the_same_name_is_not_overwritten(rig: Rig, tmp_path: Path) -> None:
    require_mirror(rig.recipe, rig.run)
    require_mirror(rig.recipe, rig.run)
    other = RunDir(tmp_path / "elsewhere" / "mine")
    other.path.mkdir(parents=True)
    with pytest.raises(RecipeError, match="another run") as caught:
        require_mirror(rig.recipe, other)
    assert f"miles resume {rig.store.url}" in caught.value.fixes[1]


def _restore(rig: Rig, runs: Path) -> RunDir:
    return RunDir(restore(rig.store.url, runs=runs, output=Output(Mode.QUIET)))


def _mirrored(rig: Rig, *steps: int) -> None:
    rig.mirror.begin()
    for step in steps:
        rig.save(step)
        rig.until_copied(step)


def test_a_lost_run_is_fetched_with_what_it_goes_on_with(rig: Rig, tmp_path: Path) -> None:
    _mirrored(rig, 1, 2)
    found = _restore(rig, tmp_path / "other")
    assert found.path == tmp_path / "other" / "mine" and not [*(tmp_path / "other").glob(".*")]
    store = CheckpointStore(found.checkpoints)
    assert store.steps() == [2] and store.find(2).manifest.prompt_position == 16
    assert (found.own_model_dir / "model.safetensors").read_bytes() == b"w" * 64
    assert (found.journal_dir / "1.journal").read_text() == "finished samples"
    part = found.journal_dir / "collector-0" / "1.journal"
    assert part.read_text() == "of another process"
    assert found.tracking_id() == rig.run.tracking_id()
    with pytest.raises(CheckpointError, match="already exists") as caught:
        _restore(rig, tmp_path / "other")
    assert caught.value.fixes[0].startswith("miles resume ")


def test_a_run_that_keeps_a_reference_is_fetched_with_it(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "train.kl_coef=0.1")
    rig.checkpoints.needs = lambda step: {0}
    _mirrored(rig, 0, 1, 2)
    rig.mirror.close()
    assert CheckpointStore(_restore(rig, tmp_path / "other").checkpoints).steps() == [0, 2]


@pytest.mark.parametrize("text", ["2" * 999, "3" * 1000])
def test_a_damaged_copy_is_passed_over_and_never_taken(
    text: str, rig: Rig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _mirrored(rig, 1, 2)
    rig.store.write("step_2/tensors.bin", text.encode())
    found = _restore(rig, tmp_path / "other")
    assert CheckpointStore(found.checkpoints).steps() == [1]
    assert "step_2/tensors.bin is damaged" in capsys.readouterr().err
    rig.store.write("step_1/tensors.bin", b"1")
    with pytest.raises(CheckpointError, match="is intact") as caught:
        _restore(rig, tmp_path / "third")
    assert "step_1/tensors.bin" in caught.value.why and not (tmp_path / "third/mine").exists()


def test_a_copy_that_was_cut_short_is_none(rig: Rig, tmp_path: Path) -> None:
    _mirrored(rig, 1)
    rig.store.remove([f"step_1/{MANIFEST_NAME}"])
    with pytest.raises(CheckpointError, match="no complete checkpoint") as caught:
        _restore(rig, tmp_path / "other")
    assert "cut short" in caught.value.why and not (tmp_path / "other").exists()


def test_a_folder_of_runs_is_not_a_run(rig: Rig, tmp_path: Path) -> None:
    _mirrored(rig, 1)
    with pytest.raises(CheckpointError) as caught:
        restore(f"file://{tmp_path}/store", runs=tmp_path / "other", output=Output(Mode.QUIET))
    assert caught.value.fixes == [f"miles resume file://{tmp_path}/store/mine"]


@needs_s3
@pytest.mark.slow
def test_a_server_that_dies_during_a_copy_and_comes_back_has_all_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3_server(tmp_path) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        store = ObjectStore(f"s3://{BUCKET}/runs/mine", instead="--set checkpoint.mirror=null")
        rig = Rig(tmp_path, store=store)
        rig.mirror.begin()
        rig.save(1)
        until(lambda: not rig.mirror.has_pending)
        server.kill()
        rig.save(2)

        def is_told() -> list[str]:
            rig.mirror.emit_news(rig.bus)
            return rig.warnings

        assert "step 2 could not be copied" in until(is_told)[0]
        server.start()
        rig.save(3)
        rig.until_copied(3)
        assert rig.complete()[-1] == 3
        found = _restore(rig, tmp_path / "other")
        rig.mirror.close()
        assert CheckpointStore(found.checkpoints).find(3).step == 3
        assert json.loads(found.events_file.read_text())["step"] == 1

"""`miles export --to URL`: files of weights go to the store one by one, and config.json last."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from milescli.backends.stores.store import ObjectStore, StoreError
from milescli.checkpoint.source import open_source
from milescli.console.output import Mode, Output
from milescli.core.errors import CheckpointError
from milescli.export.folder import write_folder
from milescli.runtime import export as module
from milescli.runtime.export import export_weights
from milescli.runtime.uploading import destination
from tests.export.models import QWEN3_MOE, make_base, weights_of

QUIET = Output(Mode.QUIET)


def exported(base: Path, to: str, **options: object) -> None:
    """As the command does it."""
    with destination(to, output=QUIET) as place:
        export_weights(
            base,
            to=place.folder,
            deliver=place.deliver,
            format="fp8",
            step=None,
            base=None,
            merge=False,
            push=None,
            private=True,
            output=QUIET,
            **options,
        )


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model that takes several files."""
    make_base(tmp_path / "base", QWEN3_MOE)
    monkeypatch.setattr(module, "write_folder", partial(write_folder, max_shard_bytes=30_000))
    return tmp_path / "base"


def test_an_upload_that_was_cut_short_is_completed_with_one_file_on_the_disk_at_a_time(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, names = ObjectStore.put, list[str]()

    def watched(store: ObjectStore, file: Path, name: str, **options) -> None:  # type: ignore[no-untyped-def]
        if name.endswith(".safetensors"):
            assert list(file.parents[2].rglob("*.safetensors")) == [file]
            if len(names) == 2:
                raise StoreError("cut", why="a kill", fix="again")
        names.append(name)
        put(store, file, name, **options)

    monkeypatch.setattr(ObjectStore, "put", watched)
    url, there = f"file://{tmp_path}/store/model", tmp_path / "store" / "model"
    with pytest.raises(StoreError, match="cut"):
        exported(base, url)
    assert sorted(one.name for one in there.glob("*.*")) == [
        ".miles-upload.json",
        "model-00001.safetensors",
        "model-00002.safetensors",
    ]
    monkeypatch.setattr(ObjectStore, "put", put)
    exported(base, url)
    export_weights(
        base,
        to=tmp_path / "whole",
        format="fp8",
        step=None,
        base=None,
        merge=False,
        push=None,
        private=True,
        output=QUIET,
    )
    with open_source(there) as ours, open_source(tmp_path / "whole") as whole:
        assert ours.names() == whole.names()
    tensors, expected = (weights_of(place) for place in (there, tmp_path / "whole"))
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
    assert (there / "README.md").read_text() and (there / "tokenizer.json").exists()
    with pytest.raises(CheckpointError, match="already exists"):
        exported(base, url)


def test_too_small_a_disk_is_told_with_what_it_needs_at_a_time(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        free = 29_999

    monkeypatch.setattr("milescli.export.folder.shutil.disk_usage", lambda path: Full)
    with pytest.raises(CheckpointError, match="is too small") as refused:
        exported(base, f"file://{tmp_path}/store/model")
    assert "at a time" in refused.value.why and "TMPDIR" in refused.value.fixes[0]
    assert not list((tmp_path / "store").rglob("*.safetensors"))


def test_a_disk_that_fills_while_files_are_sent_is_the_scratch_disk(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("milescli.export.folder.shard_files", full)
    with pytest.raises(CheckpointError, match="is full") as refused:
        exported(base, f"file://{tmp_path}/store/model")
    assert "TMPDIR" in refused.value.fixes[0]

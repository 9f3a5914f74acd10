"""What is carried along beside weights: the model's own files, and nothing that they point to."""

from __future__ import annotations

from pathlib import Path

import pytest

from milescli.checkpoint.record import copy_non_weights
from milescli.core.errors import CheckpointError


def test_a_link_out_of_the_folder_is_refused_and_nothing_is_copied(tmp_path: Path) -> None:
    (tmp_path / "private").write_text("secret")
    model = tmp_path / "model"
    (model / "additional_chat_templates").mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "same.json").symlink_to("config.json")
    assert copy_non_weights(model, tmp_path / "copy") == [
        "additional_chat_templates",
        "config.json",
        "same.json",
    ]
    for place in (model / "extra.txt", model / "additional_chat_templates" / "extra.jinja"):
        place.symlink_to(tmp_path / "private")
        with pytest.raises(CheckpointError, match="points outside") as caught:
            copy_non_weights(model, tmp_path / "other")
        assert str(tmp_path / "private") in caught.value.why
        assert not (tmp_path / "other").exists()
        place.unlink()


def test_links_of_the_hubs_cache_to_its_blobs_are_followed(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    (blobs / "123").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/123")
    assert copy_non_weights(snapshot, tmp_path / "copy") == ["config.json"]
    assert (tmp_path / "copy" / "config.json").read_text() == "{}"

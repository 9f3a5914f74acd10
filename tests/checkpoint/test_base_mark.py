"""A base model is known by samples of its weights, wherever they differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from milescli.checkpoint.base_mark import mark_of, require_base
from milescli.core.errors import CheckpointError


def _model(folder: Path, content: bytes) -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(content)
    return folder


@pytest.mark.parametrize("changed", [0, 999, 70_000, 150_000, 199_999])
def test_other_weights_have_another_mark(tmp_path: Path, changed: int) -> None:
    content = bytearray(range(256)) * 800
    one = _model(tmp_path / "one", bytes(content))
    copy = _model(tmp_path / "copy", bytes(content))
    content[changed] ^= 1
    other = _model(tmp_path / "other", bytes(content))
    assert mark_of(one) == mark_of(copy) != mark_of(other)
    require_base(mark_of(one), copy, checkpoint=tmp_path)
    with pytest.raises(CheckpointError, match="another base model"):
        require_base(mark_of(one), other, checkpoint=tmp_path)


def test_a_model_of_other_files_has_another_mark(tmp_path: Path) -> None:
    one, other = _model(tmp_path / "one", b"a"), _model(tmp_path / "other", b"a")
    (other / "more.safetensors").write_bytes(b"")
    assert mark_of(one) != mark_of(other)

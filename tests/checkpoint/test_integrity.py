"""Room on a disk. That files are those which were written is tested with the store."""

from __future__ import annotations

from pathlib import Path

import pytest

from milescli.checkpoint.integrity import free_bytes


def test_room_is_told_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "a" / "b") == pytest.approx(free_bytes(tmp_path), rel=0.05)

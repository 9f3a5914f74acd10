"""Trackio's own database, read by its own interface. It weighs 160 MB, and is tested where it is
installed: `pip install 'miles-cli[trackio]'`."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("trackio", reason="trackio is not installed: pip install 'miles-cli[trackio]'")

from milescli.trackers.trackio import Trackio
from tests.trackers.running import events, run_in, tell


def test_a_run_that_is_resumed_goes_on_in_the_same_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from trackio.sqlite_storage import SQLiteStorage

    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path)
    tell(Trackio(run=run_in(tmp_path)), events(1, 2), outcome="stopped")
    tell(Trackio(run=run_in(tmp_path, first_step=2)), events(3))
    assert SQLiteStorage.get_runs("sums") == ["sums-1-4f2a90c1"]
    logs = SQLiteStorage.get_logs("sums", "sums-1-4f2a90c1")
    steps = [(one["step"], one["train/grad_norm"]) for one in logs if "train/grad_norm" in one]
    assert steps == [(1, 0.83), (2, 0.83), (3, 0.83)]
    config = SQLiteStorage.get_run_config("sums", "sums-1-4f2a90c1")
    assert config["train.steps"] == 4 and config["name"] == "sums"
    assert not capfd.readouterr().out, "stdout is the run's own"

"""What a launch refuses before it makes anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from milescli.core.errors import ExitCode, MachineError
from milescli.recipe.load import load
from milescli.runtime.launch import launch


def test_several_machines_are_refused_rather_than_left_to_hang_and_no_run_is_made(tmp_path: Path) -> None:
    sets = ["machine.nodes=2", f"run.dir={tmp_path / 'runs'}"]
    loaded = load("quickstart", sets=sets, environ={}, cwd=tmp_path, home=tmp_path)
    with pytest.raises(MachineError, match="2 machines are wanted") as caught:
        launch(loaded, output=None)  # type: ignore[arg-type]  (refused before anything is said)
    assert caught.value.exit_code is ExitCode.NOT_READY
    assert not (tmp_path / "runs").exists()

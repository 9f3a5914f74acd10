"""The state and the error of a trial, from the records that its process and its run have left."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from milescli.sweep import trial_process
from milescli.sweep.folder import SweepDir, Trial, TrialState
from milescli.sweep.trial_process import TrialProcess
from tests.waiting import until

KILLED = """
import os, signal, sys
print('{"kind": "note", "text": "it resumes"}', file=sys.stderr, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_error_of_a_trial_is_not_that_of_an_earlier_process(
    new_sweep: Callable[[str], SweepDir], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, trial = new_sweep(""), Trial(number=1, settings={}, run_name="toy-1")
    log = folder.log_file(trial)
    log.parent.mkdir(exist_ok=True)
    log.write_text(json.dumps({"kind": "error", "error": "the run was stopped"}) + "\n")
    (tmp_path / "killed_main.py").write_text(KILLED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(trial_process, "MAIN", "killed_main")
    process = TrialProcess(folder, trial, ["resume", "toy-1"], {})
    until(lambda: process.ended() is not None)
    assert process.ended() is TrialState.FAILED
    assert trial.error["error"] == "trial toy-1 ended with exit code -9"


@pytest.mark.parametrize("state", [TrialState.FAILED, TrialState.STOPPED_EARLY])
def test_a_trial_that_a_user_trained_to_its_end_is_done(
    new_sweep: Callable[[str], SweepDir], state: TrialState
) -> None:
    folder = new_sweep("")
    trial = Trial(number=1, settings={}, run_name=f"{folder.name}-1", state=state)
    folder.record(trial)
    assert [one.state for one in folder.trials()] == [state]
    run = folder.run_of(trial)
    attempt = run.path / "logs" / "attempt_1"
    attempt.mkdir(parents=True)
    run.recipe_file.write_text("{}")
    (attempt / "verdict.json").write_text('{"outcome": "done"}')
    assert [one.state for one in folder.trials()] == [TrialState.DONE]

"""Sweeps whose trials are made up: a trial writes what its run would have written, at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest

from milescli.core.events import to_record
from milescli.core.history import Evaluation
from milescli.insight.reader import RunReader
from milescli.recipe.sweep import read_sweep
from milescli.sweep import running
from milescli.sweep.folder import SweepDir, Trial, TrialState, create_sweep
from milescli.sweep.planning import TrialPlanner
from tests.fake_run import eval_done

RECIPE = Path(__file__).parents[2] / "templates" / "quickstart.yaml"
STEPS, EVERY = 12, 3
SHARED = {"MILES_WARM_ENGINES": "nobody listens"}
Accuracy = Callable[[Trial, int], float]


class ToyTrial:
    """Takes the place of a TrialProcess. `accuracy` may raise KeyboardInterrupt, a Ctrl-C, or
    ChildProcessError, by which the trial fails."""

    accuracy: Accuracy
    started: list[tuple[str, Sequence[str]]]

    def __init__(
        self, folder: SweepDir, trial: Trial, words: Sequence[str], variables: Mapping[str, str]
    ) -> None:
        assert variables == SHARED
        self.trial, self.run = trial, folder.run_of(trial)
        self.started.append((trial.run_name, words))
        (self.run.path / "logs" / "attempt_1").mkdir(parents=True, exist_ok=True)
        if words[0] == "launch":
            self.run.recipe_file.write_text(RECIPE.read_text())
        self.reader = RunReader(self.run)
        self.reader.update()
        seen = self.reader.history.evaluations
        self.step = seen[-1].step if seen else -EVERY
        self.wanted: TrialState | None = None
        self.state: TrialState | None = None

    def new_evaluations(self) -> Iterator[Evaluation]:
        """One more, unless the trial has ended."""
        if self.state is not None:
            return
        self.step += EVERY
        try:
            event = eval_done(self.step, type(self).accuracy(self.trial, self.step))
        except ChildProcessError as error:
            self.trial.error = {"error": str(error), "why": "it was told to", "fix": ["mend it"]}
            self._end(TrialState.FAILED)
            return
        record = {"time": f"2026-11-25T22:{self.trial.number:02}:{self.step:02}Z"}
        with self.run.events_file.open("a") as file:
            file.write(json.dumps({**record, **to_record(event)}) + "\n")
        self.reader.update()
        yield self.reader.history.evaluations[-1]
        if self.state is None and self.step >= STEPS:
            self._end(TrialState.DONE)

    def _end(self, state: TrialState) -> None:
        self.state = state
        outcome = state if state in (TrialState.DONE, TrialState.FAILED) else "stopped"
        verdict = self.run.path / "logs" / "attempt_1" / "verdict.json"
        verdict.write_text(json.dumps({"outcome": outcome}))

    def stop(self, wanted: TrialState) -> None:
        """Save and stop."""
        self.wanted = wanted
        self._end(wanted)

    def ended(self) -> TrialState | None:
        """How it ended."""
        return self.state

    def new_warnings(self) -> Iterator[str]:
        """None."""
        yield from ()


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[ToyTrial]:
    """Trials are made up, and nothing is waited for."""

    class Toys(ToyTrial):
        started: list[tuple[str, Sequence[str]]] = []  # noqa: RUF012

    monkeypatch.setattr(running, "TrialProcess", Toys)
    monkeypatch.setattr(running, "CHECK_EVERY_S", 0.0)
    monkeypatch.setattr(
        TrialPlanner, "shared_processes", lambda self, settings: nullcontext(SHARED)
    )
    monkeypatch.setenv("MILES_RUN__DIR", str(tmp_path / "runs"))
    return Toys


@pytest.fixture
def new_sweep(tmp_path: Path) -> Callable[[str], SweepDir]:
    """Make the folder of a sweep over the learning rate, with further keys."""

    def make(further: str = "") -> SweepDir:
        file = tmp_path / "lr.yaml"
        file.write_text(
            f"recipe: quickstart\nset: {{train.steps: {STEPS}, eval.every: {EVERY}}}\n{further}\n"
            "search: {train.optimizer.lr: {loguniform: [1e-5, 1e-2]}}\n"
        )
        environ = {"MILES_RUN__DIR": str(tmp_path / "runs")}
        return create_sweep(read_sweep(file), environ=environ, cwd=tmp_path, home=tmp_path)

    return make

"""Implements `miles sweep`: gets settings from the searcher, runs trials, passes their evaluations
to the scheduler, and carries out its decisions. Decisions are written to the ledger first, so that
a killed sweep can continue: it replays the recorded results to both, and continues unfinished
trials."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack

from milescli.backends.ray.tuning import Population, Scheduler, Verdict, make_searcher
from milescli.checkpoint.run_dir import RunDir, is_locked, step_saved
from milescli.checkpoint.run_lock import lock
from milescli.console.output import Output
from milescli.core.errors import MilesError, Stopped, WaitTimeout
from milescli.core.history import Evaluation
from milescli.insight.reader import read_history
from milescli.report.evaluations import interval_of
from milescli.report.formats import accuracy as shown_accuracy
from milescli.report.formats import interval
from milescli.runtime.fork import fork
from milescli.sweep.folder import ENDED, SweepDir, Trial, TrialState
from milescli.sweep.planning import TrialPlanner, make_scheduler
from milescli.sweep.trial_process import STOP_TIMEOUT_S, TrialProcess, remove_unstarted

CHECK_EVERY_S = 0.5
"""Seconds between two checks of the trials."""


def run_sweep(folder: SweepDir, *, output: Output) -> list[Trial]:
    """Run all trials that have not ended, and return all. Raises Stopped if the user stopped the
    sweep, MilesError if another process works on it, or if every trial failed."""
    if is_locked(RunDir(folder.path)):
        raise MilesError(
            f"the sweep {folder.name} is running",
            why=f"another miles process works on {folder.shown}",
            fix=[f"miles report {folder.typed}", f"miles stop {folder.typed}"],
        )
    with lock(RunDir(folder.path)):
        sweeping = _SweepRunner(folder, output=output)
        try:
            sweeping.run()
        except (KeyboardInterrupt, SystemExit) as raised:
            sweeping.stop_all()
            raise Stopped(
                f"the sweep {folder.name} was stopped",
                why=f"{sweeping.num_ended} of {folder.sweep.num_trials} trials have ended; the "
                "others are saved",
                fix=f"miles resume {folder.typed}",
            ) from raised
    trials = sweeping.trials
    failed = [one for one in trials if one.state in (TrialState.FAILED, TrialState.REFUSED)]
    if len(failed) == len(trials):
        first = failed[0].error
        raise MilesError(
            f"all {len(trials)} trials of the sweep failed",
            why=f"{failed[0].run_name}: {first.get('error')}; {first.get('why')}",
            fix=[
                *[str(one) for one in first.get("fix", [])][:2],
                f"less {folder.log_file(failed[0])}",
            ],
        )
    return trials


class _SweepRunner:
    """Runs the trials of a sweep."""

    def __init__(self, folder: SweepDir, *, output: Output) -> None:
        self.folder, self.output, self.sweep = folder, output, folder.sweep
        self.trials = folder.trials()
        self.planner = TrialPlanner(sweep=self.sweep, recipe=folder.recipe, cwd=folder.cwd)
        settings = self.sweep.settings
        self.searcher = make_searcher(
            self.sweep.dimensions,
            kind=settings.searcher,
            trials=self.sweep.num_trials,
            seed=settings.seed,
            known=[one.settings for one in self.trials],
        )
        self.scheduler: Scheduler | None = None
        """Made with the first trial's recipe, which determines how long trials are."""
        self.active: list[TrialProcess] = []
        self._begun = set[int]()
        """Trials that this process has started; if a user stops one, it stays stopped."""
        self._shared: Mapping[str, str] | None = None
        """Variables by which trials find what they share; None before the first one."""

    @property
    def num_ended(self) -> int:
        return sum(one.state in ENDED for one in self.trials)

    def run(self) -> None:
        """Run until nothing is left to do."""
        self._replay_results()
        with ExitStack() as stack:
            while True:
                while len(self.active) < self.sweep.settings.at_once and (trial := self._next()):
                    if self._shared is None:
                        self._shared = stack.enter_context(
                            self.planner.shared_processes(trial.settings)
                        )
                    self._start(trial)
                if not self.active:
                    return
                for one in list(self.active):
                    self._check_trial(one)
                time.sleep(CHECK_EVERY_S)

    def stop_all(self) -> None:
        """Save and stop all trials; if interrupted again, stop them at once."""
        self.output.note(f"saving and stopping {len(self.active)} running trials")
        stopping = [one for one in self.active if one.wanted is None]
        while self.active:
            try:
                for one in stopping:
                    one.stop(TrialState.STOPPED)
                while self.active:
                    for one in list(self.active):
                        self._check_trial(one)
                    time.sleep(CHECK_EVERY_S)
            except (KeyboardInterrupt, SystemExit):
                self.output.note("stopping at once, without saving")
                stopping = self.active

    # --- which trial is next

    def _replay_results(self) -> None:
        """Pass the results in the ledger and the runs to searcher and scheduler."""
        results = list[tuple[Evaluation, Trial]]()
        for trial in self.trials:
            self.searcher.ask(trial.number)
            if trial.state is TrialState.REFUSED:  # the machine may be another
                trial.state, trial.error = TrialState.WAITING, {}
                self._fits(trial)
                continue
            self._add(trial)
            evaluations = read_history(self.folder.run_of(trial)).evaluations
            results += [(one, trial) for one in evaluations]
            if trial.state in ENDED:
                self._report_end(trial, evaluations)
        if isinstance(self.scheduler, Population):
            return  # its exchanges are done, and are not decided again
        for one, trial in sorted(results, key=lambda pair: pair[0].time_s):
            if self.scheduler is not None:
                self.scheduler.judge(trial.number, step=one.step, accuracy=one.accuracy)

    def _next(self) -> Trial | None:
        """Return the next trial to start or continue, if any."""
        is_population = self.sweep.settings.scheduler == "pbt"
        while is_population and len(self.trials) < self.sweep.num_trials:
            self._new_trial()  # they wait for each other, so all are known first
        if isinstance(self.scheduler, Population) and not self._exchange():
            return None
        for trial in self.trials:
            if trial.state not in ENDED and trial.number not in self._begun:
                self._begun.add(trial.number)
                return trial
        if isinstance(self.scheduler, Population):
            return self._next_paused(self.scheduler)
        while len(self.trials) < self.sweep.num_trials:
            if (trial := self._new_trial()) is not None:
                self._begun.add(trial.number)
                return trial
        return None

    def _next_paused(self, population: Population) -> Trial | None:
        if self.active:
            return None  # else a trial could go on that another one copies
        number = population.next()
        if not self._exchange() or number is None:
            return None
        population.run(number)
        return self.trials[number - 1]

    def _new_trial(self) -> Trial | None:
        """Get settings for one more trial, and record it; None if it cannot run."""
        number = len(self.trials) + 1
        trial = Trial(
            number=number,
            settings=self.searcher.ask(number),
            run_name=f"{self.sweep.name}-{number}",
        )
        self.trials.append(trial)
        if not self._fits(trial):
            return None
        self.folder.record(trial)
        return trial

    def _fits(self, trial: Trial) -> bool:
        planned = self.planner.plan(trial.number, trial.settings)
        if planned.refusal is None:
            self._add(trial)
            return True
        trial.state, trial.error = TrialState.REFUSED, planned.refusal.as_dict()
        self._finish_trial(trial, [])
        return False

    def _add(self, trial: Trial) -> None:
        """Add a trial to the scheduler, which is created with the first one."""
        if self.scheduler is None:
            loaded = self.planner.load(trial.settings, name=None)
            self.scheduler = make_scheduler(loaded, self.sweep)
        self.scheduler.add(trial.number, trial.settings)

    # --- one trial

    def _start(self, trial: Trial) -> None:
        run = self.folder.run_of(trial)
        self._wait_for(run)
        remove_unstarted(run)
        if run.is_run:
            if _is_complete(run):
                trial.state = TrialState.DONE  # it was stopped after its last step
                self._finish_trial(trial, read_history(run).evaluations)
                return
            words = ["resume", str(run.path)]
        else:
            place = f"run.dir={self.folder.path.parent}"
            words = ["launch", "--recipe", self.folder.recipe, "--name", trial.run_name]
            for word in (place, *self.planner.words(trial.settings)):
                words += ["--set", word]
        trial.state = TrialState.RUNNING
        self.active.append(TrialProcess(self.folder, trial, words, self._shared or {}))
        settings = ", ".join(f"{key} {value}" for key, value in trial.settings.items())
        self.output.note(
            f"{trial.run_name} {'goes on' if run.is_run else 'starts'} "
            f"({trial.number} of {self.sweep.num_trials}): {settings}"
        )

    def _wait_for(self, run: RunDir) -> None:
        """Wait for a trial of a sweep that was killed: it saves, and stops by itself."""
        until, is_told = time.monotonic() + STOP_TIMEOUT_S, False
        while is_locked(run):
            if not is_told:
                self.output.note(f"waiting for {run.name}, which still saves and stops")
                is_told = True
            if time.monotonic() > until:
                raise WaitTimeout(
                    f"trial {run.name} is still running",
                    why=f"the sweep waited {STOP_TIMEOUT_S:.0f} s for another process that works "
                    "on it",
                    fix=f"miles stop {run.typed} --now",
                )
            time.sleep(CHECK_EVERY_S)

    def _check_trial(self, one: TrialProcess) -> None:
        for text in one.new_warnings():
            self.output.warn(text)
        state = one.ended()  # before the last look, so that no evaluation is missed
        for evaluation in one.new_evaluations():
            self._apply_decision(one, evaluation)
        if state is not None:
            self.active.remove(one)
            was_stopped = state is one.wanted and _is_complete(one.run)
            one.trial.state = TrialState.DONE if was_stopped else state
            self._finish_trial(one.trial, one.reader.history.evaluations)

    def _apply_decision(self, one: TrialProcess, evaluation: Evaluation) -> None:
        trial = one.trial
        found = interval_of(one.run, evaluation)
        interval_text = f" ({interval(found)})" if found is not None else ""
        self.output.note(
            f"{trial.run_name} step {evaluation.step}: accuracy "
            f"{shown_accuracy(evaluation.accuracy)}{interval_text}"
        )
        self.output.json(
            "evaluation",
            {
                "trial": trial.number,
                "run": trial.run_name,
                "step": evaluation.step,
                "accuracy": evaluation.accuracy,
            },
        )
        if one.wanted is not None:
            return  # it is being stopped
        assert self.scheduler is not None, "a trial runs that the scheduler does not know"
        verdict = self.scheduler.judge(
            trial.number, step=evaluation.step, accuracy=evaluation.accuracy
        )
        if verdict is not Verdict.GO_ON:
            is_pause = verdict is Verdict.PAUSE
            trial.state = TrialState.PAUSED if is_pause else TrialState.STOPPED_EARLY
            self.folder.record(trial)
            one.stop(trial.state)

    def _finish_trial(self, trial: Trial, evaluations: list[Evaluation]) -> None:
        """Record how a trial ended, or that it pauses."""
        self.folder.record(trial)
        if trial.error:
            run = self.folder.run_of(trial)
            more = f"fix: miles why {run.typed}" if run.is_run else f"why: {trial.error.get('why')}"
            error = trial.error.get("error")
            self.output.warn(f"{trial.run_name} {trial.state}: {error}\n  {more}")
        else:
            self.output.note(f"{trial.run_name} is {trial.state}")
        self.output.json(
            "trial", {"trial": trial.number, "run": trial.run_name, "state": str(trial.state)}
        )
        if trial.state in ENDED:
            self._report_end(trial, evaluations)
        elif trial.state is TrialState.STOPPED and self.scheduler is not None:
            self.scheduler.end(trial.number)

    def _report_end(self, trial: Trial, evaluations: list[Evaluation]) -> None:
        has_result = trial.state in (TrialState.DONE, TrialState.STOPPED_EARLY) and evaluations
        self.searcher.tell(trial.number, evaluations[-1].accuracy if has_result else None)
        if self.scheduler is not None and trial.state is not TrialState.REFUSED:
            self.scheduler.end(trial.number)

    # --- populations

    def _exchange(self) -> bool:
        """Carry out the exchanges that were decided, once every trial is saved; return False if
        some are not."""
        assert isinstance(self.scheduler, Population)
        if any(one.wanted is TrialState.PAUSED for one in self.active):
            return False
        for exchange in self.scheduler.exchanges():
            trial, donor = self.trials[exchange.number - 1], self.trials[exchange.donor - 1]
            if TrialState.DONE in (trial.state, donor.state):
                continue  # it went on to its end before it heard that it was to wait
            try:
                made = fork(
                    self.folder.run_of(donor).path,
                    step=None,
                    name=next(self._free_names(trial)),
                    steps=None,
                    sets=[f"{key}={value}" for key, value in exchange.settings.items()],
                    output=self.output,
                )
            except MilesError as error:
                self.output.warn(f"{trial.run_name} keeps its settings: {error.what}: {error.why}")
                continue
            trial.earlier_runs.append(trial.run_name)
            trial.run_name, trial.settings = made.run.name, dict(exchange.settings)
            self.folder.record(trial)
            settings = ", ".join(f"{key} {value}" for key, value in exchange.settings.items())
            self.output.note(
                f"trial {trial.number} goes on as {made.run.name}, from {donor.run_name} at step "
                f"{made.step}: {settings}"
            )
        return True

    def _free_names(self, trial: Trial) -> Iterator[str]:
        number = len(trial.earlier_runs) + 2
        while True:
            name = f"{self.sweep.name}-{trial.number}-{number}"
            if not (self.folder.path.parent / name).exists():
                yield name
            number += 1


def _is_complete(run: RunDir) -> bool:
    """Return True if a run has saved its last step."""
    num_steps = read_history(run).num_steps
    return num_steps is not None and step_saved(run.events()) == num_steps

"""Something dies in the middle of a run: it is named, and `miles resume` goes on as if nothing had
happened."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import psutil
from launching import Runs
from lines import Bound, Line

from checks import Visit
from milescli.core.errors import ExitCode

STEPS = 8
RECIPE = {
    "model": {"scratch": {"hidden_size": 64, "num_layers": 2, "head_dim": 16}},
    "data": {"prompts": "task:sums", "max_prompt_tokens": 48},
    "rollout": {
        "prompts_per_step": 4,
        "samples_per_prompt": 4,
        "max_response_tokens": 16,
        "reward": "launching:variety",
    },
    "train": {"steps": STEPS, "optimizer": {"lr": 3e-4}},
    "checkpoint": {"every": 2},
    "run": {"trackers": []},
    "machine": {"cpu_threads": 1, "start_timeout_s": 240.0, "step_timeout_s": 120.0},
}
WAIT_S = 150.0
"""For a run to reach its third step."""


def measure(visit: Visit) -> Iterator[Line]:
    """See the module."""
    runs = Runs(folder=visit.folder)
    recipe = runs.recipe("tiny", RECIPE)
    runs.run("launch", "--recipe", recipe, "--name", "undisturbed")
    process = runs.start("launch", "--recipe", recipe, "--name", "disturbed")
    _wait_for_step(runs, process, step=3)
    engine = next(
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if "sglang.launch_server" in " ".join(child.cmdline())
    )
    killed = time.monotonic()
    engine.send_signal(signal.SIGKILL)
    code = process.wait()
    failure = runs.events("disturbed")[-1]
    named = "engine 0" in str(failure) and code in (ExitCode.FAILED, ExitCode.RESUMABLE)
    yield Line(
        name="engine_death_named",
        measured=float(named),
        predicted=1,
        unit="of 1: the run ends, and its last event names engine 0",
        bound=Bound(kind="equal"),
        note=f"kill -9 in step 3; exit code {code} after {time.monotonic() - killed:.1f} s",
    )
    seconds = runs.run("resume", "runs/disturbed")
    done = [event["step"] for event in runs.events("disturbed") if event["event"] == "StepDone"]
    yield Line(
        name="resumed",
        measured=max(done),
        predicted=STEPS,
        unit="steps done",
        bound=Bound(kind="equal"),
        note=f"miles resume took {seconds:.1f} s",
    )
    losses = [runs.metrics(run, "train/grad_norm")[-1] for run in ("undisturbed", "disturbed")]
    yield Line(
        name="same_as_undisturbed",
        measured=abs(losses[0] - losses[1]) / abs(losses[0]),
        unit="relative difference of the last gradient norm",
        bound=Bound(kind="at most", value=1e-2 if visit.on_device else 0.0),
        note="exact on a CPU; on a device sums may change their order",
    )


def _wait_for_step(runs: Runs, process, *, step: int) -> None:
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        events = runs.events("disturbed")
        if any(event["event"] == "StepDone" and event["step"] >= step for event in events):
            return
        if process.poll() is not None:
            runs.show_logs()
            raise RuntimeError(f"the run ended by itself, exit code {process.returncode}")
        time.sleep(0.02)
    runs.show_logs()
    raise RuntimeError(f"the run did not reach step {step} within {WAIT_S:.0f} s")

"""Where a run lives, what it may use, and what watches it. Sections of the schema."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from milescli.recipe.section import NonNegative, Positive, PositiveFloat, Section


class MachineSettings(Section):
    """What the run may use. May also come from the environment and from files."""

    gpus: NonNegative | None = None
    """GPUs per node; null: all that are visible; 0: the CPU."""
    nodes: Positive = 1
    address: str | None = None
    """HOST:PORT of a running Ray cluster, or auto; null: start Ray on this machine alone."""
    cpu_threads: Positive | None = None
    """Threads of each trainer rank and engine on a CPU; null: chosen by the plan."""
    start_timeout_s: PositiveFloat = 600.0
    """Bound on the start of Ray, engines and trainer ranks."""
    step_timeout_s: PositiveFloat = 3600.0
    """Bound on one rollout, one optimizer step, one publish or one save."""
    on_node_loss: Literal["spare", "shrink", "wait"] = "shrink"
    """Where a run that goes on has fewer nodes than `nodes`, and no other stands by in the cluster:
    spare ends it; shrink plans it for those that are left; wait waits `fault.window_s` for more."""
    silence_s: PositiveFloat = 30.0
    """A process of the run that says nothing for so long beyond what is usual in this run counts as
    hung: it is ended, and replaced as a dead one is."""

    @property
    def request_timeout_s(self) -> float:
        """Bound on one request to an engine within a step. It ends, and the engine is asked whether
        it lives, before the wait for the step ends: so the error names who hangs."""
        return max(self.step_timeout_s - 30.0, 0.5 * self.step_timeout_s)


class HookSettings(Section):
    """Functions of yours that are told what a run does, by import path; null: none. They run in a
    process of their own, one at a time; what one raises ends the run with its name."""

    all_samples: str | None = None
    """(*, step, groups, refused): all that was sampled for a step, refused by the filter or not."""
    before_step: str | None = None
    """(*, step, groups): the groups of a step, before they are trained on."""
    after_step: str | None = None
    """(*, step, report, groups): when the engines have the step's weights."""
    after_save: str | None = None
    """(*, step, folder): a checkpoint is complete; to upload it."""
    tracker: str | None = None
    """(*, step, scalars): name -> number, of a step, a warm-up step or an evaluation."""
    timeout_s: PositiveFloat = 300.0
    """Bound on one call."""


class RunSettings(Section):
    """Where the run lives and what watches it. May also come from the environment and from
    files."""

    name: str | None = None
    """null: the recipe's name and a number that is free."""
    dir: str = "runs"
    """Folder that run directories are made in."""
    seed: NonNegative = 0
    trackers: list[str] = Field(default=["tensorboard"])
    """What is told of every step, evaluation and event (docs/metrics.md): tensorboard (in the run
    directory), wandb, mlflow, trackio, opentelemetry; or import paths `mypkg.trackers:Mine`.
    Addresses and keys come from the environment alone, as each of them names its variables."""
    project: str = "miles"
    """What trackers keep the run under."""
    metrics_address: str | None = None
    """HOST:PORT, as 127.0.0.1:9464, where Prometheus is served `/metrics` while the run goes on;
    port 0: any that is free, which the run says. null: nothing listens."""
    keep_groups: NonNegative = 4
    """Groups of each step that are kept in rollouts/, to read token by token."""
    hooks: HookSettings = HookSettings()

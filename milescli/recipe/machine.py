"""Defines where a run is stored, which resources it uses, its layout, what monitors it, and what it
does when one of its processes dies. Sections of the schema, with their rules."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from milescli.core.errors import RecipeError
from milescli.recipe.section import (
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Rule,
    Section,
    Seed,
)

if TYPE_CHECKING:
    from milescli.recipe.schema import Recipe

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 9464
_ADDRESS = re.compile(r"(?:(?P<host>\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]*):)?(?P<port>[0-9]{1,5})\Z")


class MachineSettings(Section):
    """Which resources the run may use. May also be set by the environment and by user files."""

    gpus: NonNegative | None = None
    """GPUs per node; null: all visible ones; 0: the CPU."""
    nodes: Positive = 1
    """Number of nodes."""
    address: str | None = None
    """HOST:PORT of a running Ray cluster, or auto; null: start Ray on this machine only."""
    cpu_threads: Positive | None = None
    """Threads of each trainer rank and engine on a CPU; null: the plan chooses."""
    collectors: NonNegative | None = None
    """Processes that ask the engines, score, and keep samples until they are trained on; 0: the
    driver does it; null: the plan chooses (one for each 256 engines, and the driver up to that)."""
    start_timeout_s: PositiveFloat = 600.0
    """Timeout for starting Ray, engines and trainer ranks."""
    step_timeout_s: PositiveFloat = 3600.0
    """Timeout for one rollout, one optimizer step, one publish or one save."""
    on_node_loss: Literal["spare", "shrink", "wait"] = "shrink"
    """What to do if a resumed run has fewer nodes than `nodes` and the cluster has no spare one.
    spare: end the run; shrink: plan the run for the remaining nodes; wait: wait up to
    `fault.window_s` for more nodes."""
    silence_s: PositiveFloat = 30.0
    """A process counts as hung if it stays silent for this much longer than is usual in this run;
    it is then killed and replaced, like a process that died."""
    preemption: Literal["none", "aws", "gcp", "azure"] = "none"
    """Cloud whose metadata service announces that it takes this machine away. The run asks it every
    few seconds, and then saves in time and stops (docs/recovery.md)."""

    @property
    def request_timeout_s(self) -> float:
        """Return the timeout of one request to an engine within a step. The request ends, and the
        engine's health is checked, before the step's own timeout, so that the error names what
        hangs."""
        return max(self.step_timeout_s - 30.0, 0.5 * self.step_timeout_s)


class Parallel(Section):
    """Layout of the trainer. The plan chooses every key that you do not set."""

    tp: Positive | None = None
    """Tensor-parallel ranks."""
    pp: Positive | None = None
    """Pipeline stages."""
    cp: Positive | None = None
    """Context-parallel ranks, which share the positions of a sequence."""
    ep: Positive | None = None
    """Expert-parallel ranks, which share the experts."""
    etp: Positive | None = None
    """Tensor-parallel ranks of each expert."""
    dp: Positive | None = None
    """Data-parallel ranks."""
    sequence_parallel: bool | None = None
    """Split norms and residuals along the sequence over the tensor-parallel ranks."""
    first_stage_layers: Positive | None = None
    """Layers of the first pipeline stage; null: as many as in the other stages."""
    last_stage_layers: Positive | None = None
    """Layers of the last pipeline stage, which also computes the output layer; null: as many as in
    the other stages."""


class EngineSettings(Section):
    """Number and layout of the rollout engines. The plan chooses every key that you do not set."""

    num: Positive | None = None
    """Number of engines."""
    tp: Positive | None = None
    """Devices per engine (tensor-parallel ranks)."""
    ep: Positive | None = None
    """Expert-parallel groups among the devices of an engine."""
    attention_dp: Positive | None = None
    """Groups of an engine's devices that serve different requests, each with its own cache
    (SGLang's DP attention)."""
    placement: Literal["auto", "colocated", "split"] = "auto"
    """colocated: trainer and engines take turns on the same devices; split: each has its own
    devices."""
    memory_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Fraction of a device's memory for weights and cache; null: the plan chooses."""
    max_running_requests: Positive | None = None
    """Requests that an engine runs at once; null: the plan chooses."""
    max_total_tokens: Positive | None = None
    """KV-cache slots per engine; null: as many as the memory fraction allows (on a CPU: the plan
    chooses)."""
    attention_backend: Literal["fa3", "fa4", "flashinfer", "triton"] | None = None
    """SGLang's attention kernels on an accelerator; only kernels whose tokens do not depend on the
    batch are allowed. null: SGLang's choice for the device (ROCm: triton). A CPU always uses its
    own kernel."""
    cuda_graphs: bool = True
    """Use CUDA/HIP graphs for decoding on an accelerator (prefill never uses them). false: engines
    start faster and use less memory, but decode more slowly."""
    prefix_cache: bool | None = None
    """Reuse the cache of a prompt for other prompts that start with it; null: on for accelerators,
    and on a CPU if the agent takes several turns. The tokens stay the same; their log-probs differ
    by at most 1e-4."""
    extra: list[str] = Field(default=[])
    """Additional command-line arguments of SGLang's server: [--chunked-prefill-size=4096].
    Arguments that the recipe or miles already sets are rejected."""


class Fault(Section):
    """Limits for restarting processes that died. A run that exceeds a limit ends and reports the
    cause."""

    max_restarts: NonNegative = 8
    """Maximum number of engines and trainers that may be restarted within `window_s`; 0:
    the first death ends the run."""
    window_s: PositiveFloat = 3600.0
    kept_gib: PositiveFloat = 4.0
    """Memory for the batches of the steps since the last checkpoint, which the driver keeps so that
    new trainer ranks can repeat them. When it is full, batches from before the newest copy are
    dropped first, then all; until the next copy (`copy_every`) or checkpoint (`checkpoint.every`),
    the death of a rank then ends the run."""
    copy_every: NonNegative = 0
    """Number of steps between copies of the trainer's weights, optimizer and random state to the
    main memory of another process (with several nodes: on the next node). New trainer ranks start
    from the copy if it is newer than the checkpoint. 0: never, because copies take three times the
    memory of that state."""
    journal_gib: NonNegativeFloat = 4.0
    """Size limit of journal/, which stores finished samples so that a resumed run does not sample
    them again. When it is full, no samples are stored until the next checkpoint. 0: no journal."""


class HookSettings(Section):
    """Your functions that miles calls during a run, as import paths; null: none. They run in a
    separate process, one at a time; if one raises, the run ends and names it."""

    all_samples: str | None = None
    """(*, step, groups, refused): after sampling; all groups of a step, including those that the
    filter rejected."""
    before_step: str | None = None
    """(*, step, groups): before training; the groups of a step."""
    after_step: str | None = None
    """(*, step, report, groups): after a publish; the engines have the step's weights."""
    after_save: str | None = None
    """(*, step, folder): after a checkpoint is complete, for example to upload it."""
    tracker: str | None = None
    """(*, step, scalars): the metrics of a step, a warm-up step or an evaluation, as name ->
    number."""
    timeout_s: PositiveFloat = 300.0
    """Timeout for one call."""


class RunSettings(Section):
    """Where the run is stored, and what monitors it. May also be set by the environment and by user
    files."""

    name: str | None = None
    """Name of the run; null: the recipe's name and the next free number."""
    dir: str = "runs"
    """Folder in which run directories are created."""
    seed: Seed = 0
    """Random seed of the run: data order, sampling and new weights."""
    trackers: list[str] = Field(default=["tensorboard"])
    """Trackers that receive the metrics of every step, evaluation and event (docs/metrics.md):
    tensorboard (in the run directory), wandb, mlflow, trackio, opentelemetry; or import paths
    `mypkg.trackers:Mine`. Addresses and keys come from each tracker's own environment variables."""
    project: str = "miles"
    """Name of the project under which trackers store the run."""
    metrics_address: str | None = None
    """HOST:PORT, such as 127.0.0.1:9464, at which Prometheus can scrape `/metrics` during the run;
    port 0: any free port, which the run prints. null: off."""
    alerts: list[str] = Field(default=[])
    """Where to send an alert when the run ends, fails or stalls: URLs (http, https) that receive
    JSON by POST, mailto:me@example.org, or commands that receive the JSON on stdin. `$NAME` stands
    for an environment variable; use one for an address that contains a secret."""
    alerts_on: list[str] = Field(default=["end", "failure", "stop", "stall"])
    """Events that send an alert: end, failure, stop, stall (the run writes nothing for much longer
    than a step takes), and names of diagnoses (docs/verdict.md) except the hints about speed:
    [failure, stall, entropy-collapse]."""
    keep_groups: NonNegative = 4
    """Number of groups per step to store in rollouts/, for reading token by token."""
    hooks: HookSettings = HookSettings()


def metrics_address(settings: RunSettings) -> tuple[str, int] | None:
    """Return (host, port) to listen on, or None. A port alone is only reachable from this machine.
    Raises RecipeError."""
    text = settings.metrics_address
    if text is None:
        return None
    match = _ADDRESS.match(text)
    if match is None or int(match["port"]) > 65535:
        raise RecipeError(
            f"`run.metrics_address` cannot be `{text}`",
            why="it must be HOST:PORT, or a port on this machine",
            fix=f"--set run.metrics_address={LOOPBACK}:{DEFAULT_PORT}",
        )
    return (match["host"] or "").strip("[]") or LOOPBACK, int(match["port"])


def _is_folder_name(name: str) -> bool:
    return (
        bool(name)
        and "/" not in name
        and name[0] not in ".-"
        and name.strip() == name
        and name.isprintable()
    )


def _is_address(address: str) -> bool:
    """Return True for HOST:PORT of the cluster itself; http:// is its dashboard, and ray:// is for
    programs that run outside of it."""
    host, _, port = address.rpartition(":")
    return (
        bool(host)
        and "/" not in host
        and port.isascii()
        and port.isdigit()
        and 0 < int(port) < 65536
    )


def rules(recipe: Recipe, origins: Mapping[str, object]) -> Iterator[Rule]:
    """Yield the rules for the names and addresses of a run."""
    for key, name in (("name", recipe.name), ("run.name", recipe.run.name)):
        yield Rule(
            name is not None and not _is_folder_name(name),
            f"`{key}` cannot be `{name}`",
            why=f"it becomes the name of a directory ({origins[key]}), so it may not contain a "
            "slash, start with a dot or dash, or start or end with a blank",
            fix=f"--set {key}=my-{'run' if key == 'run.name' else 'recipe'}",
        )
    yield Rule(
        not recipe.run.dir.strip(),
        "`run.dir` is empty",
        why=f"{origins['run.dir']} sets it",
        fix="--set run.dir=runs",
    )
    address = "auto" if recipe.machine.address is None else recipe.machine.address
    host = address.rpartition("//")[2].partition(":")[0] or LOOPBACK
    yield Rule(
        address != "auto" and not _is_address(address),
        f"`machine.address` cannot be `{address}`",
        why="it must be HOST:PORT of a Ray cluster, or auto for the cluster on this machine "
        f"({origins['machine.address']})",
        fix=f"--set machine.address={host}:6379",
    )


def tracker_rules(settings: RunSettings) -> Iterator[Rule]:
    """Yield the rules for a run's trackers."""
    yield Rule(
        not settings.project.strip(),
        "`run.project` is empty",
        why="trackers store a run under the name of a project",
        fix="--set run.project=miles",
    )
    metrics_address(settings)

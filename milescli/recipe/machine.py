"""Where a run lives, what it may use, how it is laid out there, what watches it, and what it does
where one of its processes dies. Sections of the schema, and their rules."""

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
)

if TYPE_CHECKING:
    from milescli.recipe.schema import Recipe

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 9464
_ADDRESS = re.compile(r"(?:(?P<host>\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]*):)?(?P<port>[0-9]{1,5})\Z")


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
        """Return the bound on one request to an engine within a step. The request ends, and the
        engine's health is checked, before the wait for the step ends: so the error names who
        hangs."""
        return max(self.step_timeout_s - 30.0, 0.5 * self.step_timeout_s)


class Parallel(Section):
    """Pins of the trainer's layout; what is not pinned is chosen."""

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
    """Layers of the first pipeline stage; null: as many as the others."""
    last_stage_layers: Positive | None = None
    """The same of the last stage, which has the output layer to compute as well."""


class EngineSettings(Section):
    """Pins of the rollout engines."""

    num: Positive | None = None
    """Engines."""
    tp: Positive | None = None
    """Devices of one engine."""
    ep: Positive | None = None
    """Expert-parallel groups among the devices of an engine."""
    attention_dp: Positive | None = None
    """Groups of an engine's devices that take different requests, each with its own cache (SGLang's
    DP attention)."""
    placement: Literal["auto", "colocated", "split"] = "auto"
    """colocated: trainer and engines share devices and take turns; split: each has its own."""
    memory_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Of a device's memory, for weights and cache; null: chosen by the plan."""
    max_running_requests: Positive | None = None
    """Per engine; null: chosen by the plan."""
    max_total_tokens: Positive | None = None
    """KV-cache slots per engine; null: what the memory fraction allows (on a CPU: chosen by the
    plan)."""
    attention_backend: Literal["fa3", "fa4", "flashinfer", "triton"] | None = None
    """SGLang's attention kernels on an accelerator, of those whose tokens do not depend on the
    batch; null: SGLang's choice for the device (ROCm: triton). A CPU has one of its own."""
    cuda_graphs: bool = True
    """Replay decoding steps as graphs on an accelerator (prefills are not). false: engines start
    sooner and hold less memory; decoding is slower."""
    prefix_cache: bool | None = None
    """Keep what was computed of a prompt for others that begin with it; null: on an accelerator,
    and on a CPU where an agent takes several turns. The tokens are the same, their log-probs
    within 1e-4."""
    extra: list[str] = Field(default=[])
    """Further arguments of SGLang's server, as on its command line: [--chunked-prefill-size=4096].
    What the recipe or miles sets already is refused."""


class Fault(Section):
    """Bounds on starting again what has died. A run that meets one ends with the cause."""

    max_restarts: NonNegative = 8
    """Engines, routers and trainers that are started in the place of dead ones within `window_s`;
    0: the first death ends the run."""
    window_s: PositiveFloat = 3600.0
    kept_gib: PositiveFloat = 4.0
    """Batches of the steps since a checkpoint that the driver keeps, for new trainer ranks to do
    again; beyond, those before the newest copy go, then all: a rank's death ends the run until the
    next copy (`copy_every`) or checkpoint (`checkpoint.every`)."""
    copy_every: NonNegative = 0
    """Steps after which the trainer's weights, optimizer and random numbers are copied to the main
    memory of another process, of several nodes on the next one; new trainer ranks begin from it
    where it is newer than the checkpoint. 0: never, as copies take three times that state."""
    journal_gib: NonNegativeFloat = 4.0
    """What journal/ may hold of finished samples, which a resumed run takes instead of sampling
    them again; beyond, none are kept until the next checkpoint. 0: no journal."""


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
    alerts: list[str] = Field(default=[])
    """Who is told when the run ends, fails or stalls: URLs (http, https) that JSON is posted to,
    mailto:me@example.org, or commands, which get the JSON on stdin. `$NAME` stands for a variable
    of the environment, where an address with a secret belongs."""
    alerts_on: list[str] = Field(default=["end", "failure", "stop", "stall"])
    """What they are told of: end, failure, stop, stall (nothing is heard for far longer than a step
    takes), and names of diagnoses (docs/verdict.md): [failure, stall, entropy-collapse]."""
    keep_groups: NonNegative = 4
    """Groups of each step that are kept in rollouts/, to read token by token."""
    hooks: HookSettings = HookSettings()


def metrics_address(settings: RunSettings) -> tuple[str, int] | None:
    """Return (host, port) to listen at, or None. A port alone is local to this machine. Raises
    RecipeError."""
    text = settings.metrics_address
    if text is None:
        return None
    match = _ADDRESS.match(text)
    if match is None or int(match["port"]) > 65535:
        raise RecipeError(
            f"`run.metrics_address` cannot be `{text}`",
            why="it is HOST:PORT, or a port of this machine alone",
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
    """HOST:PORT of the cluster itself; http:// is its dashboard, and ray:// its door for programs
    that run elsewhere."""
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
            why=f"it becomes the name of a directory ({origins[key]}): no slash, no leading dot or "
            "dash, no blank at an end",
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
        why="a Ray cluster is named HOST:PORT, or auto for the one on this machine "
        f"({origins['machine.address']})",
        fix=f"--set machine.address={host}:6379",
    )


def tracker_rules(settings: RunSettings) -> Iterator[Rule]:
    """Yield the rules for a run's trackers."""
    yield Rule(
        not settings.project.strip(),
        "`run.project` is empty",
        why="trackers keep a run under the name of a project",
        fix="--set run.project=miles",
    )
    metrics_address(settings)

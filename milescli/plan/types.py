"""Defines the plan: what will run where. Plain data; equal inputs give equal bytes."""

from __future__ import annotations

import hashlib
import json
import shlex
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from milescli.core.errors import CheckpointError
from milescli.core.files import parse_json, read_regular_text
from milescli.core.units import MIB
from milescli.models.precision import Quantised
from milescli.recipe.section import of_type

PLAN_SCHEMA = 12
"""Rises when the JSON changes in a way that readers must know. 2: stages, recompute and offload of
the trainer, experts and attention of the engines, forecast. 3: roles, without old_logprobs.
4: parts of a device's memory that were measured. 7: rows of a file instead of samples.
9: processes of a run on a CPU. 11: number formats of trainer and engines, on_policy.
12: prompts that samples share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLayout:
    """Describes how the model is distributed over trainer ranks, in Megatron's order
    tp-cp-ep-dp-pp."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1
    sequence_parallel: bool = False
    first_stage_layers: int | None = None
    """Layers of the first pipeline stage; None: as many as the others."""
    last_stage_layers: int | None = None
    """Layers of the last pipeline stage; None: as many as the others."""
    recompute: Literal["none", "full"] = "none"
    """full: only the inputs of layers are saved for the backward pass, which recomputes the rest.
    """
    offload_optimizer: bool = False
    """True if Adam's moments and float32 weights are in host memory, where the optimizer's step is
    computed."""

    @property
    def expert_dp(self) -> int:
        """Return the number of ranks of one stage that hold the same experts."""
        return self.tp * self.cp * self.dp // (self.ep * self.etp)

    def dp_rank(self, rank: int) -> int:
        """Return the data-parallel rank of a trainer rank."""
        return rank // (self.tp * self.cp) % self.dp

    @property
    def world_size(self) -> int:
        """Return the number of trainer ranks."""
        return self.tp * self.pp * self.cp * self.dp


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLayout:
    """Describes the rollout fleet."""

    num: int = 1
    tp: int = 1
    """Devices of one engine."""
    ep: int = 1
    """Number of groups of the tp devices among which the experts are distributed; 1: every device
    has a slice of every expert."""
    attention_dp: int = 1
    """Number of groups of the tp devices among which requests are distributed, each with its own
    cache; 1: attention is divided by heads over all devices."""
    max_running_requests: int = 256
    max_total_tokens: int | None = None
    """KV-cache slots per engine; None: SGLang sizes it from `memory_fraction`."""
    memory_fraction: float = 0.7
    context_length: int = 4096
    cpu_threads: int | None = None
    """Threads of each rank on a CPU; None: the plan's."""


NO_ENGINES = EngineLayout(num=0)
"""The engines of a run that samples nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Describes one device (or, on a CPU, one share of it) and the ranks that run there."""

    node: int
    device: int
    """Index on its node; on a CPU only a number."""
    trainer_rank: int | None = None
    engine: int | None = None
    engine_rank: int | None = None
    """Tensor-parallel rank within the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """Holds the batch arithmetic of one step."""

    prompts_per_step: int
    """Rows, if a run trains on rows."""
    samples_per_prompt: int
    """2 for a row that is a pair; 1 for any other row."""
    num_samples: int
    """prompts_per_step * samples_per_prompt"""
    updates_per_step: int
    max_tokens_per_microbatch: int
    """Limit on one rank; a single longer sequence is still a microbatch."""
    max_sequence_tokens: int
    """Longest prompt and response together, or longest row."""
    of_rows: bool = False
    """True if the batch is read from a file, False if engines sample it."""
    shares_prompts: bool = False
    """True if sequences of a microbatch share a prompt with which they begin: the trainer computes
    it once."""

    def max_row_tokens(self, cp: int) -> int:
        """Return the most tokens of a packed row, which `cp` ranks share."""
        return self.max_tokens_per_microbatch * cp


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """Describes one model of the run, and its place."""

    name: Literal["policy", "reference", "critic", "draft", "teacher", "reward_model"]
    """policy: the trained model; reference: its weights before RL, frozen; critic: learns the
    value of the policy's samples; draft: learns to predict the policy's tokens for speculative
    decoding; teacher: predicts what the policy should sample, frozen; reward_model: scores
    samples, frozen."""
    place: Literal["trainer", "first_device", "elsewhere"]
    """trainer: on the trainer's ranks, in turn; the weights of all but the policy wait in host
    memory. first_device: in a separate process there, for the whole run. elsewhere: on somebody
    else's server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Records one choice and its reason."""

    key: str
    value: str
    reason: str


Basis = Literal["counted", "formula", "estimate", "measured"]
"""counted: from the model's own table of weights; formula: from shapes, compared with real ranks in
tests; estimate: from experience or a data sheet; measured: on such a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Describes one part of a device's memory."""

    name: str
    size_bytes: int
    basis: Basis


Phase = Literal["start", "step", "publish"]
"""Phase of a run on a CPU, by the memory of its processes. start: until the first step, with the
first save and the first publication, which the engines compare bit for bit; step: sampling,
evaluating and training; publish: sending weights to the engines. A save writes the state in place
and needs no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """Predicts the main memory of one process of a run on a CPU, or of several that belong
    together. A process mostly retains freed memory, so a phase includes the needs of earlier
    ones."""

    name: str
    """trainer-rank-0, engine-1 (all its processes), others (driver, Ray); as in log names."""
    node: int
    phases: dict[str, int]
    """Phase -> bytes."""
    shared_bytes: int = 0
    """Bytes within `start` and `publish` of weights in transit, which sender and readers map, and
    which exist once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Describes another layout that the search evaluated."""

    layout: str
    step_s: float
    train_s: float
    train_bytes: int
    """Memory of the fullest device while it trains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Predicts the needs of the run. Times are roofline estimates (`plan.time`), at best measured
    on other machines with such devices."""

    device: str
    memory_bytes: int
    """Memory of one device."""
    training: list[Part]
    """Memory of the fullest device while the trainer works."""
    rollout: list[Part]
    """Memory of the fullest device while the engines generate."""
    publishing_bytes: int
    """Memory of the fullest device while trainer and engines both hold weights; 0 if they have
    separate devices."""
    host_bytes: int
    """Main memory of one node."""
    host_memory_bytes: int
    cache_tokens: int
    """Tokens that one engine can hold."""
    rollout_s: float
    train_s: float
    sync_s: float
    """Seconds of a publication, including the switches between colocated phases."""
    step_s: float
    train_parts_s: dict[str, float]
    """compute, bubble, tensor, experts, data, optimizer"""
    tokens_per_s: float
    """Trained tokens per second over the whole step."""
    gpu_hours: float
    """GPU-hours to the end of the recipe."""
    assumptions: list[str] = field(default_factory=list)
    """Assumptions behind the figures."""
    alternatives: list[Alternative] = field(default_factory=list)
    """The next best layouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Holds everything that the runtime needs to know besides the recipe."""

    device_kind: Literal["cuda", "rocm", "cpu"]
    collective: Literal["nccl", "gloo"]
    """NCCL stands for RCCL on ROCm."""
    precision: Literal["bf16", "fp32"]
    trainer: TrainerLayout
    engines: EngineLayout
    colocated: bool
    channel: str
    slots: list[Slot]
    """Node by node, device by device. Also the order of the placement group's bundles."""
    batch: BatchPlan
    cpu_threads: int
    """Threads of each trainer rank; on a CPU also of engine ranks, unless these have another
    number."""
    max_staleness: int
    steps: int
    warmup_steps: int
    on_policy: Literal["auto", "exact"] = "auto"
    """exact: engines and trainer compute log-probs with the same bits."""
    collectors: int = 0
    """Number of processes that query the engines, score, and hold samples; 0: the driver does it.
    """
    engines_apart: int = 0
    """Number of the last engines, which answer evaluations while the others sample."""
    trainer_format: Quantised | None = None
    """Number format to which the policy's matrices are rounded before each product; None: they are
    not."""
    quantises_inputs: bool = False
    """True if the inputs of those matrices are rounded, too."""
    engine_format: Quantised | None = None
    """Number format in which engines hold the policy's matrices; None: plain."""
    merges_adapter: bool = False
    """True if engines get the model with the trained adapter merged in."""
    roles: list[Role] = field(default_factory=lambda: [Role(name="policy", place="trainer")])
    """The models of the run."""
    decisions: list[Decision] = field(default_factory=list)
    forecast: Forecast | None = None
    """None on a CPU."""
    processes: list[ProcessMemory] = field(default_factory=list)
    """Main memory of each process, an estimate; empty if there are devices."""
    object_store_bytes: int = 512 * MIB
    """Size of Ray's object store on the driver's node, if miles starts Ray."""
    schema: int = PLAN_SCHEMA

    def to_json(self) -> str:
        """Return stable JSON: equal plans give equal bytes."""
        return json.dumps(asdict(self), indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Parse the output of `to_json`. Raises ValueError if it is something else."""
        return of_type(cls, parse_json(text))

    @classmethod
    def read(cls, file: Path) -> Plan:
        """Read a run's plan.json. Raises CheckpointError if there is none, or it is damaged."""
        try:
            return cls.from_json(read_regular_text(file))
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not the plan of a run"
            raise CheckpointError(
                f"{file} cannot be read",
                why=f"{why}; it says in which layout and precision the run's model was trained",
                fix=[
                    f"put {file.name} back as it was",
                    f"miles resume {shlex.quote(str(file.parent))} --steps N   # goes on, and "
                    "writes it again",
                ],
            ) from None

    @property
    def formats_differ(self) -> bool:
        """Return True if engines multiply by other numbers than the trainer, as the recipe asks."""
        rounds_alone = self.quantises_inputs and self.device_kind == "cpu"
        return rounds_alone or self.engine_format not in (None, self.trainer_format)

    @property
    def fingerprint(self) -> str:
        """Return 16 hex digits over everything that affects the run; reasons, forecasts, the object
        store's size, and the collecting processes do not count."""
        raw = asdict(self)
        del raw["decisions"], raw["forecast"], raw["processes"], raw["object_store_bytes"]
        del raw["collectors"]
        return hashlib.sha256(json.dumps(raw, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(slots=True)
class Log:
    """Collects the decisions of a plan, from `make` and what it calls."""

    decisions: list[Decision] = field(default_factory=list)

    def note(self, key: str, value: object, reason: str) -> None:
        """Add one decision and its reason."""
        text = str(value).lower() if isinstance(value, bool) else str(value)
        self.decisions.append(Decision(key=key, value=text, reason=reason))

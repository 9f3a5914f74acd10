"""The decision: what will run where. Plain data; equal inputs give equal bytes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Literal

PLAN_SCHEMA = 2
"""Rises when the JSON changes in a way that readers must know. 2: stages, recompute and offload of the trainer, experts and attention of the
engines, forecast. A reader of 2 reads 1: what is new has a default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLayout:
    """How the model is spread over trainer ranks; Megatron's order tp-cp-ep-dp-pp."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1
    sequence_parallel: bool = False
    first_stage_layers: int | None = None
    """Of the first pipeline stage; None: as many as the others."""
    last_stage_layers: int | None = None
    """The same of the last stage."""
    recompute: Literal["none", "full"] = "none"
    """full: only the inputs of layers are kept for the backward pass, which computes the rest again."""
    offload_optimizer: bool = False
    """Adam's moments live in host memory, where the optimizer's step is computed."""

    @property
    def expert_dp(self) -> int:
        """Ranks of one stage that hold the same experts."""
        return self.tp * self.cp * self.dp // (self.ep * self.etp)

    @property
    def world_size(self) -> int:
        """Trainer ranks."""
        return self.tp * self.pp * self.cp * self.dp


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLayout:
    """The rollout fleet."""

    num: int = 1
    tp: int = 1
    """Devices of one engine."""
    ep: int = 1
    """Of these tp devices, so many groups share out the experts between them; 1: every device has a slice of every expert."""
    attention_dp: int = 1
    """Requests are shared out to so many groups of the tp devices, each with its own cache; 1: attention is cut by heads over all."""
    max_running_requests: int = 256
    max_total_tokens: int | None = None
    """KV-cache slots per engine; None: SGLang sizes it from `memory_fraction`."""
    memory_fraction: float = 0.7
    context_length: int = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One device (or, on a CPU, one share of it) and who lives there."""

    node: int
    device: int
    """Index on its node; on a CPU just a number."""
    trainer_rank: int | None = None
    engine: int | None = None
    engine_rank: int | None = None
    """Tensor-parallel rank within the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """The arithmetic of one step."""

    prompts_per_step: int
    samples_per_prompt: int
    num_samples: int
    """prompts_per_step * samples_per_prompt"""
    updates_per_step: int
    max_tokens_per_microbatch: int
    max_sequence_tokens: int
    """Longest prompt and answer together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One choice, and why."""

    key: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that the runtime needs to know beside the recipe."""

    device_kind: Literal["cuda", "rocm", "cpu"]
    collective: Literal["nccl", "gloo"]
    """NCCL stands for RCCL on ROCm."""
    precision: Literal["bf16", "fp32"]
    trainer: TrainerLayout
    engines: EngineLayout
    colocated: bool
    channel: Literal["tensor", "distributed"]
    slots: list[Slot]
    """In topology order: node by node, device by device. Also the order of the placement group's bundles."""
    batch: BatchPlan
    cpu_threads: int
    """Threads of each trainer rank and of each engine on a CPU."""
    max_staleness: int
    steps: int
    warmup_steps: int
    old_logprobs: Literal["trainer", "engine"]
    decisions: list[Decision] = field(default_factory=list)
    schema: int = PLAN_SCHEMA

    def to_json(self) -> str:
        """Stable: equal plans give equal bytes."""
        return json.dumps(asdict(self), indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The inverse of `to_json`."""
        raw = json.loads(text)
        raw["trainer"] = TrainerLayout(**raw["trainer"])
        raw["engines"] = EngineLayout(**raw["engines"])
        raw["batch"] = BatchPlan(**raw["batch"])
        raw["slots"] = [Slot(**slot) for slot in raw["slots"]]
        raw["decisions"] = [Decision(**decision) for decision in raw["decisions"]]
        return cls(**raw)

    @property
    def fingerprint(self) -> str:
        """16 hex digits over everything but the reasons."""
        raw = asdict(self)
        del raw["decisions"]
        return hashlib.sha256(json.dumps(raw, sort_keys=True).encode()).hexdigest()[:16]

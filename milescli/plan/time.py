"""Seconds of each phase of a step, by rooflines: work divided by what the devices can do at most, times a named share that real runs reach.
Every share is an estimate, until runs are measured; the work itself is counted. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from milescli.models.base import WeightTable
from milescli.models.costs import TokenFlops, token_flops
from milescli.plan.activations import IMBALANCE
from milescli.plan.devices import DeviceSpec
from milescli.plan.memory import MemoryModel
from milescli.plan.stages import stage_sizes
from milescli.plan.types import EngineLayout, TrainerLayout

TRAIN_SHARE = 0.45
"""Of peak FLOP/s that a dense layer's products reach in training, without communication. An estimate."""
EXPERT_SHARE = 0.30
"""The same of experts' products, which are small and many. An estimate."""
PREFILL_SHARE = 0.45
"""Of peak FLOP/s in prefill. An estimate."""
DECODE_SHARE = 0.60
"""Of memory bandwidth that decoding reaches. An estimate."""
LINK_SHARE = 0.65
"""Of a link's bandwidth that collectives reach. An estimate."""
COLLECTIVE_S = 20e-6
"""Of a collective, whatever its size. An estimate."""
LAYER_S = 0.4e-3
"""Launching the kernels of one layer forward and backward, per microbatch: what small microbatches cost. An estimate."""
DECODE_STEP_S = 2e-3
"""Scheduling and sampling of one decode step, whatever its size. An estimate."""
HOST_BANDWIDTH = 25e9
"""Bytes a second between a device and its host's memory. An estimate (PCIe 5.0 x16 has 64e9)."""
HOST_ADAM = 0.5e9
"""Numbers a second that a rank's share of the host's cores updates by Adam. An estimate."""
BUCKET_S = 0.02
"""Handing one bucket of weights to the engines, beside its transfer. An estimate: the field tells of about 0.04 s a gigabyte, transfer included."""
MEAN_SHARE = 0.5
"""Mean length of prompts and of answers, of the longest that the recipe allows. An estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one step has to do."""

    num_samples: int
    num_prompts: int
    prompt_tokens: float
    """Mean."""
    response_tokens: float
    """Mean."""
    longest_response: int
    updates: int
    extra_forwards: int
    """Passes over all tokens that only score: by the reference, or before several updates."""
    size: int
    """Bytes of a weight."""
    bucket_bytes: int

    @property
    def sequence_tokens(self) -> float:
        """Mean of prompt and answer."""
        return self.prompt_tokens + self.response_tokens

    @property
    def tokens(self) -> float:
        """Of all sequences."""
        return self.num_samples * self.sequence_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSeconds:
    """Of all updates of a step."""

    compute: float
    bubble: float
    """Stages that wait for each other."""
    tensor: float
    """Collectives of tensor and context parallelism."""
    experts: float
    """All-to-all."""
    data: float
    """Gradients and weights over the data-parallel ranks."""
    optimizer: float

    @property
    def total(self) -> float:
        """Nothing overlaps: the trainer runs them one after the other."""
        return self.compute + self.bubble + self.tensor + self.experts + self.data + self.optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSeconds:
    """Of one step's answers."""

    prefill: float
    decode: float
    running: float
    """Requests that an engine answers at once, on average while it is full."""

    @property
    def total(self) -> float:
        """Together."""
        return self.prefill + self.decode


@dataclass(slots=True)
class TimeModel:
    """Of one model on one kind of device."""

    table: WeightTable
    memory: MemoryModel
    device: DeviceSpec
    devices_per_node: int
    flops: TokenFlops = field(init=False)
    _expert_part: float = field(init=False)
    _head_part: float = field(init=False)

    def __post_init__(self) -> None:
        facts = self.table.facts
        self.flops = token_flops(self.table)
        routed = (
            2 * facts.num_moe_layers * facts.topk * facts.moe_ffn_hidden_size * (facts.moe_latent_size or facts.hidden_size)
        )
        routed *= 3 if facts.gated_mlp else 2
        self._expert_part = min(0.95, routed / self.flops.matmul)
        self._head_part = 2 * facts.vocab_size * facts.hidden_size / self.flops.matmul

    def _bandwidth(self, span: int) -> float:
        """Bytes a second of a collective whose ranks lie within `span` neighbouring devices."""
        near = max(self.devices_per_node, self.device.link_domain if self.device.link_domain > 8 else 0)
        return LINK_SHARE * (self.device.link_bandwidth if span <= near else self.device.network_bandwidth)

    def num_microbatches(self, layout: TrainerLayout, work: Work, cap: int) -> int:
        """Of one rank in one update."""
        rows = work.tokens / (work.updates * layout.dp * cap * layout.cp)
        # sequences do not fill rows to the brim
        fewest = math.ceil(rows * 1.05) if rows > 1 else 1
        return max(1, min(fewest, math.ceil(work.num_samples / (work.updates * layout.dp))))

    def train(self, layout: TrainerLayout, work: Work, *, cap: int) -> TrainSeconds:
        """`cap`: tokens of a microbatch on one rank."""
        facts, tokens = self.table.facts, work.tokens
        passes = 3 + (layout.recompute == "full") + work.extra_forwards
        total = passes * tokens * self.flops.forward_mean(max(1, int(work.sequence_tokens)))
        share = 1 / ((1 - self._expert_part) / TRAIN_SHARE + self._expert_part * IMBALANCE / EXPERT_SHARE)
        even = total / (layout.world_size * self.device.bf16_flops * share)
        count = self.num_microbatches(layout, work, cap)
        slowest = self._slowest_stage(layout)
        launches = work.updates * count * facts.num_layers / layout.pp * LAYER_S * passes / 3
        compute = max(even * slowest, launches)
        rows = tokens / (layout.dp * layout.cp)
        return TrainSeconds(
            compute=compute,
            bubble=compute * (layout.pp - 1) / count,
            tensor=self._tensor_seconds(layout, work, rows=rows, count=count, passes=passes),
            experts=self._expert_seconds(layout, work, rows=rows, count=count, passes=passes),
            data=self._data_seconds(layout, work),
            optimizer=self._optimizer_seconds(layout, work),
        )

    def _slowest_stage(self, layout: TrainerLayout) -> float:
        """Work of the slowest stage, of a stage's mean."""
        sizes = stage_sizes(layout, self.table.facts.num_layers)
        body = (1 - self._head_part) / self.table.facts.num_layers
        work = [size * body for size in sizes]
        work[-1] += self._head_part
        return max(work) * layout.pp

    def _tensor_seconds(self, layout: TrainerLayout, work: Work, *, rows: float, count: int, passes: int) -> float:
        """Each layer gathers and scatters the residual stream around attention and around a plain MLP (Korthikanti et al., arXiv 2205.05198,
        section 4.2.2: 2 gathers and 2 scatters forward, as many backward, and the gathers again for the weights' gradients)."""
        facts = self.table.facts
        layers = facts.num_layers / layout.pp
        seconds = 0.0
        if layout.tp > 1:
            dense = 1 - facts.num_moe_layers / facts.num_layers
            blocks = layers * (1 + dense + (1 - dense) * bool(facts.shared_expert_ffn_hidden_size))
            collectives = blocks * (2 * passes - 1)
            moved = rows * facts.hidden_size * work.size * (layout.tp - 1) / layout.tp
            seconds += collectives * (moved / self._bandwidth(layout.tp) + work.updates * count * COLLECTIVE_S)
        if layout.cp > 1:
            wide = self._cp_numbers(layout) * work.size * rows * (layout.cp - 1)
            span = layout.tp * layout.cp
            seconds += layers * passes * (wide / self._bandwidth(span) + work.updates * count * COLLECTIVE_S)
        return seconds

    def _cp_numbers(self, layout: TrainerLayout) -> float:
        """Keys and values that a rank gathers of each position."""
        facts = self.table.facts
        if facts.mla:
            wide = facts.num_heads * (facts.mla.qk_nope_head_dim + facts.mla.qk_rope_head_dim + facts.mla.v_head_dim)
            return wide / layout.tp
        return 2 * facts.num_kv_heads * facts.head_dim / layout.tp

    def _expert_seconds(self, layout: TrainerLayout, work: Work, *, rows: float, count: int, passes: int) -> float:
        """Dispatch and combine, forward and backward."""
        facts, group = self.table.facts, layout.ep * layout.etp
        if not facts.num_experts or group == 1:
            return 0.0
        layers = facts.num_moe_layers / layout.pp
        share = 1 / layout.tp if layout.sequence_parallel else 1.0
        width = facts.moe_latent_size or facts.hidden_size
        away = (layout.ep - 1) / layout.ep + (layout.etp - 1)
        moved = rows * share * facts.topk * width * work.size * away * IMBALANCE
        return layers * 2 * passes * (moved / self._bandwidth(group) + work.updates * count * 2 * COLLECTIVE_S)

    def _data_seconds(self, layout: TrainerLayout, work: Work) -> float:
        """Reduce-scatter of float32 gradients and all-gather of weights, once an update."""
        held = self.memory.counter.fullest(layout)
        seconds = 0.0
        for numbers, ranks in (
            (held.dense.plain + held.wide.plain, layout.dp * layout.cp),
            (held.experts.plain, layout.expert_dp),
        ):
            if ranks > 1 and numbers:
                span = layout.world_size // layout.pp
                seconds += numbers * (4 + work.size) * (ranks - 1) / ranks / self._bandwidth(span)
        return seconds * work.updates

    def _optimizer_seconds(self, layout: TrainerLayout, work: Work) -> float:
        """Adam reads and writes weights, moments and gradients once; on the host where they are there."""
        held = self.memory.counter.fullest(layout)
        own = held.dense.plain / (layout.dp * layout.cp) + held.experts.plain / layout.expert_dp
        if layout.offload_optimizer:
            return work.updates * own * (8 / HOST_BANDWIDTH + 1 / HOST_ADAM)
        return work.updates * own * 30 / (self.device.memory_bandwidth * DECODE_SHARE)

    def rollout(self, layout: EngineLayout, work: Work, *, cache_bytes: int, longest: int) -> RolloutSeconds:
        """`cache_bytes`: of one engine rank. An engine decodes as many requests as its cache and its limit hold, a token each per step; a step
        reads the weights that are met and the caches of all running requests. The last requests run on by themselves."""
        context = work.prompt_tokens + work.response_tokens / 2
        each = self.memory.cache_bytes(layout, size=work.size, tokens=int(context) + 1, sequences=1)
        room = layout.attention_dp * cache_bytes / max(each, 1)
        requests = work.num_samples / layout.num
        running = max(1.0, min(requests, layout.max_running_requests, room))
        step_s = self._decode_step(layout, work, running=running, each=each)
        steps = requests * work.response_tokens / running
        tail = max(0.0, work.longest_response - work.response_tokens)
        few = max(1.0, running / 8)
        decode = steps * step_s + tail * self._decode_step(layout, work, running=few, each=each)
        prefill = work.num_prompts / layout.num * work.prompt_tokens * self.flops.forward_mean(max(1, int(work.prompt_tokens)))
        return RolloutSeconds(
            prefill=prefill / (layout.tp * self.device.bf16_flops * PREFILL_SHARE), decode=decode, running=running
        )

    def _decode_step(self, layout: EngineLayout, work: Work, *, running: float, each: int) -> float:
        facts = self.table.facts
        weights = self.memory.engine_weights(layout, size=work.size)
        if facts.num_experts:
            experts = facts.num_experts * facts.num_moe_layers * self._expert_numbers() * work.size / layout.tp
            met = 1 - (1 - facts.topk / facts.num_experts) ** running
            weights -= experts * (1 - met)
        read = weights + running / layout.attention_dp * each
        memory = read / (self.device.memory_bandwidth * DECODE_SHARE)
        compute = running * self.flops.forward(int(work.sequence_tokens)) / (layout.tp * self.device.bf16_flops * PREFILL_SHARE)
        collective = 0.0
        if layout.tp > 1:
            moved = 2 * running * facts.hidden_size * work.size / self._bandwidth(layout.tp)
            collective = 2 * facts.num_layers * (moved + COLLECTIVE_S)
        return max(memory, compute) + collective + DECODE_STEP_S

    def _expert_numbers(self) -> float:
        facts = self.table.facts
        return (3 if facts.gated_mlp else 2) * facts.moe_ffn_hidden_size * (facts.moe_latent_size or facts.hidden_size)

    def sync(self, layout: TrainerLayout, work: Work, *, colocated: bool) -> float:
        """Every trainer rank gathers the whole model bucket by bucket, and hands it on within its device, or over the network; see
        `weights.base`."""
        model = self.table.num_parameters * work.size
        gather = model / self._bandwidth(layout.world_size)
        hand_on = model / (self._bandwidth(1) if colocated else self._bandwidth(layout.world_size + self.devices_per_node))
        return gather + hand_on + math.ceil(model / work.bucket_bytes) * BUCKET_S

    def turns(self, static_bytes: int) -> float:
        """A sleeping trainer's way to host memory and back."""
        return 2 * static_bytes / HOST_BANDWIDTH

"""Predicts the seconds of each phase of a step by rooflines: the counted work, divided by the
devices' peak rates and by the share of them that runs achieve (`devices.Efficiency`). Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from milescli.models.base import WeightTable
from milescli.models.costs import TokenFlops, token_flops
from milescli.plan.activations import IMBALANCE
from milescli.plan.devices import DeviceSpec, Efficiency, Links
from milescli.plan.legal import stage_sizes
from milescli.plan.memory import MemoryModel
from milescli.plan.transport import transfer
from milescli.plan.types import EngineLayout, TrainerLayout

MEAN_SHARE = 0.5
"""Mean length of prompts and of responses, as a share of the longest that the recipe allows. An
estimate."""
LENGTH_UNEVENNESS = 4 / 3
"""Mean length of the sequence that a token belongs to, as a multiple of the mean length of
sequences: long sequences have more tokens. If lengths are uniform from 0 to the longest, it is (L^2
/ 3) / (L / 2) against L / 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Describes the work of one step."""

    num_samples: int
    num_prompts: int
    prompt_tokens: float
    """Mean number of tokens of a prompt."""
    response_tokens: float
    """Mean number of tokens of a response."""
    longest_response: int
    updates: int
    extra_forwards: float
    """Passes over all tokens besides the policy's own update: by the reference, before several
    updates, and those of a critic and of teachers, in units of the policy's passes."""
    size: int
    """Bytes of a weight."""
    bucket_bytes: int
    sends_whole: bool = False
    """True if weights are published as whole tensors: those of an adapter, or in a format whose
    scales cover a matrix."""
    engines_apart: int = 0
    """Number of separate engines, which sample nothing for the step."""

    @property
    def sequence_tokens(self) -> float:
        """Return the mean length of prompt plus response, in tokens."""
        return self.prompt_tokens + self.response_tokens

    @property
    def typical_tokens(self) -> int:
        """Return the mean length of the sequence that a token belongs to, in tokens."""
        return max(1, int(LENGTH_UNEVENNESS * self.sequence_tokens))

    @property
    def tokens(self) -> float:
        """Return the tokens of all sequences."""
        return self.num_samples * self.sequence_tokens

    def rank_tokens(self, dp: int) -> float:
        """Return the tokens of the busiest of `dp` ranks: its share, and at least the longest
        sequence in each update."""
        return max(self.tokens / dp, self.updates * (self.prompt_tokens + self.longest_response))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSeconds:
    """Holds the seconds of all updates of a step."""

    compute: float
    bubble: float
    """Time for which pipeline stages wait for each other."""
    stages: float
    """Time to send activations and their gradients from stage to stage."""
    tensor: float
    """Collectives of tensor and context parallelism."""
    experts: float
    """All-to-all between expert ranks."""
    data: float
    """Collectives of gradients and weights over the data-parallel ranks."""
    optimizer: float

    @property
    def total(self) -> float:
        """Return the sum: nothing overlaps, since the trainer runs the parts one after the
        other."""
        between = self.bubble + self.stages + self.tensor + self.experts + self.data
        return self.compute + between + self.optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSeconds:
    """Holds the seconds of one step's rollout."""

    prefill: float
    decode: float
    running: float
    """Mean number of concurrent requests of an engine while it is full."""

    @property
    def total(self) -> float:
        """Return the seconds of prefill and decoding together."""
        return self.prefill + self.decode


@dataclass(slots=True)
class TimeModel:
    """Predicts the times of one model on one kind of device."""

    table: WeightTable
    memory: MemoryModel
    device: DeviceSpec
    devices_per_node: int
    efficiency: Efficiency
    flops: TokenFlops = field(init=False)
    links: Links = field(init=False)
    _moe_layers: int = field(init=False)
    _routed: float = field(init=False)
    """Forward FLOPs of a token in its experts."""
    _head_part: float = field(init=False)
    _logits_part: float = field(init=False)
    """Share of the products with the vocabulary in a token's forward pass."""

    def __post_init__(self) -> None:
        facts = self.table.facts
        self.flops = token_flops(self.table)
        self.links = Links(device=self.device, devices_per_node=self.devices_per_node)
        self._moe_layers = facts.num_moe_layers
        self._routed = 2 * self._moe_layers * facts.topk * self._expert_numbers()
        logits = top = 2 * facts.vocab_size * facts.hidden_size
        if facts.trains_mtp:  # on the last stage, as the output layer is
            without = replace(facts, trains_mtp=False)
            top += self.flops.matmul - token_flops(replace(self.table, facts=without)).matmul
        logits *= 1 + facts.num_mtp_layers * facts.trains_mtp
        self._head_part, self._logits_part = top / self.flops.matmul, logits / self.flops.matmul

    def num_microbatches(self, layout: TrainerLayout, work: Work, cap: int) -> int:
        """Return the number of microbatches of one rank in one update."""
        rows = work.tokens / (work.updates * layout.dp * cap * layout.cp)
        # sequences do not fill rows to the brim
        fewest = math.ceil(rows * 1.05) if rows > 1 else 1
        return max(1, min(fewest, math.ceil(work.num_samples / (work.updates * layout.dp))))

    def train(self, layout: TrainerLayout, work: Work, *, cap: int) -> TrainSeconds:
        """Predict the seconds of training. `cap` is the tokens of a microbatch on one rank."""
        passes = 3 + (layout.recompute == "full") + work.extra_forwards
        count = self.num_microbatches(layout, work, cap)
        compute = self._compute_seconds(layout, work, count=count, passes=passes)
        rows = work.rank_tokens(layout.dp) / layout.cp
        return TrainSeconds(
            compute=compute,
            bubble=compute * (layout.pp - 1) / count,
            stages=self._stage_seconds(layout, work, rows=rows, count=count),
            tensor=self._tensor_seconds(layout, work, rows=rows, count=count, passes=passes),
            experts=self._expert_seconds(layout, work, rows=rows, count=count, passes=passes),
            data=self._data_seconds(layout, work),
            optimizer=self._optimizer_seconds(layout, work),
        )

    def _compute_seconds(
        self, layout: TrainerLayout, work: Work, *, count: int, passes: float
    ) -> float:
        """Return the seconds of the slowest stage. Each microbatch reads its rank's weights once
        per pass (twice in the backward pass, except for the weights' own gradients), so that few
        tokens with many weights are bound by memory; and adds its gradients to float32 ones, as a
        separate step. Logits are recomputed for the gradients (`train.vocab_parallel`); under full
        recompute, this is part of that pass."""
        counts, microbatches = self.memory.counter.fullest(layout), work.updates * count
        ranks = layout.tp * layout.pp * layout.cp
        per_pass = work.rank_tokens(layout.dp) / (ranks * self.device.bf16_flops)
        slowest = self._slowest_stage(layout, head=self._head_part)
        even, again = passes * per_pass * slowest, 0.0
        if layout.recompute != "full":
            head = self._head_part + self._logits_part / passes
            more = self._slowest_stage(layout, head=head) - slowest
            again = passes * per_pass * more * self.flops.matmul
        read = (
            microbatches
            * (passes - 1)
            * work.size
            / (self.device.memory_bandwidth * self.efficiency.decode_share)
        )
        plain = self.flops.forward_mean(work.typical_tokens) - self._routed
        dense = max(
            (even * plain + again) / self.efficiency.train_share,
            read * (counts.dense.plain + counts.wide.plain),
        )
        experts = max(
            even * self._routed * IMBALANCE / self.efficiency.expert_share,
            read * counts.experts.plain,
        )
        added = (
            microbatches
            * counts.total
            * (2 * work.size + 8)
            / (self.device.memory_bandwidth * self.efficiency.decode_share)
        )
        launches = (
            microbatches
            * self.table.facts.num_layers
            / layout.pp
            * self.efficiency.layer_s
            * passes
            / 3
        )
        return max(dense + experts + added, launches)

    def _slowest_stage(self, layout: TrainerLayout, *, head: float) -> float:
        """Return the work of the slowest stage relative to the mean stage. `head`: share of what
        follows the layers, besides what is counted once."""
        sizes = stage_sizes(layout, self.table.facts.num_layers)
        body = (1 - self._head_part) / self.table.facts.num_layers
        work = [size * body for size in sizes]
        work[-1] += head
        return max(work) * layout.pp

    def _stage_seconds(
        self, layout: TrainerLayout, work: Work, *, rows: float, count: int
    ) -> float:
        """Return the seconds in which each stage but the last sends the activations of every
        position to the next, and receives their gradients; nothing else runs meanwhile."""
        if layout.pp == 1:
            return 0.0
        share = 1 / layout.tp if layout.sequence_parallel else 1.0
        facts = self.table.facts
        streams = facts.hyper.num_streams if facts.hyper else 1
        moved = rows * share * streams * facts.hidden_size * work.size
        ways = 2 + work.extra_forwards
        stride = layout.world_size // layout.pp
        return ways * (
            moved / self.links.hop(stride)
            + work.updates * count * self.links.start_s(2, stride=stride)
        )

    def _tensor_seconds(
        self, layout: TrainerLayout, work: Work, *, rows: float, count: int, passes: float
    ) -> float:
        """Return the seconds in which each layer gathers and scatters the residual stream around
        attention and around a plain MLP (Korthikanti et al., arXiv 2205.05198, section 4.2.2: 2
        gathers and 2 scatters forward, as many backward, and the gathers again for the weights'
        gradients)."""
        facts = self.table.facts
        layers = facts.num_layers / layout.pp
        seconds = 0.0
        if layout.tp > 1:
            dense = 1 - self._moe_layers / facts.num_layers
            blocks = layers * (1 + dense + (1 - dense) * bool(facts.shared_expert_ffn_hidden_size))
            collectives = blocks * (2 * passes - 1)
            moved = rows * facts.hidden_size * work.size * (layout.tp - 1) / layout.tp
            seconds += collectives * (
                moved / self.links.ring(layout.tp)
                + work.updates * count * self.links.start_s(layout.tp)
            )
        if layout.cp > 1:
            wide = self._cp_numbers(layout) * work.size * rows * (layout.cp - 1)
            link = self.links.ring(layout.cp, stride=layout.tp)
            start_s = self.links.start_s(layout.cp, stride=layout.tp)
            seconds += layers * passes * (wide / link + work.updates * count * start_s)
        return seconds

    def _cp_numbers(self, layout: TrainerLayout) -> float:
        """Return how many numbers of keys and values a rank gathers of each position."""
        facts = self.table.facts
        if facts.mla:
            wide = facts.num_heads * (
                facts.mla.qk_nope_head_dim + facts.mla.qk_rope_head_dim + facts.mla.v_head_dim
            )
            return wide / layout.tp
        return 2 * facts.num_kv_heads * facts.head_dim / layout.tp

    def _expert_seconds(
        self, layout: TrainerLayout, work: Work, *, rows: float, count: int, passes: float
    ) -> float:
        """Return the seconds of dispatch and combine, forward and backward."""
        facts, group = self.table.facts, layout.ep * layout.etp
        if not facts.num_experts or group == 1:
            return 0.0
        layers = self._moe_layers / layout.pp
        share = 1 / layout.tp if layout.sequence_parallel else 1.0
        width = facts.moe_latent_size or facts.hidden_size
        moved = rows * share * facts.topk * width * work.size * IMBALANCE / (work.updates * count)
        per_pass = (
            self.links.exchange_s(moved, ranks=layout.ep, stride=layout.etp)
            if layout.ep > 1
            else 0.0
        )
        if layout.etp > 1:
            per_pass += moved * (layout.etp - 1) / self.links.ring(layout.etp) + self.links.start_s(
                layout.etp
            )
        return layers * 2 * passes * work.updates * count * per_pass

    def _data_seconds(self, layout: TrainerLayout, work: Work) -> float:
        """Return the seconds of the reduce-scatter of float32 gradients and the all-gather of
        weights, once per update."""
        counts = self.memory.trained.fullest(layout)
        seconds = 0.0
        for numbers, ranks, stride in (
            (counts.dense.plain + counts.wide.plain, layout.dp * layout.cp, layout.tp),
            (counts.experts.plain, layout.expert_dp, layout.ep * layout.etp),
        ):
            if ranks > 1 and numbers:
                link = self.links.ring(ranks, stride=stride)
                seconds += numbers * (4 + work.size) * (ranks - 1) / ranks / link
        return seconds * work.updates

    def _optimizer_seconds(self, layout: TrainerLayout, work: Work) -> float:
        """Return the seconds in which Adam reads and writes weights, moments and gradients once; on
        the host if they are offloaded."""
        counts = self.memory.trained.fullest(layout)
        own = counts.dense.plain / (layout.dp * layout.cp) + counts.experts.plain / layout.expert_dp
        if layout.offload_optimizer:
            return (
                work.updates
                * own
                * (8 / self.efficiency.host_bandwidth + 1 / self.efficiency.host_adam)
            )
        return (
            work.updates * own * 30 / (self.device.memory_bandwidth * self.efficiency.decode_share)
        )

    def rollout(self, layout: EngineLayout, work: Work, *, cache_bytes: int) -> RolloutSeconds:
        """Predict the seconds of rollout on the engine with the most requests. `cache_bytes`: cache
        of one engine rank. The engine decodes as many requests at once as its cache and its limit
        allow, one token each per step; a step reads the weights that its tokens need and the caches
        of all running requests. The last requests finish alone."""
        context = work.prompt_tokens + work.response_tokens / 2
        request_bytes = self.memory.cache_bytes(
            layout, size=work.size, tokens=int(context) + 1, sequences=1
        )
        max_requests = self.memory.max_cached_requests(
            layout, cache_bytes=cache_bytes, size=work.size, tokens=int(context) + 1
        )
        num = layout.num - work.engines_apart
        requests = math.ceil(work.num_samples / num)
        running = max(1.0, min(requests, layout.max_running_requests, max_requests))
        step_s = self._decode_step(layout, work, running=running, request_bytes=request_bytes)
        steps = requests * work.response_tokens / running
        tail = max(0.0, work.longest_response - work.response_tokens)
        few = max(1.0, running / 8)
        decode = steps * step_s + tail * self._decode_step(
            layout, work, running=few, request_bytes=request_bytes
        )
        prompts = math.ceil(work.num_prompts / num) * work.prompt_tokens
        prefill = prompts * self.flops.forward_mean(max(1, int(work.prompt_tokens)))
        return RolloutSeconds(
            prefill=prefill / (layout.tp * self.device.bf16_flops * self.efficiency.prefill_share),
            decode=decode,
            running=running,
        )

    def _decode_step(
        self, layout: EngineLayout, work: Work, *, running: float, request_bytes: int
    ) -> float:
        facts = self.table.facts
        weights = self.memory.engine_weights(layout, size=work.size)
        if facts.num_experts:
            experts = self.memory.expert_weights(layout, size=work.size)
            used_experts = 1 - (1 - facts.topk / facts.num_experts) ** running
            weights -= experts * (1 - used_experts)
        read = weights + running / layout.attention_dp * request_bytes
        memory = read / (self.device.memory_bandwidth * self.efficiency.decode_share)
        compute = (
            running
            * self.flops.forward(int(work.sequence_tokens))
            / (layout.tp * self.device.bf16_flops * self.efficiency.prefill_share)
        )
        collective = 0.0
        if layout.tp > 1:
            moved = 2 * running * facts.hidden_size * work.size / self.links.ring(layout.tp)
            collective = 2 * facts.num_layers * (moved + self.links.start_s(layout.tp))
        return max(memory, compute) + collective + self.efficiency.decode_step_s

    def decode_line(
        self, layout: EngineLayout, work: Work, *, running: float
    ) -> tuple[float, float, float]:
        """Return (seconds of a decode step, additional seconds for each running request, for each
        token of context): the plane through the predicted steps of `running` requests, of an eighth
        as many, and of `running` with twice the context."""
        context = max(1, int(work.prompt_tokens + work.response_tokens / 2))
        many = max(2.0, running)
        few = max(1.0, many / 8)

        def step(requests: float, tokens: int) -> float:
            size = self.memory.cache_bytes(layout, size=work.size, tokens=tokens, sequences=1)
            return self._decode_step(layout, work, running=requests, request_bytes=size)

        whole = step(many, context)
        context_s = max(0.0, (step(many, 2 * context) - whole) / (many * context))
        both_s = (whole - step(few, context)) / (many - few)
        request_s = max(0.0, both_s - context_s * context)
        return whole - many * (request_s + context_s * context), request_s, context_s

    def _expert_numbers(self) -> float:
        facts = self.table.facts
        return (
            (3 if facts.gated_mlp else 2)
            * facts.moe_ffn_hidden_size
            * (facts.moe_latent_size or facts.hidden_size)
        )

    def publish_seconds(
        self, layout: TrainerLayout, engines: EngineLayout, work: Work, *, shared: bool
    ) -> float:
        """Predict the seconds of a weight update of the engines. Each trainer rank sends the pieces
        that it holds; each engine rank receives its part, and forwards it (`transport.transfer`);
        buckets follow one another through the levels of engines. `shared`: they share devices, and
        an engine rank copies its part from the memory of the ranks on its node."""
        ranks, memory = (
            layout.world_size,
            self.device.memory_bandwidth * self.efficiency.decode_share,
        )
        num_nodes = max(1, ranks // self.devices_per_node)
        widest = max(layout.tp, layout.ep * layout.etp)
        is_apart = num_nodes > 1 and (layout.pp > 1 or widest > self.devices_per_node)
        if work.sends_whole or (shared and is_apart):  # or no node has the whole model
            return self.publish_whole_seconds(
                layout, work, num_receivers=None if shared else engines.num * engines.tp
            )
        moved = transfer(
            self.memory, layout, engines, size=work.size, shared=shared, num_nodes=num_nodes
        )
        count = math.ceil(moved.busiest / work.bucket_bytes)
        if shared:
            others = 1 - num_nodes / ranks
            link = self.links.hop(1)
            seconds = moved.busiest / memory + others * moved.received / link
        else:
            count = max(count, math.ceil(moved.received / work.bucket_bytes))
            link = self.links.broadcast(ranks + engines.num * engines.tp)
            levels_s = (moved.levels - 1) * moved.received * max(1, moved.children) / count
            seconds = (moved.largest + levels_s) / link
        return seconds + moved.received / memory + count * self.efficiency.bucket_s

    def publish_whole_seconds(
        self, layout: TrainerLayout, work: Work, *, num_receivers: int | None
    ) -> float:
        """Predict the seconds of a weight update that sends whole tensors. Every trainer rank
        gathers the weights bucket by bucket, and passes them on within its device (`num_receivers`
        None), or rank 0 sends them to `num_receivers` engine devices (see `weights.base`)."""
        model = self.memory.sent.table.num_parameters * work.size
        gather = model / self.links.ring(layout.world_size) if layout.world_size > 1 else 0.0
        link = (
            self.device.memory_bandwidth * self.efficiency.decode_share
            if num_receivers is None
            else self.links.broadcast(1 + num_receivers)
        )
        return (
            gather + model / link + math.ceil(model / work.bucket_bytes) * self.efficiency.bucket_s
        )

    def switch_seconds(self, static_bytes: int) -> float:
        """Predict the seconds in which a sleeping trainer moves its state to host memory and
        back."""
        return 2 * static_bytes / self.efficiency.host_bandwidth

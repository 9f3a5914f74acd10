"""Predicts the memory of one device: the needs of a trainer rank and an engine rank, part by part,
and whether both fit. Pure. Tests compare sizes of weights, gradients, optimizer and activations
with real ranks; figures marked as estimates are not tested."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate

from milescli import models
from milescli.core.units import MIB, format_count
from milescli.models import table
from milescli.models.adapter import LoraShape, adapter_table, engine_slots
from milescli.models.base import WeightTable
from milescli.models.costs import CacheCost, cache_cost
from milescli.models.facts import ModelFacts, Vision
from milescli.models.precision import Cut
from milescli.plan.activations import (
    AdapterBytes,
    LayerBytes,
    adapter_bytes,
    head_bytes,
    layer_bytes,
    mtp_bytes,
    shared_attention_bytes,
    tower_bytes,
)
from milescli.plan.devices import Efficiency
from milescli.plan.legal import microbatches_in_flight, stage_ends
from milescli.plan.precision import (
    PLAIN_FORMATS,
    Formats,
    QuantisedSize,
    engine_cut,
    formats_of,
    quantised_size,
)
from milescli.plan.static_memory import (
    TrainerLoad,
    WeightCounter,
    copies_bytes,
    frozen_bytes,
    host_bytes,
    matrix_bytes,
    saved_bytes,
    static_bytes,
)
from milescli.plan.types import EngineLayout, Log, TrainerLayout
from milescli.recipe.lora import Lora
from milescli.recipe.schema import Recipe

FRAGMENTED_SHARE = 0.04
"""Share of a device's memory that the allocator cannot use, or that is left as a margin. An
estimate."""
PREFILL_TOKENS = 8192
"""Most tokens that SGLang prefills at once (its own default on devices of 80 GB)."""
STATE_SHARE = 0.9 / 1.9
"""Share of an engine's cache that SGLang reserves for recurrent states, if a model has them
(`--mamba-full-memory-ratio` 0.9)."""
STATES_PER_REQUEST = 3
"""Recurrent states that SGLang reserves for each running request: its own, and those in its prefix
cache."""
SAMPLED_REQUESTS = 256
"""Requests whose float32 logits an engine holds at once, with a copy for sampling. An estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerBytes:
    """Holds the memory of one trainer rank at the peak of a step, in bytes."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    """Optimizer state on the device."""
    activations: int = 0
    logits: int = 0
    """A few blocks of logits, and the gradients of their inputs; under full recompute, only the
    excess over the layer that is recomputed, which exists at another time."""
    workspace: int = 0
    """Short-lived tensors, and the process itself. An estimate."""
    host: int = 0
    """Bytes of the node's main memory: offloaded optimizer states, what a sleeping rank, a
    reference or a teacher stores there, and a checkpoint that is being written."""
    copies: int = 0
    """Copies of the state for `fault.copy_every`, included in `host`."""
    saved: int = 0
    """The copy from which a checkpoint is written (`checkpoint.async_save`), included in `host`."""
    turn: int = 0
    """Device memory of a teacher while the policy is in host memory; 0 on a CPU, where both stay in
    memory."""

    @property
    def static(self) -> int:
        """Return the bytes that stay allocated between steps."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """Return all bytes on the device."""
        own = self.static + self.activations + self.logits + self.workspace
        return max(own, self.turn)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBytes:
    """Holds the memory of one engine rank, in bytes."""

    weights: int
    cache: int
    """Keys, values and recurrent states."""
    graphs: int
    workspace: int
    """Activations of a prefill, its logits, and the process itself. An estimate."""

    @property
    def total(self) -> int:
        """Return all bytes on the device."""
        return self.weights + self.cache + self.graphs + self.workspace


@dataclass(slots=True)
class MemoryModel:
    """Predicts the memory of one model. Caches sums over layers, since a search evaluates many
    layouts."""

    table: WeightTable
    adapter: WeightTable | None = None
    """Table of the trained adapter; None if the model's weights are trained."""
    slots: int = 0
    """Number of adapters that an engine can hold; the trainer's device holds one. 0: engines get
    the model with the adapter merged in."""
    formats: Formats = PLAIN_FORMATS
    exempt: tuple[str, ...] = ()
    """Modules that keep plain weights in every format."""
    counter: WeightCounter = field(init=False)
    trained: WeightCounter = field(init=False)
    """Counts of the trained weights."""
    _layers: dict[object, _LayerSums] = field(default_factory=dict)
    _cache: CacheCost | None = None

    def __post_init__(self) -> None:
        self.counter = self.trained = WeightCounter(self.table)
        if self.adapter is not None:
            self.trained = WeightCounter(self.adapter)

    @property
    def sent(self) -> WeightCounter:
        """Return the counter of the weights that engines receive in a publication."""
        return self.trained if self.slots else self.counter

    def stages(self, layout: TrainerLayout, load: TrainerLoad) -> list[TrainerBytes]:
        """Return [pp] the memory of one rank of each stage."""
        return self._of_stages(layout, load, range(layout.pp))

    def worst_stage(self, layout: TrainerLayout, load: TrainerLoad) -> TrainerBytes:
        """Return the memory of the stage that needs the most device memory. Among equal stages it
        is the first, which has the most microbatches in flight."""
        return max(
            self._of_stages(layout, load, self.counter.distinct_stages(layout)),
            key=lambda stage: stage.total,
        )

    def _of_stages(
        self, layout: TrainerLayout, load: TrainerLoad, stages: Iterable[int]
    ) -> list[TrainerBytes]:
        counts = self.counter.stages(layout)
        sums = self._layer_sums(layout, load)
        ends = stage_ends(layout, self.table.facts.num_layers)
        saved_of_head, of_logits = self._head_bytes(layout, load, tokens=load.computed_tokens)
        sizes, on_device = [], replace(layout, offload_optimizer=False)
        matrices = matrix_bytes(self.table) if load.takes_matrices else 0
        for stage in stages:
            start, end = ends[stage - 1] if stage else 0, ends[stage]
            is_last = stage == layout.pp - 1
            in_flight = microbatches_in_flight(stage, layout.pp, load.num_microbatches)
            saved, inputs = sums.saved_between(start, end), sums.input * (end - start)
            top = float(saved_of_head if is_last else 0)
            head = of_logits if is_last else 0
            again = 0.0
            if is_last and self.table.facts.trains_mtp:
                ahead, again = mtp_bytes(self.table.facts, layout, layer=sums.mtp, size=load.size)
                top += load.row_tokens * ahead
            tokens = load.computed_tokens
            laid = (load.row_tokens - tokens) * shared_attention_bytes(
                self.table.facts, size=load.saved_size
            )
            if layout.recompute == "full":
                inner = max(sums.max_between(start, end) - sums.input, again)
                most = max(top, tokens * inner + laid)
                most += max(sums.fused[start:end], default=0.0)
                activations = tokens * inputs * in_flight + most
                head = max(0, int(top + head - most))
            else:
                whole = tokens * saved + laid * (end - start) + sum(sums.fused[start:end])
                activations = whole * in_flight + top
            if stage == 0 and self.table.facts.vision is not None:
                each, beside = self._tower_bytes(self.table.facts.vision, layout, load)
                activations += each * in_flight + beside
            scratch = load.row_tokens * sums.widest
            trained = self.trained.stage(layout, stage)
            static = static_bytes(trained, layout, size=load.size)
            if self.adapter is not None:
                static = (static[0] + frozen_bytes(counts[stage], size=load.size), *static[1:])
            elif self.formats.trainer is not None:
                # rounded weights lie beside the weights
                ahead = self.table.facts.num_mtp_layers if is_last else 0
                rounded = self._rounded(layout, range(start, end + ahead)) * load.size
                static = (static[0] + rounded, *static[1:])
            copies = load.takes_copies * copies_bytes(
                static_bytes(trained, on_device, size=load.size),
                has_critic=load.critic != "none",
                reference=load.keeps_reference * trained.total * load.size,
            )
            saved = load.saves_copy * saved_bytes(trained, layout, size=load.size)
            saved *= 1 + (load.critic != "none")
            turns = [
                memory_model(facts).frozen_memory(layout, load, stage) for facts in load.teachers
            ]
            sizes.append(
                TrainerBytes(
                    weights=static[0],
                    gradients=static[1],
                    optimizer=static[2],
                    activations=int(activations),
                    logits=head,
                    workspace=int(max(scratch, 2 * load.bucket_bytes, matrices))
                    + load.efficiency.trainer_context,
                    host=host_bytes(trained, layout, load, static)
                    + sum(weights + load.teachers_resident * used for weights, used in turns)
                    + copies
                    + saved
                    + load.sent_copies * self._sent_bytes(load.size) // layout.world_size,
                    copies=copies,
                    saved=saved,
                    turn=0
                    if load.teachers_resident or not turns
                    else max(map(sum, turns)) + load.efficiency.trainer_context,
                )
            )
        return sizes

    def frozen_memory(
        self, layout: TrainerLayout, load: TrainerLoad, stage: int
    ) -> tuple[int, int]:
        """Return (weights, workspace) in bytes of one rank of `stage` for a model that is not
        trained. The workspace is that of a forward pass without gradients over one microbatch: the
        widest layer with its input and output, and logits."""
        counts = self.counter.stage(layout, stage)
        weights = frozen_bytes(counts, size=load.size)
        sums, is_last = self._layer_sums(layout, load), stage == layout.pp - 1
        layers = load.row_tokens * (2 * sums.input + sums.widest)
        return weights, int(
            layers + is_last * sum(self._head_bytes(layout, load, tokens=load.row_tokens))
        )

    @staticmethod
    def _tower_bytes(vision: Vision, layout: TrainerLayout, load: TrainerLoad) -> tuple[int, int]:
        return tower_bytes(
            vision,
            tokens=load.row_tokens,
            images=int(load.row_tokens * load.image_share),
            step_images=-(-load.image_tokens // layout.dp),
            size=load.size,
            recompute=layout.recompute,
        )

    def _head_bytes(
        self, layout: TrainerLayout, load: TrainerLoad, *, tokens: int
    ) -> tuple[int, int]:
        return head_bytes(
            self.table.facts,
            layout,
            tokens=tokens,
            size=load.size,
            on_host=load.on_host,
            trained=self.adapter is None,
        )

    def _layer_sums(self, layout: TrainerLayout, load: TrainerLoad) -> _LayerSums:
        key = (
            layout.tp,
            layout.cp,
            layout.ep,
            layout.etp,
            layout.sequence_parallel,
            load.saved_size,
            load.packing,
            load.fused_swiglu,
        )
        if key not in self._layers:
            facts = self.table.facts
            layers = (*facts.layers, facts.mtp_layer)
            kinds = {
                layer: layer_bytes(
                    facts.at(layers.index(layer)),
                    layer,
                    layout,
                    size=load.saved_size,
                    packing=load.packing,
                    fused_swiglu=load.fused_swiglu,
                )
                for layer in set(layers)
            }
            self._layers[key] = _LayerSums.of(
                [kinds[layer] for layer in layers],
                []
                if self.adapter is None
                else adapter_bytes(
                    self.table, self.adapter, layout, size=load.saved_size, packing=load.packing
                ),
            )
        return self._layers[key]

    def engine(
        self,
        layout: EngineLayout,
        *,
        memory_bytes: int,
        size: int,
        longest: int,
        efficiency: Efficiency,
    ) -> EngineBytes:
        """Return the memory of an engine rank under its memory fraction: the cache gets what the
        weights leave. `longest`: tokens of the longest sequence."""
        weights = self.engine_weights(layout, size=size)
        facts = self.table.facts
        tokens = min(PREFILL_TOKENS, layout.max_running_requests * longest)
        wide = max(
            facts.ffn_hidden_size / layout.tp,
            facts.topk * facts.moe_ffn_hidden_size / max(1, layout.tp),
        )
        activations = (
            tokens * size * (6 * facts.hidden_size + 3 * wide)
            + 4 * 2 * SAMPLED_REQUESTS * facts.vocab_size
        )
        cache = int(memory_bytes * layout.memory_fraction) - weights
        if layout.max_total_tokens is not None:
            cache = min(
                cache,
                self.cache_bytes(layout, size=size, tokens=layout.max_total_tokens, sequences=0),
            )
        return EngineBytes(
            weights=weights,
            cache=max(cache, 0),
            graphs=efficiency.engine_graphs,
            workspace=int(activations) + efficiency.engine_context,
        )

    def engine_weights(
        self, layout: EngineLayout, *, size: int, multiplies_plain: bool = False
    ) -> int:
        """Return the bytes of weights that one engine rank holds. `multiplies_plain`: it holds
        plain weights beside those of a number format, and multiplies by them, as on a CPU."""
        cut = {"tp": layout.tp, "ep": layout.ep, "attention_dp": layout.attention_dp}
        numbers = self.counter.engine_total(**cut)
        if self.adapter is not None:
            numbers += self.slots * self.trained.engine_total(**cut)
        quantised = self._quantised_size(layout)
        saved = 0 if multiplies_plain else quantised.numbers * size
        return numbers * size - saved + quantised.size_bytes

    def expert_weights(self, layout: EngineLayout, *, size: int) -> int:
        """Return the bytes of weights of routed experts that one engine rank holds."""
        numbers, quantised = self.counter.engine_experts(tp=layout.tp), self._quantised_size(layout)
        return (numbers - quantised.expert_numbers) * size + quantised.expert_bytes

    def quantised_share(self, layout: EngineLayout) -> float:
        """Return the share of an engine rank's weights that are in the engines' format."""
        numbers = self.counter.engine_total(
            tp=layout.tp, ep=layout.ep, attention_dp=layout.attention_dp
        )
        return self._quantised_size(layout).numbers / numbers

    def sent_weights(self, layout: EngineLayout, *, size: int) -> int:
        """Return the bytes of weights that one engine rank receives in a publication."""
        cut = {"tp": layout.tp, "ep": layout.ep, "attention_dp": layout.attention_dp}
        quantised = self._quantised_size(layout) if self.sent is self.counter else QuantisedSize()
        return (self.sent.engine_total(**cut) - quantised.numbers) * size + quantised.size_bytes

    def _sent_bytes(self, size: int) -> int:
        """Return the bytes of one publish to one engine, of which each trainer rank sends its
        share."""
        return self.sent_weights(EngineLayout(), size=size)

    def _rounded(self, layout: TrainerLayout, layers: range) -> int:
        """Return the number of weights of a rank to which the trainer's format applies."""
        assert self.formats.trainer is not None
        return quantised_size(
            self.table.facts,
            self.formats.trainer,
            cut=Cut(dense=layout.tp, experts=layout.etp),
            ep=layout.ep,
            exempt=self.exempt,
            layers=layers,
        ).numbers

    def _quantised_size(self, layout: EngineLayout) -> QuantisedSize:
        """Return the weights of an engine rank that are in the engines' format."""
        if self.formats.engines is None:
            return QuantisedSize()
        return quantised_size(
            self.table.facts,
            self.formats.engines,
            cut=engine_cut(layout),
            ep=layout.ep,
            exempt=self.exempt,
        )

    def cache_bytes(self, layout: EngineLayout, *, size: int, tokens: int, sequences: int) -> int:
        """Return the cache bytes of one rank for `sequences` sequences with `tokens` tokens in
        total, all in the rank's attention group. Heads are divided by tp / attention_dp as far as
        there are heads; every rank of a group holds the whole latent of MLA."""
        facts, cost, scale = self.table.facts, self.cache_cost, size / 2
        cut = layout.tp // layout.attention_dp
        heads = 1 if facts.mla else min(cut, facts.num_kv_heads)
        states = min(cut, max(1, facts.gated_delta.num_value_heads if facts.gated_delta else cut))
        per_token = cost.bytes_per_token + cost.window_bytes_per_token
        return int(scale * tokens * per_token / heads + sequences * cost.state_bytes / states)

    @property
    def cache_cost(self) -> CacheCost:
        """Return the cache cost of one sequence on an engine without parallelism."""
        if self._cache is None:
            self._cache = cache_cost(self.table.facts)
        return self._cache

    def max_cached_requests(
        self, layout: EngineLayout, *, cache_bytes: int, size: int, tokens: int
    ) -> float:
        """Return the number of requests of `tokens` tokens each whose caches fit at once into an
        engine with `cache_bytes` on each of its ranks."""
        states = self.cache_bytes(layout, size=size, tokens=0, sequences=STATES_PER_REQUEST)
        per_request = self.cache_bytes(layout, size=size, tokens=tokens, sequences=0)
        share = STATE_SHARE if states else 0.0
        max_requests = (1 - share) * cache_bytes / max(per_request, 1)
        return layout.attention_dp * (
            min(max_requests, share * cache_bytes / states) if states else max_requests
        )

    def cache_tokens(self, layout: EngineLayout, *, cache_bytes: int, size: int) -> int:
        """Return the number of tokens whose keys and values fit into an engine with `cache_bytes`
        on each of its ranks."""
        per_tokens = self.cache_bytes(layout, size=size, tokens=1 << 20, sequences=0)
        share = 1 - STATE_SHARE if self.cache_cost.state_bytes else 1.0
        return int(share * cache_bytes / max(per_tokens, 1) * (1 << 20)) * layout.attention_dp


@lru_cache(maxsize=8)
def memory_model(facts: ModelFacts) -> MemoryModel:
    """Return the memory model of these facts; cached, so that the next plan reuses its sums."""
    return MemoryModel(models.table(facts))


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerSums:
    """Holds running sums over the layers of a model."""

    saved: list[float]
    """[layers + 1] bytes of all layers before this one"""
    layers: list[float]
    """[layers] bytes of this layer"""
    fused: list[float]
    """[layers] bytes of this layer's adapters, for each pass; empty without adapters"""
    input: float
    widest: float
    mtp: LayerBytes

    @classmethod
    def of(cls, layers: Sequence[LayerBytes], adapters: Sequence[AdapterBytes]) -> _LayerSums:
        saved = [layer.saved for layer in layers[:-1]]
        if adapters:
            saved = [own + more.saved for own, more in zip(saved, adapters, strict=True)]
        return cls(
            fused=[each.fused for each in adapters],
            saved=list(accumulate(saved, initial=0.0)),
            layers=saved,
            input=layers[0].input,
            widest=max(layer.widest for layer in layers[:-1]),
            mtp=layers[-1],
        )

    def saved_between(self, start: int, end: int) -> float:
        return self.saved[end] - self.saved[start]

    def max_between(self, start: int, end: int) -> float:
        return max(self.layers[start:end])


def bucket_bytes(bucket_mib: int | None, *, on_cpu: bool) -> int:
    """Return the size of a weight-sync bucket in bytes; None means the default of the device. On a
    CPU, publishing SmolLM2-135M took 0.27 s in buckets of 64 MiB, and 0.56 s in buckets of 512
    MiB."""
    return (bucket_mib or (64 if on_cpu else 512)) * MIB


def trained_shape(recipe: Recipe) -> LoraShape | None:
    """Return the adapter's shape, or None if the recipe trains all weights."""
    return shape_of(recipe.train.lora) if recipe.train.lora.is_on else None


def memory_of(recipe: Recipe, facts: ModelFacts, *, merged: bool = False) -> MemoryModel:
    """Return the memory model of the recipe's model and of its trained weights. `merged` comes from
    `publishes_merged`. Raises RecipeError if the adapter of the recipe does not fit the model."""
    formats, shape = formats_of(recipe, merges_adapter=merged), trained_shape(recipe)
    if shape is None and formats == PLAIN_FORMATS:
        return memory_model(facts)
    slots = 0 if merged or shape is None else engine_slots(len(recipe.adapters))
    return _of_policy(facts, shape, slots, formats, tuple(recipe.train.exempt))


@lru_cache(maxsize=8)
def _of_policy(
    facts: ModelFacts,
    shape: LoraShape | None,
    slots: int,
    formats: Formats,
    exempt: tuple[str, ...],
) -> MemoryModel:
    base = table(facts)
    adapter = adapter_table(base, shape) if shape is not None else None
    return MemoryModel(base, adapter, slots, formats, exempt)


def publishes_merged(recipe: Recipe, *, on_cpu: bool, size: int) -> bool:
    """Return True if engines receive the model with the adapter merged in. `size`: bytes of a
    weight: with two bytes the sum would be rounded, and the engines would sample from another
    policy than the trained one."""
    lora = recipe.train.lora
    if not lora.is_on or lora.publish != "auto":
        return lora.is_on and lora.publish == "merged"
    return on_cpu and size == 4 and not recipe.adapters


def note_publishing(recipe: Recipe, *, merged: bool, log: Log) -> None:
    """Log what engines receive if an adapter is trained."""
    if not recipe.train.lora.is_on or not recipe.has_engines:
        return
    if recipe.train.lora.publish != "auto":
        why = "pinned by `train.lora.publish`"
    elif merged:
        why = "on a CPU an engine samples faster from one model than from a model and an adapter"
    else:
        why = "engines compute it beside the frozen model"
    log.note("adapter.publish", "merged" if merged else "adapter", why)


def note_adapter(recipe: Recipe, facts: ModelFacts, log: Log) -> None:
    """Log how many parameters an adapter trains. Raises RecipeError if it does not fit the
    model."""
    shape = trained_shape(recipe)
    if shape is None:
        return
    base = table(facts)
    numbers, of_base = adapter_table(base, shape).num_parameters, base.num_parameters
    log.note(
        "adapter",
        f"rank {shape.rank}" + (f" x {len(recipe.adapters)}" if recipe.adapters else ""),
        f"{format_count(numbers)} of {format_count(of_base)} numbers are trained "
        f"({100 * numbers / of_base:.2g} %); the others have neither gradient nor optimizer"
        + (f"; {', '.join(recipe.adapters)} take turns" if recipe.adapters else ""),
    )


def shape_of(lora: Lora) -> LoraShape:
    """Return the shape of an adapter. `lora.is_on` must be True."""
    assert lora.rank is not None, "an adapter has a rank"
    assert lora.type != "dora", "recipe.check refuses it"
    return LoraShape(
        rank=lora.rank,
        alpha=lora.alpha if lora.alpha is not None else 2.0 * lora.rank,
        targets=tuple(lora.targets),
        exclude=tuple(lora.exclude),
        kind=lora.type,
        experts=lora.experts,
    )

"""Counts the memory of a rank that is independent of the batch: its parameters, their weights,
gradients and optimizer state, and copies of these. Pure; called by `memory`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Literal

from milescli.core.units import format_bytes
from milescli.models.base import Entry, Rule, WeightTable
from milescli.models.facts import ModelFacts
from milescli.plan.activations import Packing
from milescli.plan.devices import Efficiency
from milescli.plan.legal import stage_sizes
from milescli.plan.types import Log, TrainerLayout
from milescli.recipe.schema import Recipe
from milescli.recipe.train import MATRIX_RULES

_ALIGN = 64
"""Numbers to which Megatron aligns the start of every parameter in its flat memory (256 bytes of
float32)."""
_WIDE = (".A_log", ".self_attention.out_norm.weight")
"""Weights of linear attention that may be float32, if the release says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementCounts:
    """Counts the elements of one kind of weights, without and with alignment in flat memory."""

    plain: int = 0
    aligned: int = 0

    def __add__(self, other: ElementCounts) -> ElementCounts:
        return ElementCounts(plain=self.plain + other.plain, aligned=self.aligned + other.aligned)

    def __sub__(self, other: ElementCounts) -> ElementCounts:
        return ElementCounts(plain=self.plain - other.plain, aligned=self.aligned - other.aligned)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightCounts:
    """Counts the weights that one rank holds."""

    dense: ElementCounts = ElementCounts()
    """Weights in the model's dtype that are equal on all data- and context-parallel ranks."""
    experts: ElementCounts = ElementCounts()
    """Weights that are equal on the `expert_dp` ranks."""
    wide: ElementCounts = ElementCounts()
    """Weights that stay in float32 whatever the model's dtype."""
    frozen: ElementCounts = ElementCounts()

    def __add__(self, other: WeightCounts) -> WeightCounts:
        return WeightCounts(
            dense=self.dense + other.dense,
            experts=self.experts + other.experts,
            wide=self.wide + other.wide,
            frozen=self.frozen + other.frozen,
        )

    def __sub__(self, other: WeightCounts) -> WeightCounts:
        return WeightCounts(
            dense=self.dense - other.dense,
            experts=self.experts - other.experts,
            wide=self.wide - other.wide,
            frozen=self.frozen - other.frozen,
        )

    @property
    def total(self) -> int:
        """Return the number of all weights, without alignment gaps."""
        return self.dense.plain + self.experts.plain + self.wide.plain + self.frozen.plain


@dataclass(slots=True)
class WeightCounter:
    """Counts the weights of one model per rank. Caches results, since a search requests the same
    divisions many times."""

    table: WeightTable
    _groups: list[tuple[tuple[Entry, int], ...]] = field(default_factory=list)
    """[layers + 1] entries of each layer, with the number of their experts; last, those outside of
    layers."""
    _kinds: list[int] = field(default_factory=list)
    """[layers] the first layer with the same entries."""
    _sums: dict[tuple[int, int, int], list[WeightCounts]] = field(default_factory=dict)
    """(tp, ep, etp) -> [layers + 1] counts of all layers before."""
    _stages: dict[object, list[WeightCounts]] = field(default_factory=dict)
    _distinct: dict[object, tuple[int, ...]] = field(default_factory=dict)
    _engine: dict[tuple[int, int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        layers = self.table.facts.num_layers
        groups: list[list[tuple[Entry, int]]] = [[] for _ in range(layers + 1)]
        for entry, times in self.table.counted:
            if self.table.holds(entry) and not entry.rule.buffer:
                groups[layers if entry.layer is None else entry.layer].append((entry, times))
        self._groups = [tuple(group) for group in groups]
        first_layers: dict[object, int] = {}
        for layer in range(layers):
            alike = tuple((id(entry.rule), entry.shapes, times) for entry, times in groups[layer])
            self._kinds.append(first_layers.setdefault(alike, layer))

    def stage(self, layout: TrainerLayout, stage: int) -> WeightCounts:
        """Return the weights of a rank of pipeline stage `stage`."""
        return self.stages(layout)[stage]

    def fullest(self, layout: TrainerLayout) -> WeightCounts:
        """Return the weights of a rank of the stage that holds most."""
        counts = self.stages(layout)
        return max(
            (counts[stage] for stage in self.distinct_stages(layout)),
            key=lambda counted: counted.total,
        )

    def stages(self, layout: TrainerLayout) -> list[WeightCounts]:
        """Return [pp] the weights of one rank of each stage."""
        key = self._key(layout)
        if key not in self._stages:
            self._stages[key] = self._count(layout)
        return self._stages[key]

    def distinct_stages(self, layout: TrainerLayout) -> tuple[int, ...]:
        """Return the first stage of each kind of equal stages, and the last stage."""
        key = self._key(layout)
        if key not in self._distinct:
            counts = self.stages(layout)
            firsts = {counted: stage for stage, counted in reversed(list(enumerate(counts)))}
            self._distinct[key] = tuple(sorted({*firsts.values(), layout.pp - 1}))
        return self._distinct[key]

    @staticmethod
    def _key(layout: TrainerLayout) -> tuple[object, ...]:
        return (
            layout.tp,
            layout.ep,
            layout.etp,
            layout.pp,
            layout.first_stage_layers,
            layout.last_stage_layers,
        )

    def _count(self, layout: TrainerLayout) -> list[WeightCounts]:
        sums = self._layer_sums(layout)
        ends = list(accumulate(stage_sizes(layout, self.table.facts.num_layers)))
        counts = [sums[end] - sums[start] for start, end in zip([0, *ends], ends, strict=False)]
        counts[0] = counts[0] + self._outside(layout, lambda rule: rule.on_first_stage)
        counts[-1] = counts[-1] + self._outside(layout, lambda rule: not rule.on_first_stage)
        facts = self.table.facts
        if (facts.tied_embeddings or facts.trains_mtp) and layout.pp > 1:
            # the last stage has a copy of the embedding as its output layer, or for its MTP layer
            embedding = self._outside(
                layout, lambda rule: rule.on_first_stage and not rule.of_vision
            )
            counts[-1] = counts[-1] + embedding
        return counts

    def _layer_sums(self, layout: TrainerLayout) -> list[WeightCounts]:
        key, kinds = (layout.tp, layout.ep, layout.etp), set(self._kinds)
        if key not in self._sums:
            of_kind = {kind: self._count_entries(self._groups[kind], *key) for kind in kinds}
            self._sums[key] = list(
                accumulate((of_kind[kind] for kind in self._kinds), initial=WeightCounts())
            )
        return self._sums[key]

    def _outside(self, layout: TrainerLayout, is_there: Callable[[Rule], bool]) -> WeightCounts:
        entries = [entry for entry in self._groups[-1] if is_there(entry[0].rule)]
        return self._count_entries(entries, layout.tp, layout.ep, layout.etp)

    def _count_entries(
        self, entries: Sequence[tuple[Entry, int]], tp: int, ep: int, etp: int
    ) -> WeightCounts:
        sums = {"dense": [0, 0], "experts": [0, 0], "wide": [0, 0], "frozen": [0, 0]}
        for entry, times in entries:
            size, count = _rank_elements(entry, tp=tp, etp=etp), 1
            if entry.expert is not None:
                kind, count = "experts", times // ep
            elif not self.table.trains(entry):
                kind = "frozen"
            else:
                kind = "wide" if _is_wide(entry) else "dense"
            sums[kind][0] += size * count
            sums[kind][1] += -(-size // _ALIGN) * _ALIGN * count
        return WeightCounts(
            **{kind: ElementCounts(plain=a, aligned=b) for kind, (a, b) in sums.items()}
        )

    def engine_total(self, *, tp: int, ep: int, attention_dp: int) -> int:
        """Return the number of weights on one of the `tp` ranks of an engine: heads are divided by
        tp / attention_dp, experts and vocabulary by tp. Every rank has the weights that have no
        axis."""
        key = (tp, ep, attention_dp)
        if key not in self._engine:
            alike = [(kind, self._kinds.count(kind)) for kind in set(self._kinds)]
            self._engine[key] = sum(
                times * _engine_numbers(self._groups[layer], tp=tp, attention_dp=attention_dp)
                for layer, times in [*alike, (-1, 1)]
            )
        return self._engine[key]

    def engine_experts(self, *, tp: int) -> int:
        """Return the number of weights of routed experts on one of the `tp` ranks of an engine."""
        return sum(
            self._kinds.count(kind) * (entry.num_elements * times // tp)
            for kind in set(self._kinds)
            for entry, times in self._groups[kind]
            if entry.expert is not None
        )


def _engine_numbers(group: Sequence[tuple[Entry, int]], *, tp: int, attention_dp: int) -> int:
    total = 0
    for entry, times in group:
        size = entry.num_elements
        if entry.expert is not None:
            total += size * times // tp
        elif entry.rule.sharding.axis == "none":
            total += size
        else:
            is_mixer = ".self_attention." in entry.megatron or ".mixer." in entry.megatron
            total += -(-size // (tp // attention_dp if is_mixer else tp))
    return total


def _is_wide(entry: Entry) -> bool:
    """Return True if the trainer keeps the weight in float32 beside bfloat16 ones: the decay of
    linear attention, and the norm after it."""
    delta = entry.facts.gated_delta
    return entry.rule.float32 or bool(delta and delta.float32 and entry.megatron.endswith(_WIDE))


def _rank_elements(entry: Entry, *, tp: int, etp: int) -> int:
    """Return the number of elements of an entry that one rank has."""
    sharding = entry.rule.sharding
    parts = {"tp": tp, "etp": etp, "none": 1}[sharding.axis]
    if not sharding.padded:
        return entry.num_elements // parts
    size = 0
    for shape in entry.shapes:
        row = 1
        for length in shape[1:]:
            row *= length
        size += -(-shape[0] // parts) * row
    return size


STATE_COPIES = 3
"""Copies of a rank's state: one beside the rank, from which it is sent while the rank trains on;
and two at the process that stores it, the valid copy and the incoming one."""


def copies_bytes(static: tuple[int, int, int], *, has_critic: bool, reference: int) -> int:
    """Return the bytes of one rank's state copies, counted on its own node: the process on another
    node that stores them uses as much for its neighbour. `static` is (weights, gradients (not
    copied), optimizer) of one model; `reference` is the bytes of frozen weights, or 0."""
    return STATE_COPIES * ((static[0] + static[2]) * (1 + has_critic) + reference)


def note_copies(recipe: Recipe, *, size_bytes: int, log: Log) -> None:
    """Log the memory of state copies. Does nothing if none are taken. `size_bytes` is that of one
    node."""
    every = recipe.fault.copy_every
    if not every:
        return
    where = "the next node" if recipe.machine.nodes > 1 else "a process beside"
    log.note(
        "fault.copy_every",
        every,
        f"{format_bytes(size_bytes)} of a node's main memory: of weights and optimizer one copy "
        f"beside each rank, and two in {where}; an estimate",
    )


_PAD = 128
"""Megatron pads flat memory to a multiple of this and of the ranks that share it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLoad:
    """Holds what the trainer's memory depends on besides model and layout."""

    size: int
    """Bytes of a weight: 2 (bf16) or 4 (fp32)."""
    row_tokens: int
    """Tokens of the longest row on one rank: the microbatch cap."""
    distinct_tokens: int | None = None
    """Largest number of these tokens that are computed if sequences share their prompts; None: all
    of them."""
    num_microbatches: int
    """Microbatches of one rank in one update."""
    keeps_reference: bool
    critic: Literal["none", "in_turn", "beside"]
    """in_turn: either critic or policy waits in host memory; beside: both are in main memory."""
    teachers: tuple[ModelFacts, ...] = ()
    """Facts of the untrained models that the ranks hold besides the policy."""
    teachers_resident: bool = False
    """True if teachers stay in memory with the policy; else they take turns, as the critic does."""
    takes_copies: bool = False
    """True if ranks copy their state (`fault.copy_every`)."""
    saves_copy: bool = False
    """True if ranks copy their state to host memory, from where a checkpoint is written
    (`checkpoint.async_save`). On a CPU a checkpoint is written in place."""
    sleeps: bool
    """True if the trainer moves to host memory while the engines generate."""
    bucket_bytes: int
    """Size of a weight-sync bucket."""
    packing: Packing = field(default_factory=Packing)
    image_share: float = 0.0
    """Largest share of a row's tokens that stand for images, if the model sees any."""
    image_tokens: int = 0
    """Largest number of tokens of all images in a step, each counted once."""
    on_host: bool = False
    """True if the device is a CPU."""
    sent_copies: int = 0
    """Copies that ranks store of the weights that they sent last (`transport.sent_copies`)."""
    fused_swiglu: bool = False
    """True if `activations.layer_bytes` may assume the fused SwiGLU of float32 on a CPU."""
    keeps_float32: bool = False
    """True if layers save float32 for their gradients whatever the size of a weight: under
    `train.on_policy: exact` on a CPU."""
    takes_matrices: bool = False
    """True if the optimizer gathers whole matrices of layers (`rule: muon`)."""
    efficiency: Efficiency = field(default_factory=Efficiency)

    @property
    def computed_tokens(self) -> int:
        """Return the positions of the longest row that are computed."""
        distinct = self.distinct_tokens
        return self.row_tokens if distinct is None else min(self.row_tokens, distinct)

    @property
    def saved_size(self) -> int:
        """Return the bytes of each number that layers save for their gradients."""
        return 4 if self.keeps_float32 else self.size


def recipe_load_fields(recipe: Recipe) -> dict[str, float]:
    """Return the fields of a TrainerLoad that depend on the recipe alone. As an upper bound,
    prompts consist of images only."""
    longest = recipe.longest_sequence
    prompt = longest if recipe.learns_from_rows else recipe.data.max_prompt_tokens
    num_prompts = recipe.sequences_per_step // recipe.rollout.samples_per_prompt
    return {
        "image_share": prompt / longest,
        "image_tokens": num_prompts * prompt,
        "takes_matrices": recipe.train.optimizer.rule in MATRIX_RULES,
    }


_PER_NUMBER_OF_MATRIX = 20
"""Most bytes per number while an update rule processes a matrix: float32 momenta, those of one
matrix with its bfloat16 copies, and float32 results in both orders."""


def matrix_bytes(table: WeightTable) -> int:
    """Return the bytes that the optimizer's work on the largest weight of a layer, which is
    gathered there, needs on each rank."""
    in_layers = (entry.num_elements for entry, _ in table.counted if entry.layer is not None)
    return _PER_NUMBER_OF_MATRIX * max(in_layers, default=0)


def frozen_bytes(counts: WeightCounts, *, size: int) -> int:
    """Return the bytes of weights that are loaded and not trained."""
    return counts.total * size + counts.wide.plain * (4 - size)


def saved_bytes(counts: WeightCounts, layout: TrainerLayout, *, size: int) -> int:
    """Return the bytes that one rank copies from its device for a checkpoint: the optimizer's
    states, and the weights whose states the rank holds."""
    shards, expert_shards = layout.dp * layout.cp, layout.expert_dp
    weights = counts.dense.plain / shards + counts.experts.plain / expert_shards
    wide = 4 * counts.wide.plain / shards
    return static_bytes(counts, layout, size=size)[2] + int(weights * size + wide)


def static_bytes(counts: WeightCounts, layout: TrainerLayout, *, size: int) -> tuple[int, int, int]:
    """Return (weights, gradients, optimizer) in bytes on the device, as
    `backends.megatron.state.optimizer` has Megatron allocate them: float32 gradients; Adam's two
    moments in float32, and float32 weights beside bfloat16 ones, sharded over the data- and
    context-parallel ranks, and those of experts over the ranks that hold the same experts (ZeRO
    stage 1: Rajbhandari et al., arXiv 1910.02054, section 5.1)."""
    shards, expert_shards = layout.dp * layout.cp, layout.expert_dp
    dense, wide = _padded(counts.dense.aligned, shards), _padded(counts.wide.aligned, shards)
    experts = _padded(counts.experts.aligned, expert_shards)
    weights = (dense + experts + counts.frozen.plain) * size + 4 * wide
    gradients = 4 * (dense + experts + wide)
    copies, moments = (0 if size == 4 else 4), 8
    shared = counts.dense.plain / shards + counts.experts.plain / expert_shards
    optimizer = (
        0.0
        if layout.offload_optimizer
        else (copies + moments) * shared + moments * counts.wide.plain / shards
    )
    return weights, gradients, int(optimizer)


def host_bytes(
    counts: WeightCounts, layout: TrainerLayout, load: TrainerLoad, static: tuple[int, int, int]
) -> int:
    """Return the bytes of the node's main memory: offloaded optimizer states, and what a sleeping
    rank or a reference stores there. `static`: from `static_bytes`."""
    host = 0
    if load.keeps_reference:
        # the frozen weights; beside a device the current ones too, while those take their place
        host += (2 - load.teachers_resident) * counts.total * load.size
    if load.critic == "beside":
        host += sum(static)
    elif load.critic == "in_turn":
        host += static[0] + static[2]
    if load.sleeps or (load.teachers and not load.teachers_resident):
        host += static[0] + static[2]
    if layout.offload_optimizer:
        host += static_bytes(counts, replace(layout, offload_optimizer=False), size=load.size)[2]
    return host


def _padded(numbers: int, shards: int) -> int:
    unit = math.lcm(_PAD, shards)
    return -(-numbers // unit) * unit

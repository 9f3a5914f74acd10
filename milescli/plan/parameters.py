"""How many numbers each trainer rank and each engine rank holds, exactly, from the weight table:
cut by tp, etp and ep, shared out to stages, padded as Megatron lays them out. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

from milescli.models.base import Entry, WeightTable
from milescli.plan.stages import stage_sizes
from milescli.plan.types import TrainerLayout

_ALIGN = 64
"""Numbers to which Megatron aligns the start of every parameter in its flat memory (256 bytes of
float32)."""
_FROZEN = ".indexer."
"""Within names of weights that are loaded and not trained, so that they have neither gradient nor
optimizer."""


_WIDE = (".A_log", ".self_attention.out_norm.weight")
"""Of linear attention, where the release says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """Of one kind of weights: as they are, and as they are laid out in flat memory (each start
    aligned)."""

    plain: int = 0
    aligned: int = 0

    def __add__(self, other: Numbers) -> Numbers:
        return Numbers(plain=self.plain + other.plain, aligned=self.aligned + other.aligned)

    def __sub__(self, other: Numbers) -> Numbers:
        return Numbers(plain=self.plain - other.plain, aligned=self.aligned - other.aligned)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What one rank holds."""

    dense: Numbers = Numbers()
    """Of the model's dtype; the same on all data- and context-parallel ranks."""
    experts: Numbers = Numbers()
    """The same on the `expert_dp` ranks."""
    wide: Numbers = Numbers()
    """Kept in float32 whatever the model is in."""
    frozen: Numbers = Numbers()

    def __add__(self, other: Held) -> Held:
        return Held(
            dense=self.dense + other.dense,
            experts=self.experts + other.experts,
            wide=self.wide + other.wide,
            frozen=self.frozen + other.frozen,
        )

    def __sub__(self, other: Held) -> Held:
        return Held(
            dense=self.dense - other.dense,
            experts=self.experts - other.experts,
            wide=self.wide - other.wide,
            frozen=self.frozen - other.frozen,
        )

    @property
    def total(self) -> int:
        """All of them, without gaps."""
        return self.dense.plain + self.experts.plain + self.wide.plain + self.frozen.plain


@dataclass(slots=True)
class Counter:
    """Counts for one model; remembers what it counted, since a search asks for the same cuts many
    times."""

    table: WeightTable
    _groups: list[tuple[tuple[Entry, int], ...]] = field(default_factory=list)
    """[layers + 1] entries of each layer, with how many experts; last, those outside of layers."""
    _kinds: list[int] = field(default_factory=list)
    """[layers] the first layer that is alike."""
    _sums: dict[tuple[int, int, int], list[Held]] = field(default_factory=dict)
    """(tp, ep, etp) -> [layers + 1] of all layers before."""
    _stages: dict[object, list[Held]] = field(default_factory=dict)
    _distinct: dict[object, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        layers = self.table.facts.num_layers
        groups: list[list[tuple[Entry, int]]] = [[] for _ in range(layers + 1)]
        for entry, times in self.table.counted:
            if self.table.holds(entry) and not entry.rule.buffer:
                groups[layers if entry.layer is None else entry.layer].append((entry, times))
        self._groups = [tuple(group) for group in groups]
        seen: dict[object, int] = {}
        for layer in range(layers):
            alike = tuple((id(entry.rule), entry.shapes, times) for entry, times in groups[layer])
            self._kinds.append(seen.setdefault(alike, layer))

    def stage(self, layout: TrainerLayout, stage: int) -> Held:
        """Of a rank of pipeline stage `stage`."""
        return self.stages(layout)[stage]

    def fullest(self, layout: TrainerLayout) -> Held:
        """Of the stage that holds most."""
        held = self.stages(layout)
        return max(
            (held[stage] for stage in self.distinct_stages(layout)),
            key=lambda counted: counted.total,
        )

    def stages(self, layout: TrainerLayout) -> list[Held]:
        """[pp] of one rank of each stage."""
        key = self._key(layout)
        if key not in self._stages:
            self._stages[key] = self._count(layout)
        return self._stages[key]

    def distinct_stages(self, layout: TrainerLayout) -> tuple[int, ...]:
        """The first of each kind of stage that holds the same, and the last stage."""
        key = self._key(layout)
        if key not in self._distinct:
            held = self.stages(layout)
            firsts = {counted: stage for stage, counted in reversed(list(enumerate(held)))}
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

    def _count(self, layout: TrainerLayout) -> list[Held]:
        sums = self._layer_sums(layout)
        ends = list(accumulate(stage_sizes(layout, self.table.facts.num_layers)))
        held = [sums[end] - sums[start] for start, end in zip([0, *ends], ends, strict=False)]
        held[0] = held[0] + self._outside(layout, first=True)
        held[-1] = held[-1] + self._outside(layout, first=False)
        facts = self.table.facts
        if (facts.tied_embeddings or facts.trains_mtp) and layout.pp > 1:
            # the last stage has a copy of the embedding as its output layer, or for its MTP layer
            held[-1] = held[-1] + self._outside(layout, first=True)
        return held

    def _layer_sums(self, layout: TrainerLayout) -> list[Held]:
        key = (layout.tp, layout.ep, layout.etp)
        if key not in self._sums:
            of_kind = {kind: _held(self._groups[kind], *key) for kind in set(self._kinds)}
            self._sums[key] = list(
                accumulate((of_kind[kind] for kind in self._kinds), initial=Held())
            )
        return self._sums[key]

    def _outside(self, layout: TrainerLayout, *, first: bool) -> Held:
        entries = [
            entry
            for entry in self._groups[-1]
            if entry[0].megatron.startswith("embedding.") is first
        ]
        return _held(entries, layout.tp, layout.ep, layout.etp)

    def engine_total(self, *, tp: int, ep: int, attention_dp: int) -> int:
        """Numbers that one of `tp` ranks of an engine holds: heads are cut by tp / attention_dp,
        experts by tp in any case, the vocabulary by tp. What has no axis is held by all."""
        total = 0
        for group in self._groups:
            for entry, times in group:
                size = entry.num_elements
                if entry.expert is not None:
                    total += size * times // tp
                elif entry.rule.sharding.axis == "none":
                    total += size
                else:
                    cut = (
                        tp // attention_dp
                        if ".self_attention." in entry.megatron or ".mixer." in entry.megatron
                        else tp
                    )
                    total += -(-size // cut)
        return total


def _held(entries: object, tp: int, ep: int, etp: int) -> Held:
    sums = {"dense": [0, 0], "experts": [0, 0], "wide": [0, 0], "frozen": [0, 0]}
    for entry, times in entries:  # type: ignore[attr-defined]
        size, count = _cut(entry, tp=tp, etp=etp), 1
        if entry.expert is not None:
            kind, count = "experts", times // ep
        elif _FROZEN in entry.megatron:
            kind = "frozen"
        else:
            kind = "wide" if _is_wide(entry) else "dense"
        sums[kind][0] += size * count
        sums[kind][1] += -(-size // _ALIGN) * _ALIGN * count
    return Held(
        **{kind: Numbers(plain=plain, aligned=aligned) for kind, (plain, aligned) in sums.items()}
    )


def _is_wide(entry: Entry) -> bool:
    """The trainer keeps it in float32 beside bfloat16: the decay of linear attention, and the norm
    after it."""
    delta = entry.facts.gated_delta
    return entry.rule.float32 or bool(delta and delta.float32 and entry.megatron.endswith(_WIDE))


def _cut(entry: Entry, *, tp: int, etp: int) -> int:
    """Numbers of an entry that one rank holds."""
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

"""Decides which layouts Megatron and SGLang can run with a model, axis by axis, for the planner and
for the trainer's own check. Pure; a fault names the equation that is violated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from milescli.core.errors import FitError
from milescli.models.facts import ModelFacts
from milescli.plan.types import TrainerLayout


@lru_cache(maxsize=4096)
def split_layers(
    num_layers: int, num_stages: int, *, first: int | None = None, last: int | None = None
) -> tuple[int, ...]:
    """Return [num_stages] the number of layers of each stage. `first` and `last` pin the first and
    last stage. The other layers are spread evenly, and early stages take the remainder, since the
    last one also computes the output layer. A stage gets no layer if the pins leave none; `faults`
    reports that."""
    assert num_stages >= 1, num_stages
    if num_stages == 1:
        return (num_layers,)
    pins = {0: first} if first is not None else {}
    if last is not None:
        pins[num_stages - 1] = last
    free = num_stages - len(pins)
    size, odd = divmod(num_layers - sum(pins.values()), free) if free else (0, 0)
    shares = iter([size + (number < odd) for number in range(free)])
    return tuple(pins[stage] if stage in pins else next(shares) for stage in range(num_stages))


def stage_sizes(layout: TrainerLayout, num_layers: int) -> tuple[int, ...]:
    """Return [pp] the number of layers of each stage under a layout."""
    return split_layers(
        num_layers, layout.pp, first=layout.first_stage_layers, last=layout.last_stage_layers
    )


def stage_ends(layout: TrainerLayout, num_layers: int) -> tuple[int, ...]:
    """Return [pp] the index after the last layer of each stage."""
    return tuple(accumulate(stage_sizes(layout, num_layers)))


def is_even(sizes: tuple[int, ...]) -> bool:
    """Return True if all stages have equally many layers."""
    return len(set(sizes)) == 1


def microbatches_in_flight(stage: int, num_stages: int, num_microbatches: int) -> int:
    """Return the number of microbatches whose activations stage `stage` (from 0) holds at its peak.
    1F1B (Narayanan et al., arXiv 2104.04473, section 2.2.1): stage s of p does p - s - 1 forward
    passes before its first backward pass, and holds p - s at once. The trainer runs only this
    schedule: interleaving (section 2.2.2) would need several model chunks on a rank, and more
    memory."""
    return min(num_stages - stage, num_microbatches)


@dataclass(frozen=True, slots=True, kw_only=True)
class IllegalValue:
    """Explains why the value of an axis is illegal."""

    key: str
    """Recipe key: parallel.tp, ..."""
    value: object
    why: str
    legal: object
    """A value that this rule allows."""

    def error(self) -> FitError:
        """Return the error that the user reads."""
        return FitError(
            f"`{self.key}={_text(self.value)}` is illegal for this model",
            why=self.why,
            fix=f"--set {self.key}={_text(self.legal)}",
        )


def check_layout(layout: TrainerLayout, facts: ModelFacts) -> None:
    """Raise FitError if Megatron cannot run the model under this layout."""
    if fault := next(faults(layout, facts), None):
        raise fault.error()


def faults(layout: TrainerLayout, facts: ModelFacts) -> Iterator[IllegalValue]:
    """Yield every fault of a trainer layout."""
    yield from tp_faults(facts, layout.tp)
    yield from cp_faults(facts, layout.cp, tp=layout.tp)
    yield from stage_faults(layout, facts)
    yield from expert_faults(layout, facts)
    if facts.num_experts and layout.tp > 1 and not layout.sequence_parallel:
        why = (
            "experts under tensor parallelism need sequence parallelism: Megatron refuses them "
            "otherwise"
        )
        yield IllegalValue(key="parallel.sequence_parallel", value=False, why=why, legal=True)


def tp_faults(facts: ModelFacts, tp: int) -> Iterator[IllegalValue]:
    """Yield the faults of tensor parallelism, which divides heads and MLPs."""
    # a key that all heads share is whole on every rank
    kv_heads = 0 if facts.compressed else facts.common_kv_heads
    if kv_heads and tp > kv_heads:
        yield IllegalValue(
            key="parallel.tp",
            value=tp,
            why=f"it exceeds the model's {kv_heads} key/value heads",
            legal=kv_heads,
        )
    cuts = (
        (facts.num_heads, "attention heads"),
        (kv_heads, "key/value heads"),
        (facts.ffn_hidden_size, "channels of the MLP"),
        (facts.shared_expert_ffn_hidden_size, "channels of the shared experts"),
        (facts.compressed.output_groups if facts.compressed else 0, "groups of the output"),
        (facts.mamba.num_groups if facts.mamba else 0, "groups of Mamba-2"),
        (facts.mamba.num_heads if facts.mamba else 0, "heads of Mamba-2"),
        (
            facts.gated_delta.num_key_heads if facts.gated_delta else 0,
            "key heads of linear attention",
        ),
    )
    yield from (
        fault for total, what in cuts if (fault := indivisible("parallel.tp", tp, total, what))
    )


def cp_faults(facts: ModelFacts, cp: int, *, tp: int) -> Iterator[IllegalValue]:
    """Yield the faults of context parallelism, which divides sequences."""
    if cp == 1:
        return
    if facts.mamba:
        yield IllegalValue(
            key="parallel.cp",
            value=cp,
            why="Mamba-2 computes a sequence on one rank, but cp splits it",
            legal=1,
        )
    if facts.indexer:
        why = "sparse attention chooses among the positions of one rank, and cp cuts sequences"
        yield IllegalValue(key="parallel.cp", value=cp, why=why, legal=1)
    delta = facts.gated_delta
    if delta and delta.num_key_heads % (tp * cp):
        why = (
            f"{delta.num_key_heads} key heads of linear attention / (tp {tp} x cp {cp}) is not "
            "whole"
        )
        yield IllegalValue(key="parallel.cp", value=cp, why=why, legal=1)


def stage_faults(layout: TrainerLayout, facts: ModelFacts) -> Iterator[IllegalValue]:
    """Yield the faults of pipeline parallelism, which distributes whole layers."""
    pp, layers = layout.pp, facts.num_layers
    if pp > layers:
        why = f"the model has {layers} layers, and each stage needs one"
        yield IllegalValue(key="parallel.pp", value=pp, why=why, legal=layers)
        return
    pins = {
        "first_stage_layers": layout.first_stage_layers,
        "last_stage_layers": layout.last_stage_layers,
    }
    sizes = stage_sizes(layout, layers)
    for name, pin in pins.items():
        if pin is not None and (pp == 1 or min(sizes) < 1 or sum(sizes) != layers):
            why = (
                f"pp {pp} stages of {' + '.join(map(str, sizes))} layers do not make up "
                f"{layers} "
                "with one at least in each"
            )
            yield IllegalValue(key=f"parallel.{name}", value=pin, why=why, legal="null")
            return
    deepstack = len(facts.vision.deepstack) if facts.vision else 0
    if pp > 1 and sizes[0] < deepstack:
        fits = layers - deepstack >= pp - 1
        yield IllegalValue(
            key="parallel.first_stage_layers" if fits else "parallel.pp",
            value=layout.first_stage_layers if fits else pp,
            why=f"image features are added after the first {deepstack} layers, which must be on "
            f"the stage of the vision tower; the first of pp {pp} stages has {sizes[0]}",
            legal=deepstack if fits else 1,
        )
        return
    starts = [0, *accumulate(sizes)][:-1]
    if any(facts.layers[start].shares_choice for start in starts):
        why = (
            f"a stage of pp={pp} would begin with a layer that takes the choice of positions of "
            "the layer before"
        )
        yield IllegalValue(key="parallel.pp", value=pp, why=why, legal=1)


def expert_faults(layout: TrainerLayout, facts: ModelFacts) -> Iterator[IllegalValue]:
    """Yield the faults of expert parallelism, which distributes whole experts, and of its tensor
    parallelism, which divides each expert."""
    ep, etp, ranks = layout.ep, layout.etp, layout.tp * layout.cp * layout.dp
    if not facts.num_experts:
        if ep > 1:
            yield IllegalValue(
                key="parallel.ep", value=ep, why="the model is dense: it has no experts", legal=1
            )
        if etp not in (1, layout.tp):
            yield IllegalValue(
                key="parallel.etp",
                value=etp,
                why="the model is dense: it has no experts to split",
                legal="null",
            )
        return
    if fault := indivisible("parallel.ep", ep, facts.num_experts, "experts"):
        yield fault
    if fault := indivisible(
        "parallel.etp", etp, facts.moe_ffn_hidden_size, "channels of an expert"
    ):
        yield fault
    if ranks % (ep * etp):
        why = (
            f"expert layout ep {ep} x etp {etp} does not divide the ranks of one pipeline stage: "
            f"tp {layout.tp} x cp {layout.cp} x dp {layout.dp} = {ranks} is not a multiple of "
            f"{ep * etp}"
        )
        legal = max(1, -(-ep * etp // (layout.tp * layout.cp)))
        yield IllegalValue(key="parallel.dp", value=layout.dp, why=why, legal=legal)


def training_faults(layout: TrainerLayout, facts: ModelFacts) -> Iterator[IllegalValue]:
    """Yield the further faults of layouts under which the model can be loaded and saved, but would
    be trained wrongly."""
    if facts.num_experts and layout.ep == 1 and layout.etp != layout.tp:
        # Megatron-Core 0.16.1 takes such experts for dense layers and does not sum what tp ranks
        # with other tokens learned
        why = (
            "with ep 1, Megatron sums the experts' gradients rightly only where etp is tp, "
            f"{layout.tp}"
        )
        yield IllegalValue(key="parallel.etp", value=layout.etp, why=why, legal=layout.tp)


def engine_faults(
    facts: ModelFacts, *, tp: int, ep: int, attention_dp: int
) -> Iterator[IllegalValue]:
    """Yield the faults of a layout that SGLang would refuse: it divides heads by tp / attention_dp
    and experts by ep within tp, and repeats key-value heads if there are fewer than that."""
    for key, value in (("engines.attention_dp", attention_dp), ("engines.ep", ep)):
        if fault := indivisible(key, value, tp, "devices of an engine"):
            yield fault
            return
    for key, value, total, what in (
        ("engines.tp", tp // attention_dp, facts.num_heads, "attention heads"),
        ("engines.ep", ep, facts.num_experts, "experts"),
    ):
        if fault := indivisible(key, value, total, what):
            yield fault
    if ep > 1 and not facts.num_experts:
        yield IllegalValue(
            key="engines.ep", value=ep, why="the model is dense: it has no experts", legal=1
        )
    # within one ep group, experts are cut by what is left of tp
    if facts.num_experts and (
        fault := indivisible(
            "engines.tp", max(1, tp // ep), facts.moe_ffn_hidden_size, "channels of an expert"
        )
    ):
        yield fault


def indivisible(key: str, value: int, total: int, what: str) -> IllegalValue | None:
    """Return a fault if `total` cannot be divided into `value` equal parts, else None. A total of 0
    means that the model has no such part."""
    if not total % value:
        return None
    legal = max(divisor for divisor in range(1, value + 1) if total % divisor == 0)
    return IllegalValue(
        key=key, value=value, why=f"{total} {what} / {value} is not whole", legal=legal
    )


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

"""How layers are shared out to pipeline stages, and how many microbatches a stage holds at once.
The one place that says it: the planner, the trainer's model and its weights ask here. Pure."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate

from milescli.plan.types import TrainerLayout


@lru_cache(maxsize=4096)
def split_layers(
    num_layers: int, num_stages: int, *, first: int | None = None, last: int | None = None
) -> tuple[int, ...]:
    """[num_stages] layers of each stage. `first` and `last` pin those of the end stages; the other
    layers are shared out evenly, and early stages take the odd ones, as the last one has the output
    layer to compute as well. A stage may get none where the pins leave none: `legal` refuses
    that."""
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
    """[pp] layers of each stage under a layout."""
    return split_layers(
        num_layers, layout.pp, first=layout.first_stage_layers, last=layout.last_stage_layers
    )


def stage_ends(layout: TrainerLayout, num_layers: int) -> tuple[int, ...]:
    """[pp] one past the last layer of each stage."""
    return tuple(accumulate(stage_sizes(layout, num_layers)))


def is_even(sizes: tuple[int, ...]) -> bool:
    """All stages have equally many layers."""
    return len(set(sizes)) == 1


def microbatches_in_flight(stage: int, num_stages: int, num_microbatches: int) -> int:
    """How many microbatches' activations stage `stage` (from 0) holds at its peak.

    1F1B (Narayanan et al., arXiv 2104.04473, section 2.2.1): stage s of p does p - s - 1 forward
    passes before its first backward pass, and holds p - s at once. The trainer runs this schedule
    alone: interleaving (section 2.2.2) would need several model chunks on a rank, and holds
    more."""
    return min(num_stages - stage, num_microbatches)

"""What the planner predicts of a check's own work on the device that is here: its time model, with
known lengths in place of guessed ones."""

from __future__ import annotations

from checks import Visit

from milescli.models.base import WeightTable
from milescli.plan.devices import efficiency_of, spec_of
from milescli.plan.memory import memory_model
from milescli.plan.time import TimeModel, Work
from milescli.platform.probe import probe

BUCKET_BYTES = 2**29
"""The default of `weights.bucket_mib`."""


def time_model(weights: WeightTable) -> TimeModel:
    """Of one device of this machine; on a CPU, of one core."""
    sheet, _ = spec_of(probe())
    return TimeModel(
        table=weights,
        memory=memory_model(weights.facts),
        device=sheet,
        devices_per_node=1,
        efficiency=efficiency_of(sheet.name),
    )


def size_of_weight(visit: Visit) -> int:
    """Bytes, in the precision that a run takes."""
    return 2 if visit.on_device else 4


def work_of(
    visit: Visit,
    *,
    num_samples: int = 1,
    prompt_tokens: float = 1.0,
    response_tokens: float = 1.0,
    longest_response: int | None = None,
) -> Work:
    """Samples in one update; of one length, where the longest is not given."""
    return Work(
        num_samples=num_samples,
        num_prompts=num_samples,
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
        longest_response=longest_response or int(response_tokens),
        updates=1,
        extra_forwards=0,
        size=size_of_weight(visit),
        bucket_bytes=BUCKET_BYTES,
    )

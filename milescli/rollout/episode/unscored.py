"""Samples that could not be scored because a reward, judge, sandbox or environment failed for
reasons of its own: they are excluded and counted, and never count as wrong answers. Used by the
collector and by evaluations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from milescli.core.errors import AgentError, MilesError, RewardError, SandboxError
from milescli.core.types import Sample, StopReason
from milescli.core.units import decimal_product

INFRASTRUCTURE_ERRORS = (RewardError, AgentError, SandboxError)
"""Errors of a reward, or of what plays a sample's episode. Engines, teachers and the reward model
are processes of the run, which replaces them; for a model behind an endpoint, the user repeats the
evaluation command."""
UNSCORED_METRIC = "rollout.max_unscored_share"


@dataclass(slots=True, kw_only=True)
class UnscoredCounter:
    """Counts the samples of one step, or of one evaluation, that could not be scored."""

    share: float
    """Largest share that is excluded; if more cannot be scored, the last error ends the run."""
    total: int
    """Samples of the step or evaluation."""
    what: str
    """What is counted, for the error: `step 3`."""
    tell: Callable[[str], None] | None = None
    """Receives a message about each excluded sample."""
    num: int = 0

    def exclude(self, error: MilesError, *, num: int = 1) -> None:
        """Count `num` samples that `error` left without a score. Raises the error, with their
        number, if they are more than `share` of all."""
        self.num += num
        if self.num > decimal_product(self.total, self.share):
            if self.share == 0:
                raise error
            counted = f"{self.num} of {self.total} samples of {self.what} could not be scored"
            allowed = f"`{UNSCORED_METRIC}` allows {self.share:.0%}"
            kind: Any = type(error)
            raise kind(
                error.what,
                why=f"{error.why}; {counted}, and {allowed}",
                fix=error.fixes,
            ) from error
        if self.tell is not None:
            samples = "1 sample" if num == 1 else f"{num} samples"
            last = error.why.rstrip().rpartition("\n")[2]  # of a traceback what was raised
            self.tell(f"excluding {samples} of {self.what}: {error.what}; {last}")


def unscored_sample(*, sample_index: int, seed: int) -> Sample:
    """Return a placeholder for a sample that could not be scored in an evaluation: a function that
    chooses among samples gets one for each that it requested; the prompt is excluded."""
    return Sample(
        sample_index=sample_index,
        seed=seed,
        trajectories=[],
        text="",
        stop_reason=StopReason.LENGTH,
        reward=0.0,
    )

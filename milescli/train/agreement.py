"""Decides whether engine and trainer compute the same, from two sets of log-probs of the same
tokens. Pure; called by the start check (`runtime.engine_trainer_check`), the proof of conversions
and the doctor.

There is no fixed bound: the effect of rounding on a log-prob differs by three orders of magnitude
from model to model and from float32 to bfloat16. So the trainer scores the tokens a second time
with its layers' outputs rounded in another way (`backends.megatron.step.rounding`). The resulting
difference of its own log-probs is the *floor*, and a correct engine differs about as much: 0.8 to
1.3 times the floor on real models in float32 and bfloat16 (docs/how-it-works.md). Faults that tests
plant (rotary base, norms, head, one matrix) move float32 log-probs 500 to 100,000 times as far.

Under `train.on_policy: exact` there is a fixed bound: 0.0."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

USUAL_TIMES = 2.0
"""Correct engines differ by less than this multiple of the floor: up to 1.5 was observed."""
TIMES = 4.0
"""Beyond this multiple of the floor, the typical token shows that engine or trainer is wrong."""
MAX_RMS_TIMES = 10.0
"""Bound on the root mean square, which single tokens dominate, as a multiple of the floor's. Not
applied to a mixture of experts: of two correct engines, one may choose another expert."""
MIN_BOUND = 4e-6
"""Nats. Float32 logits of up to 64 lie 4e-6 apart, and a log-prob is a difference of two."""
CORRECTED_KL = 0.005
"""KL of engine and trainer in nats a token. From there on ratios should be truncated (TIS), unless
the floor's own KL is as high."""
LARGE_KL, LARGE_SHARE = 0.1, 0.1
"""KL in nats a token, and share of ratios outside of [1/2, 2], beyond which the samples tell little
about the trainer's policy: INT4 and NVFP4 engines beside a trainer in bfloat16 are there
(docs/precision.md)."""
FAR_LOG_RATIO = math.log(2)
"""Log-ratio beyond which a token counts as far: its ratio is outside of [1/2, 2]."""


class Agreement(StrEnum):
    """Names the outcome of a check."""

    EQUAL = "equal"
    """Engine and trainer differ no more than the trainer does from itself under another rounding.
    """
    EXPLAINED = "explained"
    """They differ by more than that, but other kernels or another routing of experts may be the
    cause."""
    WRONG = "wrong"
    """Engine or trainer computes something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobGap:
    """Measures how far two sets of log-probs of the same tokens differ, in nats per token."""

    num_tokens: int
    median: float
    """Median of the absolute difference."""
    tenth: float
    """A tenth of the tokens differ by at least this."""
    mean: float
    rms: float
    max: float
    num_different: int
    """Number of tokens that differ at all."""
    bias: float
    """Mean of the signed difference."""
    kl: float
    """Estimated from the tokens that the first set's model sampled: mean of r - 1 - log r with r
    the second's probability over the first's (k3, joschu.net/blog/kl-approx.html)."""
    far: float
    """Share of tokens whose ratio is outside of [1/2, 2]."""

    @classmethod
    def of(cls, first: np.ndarray, second: np.ndarray) -> LogprobGap:
        """Compute the gap of two arrays [tokens] of log-probs. If a log-prob is not finite, its
        figures are not finite either."""
        gap = np.asarray(first, np.float64) - np.asarray(second, np.float64)
        distance = np.abs(gap)
        with np.errstate(over="ignore", invalid="ignore"):
            return cls(
                num_tokens=len(gap),
                median=float(np.median(distance)),
                tenth=float(np.quantile(distance, 0.9)),
                mean=float(distance.mean()),
                rms=float(np.sqrt(np.mean(gap**2))),
                max=float(distance.max()),
                num_different=int((distance != 0).sum()),
                bias=float(gap.mean()),
                kl=float(np.mean(np.expm1(-gap) + gap)),
                far=float(np.mean(~(distance <= FAR_LOG_RATIO))),
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Holds a check's outcome and its figures."""

    agreement: Agreement
    gap: LogprobGap
    """Between engine and trainer."""
    floor: LogprobGap
    """Between the trainer and itself with another rounding."""
    times: float
    """Median difference as a multiple of the floor; without experts, the largest of this multiple,
    that of the tenth of the tokens that differ most, and that of the root mean square, scaled by
    TIMES / MAX_RMS_TIMES."""
    most_times: float
    """Multiple of rounding from which engine and trainer count as disagreeing."""

    @property
    def text(self) -> str:
        """Return the figures as a sentence."""
        return (
            f"log-probs of {self.gap.num_tokens} tokens differ by {self.gap.mean:.2e} on average "
            f"and {self.gap.max:.2e} at most; rounding alone moves them by {self.floor.mean:.2e} "
            f"and {self.floor.max:.2e}"
        )


def judge(
    engine: np.ndarray,
    trainer: np.ndarray,
    rounded: np.ndarray,
    *,
    has_experts: bool,
    exact: bool = False,
) -> Judgement:
    """Judge the log-probs of the same sampled tokens, [tokens] each: the engine's own, the
    trainer's, and the trainer's under another rounding. NaN anywhere is a failure, and so is any
    difference if they are to be `exact`.

    With few tokens the figures are uncertain, so the bounds grow by 4 / sqrt(tokens).
    """
    gap, floor = LogprobGap.of(engine, trainer), LogprobGap.of(rounded, trainer)
    allowance = 1 + 4 / math.sqrt(gap.num_tokens)
    times = _multiple_of_floor(gap.median, floor.median)
    if not has_experts:
        at_worst = _multiple_of_floor(gap.rms, floor.rms) * TIMES / MAX_RMS_TIMES
        times = max(times, _multiple_of_floor(gap.tenth, floor.tenth), at_worst)
    most_times = 0.0 if exact else TIMES * allowance
    is_right = gap.num_different == 0 if exact else times <= most_times
    agreement = Agreement.EQUAL if is_right else Agreement.WRONG
    is_far = gap.kl > max(CORRECTED_KL, 3 * floor.kl)
    if is_right and (is_far or times > USUAL_TIMES * allowance):
        agreement = Agreement.EXPLAINED
    if not (math.isfinite(gap.max) and math.isfinite(floor.max)):
        agreement = Agreement.WRONG
    return Judgement(agreement=agreement, gap=gap, floor=floor, times=times, most_times=most_times)


def _multiple_of_floor(gap: float, floor: float) -> float:
    return gap / max(floor, MIN_BOUND)

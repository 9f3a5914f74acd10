"""The words of the house: what flows from prompts to weights. Plain data, no behaviour beyond what
the data implies."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

WeightVersion = NewType("WeightVersion", int)
"""Rises by one at each publish; 0 is what the engines loaded at start. staleness = trainer version
- sample version."""


class StopReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    """An end-of-sequence token or a stop string."""
    LENGTH = "length"
    """`rollout.max_response_tokens` was reached: the answer is truncated."""
    ABORT = "abort"
    """The engine was told to give up (pause, weight update, end of run)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One question, tokenised once, at the source."""

    index: int
    """Row in the source file, counted from 0; the stable name of the prompt."""
    token_ids: list[int]
    """[num_prompt_tokens] with the chat template applied, generation prompt included."""
    text: str
    """What the user wrote, before the template."""
    label: str | None = None
    """What the reward compares with; None where the data set has no label column."""
    demonstration: str | None = None
    """A worked answer to imitate (warm-up); None where the data set has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Tokens [start, end) of the answer were sampled with weights `version`."""

    start: int
    end: int
    version: WeightVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedExperts:
    """Which experts the engine chose (R3). Position t is the routing of *input* token t of prompt +
    answer."""

    indices: bytes
    """int32, row-major [num_tokens, num_layers, topk] with num_tokens = len(prompt) + len(answer) -
    1."""
    num_tokens: int
    num_layers: int
    """All of the model; what stands for a layer without experts means nothing."""
    topk: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One answer to one prompt, exactly as the engine produced it; token ids are never made again
    from text."""

    sample_index: int
    """Place in its group, 0 .. samples_per_prompt - 1."""
    seed: int
    """Sampling seed of this answer, fixed by (run seed, step, prompt, sample)."""
    prompt_ids: list[int]
    """[num_prompt_tokens]"""
    response_ids: list[int]
    """[num_response_tokens] including the end-of-sequence token where there is one."""
    logprobs: array[float]
    """[num_response_tokens] natural log, from the engine that sampled, at the sampling
    temperature."""
    loss_mask: list[bool]
    """[num_response_tokens] True where the token is trained on (tool output is not)."""
    text: str
    """The answer, decoded, without special tokens; for rewards and for people."""
    stop_reason: StopReason
    version_spans: list[VersionSpan]
    """Cover all answer tokens, ascending; more than one where weights changed in the middle."""
    reward: float | None = None
    """None until it is scored."""
    routed_experts: RoutedExperts | None = None
    """Only with `train.routing_replay=true` on a mixture-of-experts model."""

    @property
    def num_tokens(self) -> int:
        """Prompt and answer together."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def oldest_version(self) -> WeightVersion:
        """Version of the oldest token: what staleness is measured by."""
        return min(span.version for span in self.version_spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The answers to one prompt: what a group-relative advantage compares."""

    prompt: Prompt
    samples: list[Sample]
    epoch: int = 0
    """Which pass over the prompts this group belongs to."""

    @property
    def rewards(self) -> list[float]:
        """[samples_per_prompt] Raises AssertionError where a sample was not scored."""
        rewards = [sample.reward for sample in self.samples]
        assert all(reward is not None for reward in rewards), (
            f"prompt {self.prompt.index} is not scored"
        )
        return [reward for reward in rewards if reward is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one optimizer step did; all figures are over the whole batch, over all ranks."""

    loss: float
    """The scalar that was differentiated."""
    policy_loss: float
    """Clipped surrogate without KL and entropy terms; equals `loss` in a supervised step."""
    entropy: float
    """Mean per trained token, nats."""
    kl: float
    """Mean per trained token against the reference, by the recipe's estimator; 0.0 without a
    reference."""
    clip_fraction: float
    """Share of trained tokens whose ratio was clipped."""
    ratio_mean: float
    """Mean of pi / pi_old over trained tokens; 1.0 on strictly on-policy first steps."""
    grad_norm: float
    """Global L2 norm before clipping."""
    lr: float
    logprob_diff_mean: float
    """Mean |engine logprob - trainer logprob| over trained tokens; 0.0 in a supervised step."""
    logprob_diff_max: float
    """Max of the same."""
    num_tokens: int
    """All tokens that went through the model, prompts included."""
    num_loss_tokens: int
    """Tokens trained on."""
    num_microbatches: int
    """Per data-parallel rank."""
    forward_backward_s: float
    optimizer_s: float
    extra: dict[str, float] = field(default_factory=dict)
    """Further named scalars of a plug-in loss; shown and logged, never steering."""

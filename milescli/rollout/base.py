"""What the rollout room needs from others: an engine that answers, a reward that scores. Protocols
only; implementations live elsewhere."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Protocol

from milescli.core.types import Prompt, RoutedExperts, StopReason, VersionSpan, WeightVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One answer that is wanted. Token ids in, token ids out."""

    prompt_ids: list[int]
    max_new_tokens: int
    temperature: float = 1.0
    """0.0: greedy."""
    top_p: float = 1.0
    top_k: int = -1
    stop: list[str] = field(default_factory=list)
    seed: int | None = None
    """Equal seed, prompt and weights give equal tokens."""
    want_routed_experts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What came back."""

    response_ids: list[int]
    """[num_response_tokens] including the end-of-sequence token where there is one."""
    logprobs: array[float]
    """[num_response_tokens] natural log, at the sampling temperature."""
    stop_reason: StopReason
    version_spans: list[VersionSpan]
    routed_experts: RoutedExperts | None = None


class RolloutEngine(Protocol):
    """A fleet of engines behind one door. All methods are bounded in time and raise WaitTimeout or
    WorkerDied with names."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """Answer one prompt. Many calls run at once; the fleet batches them. An answer that is cut
        by a pause is continued with the tokens that it has, after `resume`; its spans tell which
        weights made which tokens."""

    async def score(self, token_ids: list[int]) -> array[float]:
        """[len(token_ids) - 1] log-prob of each token after the first, given those before it, at
        temperature 1."""

    async def pause(self) -> None:
        """Stop sampling; answers in flight are kept by `generate` and continued after `resume`.
        Idempotent."""

    async def resume(self) -> None:
        """Go on after `pause`, with an empty prefix cache. Idempotent."""

    async def sleep(self) -> None:
        """Give the device memory of weights and KV cache to the trainer. The caller has no request
        in flight."""

    async def wake_weights(self) -> None:
        """Take back the memory of the weights, whose content is undefined until the next
        publish."""

    async def wake_cache(self) -> None:
        """Take back the memory of the KV cache; the engines answer again."""

    async def set_version(self, version: WeightVersion) -> None:
        """Called after a publish: what the engines hold from now on."""


class RewardFn(Protocol):
    """Scores one answer. Plain or `async`; may be called from many threads at once."""

    def __call__(self, *, prompt: str, response: str, label: str | None) -> float:
        """`prompt` and `response` are text without special tokens; returns the reward, by custom in
        [0, 1]. Raising stops the run with the traceback named (or is tried again,
        `rollout.reward_retries` times)."""
        ...


class PromptSource(Protocol):
    """Endless, ordered, and resumable: its position is its whole state."""

    def take(self, count: int) -> list[tuple[int, Prompt]]:
        """The next `count` prompts, each with its epoch; moves the position."""
        ...

    @property
    def position(self) -> int:
        """Prompts taken since the start of the run, over all epochs."""
        ...

    def seek(self, position: int) -> None:
        """Go to a position that was saved."""
        ...

    def __len__(self) -> int:
        """Prompts per epoch."""
        ...

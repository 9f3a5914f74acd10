"""The central data types, in the order in which data flows from prompts to weights. Plain data, no
behaviour beyond what the data implies."""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, NewType, cast

WeightVersion = NewType("WeightVersion", int)
"""Rises by one at each publish; 0: the weights that the engines loaded at start. staleness =
trainer version - sample version."""


class RewardDetail(StrEnum):
    """What an estimator of advantages compares of rewards besides their sum."""

    PARTS = "parts"
    """`Sample.reward_parts`"""
    TURNS = "turns"
    """`Trajectory.rewards`"""


class StopReason(StrEnum):
    """Why the policy ended a turn."""

    STOP = "stop"
    """An end-of-sequence token or a stop string."""
    LENGTH = "length"
    """The response reached the bound on new tokens: it is truncated."""
    ABORT = "abort"
    """The engine was told to abort (pause, weight update, end of run)."""


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Image:
    """Holds one picture as engine and trainer both see it: rotated by EXIF, first frame, RGB, alpha
    on white, written as PNG. Pictures with the same hash are equal."""

    sha256: str
    """Hex digest of `png`: the picture's name in journals, batches and caches."""
    png: bytes = field(repr=False)
    """The normalised file."""
    width: int
    """Pixels of the file, before the model's processor resizes it."""
    height: int
    grid: tuple[int, int, int]
    """(1, rows, columns) of patches that the model's processor cuts it into."""
    num_tokens: int
    """Number of its tokens in a prompt: patches divided by the square of the merge size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpan:
    """Tokens [start, start + num_tokens) of a sequence stand for one image. All have the id of the
    model's image token; an engine receives one of them for each span and expands it."""

    start: int
    num_tokens: int
    grid: tuple[int, int, int]
    """As in `Image`."""
    sha256: str
    """Hash of the image; its bytes are sent separately, once for all sequences that show it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Holds one question, tokenised once, at the source."""

    index: int
    """Row in the source file, counted from 0; the stable name of the prompt."""
    token_ids: list[int]
    """[num_prompt_tokens] with the chat template applied, generation prompt included."""
    text: str
    """What the user wrote, before the template."""
    label: str | None = None
    """What the reward compares with; None if the data set has no label column."""
    demonstration: str | Sequence[Mapping[str, Any]] | None = None
    """A worked response to imitate (warm-up), or the turns of one that calls tools; None if the
    data set has none."""
    source: str | None = None
    """Name of its entry of `data.mix`; None without a mix."""
    turns: Sequence[Mapping[str, Any]] = ()
    """The chat, if it is more than `text` of the user."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Tools that the model is offered, as JSON schemas."""
    images: Sequence[Image] = ()
    """The pictures of the prompt, in its order."""
    image_spans: Sequence[ImageSpan] = ()
    """Positions of the images in `token_ids`, which hold every token of each: one span per image.
    """
    worked_images: Sequence[Image] = ()
    """The pictures that tools returned in the turns of `demonstration`."""

    @property
    def messages(self) -> Sequence[Mapping[str, Any]]:
        """Return the whole prompt in OpenAI's form, before the template."""
        return self.turns or [{"role": "user", "content": self.text}]

    @property
    def identity(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Return its tokens and the hashes of its images: prompts that agree in both are equal."""
        return tuple(self.token_ids), tuple(span.sha256 for span in self.image_spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Records that tokens [start, end) were sampled with weights `version`."""

    start: int
    end: int
    version: WeightVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedExperts:
    """Holds the experts that the engine chose for each token (R3). Row t is the routing of *input*
    token t."""

    indices: bytes
    """Row-major [num_tokens, num_layers, topk]; the last token of a trajectory was never an input,
    so num_tokens is one less than the trajectory's."""
    num_tokens: int
    num_layers: int
    """All layers of the model; entries for a layer without experts have no meaning."""
    topk: int

    @property
    def bytes_per_number(self) -> int:
        """Return the bytes per expert index: 1 if the model has at most 256 experts, else 2; 4
        (signed) in journals that older versions wrote."""
        count = self.num_tokens * self.num_layers * self.topk
        return len(self.indices) // count if count else 1

    def followed_by(self, later: RoutedExperts) -> RoutedExperts:
        """Return one record: these tokens, then those of `later`."""
        shapes = [
            (part.num_layers, part.topk, part.bytes_per_number)
            for part in (self, later)
            if part.num_tokens
        ]
        assert len(set(shapes)) < 2, shapes
        return replace(
            later,
            indices=self.indices + later.indices,
            num_tokens=self.num_tokens + later.num_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherTokens:
    """Holds a teacher's predictions at each token of a trajectory: its most likely tokens."""

    token_ids: bytes
    """int32, row-major [num_tokens, topk]; row 0 has no meaning."""
    logprobs: bytes
    """float32, the same shape."""
    topk: int
    """0: there are no candidates, and `logprobs`, [num_tokens], are those of the trajectory's
    tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """Holds one sequence of tokens as a model read and sampled it. There is no split into prompt
    and response: the mask says which tokens the policy sampled. Text is never tokenised again.
    Example: prompt [a b], response [c d] -> token_ids a b c d, loss_mask 0 0 1 1."""

    token_ids: array[int]
    """[num_tokens] typecode i."""
    loss_mask: bytes
    """[num_tokens] 1 where the policy sampled the token, which is then trained on; else 0 (prompt,
    tool output)."""
    logprobs: array[float]
    """[num_tokens] typecode f; natural log, from the engine that sampled, at the sampling
    temperature; 0.0 where loss_mask is 0."""
    version_spans: list[VersionSpan]
    """Cover all sampled tokens, ascending; more than one if weights changed meanwhile."""
    routed_experts: RoutedExperts | None = None
    """Only with `train.routing_replay=true` on a mixture-of-experts model."""
    teacher: TeacherTokens | None = None
    """Only with `train.distill`, if it is known before the step."""
    rewards: array[float] | None = None
    """[num_tokens] typecode f; the reward of a turn at the turn's last token, else 0.0. None if
    only the sample's reward is known."""
    role: str | None = None
    """Role that the policy played, if it plays several; an untrained role has an empty mask."""
    image_spans: Sequence[ImageSpan] = ()
    """Positions of images in `token_ids`. They cannot be found from the tokens: a model may sample
    the id of the image token, which is no image."""
    images: Sequence[Image] = ()
    """Images of spans that are not in the prompt: those that tools and environments returned, and
    all of a row to imitate."""

    @property
    def num_tokens(self) -> int:
        """Return the number of all tokens, prompt included."""
        return len(self.token_ids)

    @property
    def num_loss_tokens(self) -> int:
        """Return the number of tokens that the policy sampled."""
        return self.loss_mask.count(1)

    @property
    def turns(self) -> list[tuple[int, int]]:
        """Return [begin, end) of each run of tokens that the policy sampled."""
        return [run.span() for run in re.finditer(b"\x01+", self.loss_mask)]

    @property
    def turn_rewards(self) -> tuple[float, ...]:
        """Return the reward of each turn, in order; empty if only the sample's is known."""
        if self.rewards is None:
            return ()
        return tuple(float(sum(self.rewards[begin:end])) for begin, end in self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Guesses:
    """Counts the tokens that engines guessed by speculative decoding, and the correct ones."""

    num_passes: int = 0
    """Number of the model's passes over guesses; each yields one token more than were correct."""
    num_guessed: int = 0
    num_right: int = 0

    def __add__(self, other: Guesses) -> Guesses:
        return Guesses(
            num_passes=self.num_passes + other.num_passes,
            num_guessed=self.num_guessed + other.num_guessed,
            num_right=self.num_right + other.num_right,
        )


NO_GUESSES = Guesses()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Holds one attempt at a prompt: one or more trajectories that share a reward. Counts once in
    every mean over samples."""

    sample_index: int
    """Place in its group, 0 .. samples_per_prompt - 1."""
    seed: int
    """Sampling seed, fixed by (run seed, position of the prompt, sample_index)."""
    trajectories: list[Trajectory]
    """At least one, but none for a sample of an endpoint. Several if an agent branched its
    conversation."""
    text: str
    """The text that the reward scored, decoded, without special tokens."""
    stop_reason: StopReason
    """Stop reason of the last turn."""
    reward: float | None = None
    """None until it is scored."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """If `rollout.reward` names several: the value of each, before its weight."""
    role_texts: Mapping[str, str] = field(default_factory=dict)
    """Texts that the rewards of roles score, for roles that have their own reward and spoke."""
    role_rewards: Mapping[str, float] = field(default_factory=dict)
    """Role -> its own reward; trajectories of other roles share `reward`."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Metrics that the agent reports for its episode, by name; number of turns, and how often chat
    templates rewrote them."""
    num_failed: int = 0
    """Number of failed episodes that were repeated to obtain this sample."""
    num_counted_tokens: int = 0
    """Number of sampled tokens that an endpoint reports, if the tokens themselves are unknown."""
    guesses: Guesses = NO_GUESSES
    """Counts over all turns; zero without speculative decoding."""
    is_learned: bool = True
    """False: it counts for the others of its group, but its own tokens are not trained on."""

    @property
    def num_loss_tokens(self) -> int:
        """Return the number of tokens that the policy sampled, over all trajectories."""
        known = sum(trajectory.num_loss_tokens for trajectory in self.trajectories)
        return known + self.num_counted_tokens

    @property
    def response_ids(self) -> list[int]:
        """Return the sampled tokens, in order; for records that people read."""
        return [
            token
            for trajectory in self.trajectories
            for token, sampled in zip(trajectory.token_ids, trajectory.loss_mask, strict=True)
            if sampled
        ]

    @property
    def version_spans(self) -> list[VersionSpan]:
        """Return the weight versions of all trajectories, from the oldest to the newest."""
        return [span for trajectory in self.trajectories for span in trajectory.version_spans]

    @property
    def oldest_version(self) -> WeightVersion:
        """Return the version of the oldest token, from which staleness is computed."""
        return min(span.version for span in self.version_spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Holds the samples of one prompt, which a group-relative advantage compares."""

    prompt: Prompt
    samples: list[Sample]
    epoch: int = 0
    """Which pass over the prompts this group belongs to."""
    greedy_reward: float | None = None
    """Reward of the greedy response, if the advantage estimator needs it; never trained on."""

    @property
    def rewards(self) -> list[float]:
        """Return [samples_per_prompt] the rewards. Raises AssertionError if a sample was not
        scored."""
        rewards = [sample.reward for sample in self.samples]
        assert None not in rewards, f"prompt {self.prompt.index} is not scored"
        return cast("list[float]", rewards)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Holds two responses to one prompt, of which one was preferred; or one response that was
    judged alone."""

    index: int
    """Row in the source file, counted from 0."""
    chosen: Trajectory | None
    """Prompt and the preferred response, which is on the loss mask; None: only `rejected` was
    judged, and is bad."""
    rejected: Trajectory | None
    """Prompt and the other response, which is on the loss mask; None: only `chosen` was judged, and
    is good."""
    margin: float = 0.0
    """Margin by which the chosen response is preferred, if the row gives one."""
    references: tuple[array[float], ...] = ()
    """For each of `sides`, [num_tokens] log-prob by the reference of each token; empty: not
    computed."""

    @property
    def sides(self) -> list[Trajectory]:
        """Return the responses that exist, the chosen one first."""
        return [side for side in (self.chosen, self.rejected) if side is not None]

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of the longer side, prompt included."""
        return max(side.num_tokens for side in self.sides)


ROLLOUT, EVALUATION, JOINING = "rollout", "evaluation", "joining"
"""Names of fleets of engines to which a trainer sends weights: those that sample training data;
those that answer evaluations, if separate; and a replacement of a dead engine, alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAddress:
    """Describes one rollout engine: its URL, and its name in errors."""

    url: str
    """http://127.0.0.1:30000"""
    name: str = "engine 0"
    """Its name in errors."""
    tp: int = 1
    """Engine ranks that hold shards of the weights."""
    sharing_ranks: list[int] = field(default_factory=list)
    """[tp] trainer rank whose memory each engine rank can open, as `weights.sharing` says; empty if
    there is none, and weights come through a process group."""
    api_key: str | None = field(default=None, repr=False)
    """Key that requests must carry. Equal for all engines of a run."""
    log_path: Path | None = None
    """File of its log; None: errors do not quote it."""
    has_own_draft: bool = False
    """True if it has a draft model of its own, which keeps its weights when those of the policy are
    updated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Holds the results of one trainer step, over the whole batch and all ranks."""

    loss: float
    """The scalar that was differentiated; mean over the optimizer updates of the step."""
    grad_norm: float
    """Global L2 norm before clipping; mean over the updates."""
    lr: float
    logprob_diff_mean: float
    """Mean |engine logprob - trainer logprob| over trained tokens, before the first update; 0.0 if
    no engine sampled them (supervised)."""
    logprob_diff_max: float
    """Maximum of the same difference."""
    logprob_diff_tokens: int
    """Number of trained tokens for which they differ at all; 0 under `train.on_policy: exact`."""
    num_tokens: int
    """All tokens that went through the model, prompts included."""
    num_loss_tokens: int
    """Tokens trained on."""
    num_microbatches: int
    """Microbatches per data-parallel rank."""
    forward_backward_s: float
    optimizer_s: float
    figures: Mapping[str, float]
    """Metrics of the objective, by its own names; only shown and logged, they never affect the
    run."""
    save_wait_s: float = 0.0
    """Seconds of waiting until the checkpoint in progress had read the weights, which change next.
    """

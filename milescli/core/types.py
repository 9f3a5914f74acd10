"""The words of the house: what flows from prompts to weights. Plain data, no behaviour beyond what
the data implies."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, NewType, cast

WeightVersion = NewType("WeightVersion", int)
"""Rises by one at each publish; 0 is what the engines loaded at start. staleness = trainer version
- sample version."""


class StopReason(StrEnum):
    """Why the policy ended a turn."""

    STOP = "stop"
    """An end-of-sequence token or a stop string."""
    LENGTH = "length"
    """The bound on new tokens was reached: the response is truncated."""
    ABORT = "abort"
    """The engine was told to give up (pause, weight update, end of run)."""


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Image:
    """One picture as engine and trainer both see it: turned by EXIF, first frame, RGB, alpha on
    white, written as PNG. Equal pictures are one, by their hash."""

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
    """Tokens that it takes in a prompt: patches divided by the square of the merge size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpan:
    """Tokens [start, start + num_tokens) of a sequence stand for one image. They all bear the id of
    the model's image token; an engine is sent one of them for each span and expands it."""

    start: int
    num_tokens: int
    grid: tuple[int, int, int]
    """As in `Image`."""
    sha256: str
    """Which image; its bytes travel beside, once for all sequences that show it."""


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
    demonstration: str | Sequence[Mapping[str, Any]] | None = None
    """A worked response to imitate (warm-up), or the turns of one that calls tools; None where the
    data set has none."""
    source: str | None = None
    """Which entry of `data.mix` it comes from, by name; None without a mix."""
    turns: Sequence[Mapping[str, Any]] = ()
    """The chat, where it is more than `text` of the user."""
    tools: Sequence[Mapping[str, Any]] = ()
    """What the model is told that it may call, as JSON schemas."""
    images: Sequence[Image] = ()
    """The pictures of the prompt, in its order."""
    image_spans: Sequence[ImageSpan] = ()
    """Where they stand in `token_ids`, which hold every token of each: one span per image."""
    worked_images: Sequence[Image] = ()
    """The pictures of the turns of `demonstration`, which its tools returned."""

    @property
    def messages(self) -> Sequence[Mapping[str, Any]]:
        """The whole prompt in OpenAI's form, before the template."""
        return self.turns or [{"role": "user", "content": self.text}]

    @property
    def identity(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Return its tokens and the hashes of its images: prompts that agree in both are equal."""
        return tuple(self.token_ids), tuple(span.sha256 for span in self.image_spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Tokens [start, end) were sampled with weights `version`."""

    start: int
    end: int
    version: WeightVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedExperts:
    """Which experts the engine chose (R3). Row t is the routing of *input* token t."""

    indices: bytes
    """Row-major [num_tokens, num_layers, topk]; the last token of a trajectory was never an input,
    so num_tokens is one less than the trajectory's."""
    num_tokens: int
    num_layers: int
    """All of the model; what stands for a layer without experts means nothing."""
    topk: int

    @property
    def bytes_per_number(self) -> int:
        """Return the bytes per expert index: 1 if the model has at most 256 experts, else 2; 4
        (signed) in journals that older versions wrote."""
        count = self.num_tokens * self.num_layers * self.topk
        return len(self.indices) // count if count else 1

    def followed_by(self, later: RoutedExperts) -> RoutedExperts:
        """One record: these tokens, then those of `later`."""
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
    """What a teacher would have said at each token of a trajectory: its likeliest tokens."""

    token_ids: bytes
    """int32, row-major [num_tokens, topk]; row 0 means nothing."""
    logprobs: bytes
    """float32, the same shape."""
    topk: int
    """0: no tokens are named, and `logprobs`, [num_tokens], are of the token that is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One line of tokens as a model saw and made it. There is no split into prompt and response:
    the mask says which tokens the policy sampled. Token ids are never made again from text.

    Example: prompt [a b], response [c d] -> token_ids a b c d, loss_mask 0 0 1 1.
    """

    token_ids: array[int]
    """[num_tokens] typecode i."""
    loss_mask: bytes
    """[num_tokens] 1 where the policy sampled the token, which is then trained on; else 0 (prompt,
    tool output)."""
    logprobs: array[float]
    """[num_tokens] typecode f; natural log, from the engine that sampled, at the sampling
    temperature; 0.0 where loss_mask is 0."""
    version_spans: list[VersionSpan]
    """Cover all sampled tokens, ascending; more than one where weights changed in the middle."""
    routed_experts: RoutedExperts | None = None
    """Only with `train.routing_replay=true` on a mixture-of-experts model."""
    teacher: TeacherTokens | None = None
    """Only with `train.distill`, where it is known before the step."""
    rewards: array[float] | None = None
    """[num_tokens] typecode f; at the last token of a turn what that turn was worth, else 0.0. None
    where the sample's reward is all that is known."""
    role: str | None = None
    """Whom the policy played, where it plays several; one that is not trained has an empty
    mask."""
    image_spans: Sequence[ImageSpan] = ()
    """Where images stand in `token_ids`. Their positions are known from here alone: a model may
    sample the id of the image token, which is no image."""
    images: Sequence[Image] = ()
    """The images of the spans that no prompt beside it has: those that tools and environments
    returned, and all of a row to imitate."""

    @property
    def num_tokens(self) -> int:
        """All of them, prompt included."""
        return len(self.token_ids)

    @property
    def num_loss_tokens(self) -> int:
        """Sampled by the policy."""
        return self.loss_mask.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Guesses:
    """What engines guessed ahead, and what came of it."""

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
    """One attempt at a prompt: one or more trajectories that share a reward. Counts once in every
    mean over samples."""

    sample_index: int
    """Place in its group, 0 .. samples_per_prompt - 1."""
    seed: int
    """Sampling seed, fixed by (run seed, position of the prompt, sample_index)."""
    trajectories: list[Trajectory]
    """At least one, but of an endpoint none. Several where an agent branched its conversation."""
    text: str
    """What the reward scored, decoded, without special tokens."""
    stop_reason: StopReason
    """Stop reason of the last turn."""
    reward: float | None = None
    """None until it is scored."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """Where `rollout.reward` names several: what each gave, before its weight."""
    role_texts: Mapping[str, str] = field(default_factory=dict)
    """Texts that the rewards of roles score, for roles that have their own reward and spoke."""
    role_rewards: Mapping[str, float] = field(default_factory=dict)
    """What it gave; trajectories of other roles share `reward`."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """What the agent tells of its episode, by name; turns, and what chat templates did to them."""
    num_failed: int = 0
    """Episodes in its place that failed before it."""
    num_counted_tokens: int = 0
    """Where the tokens themselves are not known: how many an endpoint says that it sampled."""
    guesses: Guesses = NO_GUESSES
    """Over all turns; none where engines guess nothing."""
    is_learned: bool = True
    """False: it counts for the others of its group, and its own tokens teach nothing."""

    @property
    def num_loss_tokens(self) -> int:
        """Sampled by the policy, over all trajectories."""
        known = sum(trajectory.num_loss_tokens for trajectory in self.trajectories)
        return known + self.num_counted_tokens

    @property
    def response_ids(self) -> list[int]:
        """The sampled tokens, in order; for records that people read."""
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
        """Version of the oldest token: what staleness is measured by."""
        return min(span.version for span in self.version_spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The samples of one prompt: what a group-relative advantage compares."""

    prompt: Prompt
    samples: list[Sample]
    epoch: int = 0
    """Which pass over the prompts this group belongs to."""
    greedy_reward: float | None = None
    """Reward of the greedy response, if the advantage estimator needs it; never trained on."""

    @property
    def rewards(self) -> list[float]:
        """[samples_per_prompt] Raises AssertionError where a sample was not scored."""
        rewards = [sample.reward for sample in self.samples]
        assert None not in rewards, f"prompt {self.prompt.index} is not scored"
        return cast("list[float]", rewards)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two responses to one prompt, of which one was preferred; or one that was judged alone."""

    index: int
    """Row in the source file, counted from 0."""
    chosen: Trajectory | None
    """Prompt and the preferred response, which is on the loss mask; None: only `rejected` was
    judged, and found wanting."""
    rejected: Trajectory | None
    """The same of the other; None: only `chosen` was judged, and found good."""
    margin: float = 0.0
    """By how much the first was preferred, where the row says so."""
    references: tuple[array[float], ...] = ()
    """For each of `sides`, [num_tokens] log-prob by the reference of each token; empty: not
    computed."""

    @property
    def sides(self) -> list[Trajectory]:
        """Those that there are, the chosen one first."""
        return [side for side in (self.chosen, self.rejected) if side is not None]

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of the longer side, prompt included."""
        return max(side.num_tokens for side in self.sides)


ROLLOUT, EVALUATION, JOINING = "rollout", "evaluation", "joining"
"""Fleets of engines that a trainer sends weights to: those that sample what is learned from; where
evaluations have their own, these; and one that is started in the place of a dead one, alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAddress:
    """One rollout engine, as HTTP reaches it and as errors call it."""

    url: str
    """http://127.0.0.1:30000"""
    name: str = "engine 0"
    """As errors call it."""
    tp: int = 1
    """Engine ranks that hold shards of the weights."""
    sharing_ranks: list[int] = field(default_factory=list)
    """[tp] trainer rank whose memory each engine rank can open, as `weights.sharing` says; empty
    where there is none, and weights come through a group."""
    api_key: str | None = field(default=None, repr=False)
    """What requests must bear. Equal for all engines of a run."""
    log_path: Path | None = None
    """Where its last words are; None: errors do without."""
    has_own_draft: bool = False
    """It guesses by a model of its own, which keeps its weights when those of the policy come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one trainer step did; all figures are over the whole batch, over all ranks."""

    loss: float
    """The scalar that was differentiated; mean over the optimizer updates of the step."""
    grad_norm: float
    """Global L2 norm before clipping; mean over the updates."""
    lr: float
    logprob_diff_mean: float
    """Mean |engine logprob - trainer logprob| over trained tokens, before the first update; 0.0
    where no engine sampled them (supervised)."""
    logprob_diff_max: float
    """Max of the same."""
    logprob_diff_tokens: int
    """Tokens among them that differ at all; 0 under `train.on_policy: exact`."""
    num_tokens: int
    """All tokens that went through the model, prompts included."""
    num_loss_tokens: int
    """Tokens trained on."""
    num_microbatches: int
    """Per data-parallel rank."""
    forward_backward_s: float
    optimizer_s: float
    figures: Mapping[str, float]
    """What the objective tells, by its names for it; shown and logged, never steering."""
    save_wait_s: float = 0.0
    """Until a checkpoint that is being written had read the weights, which change next."""

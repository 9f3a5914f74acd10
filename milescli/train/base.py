"""The data that a trainer consumes, and the protocols of objectives and trainers. `PackedTokens`,
on which an objective computes, is in `packed_tokens`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeGuard, TypeVar

import numpy as np

from milescli.core.events import WorkerMemory
from milescli.core.types import (
    ROLLOUT,
    EngineAddress,
    ImageSpan,
    StepReport,
    Trajectory,
    WeightVersion,
)
from milescli.platform.lazy import torch
from milescli.train.packed_tokens import PackedTokens
from milescli.train.streams import Stream

Item = TypeVar("Item", contravariant=True)
"""What an objective learns from: groups, demonstrations, ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSequence:
    """Holds one sequence of tokens that an objective trains on, with its streams. n: its tokens.
    Every array is aligned with the tokens: `loss_mask[3]` says whether token 3 is trained on, given
    tokens 0 to 2. So the first token never is."""

    token_ids: np.ndarray
    """[n] int32"""
    loss_mask: np.ndarray
    """[n] bool; True where the token is trained on."""
    streams: Mapping[str, np.ndarray]
    """Values by `Stream`, or by a name of the objective's own: [n] float32, or [n, k]. All
    sequences of a step have the same streams."""
    token_weight: float
    """Weight of each trained token's loss in the numerator of the update's mean."""
    share: float
    """Contribution of the sequence to the divisor of the update's mean, if any of its tokens is
    trained."""
    group: int
    """Sequences of the same group are in the same optimizer update."""
    unit: int | None = None
    """Sequences of the same unit are in the same microbatch (a pair that a loss compares); None:
    the sequence is independent."""
    routed_experts: np.ndarray | None = None
    """[n - 1, num_layers, topk] of any integer type (R3), or None."""
    image_spans: tuple[ImageSpan, ...] = ()
    """Where images stand in the tokens."""

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens."""
        return len(self.token_ids)

    @property
    def is_trained(self) -> bool:
        """Return True if at least one token is trained on."""
        return bool(self.loss_mask.any())


class SequenceOutline(NamedTuple):
    """Describes a sequence whose tokens are in another process, for packing; fields are named as in
    `TrainSequence`."""

    num_tokens: int
    is_trained: bool
    token_weight: float
    share: float
    group: int
    unit: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainShard:
    """Holds the data of one data-parallel rank for one step: its sequences end to end, without
    padding. T: tokens over all of them; N: sequences. Plain arrays, so that it crosses process
    borders without a copy."""

    objective: str
    """Name or import path of the objective, as `train.objectives.load_objective` takes it."""
    temperature: float
    """Logits are divided by this before the softmax, as the engine did."""
    dp_rank: int
    sequence_ids: np.ndarray
    """[N] int64 number of each sequence in the whole batch."""
    num_sequences: int
    """Number of sequences of the whole batch, for messages."""
    cu_seqlens: np.ndarray
    """[N + 1] int64 ascending; sequence i is tokens cu_seqlens[i] .. cu_seqlens[i + 1]."""
    token_ids: np.ndarray
    """[T] int32"""
    loss_mask: np.ndarray
    """[T] bool"""
    loss_weights: np.ndarray
    """[N] float32 weight of each trained token of a sequence: the loss of an update is the sum over
    its trained tokens of weight * token loss, whatever the split into ranks and microbatches."""
    streams: Mapping[str, np.ndarray]
    """Each [T] float32, or [T, k]; `Stream.CANDIDATES` int32."""
    updates: list[list[list[int]]]
    """updates[u][m]: sequences of microbatch m in optimizer update u. All ranks have equally many
    microbatches in an update; some are empty if there are too few sequences. A microbatch respects
    the cap of tokens unless it is a single longer unit."""
    routed_experts: np.ndarray | None = None
    """[T, num_layers, topk] of the smallest integer type that holds them (R3), or None. Row t is
    the routing of input token t; the last token of a sequence is no input, its row is zero."""
    logprob_ids: tuple[int, ...] = ()
    """Sequences of this shard whose log-probs the step returns; see `StepResult`."""
    image_spans: tuple[tuple[ImageSpan, ...], ...] = ()
    """[N] spans of each sequence, counted from its own first token; empty where none has images."""
    images: Mapping[str, bytes] = field(default_factory=dict)
    """PNG of each image in these sequences, by its hash; stored once, however many sequences have
    it."""

    @property
    def size_bytes(self) -> int:
        """Return the number of bytes that are sent to a rank."""
        arrays = [self.sequence_ids, self.cu_seqlens, self.token_ids, self.loss_mask]
        arrays += [self.loss_weights, *self.streams.values()]
        routing = 0 if self.routed_experts is None else self.routed_experts.nbytes
        images = sum(len(png) for png in self.images.values())
        return sum(array.nbytes for array in arrays) + routing + images


class ShardPiece(NamedTuple):
    """Holds the part of a shard that is in one collecting process."""

    sequences: Mapping[int, TrainSequence]
    """Number in the whole batch -> sequence."""
    images: Mapping[str, bytes]
    """Hash -> PNG file of each image in these sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScatteredShard:
    """Describes a TrainShard whose sequences are still in the collecting processes. The process of
    a rank fetches them and calls `whole`."""

    sequence_ids: np.ndarray
    """[N] as in TrainShard."""
    num_sequences: int
    size_bytes: int
    """Approximate size of the sequences."""
    pieces: tuple[Any, ...]
    """[collectors] references to `ShardPiece`s."""
    join: Callable[[Mapping[int, TrainSequence], Mapping[str, bytes]], TrainShard]
    """Makes the shard of all its sequences and their images."""

    def whole(self, pieces: Sequence[ShardPiece]) -> TrainShard:
        """Return the shard. `pieces`: the values of the references in `pieces`, in any order."""
        return self.join(
            {number: each for piece in pieces for number, each in piece.sequences.items()},
            {image: png for piece in pieces for image, png in piece.images.items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """Holds the data of one trainer step."""

    shards: Sequence[TrainShard | ScatteredShard]
    """[dp]"""

    @property
    def num_sequences(self) -> int:
        """Return the number of sequences of all shards."""
        return self.shards[0].num_sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Holds the report of a step, and the log-probs of the sequences in
    `TrainShard.logprob_ids`."""

    report: StepReport
    logprobs: Mapping[int, np.ndarray] = field(default_factory=dict)
    """Log-probs by number of the sequence: [n] float32 log-prob of each trained token given those
    before it, under the policy before the first update of the step; 0.0 for others. Sequences that
    only later updates have read are missing."""
    memory: tuple[WorkerMemory, ...] = ()
    """[ranks] memory that each rank used."""


class Reduce(StrEnum):
    """How values of single tokens become one metric of the step."""

    TOKEN_MEAN = "token_mean"
    """Mean over the trained tokens of all updates and ranks."""
    LOSS = "loss"
    """As the loss: weighted sum over each update, mean over the updates."""
    MAX = "max"
    """Maximum over trained tokens."""


@dataclass(frozen=True, slots=True)
class Figure:
    """Holds a value per token that the step report shows as one number."""

    values: torch.Tensor
    """[S]; values off the loss mask do not count."""
    reduce: Reduce = Reduce.TOKEN_MEAN


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """Holds what an objective computes for one microbatch. S: positions of this rank."""

    loss: torch.Tensor
    """[S] loss of each token; values off the mask are ignored."""
    figures: Mapping[str, Figure] = field(default_factory=dict)


class Objective(Protocol[Item]):
    """Defines what one optimizer step minimises. Pure: data in, tensors out; it knows no rank, no
    engine and no vendor. Made once per process by a factory `(recipe) -> Objective`. An attribute
    `needs_greedy = True` requests `Group.greedy_reward`; `compares` (a frozenset of `RewardDetail`)
    names what it compares of rewards besides their sum, for filters; `takes` says what it trains
    on: "groups" that engines sampled (the default), or rows of `data.train` as "chats" (Trajectory)
    or "pairs" (Pair); `of_scores = True` says that its model gives a score, not a next token."""

    needs: frozenset[Stream]
    """Streams that the ranks compute before the loss (`RANK_STREAMS`)."""

    def sequences(self, items: Sequence[Item]) -> list[TrainSequence]:
        """Return the sequences to train on, with the streams that the driver knows. Called in the
        driver."""
        ...

    def complete(self, tokens: PackedTokens) -> None:
        """Compute further streams from streams (`tokens[stream] = values`). Called on ranks once
        per step, with all tokens of this rank and the streams of `needs`. `tokens.reduce` gives
        sums, means and maxima over all ranks."""

    def loss(self, tokens: PackedTokens) -> TokenLoss:
        """Return the loss. Called on ranks once per microbatch, with `tokens.logprobs` and
        `tokens.entropy` of the current policy."""
        ...


class AdaptiveObjective(Protocol):
    """Defines the further interface of an objective that changes from step to step. Called in the
    driver; its changes reach the ranks through the streams of `sequences`."""

    state: Mapping[str, float]
    """Everything that a resumed run needs; stored in each checkpoint."""

    def observe(self, report: StepReport) -> None:
        """Adapt to the report of a step; called once after each step."""

    def restore(self, state: Mapping[str, float]) -> None:
        """Restore the state that `state` returned."""


def is_adaptive(objective: object) -> TypeGuard[AdaptiveObjective]:
    """Return True if the objective is an `AdaptiveObjective`, even if it runs in another
    process."""
    return hasattr(objective, "observe") and hasattr(objective, "restore")


class Trainer:
    """Represents all ranks of the training engine in the driver. Every method is one `call`, which
    subclasses implement. Every call is bounded and raises named errors."""

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call the method of this name on all ranks, each with its shard in place of a batch.
        Return the combined result."""
        raise NotImplementedError

    def note_saved(self) -> None:
        """Record that the newest checkpoint is complete, or that the ranks hold one that is."""

    def note_save_failed(self) -> None:
        """Record that the last checkpoint will never be complete."""

    async def connect_engines(self, engines: list[EngineAddress], fleet: str = ROLLOUT) -> None:
        """Open the weight channel to these engines of the fleet; call it again after one was
        replaced. Without engines, close it."""
        await self.call("connect_engines", engines, fleet)

    async def step(
        self, batch: TrainBatch, *, lr: float | None, critic_lr: float | None = None
    ) -> StepResult:
        """Run one pass over the batch: one optimizer update per entry of `shard.updates`, with the
        given learning rate, and as many updates of the critic, if there is one. `lr` None: the
        policy is not updated. Also return the log-probs of the sequences in `shard.logprob_ids`."""
        return await self.call("step", batch, lr=lr, critic_lr=critic_lr)

    async def start_critic(self) -> None:
        """Initialise the critic, except its head, from the policy's current weights."""
        await self.call("start_critic")

    async def measure(self, batch: TrainBatch) -> StepReport:
        """Return loss and metrics of the batch as `step` would report them, without changing
        anything. Gradient norm and learning rate are 0."""
        return await self.call("measure", batch)

    async def score(
        self, batch: TrainBatch, *, with_other_rounding: bool = False
    ) -> list[np.ndarray]:
        """Return for each sequence of the batch [n] float32, the log-prob of each token given those
        before it, at the shard's temperature; 0.0 for the first. No gradient, no change.
        `with_other_rounding`: round the output of each layer in another way."""
        return await self.call("score", batch, with_other_rounding=with_other_rounding)

    async def score_by_teachers(self, batch: TrainBatch) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return for each sequence of the batch the teacher's most likely tokens at each position,
        [n, k] int32, and their log-probs, [n, k] float32; the first row is meaningless."""
        return await self.call("score_by_teachers", batch)

    async def free_teachers(self) -> None:
        """Free the memory of the teachers, which will not be used again."""
        await self.call("free_teachers")

    async def publish(self, version: WeightVersion, fleet: str = ROLLOUT) -> int:
        """Send the current weights to a fleet's engines; return the bytes that all ranks sent. The
        caller has paused the engines, and afterwards sets their version to `version`."""
        return sum(await self.call("publish", version, fleet) or ())

    async def verify(self, fleet: str = ROLLOUT) -> None:
        """Compare the weights of a fleet's engines with the current ones, bit for bit. The caller
        has paused the engines. Raises MismatchError."""
        await self.call("verify", fleet)

    async def reset_optimizer(self) -> None:
        """Zero the optimizer's moments (between warm-up and RL)."""
        await self.call("reset_optimizer")

    async def freeze_reference(self) -> None:
        """Copy the current weights to the reference model."""
        await self.call("freeze_reference")

    async def bypass_layers(self, first: int) -> None:
        """Make layers `first` and beyond pass their input through, and leave those before it
        unchanged, to locate the layer at which engine and trainer diverge. The optimizer must not
        step afterwards."""
        await self.call("bypass_layers", first)

    async def offload_optimizer_state(self) -> None:
        """Move gradients and optimizer off the device, so that an engine's weights fit beside the
        trainer's (colocated)."""
        await self.call("offload_optimizer_state")

    async def sleep(self) -> None:
        """Move weights, gradients and optimizer off the device (colocated); `wake` brings them
        back."""
        await self.call("sleep")

    async def wake(self) -> None:
        """Bring back what `sleep` moved off the device."""
        await self.call("wake")

    async def save(self, folder: Path) -> None:
        """Write weights, optimizer and RNG into `folder`. Return as soon as training may continue;
        with async save, the files are complete only after `finish_save`. Raises as
        `finish_save`."""
        await self.call("save", folder)

    async def is_written(self) -> bool:
        """Return True if the last save is on disk, so that `finish_save` would return at once."""
        return await self.call("is_written")

    async def finish_save(self) -> dict[str, str]:
        """Wait until the last `save` is on disk. Return the SHA-256 of the files that their writer
        has hashed, by their names in the folder. Raises CheckpointError if they could not be
        written; training may continue then."""
        return await self.call("finish_save")

    async def load(self, folder: Path, *, weights_only: bool = False) -> None:
        """Load weights, optimizer and RNG from a folder that `save` wrote, under any layout.
        `weights_only`: leave optimizer and RNG as they are."""
        await self.call("load", folder, weights_only=weights_only)


_DTYPES = {1: np.uint8, 2: np.uint16, 4: np.int32}
"""Integer type by bytes per expert number, as in `RoutedExperts.bytes_per_number`."""


def sequence_of(
    trajectory: Trajectory,
    *,
    streams: Mapping[str, np.ndarray],
    token_weight: float,
    share: float,
    group: int,
) -> TrainSequence:
    """Build a `TrainSequence` from the trajectory's tokens, mask, expert choices and images."""
    return TrainSequence(
        token_ids=np.frombuffer(trajectory.token_ids, np.int32),
        loss_mask=np.frombuffer(trajectory.loss_mask, np.bool_),
        streams=streams,
        token_weight=token_weight,
        share=share,
        group=group,
        routed_experts=_routing(trajectory),
        image_spans=tuple(trajectory.image_spans),
    )


def _routing(trajectory: Trajectory) -> np.ndarray | None:
    """Return [num_tokens - 1, num_layers, topk] as the engine sent it; None if it recorded no
    routing."""
    routed = trajectory.routed_experts
    if routed is None:
        return None
    rows = (routed.num_tokens, trajectory.num_tokens)
    assert routed.num_tokens == trajectory.num_tokens - 1, rows
    shape = (routed.num_tokens, routed.num_layers, routed.topk)
    return np.frombuffer(routed.indices, _DTYPES[routed.bytes_per_number]).reshape(shape)

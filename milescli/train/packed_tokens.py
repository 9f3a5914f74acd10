"""Presents tokens to an objective: flat, and correct under any layout. Hides what packing, context
parallelism and data parallelism do to sequences. Built by trainer ranks; pure except for the
collectives of the two given groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Literal

from milescli.platform.lazy import torch
from milescli.train.streams import LOGPROB_STREAMS


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Locates each position of this rank in its sequence. S: positions, padding included; N:
    sequences. Positions before the first trained token, which sequences may share, occur once, with
    the first of these sequences."""

    sequence: torch.Tensor
    """[S] int64, 0 .. N - 1; N at padding."""
    offset: torch.Tensor
    """[S] int64 index of the predicted token in its sequence, counted from 0; a first token is
    never predicted, so the smallest is 1."""
    lengths: torch.Tensor
    """[N] int64 number of tokens of each whole sequence, over all context-parallel ranks."""
    context_group: torch.distributed.ProcessGroup | None = None
    """Ranks that hold the other parts of these sequences; None if this rank holds all."""
    token_group: torch.distributed.ProcessGroup | None = None
    """Ranks that together hold all tokens of the step (data x context parallel); None if this rank
    holds all."""


@dataclass(slots=True, kw_only=True)
class PackedTokens:
    """Holds one microbatch in `Objective.loss`, or all tokens of this rank in `Objective.complete`.
    Every value belongs to the token that is predicted at a position, given those before it."""

    places: Places
    loss_mask: torch.Tensor
    """[S] bool; False at padding too."""
    loss_weights: torch.Tensor
    """[S] float32; the loss of an update is the sum of weight * token loss over its trained
    tokens."""
    streams: Mapping[str, torch.Tensor]
    """Values by `Stream`, or by a name of the objective's own: [S] float32, or [S, k]. Read with
    `tokens[stream]`."""
    logprobs: torch.Tensor | None = None
    """[S] by the current policy, with gradient; 0.0 off the mask, as are the next two. Only in
    `loss`."""
    entropy: torch.Tensor | None = None
    """[S] nats, with gradient; only in `loss`."""
    candidates: torch.Tensor | None = None
    """[S, k] log-probs by the current policy of the tokens in `Stream.CANDIDATES`, if there are
    any, with gradient; only in `loss`."""
    scores: torch.Tensor | None = None
    """[S] scores of a model that gives a score instead of a next token, after it has read the
    tokens before, with gradient. Only in `loss`, where `logprobs` is then None."""
    new_streams: MutableMapping[str, torch.Tensor] = field(default_factory=dict)
    """Streams that `complete` has set."""

    def __getitem__(self, stream: str) -> torch.Tensor:
        """Return [S] float32, or [S, k]. Off the mask a log-prob is the policy's own, detached, so
        that a ratio there is 1 and its gradient finite; anything else is 0.0. Raises KeyError for a
        missing stream: name it in `needs`, or make it in `sequences`."""
        values = self.new_streams[stream] if stream in self.new_streams else self.streams[stream]
        if stream in LOGPROB_STREAMS and self.logprobs is not None:
            return torch.where(self.loss_mask, values, self.logprobs.detach())
        mask = self.loss_mask.view(-1, *[1] * (values.dim() - 1))
        return torch.where(mask, values, values.new_zeros(()))

    def __setitem__(self, stream: str, values: torch.Tensor) -> None:
        """Set a stream [S] for the losses of this step. Only for `complete`."""
        assert not self.is_in_loss, f"a loss cannot set the stream `{stream}`: `complete` can"
        assert values.shape == self.loss_mask.shape, (stream, values.shape, self.loss_mask.shape)
        self.new_streams[stream] = values.detach().float()

    def __contains__(self, stream: str) -> bool:
        return stream in self.new_streams or stream in self.streams

    @property
    def is_in_loss(self) -> bool:
        """Return True if this is one microbatch of `Objective.loss`."""
        return self.logprobs is not None or self.scores is not None

    @property
    def num_sequences(self) -> int:
        """Return N, the number of sequences."""
        return len(self.places.lengths)

    def sum_by_sequence(self, values: torch.Tensor) -> torch.Tensor:
        """Return [N] the sum of [S] values over the trained tokens of each whole sequence; for a
        mask, their number. Differentiable."""
        values = _as_numbers(values)
        masked = torch.where(self.loss_mask, values, 0.0)
        sums = values.new_zeros(self.num_sequences + 1)
        sums = sums.index_add(0, self.places.sequence, masked)
        return _sum_over(sums[:-1], self.places.context_group)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Return [S] the value of each token's sequence, from [N]; padding gets 0.
        Differentiable."""
        padded = torch.cat([values, values.new_zeros(1)])
        return padded[self.places.sequence]

    def whole_sequences(self, values: torch.Tensor) -> torch.Tensor:
        """Return each whole sequence in order, for scans, [S] -> [N, L]; L: the longest. Column t
        belongs to token t, so column 0 is 0.0, as are columns beyond the end. Values off the loss
        mask stay: multiply by `whole_sequences(loss_mask)` to drop them. Differentiable."""
        values = _as_numbers(values)
        columns = int(self.places.lengths.max()) if self.num_sequences else 1
        flat = values.new_zeros((self.num_sequences + 1) * columns)
        flat = flat.index_add(0, self._cells(columns), values)
        whole = flat.view(self.num_sequences + 1, columns)[:-1]
        return _sum_over(whole, self.places.context_group)

    def own_part(self, whole: torch.Tensor) -> torch.Tensor:
        """Return [S] this rank's values, the inverse of `whole_sequences`, from [N, L]; padding
        gets 0.0. Differentiable."""
        padded = torch.cat([whole, whole.new_zeros((1, whole.shape[1]))])
        return padded.view(-1)[self._cells(whole.shape[1])]

    def parts(self, max_cells: int) -> Iterator[tuple[torch.Tensor, PackedTokens]]:
        """Yield ([S'] index in these tokens, the tokens there) for some whole sequences of similar
        length at a time: `whole_sequences` of a part has at most `max_cells` cells, or one
        sequence. Only for `complete`."""
        assert not self.is_in_loss, "a microbatch is small: it needs no parts"
        lengths, places = self.places.lengths.tolist(), self.places
        left = sorted(range(len(lengths)), key=lambda number: -lengths[number])
        while left:
            count = max(1, max_cells // max(lengths[left[0]], 1))
            chosen, left = sorted(left[:count]), left[count:]
            numbers = torch.tensor(chosen, device=places.lengths.device)
            new_number = places.sequence.new_full((len(lengths) + 1,), len(numbers))
            new_number[numbers] = torch.arange(len(numbers), device=numbers.device)
            sequence = new_number[places.sequence]
            index = (sequence < len(numbers)).nonzero()[:, 0]
            yield (
                index,
                replace(
                    self,
                    places=replace(
                        places,
                        sequence=sequence[index],
                        offset=places.offset[index],
                        lengths=places.lengths[numbers],
                    ),
                    loss_mask=self.loss_mask[index],
                    loss_weights=self.loss_weights[index],
                    streams={name: values[index] for name, values in self.streams.items()},
                    new_streams={name: values[index] for name, values in self.new_streams.items()},
                ),
            )

    def _cells(self, columns: int) -> torch.Tensor:
        """Return [S] index into [N + 1, columns] laid flat; padding goes to the last row."""
        sequence = self.places.sequence
        is_padding = sequence == self.num_sequences
        return sequence * columns + torch.where(is_padding, 0, self.places.offset)

    def reduce(self, values: torch.Tensor, how: Literal["sum", "mean", "max"]) -> torch.Tensor:
        """Reduce [S] to a scalar over the trained tokens of the whole step, on all ranks. Only for
        `complete`: a mean over one microbatch would depend on how the step was packed. No gradient.
        """
        assert not self.is_in_loss, "in a loss it would depend on packing: reduce in `complete`"
        group, values = self.places.token_group, values.detach().double()
        if how == "max":
            lowest = values.new_full((), -torch.inf)
            peak = torch.where(self.loss_mask, values, lowest).max() if len(values) else lowest
            if group is not None:
                torch.distributed.all_reduce(peak, op=torch.distributed.ReduceOp.MAX, group=group)
            return peak.float()
        total = torch.stack(
            [torch.where(self.loss_mask, values, 0.0).sum(), self.loss_mask.sum().double()]
        )
        if group is not None:
            torch.distributed.all_reduce(total, group=group)
        return (total[0] if how == "sum" else total[0] / total[1].clamp(min=1)).float()


def _as_numbers(values: torch.Tensor) -> torch.Tensor:
    """Return masks and counts as float32, which can be summed over ranks."""
    return values if values.is_floating_point() else values.float()


def _sum_over(values: torch.Tensor, group: torch.distributed.ProcessGroup | None) -> torch.Tensor:
    from milescli.train.vocab_parallel import SumOverRanks  # its base is torch's

    return values if group is None else SumOverRanks.apply(values, group)

"""Holds a TrainShard on its rank: microbatches on the device, and streams as they are computed.
Made anew for each step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from milescli.backends.megatron.layers.attention import pack_row
from milescli.backends.megatron.mesh import Mesh
from milescli.backends.megatron.step.images import ReadPatches, ShardPlaces, StepImages
from milescli.backends.megatron.step.microbatch import FollowingTokens, Microbatch, row_shape
from milescli.backends.megatron.step.rows import RowLayout, make_row, share_prefixes
from milescli.models.facts import ModelFacts
from milescli.plan.choices import can_share_prompts
from milescli.train.base import TrainShard
from milescli.train.packed_tokens import PackedTokens, Places
from milescli.train.streams import Stream


class RankShard:
    """Holds a rank's shard of the batch as packed rows. T: tokens of the shard; S: positions of one
    microbatch on this rank."""

    def __init__(
        self,
        shard: TrainShard,
        *,
        mesh: Mesh,
        facts: ModelFacts,
        routed_layers: Sequence[int] = (),
        read_patches: ReadPatches | None = None,
        shares_prompts: bool = False,
    ) -> None:
        """Lay out every row without computing anything. `routed_layers`: layers whose routes this
        rank replays; other routes are dropped. `read_patches` reads the images of a model that sees
        them. `shares_prompts`: what sequences of a row have in common before their first trained
        token is laid out once, in rows of models that allow it; for other sequences, values off the
        mask are then 0."""
        assert shard.dp_rank == mesh.dp_rank, (shard.dp_rank, mesh.dp_rank)
        self.shard = shard
        self._mesh = mesh
        self._shares_prompts = shares_prompts and not shard.image_spans
        self.num_tokens = len(shard.token_ids)
        """T"""
        self._token_ids = _on_host(shard.token_ids).long()
        self._loss_mask = _on_host(shard.loss_mask)
        self._loss_weights = _on_host(shard.loss_weights)
        """[N + 1]; padding takes the last, which is 0."""
        self._routed_experts = (
            None
            if shard.routed_experts is None or not routed_layers
            else _on_host(shard.routed_experts[:, list(routed_layers)])
        )
        self._images = StepImages(files=shard.images, read=read_patches or _no_patches)
        self._places: dict[int, ShardPlaces] = {}
        """By the model's merge size."""
        self._streams = {name: _on_host(values) for name, values in shard.streams.items()}
        self.updates = [
            [self._microbatch(indices, facts) for indices in microbatches]
            for microbatches in shard.updates
        ]

    @property
    def microbatches(self) -> list[Microbatch]:
        """Return the microbatches of all updates."""
        return [microbatch for update in self.updates for microbatch in update]

    def __contains__(self, stream: Stream) -> bool:
        return stream in self._streams

    def rows_of_teacher(self, number: int, facts: ModelFacts) -> list[Microbatch]:
        """Return the microbatches of a teacher's own sequences, laid out for its model. There are
        as many as microbatches in all updates, so that all ranks run equally many passes."""
        owners = np.zeros(len(self.shard.sequence_ids), np.int64)
        if Stream.TEACHER_INDEX in self.shard.streams:
            starts = self.shard.cu_seqlens[:-1]
            owners = self.shard.streams[Stream.TEACHER_INDEX][starts].astype(np.int64)
        return [
            self._microbatch([index for index in indices if owners[index] == number], facts)
            for update in self.shard.updates
            for indices in update
        ]

    def _microbatch(self, indices: Sequence[int], facts: ModelFacts) -> Microbatch:
        device, shape, ends = self._mesh.device, row_shape(self._mesh), self.shard.cu_seqlens
        lengths = [int(ends[index + 1] - ends[index]) for index in indices]
        row = make_row(
            [(int(ends[i]), n - 1) for i, n in zip(indices, lengths, strict=True)], shape=shape
        )
        if self._shares_prompts and can_share_prompts(facts):
            row = share_prefixes(row, [self._prefix(index) for index in indices])
        is_real = row.source >= 0
        inputs = row.source.clamp(min=0)
        targets = torch.where(is_real, inputs + 1, 0)
        loss_mask = self._loss_mask[targets] & is_real
        weights = self._loss_weights[[*indices, -1]][row.sequence]
        tokens = torch.where(is_real, self._token_ids[inputs], 0).to(device)
        places = self._image_places(facts)
        return Microbatch(
            indices=list(indices),
            source=row.source,
            row=pack_row(
                row,
                shape=shape,
                facts=facts,
                device=device,
                tokens=tokens,
                rotary=places.rotary(row.source) if places and _uses_mrope(facts) else None,
                images=[
                    self.shard.image_spans[i]
                    for i, n in zip(indices, lengths, strict=True)
                    if n > 1
                ]
                if self.shard.image_spans
                else (),
            ),
            input_ids=tokens[None],
            positions=row.positions.to(device)[None],
            target_ids=torch.where(is_real, self._token_ids[targets], 0).to(device),
            after=self._after(row, lengths) if facts.trains_mtp else None,
            places=Places(
                sequence=row.sequence.to(device),
                offset=torch.where(is_real, row.positions + 1, 0).to(device),
                lengths=torch.tensor(lengths, dtype=torch.int64, device=device),
                context_group=self._mesh.cp_group if self._mesh.layout.cp > 1 else None,
            ),
            loss_mask=loss_mask.to(device),
            loss_weights=torch.where(loss_mask, weights, 0.0).to(device),
            routed_experts=(None if self._routed_experts is None else self._routed_experts[inputs]),
            num_tokens=row.num_real if row.shared is not None else int(is_real.sum()),
            images=places.of_row(indices, row.source)
            if places is not None and self._mesh.is_first_stage
            else None,
        )

    def _image_places(self, facts: ModelFacts) -> ShardPlaces | None:
        """Return the places of the model's image tokens; None for a model without images."""
        if facts.vision is None:
            return None
        size = facts.vision.merge_size
        if size not in self._places:
            self._places[size] = ShardPlaces(self.shard, step=self._images, merge_size=size)
        return self._places[size]

    def _prefix(self, index: int) -> np.ndarray:
        """Return the token ids before the position that predicts the sequence's first trained
        token."""
        start, end = self.shard.cu_seqlens[index : index + 2]
        trained = np.flatnonzero(self.shard.loss_mask[start:end])
        length = (trained[0] if len(trained) else end - start) - 1
        return self.shard.token_ids[start : start + max(length, 0)]

    def _after(self, row: RowLayout, lengths: Sequence[int]) -> FollowingTokens:
        has_two = row.positions + 2 < torch.tensor([*lengths, 0])[row.sequence]
        places = torch.where(has_two, row.source + 2, 0)
        return FollowingTokens(
            ids=torch.where(has_two, self._token_ids[places], 0).to(self._mesh.device),
            mask=(self._loss_mask[places] & has_two).to(self._mesh.device),
        )

    def fill(
        self,
        stream: Stream,
        values: Sequence[torch.Tensor],
        *,
        microbatches: Sequence[Microbatch] | None = None,
    ) -> None:
        """Store a stream: [S] or [S, k] for each of `microbatches` (None: those of all updates, in
        order); no values if this rank is not on the last stage. Positions of other context-parallel
        ranks stay 0."""
        whole = torch.zeros(self.num_tokens + 1)
        if values:
            first = values[0]
            dtype = torch.float32 if first.is_floating_point() else torch.int32
            whole = torch.zeros((self.num_tokens + 1, *first.shape[1:]), dtype=dtype)
        for microbatch, part in zip(microbatches or self.microbatches, values, strict=False):
            self._put(whole, microbatch.source, part)
        self._streams[stream] = whole

    @staticmethod
    def _put(whole: torch.Tensor, source: torch.Tensor, part: torch.Tensor) -> None:
        is_real = source >= 0
        whole[source[is_real] + 1] = part.detach().cpu()[is_real].to(whole.dtype)

    def take(self, stream: Stream, source: torch.Tensor) -> torch.Tensor:
        """Return [S] or [S, k] of a stream at the positions `source`, on the device. Padding, which
        is off the mask, gets the value of the first token."""
        return self._streams[stream][source.clamp(min=-1) + 1].to(self._mesh.device)

    def tokens_of(
        self,
        microbatch: Microbatch,
        *,
        logprobs: torch.Tensor | None = None,
        entropy: torch.Tensor | None = None,
        candidates: torch.Tensor | None = None,
        scores: torch.Tensor | None = None,
    ) -> PackedTokens:
        """Return one microbatch as a loss sees it, with the model's outputs."""
        return PackedTokens(
            places=microbatch.places,
            loss_mask=microbatch.loss_mask,
            loss_weights=microbatch.loss_weights,
            streams={name: self.take(name, microbatch.source) for name in self._streams},
            logprobs=logprobs,
            entropy=entropy,
            candidates=candidates,
            scores=scores,
        )

    def all_tokens(self) -> PackedTokens:
        """Return all tokens as `Objective.complete` sees them: every microbatch of this rank, one
        after the other."""
        microbatches = self.microbatches
        counts = [len(microbatch.places.lengths) for microbatch in microbatches]
        before, total = np.cumsum([0, *counts]).tolist(), sum(counts)
        sequence = [
            torch.where(
                microbatch.places.sequence == count, total, microbatch.places.sequence + first
            )
            for microbatch, first, count in zip(microbatches, before, counts, strict=False)
        ]
        source = torch.cat([microbatch.source for microbatch in microbatches])
        return PackedTokens(
            places=Places(
                sequence=torch.cat(sequence),
                offset=torch.cat([microbatch.places.offset for microbatch in microbatches]),
                lengths=torch.cat([microbatch.places.lengths for microbatch in microbatches]),
                context_group=microbatches[0].places.context_group,
                token_group=self._mesh.token_group,
            ),
            loss_mask=torch.cat([microbatch.loss_mask for microbatch in microbatches]),
            loss_weights=torch.cat([microbatch.loss_weights for microbatch in microbatches]),
            streams={name: self.take(name, source) for name in self._streams},
        )

    def keep(self, tokens: PackedTokens) -> None:
        """Store the streams that `complete` has added to `all_tokens`."""
        source = torch.cat([microbatch.source for microbatch in self.microbatches])
        for stream, values in tokens.new_streams.items():
            whole = torch.zeros(self.num_tokens + 1)
            self._put(whole, source, values)
            self._streams[stream] = whole

    def by_sequence(self, stream: Stream) -> list[torch.Tensor]:
        """Return [N] arrays [n] of a stream on the host, one per sequence."""
        return self._cut(self._streams[stream])

    def _cut(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Split [T + 1] into [N] of [n]."""
        values = whole[: self.num_tokens]
        return list(values.split(np.diff(self.shard.cu_seqlens).tolist()))

    def gathered(self, stream: Stream) -> list[np.ndarray] | None:
        """Return [N] arrays [n] float32 like `by_sequence`, combined over context-parallel ranks;
        None on ranks that do not report the shard's tokens. Collective."""
        if not self._mesh.reports_tokens:
            return None
        return self._gathered(self.by_sequence(stream))

    def logprobs_before(
        self, first: Sequence[tuple[Microbatch, torch.Tensor]]
    ) -> dict[int, np.ndarray]:
        """Return the log-probs of `shard.logprob_ids` (`StepResult.logprobs`). `first` holds [S] of
        those microbatches of the first update that have one of them, for a shard without OLD. Waits
        for the device: call it after the step. Empty on ranks that do not report the shard's
        tokens. Collective."""
        wanted = list(self.shard.logprob_ids)
        if not wanted or not self._mesh.reports_tokens:
            return {}
        if Stream.OLD in self:
            sequences = self.by_sequence(Stream.OLD)
        else:
            whole = torch.zeros(self.num_tokens + 1)
            for microbatch, part in first:
                self._put(whole, microbatch.source, part)
            sequences = self._cut(whole)
            read = {index for microbatch, _ in first for index in microbatch.indices}
            wanted = [index for index in wanted if index in read]
        if not wanted:
            return {}
        own = self._gathered([sequences[index] for index in wanted])
        numbers = [int(self.shard.sequence_ids[index]) for index in wanted]
        return {} if own is None else dict(zip(numbers, own, strict=True))

    def _gathered(self, sequences: list[torch.Tensor]) -> list[np.ndarray] | None:
        """Return the sequences gathered from context-parallel ranks; None on ranks that do not
        report the shard's tokens. Collective."""
        if self._mesh.layout.cp > 1:
            whole = torch.cat(sequences).to(self._mesh.device)
            dist.all_reduce(whole, group=self._mesh.cp_group)
            sequences = list(whole.cpu().split([len(values) for values in sequences]))
        return None if self._mesh.cp_rank else [values.numpy() for values in sequences]


def _uses_mrope(facts: ModelFacts) -> bool:
    """Return True if a token's place in its image affects the rotation of its keys and queries
    (M-RoPE)."""
    return facts.rope is not None and facts.rope.sections is not None


def _no_patches(_: bytes) -> np.ndarray:
    raise AssertionError("a shard contains images, but the model does not accept images")


def _on_host(values: np.ndarray) -> torch.Tensor:
    """Return a copy with one row of zeros at the end, so that index 0 exists even in an empty
    shard. Data from shared memory is read-only, which torch does not support."""
    copy = torch.from_numpy(np.zeros((len(values) + 1, *values.shape[1:]), values.dtype))
    copy.numpy()[:-1] = values
    return copy

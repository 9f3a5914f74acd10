"""Packs sequences into a TrainBatch: distributes them over optimizer updates, data-parallel ranks
and microbatches, and lays them end to end for each rank. Pure and deterministic; arrays only."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from milescli.core.types import Group, Pair, Prompt, Trajectory
from milescli.train.base import SequenceOutline, TrainBatch, TrainSequence, TrainShard
from milescli.train.streams import Stream

Bins = list[list[int]]
"""Indices of lengths, ascending in each bin."""
NO_IMAGES: Mapping[str, bytes] = MappingProxyType({})
MAX_DIFFERENCED = 512
"""Most lengths that are distributed by differencing, which takes 20 us for each length and bin."""


def distribute(lengths: Sequence[int], *, num_ranks: int, cap: int) -> list[Bins]:
    """Distribute every index once over [num_ranks][microbatches], with equally many microbatches on
    each rank.

    A microbatch holds at most `cap`, or one longer sequence alone. There are never more
    microbatches than first-fit-decreasing makes, rounded up to a multiple of the ranks; the ranks
    get similar sums."""
    by_rank = even_split(lengths, num_ranks)
    least = max(-(-sum(min(length, cap) for length in lengths) // (cap * num_ranks)), 1)
    if (shared := _within_ranks(lengths, by_rank, num_bins=least, cap=cap)) is not None:
        return shared
    full = first_fit(lengths, cap)
    num_bins = -(-len(full) // num_ranks)
    if num_bins > least:
        shared = _within_ranks(lengths, by_rank, num_bins=num_bins, cap=cap)
    return shared or _assign_bins(lengths, full, num_ranks=num_ranks, num_bins=num_bins)


def _within_ranks(
    lengths: Sequence[int], by_rank: Bins, *, num_bins: int, cap: int
) -> list[Bins] | None:
    """Distribute each rank's own lengths over `num_bins` bins; None if those of some rank do not
    fit."""
    shared = []
    for members in by_rank:
        own = [lengths[index] for index in members]
        bins = longest_first(own, num_bins)
        if not _fits(own, bins, cap):
            bins = first_fit(own, cap)
            if len(bins) > num_bins:
                return None
            bins += [[] for _ in range(num_bins - len(bins))]
        shared.append([[members[place] for place in bin_] for bin_ in bins])
    return shared


def _fits(lengths: Sequence[int], bins: Bins, cap: int) -> bool:
    return all(len(bin_) <= 1 or sum(lengths[index] for index in bin_) <= cap for bin_ in bins)


def _assign_bins(
    lengths: Sequence[int], full: Bins, *, num_ranks: int, num_bins: int
) -> list[Bins]:
    """Assign the finished bins to ranks, `num_bins` to each, with the ranks as even as whole bins
    allow."""
    bins = full + [[] for _ in range(num_ranks * num_bins - len(full))]
    sums = [sum(lengths[index] for index in bin_) for bin_ in bins]
    return [[bins[place] for place in places] for places in even_split_by_count(sums, num_ranks)]


def first_fit(lengths: Sequence[int], cap: int) -> Bins:
    """Pack by first-fit-decreasing: the longest first, each into the first bin that has space for
    it. Uses at most 11/9 of the fewest bins, plus 6/9 (G. Dósa, 2007). A length beyond `cap` is
    alone."""
    bins: Bins = []
    free = np.zeros(max(len(lengths), 1), np.int64)
    place, left, before = 0, -1, -1
    for index in _longest_first(lengths):
        length = lengths[index]
        if not before < length <= left:
            if bins:
                free[place] = left
            # argmax: the first bin that fits; 0 also where none does
            place = int((free[: len(bins)] >= length).argmax()) if bins else 0
            left = int(free[place])
            if not bins or left < length:
                place, left = len(bins), cap
                bins.append([])
            # the most room of the bins before it: what needs more goes on into this one
            before = int(free[:place].max(initial=-1))
        left = left - length if length <= cap else -1
        bins[place].append(index)
    return [sorted(bin_) for bin_ in bins]


def longest_first(lengths: Sequence[int], num_bins: int) -> Bins:
    """Put each length, the longest first, into the emptiest bin (LPT: R. Graham, 1969)."""
    bins, _ = _emptiest_first(_longest_first(lengths), lengths, num_bins)
    return [sorted(bin_) for bin_ in bins]


def _emptiest_first(
    order: Iterable[int], lengths: Sequence[int], num_bins: int
) -> tuple[Bins, list[tuple[int, int]]]:
    """Put each index into the emptiest bin. Return the bins, and (load, number) of each."""
    bins: Bins = [[] for _ in range(num_bins)]
    loads = list(range(num_bins))
    """load x num_bins + number, so that one comparison orders the bins."""
    for index in order:
        load = loads[0]
        bins[load % num_bins].append(index)
        heapq.heapreplace(loads, load + lengths[index] * num_bins)
    return bins, [divmod(load, num_bins) for load in loads]


def even_split(lengths: Sequence[int], num_bins: int) -> Bins:
    """Return `num_bins` bins of similar sums by the largest differencing method (N. Karmarkar and
    R. Karp, 1982). With very many lengths, all but the shortest `MAX_DIFFERENCED` are distributed
    longest first; the shortest suffice to even out the rest."""
    order = _longest_first(lengths)
    before = order[: max(len(order) - MAX_DIFFERENCED, 0)]
    rows: list[list[tuple[int, tuple]]] = []
    if before:
        bins, loads = _emptiest_first(before, lengths, num_bins)
        rows.append([(load, tuple(bins[number])) for load, number in sorted(loads, reverse=True)])
    empty: list[tuple[int, tuple]] = [(0, ())] * (num_bins - 1)
    rows += [[(lengths[index], (index,)), *empty] for index in order[len(before) :]]
    return _joined_bins(rows)


def even_split_by_count(lengths: Sequence[int], num_bins: int) -> Bins:
    """Return bins like `even_split`, with counts that differ by at most one: the balanced form of
    the method (W. Michiels et al., 2003), in which each row of `num_bins` neighbours in length
    gives every bin one."""
    order, rows = _longest_first(lengths), [[(0, ())] * num_bins]
    for start in range(0, len(order), num_bins):
        part = order[start : start + num_bins]
        row = [(lengths[index], (index,)) for index in part]
        rows.append(row + [(0, ())] * (num_bins - len(part)))
    return _joined_bins(rows)


def _joined_bins(rows: list[list[tuple[int, tuple]]]) -> Bins:
    """Join the two least even rows, largest to smallest, until one is left. Each row has (sum,
    members) of every bin, largest first."""
    heap = [(row[-1][0] - row[0][0], serial, row) for serial, row in enumerate(rows)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, serial, one = heapq.heappop(heap)
        _, _, other = heap[0]
        joined = [
            (a + b, (members, more) if members and more else members or more)
            for (a, members), (b, more) in zip(one, reversed(other), strict=True)
        ]
        joined.sort(key=_sum_of, reverse=True)
        heapq.heapreplace(heap, (joined[-1][0] - joined[0][0], serial, joined))
    return [sorted(_flattened(members)) for _, members in heap[0][2]]


def _sum_of(entry: tuple[int, object]) -> int:
    return entry[0]


def _flattened(members: tuple) -> list[int]:
    """Flatten ((1, 2), (3,)) to 1 2 3, at any depth."""
    flat, pending = [], [members]
    while pending:
        item = pending.pop()
        if isinstance(item, tuple):
            pending += item
        else:
            flat.append(item)
    return flat


def _longest_first(lengths: Sequence[int]) -> list[int]:
    """Return the indices of the lengths, longest first; equal lengths in order of their index."""
    return np.argsort(-np.asarray(lengths, np.int64), kind="stable").tolist()


Update = list[list[list[int]]]
"""[dp][microbatches] sequence numbers"""


def pack(
    sequences: Sequence[TrainSequence],
    *,
    objective: str,
    dp: int,
    max_tokens_per_microbatch: int,
    updates: int = 1,
    temperature: float = 1.0,
    logprob_ids: Collection[int] = (),
    images: Mapping[str, bytes] = NO_IMAGES,
    shares_prompts: bool = False,
) -> TrainBatch:
    """Pack every sequence once. `objective`: name by which ranks load it; `updates`: number of
    optimizer updates, fewer if there are fewer groups; `logprob_ids`: sequences whose log-probs a
    step returns; `images`: PNG files by hash, at least those of the sequences' spans, of which each
    shard gets its own. `shares_prompts`: put the sequences of a group into one microbatch of one
    rank, as far as they fit, since the rank then computes their prompt once."""
    shards = plan_shards(
        sequences,
        objective=objective,
        dp=dp,
        max_tokens_per_microbatch=max_tokens_per_microbatch,
        updates=updates,
        temperature=temperature,
        logprob_ids=logprob_ids,
        shares_prompts=shares_prompts,
    )
    return TrainBatch(shards=[shard.with_tokens(sequences, images) for shard in shards])


def plan_shards(
    sequences: Sequence[TrainSequence | SequenceOutline],
    *,
    objective: str,
    dp: int,
    max_tokens_per_microbatch: int,
    updates: int = 1,
    temperature: float = 1.0,
    logprob_ids: Collection[int] = (),
    shares_prompts: bool = False,
) -> list[ShardLayout]:
    """Return [dp] the layout of each rank's shard, as `pack` decides it, without the tokens."""
    assert sequences, "a step needs at least one sequence"
    parts = [
        _distribute_update(
            members,
            sequences,
            dp=dp,
            cap=max_tokens_per_microbatch,
            by_group=shares_prompts and dp == 1,
        )
        for members in _split_by_group(sequences, updates)
    ]
    weights = _loss_weights(sequences, parts)
    return [
        ShardLayout(
            updates=(own := [update[rank] for update in parts]),
            sequence_ids=np.array(numbers := _numbers(own), np.int64),
            loss_weights=weights[numbers],
            logprob_ids=tuple(sorted(set(logprob_ids).intersection(numbers))),
            dp_rank=rank,
            num_sequences=len(sequences),
            objective=objective,
            temperature=temperature,
        )
        for rank in range(dp)
    ]


def _numbers(updates: Sequence[Sequence[Sequence[int]]]) -> list[int]:
    return [number for update in updates for microbatch in update for number in microbatch]


def images_of(items: Iterable[object]) -> dict[str, bytes]:
    """Return hash -> PNG file of all images of groups, rows and pairs of rows."""
    holders: list[Prompt | Trajectory] = []
    for item in items:
        if isinstance(item, Group):
            holders.append(item.prompt)
            holders += [line for sample in item.samples for line in sample.trajectories]
        elif isinstance(item, Pair):
            holders += item.sides
        elif isinstance(item, Trajectory):
            holders.append(item)
    return {image.sha256: image.png for holder in holders for image in holder.images}


def _split_by_group(
    sequences: Sequence[TrainSequence | SequenceOutline], updates: int
) -> list[list[int]]:
    """Return the sequence numbers of each update: neighbouring groups, in parts as equal as
    possible."""
    groups: dict[int, list[int]] = {}
    for number, sequence in enumerate(sequences):
        groups.setdefault(sequence.group, []).append(number)
    parts = np.array_split(np.array(list(groups)), min(updates, len(groups)))
    return [[number for group in part.tolist() for number in groups[group]] for part in parts]


def _loss_weights(
    sequences: Sequence[TrainSequence | SequenceOutline], updates: Sequence[Update]
) -> np.ndarray:
    """Return [sequences] float32 as `TrainShard.loss_weights` says. Sequences without a trained
    token do not count."""
    weights = np.zeros(len(sequences), np.float32)
    for update in updates:
        members = [number for rank in update for microbatch in rank for number in microbatch]
        trained = [number for number in members if sequences[number].is_trained]
        divisor = sum([sequences[number].share for number in trained])
        weights[trained] = [sequences[number].token_weight / divisor for number in trained]
    return weights


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """Describes the shard of one rank, without its tokens."""

    updates: list[list[list[int]]]
    """[updates][microbatches] numbers of sequences in the whole batch."""
    sequence_ids: np.ndarray
    """[N] the same numbers, in this order."""
    loss_weights: np.ndarray
    """[N] as in TrainShard."""
    logprob_ids: tuple[int, ...]
    """Numbers of the sequences whose log-probs a step returns."""
    dp_rank: int
    num_sequences: int
    objective: str
    temperature: float

    def with_tokens(
        self,
        sequences: Sequence[TrainSequence] | Mapping[int, TrainSequence],
        images: Mapping[str, bytes] = NO_IMAGES,
    ) -> TrainShard:
        """Return the shard with its tokens. `sequences`: by their numbers, at least those of the
        shard; `images`: see `pack`."""
        numbers = self.sequence_ids.tolist()
        own = [sequences[number] for number in numbers]
        local = {number: index for index, number in enumerate(numbers)}
        spans = tuple(sequence.image_spans for sequence in own)
        shown = {span.sha256: None for of_sequence in spans for span in of_sequence}
        # a rank without a sequence has the same streams, which are empty
        some = own or [
            next(iter(sequences.values() if isinstance(sequences, Mapping) else sequences))
        ]
        return TrainShard(
            objective=self.objective,
            temperature=self.temperature,
            dp_rank=self.dp_rank,
            sequence_ids=self.sequence_ids,
            num_sequences=self.num_sequences,
            cu_seqlens=np.cumsum([0, *(sequence.num_tokens for sequence in own)]),
            token_ids=_joined([sequence.token_ids for sequence in own], np.int32),
            loss_mask=_joined([sequence.loss_mask for sequence in own], np.bool_),
            loss_weights=self.loss_weights,
            streams={
                stream: _joined(
                    [sequence.streams[stream] for sequence in own],
                    np.int32 if stream == Stream.CANDIDATES else np.float32,
                    width=first.shape[1:],
                )
                for stream, first in some[0].streams.items()
            },
            updates=[
                [[local[number] for number in microbatch] for microbatch in update]
                for update in self.updates
            ],
            routed_experts=_routing(own),
            logprob_ids=tuple(local[number] for number in numbers if number in self.logprob_ids),
            image_spans=spans if shown else (),
            images={image: images[image] for image in shown},
        )


def _joined(
    parts: list[np.ndarray], dtype: type[np.generic], *, width: tuple[int, ...] = ()
) -> np.ndarray:
    return np.concatenate(parts, dtype=dtype) if parts else np.zeros((0, *width), dtype)


def _routing(sequences: Sequence[TrainSequence]) -> np.ndarray | None:
    """Return [T, num_layers, topk] of the smallest type; each sequence gets a row of zeros at its
    end."""
    parts = []
    for sequence in sequences:
        if sequence.routed_experts is None:
            return None
        rows = sequence.routed_experts
        assert len(rows) == len(sequence.token_ids) - 1, (len(rows), len(sequence.token_ids))
        parts += [rows, np.zeros((1, *rows.shape[1:]), rows.dtype)]
    if not parts:
        return None
    largest = max(int(part.max(initial=0)) for part in parts)
    narrow = next(t for t in (np.uint8, np.uint16) if largest <= np.iinfo(t).max)
    return np.concatenate(parts, dtype=narrow, casting="unsafe")


def _distribute_update(
    members: Sequence[int],
    sequences: Sequence[TrainSequence | SequenceOutline],
    *,
    dp: int,
    cap: int,
    by_group: bool,
) -> Update:
    """Distribute the sequences in `members` over ranks and microbatches, units together.
    `by_group`: neighbours of a group that fit into a microbatch are a unit, too."""
    positions = [sequence.num_tokens - 1 for sequence in sequences]
    if not by_group and all(sequences[number].unit is None for number in members):
        lengths = [positions[number] for number in members]
        return [
            [sorted([members[index] for index in bin_]) for bin_ in bins]
            for bins in distribute(lengths, num_ranks=dp, cap=cap)
        ]
    units: dict[object, list[int]] = {}
    for number in members:
        unit, group = sequences[number].unit, sequences[number].group
        name = ("alone", number) if unit is None else unit
        if unit is None and by_group:
            name = ("group", group)
            if sum(positions[other] for other in units.get(name, ())) + positions[number] > cap:
                units["full", group, number] = units.pop(name, [])
        units.setdefault(name, []).append(number)
    parts = [part for part in units.values() if part]
    lengths = [sum([positions[number] for number in part]) for part in parts]
    return [
        [sorted([number for index in bin_ for number in parts[index]]) for bin_ in bins]
        for bins in distribute(lengths, num_ranks=dp, cap=cap)
    ]

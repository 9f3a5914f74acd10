"""Several sources of prompts (`data.mix`) as one, by weights or quotas. (seed, position) fixes
which source each prompt comes from, and the position is the whole state. `load_mix` loads the
sources."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from milescli.core.errors import DataError
from milescli.core.types import Prompt
from milescli.data.file_prompts import FilePrompts, OrderedPrompts, random_bits
from milescli.data.prompt_source import (
    LoadedPrompts,
    ReportProgress,
    SourceReport,
    load_source,
    percentiles,
)
from milescli.data.tokenizer import ChatTokenizer
from milescli.recipe.data import Data, MixSource

CYCLE = 10_000
"""Positions over which weights are exact: the smallest share is one of these."""


class MixedPrompts(OrderedPrompts):
    """Yields the prompts of several sources. Each pass of `sum(counts)` positions has `counts[n]`
    prompts of source n, evenly spread with a jitter. Each source continues where the previous pass
    stopped, epoch by epoch."""

    def __init__(self, parts: Sequence[FilePrompts], counts: Sequence[int], *, seed: int) -> None:
        assert len(parts) == len(counts) and all(counts), counts
        super().__init__()
        self.parts = parts
        self._counts = counts
        self._seed = seed
        self._pass = -1
        self._order = self._ranks = array("q")
        """[positions of a pass] the source at each, and how many prompts of it come before."""

    def __len__(self) -> int:
        """Return the number of rows of all sources."""
        return sum(map(len, self.parts))

    @property
    def rows_per_pass(self) -> int:
        """Return a number of consecutive positions in which every prompt occurs."""
        return len(self) + sum(self._counts)

    @property
    def num_skipped(self) -> int:
        """Return the number of prompts that this process skipped because they are too long."""
        return sum(part.num_skipped for part in self.parts)

    def first(self, count: int | None = None) -> list[Prompt]:
        """Return the first `count` prompts that are short enough, source by source; None: all."""
        prompts: list[Prompt] = []
        for part in self.parts:
            prompts += part.first(None if count is None else count - len(prompts))
        return prompts

    def no_short_prompt_error(self) -> DataError:
        """Return the error that every prompt is too long."""
        return self.parts[0].no_short_prompt_error()

    def at(self, positions: Sequence[int]) -> list[tuple[int, Prompt | None]]:
        """Return (epoch in its source, prompt) at each position, None in place of a prompt that is
        too long."""
        places: list[list[int]] = [[] for _ in self.parts]
        owners = []
        for position in positions:
            number, local = self._place_of(position)
            owners.append(number)
            places[number].append(local)
        rows = [iter(part.at(wanted)) for part, wanted in zip(self.parts, places, strict=True)]
        return [next(rows[number]) for number in owners]

    def _place_of(self, position: int) -> tuple[int, int]:
        """Return (number of the source at a position, the position within that source)."""
        turn, offset = divmod(position, sum(self._counts))
        if turn != self._pass:
            self._order, self._ranks = interleaved(self._counts, f"{self._seed}/mix/{turn}")
            self._pass = turn
        number = self._order[offset]
        return number, turn * self._counts[number] + self._ranks[offset]


def interleaved(counts: Sequence[int], key: str) -> tuple[array[int], array[int]]:
    """Return [sum(counts)] the source's number at each place, and the number of its earlier places.
    Item j of a source with m items falls at a random point of [j / m, (j + 1) / m), so that any
    stretch has about its share of each."""
    import numpy as np

    numbers = np.repeat(np.arange(len(counts)), counts)
    ranks = np.concatenate([np.arange(count) for count in counts])
    start = hashlib.blake2b(key.encode(), digest_size=16).digest()
    jitter = (random_bits(len(ranks), start) >> np.uint64(11)) * 2.0**-53
    order = np.argsort((ranks + jitter) / np.repeat(counts, counts), kind="stable")
    return (
        array("q", numbers[order].astype(np.int64).tobytes()),
        array("q", ranks[order].astype(np.int64).tobytes()),
    )


def counts_of_weights(weights: Sequence[float], names: Sequence[str]) -> list[int]:
    """Return the number of positions of a cycle that each source gets, by largest remainders.
    Raises DataError if a source gets none."""
    exact = [weight / sum(weights) * CYCLE for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda n: (counts[n] - exact[n], n))
    for number in by_remainder[: CYCLE - sum(counts)]:
        counts[number] += 1
    if 0 in counts:
        number = counts.index(0)
        raise DataError(
            f"`{names[number]}` would contribute no prompts to the mix",
            why=f"its weight is {weights[number]:g} of {sum(weights):g}, but shares are rounded "
            f"to parts of {CYCLE}",
            fix=f"give `{names[number]}` a weight of {sum(weights) / CYCLE:g} or more",
        )
    return counts


def load_mix(
    data: Data,
    *,
    tokenizer: ChatTokenizer,
    seed: int,
    base_dir: str | Path,
    needs_label: Callable[[MixSource], bool | None],
    report_progress: ReportProgress | None = None,
) -> tuple[MixedPrompts, SourceReport]:
    """Read and check all sources, each as in `load_source`. `needs_label`: returns whether the
    reward of a source compares with a label."""
    mix = data.mix or []
    loaded: list[LoadedPrompts] = []
    first_index = 0
    for number, source in enumerate(mix):
        part = load_source(
            data_of_source(data, source),
            "prompts",
            tokenizer=tokenizer,
            seed=_seed_of(seed, number),
            base_dir=base_dir,
            needs_label=needs_label(source),
            report_progress=report_progress,
            name=source.called,
            first_index=first_index,
        )
        last = part.source.files[-1]
        first_index = last.first_index + last.last_line
        loaded.append(part)
    prompts = MixedPrompts([part.source for part in loaded], counts_of(mix), seed=seed)
    return prompts, _report(loaded, mix)


def data_of_source(data: Data, source: MixSource) -> Data:
    """Return the recipe's `data` as it applies to one source of its mix."""
    changes = {
        "prompts": source.path,
        "prompt_key": source.prompt_key or data.prompt_key,
        "label_key": source.label_key or data.label_key,
    }
    return data.model_copy(update=changes)


def counts_of(mix: Sequence[MixSource]) -> list[int]:
    """Return the number of positions of a pass that each source gets."""
    if all(source.quota is not None for source in mix):
        return [source.quota or 0 for source in mix]
    weights = [1.0 if source.weight is None else source.weight for source in mix]
    return counts_of_weights(weights, [source.called for source in mix])


def _seed_of(seed: int, number: int) -> int:
    """Return the seed of the order within a source: each source has its own."""
    digest = hashlib.blake2b(f"{seed}/source/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _report(loaded: Sequence[LoadedPrompts], mix: Sequence[MixSource]) -> SourceReport:
    """Return the report over all sources. Its hash covers their hashes and how they are mixed."""
    reports = [part.report for part in loaded]
    lengths = sorted(length for part in loaded for length in part.lengths)
    hashed = [
        f"{report.sha256} {count}" for report, count in zip(reports, counts_of(mix), strict=True)
    ]
    return replace(
        reports[0],
        path=", ".join(report.path for report in reports),
        sha256=hashlib.sha256("\n".join(hashed).encode()).hexdigest(),
        num_rows=sum(report.num_rows for report in reports),
        num_duplicates=sum(report.num_duplicates for report in reports),
        num_measured=len(lengths),
        num_dropped=sum(report.num_dropped for report in reports),
        num_demonstrations=sum(report.num_demonstrations for report in reports),
        **percentiles(lengths, "prompt_tokens"),
    )

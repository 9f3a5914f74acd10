"""Finds held-out prompts that are exactly or nearly equal to training prompts. Called before a run
starts."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from milescli.core.types import Prompt
from milescli.data.file_prompts import FilePrompts
from milescli.data.file_rows import prompt_hashes, read_places

if TYPE_CHECKING:
    from datasketch import MinHash

NEAR_ROWS = 100_000
NEAR_HELDOUT = 10_000
"""Most training prompts, and most held-out ones, in the near comparison. Of more, evenly spread
ones are compared."""
SIMILARITY = 0.8
"""Threshold of the Jaccard index of two prompts' sets of word trigrams."""
MIN_WORDS = 8
"""Shorter prompts are too similar for a meaningful comparison."""
NUM_PERMUTATIONS = 64
_WORD = re.compile(r"\w+")
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """Names one held-out prompt that is also a training prompt."""

    heldout: int
    """Index of the held-out prompt."""
    prompts: int
    """Index of the training prompt."""


def exact_leaks(
    heldout: FilePrompts, prompts: FilePrompts, *, num_heldout: int | None
) -> list[Leak]:
    """Return those of the first `num_heldout` held-out prompts that are training prompts, each with
    the first equal one. Prompts of small files are equal if their tokens and images are; those of
    large files, if their messages and images are."""
    if not prompts.is_large:
        first_indices: dict[Hashable, int] = {}
        for prompt in prompts.prompts:
            first_indices.setdefault(_key(prompt), prompt.index)
        return [
            Leak(heldout=prompt.index, prompts=first_indices[key])
            for prompt in heldout.first(num_heldout)
            if (key := _key(prompt)) in first_indices
        ]
    import numpy as np

    placed = heldout.first_with_places(num_heldout)
    wanted, rows = prompt_hashes(heldout.files), prompt_hashes(prompts.files)
    mine = wanted[[place for place, _ in placed]]
    places = np.flatnonzero(np.isin(rows, mine))
    firsts = dict(reversed([(int(rows[place]), int(place)) for place in places]))
    index_at = {
        place: file.first_index + row.index
        for file, found, good in read_places(prompts.files, sorted(firsts.values()))
        for place, row in zip(found, good, strict=True)
    }
    return [
        Leak(heldout=prompt.index, prompts=index_at[firsts[key]])
        for (_, prompt), key in zip(placed, mine.tolist(), strict=True)
        if key in firsts
    ]


def _key(prompt: Prompt) -> Hashable:
    """Return a value that is equal for equal prompts: their tokens and images; without a tokenizer,
    their messages and images."""
    if prompt.token_ids:
        return prompt.identity
    images = [image.sha256 for image in prompt.images]
    return repr((prompt.text, prompt.turns, prompt.tools, images))


def near_leaks(
    heldout: Iterable[Prompt],
    prompts: FilePrompts,
    *,
    most: int = NEAR_ROWS,
    tick: Callable[[int], None] | None = None,
) -> list[Leak]:
    """Return held-out prompts that differ from a training prompt in a few words at most, each with
    the first such one. Case and punctuation are ignored; numbers must be equal and in the same
    order, and SIMILARITY of the word trigrams must be shared. Candidates are found by MinHash and
    banding (Leskovec, Rajaraman, Ullman, Mining of Massive Datasets, chapter 3), which misses a
    few. Prompts with images are left out: their texts may be equal."""
    index = _Index((prompt.index, prompt.text) for prompt in heldout if not prompt.images)
    found: dict[int, int] = {}
    if not index.is_empty:
        for number, (place, text) in enumerate(prompts.texts(most)):
            if tick is not None:
                tick(number)
            for near in index.near(text):
                found.setdefault(near, place)
    return [Leak(heldout=place, prompts=found[place]) for place in sorted(found)]


class _Index:
    """Finds texts that are similar to a given one."""

    def __init__(self, texts: Iterable[tuple[int, str]]) -> None:
        from datasketch import MinHashLSH

        self._texts: dict[int, frozenset[str]] = {}
        self._numbers: dict[int, tuple[str, ...]] = {}
        self._by_hash = MinHashLSH(threshold=SIMILARITY, num_perm=NUM_PERMUTATIONS)
        for place, text in texts:
            if trigrams := _trigrams(text):
                self._texts[place] = trigrams
                self._numbers[place] = tuple(_NUMBER.findall(text))
                self._by_hash.insert(place, _min_hash(trigrams))
        self._all_numbers = set(self._numbers.values())
        self._all_trigrams = frozenset().union(*self._texts.values())

    @property
    def is_empty(self) -> bool:
        return not self._texts

    def near(self, text: str) -> list[int]:
        """Return the places of texts that are nearly equal to `text`."""
        numbers = tuple(_NUMBER.findall(text))
        if numbers not in self._all_numbers or not (trigrams := _trigrams(text)):
            return []
        if len(trigrams & self._all_trigrams) < SIMILARITY * len(trigrams):
            return []  # most texts share too little with all of them together
        return [
            place
            for place in self._by_hash.query(_min_hash(trigrams))
            if self._numbers[place] == numbers
            and len(trigrams & self._texts[place])
            >= SIMILARITY * len(trigrams | self._texts[place])
        ]


def _trigrams(text: str) -> frozenset[str]:
    words = _WORD.findall(text.lower())
    if len(words) < MIN_WORDS:
        return frozenset()
    return frozenset(" ".join(words[at : at + 3]) for at in range(len(words) - 2))


def _min_hash(trigrams: frozenset[str]) -> MinHash:
    from datasketch import MinHash

    made = MinHash(num_perm=NUM_PERMUTATIONS)
    made.update_batch([trigram.encode() for trigram in trigrams])
    return made

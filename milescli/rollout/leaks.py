"""Which held-out prompts are training prompts too. Called before a run starts."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from milescli.rollout.file_prompts import FilePrompts


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """One held-out prompt that is trained on."""

    heldout: int
    """Its index."""
    prompts: int
    """Index of the training prompt."""


def exact_leaks(
    heldout: FilePrompts, prompts: FilePrompts, *, num_heldout: int | None
) -> list[Leak]:
    """The first `num_heldout` held-out prompts that are there again, with the first training prompt
    that is equal: of small files, whose tokens are; of large ones, whose messages are."""
    if not prompts.is_large:
        seen: dict[tuple[int, ...], int] = {}
        for prompt in prompts.prompts:
            seen.setdefault(tuple(prompt.token_ids), prompt.index)
        return [
            Leak(heldout=prompt.index, prompts=seen[key])
            for prompt in heldout.first(num_heldout)
            if (key := tuple(prompt.token_ids)) in seen
        ]
    import numpy as np

    placed = heldout.first_placed(num_heldout)
    wanted, rows = _hashes(heldout), _hashes(prompts)
    mine = np.array([wanted[place] for place, _ in placed], np.int64)
    places = np.flatnonzero(np.isin(rows, mine))
    firsts = dict(reversed([(int(rows[place]), int(place)) for place in places]))
    return [
        Leak(heldout=prompt.index, prompts=prompts.prompts[firsts[key]].index)
        for (_, prompt), key in zip(placed, mine.tolist(), strict=True)
        if key in firsts
    ]


def _hashes(source: FilePrompts) -> array[int]:
    """[rows of all files]"""
    joined = array("q")
    for file in source.files:
        joined += file.scan.prompt_hashes
    return joined

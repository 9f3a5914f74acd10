"""Tests of several sources interleaved: shares, order, position, and whose prompt is whose."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milescli.core.errors import DataError
from milescli.core.types import Prompt
from milescli.data import prompt_source
from milescli.data.file_prompts import FilePrompts
from milescli.data.mixed_prompts import (
    CYCLE,
    MixedPrompts,
    counts_of_weights,
    interleaved,
    load_mix,
)
from milescli.data.prompt_source import SourceReport
from milescli.data.tokenizer import ChatTokenizer
from milescli.recipe.data import Data, MixSource
from milescli.rollout.rewards.scoring import Response, Scorer, SourceScorer


def _mix(*sizes_and_counts: tuple[int, int], seed: int = 0) -> MixedPrompts:
    parts = []
    for number, (size, _) in enumerate(sizes_and_counts):
        prompts = [
            Prompt(index=100 * number + row, token_ids=[0], text="?", source=str(number))
            for row in range(size)
        ]
        parts.append(FilePrompts(prompts, seed=seed + number, shuffle=True))
    return MixedPrompts(parts, [count for _, count in sizes_and_counts], seed=seed)


def _sources(taken: list[tuple[int, Prompt]]) -> list[str | None]:
    return [prompt.source for _, prompt in taken]


MIXES = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 7)), min_size=1, max_size=4)


@given(MIXES, st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_each_pass_has_what_each_source_owes_it(mix: list[tuple[int, int]], seed: int) -> None:
    mixed, length = _mix(*mix, seed=seed), sum(count for _, count in mix)
    for _ in range(3):
        counted = Counter(_sources(mixed.take(length)))
        assert counted == {str(n): count for n, (_, count) in enumerate(mix)}


@given(MIXES, st.integers(0, 60), st.integers(1, 30))
@settings(max_examples=40, deadline=None)
def test_a_position_is_the_whole_state(
    mix: list[tuple[int, int]], position: int, count: int
) -> None:
    straight, resumed = _mix(*mix), _mix(*mix)
    straight.take(position)
    resumed.seek(position)
    assert resumed.take(count) == straight.take(count)
    assert resumed.position == straight.position == position + count


@given(MIXES)
@settings(max_examples=40, deadline=None)
def test_each_source_goes_through_its_rows_epoch_by_epoch(mix: list[tuple[int, int]]) -> None:
    taken = _mix(*mix).take(5 * sum(count for _, count in mix))
    for number, (size, count) in enumerate(mix):
        own = [(epoch, p.index) for epoch, p in taken if p.source == str(number)]
        assert [epoch for epoch, _ in own] == [n // size for n in range(5 * count)]
        assert len(set(own)) == len(own)


def test_any_stretch_has_about_its_share_of_each_source() -> None:
    counts = counts_of_weights([3.0, 1.0], ["a", "b"])
    order, ranks = interleaved(counts, "0")
    assert counts == [7500, 2500] and len(order) == CYCLE
    for start in range(0, CYCLE, 32):
        stretch = order[start : start + 32]
        assert abs(sum(number == 0 for number in stretch) - 0.75 * len(stretch)) <= 4
    for number, count in enumerate(counts):
        assert [r for r, n in zip(ranks, order, strict=True) if n == number] == [*range(count)]
    assert interleaved(counts, "1")[0] != order


def test_a_share_too_small_to_count_is_refused() -> None:
    assert sum(counts_of_weights([1.0] * 3, ["a", "b", "c"])) == CYCLE
    with pytest.raises(DataError, match="`b` would contribute no prompts"):
        counts_of_weights([1.0, 1e-6], ["a", "b"])


@pytest.fixture
def load(
    tokenizer: ChatTokenizer, tmp_path: Path
) -> Callable[..., tuple[MixedPrompts, SourceReport]]:
    def call(*mix: MixSource, **data: object) -> tuple[MixedPrompts, SourceReport]:
        return load_mix(
            Data(mix=list(mix), **data),  # type: ignore[arg-type]
            tokenizer=tokenizer,
            seed=0,
            base_dir=tmp_path,
            needs_label=lambda source: source.reward is None,
        )

    return call


@pytest.mark.parametrize("most", [100, 2], ids=["small", "large"])
def test_files_with_columns_and_rewards_of_their_own_are_mixed(
    load: Callable[..., tuple[MixedPrompts, SourceReport]],
    jsonl: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    most: int,
) -> None:
    monkeypatch.setattr(prompt_source, "LARGE_ROWS", most)
    jsonl(*({"q": f"a{n}", "a": str(n)} for n in range(6)), name="a.jsonl")
    jsonl(*({"prompt": f"{'7' * 200 if n == 1 else n}"} for n in range(4)), name="b.jsonl")
    mixed, report = load(
        MixSource(path="a.jsonl", quota=3, prompt_key="q", label_key="a", name="sums"),
        MixSource(path="b.jsonl", quota=2, reward="mine:reward"),
        max_prompt_tokens=100,
    )
    taken = mixed.take(20)
    counted = Counter(_sources(taken))
    assert set(counted) == {"sums", "b.jsonl"} and counted["sums"] >= 12
    assert {p.index for _, p in taken} == {0, 1, 2, 3, 4, 5, 6, 8, 9}, "the long one is left out"
    assert {p.label for _, p in taken if p.source == "b.jsonl"} == {None}
    assert (report.num_rows, report.num_dropped) == (10, 1)
    again, _ = load(
        MixSource(path="a.jsonl", quota=3, prompt_key="q", label_key="a", name="sums"),
        MixSource(path="b.jsonl", quota=2, reward="mine:reward"),
        max_prompt_tokens=100,
    )
    again.take(7)
    resumed = MixedPrompts(again.parts, [3, 2], seed=0)
    resumed.seek(again.position)
    assert again.take(13) == taken[7:] == resumed.take(13)


def test_prompts_are_scored_by_the_reward_of_their_source() -> None:
    def reward_of(value: float) -> Callable[..., float]:
        return lambda *, prompt, response, label: value

    own = Scorer(reward_of(2.0), name="own", timeout_s=120.0)
    scorer = SourceScorer(Scorer(reward_of(1.0), name="default", timeout_s=120.0), {"b": own})
    response = Response(text="x")

    async def scores() -> list[float]:
        prompts = [Prompt(index=0, token_ids=[], text="?", source=s) for s in (None, "a", "b")]
        asked = [await scorer.score_response(prompt, response) for prompt in prompts]
        grouped = [await scorer.score_responses(prompt, [response]) for prompt in prompts]
        assert [score for (score,) in grouped] == asked
        return [score.reward for score in asked]

    assert asyncio.run(scores()) == [1.0, 1.0, 2.0]

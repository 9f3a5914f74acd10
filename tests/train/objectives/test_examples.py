"""The algorithm of docs/examples, by its formula. That it trains is shown in tests/end_to_end."""

from __future__ import annotations

from pathlib import Path

import pytest

from milescli.recipe.schema import Recipe
from milescli.train.objectives import load_objective
from milescli.train.packing import pack
from milescli.train.streams import Stream
from tests.samples import make_group, make_sample, make_trajectory

EXAMPLES = Path(__file__).resolve().parents[3] / "docs" / "examples"


def test_an_algorithm_of_a_newcomer_is_one_short_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    assert len((EXAMPLES / "rloo_dr_grpo.py").read_text().splitlines()) <= 40
    recipe = Recipe.model_validate({"rollout": {"max_response_tokens": 10}})
    objective = load_objective("rloo_dr_grpo:objective", recipe)
    lengths, rewards = (2, 5, 3), (1.0, 0.0, 0.5)
    group = make_group(
        [
            make_sample(make_trajectory([1], [2] * length), reward=reward, index=index)
            for index, (length, reward) in enumerate(zip(lengths, rewards, strict=True))
        ]
    )
    sequences = objective.sequences([group])
    advantages = [float(sequence.streams[Stream.ADVANTAGE][-1]) for sequence in sequences]
    assert advantages == pytest.approx([0.75, -0.75, 0.0])
    name = "rloo_dr_grpo:objective"
    (shard,) = pack(sequences, objective=name, dp=1, max_tokens_per_microbatch=64).shards
    assert shard.loss_weights.tolist() == pytest.approx([1 / (3 * 10)] * 3)

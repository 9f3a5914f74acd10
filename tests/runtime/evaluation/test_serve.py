"""How a request to `miles serve` is sampled."""

from __future__ import annotations

from typing import Any

import pytest

from milescli.rollout.base import GenerateRequest
from milescli.runtime.evaluation.serve import serve_settings, with_request_sampling

USUAL = GenerateRequest(prompt_ids=(), max_new_tokens=7, temperature=0.5, stop=["."])


def test_a_request_decides_how_it_is_sampled() -> None:
    assert with_request_sampling(USUAL, {}) == USUAL
    sampled = with_request_sampling(USUAL, {"temperature": 0, "top_p": 0.9, "top_k": 3, "seed": 1})
    assert (sampled.temperature, sampled.top_p, sampled.top_k) == (0, 0.9, 3)
    assert (sampled.max_new_tokens, sampled.stop) == (7, ["."])
    assert with_request_sampling(USUAL, {"presence_penalty": 0.0, "repetition_penalty": 1}) == USUAL


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_k", 0),
        ("top_k", 1.5),
        ("seed", True),
        ("seed", -1),
        ("min_p", 0.1),
        ("frequency_penalty", 1),
    ],
)
def test_what_cannot_be_sampled_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"`{name}`"):
        with_request_sampling(USUAL, {name: value})


def test_stop_strings_of_the_recipe_stay() -> None:
    own = serve_settings(tokens=9, has_stop=True)
    assert not any(setting.startswith("rollout.stop=") for setting in own)
    assert {"rollout.max_turn_tokens=9", "eval.max_response_tokens=9"} <= set(own)
    assert any(one.startswith("rollout.stop=") for one in serve_settings(tokens=9, has_stop=False))

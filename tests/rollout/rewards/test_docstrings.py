"""The examples in the docstrings of rewards, which docs/rewards.md shows, are true."""

from __future__ import annotations

import asyncio
import doctest
import inspect
from functools import partial
from typing import Any

import pytest

from milescli.core.plug_points import REWARDS
from milescli.recipe.schema import Rollout
from milescli.rollout.rewards import load_rewards

ELSEWHERE = {"judge", "remote", "reward_model", "reasoning_gym"}
"""A server, a model or a library scores, whose answers are no business of ours."""
BUILTIN = [name for name in REWARDS.builtin if name not in ELSEWHERE]


def score(
    name: str,
    *,
    response: str = "",
    label: str | None = None,
    num_tokens: int | None = None,
    **settings: Any,
) -> float:
    """The score of one response. `settings`: sections of `rollout`."""
    [reward] = load_rewards(Rollout(reward=name, **settings)).values()
    counted = {} if num_tokens is None else {"num_tokens": num_tokens}
    scored = reward(prompt="", response=response, label=label, **counted)  # type: ignore[operator]
    return asyncio.run(scored) if inspect.iscoroutine(scored) else scored


@pytest.mark.parametrize("name", BUILTIN)
def test_examples_are_true_and_show_what_is_right_and_what_is_not(name: str) -> None:
    reward = REWARDS.resolve(name)
    doc = inspect.getdoc(reward if inspect.isroutine(reward) else type(reward)) or ""
    examples = doctest.DocTestParser().get_doctest(
        doc, {"score": partial(score, name)}, name, None, 0
    )
    said: list[str] = []
    ended = doctest.DocTestRunner(verbose=False).run(examples, out=said.append)
    assert ended.attempted and not ended.failed, "".join(said)
    scores = {one.want.strip() for one in examples.examples}
    assert not getattr(reward, "needs_label", False) or scores >= {"1.0", "0.0"}
